"""A disk for the tests' memories: it can lose writes and damage blocks."""

from __future__ import annotations

from typing import Generic, TypeVar

from octavo.plan import BlockLabel

Slot = TypeVar("Slot")
"""What a memory knows of one slot."""


class LossyDisk(Generic[Slot]):
    """A `ColdStore`. No id is used twice, and of each block it is checked that its label says what
    it holds."""

    def __init__(self) -> None:
        self.files: dict[int, tuple[BlockLabel, list[Slot]]] = {}
        self.memory: dict[int, list[Slot]] = {}
        """Fetched, waiting for the copy."""
        self.used_ids: set[int] = set()
        self.damaged: set[int] = set()
        self.num_to_drop = 0
        self.num_reads = self.num_found = 0
        """All, and those of blocks that were there and not damaged."""
        self.digests: dict[bytes, object] = {}

    def fetch(self, disk_id: int) -> bool:
        self.num_reads += 1
        if disk_id not in self.files or disk_id in self.damaged:
            return False
        self.num_found += 1
        self.memory[disk_id] = self.files[disk_id][1]
        return True

    def delete(self, disk_id: int) -> None:
        self.files.pop(disk_id, None)
        self.damaged.discard(disk_id)

    def entries(self) -> list[tuple[int, BlockLabel]]:
        return [(disk_id, label) for disk_id, (label, _) in self.files.items()]

    def write(self, disk_id: int, label: BlockLabel | None, content: list[Slot]) -> None:
        assert disk_id not in self.used_ids, f"disk id {disk_id} is used twice"
        self.used_ids.add(disk_id)
        assert label is not None, f"the copy to disk block {disk_id} has no label"
        self.check_label(label, content)
        if self.num_to_drop:
            self.num_to_drop -= 1
        else:
            self.files[disk_id] = label, list(content)

    def reopen(self) -> None:
        """What a new process finds."""
        self.memory.clear()
        self.used_ids = set(self.files)

    def check_label(self, label: BlockLabel, content: list[Slot]) -> None:
        """The label says what the block holds, and no two prefixes have one digest."""
        raise NotImplementedError
