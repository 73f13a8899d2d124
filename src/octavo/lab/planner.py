"""How many GPUs, with which limits: by arithmetic first, then by simulating what that proposes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from octavo.errors import CapacityError
from octavo.lab.capacity import Capacity, Placement, capacity_of, cdiv_up
from octavo.lab.config import Router, SimConfig
from octavo.lab.machine import Machine
from octavo.lab.slices import Slice, busiest
from octavo.lab.slo import Slo
from octavo.lab.trace import TraceRequest
from octavo.lab.trials import Tell, Trial, Trials

BUDGETS = (256, 512, 1024, 2048, 4096, 8192)
"""Token budgets of a step that are tried."""
MAX_SEATS = 1024
"""Most max_num_seqs that is proposed."""
_CHUNK_STEP = 1.5
"""A step with a whole chunk may take so many times the TPOT: most steps have none."""
_MAX_TUNES = 3
"""Token budgets tried for one number of replicas."""
_MAX_REPLICA_TRIALS = 8
_MAX_CHECKS = 6
_FIRST_LOOK = 20_000
"""Requests that decide how many are needed."""
_REPLICA_TOKENS, _LEAST_REQUESTS = 2_000_000, 300
"""Tokens of a replica in a simulation, and requests though these are more."""
_MAX_REQUESTS = 50_000
"""Most requests of a slice."""


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
    replica_requests: int = 1000
    """Requests of a simulation."""
    limit_s: float | None = 30.0
    """Seconds of computing after which nothing is simulated that only explains the answer."""


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

    @property
    def placement(self) -> Placement:
        """A replica's GPUs."""
        return self.capacity.placement

    @property
    def num_gpus(self) -> int:
        """All of them."""
        return self.num_replicas * self.placement.num_gpus


