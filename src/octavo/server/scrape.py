"""`/metrics`, for Prometheus."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from octavo.server.metrics import CONTENT_TYPE
from octavo.server.state import state_of

router = APIRouter(tags=["health"])


@router.get(
    "/metrics",
    summary="What Prometheus scrapes",
    response_class=Response,
    responses={200: {"content": {"text/plain": {"schema": {"type": "string"}}}}},
)
async def metrics(request: Request) -> Response:
    """Names, meanings and formulas: docs/metrics.md. On a loopback address it needs no key."""
    return Response(state_of(request).metrics.text(), media_type=CONTENT_TYPE)
