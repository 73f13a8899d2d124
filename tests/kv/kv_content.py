"""Simulated memories whose slots know what they hold.

Every slot of pool, host and disk holds the number of a token prefix: equal numbers mean equal salts
and equal tokens from the first on, so a slot is right for a position of a sequence exactly when it
holds that position's number.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lossy_disk import LossyDisk

from octavo.plan import BlockLabel

GARBAGE = -1


class Prefixes:
    """A number for each (salt, tokens), and the way back."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[object, object], int] = {}
        self._entries: list[tuple[int | None, Any]] = []

    def _number(self, parent: int | None, token: object) -> int:
        number = self._numbers.setdefault((parent, token), len(self._entries))
        if number == len(self._entries):
            self._entries.append((parent, token))
        return number

    def of(self, salt: str, token_ids: Sequence[int]) -> list[int]:
        """By position: the number of the tokens up to and with it."""
        number, numbers = self._number(None, salt), []
        for token_id in token_ids:
            number = self._number(number, token_id)
            numbers.append(number)
        return numbers

    def unroll(self, number: int) -> tuple[str, list[int]]:
        """The salt and the tokens of a number."""
        tokens: list[int] = []
        parent, token = self._entries[number]
        while parent is not None:
            tokens.append(token)
            parent, token = self._entries[parent]
        return token, tokens[::-1]

    def name(self, number: int) -> str:
        """For messages."""
        if number == GARBAGE:
            return "garbage"
        salt, tokens = self.unroll(number)
        return f"{salt!r}:{tokens}"


class FakeDisk(LossyDisk[int]):
    """Digests and prefixes are one to one."""

    def __init__(self, prefixes: Prefixes) -> None:
        super().__init__()
        self._prefixes = prefixes
        self._named: dict[object, bytes] = {}

    def check_label(self, label: BlockLabel, content: list[int]) -> None:
        assert content[-1] != GARBAGE, "a block of garbage goes to disk"
        salt, tokens = self._prefixes.unroll(content[-1])
        assert content == self._prefixes.of(salt, tokens)[-len(content) :], "a torn block"
        assert label.token_ids == tuple(tokens[-len(content) :])
        before = tokens[: -len(content)]
        for digest, held in ((label.digest, tokens), (label.parent, before)):
            key = (salt, tuple(held))
            assert self.digests.setdefault(digest, key) == key, "two prefixes, one digest"
            assert self._named.setdefault(key, digest) == digest, "one prefix, two digests"
