"""The memory room: block pool, tables, allocation policies, accounting. No torch, no clock."""

from __future__ import annotations

from octavo.kv.ledger import PoolLedger, RequestLedger
from octavo.kv.manager import KVCacheManager
from octavo.kv.paged import PagedPolicy
from octavo.kv.policy import NO_GROWTH, AllocationPolicy, Growth, SeqDemand
from octavo.kv.pool import BlockPool
from octavo.kv.sizing import KVShape, MemoryPlan, plan_memory
from octavo.kv.table import BlockTable

__all__ = [
    "NO_GROWTH",
    "AllocationPolicy",
    "BlockPool",
    "BlockTable",
    "Growth",
    "KVCacheManager",
    "KVShape",
    "MemoryPlan",
    "PagedPolicy",
    "PoolLedger",
    "RequestLedger",
    "SeqDemand",
    "plan_memory",
]
