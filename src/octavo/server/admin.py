"""For the administrator: abort, drain, resize, look inside. `middleware` checks the key."""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from octavo.server.errors import NotFoundError
from octavo.server.life import Phase
from octavo.server.logs import log
from octavo.server.state import state_of

router = APIRouter(prefix="/admin", tags=["admin"])
RequestId = Annotated[str, Field(max_length=200)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class AbortBody(_Body):
    """Which request."""

    request_id: RequestId
    """Its X-Request-Id, or its answer's id."""


class ResizeBody(_Body):
    """How large the pool shall be."""

    num_bytes: int = Field(gt=0, le=2**60)


class LogLevelBody(_Body):
    """What to write to the log."""

    level: Literal["debug", "info", "warning", "error"]


@router.post(
    "/abort", summary="Abort a request", responses={404: {"description": "No such request."}}
)
async def abort(body: AbortBody, request: Request) -> dict[str, int]:
    """Its blocks are free within one step; its client gets an error."""
    state = state_of(request)
    for prefix in ("", "cmpl-", "chatcmpl-", "resp_", "msg_"):
        call = state.calls.get(body.request_id.removeprefix(prefix))
        if call is not None:
            log(logging.WARNING, "aborted by an administrator", request_id=call.request_id)
            return {"num_aborted": call.abort()}
    raise NotFoundError(
        f"no request {body.request_id!r} is under way: it has ended, or never was",
        parameter="request_id",
    )


@router.get("/requests", summary="Requests under way")
async def requests(request: Request) -> dict[str, Any]:
    """Ids and clients of all calls that have not ended."""
    calls = state_of(request).calls.values()
    return {"requests": [{"id": c.request_id, "client": c.client.name} for c in calls]}


@router.post("/drain", summary="Take no new requests")
async def drain(request: Request) -> dict[str, Any]:
    """Running ones go on; `/ready` says 503. Goes on until `/admin/undrain`."""
    state = state_of(request)
    if state.life.phase is Phase.STARTING:
        state.life.check()
    state.life.drain()
    return {"phase": state.life.phase, "num_under_way": len(state.calls)}


@router.post("/undrain", summary="Take requests again")
async def undrain(request: Request) -> dict[str, Any]:
    """After `/admin/drain`; not after SIGTERM."""
    state = state_of(request)
    if state.life.phase is not Phase.DRAINING:
        state.life.check()
    state.life.serve()
    return {"phase": state.life.phase, "num_under_way": len(state.calls)}


@router.post("/resize_kv_cache", summary="Make the KV pool larger or smaller")
async def resize_kv_cache(body: ResizeBody, request: Request) -> dict[str, int]:
    """To so many bytes, in whole blocks; what it became."""
    return {"num_bytes": await state_of(request).engine.resize_kv_cache(body.num_bytes)}


@router.post("/reset_prefix_cache", summary="Forget cached prefixes")
async def reset_prefix_cache(request: Request) -> dict[str, int]:
    """How many blocks were dropped."""
    return {"num_blocks": await state_of(request).engine.reset_prefix_cache()}


@router.post("/log_level", summary="Write more or less to the log")
async def log_level(body: LogLevelBody, request: Request) -> dict[str, str]:
    """Of both processes."""
    logging.getLogger("octavo").setLevel(body.level.upper())
    await state_of(request).engine.set_log_level(body.level.upper())
    return {"level": body.level}


@router.get("/memory", summary="Where every byte of the KV pool is")
async def memory(request: Request) -> dict[str, Any]:
    """The memory report, also as text."""
    return await state_of(request).engine.memory_report()


@router.get("/events", summary="What happened for lack of memory")
async def events(
    request: Request, request_id: Annotated[str | None, Query(max_length=200)] = None
) -> dict[str, Any]:
    """Of one request, or the latest of all."""
    found = await state_of(request).engine.events(request_id)
    return {"events": [event.as_dict() for event in found]}
