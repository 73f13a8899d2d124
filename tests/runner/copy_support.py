"""Copies between pool, host and a disk that is a dictionary, and what each of them means."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from hypothesis import strategies as st

from octavo.plan import BlockCopy, BlockLabel, CopyKind

Content = TypeVar("Content")
NUM = 5
"""Blocks of each memory."""
LABEL = BlockLabel(b"d" * 16, b"p" * 16, (1, 2))
copies_of_all_kinds = st.builds(
    BlockCopy,
    st.integers(0, NUM - 1),
    st.integers(0, NUM - 1),
    st.sampled_from(list(CopyKind)),
    st.just(LABEL),
)


class MemoryFiles:
    """Stands for the disk: what was put can be taken at once."""

    def __init__(self, blocks: dict[int, np.ndarray] | None = None) -> None:
        self.blocks = blocks or {}
        self.num_settled = 0

    def put(self, disk_id: int, label: BlockLabel, data: np.ndarray) -> None:
        assert label == LABEL
        self.blocks[disk_id] = data.copy()

    def take(self, disk_id: int) -> np.ndarray | None:
        return self.blocks.get(disk_id)

    def settle(self) -> None:
        self.num_settled += 1


def one_by_one(copies: list[BlockCopy], tiers: dict[str, dict[int, Content]]) -> None:
    """By memory ("pool", "host", "disk") and block: the contents after the copies."""
    names = {
        CopyKind.WITHIN: ("pool", "pool"),
        CopyKind.TO_HOST: ("pool", "host"),
        CopyKind.FROM_HOST: ("host", "pool"),
        CopyKind.TO_DISK: ("host", "disk"),
        CopyKind.FROM_DISK: ("disk", "pool"),
    }
    for copy in copies:
        source, target = names[copy.kind]
        tiers[target][copy.dst] = tiers[source][copy.src]
