"""Block tables: where the tokens of one sequence lie in the pool (paper section 4.3)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, overload

from octavo.errors import IntegrityError
from octavo.kv.needs import num_behind
from octavo.kv.node import Node, RootName

if TYPE_CHECKING:
    from octavo.kv.policy import SeqDemand
    from octavo.kv.usage import RequestAccount

NO_BLOCK = -1
"""In place of a block's number in a table: the entry holds nothing."""


class TableView(Sequence[int]):
    """A read-only window on a table's block ids; it follows later changes."""

    __slots__ = ("_block_ids",)

    def __init__(self, block_ids: list[int]) -> None:
        self._block_ids = block_ids

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._block_ids[index]

    def __len__(self) -> int:
        return len(self._block_ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self._block_ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(other) == self._block_ids

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"TableView({self._block_ids})"


class BlockTable:
    """The blocks of one sequence, in the order of its tokens, and how far they are filled.

    Append-only: an entry changes only by `replace` (copy-on-write), and all entries go together
    when the sequence ends; but of layers with a window the first ones go as it grows (`drop`).
    Policies write it; everybody else reads.

    Where layers are in several groups (`octavo.kv_groups`) a sequence has a table for each. That of
    the first group speaks for all and has the `others`: they are of one length, and hold the same
    tokens.
    """

    __slots__ = (
        "account",
        "block_ids",
        "block_size",
        "capacity",
        "demand",
        "exclusive_from",
        "group",
        "last_node",
        "max_total_tokens",
        "may_share",
        "next_register",
        "num_asked",
        "num_committed",
        "num_dropped",
        "num_registered",
        "num_reported",
        "others",
        "root_name",
        "seq_id",
        "token_ids",
        "window",
    )

    def __init__(
        self,
        seq_id: int,
        demand: SeqDemand,
        block_size: int,
        account: RequestAccount,
        windows: Sequence[int] = (0,),
        group: int = 0,
    ) -> None:
        self.seq_id = seq_id
        self.group = group
        self.window = windows[group]
        """Tokens that its layers look back; 0: all."""
        self.others: tuple[BlockTable, ...] = ()
        """The tables of the further groups; only of group 0's."""
        if not group and len(windows) > 1:
            self.others = tuple(
                BlockTable(seq_id, demand, block_size, account, windows, other)
                for other in range(1, len(windows))
            )
        self.demand = demand
        self.block_size = block_size
        self.account = account
        self.block_ids: list[int] = []
        """The first `num_dropped` are `NO_BLOCK`."""
        self.num_dropped = 0
        """Its first entries, which hold nothing: they are behind the window."""
        self.capacity = 0
        """Slots in the table."""
        self.num_committed = 0
        """Tokens whose KV is in the pool, or will be once the planned step ran."""
        self.max_total_tokens = demand.max_total_tokens
        """Most tokens it may still come to hold."""
        self.num_asked = sys.maxsize
        """Tokens that the policy set aside on purpose: slots behind them are rounding. Beyond every
        length where blocks are taken on demand."""
        self.exclusive_from = sys.maxsize
        """Positions from here on are known to lie in blocks that nobody else has, behind what the
        prefix tree knows of them. Beyond every position as long as the runner has not been told of
        the first blocks."""
        self.num_reported = 0
        """Entries the runner knows."""
        self.may_share = False
        """Whether a block that is not full may have other owners; True is a guess, False is
        certain."""
        self.token_ids: Sequence[int] = demand.token_ids
        """The sequence's own, growing list; empty if it is not known."""
        self.root_name: RootName = ("", "")
        """Under which root of the prefix tree its blocks are."""
        self.last_node: Node | None = None
        """The node of its last block in the prefix tree; None before the first."""
        self.num_registered = 0
        """Its first blocks, all full, that have a node: this block's own or an equal one's."""
        self.next_register = sys.maxsize
        """Tokens with which the next block has to be registered; beyond every length where nothing
        is registered (any more)."""

    def __repr__(self) -> str:
        return f"BlockTable(seq_id={self.seq_id}, block_ids={self.block_ids})"

    def is_ready(self, num_tokens: int, num_computed: int) -> bool:
        """Whether `num_tokens` fit and all from `num_computed` on may be written as it is."""
        return num_tokens <= self.capacity and num_computed >= self.exclusive_from

    def append(self, block_ids: Sequence[int]) -> None:
        """Add blocks at the end."""
        self.block_ids.extend(block_ids)
        self.capacity = len(self.block_ids) * self.block_size

    def replace(self, index: int, block_id: int) -> tuple[int, int] | None:
        """Set one entry (copy-on-write); returns what the runner must be told, if it knows it."""
        self.account.replace(self.block_ids[index], block_id, self.group)
        self.block_ids[index] = block_id
        return (index, block_id) if index < self.num_reported else None

    def report(self) -> tuple[int, ...]:
        """The entries the runner does not know yet; from now on it does."""
        new_block_ids = tuple(self.block_ids[self.num_reported :])
        self.num_reported = len(self.block_ids)
        return new_block_ids

    def parts(self) -> tuple[BlockTable, ...]:
        """It, and the tables of the other groups."""
        return (self, *self.others)

    def align(self) -> None:
        """Its own `exclusive_from` speaks for the other groups' too."""
        for part in self.others:
            self.exclusive_from = max(self.exclusive_from, part.exclusive_from)

    @property
    def held(self) -> list[int]:
        """Its blocks: those that are not behind the window."""
        return self.block_ids[self.num_dropped :] if self.num_dropped else self.block_ids

    def num_behind(self, num_tokens: int) -> int:
        """Its first entries that nobody needs who computes from position `num_tokens` on."""
        return num_behind(num_tokens, self.window, self.block_size)

    def skip(self, num_entries: int) -> None:
        """Begin with so many entries that hold nothing; of an empty table."""
        assert not self.block_ids, f"{self!r} is not empty"
        self.num_dropped = num_entries
        self.append([NO_BLOCK] * num_entries)

    def drop(self, num_entries: int) -> list[int]:
        """Its first so many entries hold nothing from now on; returns the blocks that were
        there, which are to be released."""
        first, self.num_dropped = self.num_dropped, num_entries
        dropped = self.block_ids[first:num_entries]
        self.block_ids[first:num_entries] = [NO_BLOCK] * len(dropped)
        return dropped

    def mark_shared(self, num_tokens: int) -> None:
        """Others own the blocks of the first `num_tokens` tokens too, from now on."""
        end = -(-num_tokens // self.block_size) * self.block_size
        self.exclusive_from = max(self.exclusive_from, end)
        self.may_share = True

    def slot(self, position: int) -> int:
        """Slot of a position: `block_id * block_size + offset`. Refuses positions without block."""
        if not 0 <= position < self.capacity:
            raise IntegrityError(
                f"sequence {self.seq_id} has no slot for position {position}: its "
                f"{len(self.block_ids)} blocks of {self.block_size} tokens hold 0 to "
                f"{self.capacity - 1}"
            )
        index, offset = divmod(position, self.block_size)
        if index < self.num_dropped:
            raise IntegrityError(
                f"sequence {self.seq_id} has no slot for position {position}: it is behind the "
                f"window of {self.window} tokens, and was given back"
            )
        return self.block_ids[index] * self.block_size + offset

    @property
    def fillable(self) -> int:
        """Its first slots that hold a token or still may."""
        most = min(self.max_total_tokens, self.num_asked, self.capacity)
        return max(self.num_committed, most)

    @property
    def num_wanted(self) -> int:
        """Its first slots that were of use, if it ends now: those filled, and the one that was kept
        for its last token, which is sampled but never computed."""
        return self.num_committed + (len(self.token_ids) == self.num_committed + 1)

    def end(self) -> None:
        """Its sequence is over, though it may keep its blocks until a batch has ended."""
        for part in self.parts():
            part.num_committed = part.max_total_tokens = 0

    def clear(self) -> None:
        """Empty it: its blocks were given back."""
        for part in self.parts():
            part.block_ids.clear()
            part.capacity = part.num_committed = part.num_reported = part.num_dropped = 0
