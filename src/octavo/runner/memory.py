"""How much memory there is."""

from __future__ import annotations

import os
from pathlib import Path

CGROUPS = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Memory this process can still take: the machine's, or its control group's if that is less.

    Memory of other processes is thereby noticed; page cache counts as available.
    """
    import psutil

    return min([int(psutil.virtual_memory().available), *cgroup_left(CGROUPS, _own_cgroup())])


def cgroup_left(root: Path, own: str) -> list[int]:
    """Bytes left under each control group limit that holds this process (version 2, then 1).

    root: where the groups are mounted; own: the path of this process's version 2 group below it.
    """
    found = []
    group = root / own.strip("/")
    for folder in (group, *(p for p in group.parents if p == root or root in p.parents)):
        limit = _read_int(folder / "memory.max")
        used = _read_int(folder / "memory.current")
        reclaimable = _read_stat(folder / "memory.stat", "inactive_file")
        if limit is not None and used is not None:
            found.append(max(0, limit - used + reclaimable))
    legacy = root / "memory"
    limit = _read_int(legacy / "memory.limit_in_bytes")
    used = _read_int(legacy / "memory.usage_in_bytes")
    if limit is not None and used is not None:
        reclaimable = _read_stat(legacy / "memory.stat", "total_inactive_file")
        found.append(max(0, limit - used + reclaimable))
    return found


def _own_cgroup() -> str:
    """The process's version 2 group; the root where it is not known."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return "/"
    return next((line[3:] for line in lines if line.startswith("0::")), "/")


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text().strip())
    except (OSError, ValueError):
        return None


def _read_stat(path: Path, key: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{key} ")), 0)


def process_bytes() -> int:
    """Resident memory of this process."""
    import psutil

    return int(psutil.Process(os.getpid()).memory_info().rss)
