"""`/metrics`, for Prometheus."""

from __future__ import annotations

from typing import cast

from fastapi import APIRouter, Request, Response

from octavo.server.metrics import CONTENT_TYPE, Metrics
from octavo.server.state import ServerState

router = APIRouter(tags=["health"])


@router.get(
    "/metrics",
    summary="What Prometheus scrapes",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(request: Request) -> Response:
    """Names, meanings and formulas: docs/metrics.md. On a loopback address it needs no key."""
    state = cast("ServerState", request.app.state.octavo)
    observer = state.observer
    text = observer.text() if isinstance(observer, Metrics) else b""
    return Response(text, media_type=CONTENT_TYPE)
