"""Who is where: every live sequence, waiting or running, and its moves between the two."""

from __future__ import annotations

from bisect import insort
from operator import attrgetter

from octavo.config import SchedulingPolicy
from octavo.kv.manager import KVCacheManager
from octavo.kv.policy import SeqDemand
from octavo.outputs import RequestMetrics
from octavo.request import FinishReason, Request
from octavo.sched.queues import WaitingQueue, place_in_line
from octavo.sched.sequence import RequestStats, Sequence, SequenceGroup, SequenceStatus


class Roster:
    """Live sequences in order of their places. A sequence has blocks exactly while it runs."""

    def __init__(self, kv: KVCacheManager, policy: SchedulingPolicy) -> None:
        self._kv = kv
        self._policy: SchedulingPolicy = policy
        self.groups: dict[str, SequenceGroup] = {}
        self.sequences: dict[int, Sequence] = {}
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []
        """In order of places."""
        self.to_forget: list[int] = []
        """Ended sequences of which the runner must be told."""
        self.to_empty: list[int] = []
        """Preempted sequences of which the runner must be told."""
        self.num_preemptions = 0
        self.now_s = 0.0
        self._num_arrivals = 0
        self._next_seq_id = 0

    def add(self, request: Request, max_total_tokens: int) -> SequenceGroup:
        """Put a request's sequences in line."""
        stats = RequestStats(RequestMetrics(arrival_s=request.arrival_s))
        group = SequenceGroup(request, max_total_tokens, stats, num_unfinished=request.n)
        self.groups[request.request_id] = group
        for index in range(request.n):
            place = place_in_line(self._policy, request, self._num_arrivals, index)
            token_ids = list(request.prompt_token_ids)
            seq = Sequence(self._next_seq_id, group, index, place, token_ids)
            self._next_seq_id += 1
            group.sequences.append(seq)
            self.sequences[seq.seq_id] = seq
            self.waiting.push(seq)
        self._num_arrivals += 1
        return group

    def start_head(self) -> Sequence:
        """The head of the line gets a block table and runs."""
        seq = self.waiting.pop()
        group = seq.group
        seq.num_computed_tokens = self._kv.start(
            seq.seq_id, demand_of(seq), group.request.request_id
        )
        seq.status = SequenceStatus.RUNNING
        insort(self.running, seq, key=attrgetter("place"))
        if group.stats.metrics.first_scheduled_s is None:
            group.stats.metrics.first_scheduled_s = self.now_s
        return seq

    def preempt(self, seq: Sequence) -> None:
        """Back in line without its blocks. Its tokens stay; their KV is computed again later."""
        self.running.remove(seq)
        self._kv.release(seq.seq_id)
        seq.num_computed_tokens = 0
        seq.status = SequenceStatus.WAITING
        self.waiting.push(seq)
        self.to_empty.append(seq.seq_id)
        seq.group.stats.metrics.num_preemptions += 1
        self.num_preemptions += 1

    def end(
        self, seq: Sequence, reason: FinishReason, stop_reason: int | str | None = None
    ) -> None:
        """It gives back all that it holds, wherever it is on its way."""
        if seq.status is SequenceStatus.RUNNING:
            self.running.remove(seq)
            self._kv.release(seq.seq_id)
        else:
            self.waiting.discard(seq)
            if seq.seq_id in self.to_empty:
                self.to_empty.remove(seq.seq_id)
        if seq.known_to_runner:
            self.to_forget.append(seq.seq_id)
        seq.status = SequenceStatus.ENDED
        seq.finish_reason = reason
        seq.stop_reason = stop_reason
        del self.sequences[seq.seq_id]
        seq.group.num_unfinished -= 1
        if not seq.group.num_unfinished:
            self._close(seq.group)

    def _close(self, group: SequenceGroup) -> None:
        """The last sequence ended: the request's id may come again from now on."""
        request_id = group.request.request_id
        group.stats.metrics.finished_s = self.now_s
        group.stats.kv = self._kv.close_request(request_id)
        del self.groups[request_id]

    def runner_was_told(self) -> None:
        """A plan has taken over `to_forget` and `to_empty`: begin new lists."""
        self.to_forget = []
        self.to_empty = []


def demand_of(seq: Sequence) -> SeqDemand:
    """What a sequence brings, and will need at most."""
    return SeqDemand(len(seq.token_ids), seq.group.max_total_tokens, token_ids=seq.token_ids)
