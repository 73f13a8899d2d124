"""Who is where: every live sequence, waiting or running, and its moves between the two."""

from __future__ import annotations

from bisect import insort
from collections import deque
from operator import attrgetter

from octavo.config import SchedulingPolicy
from octavo.kv.manager import KVCacheManager
from octavo.kv.policy import Preempted
from octavo.outputs import RequestMetrics
from octavo.request import FinishReason, Request
from octavo.sched.beams import BeamState
from octavo.sched.clients import Clients
from octavo.sched.demand import demand_of
from octavo.sched.events import EventLog
from octavo.sched.fair import ClientQueue
from octavo.sched.groups import BeamSearch
from octavo.sched.queues import WaitingQueue, place_in_line
from octavo.sched.sequence import (
    RequestStats,
    Sequence,
    SequenceGroup,
    SequenceStatus,
    SeqUpdate,
)


class Roster:
    """Live sequences in order of their places. A sequence has blocks exactly while it runs."""

    def __init__(self, kv: KVCacheManager, policy: SchedulingPolicy, log: EventLog) -> None:
        self._kv = kv
        self.log = log
        self._policy: SchedulingPolicy = policy
        self.groups: dict[str, SequenceGroup] = {}
        self.sequences: dict[int, Sequence] = {}
        self.clients = Clients(kv)
        self.waiting: WaitingQueue | ClientQueue = WaitingQueue()
        if policy == "fair":
            self.waiting = self._by_client()
        self.running: list[Sequence] = []
        """In order of places: the beams of a request stand side by side."""
        self.to_forget: list[int] = []
        """Ended sequences of which the runner must be told."""
        self.to_empty: list[int] = []
        """Preempted sequences of which the runner must be told."""
        self.news: list[SeqUpdate] = []
        """Of those who ended while a step was planned."""
        self.num_preemptions = 0
        """Sequences preempted since the start."""
        self.num_ended = 0
        """Sequences that ended while they ran, since the start; beams when their search ends."""
        self.num_prompt_tokens = 0
        """Prompt tokens of requests that have started, since the start."""
        self.num_output_tokens = 0
        """Tokens sampled since the start; those of beams when their search ends."""
        self.ended: deque[RequestStats] | None = None
        """Of each request that has ended, for somebody who watches and takes them from here; None:
        nobody does."""
        self.now_s = 0.0
        self._seated: dict[SequenceGroup, int] = {}
        """Of requests of several sequences, those of which some run, and how many."""
        self._num_arrivals = 0
        self._next_seq_id = 0

    @property
    def may_pass(self) -> bool:
        """Whether who comes later may stand before others in line."""
        return self._policy != "fcfs" or isinstance(self.waiting, ClientQueue)

    def _by_client(self) -> ClientQueue:
        return ClientQueue(self.clients, is_fair=self._policy == "fair")

    @property
    def num_reserved_seats(self) -> int:
        """Seats that are kept for sequences that do not run yet, by others of their requests who
        do."""
        return sum(group.num_reserved_seats for group in self._seated)

    @property
    def has_more(self) -> bool:
        """Whether anybody may find a place in a plan that is made ahead; seldom wrongly so, and
        never wrongly not. Cheap: as a rule the first says yes."""
        return bool(self.waiting) or any(
            not seq.num_pending or seq.may_go_ahead for seq in self.running
        )

    def add(self, request: Request, max_total_tokens: int) -> SequenceGroup:
        """Put a request in line."""
        stats = RequestStats(RequestMetrics(arrival_s=request.arrival_s), num_seqs=request.n)
        group = SequenceGroup(request, max_total_tokens, stats, num_unfinished=request.n)
        self.groups[request.request_id] = group
        self.clients.add(group)
        if request.max_kv_share is not None and isinstance(self.waiting, WaitingQueue):
            line, self.waiting = self.waiting, self._by_client()
            for seq in line:
                self.waiting.push(seq)
        place = place_in_line(self._policy, request, self._num_arrivals, 0)
        self._num_arrivals += 1
        if request.beam is not None:
            max_tokens = max_total_tokens - len(request.prompt_token_ids)
            state = BeamState(request.beam, request.eos_token_ids, max_tokens)
            group.search = BeamSearch(state, request.beam.beam_width)
            stats.num_seqs = request.beam.beam_width
        num_sequences = 1 if group.search is not None else request.n
        for index in range(num_sequences):
            seq = self._new(group, index, (*place[:2], index))
            group.sequences.append(seq)
            group.unborn[seq.seq_id] = seq
        self.promote(group)
        return group

    def _new(
        self, group: SequenceGroup, sample_index: int, place: tuple[int, int, int]
    ) -> Sequence:
        seq = Sequence(self._next_seq_id, group, sample_index, place, [], group.search)
        seq.status = SequenceStatus.UNBORN
        self._next_seq_id += 1
        self.sequences[seq.seq_id] = seq
        if group.search is not None:
            group.search.num_made += 1
        return seq

    def promote(self, group: SequenceGroup) -> None:
        """The first unborn sequence gets in line, to run the prompt, and to carry the others."""
        seq = group.unborn.pop(next(iter(group.unborn)))
        seq.token_ids = list(group.request.prompt_token_ids)
        if group.unborn:
            group.carrier = seq
        if group.search is not None:
            group.search.beams = [seq]
        self._line_up(seq)

    def start_head(self, num_seqs: int = 1) -> Sequence:
        """The head of the line gets a block table and runs; `num_seqs` of its request will."""
        seq = self.waiting.pop()
        group = seq.group
        seq.num_computed_tokens = self._kv.start(
            seq.seq_id, demand_of(seq, num_seqs), group.request.request_id
        )
        self._is_back(seq)
        if not group.has_begun:
            group.has_begun = True
            self.clients.begin(group)
            group.num_charged_tokens = len(seq.token_ids) - seq.num_computed_tokens
        if group.stats.metrics.first_scheduled_s is None:
            group.stats.metrics.first_scheduled_s = self.now_s
            self.num_prompt_tokens += len(group.request.prompt_token_ids)
            self.log.wait_over(group.request.request_id, group.request.arrival_s, self.now_s)
        return seq

    def _is_back(self, seq: Sequence) -> None:
        """It has a block table, for the first time or again."""
        if seq.has_run:
            self.log.back(seq.seq_id, self.now_s)
        seq.has_run = True
        self._run(seq)

    def rejoin(self) -> Sequence:
        """The head of the line, a beam, comes back as a fork of one at their common tokens' end."""
        beam = self.waiting.pop()
        search = beam.search
        assert search is not None
        first = search.running[0]
        assert first.num_computed_tokens == search.rejoin_at, f"beam {first.seq_id} is elsewhere"
        self._kv.drop_hold(beam.seq_id)
        self._kv.fork(first.seq_id, beam.seq_id, beam.token_ids)
        beam.num_computed_tokens = first.num_computed_tokens
        self._is_back(beam)
        if len(search.running) == len(search.beams):
            search.rejoin_at = None
        return beam

    def give_birth(self, carrier: Sequence, *, with_blocks: bool = True) -> None:
        """Those forked from it in a plan get its blocks and run, like any other sequence. Without
        blocks, or room to copy them, they get in line."""
        group = carrier.group
        for child in [c for c in group.expected.values() if c.parent is carrier]:
            del group.expected[child.seq_id]
            child.parent = None
            child.token_ids = list(group.request.prompt_token_ids)
            self._fork(carrier, child, with_blocks=with_blocks)

    def _expect_fewer(self, carrier: Sequence) -> None:
        """A sample ended that was to be forked from it: nobody takes what is promised to that."""
        group = carrier.group
        num_forks = sum(child.parent is carrier for child in group.expected.values())
        if group.carrier is carrier:
            num_forks += min(carrier.num_reserved, len(group.unborn))
        self._kv.expect_forks(carrier.seq_id, num_forks)

    def fork_beam(self, parent: Sequence) -> Sequence:
        """A new beam with the parent's tokens, and its blocks if it has any."""
        search = parent.search
        assert search is not None
        child = self._new(parent.group, 0, (*parent.place[:2], search.num_made))
        child.token_ids = list(parent.token_ids)
        self._fork(parent, child, with_blocks=parent.status is SequenceStatus.RUNNING)
        return child

    def _fork(self, parent: Sequence, child: Sequence, *, with_blocks: bool) -> None:
        child.has_run = True
        if with_blocks and self._kv.fork(parent.seq_id, child.seq_id, child.token_ids):
            child.num_computed_tokens = parent.num_computed_tokens
            self._run(child)
        else:
            self._line_up(child)

    def preempt(self, seq: Sequence, *, to_host: bool) -> Preempted:
        """Back in line without its blocks. Its tokens stay; their KV is found or computed again
        later, or moved to the host meanwhile."""
        if seq.group.expected:
            self.give_birth(seq, with_blocks=False)
        self._run_no_more(seq)
        taken = self._kv.preempt(seq.seq_id, to_host)
        num_known = min(seq.num_computed_tokens, len(seq.token_ids))
        seq.num_answered = max(seq.num_answered, num_known)
        seq.num_computed_tokens = seq.num_reserved = 0
        self._line_up(seq)
        if seq.has_table_there:
            self.to_empty.append(seq.seq_id)
            seq.has_table_there = False
        self.num_preemptions += 1
        return taken

    def end(
        self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """It gives back all that it holds, wherever it is on its way."""
        group = seq.group
        assert group.search is None, "beams do not end one by one"
        self.num_ended += seq.status is SequenceStatus.RUNNING
        self._remove(seq)
        seq.finish_reason = reason
        seq.stop_reason = stop_reason
        if group.carrier is seq:
            group.carrier = None
            if group.unborn:
                self.promote(group)
        group.num_unfinished -= 1
        if not group.num_unfinished:
            self._close(group)

    def drop_beam(self, beam: Sequence) -> None:
        """None of the next beams continues it."""
        self._remove(beam)

    def end_search(self, group: SequenceGroup) -> None:
        """The search is over, or was aborted."""
        assert group.search is not None
        self.num_ended += len(group.search.running)
        for beam in group.search.beams:
            self._remove(beam)
        group.search.beams, group.search.forks, group.search.appends = [], [], []
        group.num_unfinished = 0
        self._close(group)

    def end_all(self, group: SequenceGroup) -> None:
        """A request is aborted."""
        if group.search is not None:
            self.end_search(group)
            return
        for seq in reversed(group.sequences):  # the unborn before their carrier
            if seq.status is not SequenceStatus.ENDED:
                self.end(seq, FinishReason.ABORT)

    def _run(self, seq: Sequence) -> None:
        seq.status = SequenceStatus.RUNNING
        insort(self.running, seq, key=attrgetter("place"))
        group = seq.group
        if group.is_family:
            self._seated[group] = self._seated.get(group, 0) + 1

    def _run_no_more(self, seq: Sequence) -> None:
        self.running.remove(seq)
        group = seq.group
        if group.is_family:
            self._seated[group] -= 1
            if not self._seated[group]:
                del self._seated[group]

    def _line_up(self, seq: Sequence) -> None:
        seq.status = SequenceStatus.WAITING
        self.waiting.push(seq)

    def _remove(self, seq: Sequence) -> None:
        group = seq.group
        if seq.status is SequenceStatus.RUNNING:
            if group.expected:
                self.give_birth(seq)
            self._run_no_more(seq)
            self._kv.release(seq.seq_id)
        elif seq.status is SequenceStatus.WAITING:
            self.waiting.discard(seq)
            if seq.has_run:
                self._kv.drop_hold(seq.seq_id)
                self.log.back(seq.seq_id, self.now_s)
            if seq.seq_id in self.to_empty:
                self.to_empty.remove(seq.seq_id)
        else:
            group.unborn.pop(seq.seq_id, None)
            group.expected.pop(seq.seq_id, None)
            carrier = seq.parent or group.carrier
            if carrier is not None and carrier.status is SequenceStatus.RUNNING:
                self._expect_fewer(carrier)
        if seq.known_to_runner:
            self.to_forget.append(seq.seq_id)
        seq.status = SequenceStatus.ENDED
        del self.sequences[seq.seq_id]

    def _close(self, group: SequenceGroup) -> None:
        """The last sequence ended: the request's id may come again from now on."""
        request_id = group.request.request_id
        if group.stats.metrics.first_scheduled_s is None:
            self.log.wait_over(request_id, group.request.arrival_s, self.now_s, aborted=True)
        group.stats.metrics.finished_s = self.now_s
        group.stats.kv = self._kv.close_request(request_id)
        del self.groups[request_id]
        self.clients.close(group)
        if self.ended is not None:
            self.ended.append(group.stats)

    def drop_lost(self) -> list[str]:
        """While nobody runs or waits: forget requests that are here all the same, and have the
        runner told. What they hold in the pool stays held. Returns their ids."""
        assert not self.running and not self.waiting
        for group in self.groups.values():
            self.clients.close(group)
        lost, self.groups = list(self.groups), {}
        for seq in self.sequences.values():
            seq.status = SequenceStatus.ENDED
            if seq.known_to_runner:
                self.to_forget.append(seq.seq_id)
        self.sequences, self._seated = {}, {}
        return lost

    def runner_was_told(self) -> None:
        """A plan has taken over `to_forget` and `to_empty`: begin new lists."""
        self.to_forget = []
        self.to_empty = []
