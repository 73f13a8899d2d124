"""The pool is full: who gives way, who ends, and what is written down about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
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
from octavo.sched.sequence import Sequence, SequenceGroup
from octavo.sched.storm import StormWatch
from octavo.util import cdiv


@dataclass(frozen=True, slots=True)
class ModeTotals:
    """What preemptions of one mode did since the start."""

    num_seqs: int = 0
    tokens_moved: int = 0
    """Token states that went to host memory."""
    tokens_lost: int = 0
    """Token states that were given up; found again or computed again."""


@dataclass(frozen=True, slots=True)
class PressureTotals:
    """What happened for lack of memory since the start; unlike events, never forgotten."""

    by_mode: dict[str, ModeTotals]
    num_storms: int
    """How often the admission watermark was raised."""
    num_events_forgotten: int
    """Events that had to make room for later ones."""


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
        max_watermark: float,
    ) -> None:
        self._kv = kv
        self._roster = roster
        self._beams = beams
        self._admission = admission
        self._policy = policy
        self._log = log
        self._storm = StormWatch(admission.watermark, cap=max_watermark)
        self._by_mode: dict[str, ModeTotals] = {}
        self._num_storms = 0
        self._num_preempted = self._num_ended = 0
        """Of the roster's counts, those that the storm watch was told of."""

    @property
    def max_watermark(self) -> float:
        """To which admission's watermark is raised at most."""
        return self._storm.max_watermark

    def grow(self, seq: Sequence, num_tokens: int, num_computed: int) -> Growth | None:
        """Take room for a running sequence from others.

        None: it had to go itself, by preemption, or as the one that fills the pool alone.
        """
        kv = self._kv
        requester = (seq,) if seq.search is None else seq.search.running
        num_needed = cdiv(num_tokens, kv.block_size) - len(kv.block_table(seq.seq_id))
        num_needed *= len(kv.windows)
        growth = None
        while growth is None:
            # If new blocks are not what is lacking, it is the one for a copy.
            num = max(0, num_needed) + (num_needed <= kv.num_free_blocks)
            if not self.make_room(requester, f"needs {num:,} block{'s' * (num != 1)}"):
                return None
            growth = kv.grow(seq.seq_id, num_tokens, num_computed)
        return growth

    def make_room(self, requester: Unit, need: str) -> bool:
        """Preempt somebody who was not served yet; False if the requester itself had to go. `need`
        says how much it wants. Where space is reserved nobody can help it: it has outgrown what it
        was expected to need."""
        if not self._kv.can_preempt:
            self.end_full(requester[0], self._why_outgrown(requester))
            return False
        running = self._roster.running
        candidates = [unit for unit in self._units() if unit[0].place >= requester[0].place]
        is_alone = len(running) == len(requester)
        victim = self._policy.choose(requester, candidates, is_alone=is_alone)
        if victim is None:
            self.end_full(requester[0])
            return False
        self._preempt(victim, requester[0], f"{need}, {self._num_free}")
        return victim.sequences != requester

    def preempt_last(self, requester: Sequence) -> None:
        """The last come of those who run gives its blocks back, so that the head of the line can
        come in."""
        num_blocks = self._kv.num_needed(len(requester.token_ids))
        need = f"needs up to {num_blocks:,} blocks, {self._num_free}"
        self._preempt(self._take_last(), requester, need)

    def restart(self, head: Sequence) -> bool:
        """A beam has no room though only others of its search run: where layers have windows these
        have given back what it would share, and it may be gone. One of them computes again what all
        have in common, and the others are forked from it: that is what admission has counted on.
        False if that is no way out."""
        search, kv = head.search, self._kv
        if search is None or not any(kv.windows) or not search.running:
            return False
        if search.rejoin_at is not None:
            return False
        search.rejoin_at = search.num_common_tokens
        why = "its beams start again together, as forks of one"
        victim = Victim(search.running, "recompute", why, 0.0)
        self._preempt(victim, head, f"lacks what its siblings gave back, {self._num_free}")
        return True

    def shrink(self, num_blocks: int, num_over: int) -> bool:
        """The same, as the pool is to have so many blocks; False if nobody runs."""
        if not self._roster.running:
            return False
        need = f"the pool shrinks to {num_blocks:,} blocks, {num_over:,} fewer than are in use"
        self._preempt(self._take_last(), None, need)
        return True

    def keep_whole(self, group: SequenceGroup) -> None:
        """If some beams of a search had no room when they were forked (policies that do not share
        blocks copy them), the others give way too: they run together."""
        search = group.search
        if search is None or not (running := search.running):
            return
        num_left = len(search.beams) - len(running)
        if num_left:
            need = f"no room to copy {num_left} of its {len(search.beams)} beams, {self._num_free}"
            self._preempt(self._policy.take(running, "they run together"), running[0], need)

    def _take_last(self) -> Victim:
        *_, last = self._units()
        return self._policy.take(last, "last come of those who run")

    @property
    def _num_free(self) -> str:
        return f"{self._kv.num_free_blocks:,} of {self._kv.num_blocks:,} free"

    def _preempt(self, victim: Victim, requester: Sequence | None, need: str) -> None:
        """`need` says for what, with the arithmetic."""
        unit, mode = victim.sequences, victim.mode
        group = unit[0].group
        taken = [self._roster.preempt(seq, to_host=mode == "swap") for seq in reversed(unit)]
        group.stats.metrics.num_preemptions += 1
        event = EngineEvent(
            kind=EventKind.PREEMPTED,
            time_s=self._roster.now_s,
            request_id=group.request.request_id,
            why=f"{need}; {victim.why}",
            by=None if requester is None else requester.group.request.request_id,
            mode=mode,
            num_seqs=len(unit),
            tokens_lost=sum(one.tokens_lost for one in taken),
            tokens_moved=sum(one.tokens_moved for one in taken),
            num_blocks=sum(one.num_blocks for one in taken),
        )
        self._log.preempted(event, [seq.seq_id for seq in unit])
        sums = self._by_mode.get(mode, ModeTotals())
        self._by_mode[mode] = replace(
            sums,
            num_seqs=sums.num_seqs + event.num_seqs,
            tokens_moved=sums.tokens_moved + event.tokens_moved,
            tokens_lost=sums.tokens_lost + event.tokens_lost,
        )

    def totals(self) -> PressureTotals:
        """Counted since the start."""
        return PressureTotals(dict(self._by_mode), self._num_storms, self._log.num_forgotten)

    def _units(self) -> Iterator[Unit]:
        """Who is preempted as a whole, by place."""
        for search, members in groupby(self._roster.running, key=lambda seq: seq.search):
            if search is None:
                yield from ((seq,) for seq in members)
            else:
                yield tuple(members)

    def _why_outgrown(self, requester: Unit) -> str:
        kv, group = self._kv, requester[0].group
        num_tokens = max(len(seq.token_ids) for seq in requester)
        num_slots = len(kv.block_table(requester[0].seq_id)) * kv.block_size
        return (
            f"--kv-policy {kv.policy.name} reserved {num_slots:,} slots for "
            f"{len(group.request.prompt_token_ids):,} prompt and "
            f"{group.request.expected_output_tokens} expected output tokens "
            f"(expected_output_tokens), and its {num_tokens:,} tokens do not fit"
        )

    def end_full(self, seq: Sequence, why: str | None = None) -> None:
        """It has all that it can get: it ends by length and keeps its text. `why`, if not for lack
        of blocks."""
        group, kv = seq.group, self._kv
        num_seqs = 1 if seq.search is None else len(seq.search.beams)
        if why is None:
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

    def passed(self, reasons: dict[str, str]) -> None:
        """Heads of clients' lines that others pass now, and why."""
        self._log.passed(reasons)

    def most_quiet_steps(self) -> int:
        """How many steps without pressure the storm watch would let pass."""
        roster = self._roster
        if roster.num_preemptions != self._num_preempted:
            return 0
        return self._storm.most_quiet_steps(roster.num_ended - self._num_ended)

    def quiet_steps(self, num_steps: int) -> None:
        """That many passed: the same as `watch` after each of them."""
        self.watch()
        self._storm.quiet_steps(num_steps - 1)

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
            self._num_storms += change.is_raise
            self._admission.watermark = change.new
            self._log.watermark_changed(change, roster.now_s)
