"""A disk for memories whose slots know what they hold: it can lose writes and damage blocks."""

from __future__ import annotations

from octavo.plan import BlockLabel

Slot = tuple[int, str, tuple[int, ...]] | None


class GroupDisk:
    """A `ColdStore`. Of each block it is checked that its label says what it holds, and that no two
    prefixes, of whatever group or salt, have one digest."""

    def __init__(self) -> None:
        self.files: dict[int, tuple[BlockLabel, list[Slot]]] = {}
        self.memory: dict[int, list[Slot]] = {}
        """Fetched, waiting for the copy."""
        self.damaged: set[int] = set()
        self.num_to_drop = 0
        self.num_read = 0
        self._used_ids: set[int] = set()
        self._digests: dict[bytes, object] = {}

    def fetch(self, disk_id: int) -> bool:
        if disk_id not in self.files or disk_id in self.damaged:
            return False
        self.memory[disk_id] = self.files[disk_id][1]
        self.num_read += 1
        return True

    def delete(self, disk_id: int) -> None:
        self.files.pop(disk_id, None)
        self.damaged.discard(disk_id)

    def entries(self) -> list[tuple[int, BlockLabel]]:
        return [(disk_id, label) for disk_id, (label, _) in self.files.items()]

    def write(self, disk_id: int, label: BlockLabel | None, content: list[Slot]) -> None:
        assert disk_id not in self._used_ids, f"disk id {disk_id} is used twice"
        self._used_ids.add(disk_id)
        last = content[-1]
        assert label is not None and last is not None, "a block of garbage goes to disk"
        group, salt, tokens = last
        first = len(tokens) - len(content)
        right = [(group, salt, tokens[: end + 1]) for end in range(first, len(tokens))]
        assert content == right, f"a torn block: {content}"
        assert label.token_ids == tokens[first:]
        for digest, held in ((label.digest, tokens), (label.parent, tokens[:first])):
            key = group, salt, held
            assert self._digests.setdefault(digest, key) == key, "two prefixes, one digest"
        if self.num_to_drop:
            self.num_to_drop -= 1
        else:
            self.files[disk_id] = label, list(content)

    def reopen(self) -> None:
        """What a new process finds."""
        self.memory.clear()
        self._used_ids = set(self.files)
