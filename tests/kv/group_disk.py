"""A disk for memories whose slots know what they hold, of whatever group."""

from __future__ import annotations

from lossy_disk import LossyDisk

from octavo.plan import BlockLabel

Slot = tuple[int, str, tuple[int, ...]] | None


class GroupDisk(LossyDisk[Slot]):
    """No two prefixes, of whatever group or salt, have one digest."""

    def check_label(self, label: BlockLabel, content: list[Slot]) -> None:
        last = content[-1]
        assert last is not None, "a block of garbage goes to disk"
        group, salt, tokens = last
        first = len(tokens) - len(content)
        right = [(group, salt, tokens[: end + 1]) for end in range(first, len(tokens))]
        assert content == right, f"a torn block: {content}"
        assert label.token_ids == tokens[first:]
        for digest, held in ((label.digest, tokens), (label.parent, tokens[:first])):
            key = group, salt, held
            assert self.digests.setdefault(digest, key) == key, "two prefixes, one digest"
