"""The response object, and the events of a streamed one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec

from octavo.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from octavo.server.errors import error_shape
from octavo.server.openai.logprobs import TokenWriter, chat_logprobs
from octavo.server.openai.usage import Usage
from octavo.server.responses.protocol import LOGPROBS, ResponsesRequest

_encode = msgspec.json.encode
_DELTA = "response.output_text.delta"


class Answer:
    """One response from its beginning to its end. request_id: without a prefix."""

    def __init__(
        self, body: ResponsesRequest, model: str, request_id: str, writer: TokenWriter
    ) -> None:
        self._writer = writer
        self.with_logprobs = LOGPROBS in (body.include or ())
        self._num_top = body.top_logprobs or 0
        self.usage = Usage(with_kv=body.return_kv_usage is True)
        self.item_id = "msg_" + request_id
        self._head: dict[str, Any] = {
            "id": "resp_" + request_id,
            "object": "response",
            "created_at": int(time.time()),
            "background": False,
            "completed_at": None,
            "error": None,
            "incomplete_details": None,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": None,
            "metadata": body.metadata or {},
            "model": model,
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": None,
            "safety_identifier": body.safety_identifier,
            "service_tier": "default",
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": [],
            "top_logprobs": self._num_top,
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
            "user": body.user,
        }

    def begun(self) -> dict[str, Any]:
        """Before anything is generated."""
        return self._head | {"status": "in_progress", "output": [], "usage": None}

    def ended(self, text: str, logprobs: list[Any], finish_reason: str | None) -> dict[str, Any]:
        """Completed, or cut off by a limit."""
        is_cut = finish_reason == "length"
        status = "incomplete" if is_cut else "completed"
        return self._head | {
            "status": status,
            "completed_at": None if is_cut else int(time.time()),
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self.item(status, [self.part(text, logprobs)])],
            "usage": self._usage(),
        }

    def failed(self, text: str, logprobs: list[Any], error: dict[str, Any]) -> dict[str, Any]:
        """With what there was until then."""
        return self._head | {
            "status": "failed",
            "error": error,
            "output": [self.item("incomplete", [self.part(text, logprobs)])],
            "usage": self._usage(),
        }

    def item(self, status: str, content: list[Any]) -> dict[str, Any]:
        """The one output item."""
        return {
            "id": self.item_id, "type": "message", "status": status, "role": "assistant",
            "content": content,
        }  # fmt: skip

    def part(self, text: str, logprobs: list[Any]) -> dict[str, Any]:
        """Its one part."""
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}

    def logprobs(self, completion: CompletionOutput) -> list[Any]:
        """Of the tokens that are new in it; none unless asked for."""
        if not self.with_logprobs or not completion.logprobs:
            return []
        return self._logprobs(completion.token_ids, completion.logprobs)

    def _logprobs(
        self, token_ids: Sequence[int], positions: Sequence[PositionLogprobs]
    ) -> list[Any]:
        content: list[Any] = chat_logprobs(self._writer, self._num_top, token_ids, positions)[
            "content"
        ]
        for entry in content:  # here bytes is a list always
            for one in (entry, *entry["top_logprobs"]):
                one["bytes"] = one["bytes"] or []
        return content

    def _usage(self) -> dict[str, Any]:
        chat = self.usage.shape()
        usage = {
            "input_tokens": chat["prompt_tokens"],
            "input_tokens_details": {"cache_write_tokens": 0, **chat["prompt_tokens_details"]},
            "output_tokens": chat["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": chat["total_tokens"],
        }
        if "kv" in chat:
            usage["kv"] = chat["kv"]
        return usage


class ResponseEvents:
    """The `EventSource` of a streamed response."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer
        self._number = 0
        self._texts: list[str] = []
        self._logprobs: list[Any] = []
        self._finish_reason: str | None = None
        where = {"item_id": answer.item_id, "output_index": 0, "content_index": 0}
        self._where = where
        self._delta_start = (
            f"event: {_DELTA}\ndata: ".encode() + _encode({"type": _DELTA} | where)[:-1]
        )

    def events(self, index: int, output: RequestOutput) -> bytes:
        """See `EventSource`."""
        parts = [] if self._number else self._opening()
        self._answer.usage.add(index, output)
        (completion,) = output.outputs
        logprobs = self._answer.logprobs(completion)
        if completion.text or logprobs:
            parts.append(self._delta(completion.text, logprobs))
        if completion.finish_reason is not None:
            self._finish_reason = completion.finish_reason
        return b"".join(parts)

    def end(self) -> bytes:
        """All that is done, and the whole response."""
        text = "".join(self._texts)
        response = self._answer.ended(text, self._logprobs, self._finish_reason)
        (item,) = response["output"]
        (part,) = item["content"]
        return b"".join(
            (
                self._event(
                    "response.output_text.done",
                    **self._where, text=text, logprobs=self._logprobs,
                ),
                self._event("response.content_part.done", **self._where, part=part),
                self._event("response.output_item.done", output_index=0, item=item),
                self._event("response." + response["status"], response=response),
            )
        )  # fmt: skip

    def error(self, error: Exception) -> bytes:
        """The response has failed."""
        told = error_shape(error)["error"]
        response = self._answer.failed(
            "".join(self._texts),
            self._logprobs,
            {"code": "server_error", "message": told["message"]},
        )
        return self._event("response.failed", response=response)

    def _opening(self) -> list[bytes]:
        begun = self._answer.begun()
        return [
            self._event("response.created", response=begun),
            self._event("response.in_progress", response=begun),
            self._event(
                "response.output_item.added",
                output_index=0,
                item=self._answer.item("in_progress", []),
            ),
            self._event(
                "response.content_part.added", **self._where, part=self._answer.part("", [])
            ),
        ]

    def _delta(self, text: str, logprobs: list[Any]) -> bytes:
        self._texts.append(text)
        self._logprobs += logprobs
        number = str(self._number).encode()
        self._number += 1
        return b"".join(
            (
                self._delta_start, b',"delta":', _encode(text), b',"logprobs":', _encode(logprobs),
                b',"sequence_number":', number, b"}\n\n",
            )
        )  # fmt: skip

    def _event(self, kind: str, **members: Any) -> bytes:
        number = self._number
        self._number += 1
        data = _encode({"type": kind, "sequence_number": number, **members})
        return b"event: " + kind.encode() + b"\ndata: " + data + b"\n\n"
