"""What commands that simulate refuse, and what they tell to be repeated by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from octavo import __version__
from octavo.config import KVPolicy
from octavo.errors import ConfigError
from octavo.util import flag_name

if TYPE_CHECKING:
    from octavo.cli.lab_flags import SimFlags
    from octavo.cli.workload_flags import ArrivalFlags, TraceFlags
    from octavo.lab.workload import Workload


def check_warm_up(warm_up_s: float) -> None:
    """Raises `ConfigError`."""
    if not 0 <= warm_up_s < float("inf"):
        raise ConfigError(f"--warm-up must be at least 0 seconds, got {warm_up_s:g}")


def check_engine(engine: SimFlags, policies: Sequence[KVPolicy], arrivals: ArrivalFlags) -> None:
    """Refuse flags that would do nothing together under any of these policies (invariant I6)."""
    if "paged" not in policies:
        for name in ("enable_prefix_caching", "num_host_blocks"):
            if getattr(engine, name):
                listed = ", ".join(policies)
                raise ConfigError(f"{flag_name(name)} is for the policy paged, not {listed}")
    if engine.preemption_mode == "swap" and not engine.num_host_blocks:
        raise ConfigError("--preemption-mode swap needs --num-host-blocks to swap to")
    looked_at = (engine.scheduling_policy, engine.preemption_victim)
    if arrivals.priorities and "priority" not in looked_at:
        raise ConfigError("--priorities needs --scheduling-policy priority: nobody looks at them")


def told_flags(requests: TraceFlags, workload: Workload) -> dict[str, Any]:
    """What a simulation can be repeated by, beside its engine, as JSON."""
    return {
        "version": __version__,
        "trace": requests.trace,
        "seed": requests.seed,
        "workload": workload.about,
        "arrival": workload.arrival,
        "concurrency": workload.concurrency,
    }
