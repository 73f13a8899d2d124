"""Who gives its blocks back when the pool is full, and how it will come back."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple, Protocol

from octavo.config import PreemptionMode, PreemptionVictim
from octavo.kv.policy import RestoreCost
from octavo.sched.costs import Comparison, CostModel, RestoreMode
from octavo.sched.sequence import Sequence

_MOST_COMPARED = 16
"""Units that the lowest-cost rule looks at for one victim."""

Unit = tuple[Sequence, ...]
"""What is preempted as a whole: one sequence, or the running beams of a request by place."""


class Memory(Protocol):
    """What is asked of the KV manager."""

    @property
    def can_preempt(self) -> bool:
        """Whether the allocation policy lets sequences be preempted at all."""
        ...

    def restore_cost(self, *seq_ids: int) -> RestoreCost:
        """Of running sequences that are preempted together."""
        ...

    def host_room(self) -> int:
        """Blocks that could be swapped out now."""
        ...


class Victim(NamedTuple):
    """Who is preempted, and how."""

    sequences: Unit
    mode: RestoreMode
    """swap: its blocks move to host memory and come back. recompute: its tokens are computed
    again."""
    why: str
    """Why this one, why this way, with the arithmetic."""
    restore_s: float
    """What bringing it back takes, in seconds by measured speeds."""


class PreemptionPolicy:
    """Chooses victims (paper section 4.5).

    Progress (invariant I5) does not depend on the victim rule: whoever asks takes room only from
    those who come later in line, so the first in line always advances, then the next.
    """

    def __init__(
        self,
        kv: Memory,
        costs: CostModel,
        *,
        mode: PreemptionMode = "recompute",
        victim: PreemptionVictim = "last-come",
    ) -> None:
        """`costs` is kept up to date by whoever sees steps run."""
        self._kv = kv
        self._costs = costs
        self._mode: PreemptionMode = mode
        self._victim: PreemptionVictim = victim

    def choose(
        self, requester: Unit, candidates: Iterable[Unit], *, is_alone: bool
    ) -> Victim | None:
        """Who goes, so that `requester` can grow.

        `candidates` are the running units that were not served in this step, in order of places;
        those before the requester, and itself, are passed over. If nobody is left the requester
        goes. None when preempting cannot help: the requester `is_alone` in running, or the
        allocation policy reserved at admission all that it will ever give.

        A unit that would free no block, all of its blocks being shared, goes only if no other
        would free one. Until the requester has its room the caller carries out the answer and
        asks again.
        """
        if is_alone or not self._kv.can_preempt:
            return None
        place = requester[0].place
        later = [unit for unit in candidates if unit[0].place > place]
        if not later:
            return self.take(requester, "nobody who came later is left")
        if self._victim == "lowest-cost":
            return self._cheapest(later)
        rule = f"last come of {len(later)} not served yet"
        if self._victim == "priority":
            later.sort(key=lambda unit: (_priority(unit), unit[0].place))
        unit, cost = later[-1], self._restore_cost(later[-1])
        if not cost.num_blocks:
            of_others = ((other, self._restore_cost(other)) for other in reversed(later[:-1]))
            unit, cost = next((pair for pair in of_others if pair[1].num_blocks), (unit, cost))
        if self._victim == "priority":
            rule = f"priority {_priority(unit)}, the last of {len(later)} not served yet"
        return self._decide(unit, cost, rule)

    def take(self, unit: Unit, rule: str) -> Victim:
        """Preempt this very unit, chosen by the `rule`: how it will come back."""
        return self._decide(unit, self._restore_cost(unit), rule)

    def _cheapest(self, later: list[Unit]) -> Victim:
        """The least seconds to bring back; the last come of those that cost the same.

        What one costs is told block by block, so only the last few that would free a block are
        compared. If none would free one, the last come goes.
        """
        with_costs = ((unit, self._restore_cost(unit)) for unit in reversed(later))
        freeing = list(islice((pair for pair in with_costs if pair[1].num_blocks), _MOST_COMPARED))
        if not freeing:
            return self.take(later[-1], f"last come of {len(later)}, none of which frees a block")
        room = self._kv.host_room()
        unit, cost = min(freeing, key=lambda pair: self._way_back(pair[1], room)[2])
        num = len(freeing)
        of_whom = f"{num}" if num == len(later) else f"the last {num} that free any of {len(later)}"
        return self._decide(unit, cost, f"cheapest to bring back of {of_whom} not served yet")

    def _way_back(
        self, to_restore: RestoreCost, room: int
    ) -> tuple[Comparison, RestoreMode, float]:
        """The costs, and how a unit comes back in how many seconds, by the mode and by what host
        memory has room for."""
        cost = self._costs.compare(*to_restore)
        mode: RestoreMode = cost.mode if self._mode == "auto" else self._mode
        if mode == "swap" and cost.num_blocks <= room:
            return cost, "swap", cost.swap_s
        return cost, "recompute", cost.recompute_s

    def _decide(self, unit: Unit, to_restore: RestoreCost, rule: str) -> Victim:
        """How a unit comes back, in words."""
        room = self._kv.host_room()
        cost, mode, restore_s = self._way_back(to_restore, room)
        wanted = cost.mode if self._mode == "auto" else self._mode
        if mode != wanted:
            how = (
                f"host memory has room for {room} of its {cost.num_blocks} blocks: "
                f"{cost.recompute_phrase}"
            )
        elif self._mode == "auto":
            how = str(cost)
        else:
            how = cost.swap_phrase if mode == "swap" else cost.recompute_phrase
        return Victim(unit, mode, f"{rule}; {how}", restore_s)

    def _restore_cost(self, unit: Unit) -> RestoreCost:
        return self._kv.restore_cost(*(seq.seq_id for seq in unit))


def _priority(unit: Unit) -> int:
    return unit[0].group.request.priority
