"""Memory limits of control groups, read from folders laid out as Linux does."""

from __future__ import annotations

from pathlib import Path

import psutil

from octavo.runner import memory

MIB = 2**20


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_limits_of_a_group_and_of_its_parents(tmp_path: Path) -> None:
    write(tmp_path / "a", memory__max=str(900 * MIB), memory__current=str(700 * MIB))
    write(
        tmp_path / "a" / "b",
        memory__max=str(500 * MIB),
        memory__current=str(450 * MIB),
        memory__stat=f"anon 1\ninactive_file {30 * MIB}\nactive_file 9",
    )
    assert memory.cgroup_left(tmp_path, "/a/b") == [80 * MIB, 200 * MIB]


def test_no_limit_is_none(tmp_path: Path) -> None:
    write(tmp_path / "a", memory__max="max", memory__current=str(700 * MIB))
    assert memory.cgroup_left(tmp_path, "/a") == []
    assert memory.cgroup_left(tmp_path / "nothing", "/") == []


def test_version_1(tmp_path: Path) -> None:
    write(
        tmp_path / "memory",
        memory__limit_in_bytes=str(300 * MIB),
        memory__usage_in_bytes=str(290 * MIB),
        memory__stat=f"total_inactive_file {40 * MIB}",
    )
    assert memory.cgroup_left(tmp_path, "/") == [50 * MIB]


def test_over_the_limit_nothing_is_left(tmp_path: Path) -> None:
    write(tmp_path, memory__max="100", memory__current="200")
    assert memory.cgroup_left(tmp_path, "/") == [0]


def test_available_is_at_most_the_machines() -> None:
    assert 0 < memory.available_bytes() <= psutil.virtual_memory().total
