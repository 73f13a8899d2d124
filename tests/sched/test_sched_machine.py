"""The scheduler over the paged pool, through everything that the machine can think of."""

from __future__ import annotations

from hypothesis import settings
from sched_machine import SchedulerMachine

TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=40)
