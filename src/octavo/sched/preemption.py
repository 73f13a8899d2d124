"""Who gives its blocks back when the pool is full."""

from __future__ import annotations

from octavo.sched.sequence import Sequence


def choose_victim(running: list[Sequence], can_preempt: bool) -> Sequence | None:
    """The last come: least priority, then latest arrival (PagedAttention paper, section 4.5).

    `running` is in order of places. None when preempting cannot help: one sequence alone holds
    all there is, or the policy reserved at admission all that it will ever give.

    Running sequences are served from the other end of the same list, so a victim was never served
    in the step that preempts it, unless it is the very one that asks: nothing is to be undone.
    """
    if len(running) < 2 or not can_preempt:
        return None
    return running[-1]
