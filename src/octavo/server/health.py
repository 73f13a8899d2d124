"""Is it alive, does it take requests, which version: open to everyone; and the metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from octavo.server.state import state_of

router = APIRouter(tags=["health"])
_CODES: dict[int | str, dict[str, Any]] = {503: {"description": "It is not; the body says why"}}


@router.get("/health", summary="Is the server alive", responses=_CODES)
async def health(request: Request) -> Response:
    """200 while the model loads and while requests are answered, drained or not; 503 while the
    engine's process is gone: restart the server if that lasts."""
    return _told(state_of(request).life.why_not_alive)


@router.post("/ping", include_in_schema=False)
@router.get("/ping", summary="As /health, by the name that SageMaker asks for", responses=_CODES)
async def ping(request: Request) -> Response:
    """See /health."""
    return await health(request)


@router.get("/ready", summary="Does the server take requests", responses=_CODES)
async def ready(request: Request) -> Response:
    """503 while it starts, drains, or its engine is being started again: send requests elsewhere
    meanwhile."""
    return _told(state_of(request).life.why_not_ready)


@router.get("/version", summary="The server's version")
async def version() -> dict[str, str]:
    """octavo's."""
    import octavo

    return {"version": octavo.__version__}


def _told(why_not: str | None) -> Response:
    if why_not is None:
        return JSONResponse({"status": "ok"})
    return JSONResponse(
        {"status": "unavailable", "reason": why_not}, 503, headers={"retry-after": "5"}
    )
