"""POST /tokenize and /detokenize, in vLLM's shapes."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request, Response

from octavo.errors import InvalidRequestError
from octavo.server.bodies import BodyRoute, in_turn
from octavo.server.openai import replies
from octavo.server.openai.answer import check_model, naming
from octavo.server.openai.extras import ignored_fields
from octavo.server.openai.prompts import chat_ids
from octavo.server.openai.protocol import DetokenizeRequest, TokenizeRequest
from octavo.server.state import state_of

router = APIRouter(tags=["tokens"], route_class=BodyRoute)
_OF_MESSAGES = (
    "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs",
)  # fmt: skip


@router.post("/tokenize", response_model=replies.Tokenized, responses=replies.ASKING)
async def tokenize(body: TokenizeRequest, request: Request, response: Response) -> dict[str, Any]:
    """The token ids of a text, or of messages through the chat template."""
    state = state_of(request)
    is_lenient = state.config.compat == "lenient"
    ignored = await in_turn(request, ignored_fields, body, is_lenient=is_lenient)
    response.headers.update(ignored)
    check_model(state, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("give either prompt or messages", parameter="prompt")
    if body.messages is not None:
        with naming("messages", prompt="messages"):
            token_ids = await chat_ids(state, body, body.messages, receive=request.receive)
    else:
        for name in _OF_MESSAGES:
            if getattr(body, name) is not None:
                raise InvalidRequestError(f"{name} needs messages", parameter=name)
        assert body.prompt is not None
        token_ids = await state.engine.encode(body.prompt, body.add_special_tokens is not False)
    spelled: list[str] | None = None
    tokenizer = state.engine.tokenizer
    if body.return_token_strs and tokenizer is not None:
        spelled = [tokenizer.id_to_token(token_id) or "" for token_id in token_ids]
    return {
        "count": len(token_ids),
        "max_model_len": state.engine.info.max_model_len,
        "tokens": token_ids,
        "token_strs": spelled,
    }


@router.post("/detokenize", response_model=replies.Detokenized, responses=replies.ASKING)
async def detokenize(
    body: DetokenizeRequest, request: Request, response: Response
) -> dict[str, Any]:
    """The text of token ids, special tokens written out."""
    state = state_of(request)
    is_lenient = state.config.compat == "lenient"
    ignored = await in_turn(request, ignored_fields, body, is_lenient=is_lenient)
    response.headers.update(ignored)
    check_model(state, body.model)
    vocab_size = state.engine.info.arch.vocab_size
    largest = max(body.tokens, default=0)
    if largest >= vocab_size:
        raise InvalidRequestError(
            f"tokens holds id {largest} at index {body.tokens.index(largest)}, but the model's "
            f"vocabulary ends at {vocab_size - 1}",
            parameter="tokens",
        )
    return {"prompt": await asyncio.to_thread(state.engine.decode, body.tokens)}
