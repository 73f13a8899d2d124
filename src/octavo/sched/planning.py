"""Who runs in a step, with how many tokens, and who gives way when the pool is full."""

from __future__ import annotations

from octavo.kv.manager import KVCacheManager
from octavo.kv.policy import NO_GROWTH
from octavo.plan import SeqPlan, StepPlan
from octavo.sched.admission import Admission
from octavo.sched.budget import SetAside, StepBudget
from octavo.sched.events import beams_behind, no_seat, no_token_yet, no_tokens
from octavo.sched.groups import BeamSearch
from octavo.sched.plan_writer import PlanWriter
from octavo.sched.pressure import Pressure
from octavo.sched.roster import Roster
from octavo.sched.sequence import Sequence


class Planner:
    """Fills plans. Whoever ends meanwhile, because the pool is full, is among `Roster.news`."""

    def __init__(
        self,
        kv: KVCacheManager,
        roster: Roster,
        admission: Admission,
        pressure: Pressure,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        plan_ahead: bool = False,
    ) -> None:
        self._kv = kv
        self._roster = roster
        self._admission = admission
        self._pressure = pressure
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._plan_ahead = plan_ahead
        self._writer = PlanWriter(kv, roster)
        self._set_aside = SetAside(roster, plan_ahead=plan_ahead)

    def fill(self, plan: StepPlan) -> int:
        """Decide who runs; returns how many tokens are computed.

        Who runs is served before anyone is admitted, so a new prompt takes only what decodes
        leave; and everyone who runs gets at least one token, so decodes do not hold up prompts
        either. Who was preempted is as a rule not admitted again in the same step: it gave its
        blocks up because they were too few.
        """
        budget = self._new_budget()
        self._serve_running(plan, budget)
        self._admit_waiting(plan, budget)
        if not plan.seqs and self._roster.running:
            budget = self._unblock(plan, budget)
        budget.check()
        return self._max_num_batched_tokens - budget.num_tokens_left

    def _new_budget(self) -> StepBudget:
        num_seats = self._max_num_seqs - self._roster.num_reserved_seats
        return StepBudget(self._max_num_batched_tokens, num_seats)

    # -- who runs

    def _serve_running(self, plan: StepPlan, budget: StepBudget) -> None:
        """One token for a decode; for a prompt under way as many as the others leave it."""
        running, plan_ahead = self._roster.running, self._plan_ahead
        grow, by_force, commit = self._kv.grow, self._pressure.grow, self._kv.commit
        add, new = plan.seqs.append, tuple.__new__
        self._set_aside.begin_round()
        num_plain = 0  # decodes that are in the plan, and whose tokens and seats are not spent yet
        index = 0
        while index < len(running):
            seq = running[index]
            if seq.search is not None:
                budget.take(num_plain, num_plain)
                num_plain = 0
                index = self._serve_beams(plan, budget, seq.search, index)
                continue
            index += 1
            group, num_known, num_pending = seq.group, len(seq.token_ids), seq.num_pending
            # `not seq.may_go_ahead`, written out.
            if num_pending and (
                not plan_ahead
                or num_pending > 1
                or num_known >= group.ahead_until
                or group.expected
            ):
                budget.take(0)  # its next token does not exist yet
                continue
            start = seq.num_computed_tokens
            num_tokens = num_left = num_known + num_pending - start
            if num_left > 1:
                budget.take(num_plain, num_plain)
                num_plain = 0
                num_tokens = min(
                    num_left, budget.num_tokens_left - self._set_aside.from_place(index)
                )
            end = start + num_tokens
            growth = grow(seq.seq_id, end, start)
            if growth is None:
                if num_pending:  # nobody gives way for a token that may not be wanted
                    budget.take(0)
                    continue
                growth = by_force(seq, end, start)
            if growth is None:  # it has given way itself
                index -= 1
                continue
            if num_left > 1 or growth is not NO_GROWTH or group.is_family:
                self._writer.put(plan, seq, end, growth)
                budget.take(num_tokens)
                continue
            # The same, written out for most of those who run in most steps. The runner knows it:
            # what it has in the pool is told with its first blocks, and here none are new.
            assert seq.known_to_runner, f"sequence {seq.seq_id} has blocks that nobody told of"
            add(new(SeqPlan, (seq.seq_id, start, 1, (), None, True, (), ())))
            seq.num_pending = num_pending + 1
            seq.num_computed_tokens = end
            group.stats.num_computed_tokens += 1
            if not num_pending:  # else `Scheduler.update` does, when it knows the token
                commit(seq.seq_id, end)
            num_plain += 1
        budget.take(num_plain, num_plain)

    def _serve_beams(
        self, plan: StepPlan, budget: StepBudget, search: BeamSearch, index: int
    ) -> int:
        """Serve the beams that stand at `index` and after it; returns who is next."""
        beams = search.running
        after = index + len(beams)
        if search.is_drawing:
            budget.take(0, len(beams))
            return after
        if search.is_ready:
            return after if self._draw(plan, budget, search, by_force=True) else index
        for beam in beams:
            num_tokens = search.num_to_compute(beam)
            if not num_tokens:
                budget.take(0)
                continue
            if search.last_step_id == plan.step_id:
                budget.take(0)  # one at a time: where it has no room all of them may give way
                continue
            num_tokens = min(num_tokens, budget.num_tokens_left - self._set_aside.from_place(after))
            start = beam.num_computed_tokens
            end = start + num_tokens
            growth = self._kv.grow(beam.seq_id, end, start)
            if growth is None:
                growth = self._pressure.grow(beam, end, start)
            if growth is None:
                return index
            search.tell(plan)
            self._writer.put(plan, beam, end, growth)
            budget.take(num_tokens)
        return after

    def _draw(
        self, plan: StepPlan, budget: StepBudget, search: BeamSearch, *, by_force: bool
    ) -> bool:
        """All beams compute their last tokens and draw; False if there is no room for that."""
        demands = [(b.seq_id, len(b.token_ids), b.num_computed_tokens) for b in search.beams]
        while not self._kv.can_grow_all(demands):
            need = f"its {len(demands)} beams need more blocks than are free"
            if not by_force or not self._pressure.make_room(search.running, need):
                return False
        search.tell(plan)
        for beam in search.beams:
            start, end = beam.num_computed_tokens, len(beam.token_ids)
            growth = self._kv.grow(beam.seq_id, end, start)
            assert growth is not None, f"no room for beam {beam.seq_id}, which was promised some"
            self._writer.put(plan, beam, end, growth)
            if by_force:
                budget.take(1)
            else:  # their seats are taken
                budget.take(1, 0)
        return True

    # -- who comes in

    def _admit_waiting(self, plan: StepPlan, budget: StepBudget) -> None:
        """Strictly in order: while the head of the line does not fit, nobody passes it."""
        roster = self._roster
        while (head := roster.waiting.head()) is not None:
            if head.num_pending:  # preempted in the middle of a step
                self._pressure.line_blocked(head, no_token_yet())
                break
            search = head.search
            if search is not None and any(search.num_to_compute(b) for b in search.running):
                self._pressure.line_blocked(head, beams_behind())
                break
            num_seats = self._num_seats(head, budget)
            why = self._why_not_in_step(num_seats, budget)
            if why is not None:
                self._pressure.line_blocked(head, why)
                break
            if search is not None and search.rejoin_at is not None and search.running:
                self._rejoin(plan, budget)
                continue
            is_alone = not roster.running or _are_beams_of(search, roster.running)
            if not self._admission.fits_now(head, num_seats, pool_is_idle=is_alone):
                if not is_alone:
                    why = self._admission.why_no_room(head, num_seats)
                    self._pressure.line_blocked(head, why)
                    break
                if search is not None and search.last_step_id == plan.step_id:
                    self._pressure.line_blocked(head, beams_behind())
                    break  # another beam is in this plan: the search ends with the next one
                if not self._pressure.restart(head):
                    self._pressure.end_full(head)  # it cannot have more than an idle pool
                continue
            seq = roster.start_head(max(1, num_seats))
            if head.group.carrier is head:
                head.num_reserved = num_seats - 1
            self._compute_first(plan, budget, seq, num_seats)
        self._pressure.passed(dict(roster.waiting.passed))

    def _rejoin(self, plan: StepPlan, budget: StepBudget) -> None:
        """The head of the line, a beam, begins as a fork of another one. It computes nothing in the
        plan in which that one computes what they share."""
        beam = self._roster.rejoin()
        search, start = beam.search, beam.num_computed_tokens
        assert search is not None
        end = start + min(search.num_to_compute(beam), budget.num_tokens_left)
        has_room = self._kv.can_grow_all([(beam.seq_id, end, start)])
        if has_room and search.last_step_id != plan.step_id:
            self._compute_first(plan, budget, beam, 0)

    def why_blocked(self, head: Sequence) -> str | None:
        """Why the head of the line could not come in now, if each of those who run, of whom none
        is a beam, would compute one token before; None if it could."""
        budget = self._new_budget()
        num_running = len(self._roster.running)
        budget.take(num_running, num_running)
        num_seats = self._num_seats(head, budget)
        why = self._why_not_in_step(num_seats, budget)
        if why is not None or self._admission.fits_now(head, num_seats, pool_is_idle=False):
            return why
        return self._admission.why_no_room(head, num_seats)

    def _why_not_in_step(self, num_seats: int, budget: StepBudget) -> str | None:
        """What the step lacks for one that wants so many seats; None if it lacks nothing."""
        if budget.num_tokens_left < 1 and not self._kv.batches_requests:
            return no_tokens(self._max_num_batched_tokens)
        if num_seats > budget.num_seats_left:
            return no_seat(num_seats, self._max_num_seqs)
        return None

    def _num_seats(self, head: Sequence, budget: StepBudget) -> int:
        """Seats that have to be free for it. The first carrier of a request wants one for every
        sample, or all there are; a later one takes what it can get."""
        group = head.group
        if group.search is not None:
            return 0 if group.search.running else group.search.width
        if group.carrier is not head:
            return 1
        num_wanted = 1 + len(group.unborn)
        most = max(1, budget.num_seats_left) if group.has_forked else self._max_num_seqs
        return min(num_wanted, most)

    def _compute_first(
        self, plan: StepPlan, budget: StepBudget, seq: Sequence, num_seats: int
    ) -> None:
        """The first tokens of one that was just admitted: none, if a batch was let in as a whole
        and others have taken what there was."""
        start = seq.num_computed_tokens
        search = seq.search
        num_tokens = len(seq.token_ids) - start if search is None else search.num_to_compute(seq)
        num_tokens = min(num_tokens, budget.num_tokens_left)
        budget.take(num_tokens, num_seats)
        if num_tokens:
            growth = self._kv.grow(seq.seq_id, start + num_tokens, start)
            assert growth is not None, f"sequence {seq.seq_id} was admitted without room"
            if search is not None:
                search.tell(plan)
            self._writer.put(plan, seq, start + num_tokens, growth)
        elif (
            search is not None
            and search.is_ready
            and search.last_step_id != plan.step_id
            and len(search.beams) <= budget.num_tokens_left
        ):
            self._draw(plan, budget, search, by_force=False)

    def _unblock(self, plan: StepPlan, budget: StepBudget) -> StepBudget:
        """Nobody was served. Unless tokens are being sampled, those who run are beams whose others
        have no room: the last come give way until the head of the line is whole."""
        roster = self._roster
        for _ in range(len(roster.running) + 1):
            head = roster.waiting.head()
            if head is not None and head.num_pending:
                return budget
            if any(seq.num_pending for seq in roster.running):
                return budget
            if head is not None and roster.running[-1].group is not head.group:
                self._pressure.preempt_last(head)
            budget = self._new_budget()
            self._serve_running(plan, budget)
            self._admit_waiting(plan, budget)
            if plan.seqs or not roster.running:
                return budget
        raise AssertionError("nobody can run, and nobody can give way")


def _are_beams_of(search: BeamSearch | None, running: list[Sequence]) -> bool:
    return search is not None and running[0].search is running[-1].search is search
