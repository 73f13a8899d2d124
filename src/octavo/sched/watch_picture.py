"""The picture of a pool: of each block its state, owner, owners' number and fill, as it changes."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from operator import attrgetter

from octavo.kv.manager import KVCacheManager
from octavo.kv.pool import Journal
from octavo.kv.table import BlockTable

FREE, CACHED, USED, EXTERNAL = range(4)
"""USED with no reference: set aside for a fork. CACHED with references: pinned only. EXTERNAL: free
and in a piece too small for what was refused last."""

Number = Callable[[str], int]
"""The number of a request, by its id."""
_START = attrgetter("start")


class _Seen:
    """A table as it was at the last look."""

    __slots__ = ("num_committed", "num_entries")

    def __init__(self) -> None:
        self.num_entries = self.num_committed = 0


class Picture:
    """Four lists by block id, brought up to date in time proportional to what has changed.

    The owner of a block is the request of the first table, in the order of their starts, that has
    it; its fill is what its fullest owner says, as in the ledger.
    """

    def __init__(self, kv: KVCacheManager) -> None:
        """Attaches the journal: one picture a pool, until `close`. Empty before `update`."""
        self._kv, self._pool = kv, kv.pool
        assert self._pool.journal is None, "the pool is watched already"
        self._journal = self._pool.journal = Journal()
        self._begin()
        self._journal.was_resized = True  # as if: all is read anew

    def _begin(self) -> None:
        num_blocks = self._kv.num_blocks
        self.state = [FREE] * num_blocks
        self.owner = [-1] * num_blocks
        self.refs = [0] * num_blocks
        self.fill = [0] * num_blocks
        self.shared: set[int] = set()
        """Blocks in several tables."""
        self._first: list[BlockTable | None] = [None] * num_blocks
        self._index = [0] * num_blocks
        """Of the first table that has it, and where in it."""
        self._seen: dict[BlockTable, _Seen] = {}
        self._external: list[range] = []
        self._promised: dict[tuple[int, range], str] = {}
        self._journal.was_resized = False
        self._journal.changed = {i for i, node in enumerate(self._pool.nodes) if node is not None}
        self._journal.changed.update(self._pool.pins)

    def _fill_in(self, tables: Iterable[BlockTable], number: Number) -> None:
        """The first look: whole blocks that one table has, many at a time. What is left, and what
        is not so simple, is to be looked at one by one."""
        counts, size, changed = self._pool.ref_counts, self._pool.block_size, self._journal.changed
        state, owners, refs, fill = self.state, self.owner, self.refs, self.fill
        first, at, has_pins = self._first, self._index, bool(self._pool.pins)
        for table in tables:
            seen = self._seen[table] = _Seen()
            block_ids = table.block_ids
            seen.num_entries, seen.num_committed = len(block_ids), table.num_committed
            num_full = table.num_committed // size
            owner = number(table.account.request_id)
            for index, block_id in enumerate(table.held, table.num_dropped):
                if first[block_id] is not None:  # others have it too
                    continue
                first[block_id], at[block_id] = table, index
                state[block_id], owners[block_id] = USED, owner
                refs[block_id] = num = counts[block_id]
                if index < num_full and num == 1:
                    fill[block_id] = size
                    changed.discard(block_id)
                elif num > 1 or index == num_full:
                    changed.add(block_id)
            if has_pins:
                changed.update(table.held)

    def close(self) -> None:
        """Nobody looks any more: changes are not written down."""
        self._pool.journal = None

    def update(self, number: Number) -> tuple[list[int], bool, bool]:
        """Bring it up to date. Returns the blocks that look different now, in order; whether all
        were read anew, as blocks have other ids; and whether `shared` has other members."""
        was_resized = self._journal.was_resized
        tables = self._kv.tables()
        if was_resized:
            self._begin()
            self._fill_in(tables, number)
        changed, self._journal.changed = self._journal.changed, set()
        holders = self._scan_tables(tables, changed)
        self._scan_runs(tables, changed)
        self._find_first(tables, changed, holders)
        partial = self._partial_views(tables)
        different, has_moved = self._look(changed, number, partial)
        return different, was_resized, has_moved

    def groups(self) -> list[list[int]]:
        """Of each group of layers how many blocks it has in tables, each counted once; and how many
        it has given back of those who run, as they are behind its window. As of the last look."""
        counts = [[0, 0] for _ in self._kv.windows]
        for table in self._kv.tables():
            one = counts[table.group]
            one[0] += len(table.block_ids) - table.num_dropped
            one[1] += table.num_dropped
        pins = self._pool.pins
        for block_id in self.shared:
            first = self._first[block_id]
            assert first is not None, "what is shared is in tables"
            counts[first.group][0] -= self.refs[block_id] - pins.get(block_id, 0) - 1
        return counts

    # -- what may have changed

    def _scan_tables(
        self, tables: Iterable[BlockTable], changed: set[int]
    ) -> dict[int, tuple[BlockTable, int, int]]:
        """Add blocks whose table or fill has changed to `changed`. Returns, of the blocks looked
        at, the first table among those that changed, the index in it, and how many have it."""
        seen, present = self._seen, {}
        holders: dict[int, tuple[BlockTable, int, int]] = {}
        size = self._pool.block_size
        for table in tables:
            was = seen.get(table)
            if was is None:
                was = _Seen()
                first = 0
            else:
                first = was.num_entries
            present[table] = was
            num_entries, committed = len(table.block_ids), table.num_committed
            if first == num_entries and was.num_committed == committed:
                continue
            low, high = was.num_committed, committed
            if low > high:
                low, high = high, low
            # the block before: a copy may have taken its place
            begin = max(0, low // size - 1)
            end = min(num_entries, high // size + 1)
            first = max(0, first - 1)
            spans: tuple[range, ...] = (range(begin, end), range(first, num_entries))
            if first <= end:
                spans = (range(min(begin, first), num_entries),)
            block_ids = table.block_ids
            for span in spans:
                for index in span:
                    block_id = block_ids[index]
                    if block_id < 0:  # behind the window
                        continue
                    held = holders.get(block_id)
                    if held is None:
                        holders[block_id] = table, index, 1
                    elif held[0] is not table:
                        holders[block_id] = held[0], held[1], held[2] + 1
            was.num_entries, was.num_committed = num_entries, committed
        self._seen = present
        changed.update(holders)
        return holders

    def _scan_runs(self, tables: Iterable[BlockTable], changed: set[int]) -> None:
        """Of policies that reserve: free blocks that are not, and those that are promised."""
        policy = self._kv.policy
        external, promised = policy.external_runs, policy.promised_runs
        if not external and not promised and not self._external and not self._promised:
            return
        for run in set(external).symmetric_difference(self._external):
            changed.update(run)
        self._external = sorted(external, key=_START)
        owners = {table.seq_id: table.account.request_id for table in tables}
        promises = {(run.start, run): owners[seq_id] for seq_id, run in promised}
        for run_key in {*promises.items()} ^ {*self._promised.items()}:
            changed.update(run_key[0][1])
        self._promised = promises

    def _find_first(
        self,
        tables: Iterable[BlockTable],
        changed: set[int],
        holders: dict[int, tuple[BlockTable, int, int]],
    ) -> None:
        """Set the first table of each block that may have another one than before."""
        counts, pins = self._pool.ref_counts, self._pool.pins
        first, at = self._first, self._index
        wanted: set[int] = set()
        for block_id in changed:
            num = counts[block_id] - pins.get(block_id, 0) if pins else counts[block_id]
            if not num:
                first[block_id] = None
                continue
            table = first[block_id]
            if table is not None:
                index, block_ids = at[block_id], table.block_ids
                if index < len(block_ids) and block_ids[index] == block_id:
                    continue  # who has it keeps it, and comes before all that got it later
            held = holders.get(block_id)
            if held is not None and held[2] == num:
                first[block_id], at[block_id] = held[0], held[1]
            else:
                wanted.add(block_id)
        if not wanted:
            return
        for table in tables:
            for block_id in wanted.intersection(table.block_ids):
                first[block_id], at[block_id] = table, table.block_ids.index(block_id)
                wanted.remove(block_id)
            if not wanted:
                return
        raise AssertionError(f"blocks {sorted(wanted)} have owners, and no table has them")

    def _partial_views(self, tables: Iterable[BlockTable]) -> dict[int, tuple[int, int]]:
        """Of blocks that several may have and that are not full for all: the most that one of those
        sees in it that do not see it full, and how many these are."""
        views: dict[int, tuple[int, int]] = {}
        size = self._pool.block_size
        for table in tables:
            if table.may_share:
                num_full, num_tail = divmod(table.num_committed, size)
                for index in range(num_full, len(table.block_ids)):
                    filled = num_tail if index == num_full else 0
                    most, num = views.get(table.block_ids[index], (0, 0))
                    views[table.block_ids[index]] = max(most, filled), num + 1
        return views

    # -- the blocks

    def _look(
        self, changed: Iterable[int], number: Number, partial: dict[int, tuple[int, int]]
    ) -> tuple[list[int], bool]:
        """Look at blocks again. Returns those that are different, in order, and whether one is
        shared now that was not, or the other way. Written for speed."""
        pool, size = self._pool, self._pool.block_size
        counts, pins, nodes = pool.ref_counts, pool.pins, pool.nodes
        states, owners, all_refs, fills = self.state, self.owner, self.refs, self.fill
        first, at, shared = self._first, self._index, self.shared
        has_runs = bool(self._external or self._promised)
        numbers: dict[str, int] = {}
        different, has_moved = [], False
        for block_id in changed:
            num = refs = counts[block_id]
            if pins:
                num -= pins.get(block_id, 0)
            owner, fill = -1, 0
            table = first[block_id]
            if num and table is not None:
                request_id = table.account.request_id
                known = numbers.get(request_id)
                owner = numbers[request_id] = number(request_id) if known is None else known
                state, fill = USED, table.num_committed - at[block_id] * size
                if fill > size:
                    fill = size
                elif fill < 0:
                    fill = 0
                if num > 1 and fill < size:
                    most, num_seen = partial.get(block_id, (0, 0))
                    fill = size if num_seen < num else max(fill, most)
            elif (node := nodes[block_id]) is not None or refs:
                state, fill = CACHED, size if node is None else node.num_tokens
            elif has_runs:
                state, owner = self._of_free(block_id, number)
            else:
                state = FREE
            if (num > 1) != (block_id in shared):
                has_moved = True
                if num > 1:
                    shared.add(block_id)
                else:
                    shared.remove(block_id)
            if (
                fills[block_id] != fill
                or owners[block_id] != owner
                or all_refs[block_id] != refs
                or states[block_id] != state
            ):
                states[block_id], owners[block_id] = state, owner
                all_refs[block_id], fills[block_id] = refs, fill
                different.append(block_id)
        different.sort()
        return different, has_moved

    def _of_free(self, block_id: int, number: Number) -> tuple[int, int]:
        """State and owner of a block of the free list without a node."""
        for (_, run), request_id in self._promised.items():
            if block_id in run:
                return USED, number(request_id)
        place = bisect_right(self._external, block_id, key=_START) - 1
        if place >= 0 and block_id in self._external[place]:
            return EXTERNAL, -1
        return FREE, -1
