"""The fewest replicas of one placement that keep the objectives, by simulating them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from octavo.lab.capacity import Capacity, Placement, cdiv_up
from octavo.lab.config import Router, SimConfig
from octavo.lab.slices import Slice
from octavo.lab.trials import Slo, Trial, Trials

BUDGETS = (256, 512, 1024, 2048, 4096, 8192)
"""Token budgets of a step that are tried."""
MAX_SEATS = 1024
"""Most max_num_seqs that is proposed."""
_CHUNK_STEP = 1.5
"""A step with a whole chunk may take so many times the TPOT: most steps have none."""
_MAX_TUNES = 3
"""Token budgets tried for one number of replicas."""
SEARCH, CHECK = 0.5, 0.65
"""Shares of the time after which the search only goes up in large steps, and the check too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """What is given, and how long to look."""

    slo: Slo
    max_model_len: int
    """Longest sequence; requests beyond it are refused."""
    block_size: int = 16
    max_gpus: int = 512
    """No answer may need more."""
    enable_prefix_caching: bool = True
    router: Router = "round-robin"
    replica_requests: int | None = None
    """Requests of a simulation; None: as many as it takes, and as can be simulated in time."""
    limit_s: float | None = 45.0
    """Seconds of computing that are to be enough. Where they are not, the answer says what it is
    less sure of: nothing is simulated twice to refine it, nor what only explains it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """GPUs and limits that keep the objectives."""

    capacity: Capacity
    num_replicas: int
    config: SimConfig
    """Of one replica."""
    trial: Trial
    """The check: replicas and router simulated."""
    num_simulated: int
    """Replicas in the check."""
    rejected: tuple[str, ...] = ()
    """What was not chosen, and why."""
    tried_fewer: Trial | None = None
    """One replica less: how it failed."""
    doubts: tuple[str, ...] = ()
    """Why it is less sure than it might be."""

    @property
    def placement(self) -> Placement:
        """A replica's GPUs."""
        return self.capacity.placement

    @property
    def num_gpus(self) -> int:
        """All of them."""
        return self.num_replicas * self.placement.num_gpus


