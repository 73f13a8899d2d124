"""Asks what would have been: an answer at other loads, with one thing changed at a time."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from octavo.errors import CapacityError
from octavo.lab.capacity import cdiv_up
from octavo.lab.config import SimConfig
from octavo.lab.costs import StepCosts, StepShape
from octavo.lab.limits import (
    FURTHER,
    LOADS,
    NUM_QUESTIONS,
    Change,
    Limit,
    Limits,
    Waiting,
    limit_of,
    waiting_of,
    why,
)
from octavo.lab.machine import Machine
from octavo.lab.search import Answer, PlanOptions
from octavo.lab.slices import Slice
from octavo.lab.trials import ScaledCosts, Trial, Trials
from octavo.util import cdiv

BASE, ASK = 0.75, 0.9
"""Shares of the time after which it is not asked any longer how much more is served, and why."""
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
        capacity, num = self.answer.capacity, self.answer.num_replicas
        guess = 1.0  # where the means were too hopeful there is little to spare
        if num <= cdiv_up(self.trials.part.rate, capacity.rate):
            guess = capacity.rate * num / self.trials.part.rate
        first = max(1, sum(load <= guess for load in LOADS) - 1)
        self._base = self._highest("as it is", self.config, self.costs, 0, keep=True, first=first)
        worst = self._worst
        assert worst is not None, "some load was tried"
        waiting = self._waiting(worst)
        is_idle = self._base == len(LOADS) - 1
        questions = [] if is_idle else self._questions(waiting, worst.result.num_preemptions)
        prefill = self._prefill_share()
        service = worst.service
        gains = {q.name: q.gain for q in questions}
        limit: Limit = "nothing"
        changes, untried = list[Change](), list[str]()
        if len(questions) == NUM_QUESTIONS:
            limit = limit_of(gains, prefill, service.missed_ttft > service.missed_tpot)
        elif not is_idle:
            limit = "not examined"
        if not is_idle:
            changes, untried = self._changes(waiting)
        return Limits(
            load=LOADS[self._base],
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
        base = LOADS[self._base]
        asked: list[tuple[str, SimConfig, StepCosts, Slice | None]] = []
        found = list[Change]()
        if waiting.mean * waiting.memory > 0 or num_preemptions:
            asked.append(("twice the memory", more, costs, None))
        else:
            found.append(Change("twice the memory", "", base, 0.0))
        if waiting.mean * waiting.seats > 0:
            asked.append(("twice the seats", seated, costs, None))
        else:
            found.append(Change("twice the seats", "", base, 0.0))
        asked.append(("even arrivals", config, costs, self.part.evenly()))
        asked.append(("twice the compute", config, ScaledCosts(costs, 0.5), None))
        for name, changed, model, part in asked:
            if self.trials.spent(ASK):
                break
            found.append(self._change(name, "", changed, model, part))
        return found

    def _changes(self, waiting: Waiting) -> tuple[list[Change], list[str]]:
        """What a user can do, each tried where there is time."""
        done, untried = [self._one_more()], list[str]()
        for name, make in self._proposals(waiting):
            if self.trials.spent():
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
            block_bytes = answer.placement.block_bytes(size)
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
        load = LOADS[self._base] * (num + 1) / num
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
        is_least = reached == _end(base) - 1 or (reached > base and self.trials.spent())
        gain = LOADS[reached] / LOADS[base] - 1
        return Change(name, flags, LOADS[reached], gain, is_least)

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
        num_tried = 0
        while high - low > 1:
            if num_tried and self.trials.spent(BASE if keep else 1.0):
                break
            num_tried += 1
            place = min(low + step, high - 1) if high == end else (low + high) // 2
            what = f"{name}, {LOADS[place]:g} x the rate"
            trial = self.trials.run(what, part.at_rate(part.rate * LOADS[place]), config, costs)
            if trial.service.ok:
                low, step = place, (1 if step == first > 1 else min(3, 2 * step))
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
            prefill_context=round(prefill * load.pairs(load.input) / load.input),
            num_decodes=decodes,
            decode_context=round(decodes * load.read),
            num_samples=decodes,
            num_prompts=cdiv(prefill, max(1, round(load.input))),
        )
        without = shape._replace(num_prefill_tokens=0, prefill_context=0, num_prompts=0)
        return 1 - self.costs.step_s(without) / self.costs.step_s(shape)


def _end(base: int) -> int:
    """Behind the last place in `LOADS` that is tried where that at `base` is served already."""
    most = FURTHER * LOADS[base]
    return min(len(LOADS), max(base + 2, sum(load <= most for load in LOADS)))
