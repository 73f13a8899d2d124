"""The scheduler: picks what runs in each step, and takes in what came of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

from octavo.config import PreemptionMode, PreemptionVictim, SchedulingPolicy
from octavo.errors import CapacityError, ConfigError, InvalidRequestError
from octavo.events import EngineEvent
from octavo.kv.manager import KVCacheManager
from octavo.kv.pins import Pin
from octavo.plan import StepPlan, StepResult
from octavo.request import FinishReason, Request
from octavo.sched.admission import Admission
from octavo.sched.costs import CostModel
from octavo.sched.events import EventLog
from octavo.sched.failures import hit_by
from octavo.sched.groups import BeamKeeper
from octavo.sched.moves import one_after_the_other
from octavo.sched.planning import Planner
from octavo.sched.preemption import PreemptionPolicy
from octavo.sched.pressure import Pressure, PressureTotals
from octavo.sched.promises import check_pins, check_resize
from octavo.sched.roster import Roster
from octavo.sched.sequence import RequestStats, SeqUpdate
from octavo.sched.stride import QuietSteps, Stride, Strider
from octavo.sched.tokens import take_tokens


class Scheduler:
    """Iteration-level scheduling over a pool of KV blocks.

    The loop around it, until `has_unfinished()` is False::

        plan = scheduler.schedule(now_s)
        if plan is None:
            updates = scheduler.take_updates()
        else:
            updates = scheduler.update(runner.execute(plan), now_s)

    Several plans may be under way at once; results come in the order of the plans. A sequence
    whose token is still being sampled sits out the plans made meanwhile; with `plan_ahead` it sits
    out only from the second on, and where the sampler must know the token. Requests may be added,
    aborted and finished between any two calls, also while a step runs: what that step yields for
    a sequence that has ended is dropped.
    """

    def __init__(
        self,
        kv: KVCacheManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        policy: SchedulingPolicy = "fcfs",
        watermark: float = 0.01,
        max_watermark: float = 0.125,
        preemption_mode: PreemptionMode = "recompute",
        preemption_victim: PreemptionVictim = "last-come",
        costs: CostModel | None = None,
        plan_ahead: bool = False,
    ) -> None:
        """`kv` is an empty pool, used by nobody else. Limits are those of `EngineConfig`.

        `watermark` is the share of the pool that admitting leaves free for the growth of those
        who run; it is raised while preemptions come too thick, to `max_watermark` at most (at or
        below `watermark`: never). `costs` has the priors of what copying and computing cost, and
        learns from results. `plan_ahead`: the runner feeds a token that it has sampled to the next
        step by itself. Raises `ConfigError` naming the limit it refuses.
        """
        if not 1 <= max_num_seqs <= max_num_batched_tokens:
            raise ConfigError(
                f"max_num_seqs={max_num_seqs} must be at least 1 and at most "
                f"max_num_batched_tokens={max_num_batched_tokens}: every running sequence "
                "computes at least one token a step"
            )
        self._kv = kv
        self._costs = CostModel() if costs is None else costs
        self._log = EventLog()
        self.roster = Roster(kv, policy, self._log)
        self.admission = Admission(kv, max_model_len, max_num_seqs, watermark)
        self._beams = BeamKeeper(self.roster)
        self._pressure = Pressure(
            kv,
            self.roster,
            self._beams,
            self.admission,
            PreemptionPolicy(kv, self._costs, mode=preemption_mode, victim=preemption_victim),
            self._log,
            max_watermark,
        )
        self._planner = Planner(
            kv,
            self.roster,
            self.admission,
            self._pressure,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            plan_ahead=plan_ahead,
        )
        self.plan_ahead = plan_ahead
        self._strider = Strider(kv, self.roster, self._planner, self._pressure, self._costs)
        self._moved: dict[int, int] | None = None
        """By old ids the new ones of blocks that resizes have moved, until the runner is told."""
        self._sizes: deque[tuple[int, int]] = deque()
        """(step, tokens) of those whose results are not here."""
        self._draws: dict[int, list[int]] = {}
        """By step whose result is not here: the first beam of each search that draws in it."""
        self.next_step_id = 0
        self._next_result_id = 0

    # -- requests come and go

    def add(self, request: Request) -> RequestStats:
        """Put a request in line; returns the record of what it goes through.

        Raises `RequestCapacityError` for what can never fit, with the arithmetic, and
        `InvalidRequestError` for the id of a live request.
        """
        if request.request_id in self.roster.groups:
            raise InvalidRequestError(
                f"request_id {request.request_id!r} belongs to a request that has not ended: "
                "choose another id, or wait for its end",
                parameter="request_id",
            )
        max_total_tokens = self.admission.max_total_tokens(request)
        return self.roster.add(request, max_total_tokens).stats

    def abort(self, request_id: str) -> bool:
        """End all sequences of a request, at any moment; False if it is not live."""
        group = self.roster.groups.get(request_id)
        if group is None:
            return False
        self.roster.end_all(group)
        return True

    def finish(
        self, seq_id: int, reason: FinishReason, stop_reason: int | str | None = None
    ) -> bool:
        """End one sequence from outside (a stop string was found); False if it is not live, or
        a beam: those end together.

        Like `abort`, it makes no update: the caller knows.
        """
        seq = self.roster.sequences.get(seq_id)
        if seq is None or seq.search is not None:
            return False
        self.roster.end(seq, reason, stop_reason)
        return True

    # -- a step is planned

    def schedule(self, now_s: float) -> StepPlan | None:
        """Decide the next step (see `Planner.fill`); None when nothing can run now.

        After a `resize` that shrank the pool the next plan has no `seqs`.
        """
        self._set_time(now_s)
        self._kv.begin_step()
        roster = self.roster
        plan = StepPlan(self.next_step_id, finished=roster.to_forget, preempted=roster.to_empty)
        num_tokens = 0
        if self._moved is not None:
            plan.moved.extend(self._moved.items())
            self._moved = None
        else:
            num_tokens = self._planner.fill(plan)
            if plan.seqs or not self._sizes:  # else it waits for a result: that is no step
                self._pressure.watch()
            if not plan.seqs:
                return None  # the next plan will say who ended or was preempted, and what is copied
        if plan.finished:
            ended = {share.seq_id for share in plan.seqs}.intersection(plan.finished)
            assert not ended, f"step {plan.step_id} runs sequences that it forgets: {ended}"
        roster.runner_was_told()
        plan.copies.extend(self._kv.take_copies())
        if plan.beams:
            self._draws[plan.step_id] = [draw.seq_ids[0] for draw in plan.beams]
        self._sizes.append((plan.step_id, num_tokens))
        self.next_step_id += 1
        return plan

    # -- a step's result comes in

    def update(self, result: StepResult, now_s: float) -> list[SeqUpdate]:
        """Append the sampled tokens and end what has to end; the news of all concerned.

        Results come in the order of their plans. A plan whose result never comes (the runner
        failed) may be skipped once its requests are aborted.
        """
        assert self._next_result_id <= result.step_id < self.next_step_id, (
            f"result of step {result.step_id}, expected one of {self._next_result_id} to "
            f"{self.next_step_id - 1}"
        )
        self._next_result_id = result.step_id + 1
        self._set_time(now_s)
        self._learn(result)
        updates = self.take_updates()
        take_tokens(result, self.roster, self._kv, updates)
        if self._draws:
            updates += self._take_candidates(result)
        return updates

    def _learn(self, result: StepResult) -> None:
        """What computing and copying cost, for the next choice between the two."""
        sizes = self._sizes
        while sizes and sizes[0][0] < result.step_id:
            sizes.popleft()  # that result never came
        if sizes and sizes[0][0] == result.step_id:
            _, num_tokens = sizes.popleft()
            if result.compute_s > 0:
                self._costs.observe_step(num_tokens, result.compute_s)
        if result.num_host_copies:
            self._costs.observe_copies(result.num_host_copies, result.copy_s)

    def _take_candidates(self, result: StepResult) -> list[SeqUpdate]:
        updates: list[SeqUpdate] = []
        for step_id in [i for i in self._draws if i <= result.step_id]:
            first_beams = self._draws.pop(step_id)
            if step_id < result.step_id:
                continue  # that result never came
            for seq_id, candidates in zip(first_beams, result.beams, strict=True):
                beam = self.roster.sequences.get(seq_id)
                if beam is not None:
                    updates += self._beams.advance(beam.group, candidates)
                    self._pressure.keep_whole(beam.group)
        return updates

    def take_updates(self) -> list[SeqUpdate]:
        """News that did not wait for a step's result: who ended while a step was planned."""
        updates, self.roster.news = self.roster.news, []
        return updates

    def retell(self, plan: StepPlan) -> None:
        """The runner failed in this plan, and may not have heard who ended or was preempted: the
        next plan says it again. To be called once the requests of the plan are aborted. Not for a
        plan that moves blocks: after that nobody knows where they are."""
        assert not plan.moved, f"step {plan.step_id}, which moves blocks, has failed"
        roster = self.roster
        roster.to_forget[:0] = plan.finished
        roster.to_empty[:0] = [i for i in plan.preempted if i in roster.sequences]

    # -- without a runner

    def quiet_steps(self) -> QuietSteps | None:
        """The coming steps in which nothing can change; None if the next one has to be planned.

        For simulations, see `take_quiet_steps`."""
        if self._sizes or self._next_result_id != self.next_step_id or self._moved is not None:
            return None
        return self._strider.look()

    def take_quiet_steps(self, stride: Stride, token_of: Callable[[int], int]) -> list[SeqUpdate]:
        """See `Strider.take`. All is left exactly as `schedule` and `update` would have, for each
        of the steps, but that a runner is told nothing."""
        self.next_step_id += len(stride.times)
        self._next_result_id = self.next_step_id
        return self._strider.take(stride, token_of)

    # -- the pool's size, and what is left of it

    def pin(self, token_ids: list[int], salt: str = "") -> Pin:
        """Keep the whole blocks of a prefix, as far as they are in the pool now, until `unpin`.

        Raises `CapacityError`, with the arithmetic, when pins would have more than half of the
        pool, or what a live request was promised.
        """
        pin = self._kv.pin(token_ids, salt)
        try:
            check_pins(self._kv, self.roster.groups.values())
        except CapacityError:
            self._kv.unpin(pin.pin_id)
            raise
        return pin

    def unpin(self, pin_id: int) -> None:
        """Let go of a pinned prefix. Raises `InvalidRequestError` for an id that is not pinned."""
        self._kv.unpin(pin_id)

    def resize(self, num_blocks: int, now_s: float) -> None:
        """Make the pool so large, while requests run; the last come give way if it shrinks.

        If it shrinks, the next plan moves and saves blocks, and does nothing else: memory behind
        the new end may be given up once that ran. New memory must be there before the next plan.
        Raises `CapacityError` when a live request, or pinned blocks, could never fit.
        """
        self._set_time(now_s)
        self._kv.begin_step()
        kv, old = self._kv, self._kv.num_blocks
        check_resize(kv, num_blocks, self.roster.groups.values())
        num_preempted = self.roster.num_preemptions
        while kv.can_preempt and (num_over := kv.resize_shortfall(num_blocks)):
            if not self._pressure.shrink(num_blocks, num_over):
                break
        moved = kv.resize(num_blocks)
        if num_blocks < old:
            self._moved = one_after_the_other(self._moved or {}, dict(moved))
        self._pressure.resized(old, len(moved), self.roster.num_preemptions - num_preempted)

    # -- what is going on

    def events(self, request_id: str | None = None) -> list[EngineEvent]:
        """What memory pressure did to requests, or to this one, by the time it began."""
        groups = dict.fromkeys(seq.group for seq in self.roster.waiting)
        waiting = [
            (group.request.request_id, group.request.arrival_s)
            for group in groups
            if group.stats.metrics.first_scheduled_s is None
        ]
        return self._log.events(request_id, waiting=waiting, now_s=self.roster.now_s)

    @property
    def has_more(self) -> bool:
        """Whether a plan besides those under way is worth trying."""
        return self._moved is not None or self.roster.has_more

    def has_unfinished(self) -> bool:
        """Whether a sequence is live, or the news of one's end was not taken."""
        return bool(self.roster.sequences or self.roster.news)

    def seq_ids(self, request_id: str) -> tuple[int, ...]:
        """A live request's sequences by sample index, ended ones too; under beam search its beams
        of the moment, best first. Empty if it is not live."""
        group = self.roster.groups.get(request_id)
        if group is None:
            return ()
        sequences = group.sequences if group.search is None else group.search.beams
        return tuple(seq.seq_id for seq in sequences)

    def untold_ids(self, request_id: str, index: int) -> list[int]:
        """Output of a sample that no update has told (`Request.told_at_end`); none if its request
        is not live."""
        group = self.roster.groups.get(request_id)
        return group.sequences[index].output_ids if group and group.told_at_end else []

    def request_ids_of(self, seq_ids: Iterable[int]) -> list[str]:
        """The live requests among the owners of these sequences, each once, in arrival order."""
        sequences = self.roster.sequences
        owners = {sequences[i].group.request.request_id for i in seq_ids if i in sequences}
        return [request_id for request_id in self.roster.groups if request_id in owners]

    def request_ids_in(self, plan: StepPlan) -> list[str]:
        """The live requests that cannot go on if a plan was not carried out: see `hit_by`."""
        return self.request_ids_of(hit_by(plan, self._kv, self.roster.running))

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self.roster.running)

    @property
    def num_waiting(self) -> int:
        """Sequences in line, preempted ones included."""
        return len(self.roster.waiting)

    @property
    def num_preemptions(self) -> int:
        """Preemptions since the start."""
        return self.roster.num_preemptions

    @property
    def pressure_totals(self) -> PressureTotals:
        """What memory pressure did since the start, counted."""
        return self._pressure.totals()

    def _set_time(self, now_s: float) -> None:
        self.roster.now_s = now_s
        self._kv.set_time(now_s)
