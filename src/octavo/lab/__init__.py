"""The lab: what paging buys, measured on your own work by the scheduler itself, under a fake clock.

No torch and no weights: the same `Scheduler` and `KVCacheManager` that serve, a model that only
counts, and a cost model that says how long a step takes.
"""
