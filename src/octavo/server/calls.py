"""A call: one HTTP request, and the engine requests it stands for."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

from fastapi import Request

from octavo.engine.async_engine import OutputStream
from octavo.engine.input import Params, Prompt
from octavo.errors import InvalidRequestError, OctavoError
from octavo.outputs import OutputKind, RequestOutput
from octavo.request import SamplingParams
from octavo.server.errors import AbortedError, RequestTimeoutError
from octavo.server.keys import Client
from octavo.server.logs import log_prompt

if TYPE_CHECKING:
    from octavo.server.state import ServerState

CALL = "octavo.call"
"""Key of an ASGI scope."""
LABELS = "octavo.labels"
"""Key of an ASGI scope: what a client says of its request, for the request log alone."""


async def call_of(request: Request) -> Call:
    """The call of an HTTP request: a dependency of endpoints that generate."""
    return cast("Call", request.scope[CALL])


class Call:
    """Submits to the engine within the limits, and ends with the HTTP request at the latest."""

    def __init__(
        self, state: ServerState, request_id: str, client: Client, traceparent: str | None = None
    ) -> None:
        """traceparent: the trace that the client's request is a part of."""
        self._state, self.request_id, self.client = state, request_id, client
        self._traceparent = traceparent
        self._streams: dict[str, OutputStream] = {}
        """Those that have not ended."""
        self._timer: asyncio.TimerHandle | None = None
        self._is_closed = False

    async def submit(
        self,
        prompts: Sequence[Prompt],
        params: Params | Sequence[Params],
        *,
        priority: int = 0,
        kind: OutputKind = OutputKind.DELTA,
    ) -> list[OutputStream]:
        """All prompts or none. params: one for all, or one each.

        Raises `InvalidRequestError` for what is not to be had, `RateLimitError` and
        `OverloadedError` for what is not to be had now.
        """
        state = self._state
        assert not self._is_closed and not self._streams, "a call submits once"
        each = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        assert len(each) == len(prompts)
        self._check(prompts, each)
        state.life.check()
        encoded = [await self._encoded(prompt) for prompt in prompts]
        sizes = [_num_tokens(ids, one) for ids, one in zip(encoded, each, strict=True)]
        config = state.engine.info.config
        assert config.max_num_seqs is not None
        state.limits.admit(self.client, len(prompts), sum(sizes), config.max_num_seqs)
        if self._is_taken(len(prompts)):  # two under way may be given one id by their clients
            self.request_id += "-" + uuid.uuid4().hex[:8]
        try:
            streams = self._submit(encoded, each, sizes, priority, kind)
        except BaseException:
            self.close()
            raise
        if self._streams:
            state.calls[self.request_id] = self
            state.metrics.in_flight(len(state.calls))
        timeout_s = state.config.request_timeout_s
        if timeout_s is not None:
            self._timer = asyncio.get_running_loop().call_later(timeout_s, self._expire, timeout_s)
        return streams

    def _is_taken(self, num_prompts: int) -> bool:
        """Whether another call, or a request of one, has this id, or of one that has just left."""
        state, own = self._state, self.request_id
        has = state.engine.has_request
        taken = own in state.calls or has(own)
        return taken or (num_prompts > 1 and any(has(f"{own}-{i}") for i in range(num_prompts)))

    def _submit(
        self,
        prompts: list[Prompt],
        params: list[Params],
        sizes: list[int],
        priority: int,
        kind: OutputKind,
    ) -> list[OutputStream]:
        """Give to the engine what was admitted; what it does not take is given back."""
        state, streams = self._state, []
        for number, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            request_id = self.request_id if len(prompts) == 1 else f"{self.request_id}-{number}"
            try:
                stream = state.engine.submit(
                    request_id, prompt, one, priority=priority, kind=kind,
                    client_id=self.client.name, max_kv_share=self.client.kv_share,
                )  # fmt: skip
            except BaseException:
                for size in sizes[number:]:
                    state.limits.ended(self.client, size)
                raise
            watch = _Watch(self, stream, one, sizes[number])
            stream.on_put, stream.on_end = watch.put, partial(self._ended, watch)
            self._streams[request_id] = stream
            streams.append(stream)
        return streams

    def _check(self, prompts: Sequence[Prompt], params: Sequence[Params]) -> None:
        config = self._state.config
        if len(prompts) > config.max_prompts:
            raise InvalidRequestError(
                f"{len(prompts)} prompts > {config.max_prompts} (--max-prompts): send several "
                "requests",
                parameter="prompt",
            )
        for one in params:
            num = _num_completions(one)
            if num > config.max_n:
                raise InvalidRequestError(
                    f"{num} completions of a prompt > {config.max_n} (--max-n)", parameter="n"
                )
            most, asked = config.max_output_tokens, one.max_tokens
            if most is not None and (asked is None or asked > most):
                raise InvalidRequestError(
                    f"max_tokens {asked or 'unlimited'} > {most} (--max-output-tokens): ask for "
                    "fewer",
                    parameter="max_tokens",
                )

    async def _encoded(self, prompt: Prompt) -> Prompt:
        """As token ids, cut in another thread where the text is long."""
        config = self._state.config
        text: str | None = None
        salt: dict[str, object] = {}
        if isinstance(prompt, str):
            text = prompt
        elif isinstance(prompt, dict) and isinstance(prompt.get("prompt"), str):
            text, salt = prompt["prompt"], {k: v for k, v in prompt.items() if k != "prompt"}
        if config.log_prompts:
            shown = text if text is not None else self._text_of(prompt)
            log_prompt(self.request_id, shown)
        if text is None:
            return prompt
        return {"prompt_token_ids": await self._state.engine.encode(text), **salt}

    def _text_of(self, prompt: Prompt) -> str:
        ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else prompt
        try:
            return self._state.engine.decode(cast("list[int]", ids))
        except (OctavoError, TypeError, ValueError, OverflowError):
            return repr(ids)

    def _ended(self, watch: _Watch, error: BaseException | None) -> None:
        """One of the streams has; told once."""
        state, request_id = self._state, watch.stream.request_id
        self._streams.pop(request_id, None)
        state.limits.ended(self.client, watch.num_unused_tokens)
        if watch.last is not None:
            state.metrics.ended(watch.last, watch.num_tokens_each, watch.max_tokens)
            for completion in watch.last.outputs:
                state.metrics.completion_ended(str(completion.finish_reason or "stop"))
        else:
            state.metrics.aborted(_reason(error))
        if state.tracer is not None:
            why = None if watch.last is not None else _reason(error)
            state.tracer.ended(request_id, watch.last, self._traceparent, why)
        if not self._streams:
            self._leave()

    def _leave(self) -> None:
        """Nothing runs any more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._state.calls.get(self.request_id) is self:
            del self._state.calls[self.request_id]
            self._state.metrics.in_flight(len(self._state.calls))

    def _expire(self, timeout_s: float) -> None:
        self.abort(
            RequestTimeoutError(
                f"the answer was not complete within {timeout_s:g} s (--request-timeout-s): ask "
                "for fewer tokens"
            )
        )

    def abort(self, error: OctavoError | None = None) -> int:
        """End what runs with an error for whoever waits; how many requests that were."""
        reason = AbortedError("the request was aborted") if error is None else error
        streams = list(self._streams.values())
        for stream in streams:
            stream.fail(reason)
            self._state.engine.abort(stream.request_id)
            stream.fail(reason)  # instead of what the engine calls it
        return len(streams)

    def close(self) -> None:
        """Abort what runs, for nobody waits any more; closing twice is fine."""
        self._is_closed = True
        for stream in list(self._streams.values()):
            stream.close()
        self._leave()


class _Watch:
    """Looks at a stream's outputs as they come."""

    def __init__(self, call: Call, stream: OutputStream, params: Params, size: int) -> None:
        self._call, self.stream = call, stream
        self.num_tokens_each = [0] * _num_completions(params)
        self.max_tokens = params.max_tokens
        self.last: RequestOutput | None = None
        self._num_asked, self._num_made = size, 0
        self._news = call._state.metrics.news
        self._at_s: float | None = None

    def put(self, output: RequestOutput) -> None:
        """News; of a stream of differences also the time since those before."""
        num = 0
        for completion in output.outputs:
            num_new = len(completion.token_ids)
            self.num_tokens_each[completion.index] += num_new
            num += num_new
        now = time.monotonic()
        if not self._num_made:
            self._num_made = len(output.prompt_token_ids)
        elif self._at_s is not None and num:
            self._news(num, now - self._at_s)
        self._num_made += num
        self._at_s = now
        if output.finished:
            self.last = output

    @property
    def num_unused_tokens(self) -> int:
        """Of those that were asked for; below 0, where there was no `max_tokens`: those above."""
        return self._num_asked - self._num_made


def _num_completions(params: Params) -> int:
    if isinstance(params, SamplingParams):
        return params.num_sequences
    return params.beam_width


def _num_tokens(prompt: Prompt, params: Params) -> int:
    """Most that a prompt and its completions can be; without max_tokens the prompt's alone: what
    comes is then counted when it has."""
    ids = prompt.get("prompt_token_ids") if isinstance(prompt, dict) else prompt
    num_prompt = len(ids) if isinstance(ids, list | tuple) else 0
    return num_prompt + _num_completions(params) * (params.max_tokens or 0)


def _reason(error: BaseException | None) -> str:
    """A word for metrics."""
    if error is None:
        return "client_gone"
    name = type(error).__name__.removesuffix("Error")
    return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")
