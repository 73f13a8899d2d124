"""POST /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Request, Response

from octavo.errors import InvalidRequestError
from octavo.outputs import OutputKind, RequestOutput
from octavo.request import SamplingParams
from octavo.server.bodies import BodyRoute, in_turn
from octavo.server.calls import Call, call_of
from octavo.server.openai.answer import check_model, naming, note, stream_response, whole_response
from octavo.server.openai.extras import ignored_fields, ignored_header
from octavo.server.openai.logprobs import TokenWriter
from octavo.server.openai.prompts import PromptIds, check_chat, check_fits
from octavo.server.openai.replies import GENERATING
from octavo.server.parts import PartReader
from octavo.server.responses.answer import Answer, ResponseEvents
from octavo.server.responses.items import messages_of
from octavo.server.responses.protocol import LOGPROBS, ResponsesRequest
from octavo.server.responses.replies import ResponseBody
from octavo.server.state import state_of

router = APIRouter(tags=["OpenAI"], route_class=BodyRoute)
_PLAIN = ("temperature", "top_p", "top_k", "seed", "ignore_eos")
"""Fields that are `SamplingParams` fields of the same name and meaning."""


@router.post(
    "/v1/responses",
    summary="Answer an input",
    response_model=ResponseBody,
    responses=GENERATING,
)
async def create_response(
    body: ResponsesRequest, request: Request, call: Annotated[Call, Depends(call_of)]
) -> Response:
    """Answer a text or a conversation; with `stream` as server-sent events. Nothing is stored."""
    state = state_of(request)
    is_lenient = state.config.compat == "lenient"
    headers = await in_turn(request, ignored_fields, body, is_lenient=is_lenient)
    note(request, user=body.user or body.safety_identifier, metadata=body.metadata)
    model = check_model(state, body.model)
    params = _params(body)
    reader = PartReader(is_lenient=is_lenient)
    messages = await in_turn(request, messages_of, reader, body.input, body.instructions)
    if reader.ignored:
        headers = ignored_header([*headers.values(), *reader.ignored])
    limit, engine = body.max_output_tokens, state.engine
    with naming("input", max_tokens="max_output_tokens", messages="input", prompt="input"):
        check_chat(state, len(messages))
        token_ids = await engine.chat_prompt(
            messages, chat_template=state.chat_template, max_tokens=engine.info.max_model_len
        )
        check_fits(engine, len(token_ids), limit, "input", "max_output_tokens")
        streams = await call.submit(
            [PromptIds(token_ids, None).prompt(body.cache_salt)],
            params,
            priority=body.priority or 0,
            kind=OutputKind.DELTA if body.stream else OutputKind.FINAL_ONLY,
        )
    request_id = call.request_id.removeprefix("resp_")
    answer = Answer(body, model, request_id, TokenWriter(engine.tokenizer))
    if body.stream:
        return stream_response(request, call, streams, ResponseEvents(answer), headers)

    def shape(outputs: list[RequestOutput]) -> dict[str, Any]:
        (output,) = outputs
        (completion,) = output.outputs
        answer.usage.add(0, output)
        logprobs = answer.logprobs(completion)
        return answer.ended(completion.text, logprobs, completion.finish_reason)

    return await whole_response(request, call, streams, shape, headers)


def _params(body: ResponsesRequest) -> SamplingParams:
    if body.stream_options is not None and not body.stream:
        raise InvalidRequestError("stream_options needs stream: true", parameter="stream_options")
    with_logprobs = LOGPROBS in (body.include or ())
    if body.top_logprobs and not with_logprobs:
        raise InvalidRequestError(
            f"top_logprobs needs include: ['{LOGPROBS}']", parameter="top_logprobs"
        )
    values: dict[str, Any] = {
        name: getattr(body, name) for name in _PLAIN if getattr(body, name) is not None
    }
    if with_logprobs:
        values["logprobs"] = body.top_logprobs or 0
    return SamplingParams(**values, max_tokens=body.max_output_tokens)
