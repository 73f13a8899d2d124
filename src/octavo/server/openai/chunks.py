"""The chunks of streamed answers, as bytes. What is the same in all chunks is encoded once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.outputs import CompletionOutput, PositionLogprobs, RequestOutput
from octavo.server.errors import error_shape
from octavo.server.openai.logprobs import CompletionLogprobs, TokenWriter, chat_logprobs
from octavo.server.openai.tools import CallFinder
from octavo.server.openai.usage import Usage
from octavo.server.sse import DONE

_encode = msgspec.json.encode


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What a client asked to see beside the text."""

    num_logprobs: int | None = None
    token_ids: bool = False
    usage: bool = False
    """A last chunk with the usage."""
    running_usage: bool = False
    """And the usage so far in every chunk."""


class _Chunks:
    """What both APIs' streams have in common. head: the members that all chunks share."""

    def __init__(
        self, head: dict[str, Any], shown: Shown, writer: TokenWriter, usage: Usage
    ) -> None:
        self._shown, self._writer, self._usage = shown, writer, usage
        self._start = b"data: " + _encode(head)[:-1] + b',"choices":['
        no_usage = b',"usage":null' if shown.usage else b""
        self._tail = b"]" + no_usage + b"}\n\n"
        self._is_plain = (
            shown.num_logprobs is None and not shown.token_ids and not shown.running_usage
        )
        self._starts: dict[int, bytes] = {}

    def _chunk(self, choice: dict[str, Any], more: dict[str, Any] | None = None) -> bytes:
        tail = self._tail
        members = dict(more or {})
        if self._shown.running_usage:
            members["usage"] = self._usage.shape()
        elif members and self._shown.usage:
            members["usage"] = None
        if members:
            tail = b"]," + _encode(members)[1:] + b"\n\n"
        return self._start + _encode(choice) + tail

    def end(self) -> bytes:
        """The usage, if it was asked for, and the end mark."""
        if not self._shown.usage:
            return DONE
        return self._start + b'],"usage":' + _encode(self._usage.shape()) + b"}\n\n" + DONE

    def error(self, error: Exception) -> bytes:
        """Clients raise it; what came before stays."""
        return b"data: " + _encode(error_shape(error)) + b"\n\n" + DONE


class ChatChunks(_Chunks):
    """chat.completion.chunk: role, content, finish reason.

    echo: text that the first content of each choice begins with.
    """

    def __init__(
        self,
        head: dict[str, Any],
        shown: Shown,
        writer: TokenWriter,
        usage: Usage,
        *,
        echo: str = "",
    ) -> None:
        super().__init__(head, shown, writer, usage)
        self._echo = echo
        self._text_tail = b'},"logprobs":null,"finish_reason":null}' + self._tail

    def events(self, index: int, output: RequestOutput) -> bytes:
        """See `EventSource`."""
        self._usage.add(index, output)
        parts = []
        for completion in output.outputs:
            start = self._starts.get(completion.index)
            if start is None:
                parts.append(self._role(completion.index, output))
                start = self._starts[completion.index]
            if self._is_plain:
                if completion.text:
                    parts.append(start + _encode(completion.text) + self._text_tail)
            elif completion.text or completion.token_ids:
                parts.append(self._full(completion))
            if completion.finish_reason is not None:
                parts.append(self._finish(completion, completion.finish_reason))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _finish(self, completion: CompletionOutput, reason: str | None) -> bytes:
        """The last chunk of a choice."""
        choice = {
            "index": completion.index,
            "delta": {},
            "logprobs": None,
            "finish_reason": reason,
            "stop_reason": completion.stop_reason,
        }
        return self._chunk(choice)

    def _role(self, number: int, output: RequestOutput) -> bytes:
        """The first chunk of a choice."""
        self._starts[number] = (
            self._start + b'{"index":' + str(number).encode() + b',"delta":{"content":'
        )
        choice = {
            "index": number,
            "delta": {"role": "assistant", "content": self._echo},
            "logprobs": None,
            "finish_reason": None,
        }
        is_first = len(self._starts) == 1 and self._shown.token_ids
        return self._chunk(
            choice, {"prompt_token_ids": output.prompt_token_ids} if is_first else None
        )

    def _full(self, completion: CompletionOutput) -> bytes:
        choice: dict[str, Any] = {
            "index": completion.index,
            "delta": {"content": completion.text},
            "logprobs": None,
            "finish_reason": None,
        }
        if self._shown.num_logprobs is not None and completion.logprobs:
            choice["logprobs"] = chat_logprobs(
                self._writer, self._shown.num_logprobs, completion.token_ids, completion.logprobs
            )
        if self._shown.token_ids:
            choice["token_ids"] = completion.token_ids
        return self._chunk(choice)