class Search:
    """The fewest replicas of one placement."""

    def __init__(
        self,
        found: Capacity,
        part: Slice,
        options: PlanOptions,
        trials: Trials,
        *,
        start: int = 0,
    ) -> None:
        """start: replicas to try first; 0: as many as are likely to be needed."""
        self.found, self.part, self.options, self.trials = found, part, options, trials
        self.why = ""
        self._start = start or cdiv_up(part.rate, found.likely_rate)
        self._low = found.least(part.rate) - 1
        """Replicas that are too few, for all that is known."""
        self._seen: dict[int, Trial] = {}

    def answer(self, most: int) -> Answer | None:
        """None, with the reason in `why`, where `most` are not enough."""
        high = self.enough(most)
        if high is None:
            return None
        low = min(self._low, high - 1)
        while high - low > 1 and not self.trials.spent(SEARCH):
            middle = (low + high) // 2
            if self._try(middle).service.ok:
                high = middle
            else:
                low = middle
        doubts = []
        if high - low > 1:
            doubts.append(
                f"no time to try less than {high} replicas, though more than {low} "
                f"{'are' if low > 1 else 'is'} needed (--time-limit)"
                if low
                else f"no time to try less than {high} replicas (--time-limit)"
            )
        answer = self._checked(high, most)
        return answer and replace(answer, doubts=tuple(doubts))

    def enough(self, most: int) -> int | None:
        """Replicas that keep the objectives, not the fewest; None as `answer`."""
        num = min(most, self._start)
        while not (trial := self._try(num)).service.ok:
            self._low = max(num, self._low)
            if num == most:
                self.why = _not_enough(num, trial, self.options)
                return None
            num = self._more(num, 1.5, SEARCH, most)
        self._start = num
        return num

    def _more(self, num: int, factor: float, share: float, most: int) -> int:
        """The next larger number to try; where time runs out, twice as many."""
        factor = 2.0 if self.trials.spent(share) else factor
        return min(most, max(num + 1, int(num * factor)))

    def _checked(self, num: int, most: int) -> Answer | None:
        """All replicas behind their router; more where that shows they are needed."""
        one = self._refined(num, self._seen[num])
        fewer = self._seen.get(num - 1)
        while True:
            part, simulated = self.trials.share(num, whole=True)
            trial = one
            if simulated > 1 or part.requests != one.part.requests:
                config = one.config.replace(num_replicas=simulated, router=self.options.router)
                what = f"check of {simulated} of {num} replicas, routed"
                trial = self.trials.run(what, part, config, self.found.placement.costs)
            if trial.service.ok:
                return Answer(
                    capacity=self.found,
                    num_replicas=num,
                    config=one.config.replace(num_replicas=1),
                    trial=trial,
                    num_simulated=simulated,
                    tried_fewer=fewer,
                )
            if num == most:
                self.why = _not_enough(num, trial, self.options)
                return None
            larger = self._more(num, 1.15, CHECK, most)
            fewer = trial if larger == num + 1 else None
            num = larger

    def _refined(self, num_replicas: int, trial: Trial) -> Trial:
        """The token budget next to it where that leaves more room."""
        place = BUDGETS.index(trial.config.max_num_batched_tokens)
        for other in (place + 1, place - 1):
            if not trial.service.ok or not 0 <= other < len(BUDGETS) or self.trials.spent(SEARCH):
                continue
            if trial.config.max_num_seqs > BUDGETS[other]:
                continue
            config = trial.config.replace(max_num_batched_tokens=BUDGETS[other])
            again = self._run(num_replicas, trial.part, config)
            if self._badness(again) < 0.95 * self._badness(trial):
                self._seen[num_replicas] = again
                return again
        return trial

    def _run(self, num_replicas: int, part: Slice, config: SimConfig) -> Trial:
        gpus = gpus_of(num_replicas * self.found.placement.num_gpus)
        what = f"{gpus}, --max-num-batched-tokens {config.max_num_batched_tokens:,}"
        return self.trials.run(what, part, config, self.found.placement.costs)

    def _try(self, num_replicas: int) -> Trial:
        """The best of a few token budgets: smaller where tokens come too slowly, larger where the
        first comes too late."""
        if num_replicas in self._seen:
            return self._seen[num_replicas]
        part, simulated = self.trials.share(num_replicas)
        best: Trial | None = None
        config = first_config(self.found, part, self.options).replace(
            num_replicas=simulated, router="round-robin"
        )
        for _ in range(_MAX_TUNES):
            trial = self._run(num_replicas, part, config)
            best = trial if best is None else min(best, trial, key=self._badness)
            late = trial.service.ttft_at > self.options.slo.ttft_s
            slow = trial.service.tpot_at > self.options.slo.tpot_s
            if late == slow or self.trials.spent(SEARCH):
                break
            place = BUDGETS.index(config.max_num_batched_tokens) + (1 if late else -1)
            if not 0 <= place < len(BUDGETS):
                break
            seats = min(config.max_num_seqs, BUDGETS[place])
            config = config.replace(max_num_batched_tokens=BUDGETS[place], max_num_seqs=seats)
        assert best is not None
        self._seen[num_replicas] = best
        return best

    def _badness(self, trial: Trial) -> float:
        slo, service = self.options.slo, trial.service
        return max(service.ttft_at / slo.ttft_s, service.tpot_at / slo.tpot_s)


def first_config(found: Capacity, part: Slice, options: PlanOptions) -> SimConfig:
    """Limits by arithmetic: seats for the largest batch that keeps the TPOT, and the largest chunk
    of prompt beside it that keeps it too."""
    seats = 16
    while seats < min(MAX_SEATS, found.batch):
        seats *= 2
    costs, load = found.placement.costs, found.load
    budget = next(b for b in BUDGETS if b >= max(512, seats))
    decodes = load.decodes(found.in_flight(part.rate))
    for larger in BUDGETS:
        chunk = max(0, larger - decodes.num_decodes)
        full = decodes._replace(
            num_prefill_tokens=chunk,
            prefill_context=round(chunk * load.pairs(load.input) / load.input),
            num_prompts=1,
        )
        if larger > budget and costs.step_s(full) <= _CHUNK_STEP * options.slo.tpot_s:
            budget = larger
    seats = min(seats, budget)
    prefixes = options.enable_prefix_caching and part.has_prefixes
    return SimConfig(
        num_blocks=found.placement.num_blocks(options.block_size),
        block_size=options.block_size,
        max_model_len=options.max_model_len,
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        enable_prefix_caching=prefixes,
        windows=found.placement.windows,
        layer_windows=found.placement.layer_windows,
    )


def _not_enough(num: int, trial: Trial, options: PlanOptions) -> str:
    are = "replicas are" if num > 1 else "replica is"
    return f"{num} {are} not enough: {_missed(trial, options)}"


def _missed(trial: Trial, options: PlanOptions) -> str:
    slo, service = options.slo, trial.service
    p = f"p{slo.percentile:g}"
    return (
        f"{p} TTFT {service.ttft_at:.3g} s (objective {slo.ttft_s:g}), {p} TPOT "
        f"{1e3 * service.tpot_at:.3g} ms (objective {1e3 * slo.tpot_s:g})"
        + (f", {service.num_refused} refused" if service.num_refused else "")
    )


def gpus_of(num: int) -> str:
    return f"{num} GPU{'s' * (num > 1)}"
