"""Blocks that a shrinking pool has moved, until the runner is told."""

from __future__ import annotations


def one_after_the_other(first: dict[int, int], then: dict[int, int]) -> dict[int, int]:
    """Two rounds of moves as one: new ids by those before the first."""
    moved = {old: then.get(new, new) for old, new in first.items()}
    between = set(first.values())
    return moved | {old: new for old, new in then.items() if old not in between}
