"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Request

from octavo.server.openai import replies
from octavo.server.openai.answer import check_model
from octavo.server.state import state_of

router = APIRouter(tags=["OpenAI"])


@router.get("/v1/models", response_model=replies.ModelList, responses=replies.PLAIN)
async def list_models(request: Request) -> dict[str, Any]:
    """The names that the served model goes by."""
    state = state_of(request)
    return {"object": "list", "data": [_card(request, name) for name in state.model_names]}


@router.get("/v1/models/{model:path}", response_model=replies.Model, responses=replies.PLAIN)
async def show_model(model: Annotated[str, Path(min_length=1)], request: Request) -> dict[str, Any]:
    """One of them."""
    return _card(request, check_model(state_of(request), model))


def _card(request: Request, name: str) -> dict[str, Any]:
    state = state_of(request)
    info = state.engine.info
    return {
        "id": name,
        "object": "model",
        "created": int(state.started_s),
        "owned_by": "octavo",
        "root": info.config.model,
        "parent": None,
        "max_model_len": info.max_model_len,
    }
