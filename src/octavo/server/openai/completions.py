"""POST /v1/completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from octavo.outputs import CompletionOutput, OutputKind, RequestOutput
from octavo.server.bodies import BodyRoute, in_turn
from octavo.server.calls import Call, call_of
from octavo.server.openai import replies
from octavo.server.openai.answer import (
    check_model,
    fingerprint,
    naming,
    note,
    shown_of,
    stream_response,
    whole_response,
)
from octavo.server.openai.chunks import CompletionChunks
from octavo.server.openai.extras import ignored_fields
from octavo.server.openai.logprobs import CompletionLogprobs, TokenWriter, prompt_logprobs
from octavo.server.openai.params import max_tokens_of, params_of
from octavo.server.openai.prompts import PromptIds, check_fits, completion_prompts
from octavo.server.openai.protocol import CompletionRequest
from octavo.server.openai.usage import Usage
from octavo.server.state import state_of

router = APIRouter(tags=["OpenAI"], route_class=BodyRoute)
KNOWN_ID = "cmpl-"


@router.post(
    "/v1/completions",
    summary="Complete prompts",
    response_model=replies.Completion,
    responses=replies.GENERATING,
)
async def create_completion(
    body: CompletionRequest, request: Request, call: Annotated[Call, Depends(call_of)]
) -> Response:
    """Complete one or several prompts; with `stream` as server-sent events."""
    state = state_of(request)
    is_lenient = state.config.compat == "lenient"
    headers = await in_turn(request, ignored_fields, body, is_lenient=is_lenient)
    note(request, user=body.user)
    model = check_model(state, body.model)
    max_tokens = max_tokens_of(body)
    prompts = await completion_prompts(state.engine, body, state.config.max_prompts)
    with naming("prompt"):
        for prompt in prompts:
            check_fits(state.engine, len(prompt.token_ids), max_tokens, "prompt")
        params = params_of(body, max_tokens=max(max_tokens or 1, 1))
        streams = await call.submit(
            [prompt.prompt(body.cache_salt) for prompt in prompts],
            params,
            priority=body.priority or 0,
            kind=OutputKind.DELTA if body.stream else OutputKind.FINAL_ONLY,
        )
    head: dict[str, Any] = {
        "id": _id(call),
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": fingerprint(state),
    }
    writer = TokenWriter(state.engine.tokenizer, as_ids=body.return_tokens_as_token_ids is True)
    usage = Usage(with_kv=body.return_kv_usage is True)
    echo = [_text(request, prompt) for prompt in prompts] if body.echo else None
    if body.stream:
        chunks = CompletionChunks(
            head,
            shown_of(body, body.logprobs),
            writer,
            usage,
            n=body.n or 1,
            echo=echo,
            echo_only=max_tokens == 0,
            first_name=lambda token_id: state.engine.decode([token_id]),
        )
        return stream_response(request, call, streams, chunks, headers)
    answer = _Answer(request, body, writer, echo)

    def shape(outputs: list[RequestOutput]) -> dict[str, Any]:
        choices = [c for i, output in enumerate(outputs) for c in answer.choices(i, output)]
        for index, output in enumerate(outputs):
            usage.add(index, output, 0 if max_tokens == 0 else None)
        return head | {"choices": choices, "usage": usage.shape()}

    return await whole_response(request, call, streams, shape, headers)


class _Answer:
    """Makes the choices of an answer that is not streamed."""

    def __init__(
        self,
        request: Request,
        body: CompletionRequest,
        writer: TokenWriter,
        echo: Sequence[str] | None,
    ) -> None:
        self._engine = state_of(request).engine
        self._body, self._writer, self._echo = body, writer, echo

    def choices(self, index: int, output: RequestOutput) -> list[dict[str, Any]]:
        """Of prompt number `index`."""
        first = index * (self._body.n or 1)
        best = output.outputs[: self._body.n or 1]
        return [self._choice(first + i, index, output, c) for i, c in enumerate(best)]

    def _choice(
        self, number: int, index: int, output: RequestOutput, completion: CompletionOutput
    ) -> dict[str, Any]:
        body = self._body
        echo_only = body.max_tokens == 0
        choice: dict[str, Any] = {
            "index": number,
            "text": "" if echo_only else completion.text,
            "logprobs": self._logprobs(output, completion),
            "finish_reason": "length" if echo_only else completion.finish_reason,
            "stop_reason": None if echo_only else completion.stop_reason,
        }
        if self._echo is not None:
            choice["text"] = self._echo[index] + choice["text"]
        if body.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(
                body.prompt_logprobs, output.prompt_token_ids, output.prompt_logprobs
            )
        if body.return_token_ids:
            choice["token_ids"] = [] if echo_only else completion.token_ids
            choice["prompt_token_ids"] = output.prompt_token_ids
        return choice

    def _logprobs(
        self, output: RequestOutput, completion: CompletionOutput
    ) -> dict[str, Any] | None:
        num_top = self._body.logprobs
        if num_top is None:
            return None
        shape = CompletionLogprobs(
            self._writer, num_top, lambda token_id: self._engine.decode([token_id])
        ).shape
        token_ids: list[int] = []
        positions: list[Any] = []
        if self._body.echo:
            token_ids += output.prompt_token_ids
            positions += output.prompt_logprobs or []
        if self._body.max_tokens != 0:
            token_ids += completion.token_ids
            positions += completion.logprobs or []
        return shape(token_ids, positions)


def _text(request: Request, prompt: PromptIds) -> str:
    if prompt.text is not None:
        return prompt.text
    return state_of(request).engine.decode(prompt.token_ids)


def _id(call: Call) -> str:
    request_id = call.request_id
    return request_id if request_id.startswith(KNOWN_ID) else KNOWN_ID + request_id