class ToolChunks(ChatChunks):
    """A chat's chunks where calls of tools are found: each is told whole, in a chunk of its own.

    finder: makes one for each choice.
    """

    def __init__(
        self,
        head: dict[str, Any],
        shown: Shown,
        writer: TokenWriter,
        usage: Usage,
        *,
        echo: str = "",
        finder: Callable[[], CallFinder],
    ) -> None:
        super().__init__(head, shown, writer, usage, echo=echo)
        self._new_finder = finder
        self._finders: dict[int, CallFinder] = {}

    def events(self, index: int, output: RequestOutput) -> bytes:
        """See `EventSource`."""
        self._usage.add(index, output)
        parts = []
        for completion in output.outputs:
            number = completion.index
            finder = self._finders.get(number)
            if finder is None:
                parts.append(self._role(number, output))
                finder = self._finders[number] = self._new_finder()
            is_last = completion.finish_reason is not None
            num_before = finder.num_calls
            completion.text, calls = finder.push(completion.text, is_last=is_last)
            if completion.text or (completion.token_ids and not self._is_plain):
                parts.append(self._full(completion))
            for place, call in enumerate(calls, start=num_before):
                parts.append(self._call(number, {"index": place, **call}))
            if is_last:
                reason = finder.finish_reason(completion.finish_reason)
                parts.append(self._finish(completion, reason))
        return b"".join(parts)

    def _call(self, number: int, call: dict[str, Any]) -> bytes:
        choice = {
            "index": number,
            "delta": {"tool_calls": [call]},
            "logprobs": None,
            "finish_reason": None,
        }
        return self._chunk(choice)


class CompletionChunks(_Chunks):
    """text_completion chunks of several prompts with n choices each.

    echo: of each prompt the text that its choices begin with. echo_only: and nothing follows it.
    first_name: what a prompt's first token reads, for its logprobs.
    """

    def __init__(
        self,
        head: dict[str, Any],
        shown: Shown,
        writer: TokenWriter,
        usage: Usage,
        *,
        n: int = 1,
        echo: Sequence[str] | None = None,
        echo_only: bool = False,
        first_name: Callable[[int], str] | None = None,
    ) -> None:
        super().__init__(head, shown, writer, usage)
        self._n, self._echo, self._echo_only = n, echo, echo_only
        self._first_name = first_name
        self._is_plain &= not echo_only
        self._text_tail = b',"logprobs":null,"finish_reason":null,"stop_reason":null}' + self._tail
        self._logprobs: dict[int, CompletionLogprobs] = {}
        self._prompt_logprobs: dict[int, list[PositionLogprobs | None]] = {}

    def events(self, index: int, output: RequestOutput) -> bytes:
        """See `EventSource`."""
        self._usage.add(index, output, 0 if self._echo_only else None)
        if output.prompt_logprobs is not None:
            self._prompt_logprobs[index] = output.prompt_logprobs
        parts = []
        for completion in output.outputs:
            number = index * self._n + completion.index
            start = self._starts.get(number)
            if start is None:
                start = self._starts[number] = (
                    self._start + b'{"index":' + str(number).encode() + b',"text":'
                )
                if self._echo is not None or self._shown.token_ids:
                    parts.append(self._prompt(number, index, output))
            if self._is_plain and completion.finish_reason is None:
                if completion.text:
                    parts.append(start + _encode(completion.text) + self._text_tail)
            elif completion.text or completion.token_ids or completion.finish_reason is not None:
                parts.append(self._full(number, completion))
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _prompt(self, number: int, index: int, output: RequestOutput) -> bytes:
        """The first chunk of a choice: its prompt."""
        choice = _choice(number, "" if self._echo is None else self._echo[index])
        if self._echo is not None and self._shown.num_logprobs is not None:
            positions = self._prompt_logprobs.get(index)
            if positions is not None:
                shape = self._logprobs_of(number).shape
                choice["logprobs"] = shape(output.prompt_token_ids, positions)
        if self._shown.token_ids:
            choice["prompt_token_ids"] = output.prompt_token_ids
        return self._chunk(choice)

    def _full(self, number: int, completion: CompletionOutput) -> bytes:
        choice = _choice(number, "" if self._echo_only else completion.text)
        choice["finish_reason"] = completion.finish_reason
        choice["stop_reason"] = completion.stop_reason
        if self._echo_only:
            if completion.finish_reason is None:
                return b""
            choice |= {"finish_reason": "length", "stop_reason": None}
            return self._chunk(choice)
        if self._shown.num_logprobs is not None and completion.logprobs:
            choice["logprobs"] = self._logprobs_of(number).shape(
                completion.token_ids, completion.logprobs
            )
        if self._shown.token_ids:
            choice["token_ids"] = completion.token_ids
        return self._chunk(choice)

    def _logprobs_of(self, number: int) -> CompletionLogprobs:
        found = self._logprobs.get(number)
        if found is None:
            assert self._shown.num_logprobs is not None
            found = CompletionLogprobs(self._writer, self._shown.num_logprobs, self._first_name)
            self._logprobs[number] = found
        return found


def _choice(number: int, text: str) -> dict[str, Any]:
    return {
        "index": number,
        "text": text,
        "logprobs": None,
        "finish_reason": None,
        "stop_reason": None,
    }
