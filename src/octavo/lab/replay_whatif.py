"""What if: a recorded workload served by an engine that differs from the recorded one."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from octavo.errors import ConfigError
from octavo.lab.costs import StepCosts
from octavo.lab.replay_meter import RunFigures
from octavo.lab.replay_run import Progress, Run
from octavo.lab.replay_workload import RecordedWorkload
from octavo.record import EngineLimits
from octavo.util import flag_name

_ABOUT_PAGES = (
    "enable_prefix_caching", "num_host_blocks", "preemption_mode", "preemption_victim", "watermark",
)  # fmt: skip
"""Limits that mean nothing where space is reserved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """The same requests three times. Seconds of the last two are of the cost model."""

    recorded: RunFigures
    """As the engine ran."""
    before: RunFigures
    """Simulated with the recorded limits: how far it is from `recorded` is the error of the model
    of times."""
    after: RunFigures
    """Simulated with the changed ones."""
    changes: dict[str, tuple[object, object]]
    """By limit, what was recorded and what it was changed to."""
    costs: str
    """Where the step times are from."""
    notes: tuple[str, ...]
    """What of the record could not be taken over."""

    def as_dict(self) -> dict[str, object]:
        """For machines."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        runs = {name: values[name].as_dict() for name in ("recorded", "before", "after")}
        changes = {name: list(pair) for name, pair in self.changes.items()}
        return values | runs | {"changes": changes, "notes": list(self.notes)}


def changed_limits(limits: EngineLimits, changes: dict[str, object]) -> EngineLimits:
    """The limits with some of their fields changed (None: not).

    A block size that comes without a number of blocks keeps the tokens that pool and host hold.
    Where space is reserved nobody is preempted: swapping becomes recomputing, as in an engine that
    is started so. Raises `ConfigError` for a value that is the recorded one, out of range, or of
    no effect.
    """
    asked = {name: value for name, value in changes.items() if value is not None}
    policy = asked.get("kv_policy", limits.kv_policy)
    not_paged = policy != "paged"
    for name, value in asked.items():
        if value == getattr(limits, name):
            raise ConfigError(
                f"{flag_name(name)} {value} is what was recorded: it changes nothing, drop it"
            )
        least = 0 if name == "num_host_blocks" else 1
        if isinstance(value, int) and not isinstance(value, bool) and value < least:
            raise ConfigError(f"{flag_name(name)} must be at least {least}, got {value}")
        if not_paged and name in _ABOUT_PAGES:
            raise ConfigError(
                f"{flag_name(name)} has no effect under --kv-policy {policy}, which neither moves, "
                "keeps nor takes away blocks: drop it"
            )
    size = asked.get("block_size")
    if isinstance(size, int):
        for name in ("num_blocks", "num_host_blocks"):
            num = getattr(limits, name) * limits.block_size // size
            asked.setdefault(name, max(num, 1) if name == "num_blocks" else num)
        asked["bytes_per_block"] = limits.bytes_per_block // limits.block_size * size
    if not_paged and limits.windows != (0,):
        raise ConfigError(
            f"--kv-policy {policy} keeps all layers in one block, and the recorded engine had "
            f"{len(limits.windows)} groups of layers, some of which gave blocks back: record one "
            "with --disable-hybrid-kv-cache-manager to compare policies"
        )
    if not_paged:
        asked["num_host_blocks"] = 0
        if limits.preemption_mode == "swap":
            asked["preemption_mode"] = "recompute"
    new: EngineLimits = dataclasses.replace(limits, **asked)  # type: ignore[arg-type]
    if new.preemption_mode == "swap" and not new.num_host_blocks:
        raise ConfigError(
            "--preemption-mode swap needs host memory, and the recorded engine had none: add "
            "--num-host-blocks"
        )
    if not 0 <= new.watermark < 1:
        raise ConfigError(f"--watermark must be at least 0 and below 1, got {new.watermark:g}")
    if not 1 <= new.max_num_seqs <= new.max_num_batched_tokens:
        raise ConfigError(
            f"--max-num-seqs {new.max_num_seqs} must be at most --max-num-batched-tokens "
            f"{new.max_num_batched_tokens}"
        )
    return new


def what_if(
    workload: RecordedWorkload,
    recorded: RunFigures,
    limits: EngineLimits,
    changed: EngineLimits,
    costs: StepCosts,
    progress: Progress | None = None,
) -> WhatIf:
    """Serve the recorded requests at their recorded times, by both engines.

    Every sequence generates its recorded tokens, and ends behind the last of them at the latest, be
    it that it was cut short for lack of memory. Who was aborted is aborted at the recorded time,
    and draws tokens that mean nothing if that is later than its last recorded one. Who was refused
    asks again, and is left out if the engine would have it: what it would generate is not known.
    Nor is what another engine would find on disk: that tier is left out.
    """
    notes = _notes(workload, limits, changed)
    if limits.max_disk_blocks:
        limits = dataclasses.replace(limits, max_disk_blocks=0)
        changed = dataclasses.replace(changed, max_disk_blocks=0)
    runs = []
    for one in (limits, changed):
        run = Run(
            workload,
            one,
            costs,
            resizes=(one.num_blocks, one.block_size) == (limits.num_blocks, limits.block_size),
            knows_lengths=one is changed and _knows_lengths(limits, changed),
            progress=progress,
        )
        run.run()
        runs.append(run)
        which = "changed" if one is changed else "simulated"
        notes += [note for note in run.notes if note not in notes]
        if run.num_overtaken:
            notes.append(
                f"{run.num_overtaken:,} requests that had come to an idle engine come to a busy "
                f"one when {which}: whoever sent them may have waited for answers"
            )
        if run.num_left_out:
            notes.append(
                f"accepted when {which}, but left out, as nobody knows what they would have "
                f"generated: {run.num_left_out:,} of the refused requests"
            )
    pairs = {
        field.name: (getattr(limits, field.name), getattr(changed, field.name))
        for field in dataclasses.fields(EngineLimits)
    }
    return WhatIf(
        recorded=recorded,
        before=runs[0].meter.figures(),
        after=runs[1].meter.figures(),
        changes={name: pair for name, pair in pairs.items() if pair[0] != pair[1]},
        costs=costs.name,
        notes=tuple(notes),
    )


def _notes(workload: RecordedWorkload, limits: EngineLimits, changed: EngineLimits) -> list[str]:
    """What is told before anything is simulated."""
    notes = []
    if limits.max_disk_blocks:
        notes.append("the disk tier is left out of both simulations")
    if num := sum(bool(came.cut) for came in workload.requests):
        notes.append(f"aborted at the recorded times, and in no latency: {num:,} requests")
    if _knows_lengths(limits, changed):
        notes.append(
            f"{changed.kv_policy} goes by the recorded lengths; a live engine, which does not know "
            "them, goes by max_tokens"
        )
    if limits.preemption_mode == "swap" and changed.kv_policy != "paged":
        notes.append(f"{changed.kv_policy} preempts nobody: nothing is swapped")
    return notes


def _knows_lengths(limits: EngineLimits, changed: EngineLimits) -> bool:
    """Whether the changed engine is to reserve by true lengths: the policy that it is changed to is
    about knowing them."""
    return changed.kv_policy in ("orca-oracle", "orca-pow2") and (
        changed.kv_policy != limits.kv_policy
    )
