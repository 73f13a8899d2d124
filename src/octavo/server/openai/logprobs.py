"""Logprobs in the shapes of OpenAI's two APIs and of vLLM's `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from octavo.outputs import Logprob, PositionLogprobs

_REPLACEMENT = "\ufffd"
LEAST_LOGPROB = -9999.0
"""JSON has no infinity: what could not be sampled, as OpenAI and vLLM write it."""


class Spelling(Protocol):
    """How a vocabulary spells a token."""

    def id_to_token(self, token_id: int) -> str | None:
        """None when there is no such id."""


class TokenWriter:
    """What tokens are called in answers.

    tokenizer: None where there is none. as_ids: write `token_id:5`, which is never ambiguous.
    """

    def __init__(self, tokenizer: Spelling | None, *, as_ids: bool = False) -> None:
        self._tokenizer, self._as_ids = tokenizer, as_ids

    def name(self, token_id: int, entry: Logprob) -> str:
        """Its text, or its id."""
        if self._as_ids or entry.decoded_token is None:
            return f"token_id:{token_id}"
        return entry.decoded_token

    def bytes(self, token_id: int, entry: Logprob) -> list[int] | None:
        """The token's bytes, also of a token that is a part of a character."""
        text = entry.decoded_token
        if text is None:
            return None
        if _REPLACEMENT in text and self._tokenizer is not None:
            spelled = self._tokenizer.id_to_token(token_id)
            found = None if spelled is None else bytes_of(spelled)
            if found is not None:
                return list(found)
        return list(text.encode("utf-8", "replace"))


def bytes_of(spelled: str) -> bytes | None:
    """The bytes of a token as byte-level and byte-fallback vocabularies spell them."""
    if len(spelled) == 6 and spelled.startswith("<0x") and spelled.endswith(">"):
        try:
            return bytes([int(spelled[3:5], 16)])
        except ValueError:
            return None
    try:
        return bytes(map(_byte_of, spelled))
    except ValueError:
        return None


def _byte_of(character: str) -> int:
    """GPT-2's alphabet: bytes that print stand for themselves, the others for U+0100 and on."""
    code = ord(character)
    if _prints(code):
        return code
    others = [byte for byte in range(256) if not _prints(byte)]
    if not 256 <= code < 256 + len(others):
        raise ValueError(character)
    return others[code - 256]


def _prints(byte: int) -> bool:
    return 33 <= byte <= 126 or 161 <= byte <= 172 or 174 <= byte <= 255


def number(logprob: float) -> float:
    """A JSON number."""
    return max(logprob, LEAST_LOGPROB) if logprob == logprob else LEAST_LOGPROB


class CompletionLogprobs:
    """The integer form: parallel lists over the tokens of one choice.

    num_top: how many most probable tokens are shown. first_name: what a prompt's first token, which
    has no logprob, reads. `offset` goes on over the chunks of a stream.
    """

    def __init__(
        self,
        writer: TokenWriter,
        num_top: int,
        first_name: Callable[[int], str] | None = None,
    ) -> None:
        self._writer, self._num_top, self._first_name = writer, num_top, first_name
        self.offset = 0

    def shape(
        self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs | None]
    ) -> dict[str, Any]:
        """Of these tokens, in order; None (the first of a prompt) has no logprob."""
        tokens: list[str] = []
        own: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for token_id, position in zip(token_ids, positions, strict=True):
            entry = self._first(token_id) if position is None else position[token_id]
            name = self._writer.name(token_id, entry)
            tokens.append(name)
            own.append(None if position is None else number(entry.logprob))
            tops.append(None if position is None else self._top(token_id, position))
            offsets.append(self.offset)
            self.offset += len(entry.decoded_token or name)
        return {
            "text_offset": offsets,
            "token_logprobs": own,
            "tokens": tokens,
            "top_logprobs": tops,
        }

    def _first(self, token_id: int) -> Logprob:
        return Logprob(0.0, None, None if self._first_name is None else self._first_name(token_id))

    def _top(self, token_id: int, position: PositionLogprobs) -> dict[str, float]:
        """The most probable ones; the token itself too, as OpenAI's has it."""
        found: dict[str, float] = {}
        for i, entry in position.items():
            if i == token_id or (entry.rank is not None and entry.rank <= self._num_top):
                # of two tokens that read alike the more probable one is told, as it comes first
                name = self._writer.name(i, entry)
                found[name] = max(found.get(name, LEAST_LOGPROB), number(entry.logprob))
        return found


def chat_logprobs(
    writer: TokenWriter,
    num_top: int,
    token_ids: Sequence[int],
    positions: Sequence[PositionLogprobs],
) -> dict[str, Any]:
    """Chat's form: one object a token, with its bytes and `num_top` most probable ones."""
    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        entry = _chat_entry(writer, token_id, position[token_id])
        top = sorted(position.items(), key=lambda item: item[1].rank or 0)[: num_top + 1]
        entry["top_logprobs"] = [
            _chat_entry(writer, i, logprob)
            for i, logprob in top
            if logprob.rank is not None and logprob.rank <= num_top
        ]
        content.append(entry)
    return {"content": content, "refusal": None}


def _chat_entry(writer: TokenWriter, token_id: int, entry: Logprob) -> dict[str, Any]:
    return {
        "token": writer.name(token_id, entry),
        "logprob": number(entry.logprob),
        "bytes": writer.bytes(token_id, entry),
    }


def prompt_logprobs(
    num_top: int,
    token_ids: Sequence[int],
    positions: Sequence[PositionLogprobs | None] | None,
) -> list[dict[str, Any] | None] | None:
    """vLLM's form: for each token of the prompt, by token id, its own and `num_top` most probable
    ones; there may be more of them, for an echo."""
    if positions is None:
        return None
    return [
        None
        if position is None
        else {
            str(token_id): {
                "logprob": number(entry.logprob),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token_id, entry in position.items()
            if token_id == own or (entry.rank is not None and entry.rank <= num_top)
        }
        for own, position in zip(token_ids, positions, strict=True)
    ]
