"""FasterTransformer's allocation: a region of the maximum length, in batches of whole requests."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence

from octavo.errors import ConfigError, IntegrityError
from octavo.kv.policy import SeqDemand
from octavo.kv.pool import BlockPool
from octavo.kv.reserve import ReservingPolicy
from octavo.kv.table import BlockTable
from octavo.util import cdiv


class RegionAllocator:
    """An arena cut into regions of equal size; what is left at its end is of no use."""

    __slots__ = ("_free", "_taken", "num_units", "region_len")

    def __init__(self, num_units: int, region_len: int) -> None:
        self.num_units = num_units
        self.region_len = region_len
        ends = range(region_len, num_units + 1, region_len)
        self._free = [end - region_len for end in ends]
        self._taken: set[int] = set()

    @property
    def largest_free(self) -> int:
        """Blocks of a region, if one is free."""
        return self.region_len if self._free else 0

    def take(self, num_units: int) -> int | None:
        """The first free region."""
        if not self._free or num_units > self.region_len:
            return None
        start = self._free.pop(0)
        self._taken.add(start)
        return start

    def free(self, start: int) -> None:
        """Give a region back."""
        if start not in self._taken:
            raise IntegrityError(f"no region that begins at block {start} was taken")
        self._taken.remove(start)
        insort(self._free, start)

    def can_take(self, sizes: Iterable[int]) -> bool:
        """Whether there is a region for each."""
        wanted = list(sizes)
        return len(wanted) <= len(self._free) and max(wanted, default=0) <= self.region_len

    def num_idle(self, num_units: int) -> int:
        """All regions."""
        return len(self._free) + len(self._taken) if num_units <= self.region_len else 0

    def num_too_small(self, num_units: int) -> int:
        """What is left at the end."""
        return self.num_units % self.region_len

    def too_small(self, num_units: int) -> list[range]:
        """The same, as a run."""
        left = self.num_units % self.region_len
        return [range(self.num_units - left, self.num_units)] if left else []

    def check_integrity(self) -> None:
        """Raise `IntegrityError` unless each region is free or taken."""
        regions = sorted([*self._free, *self._taken])
        expected = list(range(0, self.num_units - self.region_len + 1, self.region_len))
        if regions != expected:
            raise IntegrityError(f"regions begin at {regions}, expected {expected}")


class ContiguousPolicy(ReservingPolicy):
    """A region for the longest sequence each, and request-level batches (paper, section 6.1).

    A batch is open only in a step at whose start nothing is in it: there requests join in their
    order while they fit. Then nobody joins until all have ended, and who ended before keeps its
    region, as a batch of padded tensors would.
    """

    name = "contiguous"
    batches_requests = True

    def __init__(
        self,
        region_tokens: int,
        max_batch: int | None = None,
        max_padded_tokens: int | None = None,
    ) -> None:
        """`region_tokens` are reserved for each sequence; `max_batch` is the most requests of a
        batch, and `max_padded_tokens` limits its longest prompt and longest output together.
        Raises `ConfigError` for a limit below 1."""
        super().__init__()
        limits = {
            "region_tokens": region_tokens,
            "max_batch": max_batch,
            "max_padded_tokens": max_padded_tokens,
        }
        for limit, value in limits.items():
            if value is not None and value < 1:
                raise ConfigError(f"{limit} must be at least 1, got {value}")
        self._region_tokens = region_tokens
        self._max_batch = max_batch
        self._max_padded_tokens = max_padded_tokens
        self._ended: list[BlockTable] = []
        """Members that have ended, in that order."""
        self._is_open = True
        self._num_requests = self._max_input = self._max_output = 0
        """Of the batch."""

    def attach(self, pool: BlockPool) -> None:
        """See `AllocationPolicy.attach`."""
        self._pool = pool
        self._region_tokens = min(self._region_tokens, pool.num_blocks * pool.block_size)
        self._region_len = cdiv(self._region_tokens, pool.block_size)
        self._arena = RegionAllocator(pool.num_blocks, self._region_len)

    @property
    def max_tokens_of_one_sequence(self) -> int:
        """A region; or what the limit of padded tokens leaves."""
        return min(self._region_tokens, self._max_padded_tokens or self._region_tokens)

    def begin_step(self) -> None:
        """Nobody joins a batch that ran."""
        super().begin_step()
        self._is_open = not self._families

    def can_admit(self, demand: SeqDemand, keep_free: int, num_shared: int) -> bool:
        """Whether it may join the batch, and finds its regions."""
        return self._may_join(demand) is None and super().can_admit(demand, keep_free, num_shared)

    def why_no_room(self, demand: SeqDemand) -> str | None:
        """Of a demand that was just refused."""
        return self._may_join(demand) or super().why_no_room(demand)

    def start(self, table: BlockTable) -> bool:
        """Join the batch."""
        if not super().start(table):
            return False
        self._num_requests += 1
        self._max_input, self._max_output = self._padded(table.demand)
        return True

    def expect_forks(self, table: BlockTable, num_forks: int) -> None:
        """What is promised to others stays in the batch, as the region of a member that ended."""
        self._families[table.seq_id].max_forks = num_forks

    def release(self, table: BlockTable) -> Sequence[BlockTable]:
        """All regions of a batch go when its last member ends. Only a beam that another one
        replaces leaves its region to that."""
        family = self._families[table.seq_id]
        if family.demand.forks_again and family.num_live > 1:
            return super().release(table)
        family.num_live -= 1
        self._ended.append(table)
        if any(other.num_live for other in self._families.values()):
            return ()
        ended, self._ended = self._ended, []
        for done in ended:
            self._pool.release(done.block_ids)
            family = self._families.pop(done.seq_id)
            self._arena.free(done.block_ids[0])
            self._free_spares(family)
        self._is_open = True
        self._num_requests = self._max_input = self._max_output = 0
        return ended

    def _num_asked(self, demand: SeqDemand) -> int:
        return self._region_tokens

    def _run_len(self, num_asked: int) -> int:
        return self._region_len

    def _may_join(self, demand: SeqDemand) -> str | None:
        """Why it may not; None: it may."""
        if not self._is_open:
            num = self._num_requests
            return f"the batch of {num:,} that runs takes nobody in until all have ended"
        if self._max_batch is not None and self._num_requests >= self._max_batch:
            return f"the batch has its {self._max_batch:,} requests"
        longest_input, longest_output = self._padded(demand)
        padded = longest_input + longest_output
        if self._max_padded_tokens is not None and padded > self._max_padded_tokens:
            return (
                f"the batch would be padded to {longest_input:,} + {longest_output:,} = "
                f"{padded:,} tokens, more than {self._max_padded_tokens:,}"
            )
        return None

    def _padded(self, demand: SeqDemand) -> tuple[int, int]:
        """The longest prompt and the longest output of the batch, with it."""
        return (
            max(self._max_input, demand.num_tokens),
            max(self._max_output, demand.num_output),
        )
