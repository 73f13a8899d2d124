"""Whom a failed step takes along."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.kv.manager import KVCacheManager
from octavo.plan import CopyKind, StepPlan
from octavo.sched.sequence import Sequence

_INTO_POOL = {CopyKind.WITHIN, CopyKind.FROM_HOST, CopyKind.FROM_DISK}


def hit_by(plan: StepPlan, kv: KVCacheManager, running: Iterable[Sequence]) -> list[int]:
    """The sequences that cannot go on if a plan was not carried out: those that run in it, and
    those that have blocks into which it copies or computes. (Who found all but its last token in
    what another one computes in the same step has blocks without running.)"""
    written = {copy.dst for copy in plan.copies if copy.kind in _INTO_POOL}
    seq_ids = [share.seq_id for share in plan.seqs]
    if not all(kv.has(seq_id) for seq_id in seq_ids):  # who knows which blocks they had?
        return [*seq_ids, *(seq.seq_id for seq in running)]
    for share in plan.seqs:
        written |= kv.written_blocks(share.seq_id, share.start)
    for seq in running:
        if not written.isdisjoint(kv.written_blocks(seq.seq_id, 0)):
            seq_ids.append(seq.seq_id)
    return seq_ids
