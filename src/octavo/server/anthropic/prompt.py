"""Anthropic's messages -> a prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo.server.anthropic.protocol import ConversationFields
from octavo.server.openai.prompts import check_chat
from octavo.server.parts import Harmless, PartReader, Parts, plain, refusal

if TYPE_CHECKING:
    from octavo.server.state import ServerState

_KINDS: dict[str, dict[str, Harmless]] = {
    # equal prefixes are found without being told
    "text": {"cache_control": ({"type": "ephemeral"},), "citations": ([],)}
}
_ROLES = ("user", "assistant")


async def prompt_ids(
    state: ServerState, messages: list[dict[str, Any]], *, max_tokens: int | None
) -> list[int]:
    """Through the chat template. max_tokens: refuse what is sure to be longer."""
    check_chat(state, len(messages))
    goes_on = messages[-1]["role"] == "assistant"
    return await state.engine.chat_prompt(
        messages,
        chat_template=state.chat_template,
        add_generation_prompt=not goes_on,
        continue_final_message=goes_on,
        max_tokens=max_tokens,
    )


def messages_of(reader: PartReader, body: ConversationFields) -> list[dict[str, Any]]:
    """Raises `InvalidRequestError` naming the member that is wrong."""
    if not isinstance(body.messages, list) or not body.messages:
        raise refusal("messages", "must be a list of at least one message")
    turns: list[tuple[str, Parts]] = []
    for i, message in enumerate(body.messages):
        where = f"messages.{i}"
        found = reader.members(message, where, ("role", "content"), {})
        role = found.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise refusal(
                f"{where}.role", "must be user or assistant; a system prompt is the field system"
            )
        parts = _text(reader, found.get("content"), f"{where}.content")
        if turns and turns[-1][0] == role:
            turns[-1][1].extend(parts)
        else:
            turns.append((role, parts))
    if body.system is not None:
        turns.insert(0, ("system", _text(reader, body.system, "system")))
    return [{"role": role, "content": plain(parts)} for role, parts in turns]


def _text(reader: PartReader, content: object, where: str) -> Parts:
    parts = reader.text(content, where, _KINDS)
    if not parts:
        raise refusal(where, "is empty: give at least one block")
    return parts
