"""Texts inside of messages: strings, or lists of typed parts, read with errors that say where."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from octavo.errors import InvalidRequestError

Parts = list[dict[str, str]]
"""As chat templates take them."""
Harmless = tuple[Any, ...]
"""Values of a member that ask for nothing, besides null; `ANY`: all of them."""
ANY: Harmless = (...,)


class PartReader:
    """Reads what pydantic would describe badly: which union's member failed.

    is_lenient: unknown members are ignored, and listed in `ignored`.
    """

    def __init__(self, *, is_lenient: bool) -> None:
        self._is_lenient = is_lenient
        self.ignored: list[str] = []

    def members(
        self, value: object, where: str, known: Collection[str], harmless: Mapping[str, Harmless]
    ) -> Mapping[str, Any]:
        """An object. harmless: members without effect, by name."""
        if not isinstance(value, dict):
            raise refusal(where, f"must be an object, got {type(value).__name__}")
        for name, member in value.items():
            if name in known:
                continue
            allowed = harmless.get(name)
            if allowed is not None and (member is None or allowed is ANY or member in allowed):
                continue
            if allowed is not None:
                raise refusal(f"{where}.{name}", "is not supported: leave it out")
            if not self._is_lenient:
                raise refusal(f"{where}.{name}", "is an unknown field")
            self.ignored.append(f"{where}.{name}")
        return value

    def text(
        self, content: object, where: str, kinds: Mapping[str, Mapping[str, Harmless]]
    ) -> Parts:
        """A string, or a list of text parts. kinds: what parts may be, and harmless members."""
        if isinstance(content, str):
            return [{"type": "text", "text": content}]
        if not isinstance(content, list):
            raise refusal(where, "must be text or a list of parts")
        return [self._part(part, f"{where}.{i}", kinds) for i, part in enumerate(content)]

    def _part(
        self, part: object, where: str, kinds: Mapping[str, Mapping[str, Harmless]]
    ) -> dict[str, str]:
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str) or kind not in kinds:
            raise refusal(
                f"{where}.type", f"must be {' or '.join(kinds)}: the models here read text only"
            )
        found = self.members(part, where, ("type", "text"), kinds[kind])
        text = found.get("text")
        if not isinstance(text, str):
            raise refusal(f"{where}.text", "must be text")
        return {"type": "text", "text": text}


def plain(parts: Sequence[dict[str, str]]) -> str | Parts:
    """One part as the string that it is."""
    return parts[0]["text"] if len(parts) == 1 else list(parts)


def refusal(where: str, rule: str) -> InvalidRequestError:
    """Points at a member, as `messages.0.content.1.type`."""
    return InvalidRequestError(f"{where} {rule}", parameter=where)
