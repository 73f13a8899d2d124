"""The message object, and the events of a streamed one."""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.outputs import CompletionOutput, RequestOutput
from octavo.server.errors import anthropic_error_shape
from octavo.server.openai.usage import Usage

_encode = msgspec.json.encode


class Answer:
    """One message from its beginning to its end. request_id: without a prefix."""

    def __init__(self, model: str, request_id: str, usage: Usage) -> None:
        self._usage = usage
        self._head: dict[str, Any] = {
            "id": "msg_" + request_id,
            "type": "message",
            "role": "assistant",
            "model": model,
        }

    def begun(self, output: RequestOutput) -> dict[str, Any]:
        """Before any text."""
        self._usage.add(0, output, 0)
        end = {"stop_reason": None, "stop_sequence": None}
        return self._head | {"content": [], "usage": self.usage()} | end

    def ended(self, output: RequestOutput) -> dict[str, Any]:
        """All at once."""
        self._usage.add(0, output)
        (completion,) = output.outputs
        block = {"type": "text", "text": completion.text, "citations": None}
        return self._head | {"content": [block], "usage": self.usage()} | stopped(completion)

    def add(self, output: RequestOutput) -> None:
        """Count what is new."""
        self._usage.add(0, output)

    def usage(self) -> dict[str, Any]:
        """Anthropic's: tokens that the cache had are not input_tokens."""
        chat = self._usage.shape()
        cached = chat["prompt_tokens_details"]["cached_tokens"]
        usage = {
            "input_tokens": chat["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": chat["completion_tokens"],
            "service_tier": "standard",
        }
        if "kv" in chat:
            usage["kv"] = chat["kv"]
        return usage


def stopped(completion: CompletionOutput) -> dict[str, str | None]:
    """Why it ended."""
    if completion.finish_reason == "length":
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if isinstance(completion.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": completion.stop_reason}
    return {"stop_reason": "end_turn", "stop_sequence": None}


class MessageEvents:
    """The `EventSource` of a streamed message."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._has_begun = False
        self._last: CompletionOutput | None = None
        self._start = (
            b"event: content_block_delta\n"
            b'data: {"type":"content_block_delta","index":0,"delta":{"type":"text_delta","text":'
        )

    def events(self, index: int, output: RequestOutput) -> bytes:
        """See `EventSource`."""
        parts = []
        if not self._has_begun:
            self._has_begun = True
            block = {"type": "text", "text": "", "citations": None}
            parts = [
                _event("message_start", message=self._answer.begun(output)),
                _event("content_block_start", index=0, content_block=block),
                _event("ping"),
            ]
        self._answer.add(output)
        (completion,) = output.outputs
        if completion.text:
            parts.append(self._start + _encode(completion.text) + b"}}\n\n")
        if completion.finish_reason is not None:
            self._last = completion
        return b"".join(parts)

    def end(self) -> bytes:
        """Why it ended, and what it took."""
        assert self._last is not None
        usage = self._answer.usage()
        del usage["service_tier"]  # was told at the start
        return (
            _event("content_block_stop", index=0)
            + _event("message_delta", delta=stopped(self._last), usage=usage)
            + _event("message_stop")
        )

    def error(self, error: Exception) -> bytes:
        """Clients raise it; what came before stays."""
        return b"event: error\ndata: " + _encode(anthropic_error_shape(error)) + b"\n\n"


def _event(kind: str, **members: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + _encode({"type": kind, **members}) + b"\n\n"
