"""Input items -> messages for a chat template."""

from __future__ import annotations

from typing import Any

from octavo.server.parts import ANY, Harmless, PartReader, plain, refusal

_KINDS: dict[str, dict[str, Harmless]] = {
    "input_text": {},
    "output_text": {"annotations": ([],), "logprobs": ANY},
}
_OF_ANSWERS: dict[str, Harmless] = {"id": ANY, "status": ANY, "phase": ANY}
"""What answers' messages have, which come back in the next request."""
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
"""Templates know no developers."""


def messages_of(
    reader: PartReader, given: object, instructions: str | None
) -> list[dict[str, Any]]:
    """Raises `InvalidRequestError` naming the member that is wrong."""
    found: list[dict[str, Any]] = []
    if instructions is not None:
        found.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*found, {"role": "user", "content": given}]
    if not isinstance(given, list) or not given:
        raise refusal("input", "must be text or a list of at least one message")
    return found + [_message(reader, item, f"input.{i}") for i, item in enumerate(given)]


def _message(reader: PartReader, item: object, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise refusal(where, f"must be a message, got {type(item).__name__}")
    kind = item.get("type", "message")
    if kind != "message":
        raise refusal(
            f"{where}.type", f"must be message: {kind!r:.80} items are not supported, only text is"
        )
    reader.members(item, where, ("type", "role", "content"), _OF_ANSWERS)
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise refusal(f"{where}.role", f"must be one of {', '.join(_ROLES)}")
    parts = reader.text(item.get("content"), f"{where}.content", _KINDS)
    if not parts:
        raise refusal(f"{where}.content", "is empty: give at least one part")
    return {"role": _ROLES[role], "content": plain(parts)}
