"""The record of an engine's decisions: every call that changed them, and what came of it.

A file of JSON lines (gzip or not): a `RecordHeader`, then one call a line, in the order in which
the engine made them. The header and the calls are all that the decisions depend on, so whoever
makes the same calls on a fresh scheduler and memory manager decides the same. Numbers come back
exactly as they were; log probabilities, which decide nothing, are not in it.

The prompts' token ids and the generated ones are in the file: who has it and the tokenizer can
read what was asked and answered.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from octavo.config import KVPolicy, PreemptionMode, PreemptionVictim, SchedulingPolicy
from octavo.plan import BlockCopy, BlockLabel, StepPlan, StepResult
from octavo.request import FinishReason, Request

RECORD_VERSION = 1
"""Of the format; a reader knows one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """All that shapes an engine's decisions, beside the calls it gets."""

    num_blocks: int
    block_size: int
    bytes_per_block: int
    kv_policy: KVPolicy
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_prefix_caching: bool
    num_host_blocks: int
    max_disk_blocks: int
    """0: no disk tier."""
    preemption_mode: PreemptionMode
    preemption_victim: PreemptionVictim
    scheduling_policy: SchedulingPolicy
    watermark: float
    max_watermark: float
    """To which it is raised while preemptions come too thick."""
    token_s: float
    """Prior of the cost model, as is the next."""
    block_s: float
    plan_ahead: bool = False
    """Whether sequences were planned while their last token was being sampled."""
    windows: tuple[int, ...] = (0,)
    """By group of layers the window behind which blocks were given back; 0: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordHeader:
    """The first line."""

    octavo: str
    """Version that wrote it."""
    model: str
    began_s: float
    """The engine's clock when it began."""
    limits: EngineLimits
    disk: tuple[tuple[int, BlockLabel], ...] = ()
    """What an earlier process had left in the disk tier."""
    version: int = RECORD_VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What all calls have in common."""

    error: str | None = None
    """Name of the exception that it ended with."""
    fetched: tuple[tuple[int, bool], ...] = ()
    """Disk blocks that were read meanwhile, and whether they were whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Added(Call):
    """`Scheduler.add`."""

    request: Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Aborted(Call):
    """`Scheduler.abort`."""

    request_id: str
    found: bool = True
    """The answer: whether it was live."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(Call):
    """`Scheduler.finish`."""

    seq_id: int
    reason: FinishReason
    stop_reason: int | str | None = None
    found: bool = True
    """The answer: whether it was live, and no beam."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pinned(Call):
    """`Scheduler.pin`."""

    token_ids: list[int]
    salt: str = ""
    pin_id: int | None = None
    """The answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unpinned(Call):
    """`Scheduler.unpin`."""

    pin_id: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resized(Call):
    """`Scheduler.resize`."""

    num_blocks: int
    now_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixCacheReset(Call):
    """`KVCacheManager.reset_prefix_cache`."""

    num_freed: int = 0
    """The answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheReset(Call):
    """`KVCacheManager.reset_cache`: a step has failed."""

    num_plans: int = 1
    """That are void: it, and those launched after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retold(Call):
    """`Scheduler.retell` of a plan that failed."""

    step_id: int | None = None
    """Of that plan; None: the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flushed(Call):
    """`KVCacheManager.flush_to_disk` at the end."""

    copies: tuple[BlockCopy, ...] = ()
    """What it made `take_copies` answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheduled(Call):
    """`Scheduler.schedule`."""

    now_s: float
    plan: StepPlan | None = None
    num_free: int = 0
    """Blocks that can be allocated afterwards."""
    num_evicted: int = 0
    """Cached blocks that were used for something else since the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Updated(Call):
    """`Scheduler.update`, with the result less its log probabilities."""

    now_s: float
    result: StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(Call):
    """The last line: the engine was closed."""

    why: str
    """`closed`, or how it died."""
    totals: dict[str, int] = field(default_factory=dict)
    """Counters of the scheduler and the prefix cache since the start."""


def totals_of(num_preemptions: int, cache: Any) -> dict[str, int]:
    """What `Ended.totals` holds, of a scheduler's preemptions and `PrefixCacheStats`."""
    names = cache.__dataclass_fields__
    return {"num_preemptions": num_preemptions} | {name: getattr(cache, name) for name in names}
