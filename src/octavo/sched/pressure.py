"""The pool is full: who gives way, who ends, and what is written down about it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from octavo.events import EngineEvent, EventKind
from octavo.kv.manager import KVCacheManager
from octavo.kv.policy import Growth
from octavo.request import FinishReason
from octavo.sched.admission import Admission
from octavo.sched.events import EventLog
from octavo.sched.groups import BeamKeeper
from octavo.sched.preemption import PreemptionPolicy, Unit, Victim
from octavo.sched.roster import Roster
from octavo.sched.sequence import Sequence
from octavo.sched.storm import StormWatch


class Pressure:
    """Makes room. Whoever ends for lack of it is among `Roster.news`."""

    def __init__(
        self,
        kv: KVCacheManager,
        roster: Roster,
        beams: BeamKeeper,
        admission: Admission,
        policy: PreemptionPolicy,
        log: EventLog,
    ) -> None:
        self._kv = kv
        self._roster = roster
        self._beams = beams
        self._admission = admission
        self._policy = policy
        self._log = log
        self._storm = StormWatch(admission.watermark)
        self._num_preempted = self._num_ended = 0
        """Of the roster's counts, those that the storm watch was told of."""

    def grow(self, seq: Sequence, num_tokens: int, num_computed: int) -> Growth | None:
        """Take room for a running sequence from others.

        None: it had to go itself, by preemption, or as the one that fills the pool alone.
        """
        requester = (seq,) if seq.search is None else seq.search.running
        growth = None
        while growth is None:
            if not self.make_room(requester):
                return None
            growth = self._kv.grow(seq.seq_id, num_tokens, num_computed)
        return growth

    def make_room(self, requester: Unit) -> bool:
        """Preempt somebody who was not served yet; False if the requester itself had to go."""
        running = self._roster.running
        candidates = [unit for unit in self._units() if unit[0].place >= requester[0].place]
        is_alone = len(running) == len(requester)
        victim = self._policy.choose(requester, candidates, is_alone=is_alone)
        if victim is None:
            self.end_full(requester[0])
            return False
        self._preempt(victim, requester[0])
        return victim.sequences != requester

    def preempt_last(self, requester: Sequence | None = None) -> bool:
        """The last come of those who run gives its blocks back; False if nobody runs."""
        units = list(self._units())
        if units:
            self._preempt(self._policy.take(units[-1], "last come of those who run"), requester)
        return bool(units)

    def _preempt(self, victim: Victim, requester: Sequence | None) -> None:
        unit, mode = victim.sequences, victim.mode
        group = unit[0].group
        taken = [self._roster.preempt(seq, to_host=mode == "swap") for seq in reversed(unit)]
        group.stats.metrics.num_preemptions += 1
        event = EngineEvent(
            kind=EventKind.PREEMPTED,
            time_s=self._roster.now_s,
            request_id=group.request.request_id,
            why=victim.why,
            by=None if requester is None else requester.group.request.request_id,
            mode=mode,
            num_seqs=len(unit),
            tokens_lost=sum(one.tokens_lost for one in taken),
            tokens_moved=sum(one.tokens_moved for one in taken),
            num_blocks=sum(one.num_blocks for one in taken),
        )
        self._log.preempted(event, [seq.seq_id for seq in unit])

    def _units(self) -> Iterator[Unit]:
        """Who is preempted as a whole, by place."""
        for search, members in groupby(self._roster.running, key=lambda seq: seq.search):
            if search is None:
                yield from ((seq,) for seq in members)
            else:
                yield tuple(members)

    def end_full(self, seq: Sequence) -> None:
        """It has all that the pool can give: it ends by length and keeps its text."""
        group, kv = seq.group, self._kv
        num_seqs = 1 if seq.search is None else len(seq.search.beams)
        why = (
            f"its {len(seq.token_ids)} tokens need a block more, {kv.num_free_blocks} of "
            f"{kv.num_blocks} are free, and nobody else can give way"
        )
        self._log.add(
            EngineEvent(
                kind=EventKind.CUT_SHORT,
                time_s=self._roster.now_s,
                request_id=group.request.request_id,
                why=why,
                num_seqs=num_seqs,
            )
        )
        if seq.search is not None:
            self._roster.news.extend(self._beams.cut_short(group))
        else:
            self._roster.end(seq, FinishReason.LENGTH)
            self._roster.news.append(seq.news())

    def resized(self, old_num_blocks: int, num_moved: int, num_preempted: int) -> None:
        """The pool has another size."""
        why = (
            f"from {old_num_blocks:,} to {self._kv.num_blocks:,} blocks; {num_moved:,} moved, "
            f"{num_preempted:,} sequences preempted for it"
        )
        self._log.add(
            EngineEvent(
                kind=EventKind.RESIZED,
                time_s=self._roster.now_s,
                request_id=None,
                why=why,
                num_blocks=abs(self._kv.num_blocks - old_num_blocks),
                num_seqs=num_preempted,
            )
        )

    def line_blocked(self, head: Sequence, why: str) -> None:
        """The head of the line could not be admitted."""
        self._log.line_blocked(head.group.request.request_id, why, self._roster.now_s)

    def watch(self) -> None:
        """A step was planned: raise or lower the watermark if preemptions came thick or not."""
        roster = self._roster
        num_preempted = roster.num_preemptions - self._num_preempted
        num_ended = roster.num_ended - self._num_ended
        self._num_preempted, self._num_ended = roster.num_preemptions, roster.num_ended
        change = self._storm.step(num_preempted, num_ended)
        if change is None and not roster.sequences:
            change = self._storm.reset()
        if change is not None:
            self._admission.watermark = change.new
            self._log.watermark_changed(change, roster.now_s)
