"""The memory room: block pool, tables, allocation policies, accounting. No torch, no clock."""

from __future__ import annotations

from octavo.kv.contiguous import ContiguousPolicy
from octavo.kv.ledger import PoolLedger, RequestLedger
from octavo.kv.manager import KVCacheManager
from octavo.kv.memory_plan import MemoryPlan
from octavo.kv.orca import OrcaPolicy
from octavo.kv.paged import PagedPolicy
from octavo.kv.pins import Pin
from octavo.kv.policies import make_policy
from octavo.kv.policy import (
    NO_GROWTH,
    AllocationPolicy,
    Growth,
    GrowthDemand,
    Preempted,
    Promise,
    RestoreCost,
    SeqDemand,
)
from octavo.kv.pool import BlockPool
from octavo.kv.settled import LedgerHistory, LedgerSample, MeanLedger
from octavo.kv.shape import KVShape
from octavo.kv.sizing import plan_memory
from octavo.kv.stats import PrefixCacheStats
from octavo.kv.table import BlockTable
from octavo.kv.tiers import ColdStore, TierLedger

__all__ = [
    "NO_GROWTH",
    "AllocationPolicy",
    "BlockPool",
    "BlockTable",
    "ColdStore",
    "ContiguousPolicy",
    "Growth",
    "GrowthDemand",
    "KVCacheManager",
    "KVShape",
    "LedgerHistory",
    "LedgerSample",
    "MeanLedger",
    "MemoryPlan",
    "OrcaPolicy",
    "PagedPolicy",
    "Pin",
    "PoolLedger",
    "Preempted",
    "PrefixCacheStats",
    "Promise",
    "RequestLedger",
    "RestoreCost",
    "SeqDemand",
    "TierLedger",
    "make_policy",
    "plan_memory",
]