def find_answer(
    requests: Sequence[TraceRequest],
    machine: Machine,
    options: PlanOptions,
    *,
    rate: float | None = None,
    block_tokens: int = 0,
    tell: Tell | None = None,
) -> tuple[Answer, Trials]:
    """The fewest GPUs that keep the objectives.

    requests: with times of arrival; `rate` stretches them. block_tokens: see `Trace`. Raises
    `CapacityError`, with the arithmetic, where no number of GPUs does, and as `busiest`.
    """
    part = busiest(requests, _FIRST_LOOK, rate=rate, block_tokens=block_tokens)
    able, rejected = _able(part, machine, options)
    if not able:
        raise _impossible(rejected, options)
    able.sort(key=lambda c: _least(c, part))
    flight = able[0].in_flight(part.rate / cdiv_up(part.rate, able[0].rate))
    each = max(options.replica_requests, min(2 * options.replica_requests, round(6 * flight)))
    by_tokens = round(_REPLICA_TOKENS / (part.mean_input + part.mean_output))
    each = min(each, max(_LEAST_REQUESTS, by_tokens))
    num = max(1, min(_MAX_REQUESTS, each * cdiv_up(part.rate, able[0].rate)))
    part = busiest(requests, num, rate=rate, block_tokens=block_tokens)
    able, rejected = _able(part, machine, options)
    if not able:
        raise _impossible(rejected, options)
    able.sort(key=lambda c: _least(c, part))
    trials = Trials(
        part,
        options.slo,
        replica_requests=each,
        limit_s=options.limit_s,
        tell=tell,
    )
    best: Answer | None = None
    for found in able:
        least = cdiv_up(part.rate, found.rate) * found.placement.num_gpus
        most = options.max_gpus if best is None else best.num_gpus - 1
        where = _gpus(found.placement.num_gpus)
        if least > most:
            enough = (
                f"{best.num_gpus} {'are' if best.num_gpus > 1 else 'is'} enough"
                if best
                else f"--max-gpus is {most}"
            )
            rejected.append(f"{where} a replica: at least {least} in all, and {enough}")
            continue
        search = _Search(found, part, options, trials)
        answer = search.answer(most // found.placement.num_gpus)
        if answer is None:
            rejected.append(f"{where} a replica: {search.why}")
        else:
            if best is not None:
                rejected.append(f"{_gpus(best.placement.num_gpus)} a replica: {best.num_gpus} GPUs")
            best = answer
    if best is None:
        raise _impossible(rejected, options)
    return replace(best, rejected=tuple(rejected)), trials


def _least(found: Capacity, part: Slice) -> tuple[int, float]:
    """GPUs that it needs by arithmetic; the quicker of two first."""
    return cdiv_up(part.rate, found.rate) * found.placement.num_gpus, found.step_s


def _impossible(rejected: Sequence[str], options: PlanOptions) -> CapacityError:
    return CapacityError(
        f"no number of GPUs up to {options.max_gpus} keeps {options.slo}: "
        + "; ".join(rejected)
        + "; loosen --slo-ttft or --slo-tpot, lower --rate, or take a larger --gpu or a smaller "
        "--model"
    )


def _able(part: Slice, machine: Machine, options: PlanOptions) -> tuple[list[Capacity], list[str]]:
    """Placements that might do, and why the others cannot."""
    slo, able, rejected = options.slo, list[Capacity](), list[str]()
    for num_gpus in machine.degrees():
        where = f"{_gpus(num_gpus)} a replica"
        try:
            placement = machine.place(num_gpus, options.block_size)
        except CapacityError as error:
            rejected.append(f"{where}: {error}")
            continue
        found = capacity_of(
            placement,
            part,
            tpot_s=slo.tpot_s,
            percentile=slo.percentile,
            block_size=options.block_size,
        )
        longest = min(part.max_tokens, options.max_model_len)
        if placement.num_slots < longest + options.block_size:
            rejected.append(
                f"{where}: the pool has {placement.num_slots:,} slots and the longest request "
                f"{longest:,} tokens"
            )
        elif found.alone_tpot_s > slo.tpot_s:
            rejected.append(
                f"{where}: a step of one sequence takes {1e3 * found.alone_tpot_s:.1f} ms, and "
                f"--slo-tpot is {1e3 * slo.tpot_s:g} ms"
            )
        elif found.alone_ttft_s > slo.ttft_s:
            rejected.append(
                f"{where}: the prompt at p{slo.percentile:g} takes "
                f"{1e3 * found.alone_ttft_s:,.0f} ms alone, and --slo-ttft is "
                f"{1e3 * slo.ttft_s:,g} ms"
            )
        elif found.batch < 1:
            rejected.append(f"{where}: not one sequence fits beside its share of prompts")
        else:
            able.append(found)
    return able, rejected


class _Search:
    """The fewest replicas of one placement."""

    def __init__(self, found: Capacity, part: Slice, options: PlanOptions, trials: Trials) -> None:
        self.found, self.part, self.options, self.trials = found, part, options, trials
        self.why = ""
        self._seen: dict[int, Trial] = {}

    def answer(self, most: int) -> Answer | None:
        """None, with the reason in `why`, where `most` are not enough."""
        least = cdiv_up(self.part.rate, self.found.rate)
        low, high = least - 1, min(most, least)
        for _ in range(_MAX_REPLICA_TRIALS):
            trial = self._try(high)
            if trial.service.ok:
                break
            low = high
            if high == most:
                break
            high = min(most, max(high + 1, int(high * 1.5)))
        if not self._seen[high].service.ok:
            self.why = f"{high} replicas are not enough: {_missed(self._seen[high], self.options)}"
            return None
        while high - low > 1:
            middle = (low + high) // 2
            if self._try(middle).service.ok:
                high = middle
            else:
                low = middle
        return self._checked(high, most)

    def _checked(self, num: int, most: int) -> Answer | None:
        """All replicas behind their router; more where that shows they are needed."""
        one = self._refined(num, self._seen[num])
        fewer = self._seen.get(num - 1)
        for _ in range(_MAX_CHECKS):
            part, simulated = self.trials.share(num, whole=True)
            trial = one
            if simulated > 1 or part.requests != one.part.requests:
                config = one.config.replace(num_replicas=simulated, router=self.options.router)
                replicas = f"all {num} replicas, routed" if simulated > 1 else "the answer"
                trial = self.trials.run(
                    f"check {replicas}", part, config, self.found.placement.costs
                )
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
                break
            larger = min(most, max(num + 1, int(1.15 * num)))
            fewer = trial if larger == num + 1 else None
            num = larger
        self.why = f"{num} replicas are not enough: {_missed(trial, self.options)}"
        return None

    def _refined(self, num_replicas: int, trial: Trial) -> Trial:
        """The token budget next to it where that leaves more room."""
        place = BUDGETS.index(trial.config.max_num_batched_tokens)
        for other in (place + 1, place - 1):
            if not trial.service.ok or not 0 <= other < len(BUDGETS):
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
        gpus = _gpus(num_replicas * self.found.placement.num_gpus)
        what = f"{gpus}, --max-num-batched-tokens {config.max_num_batched_tokens:,}"
        return self.trials.run(what, part, config, self.found.placement.costs)

    def _try(self, num_replicas: int) -> Trial:
        """The best of a few token budgets: smaller where tokens come too slowly, larger where the
        first comes too late."""
        part, simulated = self.trials.share(num_replicas)
        best: Trial | None = None
        config = first_config(self.found, part, self.options).replace(
            num_replicas=simulated, router="round-robin"
        )
        for _ in range(_MAX_TUNES):
            trial = self._run(num_replicas, part, config)
            best = trial if best is None else min(best, trial, key=self._badness)
            late = trial.service.ttft.at > self.options.slo.ttft_s
            slow = trial.service.tpot.at > self.options.slo.tpot_s
            if late == slow:
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
        return max(service.ttft.at / slo.ttft_s, service.tpot.at / slo.tpot_s)


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
            num_prefill_tokens=chunk, prefill_context=round(chunk * load.input / 2), num_prompts=1
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
    )


def _missed(trial: Trial, options: PlanOptions) -> str:
    slo, service = options.slo, trial.service
    p = f"p{slo.percentile:g}"
    return (
        f"{p} TTFT {service.ttft.at:.3g} s (objective {slo.ttft_s:g}), {p} TPOT "
        f"{1e3 * service.tpot.at:.3g} ms (objective {1e3 * slo.tpot_s:g})"
        + (f", {service.num_refused} refused" if service.num_refused else "")
    )


def _gpus(num: int) -> str:
    return f"{num} GPU{'s' * (num > 1)}"
