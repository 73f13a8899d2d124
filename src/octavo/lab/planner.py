"""How many GPUs, with which limits: by arithmetic first, then by simulating what that proposes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from octavo.errors import CapacityError
from octavo.kv.needs import BlockNeeds
from octavo.lab.capacity import Capacity, capacity_of, cdiv_up
from octavo.lab.machine import PLAN_TOKENS, Machine
from octavo.lab.search import SEARCH, Answer, PlanOptions, Search, gpus_of
from octavo.lab.slices import Slice, busiest
from octavo.lab.trace import TraceRequest
from octavo.lab.trials import Tell, Trials

_FIRST_LOOK = 20_000
"""Requests that decide how many are needed."""
REPLICA_REQUESTS = 1000
"""Of a simulation, as long as it takes no more than `_SIMULATION_US`."""
_LEAST_REQUESTS = 60
"""Of a simulation, however long it takes."""
_SIMULATION_US = 1.5e6
"""Microseconds that one simulation may take, about, where a token of a prompt takes `_PROMPT_US`
(less where nobody looks for it again) and one of an output `_OUTPUT_US`."""
_PROMPT_US, _PLAIN_US, _OUTPUT_US = 0.7, 0.03, 4.0
_MOST_OF = 0.7
"""Share of the TTFT; when a long prompt alone takes more of it, the answer is a matter of luck."""
_MAX_REQUESTS = 50_000
"""Most requests of a slice."""


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
    each, doubts = _size(part, able[0], options)
    num = max(1, min(_MAX_REQUESTS, each * cdiv_up(part.rate, able[0].likely_rate)))
    part = busiest(requests, num, rate=rate, block_tokens=block_tokens)
    able, rejected = _able(part, machine, options)
    trials = Trials(
        part,
        options.slo,
        replica_requests=each,
        limit_s=options.limit_s,
        tell=tell,
    )
    search, start = Search(able[0], part, options, trials), 0
    most = options.max_gpus // able[0].placement.num_gpus
    if able[0].least(part.rate) <= most:
        start = search.enough(most) or 0
    if each * start > 2 * len(part.requests) and len(part.requests) < len(requests):
        # Many more than by the means: a replica's share of the stretch would be a few requests.
        num = min(_MAX_REQUESTS, each * start)
        trials.part = part = busiest(requests, num, rate=rate, block_tokens=block_tokens)
        able, rejected = _able(part, machine, options)
        search = Search(able[0], part, options, trials, start=start)
    best = _fewest(able, search, rejected, options)
    if best is None:
        raise _impossible(rejected, options)
    doubts += _doubts(best, part, options)
    return replace(best, rejected=tuple(rejected), doubts=(*doubts, *best.doubts)), trials


def _fewest(
    able: Sequence[Capacity], search: Search, rejected: list[str], options: PlanOptions
) -> Answer | None:
    """The answer with the fewest GPUs; why not the others goes to `rejected`. `search` is that of
    the first of `able`."""
    part, trials = search.part, search.trials
    best: Answer | None = None
    for found in able:
        least = found.least(part.rate) * found.placement.num_gpus
        most = options.max_gpus if best is None else best.num_gpus - 1
        where = gpus_of(found.placement.num_gpus)
        if least > most:
            enough = (
                f"{best.num_gpus} {'are' if best.num_gpus > 1 else 'is'} enough"
                if best
                else f"--max-gpus is {most}"
            )
            rejected.append(f"{where} a replica: at least {least} in all, and {enough}")
            continue
        if best is not None and trials.spent(SEARCH):
            rejected.append(f"{where} a replica: not tried, the time was over (--time-limit)")
            continue
        if found is not search.found:
            search = Search(found, part, options, trials)
        answer = search.answer(most // found.placement.num_gpus)
        if answer is None:
            rejected.append(f"{where} a replica: {search.why}")
        else:
            if best is not None:
                where = gpus_of(best.placement.num_gpus)
                rejected.append(f"{where} a replica: {best.num_gpus} GPUs")
            best = answer
    return best


def _doubts(best: Answer, part: Slice, options: PlanOptions) -> list[str]:
    """What speaks against an answer beside what its trials say."""
    doubts = []
    alone_s, slo = best.capacity.alone_ttft_s, options.slo
    if alone_s > _MOST_OF * slo.ttft_s:
        doubts.append(
            f"the prompt at p{slo.percentile:g} takes {1e3 * alone_s:,.0f} ms of the "
            f"{1e3 * slo.ttft_s:,.0f} alone: how long prompts happen to be decides more than how "
            "many replicas there are"
        )
    longer = sum(r.num_tokens > options.max_model_len for r in part.requests)
    if longer:
        doubts.append(
            f"{longer:,} of {len(part.requests):,} requests are longer than --max-model-len "
            f"{options.max_model_len:,} and are refused"
        )
    return doubts


def _size(part: Slice, found: Capacity, options: PlanOptions) -> tuple[int, list[str]]:
    """Requests with which a replica is simulated: those that were asked for; else enough of them
    to fill it several times over, if there is time for so many."""
    if options.replica_requests is not None:
        return options.replica_requests, []
    flight = found.in_flight(part.rate / cdiv_up(part.rate, found.rate))
    wanted = max(REPLICA_REQUESTS, min(2 * REPLICA_REQUESTS, round(6 * flight)))
    prompt_us = _PROMPT_US if found.prefixes else _PLAIN_US
    request_us = prompt_us * part.mean_input + _OUTPUT_US * part.mean_output
    num = min(wanted, max(_LEAST_REQUESTS, round(_SIMULATION_US / request_us)))
    if num >= min(REPLICA_REQUESTS, len(part.requests)):
        return num, []
    tokens = part.mean_input + part.mean_output
    return num, [
        f"requests of {tokens:,.0f} tokens are slow to simulate, so a replica served only {num:,} "
        "of them: percentiles are coarse (--simulated-requests)"
    ]


def _least(found: Capacity, part: Slice) -> tuple[int, float]:
    """GPUs that it is likely to need; the quicker of two first."""
    return cdiv_up(part.rate, found.likely_rate) * found.placement.num_gpus, found.alone_tpot_s


def _impossible(rejected: Sequence[str], options: PlanOptions) -> CapacityError:
    return CapacityError(
        f"no number of GPUs up to {options.max_gpus} keeps {options.slo}: "
        + "; ".join(rejected)
        + "; loosen --slo-ttft or --slo-tpot, lower --rate, or take a larger --gpu or a smaller "
        "--model"
    )


def _able(part: Slice, machine: Machine, options: PlanOptions) -> tuple[list[Capacity], list[str]]:
    """Placements that might do, those that need fewest first, and why the others cannot. Raises
    `CapacityError` where none might."""
    prefixes = options.enable_prefix_caching and part.has_prefixes
    slo, able, rejected = options.slo, list[Capacity](), list[str]()
    for num_gpus in machine.degrees():
        where = f"{gpus_of(num_gpus)} a replica"
        try:
            placement = machine.place(num_gpus, options.block_size)
        except CapacityError as error:
            rejected.append(f"{where}: {error}")
            continue
        found = capacity_of(
            placement,
            part,
            ttft_s=slo.ttft_s,
            tpot_s=slo.tpot_s,
            percentile=slo.percentile,
            block_size=options.block_size,
            prefixes=prefixes,
        )
        longest = min(part.max_tokens, options.max_model_len)
        needs = BlockNeeds(options.block_size, placement.windows, PLAN_TOKENS)
        if needs.most_tokens(placement.num_blocks(options.block_size)) < longest:
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
    if not able:
        raise _impossible(rejected, options)
    return sorted(able, key=lambda c: _least(c, part)), rejected
