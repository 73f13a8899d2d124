"""POST /v1/chat/completions."""

from __future__ import annotations

import time
from functools import partial
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
from octavo.server.openai.chunks import ChatChunks, ToolChunks
from octavo.server.openai.extras import ignored_fields
from octavo.server.openai.logprobs import TokenWriter, chat_logprobs, prompt_logprobs
from octavo.server.openai.params import max_tokens_of, num_logprobs, params_of
from octavo.server.openai.prompts import PromptIds, chat_ids, check_fits, truncated_chat
from octavo.server.openai.protocol import ChatRequest
from octavo.server.openai.tools import CallFinder, parser_name_of, told_tools
from octavo.server.openai.usage import Usage
from octavo.server.state import state_of

router = APIRouter(tags=["OpenAI"], route_class=BodyRoute)
KNOWN_ID = "chatcmpl-"


@router.post(
    "/v1/chat/completions",
    summary="Answer a conversation",
    response_model=replies.ChatCompletion,
    responses=replies.GENERATING,
)
async def create_chat_completion(
    body: ChatRequest, request: Request, call: Annotated[Call, Depends(call_of)]
) -> Response:
    """Answer a conversation; with `stream` as server-sent events."""
    state = state_of(request)
    is_lenient = state.config.compat == "lenient"
    headers = await in_turn(request, ignored_fields, body, is_lenient=is_lenient)
    note(request, user=body.user or body.safety_identifier, metadata=body.metadata)
    model = check_model(state, body.model)
    max_tokens = max_tokens_of(body)
    parser = parser_name_of(state.config, body)
    only_first = body.parallel_tool_calls is False
    finder = None if parser is None else partial(CallFinder, parser, only_first=only_first)
    with naming("messages", prompt="messages"):
        token_ids = await chat_ids(
            state, body, body.messages, told_tools(body), receive=request.receive
        )
    token_ids = truncated_chat(state.engine, body, token_ids, max_tokens)
    check_fits(state.engine, len(token_ids), max_tokens, "messages")
    if max_tokens is None and body.use_beam_search:
        max_tokens = state.engine.info.max_model_len - len(token_ids)
    params = params_of(body, max_tokens=max_tokens)
    with naming("messages"):
        streams = await call.submit(
            [PromptIds(token_ids, None).prompt(body.cache_salt)],
            params,
            priority=body.priority or 0,
            kind=OutputKind.DELTA if body.stream else OutputKind.FINAL_ONLY,
        )
    request_id = call.request_id
    head: dict[str, Any] = {
        "id": request_id if request_id.startswith(KNOWN_ID) else KNOWN_ID + request_id,
        "object": "chat.completion.chunk" if body.stream else "chat.completion",
        "created": int(time.time()),
        "model": model,
        "system_fingerprint": fingerprint(state),
    }
    if body.service_tier is not None:
        head["service_tier"] = "default"
    writer = TokenWriter(state.engine.tokenizer, as_ids=body.return_tokens_as_token_ids is True)
    usage = Usage(with_kv=body.return_kv_usage is True)
    echo = _echo(body)
    if body.stream:
        shown = shown_of(body, num_logprobs(body))
        chunks = (
            ChatChunks(head, shown, writer, usage, echo=echo)
            if finder is None
            else ToolChunks(head, shown, writer, usage, echo=echo, finder=finder)
        )
        return stream_response(request, call, streams, chunks, headers)

    def shape(outputs: list[RequestOutput]) -> dict[str, Any]:
        output = outputs[0]
        usage.add(0, output)
        choices = [
            _choice(body, writer, echo, i, completion, None if finder is None else finder())
            for i, completion in enumerate(output.outputs[: body.n or 1])
        ]
        return head | {"choices": choices, "usage": usage.shape()} | _of_prompt(body, output)

    return await whole_response(request, call, streams, shape, headers)


def _choice(
    body: ChatRequest,
    writer: TokenWriter,
    echo: str,
    number: int,
    completion: CompletionOutput,
    finder: CallFinder | None,
) -> dict[str, Any]:
    num_top = num_logprobs(body)
    message: dict[str, Any] = {
        "role": "assistant",
        "content": echo + completion.text,
        "refusal": None,
    }
    choice: dict[str, Any] = {
        "index": number,
        "message": message,
        "logprobs": None,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
    }
    if finder is not None:
        content, calls = finder.push(completion.text, is_last=True)
        message["content"] = echo + content
        if calls:
            message |= {"content": message["content"] or None, "tool_calls": calls}
            choice["finish_reason"] = finder.finish_reason(completion.finish_reason)
    if num_top is not None and completion.logprobs is not None:
        choice["logprobs"] = chat_logprobs(
            writer, num_top, completion.token_ids, completion.logprobs
        )
    if body.return_token_ids:
        choice["token_ids"] = completion.token_ids
    return choice


def _of_prompt(body: ChatRequest, output: RequestOutput) -> dict[str, Any]:
    """What is told of the prompt, if it was asked for."""
    told: dict[str, Any] = {}
    if body.prompt_logprobs is not None:
        told["prompt_logprobs"] = prompt_logprobs(
            body.prompt_logprobs, output.prompt_token_ids, output.prompt_logprobs
        )
    if body.return_token_ids:
        told["prompt_token_ids"] = output.prompt_token_ids
    return told


def _echo(body: ChatRequest) -> str:
    """The last message's text, if it is the assistant's and to be repeated."""
    last = body.messages[-1]
    if not body.echo or last.role != "assistant" or last.content is None:
        return ""
    if isinstance(last.content, str):
        return last.content
    return "\n".join(part if isinstance(part, str) else part["text"] for part in last.content)
