"""Orca's allocation: contiguous chunks from a buddy allocator (paper, section 6.1)."""

from __future__ import annotations

from typing import Literal

from octavo.errors import ConfigError
from octavo.kv.buddy import BuddyAllocator, next_power_of_two
from octavo.kv.policy import SeqDemand
from octavo.kv.pool import BlockPool
from octavo.kv.reserve import ReservingPolicy
from octavo.util import cdiv

OrcaEstimate = Literal["max", "pow2", "oracle"]


class OrcaPolicy(ReservingPolicy):
    """One chunk a sequence, whose size is decided when it starts; iteration-level batches.

    What is asked for is the prompt and an estimate of the output: the maximum; the next power of
    two of the true length, as if that could be guessed so well; or the true length itself. The
    chunk is the next power of two of that, in blocks. Who does not fit holds up the line.
    """

    _arena: BuddyAllocator

    def __init__(self, max_seq_tokens: int, estimate: OrcaEstimate) -> None:
        """`max_seq_tokens` is the longest sequence, which `max` reserves. Raises `ConfigError`
        when it is below 1."""
        super().__init__()
        if max_seq_tokens < 1:
            raise ConfigError(f"max_seq_tokens must be at least 1, got {max_seq_tokens}")
        self.name = f"orca-{estimate}"
        self._estimate: OrcaEstimate = estimate
        self._max_seq_tokens = max_seq_tokens

    def attach(self, pool: BlockPool) -> None:
        """See `AllocationPolicy.attach`."""
        self._pool = pool
        max_chunk = next_power_of_two(cdiv(self._max_seq_tokens, pool.block_size))
        self._arena = BuddyAllocator(pool.num_blocks, max_chunk)
        if self._estimate == "max":
            self._least_asked = self._arena.max_chunk

    @property
    def max_tokens_of_one_sequence(self) -> int:
        """The longest sequence, or the largest chunk where that is less."""
        return min(self._max_seq_tokens, self._arena.max_chunk * self._pool.block_size)

    def _num_asked(self, demand: SeqDemand) -> int:
        most = self.max_tokens_of_one_sequence
        if self._estimate == "max":
            return most
        num_output = demand.num_output
        if self._estimate == "pow2":
            num_output = next_power_of_two(num_output)
        return min(demand.num_tokens + num_output, most)

    def _run_len(self, num_asked: int) -> int:
        return next_power_of_two(cdiv(num_asked, self._pool.block_size))
