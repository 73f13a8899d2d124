"""The scheduler: picks what runs in each step, and takes in what came of it."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.config import SchedulingPolicy
from octavo.errors import ConfigError, InvalidRequestError
from octavo.kv.manager import KVCacheManager
from octavo.kv.policy import Growth
from octavo.plan import NewSeq, SeqPlan, StepPlan, StepResult
from octavo.request import FinishReason, Request
from octavo.sched.admission import Admission
from octavo.sched.budget import StepBudget
from octavo.sched.preemption import choose_victim
from octavo.sched.roster import Roster
from octavo.sched.sequence import RequestStats, Sequence, SequenceStatus, SeqUpdate
from octavo.sched.stopping import why_it_ends


class Scheduler:
    """Iteration-level scheduling over a pool of KV blocks.

    The loop around it, until `has_unfinished()` is False::

        plan = scheduler.schedule(now_s)
        if plan is None:
            updates = scheduler.take_updates()
        else:
            updates = scheduler.update(runner.execute(plan), now_s)

    Several plans may be under way at once; results come in the order of the plans. A sequence
    whose token is still being sampled sits out the plans made meanwhile. Requests may be added,
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
    ) -> None:
        """`kv` is an empty pool, used by nobody else. Limits are those of `EngineConfig`.

        `watermark` is the share of the pool that admitting leaves free for the growth of those
        who run. Raises `ConfigError` naming the limit it refuses.
        """
        if not 1 <= max_num_seqs <= max_num_batched_tokens:
            raise ConfigError(
                f"max_num_seqs={max_num_seqs} must be at least 1 and at most "
                f"max_num_batched_tokens={max_num_batched_tokens}: every running sequence "
                "computes at least one token a step"
            )
        self._kv = kv
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._admission = Admission(kv, max_model_len, watermark)
        self._roster = Roster(kv, policy)
        self._updates: list[SeqUpdate] = []
        """News that did not wait for a step's result."""
        self._next_step_id = 0
        self._next_result_id = 0

    # -- requests come and go

    def add(self, request: Request) -> RequestStats:
        """Put a request in line; returns the record of what it goes through.

        Raises `RequestCapacityError` for what can never fit, with the arithmetic, and
        `InvalidRequestError` for the id of a live request.
        """
        if request.request_id in self._roster.groups:
            raise InvalidRequestError(
                f"request_id {request.request_id!r} belongs to a request that has not ended: "
                "choose another id, or wait for its end",
                parameter="request_id",
            )
        max_total_tokens = self._admission.max_total_tokens(request)
        return self._roster.add(request, max_total_tokens).stats

    def abort(self, request_id: str) -> bool:
        """End all sequences of a request, at any moment; False if it is not live."""
        group = self._roster.groups.get(request_id)
        if group is None:
            return False
        for seq in group.sequences:
            if seq.status is not SequenceStatus.ENDED:
                self._roster.end(seq, FinishReason.ABORT)
        return True

    def finish(
        self, seq_id: int, reason: FinishReason, stop_reason: int | str | None = None
    ) -> bool:
        """End one sequence from outside (a stop string was found); False if it is not live.

        Like `abort`, it makes no update: the caller knows.
        """
        seq = self._roster.sequences.get(seq_id)
        if seq is None:
            return False
        self._roster.end(seq, reason, stop_reason)
        return True

    # -- a step is planned

    def schedule(self, now_s: float) -> StepPlan | None:
        """Decide the next step; None when nothing can run now.

        Who runs is served before anyone is admitted, so a new prompt takes only what decodes
        leave; and everyone who runs gets at least one token, so decodes do not hold up prompts
        either. Who was preempted is as a rule not admitted again in the same step: it gave its
        blocks up because they were too few.
        """
        self._set_time(now_s)
        roster = self._roster
        plan = StepPlan(self._next_step_id, finished=roster.to_forget, preempted=roster.to_empty)
        budget = StepBudget(self._max_num_batched_tokens, self._max_num_seqs)
        self._serve_running(plan, budget)
        self._admit_waiting(plan, budget)
        budget.check()

        if not plan.seqs:
            return None  # the next plan will say who ended or was preempted
        roster.runner_was_told()
        self._next_step_id += 1
        return plan

    def _serve_running(self, plan: StepPlan, budget: StepBudget) -> None:
        """One token for a decode; for a prompt under way as many as the others leave it."""
        running = self._roster.running
        grow = self._kv.grow
        index = 0
        while index < len(running):
            seq = running[index]
            index += 1
            if seq.num_pending:  # its next token does not exist yet
                budget.take(0)
                continue
            start = seq.num_computed_tokens
            num_tokens = len(seq.token_ids) - start
            if num_tokens > 1:
                others = sum(1 for other in running[index:] if not other.num_pending)
                num_tokens = min(num_tokens, budget.num_tokens_left - others)
            end = start + num_tokens
            growth = grow(seq.seq_id, end, start) or self._grow_by_force(seq, end, start)
            if growth is not None:  # else it was the last of the line, and has left it
                self._put_in_plan(plan, seq, end, growth)
                budget.take(num_tokens)

    def _admit_waiting(self, plan: StepPlan, budget: StepBudget) -> None:
        """Strictly in order: while the head of the line does not fit, nobody passes it."""
        roster = self._roster
        while budget.is_open and (head := roster.waiting.head()) is not None:
            if head.num_pending:
                break  # preempted while its token was being sampled: first let that come
            if not self._admission.fits_now(head, pool_is_idle=not roster.running):
                if roster.running:
                    break
                self._end_full(head)  # it cannot have more than an idle pool
                continue
            seq = roster.start_head()
            if not seq.known_to_runner:
                self._introduce(plan, seq)
            start = seq.num_computed_tokens
            num_tokens = min(len(seq.token_ids) - start, budget.num_tokens_left)
            growth = self._kv.grow(seq.seq_id, start + num_tokens, start)
            assert growth is not None, f"sequence {seq.seq_id} was admitted without room"
            self._put_in_plan(plan, seq, start + num_tokens, growth)
            budget.take(num_tokens)

    def _introduce(self, plan: StepPlan, seq: Sequence) -> None:
        request = seq.group.request
        plan.new_seqs.append(
            NewSeq(seq.seq_id, request.prompt_token_ids, request.sampler, seq.sample_index)
        )
        seq.known_to_runner = True

    def _put_in_plan(self, plan: StepPlan, seq: Sequence, end: int, growth: Growth) -> None:
        """Write down a sequence's share, up to position `end`; from here on it is computed."""
        new_block_ids, replaced, copy = growth
        if copy is not None:
            plan.copies.append(copy)
        seq_id = seq.seq_id
        start = seq.num_computed_tokens
        sample = end == len(seq.token_ids)
        share = (seq_id, start, end - start, new_block_ids, replaced, sample)
        plan.seqs.append(tuple.__new__(SeqPlan, share))  # SeqPlan(*share), at half the time
        if sample:
            seq.num_pending = 1
        seq.num_computed_tokens = end
        seq.group.stats.num_computed_tokens += end - start
        self._kv.commit(seq_id, end)

    def _grow_by_force(self, seq: Sequence, num_tokens: int, num_computed: int) -> Growth | None:
        """The pool is full: take room for a running sequence from the last come.

        None: it had to go itself, as the last come, or as the one that fills the pool alone.
        """
        growth = None
        while growth is None:
            victim = choose_victim(self._roster.running, self._kv.can_preempt)
            if victim is None:
                self._end_full(seq)
                return None
            self._roster.preempt(victim)
            if victim is seq:
                return None
            growth = self._kv.grow(seq.seq_id, num_tokens, num_computed)
        return growth

    def _end_full(self, seq: Sequence) -> None:
        """It has all that the pool can give: it ends by length and keeps its text."""
        self._roster.end(seq, FinishReason.LENGTH)
        self._updates.append(seq.news())

    # -- a step's result comes in

    def update(self, result: StepResult, now_s: float) -> list[SeqUpdate]:
        """Append the sampled tokens and end what has to end; the news of all concerned.

        Results come in the order of their plans. A plan whose result never comes (the runner
        failed) may be skipped once its requests are aborted.
        """
        assert self._next_result_id <= result.step_id < self._next_step_id, (
            f"result of step {result.step_id}, expected one of {self._next_result_id} to "
            f"{self._next_step_id - 1}"
        )
        self._next_result_id = result.step_id + 1
        self._set_time(now_s)
        updates = self.take_updates()
        sequences = self._roster.sequences
        prompt_logprobs = dict(result.prompt_logprobs)
        for seq_id, token_id, logprobs in result.sampled:
            seq = sequences.get(seq_id)
            if seq is None:
                continue  # it ended while the step ran
            self._take_token(seq, token_id)
            of_token = () if logprobs is None else (logprobs,)
            of_prompt = tuple(prompt_logprobs.pop(seq_id, ())) if prompt_logprobs else ()
            updates.append(seq.news((token_id,), of_token, of_prompt))
        for seq_id, of_chunk in prompt_logprobs.items():
            if seq_id in sequences:
                updates.append(sequences[seq_id].news(prompt_logprobs=tuple(of_chunk)))
        return updates

    def _take_token(self, seq: Sequence, token_id: int) -> None:
        seq.num_pending -= 1
        seq.token_ids.append(token_id)
        metrics = seq.group.stats.metrics
        metrics.num_generation_tokens += 1
        metrics.last_token_s = self._roster.now_s
        if metrics.first_token_s is None:
            metrics.first_token_s = self._roster.now_s
        ending = why_it_ends(seq)
        if ending is not None:
            self._roster.end(seq, *ending)

    def take_updates(self) -> list[SeqUpdate]:
        """News that did not wait for a step's result: who ended while a step was planned."""
        updates, self._updates = self._updates, []
        return updates

    def retell(self, plan: StepPlan) -> None:
        """The runner failed in this plan, and may not have heard who ended or was preempted: the
        next plan says it again. To be called once the requests of the plan are aborted."""
        roster = self._roster
        roster.to_forget[:0] = plan.finished
        roster.to_empty[:0] = [i for i in plan.preempted if i in roster.sequences]

    # -- what is going on

    def has_unfinished(self) -> bool:
        """Whether a sequence is live, or the news of one's end was not taken."""
        return bool(self._roster.sequences or self._updates)

    def seq_ids(self, request_id: str) -> tuple[int, ...]:
        """A live request's sequences by sample index, ended ones too; empty if it is not live."""
        group = self._roster.groups.get(request_id)
        return () if group is None else tuple(seq.seq_id for seq in group.sequences)

    def request_ids_of(self, seq_ids: Iterable[int]) -> list[str]:
        """The live requests among the owners of these sequences, each once, in arrival order."""
        sequences = self._roster.sequences
        owners = {sequences[i].group.request.request_id for i in seq_ids if i in sequences}
        return [request_id for request_id in self._roster.groups if request_id in owners]

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._roster.running)

    @property
    def num_waiting(self) -> int:
        """Sequences in line, preempted ones included."""
        return len(self._roster.waiting)

    @property
    def num_preemptions(self) -> int:
        """Preemptions since the start."""
        return self._roster.num_preemptions

    def _set_time(self, now_s: float) -> None:
        self._roster.now_s = now_s
        self._kv.set_time(now_s)
