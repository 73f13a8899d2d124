"""POST /v1/messages and /v1/messages/count_tokens."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from octavo.outputs import OutputKind
from octavo.request import SamplingParams
from octavo.server.anthropic import replies
from octavo.server.anthropic.answer import Answer, MessageEvents
from octavo.server.anthropic.prompt import messages_of, prompt_ids
from octavo.server.anthropic.protocol import (
    ConversationFields,
    CountTokensRequest,
    MessagesRequest,
)
from octavo.server.bodies import BodyRoute, in_turn
from octavo.server.calls import Call, call_of
from octavo.server.openai.answer import check_model, naming, note, stream_response, whole_response
from octavo.server.openai.extras import ignored_fields, ignored_header
from octavo.server.openai.prompts import PromptIds, check_fits
from octavo.server.openai.usage import Usage
from octavo.server.parts import PartReader
from octavo.server.state import state_of

router = APIRouter(tags=["Anthropic"], route_class=BodyRoute)
_PLAIN = ("temperature", "top_p", "top_k", "seed", "ignore_eos")
"""Fields that are `SamplingParams` fields of the same name and meaning."""


@router.post(
    "/v1/messages",
    summary="Answer a conversation",
    response_model=replies.MessageBody,
    responses=replies.GENERATING,
)
async def create_message(
    body: MessagesRequest, request: Request, call: Annotated[Call, Depends(call_of)]
) -> Response:
    """Answer a conversation; with `stream` as server-sent events."""
    state = state_of(request)
    note(request, user=None if body.metadata is None else body.metadata.user_id)
    model = check_model(state, body.model)
    most = state.engine.info.max_model_len
    token_ids, headers = await _prompt(body, request, max_tokens=most)
    check_fits(state.engine, len(token_ids), body.max_tokens, "messages")
    with naming("messages", stop="stop_sequences"):
        streams = await call.submit(
            [PromptIds(token_ids, None).prompt(body.cache_salt)],
            _params(body),
            priority=body.priority or 0,
            kind=OutputKind.DELTA if body.stream else OutputKind.FINAL_ONLY,
        )
    headers = headers | {"request-id": call.request_id}  # where the anthropic client looks for it
    usage = Usage(with_kv=body.return_kv_usage is True)
    answer = Answer(model, call.request_id.removeprefix("msg_"), usage)
    if body.stream:
        return stream_response(request, call, streams, MessageEvents(answer), headers)
    return await whole_response(
        request, call, streams, lambda outputs: answer.ended(outputs[0]), headers
    )


@router.post(
    "/v1/messages/count_tokens",
    summary="Count a conversation's tokens",
    response_model=replies.TokenCount,
    responses=replies.ASKING,
)
async def count_tokens(
    body: CountTokensRequest, request: Request, response: Response
) -> dict[str, int]:
    """The tokens of the prompt that /v1/messages would make of it."""
    check_model(state_of(request), body.model)
    token_ids, headers = await _prompt(body, request, max_tokens=None)
    response.headers.update(headers)
    return {"input_tokens": len(token_ids)}


async def _prompt(
    body: ConversationFields, request: Request, *, max_tokens: int | None
) -> tuple[list[int], dict[str, str]]:
    """And response headers that name what is ignored."""
    state = state_of(request)
    is_lenient = state.config.compat == "lenient"
    headers = await in_turn(request, ignored_fields, body, is_lenient=is_lenient)
    reader = PartReader(is_lenient=is_lenient)
    messages = await in_turn(request, messages_of, reader, body)
    token_ids = await prompt_ids(state, messages, max_tokens=max_tokens)
    if reader.ignored:
        headers = ignored_header([*headers.values(), *reader.ignored])
    return token_ids, headers


def _params(body: MessagesRequest) -> SamplingParams:
    values: dict[str, Any] = {
        name: getattr(body, name) for name in _PLAIN if getattr(body, name) is not None
    }
    return SamplingParams(**values, max_tokens=body.max_tokens, stop=body.stop_sequences or [])
