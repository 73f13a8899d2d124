"""What each request costs: peak blocks, block-seconds, tokens held together with others."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.errors import IntegrityError
from octavo.kv.table import BlockTable
from octavo.outputs import PrefixMiss, RequestKVUsage


class RequestAccount:
    """The blocks of all sequences of one request, each block counted once, over time.

    It outlives preemptions: a request that gives all blocks back and starts again goes on here.
    """

    __slots__ = (
        "_block_seconds",
        "_entries",
        "_peak_blocks",
        "_peak_shared_tokens",
        "_shared_tokens",
        "_since_s",
        "_tail_tokens",
        "block_size",
        "cached_tokens",
        "forked_tokens",
        "has_started",
        "misses",
        "request_id",
        "resumed_tokens",
        "tables",
    )

    def __init__(self, request_id: str, block_size: int, now_s: float) -> None:
        self.request_id = request_id
        self.block_size = block_size
        self.tables: list[BlockTable] = []
        """Tables of its sequences that hold blocks, deferred ones included; of all groups."""
        self._entries: dict[int, int] = {}
        """By block: how many of this request's table entries point at it."""
        self._tail_tokens: dict[int, int] = {}
        """Token states in the shared blocks that are not full."""
        self._shared_tokens = 0
        """In the blocks of the first group of layers, so that a token counts once."""
        self._peak_shared_tokens = 0
        self._peak_blocks = 0
        self._block_seconds = 0.0
        self._since_s = now_s
        self.has_started = False
        """Whether one of its sequences has looked for a prefix."""
        self.cached_tokens = self.resumed_tokens = self.forked_tokens = 0
        self.misses: tuple[PrefixMiss, ...] = ()

    @property
    def num_blocks(self) -> int:
        """Physical blocks its sequences reference now."""
        return len(self._entries)

    def block_seconds(self, now_s: float) -> float:
        """Blocks times seconds until now; changes nothing."""
        return self._block_seconds + len(self._entries) * max(0.0, now_s - self._since_s)

    def usage(self, now_s: float) -> RequestKVUsage:
        """The cost until now."""
        self.settle(now_s)
        return RequestKVUsage(  # by position: at half the time, for each output of each step
            self._peak_blocks,
            self._block_seconds,
            self._peak_shared_tokens,
            self.cached_tokens,
            self.resumed_tokens,
            self.forked_tokens,
            self.misses,
        )

    def entries_of(self, block_id: int) -> int:
        """How many of its table entries point at a block."""
        return self._entries.get(block_id, 0)

    def rename(self, moves: dict[int, int]) -> None:
        """Blocks have other ids, by the old one."""
        self._entries = {moves.get(i, i): num for i, num in self._entries.items()}
        self._tail_tokens = {moves.get(i, i): num for i, num in self._tail_tokens.items()}

    def settle(self, now_s: float) -> None:
        """Add the block-seconds since the last change; called before every change."""
        self._block_seconds += len(self._entries) * (now_s - self._since_s)
        self._since_s = now_s

    def open(self, table: BlockTable, now_s: float) -> None:
        """A sequence of this request begins with what is in its table."""
        self.settle(now_s)
        self.tables.append(table)
        self._count(table.held, table.group)
        num_full, num_tail = divmod(table.num_committed, self.block_size)
        if num_tail and not table.group:
            block_id = table.block_ids[num_full]
            if self._entries[block_id] == 2:
                self._tail_tokens[block_id] = num_tail
                self._shared_tokens -= self.block_size - num_tail
        self._note_peaks()

    def close(self, table: BlockTable, now_s: float) -> None:
        """A sequence of this request gave its blocks back."""
        self.settle(now_s)
        self.tables.remove(table)
        self.remove(table.held, table.group)

    def add(self, block_ids: Iterable[int], group: int) -> None:
        """Table entries of a group of layers that point at these blocks were added."""
        self._count(block_ids, group)
        self._note_peaks()

    def add_own(self, block_id: int, now_s: float) -> None:
        """The same as `settle` and `add`, for one block that no other entry points at."""
        entries = self._entries
        self._block_seconds += len(entries) * (now_s - self._since_s)
        self._since_s = now_s
        entries[block_id] = 1
        if len(entries) > self._peak_blocks:
            self._peak_blocks = len(entries)

    def remove(self, block_ids: Iterable[int], group: int) -> None:
        """Table entries of a group of layers that pointed at these blocks are gone."""
        entries = self._entries
        for block_id in block_ids:
            count = entries[block_id] - 1
            if count:
                entries[block_id] = count
            else:
                del entries[block_id]
            if count == 1 and not group:
                self._shared_tokens -= self._tail_tokens.pop(block_id, self.block_size)

    def replace(self, old_id: int, new_id: int, group: int) -> None:
        """One table entry points at another block; `settle` was called."""
        self.remove((old_id,), group)
        self.add((new_id,), group)

    def _count(self, block_ids: Iterable[int], group: int) -> None:
        entries = self._entries
        for block_id in block_ids:
            count = entries.get(block_id, 0)
            entries[block_id] = count + 1
            if count == 1 and not group:
                self._shared_tokens += self.block_size

    def _note_peaks(self) -> None:
        self._peak_blocks = max(self._peak_blocks, len(self._entries))
        self._peak_shared_tokens = max(self._peak_shared_tokens, self._shared_tokens)

    def check_integrity(self, request_id: str) -> None:
        """Raise `IntegrityError` where the account differs from the tables."""
        expected: dict[int, int] = {}
        filled: dict[int, int] = {}
        for table in self.tables:
            for index, block_id in enumerate(table.held, table.num_dropped):
                expected[block_id] = expected.get(block_id, 0) + 1
                num = min(table.num_committed - index * self.block_size, self.block_size)
                filled[block_id] = max(num, filled.get(block_id, 0))
        for block_id in sorted(expected.keys() | self._entries.keys()):
            want, have = expected.get(block_id, 0), self._entries.get(block_id, 0)
            if want != have:
                raise IntegrityError(
                    f"request {request_id!r} counts {have} table entries for block {block_id}, "
                    f"expected {want}"
                )
        first = {i for table in self.tables if not table.group for i in table.held}
        shared_tokens = sum(filled[block_id] for block_id in first if expected[block_id] > 1)
        if shared_tokens != self._shared_tokens:
            raise IntegrityError(
                f"request {request_id!r} counts {self._shared_tokens} shared tokens, expected "
                f"{shared_tokens}"
            )
