"""Decisions: which sequences run in the next step, with how many tokens. No torch, no clock.

`Scheduler` is the room's one door. Each step it serves the running sequences, oldest first, then
admits waiting ones while the step's budget and the KV pool allow; when the pool is full, somebody
who came later gives its blocks back and waits. Samples of one prompt are forked from the one that
ran it; the beams of a search run together or not at all.
Steps may be planned before the results of those before are known, also for sequences whose token is
still being sampled. Time comes in as an argument, so the same objects serve a live engine and a
simulation.
"""

from __future__ import annotations

from octavo.sched.scheduler import Scheduler
from octavo.sched.sequence import RequestStats, SeqUpdate

__all__ = ["RequestStats", "Scheduler", "SeqUpdate"]
