"""The pool at one moment, block by block: whose each block is, and what its slots are."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from octavo.config import KVPolicy
from octavo.kv.ledger import TERMS
from octavo.kv.state import KVState
from octavo.kv.table import BlockTable
from octavo.lab.config import SimConfig
from octavo.lab.costs import StepCosts
from octavo.lab.prompts import PromptMaker
from octavo.lab.replica import Replica
from octavo.lab.trace import TraceRequest


@dataclass(slots=True)
class Block:
    """One block of the pool. Its kinds, in slots, add up to the block."""

    owners: list[int]
    """Sequences whose tables point at it."""
    tokens: int = 0
    reserved: int = 0
    internal: int = 0
    external: int = 0
    """Behind what was set aside on purpose; or the whole block, free in too small a piece."""
    cached: int = 0
    free: int = 0
    is_ended: bool = False
    """Whether its sequence has ended, and its batch has not."""

    def parts(self) -> dict[str, int]:
        """Slots by kind, in the order in which they lie in the block."""
        return {name: getattr(self, name) for name in TERMS}


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockMap:
    """All blocks, by id."""

    policy: str
    time_s: float
    blocks: Sequence[Block]
    block_size: int
    num_sequences: int
    """That run; ended members of a batch are not among them."""
    num_waiting: int
    num_logical: int
    """Table entries: the blocks that it would take without sharing."""

    @property
    def num_slots(self) -> int:
        """Slots in the pool."""
        return len(self.blocks) * self.block_size

    def sums(self) -> dict[str, int]:
        """Slots by kind; the ledger's terms."""
        sums = dict.fromkeys(TERMS, 0)
        for block in self.blocks:
            for kind, num in block.parts().items():
                sums[kind] += num
        return sums


def block_map(kv: KVState, time_s: float = 0.0, num_waiting: int = 0) -> BlockMap:
    """Look at a pool. Its sums are those of `KVState.ledger`, but for blocks that are promised to
    forks: here they are free. O(blocks)."""
    blocks = [Block(owners=[]) for _ in range(kv.num_blocks)]
    num_logical = num_sequences = 0
    for table in kv.tables():
        num_logical += len(table.block_ids)
        num_sequences += table.max_total_tokens > 0
        for index, block_id in enumerate(table.block_ids):
            _fill(blocks[block_id], table, index)
    for block_id in _unallocatable(kv):
        blocks[block_id].external = kv.block_size
    for block_id, block in enumerate(blocks):
        if kv.is_cached(block_id):
            block.cached = kv.block_size
        elif not block.owners and not block.external:
            block.free = kv.block_size
    return BlockMap(
        policy=kv.policy.name,
        time_s=time_s,
        blocks=blocks,
        block_size=kv.block_size,
        num_sequences=num_sequences,
        num_waiting=num_waiting,
        num_logical=num_logical,
    )


def _fill(block: Block, table: BlockTable, index: int) -> None:
    """Add an owner; a block is as full as the owner says who has most in it."""
    start, size = index * table.block_size, table.block_size

    def up_to(end: int) -> int:
        return max(0, min(end - start, size))

    filled = max(up_to(table.num_committed), block.tokens)
    fillable = max(up_to(table.fillable), block.tokens + block.reserved)
    asked = max(table.num_committed, min(table.num_asked, table.capacity))
    purposeful = max(up_to(asked), size - block.external if block.owners else 0)
    block.owners.append(table.seq_id)
    block.tokens, block.reserved = filled, fillable - filled
    block.internal, block.external = purposeful - fillable, size - purposeful
    block.is_ended = table.max_total_tokens == 0


def _unallocatable(kv: KVState) -> list[int]:
    """The free blocks that the policy counts as external: of a buddy allocator those in the
    smallest chunks, else those at the end of the pool."""
    num = kv.policy.num_external_blocks
    free = [i for i in range(kv.num_blocks) if not kv.ref_count(i) and not kv.is_cached(i)]
    if not kv.policy.name.startswith("orca"):
        return free[len(free) - num :]
    chunks = sorted(_buddies(free), key=len)
    return [block_id for chunk in chunks for block_id in chunk][:num]


def _buddies(free: Iterable[int]) -> list[range]:
    """Free blocks as the largest chunks that are aligned to their size: no two halves of a chunk
    are both free, so these are the allocator's own, or parts of them."""
    left, chunks = set(free), []
    for start in sorted(left):
        if start not in left:
            continue
        size = 1
        while start % (2 * size) == 0 and left.issuperset(range(start, start + 2 * size)):
            size *= 2
        chunks.append(range(start, start + size))
        left.difference_update(chunks[-1])
    return chunks


def map_at(
    requests: Iterable[TraceRequest],
    config: SimConfig,
    costs: StepCosts,
    time_s: float,
    policy: KVPolicy | None = None,
) -> BlockMap:
    """Serve requests, in order of arrival, up to the first step that begins at `time_s` or later,
    and look at the pool; before that if all have ended. `policy` replaces that of `config`."""
    config = config.replace(stride=False, kv_policy=policy or config.kv_policy)
    replica = Replica(config, costs, prompts=PromptMaker(unique=config.enable_prefix_caching))
    pending = deque(enumerate(requests))
    while replica.now_s < time_s and (pending or replica.has_work):
        while pending and (pending[0][1].arrival_s or 0.0) <= replica.now_s:
            index, request = pending.popleft()
            replica.add(request, request.arrival_s or 0.0, index)
        if replica.has_work:
            replica.advance(time_s, float("inf"))
        else:
            index, request = pending.popleft()
            replica.add(request, request.arrival_s or 0.0, index)
    return block_map(replica.kv, replica.now_s, replica.num_waiting)
