"""Asks what would have been: an answer at other loads, with one thing changed at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from octavo.errors import CapacityError
from octavo.lab.config import SimConfig
from octavo.lab.costs import StepCosts, StepShape
from octavo.lab.limits import (
    FURTHER,
    LOADS,
    Change,
    Limit,
    Limits,
    Waiting,
    limit_of,
    waiting_of,
    why,
)
from octavo.lab.machine import Machine
from octavo.lab.planner import Answer, PlanOptions
from octavo.lab.slices import Slice
from octavo.lab.trials import ScaledCosts, Trial, Trials
from octavo.util import cdiv

SWAP_BYTES = 16 * 2**30
"""Host memory that is proposed for a replica."""


class Examiner:
    """Asks what would have been, of one replica of an answer at loads around its own."""

    def __init__(
        self, answer: Answer, machine: Machine, options: PlanOptions, trials: Trials
    ) -> None:
        self.answer, self.machine, self.options, self.trials = answer, machine, options, trials
        self.part, num = trials.share(answer.num_replicas)
        self.config = answer.config.replace(num_replicas=num, router="round-robin")
        self.costs = answer.placement.costs
        self._worst: Trial | None = None
        self._base = 0

    def limits(self) -> Limits:
        """Everything."""
        guess = self.answer.capacity.rate * self.answer.num_replicas / self.trials.part.rate
        first = max(1, sum(load <= guess for load in LOADS))
        self._base = self._highest("as it is", self.config, self.costs, -1, keep=True, first=first)
        worst, base = self._worst, LOADS[max(0, self._base)]
        assert worst is not None, "some load was tried"
        waiting = self._waiting(worst)
        is_idle = self._base == len(LOADS) - 1
        questions = [] if is_idle else self._questions(waiting, worst.result.num_preemptions)
        prefill = self._prefill_share()
        service = worst.service
        gains = {q.name: q.gain for q in questions}
        limit: Limit = "nothing"
        changes, untried = list[Change](), list[str]()
        if not is_idle:
            limit = limit_of(gains, prefill, service.missed_ttft > service.missed_tpot)
            changes, untried = self._changes(waiting)
        return Limits(
            load=base if self._base >= 0 else 0.0,
            limit=limit,
            why=why(limit, gains, prefill),
            waiting=waiting,
            missed_ttft=service.missed_ttft,
            missed_tpot=service.missed_tpot,
            num_preemptions=worst.result.num_preemptions,
            stress=worst.part.rate / self.part.rate,
            prefill_share=prefill,
            questions=tuple(questions),
            changes=tuple(sorted(changes, key=lambda c: -c.gain)),
            untried=tuple(untried),
        )

    def _waiting(self, trial: Trial) -> Waiting:
        config = self.config
        stormy = trial.result.num_preemptions > 0
        watermark = max(config.watermark, config.max_watermark) if stormy else config.watermark
        samples, prompt = trial.result.samples, self.part.mean_input
        return waiting_of(samples, config, prompt, watermark)

    def _questions(self, waiting: Waiting, num_preemptions: int) -> list[Change]:
        """More of what nobody waited for brings nothing, so that is not simulated."""
        config, costs = self.config, self.costs
        more = config.replace(num_blocks=2 * config.num_blocks)
        seats = 2 * config.max_num_seqs
        budget = max(config.max_num_batched_tokens, seats)
        seated = config.replace(max_num_seqs=seats, max_num_batched_tokens=budget)
        base = LOADS[max(0, self._base)]
        found = []
        if waiting.mean * waiting.memory > 0 or num_preemptions:
            found.append(self._change("twice the memory", "", more, costs))
        else:
            found.append(Change("twice the memory", "", base, 0.0))
        if waiting.mean * waiting.seats > 0:
            found.append(self._change("twice the seats", "", seated, costs))
        else:
            found.append(Change("twice the seats", "", base, 0.0))
        return [
            *found,
            self._change("even arrivals", "", config, costs, part=self.part.evenly()),
            self._change("twice the compute", "", config, ScaledCosts(costs, 0.5)),
        ]

    def _changes(self, waiting: Waiting) -> tuple[list[Change], list[str]]:
        """What a user can do, each tried where there is time."""
        done, untried = [self._one_more()], list[str]()
        for name, make in self._proposals(waiting):
            if self.trials.late:
                untried.append(name)
            elif (change := make()) is not None:
                done.append(change)
        return done, untried

    def _proposals(self, waiting: Waiting) -> list[tuple[str, Callable[[], Change | None]]]:
        config, answer = self.config, self.answer
        budget, seats, size = config.max_num_batched_tokens, config.max_num_seqs, config.block_size

        def changed(name: str, flags: str, **fields: object) -> tuple[str, Callable[[], Change]]:
            return name, lambda: self._change(name, flags, config.replace(**fields), self.costs)

        found = [
            changed(
                "larger token budget",
                f"--max-num-batched-tokens {2 * budget}",
                max_num_batched_tokens=2 * budget,
            ),
            changed(
                "smaller token budget",
                f"--max-num-batched-tokens {budget // 2}",
                max_num_batched_tokens=budget // 2,
                max_num_seqs=min(seats, budget // 2),
            ),
        ]
        proposals: list[tuple[str, Callable[[], Change | None]]] = list(found)
        if waiting.seats * waiting.mean > 0:
            proposals.append(
                changed(
                    "more seats",
                    f"--max-num-seqs {2 * seats}",
                    max_num_seqs=2 * seats,
                    max_num_batched_tokens=max(budget, 2 * seats),
                )
            )
        proposals.append(("fp8 KV cache", self._half_kv))
        if self.part.has_prefixes and not config.enable_prefix_caching:
            flag = "--enable-prefix-caching"
            proposals.append(changed("prefix caching", flag, enable_prefix_caching=True))
        for other in (size * 2, size // 2):
            if other:
                proposals.append((f"blocks of {other}", partial(self._other_block, other)))
        if self._worst is not None and self._worst.result.num_preemptions:
            block_bytes = answer.placement.token_bytes * size
            proposals.append(
                changed(
                    "swap space",
                    f"--swap-space {SWAP_BYTES // 2**30}",
                    num_host_blocks=SWAP_BYTES // block_bytes,
                    preemption_mode="auto",
                )
            )
        return proposals

    def _one_more(self) -> Change:
        """Replicas under a router share evenly, so this is arithmetic."""
        answer = self.answer
        num, gpus = answer.num_replicas, answer.placement.num_gpus
        load = LOADS[max(0, self._base)] * (num + 1) / num
        name = "one more GPU" if gpus == 1 else f"one more replica ({gpus} GPUs)"
        return Change(name, f"{num + 1} replicas", load, 1 / num, note="by arithmetic")

    def _half_kv(self) -> Change | None:
        gpus = self.answer.placement.num_gpus
        try:
            placement = self.machine.place(gpus, self.config.block_size, half_kv=True)
        except CapacityError:
            return None
        config = self.config.replace(num_blocks=placement.num_blocks(self.config.block_size))
        return self._change("fp8 KV cache", "half the bytes a token", config, placement.costs)

    def _other_block(self, size: int) -> Change | None:
        try:
            placement = self.machine.place(self.answer.placement.num_gpus, size)
        except CapacityError:
            return None
        config = self.config.replace(block_size=size, num_blocks=placement.num_blocks(size))
        return self._change(f"blocks of {size}", f"--block-size {size}", config, placement.costs)

    def _change(
        self,
        name: str,
        flags: str,
        config: SimConfig,
        costs: StepCosts,
        part: Slice | None = None,
    ) -> Change:
        base = self._base
        reached = self._highest(name, config, costs, base, part)
        load, before = LOADS[max(0, reached)], LOADS[max(0, base)]
        return Change(name, flags, load, load / before - 1, reached == _end(base) - 1)

    def _highest(
        self,
        name: str,
        config: SimConfig,
        costs: StepCosts,
        kept: int,
        part: Slice | None = None,
        keep: bool = False,
        first: int = 1,
    ) -> int:
        """Place in `LOADS` of the highest load whose objectives are kept; `kept` and below are.

        A change that does not help costs one simulation. first: how many places on to look first.
        """
        part = part or self.part
        end = len(LOADS) if keep else _end(kept)
        low, high, step = kept, end, first
        while high - low > 1:
            place = min(low + step, high - 1) if high == end else (low + high) // 2
            what = f"{name}, {LOADS[place]:g} x the rate"
            trial = self.trials.run(what, part.at_rate(part.rate * LOADS[place]), config, costs)
            if trial.service.ok:
                low, step = place, (1 if step == first > 1 else 2 * step)
            else:
                high = place
            if keep and (not trial.service.ok or self._worst is None or self._worst.service.ok):
                self._worst = trial
        return low

    def _prefill_share(self) -> float:
        result = self._worst.result if self._worst is not None else self.answer.trial.result
        num = max(1, result.num_steps)
        load = self.answer.capacity.load
        decodes = round(result.num_output_tokens / num)
        prefill = max(0, round((result.num_tokens_computed - result.num_output_tokens) / num))
        shape = StepShape(
            num_prefill_tokens=prefill,
            prefill_context=round(prefill * load.input / 2),
            num_decodes=decodes,
            decode_context=round(decodes * load.context),
            num_samples=decodes,
            num_prompts=cdiv(prefill, max(1, round(load.input))),
        )
        without = shape._replace(num_prefill_tokens=0, prefill_context=0, num_prompts=0)
        return 1 - self.costs.step_s(without) / self.costs.step_s(shape)


def _end(base: int) -> int:
    """Behind the last place in `LOADS` that is tried where that at `base` is served already."""
    most = FURTHER * LOADS[max(0, base)]
    return min(len(LOADS), max(base + 2, sum(load <= most for load in LOADS)))
