"""What a plan says of a sequence that computes in it, and what of that is noted on the sequence."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

from octavo.kv.manager import KVCacheManager
from octavo.kv.policy import Growth
from octavo.plan import NewSeq, SeqFork, SeqPlan, StepPlan
from octavo.sched.roster import Roster
from octavo.sched.sequence import Sequence


class PlanWriter:
    """Writes plans. Who runs, and with how many tokens, is decided before (`Planner`)."""

    def __init__(self, kv: KVCacheManager, roster: Roster) -> None:
        self._kv = kv
        self._roster = roster

    def put(self, plan: StepPlan, seq: Sequence, end: int, growth: Growth) -> None:
        """Write down a sequence's share, up to position `end`; from here on it is computed."""
        new_block_ids, replaced, of_groups, group_replaced = growth
        seq_id = seq.seq_id
        start = seq.num_computed_tokens
        sample = end >= len(seq.token_ids)
        if not seq.known_to_runner:
            self._introduce(plan, seq)
        num_tokens = end - start
        share = (
            seq_id, start, num_tokens, new_block_ids, replaced, sample, of_groups, group_replaced
        )  # fmt: skip
        plan.seqs.append(tuple.__new__(SeqPlan, share))  # SeqPlan(*share), at half the time
        group = seq.group
        if sample:
            seq.num_pending += 1
            if group.is_family:
                self._draw_together(plan, seq)
        if new_block_ids:
            seq.has_table_there = True
        seq.num_computed_tokens = end
        group.stats.num_computed_tokens += num_tokens
        if end <= len(seq.token_ids):  # else `Scheduler.update` does, when it knows the token
            self._kv.commit(seq_id, end)

    def _introduce(self, plan: StepPlan, seq: Sequence) -> None:
        request = seq.group.request
        sampler = request.sampler
        if seq.group.has_forked and sampler.num_prompt_logprobs is not None:
            sampler = replace(sampler, num_prompt_logprobs=None)  # another one brought them
        plan.new_seqs.append(
            NewSeq(seq.seq_id, request.prompt_token_ids, sampler, seq.sample_index)
        )
        seq.known_to_runner = True

    def _draw_together(self, plan: StepPlan, seq: Sequence) -> None:
        """What a plan says besides, when one of several sequences draws."""
        search = seq.search
        if seq.group.carrier is seq:
            self._fork_samples(plan, seq)
        elif search is not None and seq is search.beams[-1]:
            plan.beams.append(search.draw())

    def _fork_samples(self, plan: StepPlan, carrier: Sequence) -> None:
        """As many samples as have seats begin as copies of their carrier, whose prompt is
        computed; each draws its first token from the same logits."""
        group = carrier.group
        children = list(islice(group.unborn.values(), carrier.num_reserved))
        for child in children:
            del group.unborn[child.seq_id]
            group.expected[child.seq_id] = child
            child.parent = carrier
            child.num_pending = 1
            child.known_to_runner = True
            plan.forks.append(
                SeqFork(
                    carrier.seq_id, child.seq_id, len(carrier.token_ids), group.request.sampler,
                    child.sample_index,
                )
            )  # fmt: skip
        if children:
            plan.extra_draws[carrier.seq_id] = tuple(child.seq_id for child in children)
        carrier.num_reserved = 0
        group.has_forked = True
        group.carrier = None
        if group.unborn:
            self._roster.promote(group)
