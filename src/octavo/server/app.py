"""The application: endpoints, errors and the layers around them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

import octavo
from octavo.errors import InvalidRequestError, OctavoError
from octavo.server import admin, health
from octavo.server.errors import (
    NotFoundError,
    RefusedError,
    code_of,
    headers_of,
    shape_for,
    status_of,
)
from octavo.server.middleware import Front, path_of
from octavo.server.state import ServerState, state_of

logger = logging.getLogger("octavo.server")
_AT_ROOT = ": the API begins with /v1, /docs describes it, and /dashboard shows the memory"
"""For who opens the server in a browser."""


class MethodError(RefusedError):
    """The path is right and the method is not."""

    status, code = 405, "method_not_allowed"


def create_app(state: ServerState, routers: Sequence[APIRouter] = ()) -> FastAPI:
    """All endpoints of a server. routers: more of them."""
    app = FastAPI(
        title="octavo",
        version=octavo.__version__,
        root_path=state.config.root_path,
        description="LLM inference and serving from memory you can see.",
    )
    app.state.octavo = state
    app.openapi = partial(_description, app)  # type: ignore[method-assign]
    for router in (health.router, admin.router, *routers):
        app.include_router(router)
    app.add_exception_handler(OctavoError, _octavo_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_middleware(Front, state=state)
    if state.config.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(state.config.allowed_origins),
            allow_methods=["GET", "POST", "OPTIONS"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "x-octavo-ignored", "retry-after"],
        )
    return app


def _description(app: FastAPI) -> dict[str, Any]:
    """OpenAPI, with what is really answered to fields that are wrong: 400, in OpenAI's shape."""
    if app.openapi_schema is None:
        described = FastAPI.openapi(app)
        for methods in described["paths"].values():
            for operation in methods.values():
                responses = operation["responses"]
                if responses.pop("422", None) is not None:
                    responses.setdefault("400", {"description": "A field is wrong; error.param"})
        schemas = described.get("components", {}).get("schemas", {})
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
    return cast("dict[str, Any]", app.openapi_schema)


async def _octavo_error(request: Request, error: Exception) -> Response:
    return _answer(request, error)


async def _validation_error(request: Request, error: Exception) -> Response:
    """The first field that is wrong, by name; the values are not repeated at length."""
    errors = cast("RequestValidationError", error).errors()
    first = _telling(errors)
    kind = first.get("type", "")
    if kind == "json_invalid":
        told = InvalidRequestError("the body is no valid JSON", parameter=None)
        return _answer(request, told)
    if kind == "model_attributes_type" and not _is_json(request):
        told = InvalidRequestError("send a JSON object with content-type: application/json")
        return _answer(request, told)
    where = [str(part) for part in first["loc"][1:] if not _is_kind(part)]
    name = ".".join(where)[:200] or None
    more = f" (and {len(errors) - 1} more)" if len(errors) > 1 else ""
    message = f"{name or 'the body'}: {first['msg'].removeprefix('Value error, ')}{more}"[:1000]
    return _answer(request, InvalidRequestError(message, parameter=name))


_KINDS = frozenset(
    ("str", "int", "bool", "[key]", "text", "ids", "prompts", "prompts of ids", "constrained-str")
)


def _is_kind(part: object) -> bool:
    """Whether a part of an error's place is no field but which of its types was tried."""
    return isinstance(part, str) and (part in _KINDS or part.endswith("]") or part == "dict")


def _telling(errors: Sequence[Any]) -> dict[str, Any]:
    """Of the first wrong field the error that got furthest: a list's wrong item, or its length, not
    that the list is no text."""
    if not errors:
        return {"msg": "invalid", "loc": ()}
    field = errors[0]["loc"][:2]
    of_field = (error for error in errors if error["loc"][:2] == field)
    return dict(max(of_field, key=lambda e: (len(e["loc"]), not e["type"].endswith("_type"))))


def _is_json(request: Request) -> bool:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return kind == "application/json" or (kind.startswith("application/") and "+json" in kind)


async def _http_error(request: Request, error: Exception) -> Response:
    """What the framework raises, and what it has wrapped."""
    assert isinstance(error, HTTPException)
    cause = error.__cause__
    if isinstance(cause, OctavoError):  # raised while the body was read
        return _answer(request, cause)
    if error.status_code == 404:
        path = path_of(request.scope)
        hint = _AT_ROOT if path == "/" else ""
        told: OctavoError = NotFoundError(f"there is no {request.method} {path}{hint}")
    elif error.status_code == 405:
        told = MethodError(f"{request.method} is not allowed here")
    else:
        told = InvalidRequestError(str(error.detail))
    response = _answer(request, told)
    response.headers.update(error.headers or {})
    return response


def _answer(request: Request, error: Exception) -> Response:
    state = state_of(request)
    status = status_of(error)
    if status == 500:
        logger.error("%s: %s", type(error).__name__, error)
    state.metrics.refused(code_of(error) or "invalid_value")
    shape = shape_for(path_of(request.scope), error)
    return JSONResponse(shape, status, headers=headers_of(error))
