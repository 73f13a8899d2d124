"""Random lives of sequences in a paged pool."""

from __future__ import annotations

from kv_machine import SETTINGS, PoolMachine

TestPagedMachine = PoolMachine.TestCase
TestPagedMachine.settings = SETTINGS
