"""The routes of the dashboard: the page, its sources, their frames and blocks, and the login.

The page and its files hold no data and need no key. Who asks for data is checked by whoever
includes the routes; a browser shows who it is by the cookie that the login sets.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import JSONResponse

from octavo.dashboard.feed import DEFAULT_HZ, LEAST_HZ, MOST_HZ, FrameSource, FrameStream
from octavo.errors import ConfigError, IntegrityError, InvalidRequestError, OctavoError
from octavo.server.life import Phase
from octavo.server.state import ServerState, state_of

COOKIE = "octavo-dashboard"
DATA = ("sources", "frames", "block")
"""Under /dashboard: what shows something of a pool."""
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
        "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
_MAX_FORM_BYTES = 4096

Sources = Callable[[Request], Sequence[FrameSource]]
Login = Callable[[Request, str], str | None]
"""The cookie for a key; None: it is the wrong one."""


def make_router(
    sources: Sources,
    *,
    login: Login,
    is_leaving: Callable[[Request], bool] = lambda _: False,
) -> APIRouter:
    """`sources` are those of the application that a request is for, and so is `is_leaving`,
    whether it ends: then streams do."""
    router = APIRouter(prefix="/dashboard", include_in_schema=False)

    @router.get("")
    async def page() -> Response:
        return _file("index.html")

    @router.get("/sources")
    async def list_sources(request: Request) -> Response:
        found = sources(request)
        one = len(found) == 1
        rows = [
            {
                "name": source.name,
                "frames": "frames" if one else f"frames?source={number}",
                "block": "block/" if one else f"block/{number}/",
            }
            for number, source in enumerate(found)
        ]
        return JSONResponse(rows)

    @router.get("/frames")
    async def frames(request: Request) -> Response:
        source = _chosen(sources(request), request.query_params.get("source", "0"))
        hz = _hz(request.query_params.get("hz"))
        return FrameStream(source, hz, lambda: is_leaving(request))

    @router.get("/block/{block_id}")
    async def block(request: Request, block_id: str) -> Response:
        return await _block(sources(request), "0", block_id)

    @router.get("/block/{source}/{block_id}")
    async def block_of(request: Request, source: str, block_id: str) -> Response:
        return await _block(sources(request), source, block_id)

    @router.post("/login")
    async def log_in(request: Request) -> Response:
        cookie = login(request, await _key_in_form(request))
        if cookie is None:
            return _refusal(401, "the admin key is wrong", "invalid_api_key")
        response = Response(status_code=204)
        path = f"{request.scope.get('root_path', '')}/dashboard"
        is_secure = request.url.scheme == "https"
        response.set_cookie(
            COOKIE, cookie, path=path, httponly=True, samesite="strict", secure=is_secure
        )
        return response

    @router.get("/{name}")
    async def asset(name: str) -> Response:
        return _file(name)

    return router


def make_app(
    sources: Sequence[FrameSource], *, is_leaving: Callable[[], bool] = lambda: False
) -> FastAPI:
    """The dashboard alone, over sources of this process; for this machine only: it has no keys."""
    app = FastAPI(title="octavo", openapi_url=None)
    app.include_router(
        make_router(lambda _: sources, login=lambda _, key: None, is_leaving=lambda _: is_leaving())
    )

    @app.get("/", include_in_schema=False)
    async def root() -> Response:
        return Response(status_code=307, headers={"location": "dashboard"})

    @app.exception_handler(OctavoError)
    async def refused(_: Request, error: OctavoError) -> Response:
        is_missing = isinstance(error, IntegrityError)
        return _refusal(404 if is_missing else 400, str(error), "invalid_value")

    return app


async def _block(sources: Sequence[FrameSource], source: str, block_id: str) -> Response:
    if not block_id.isdecimal() or len(block_id) > 9:
        raise InvalidRequestError(
            f"a block's id is a number, got {block_id!r:.40}", parameter="block_id"
        )
    try:
        return JSONResponse(await _chosen(sources, source).block(int(block_id)))
    except IntegrityError as error:
        return _refusal(404, str(error), "not_found")


def _chosen(sources: Sequence[FrameSource], number: str) -> FrameSource:
    if not number.isdecimal() or len(number) > 9 or int(number) >= len(sources):
        raise InvalidRequestError(
            f"source must be from 0 to {len(sources) - 1}, got {number!r:.40}", parameter="source"
        )
    return sources[int(number)]


def _hz(text: str | None) -> float:
    try:
        hz = DEFAULT_HZ if text is None else float(text)
    except ValueError:
        hz = 0.0
    if not LEAST_HZ <= hz <= MOST_HZ:
        raise InvalidRequestError(
            f"hz, frames a second, must be from {LEAST_HZ:g} to {MOST_HZ:g}, got {text!r:.40}",
            parameter="hz",
        )
    return hz


async def _key_in_form(request: Request) -> str:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > _MAX_FORM_BYTES:
            raise InvalidRequestError(
                f"the form has more than {_MAX_FORM_BYTES} bytes", parameter="key"
            )
    fields = parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=4)
    if list(fields) != ["key"]:
        raise InvalidRequestError("the form must have one field, key", parameter="key")
    return fields["key"][0]


def _file(name: str) -> Response:
    """A file of the page."""
    suffix = name[name.rfind(".") :]
    path = files("octavo.dashboard") / "page" / name
    if "/" in name or "\\" in name or suffix not in _KINDS or not path.is_file():
        return _refusal(404, f"the dashboard has no file {name!r:.80}", "not_found")
    return Response(path.read_bytes(), headers=_HEADERS | {"content-type": _KINDS[suffix]})


def _refusal(status: int, message: str, code: str) -> Response:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": code}
    return JSONResponse({"error": error}, status)


# -- of a server


class EngineSource:
    """The pool of a server's engine."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    @property
    def name(self) -> str:
        """The model's."""
        return self._state.model_names[0]

    def frames(self, hz: float) -> AsyncIterator[bytes]:
        """See `FrameSource`."""
        return self._state.engine.frames(hz)

    async def block(self, block_id: int) -> dict[str, Any]:
        """See `FrameSource`; with the text of the tokens where there is a tokenizer."""
        engine = self._state.engine
        info = await engine.block_info(block_id)
        if info["token_ids"] and engine.tokenizer is not None:
            info["text"] = engine.decode(info["token_ids"])
        return info


def _log_in(request: Request, key: str) -> str | None:
    keys = state_of(request).keys
    if not keys.has_admin_key:
        raise ConfigError("this server has no admin key: there is nothing to log in for")
    return keys.cookie_for(key)


def _is_leaving(request: Request) -> bool:
    """Nothing is to be seen any more: the last request of a server that ends was answered."""
    state = state_of(request)
    return state.life.phase is Phase.STOPPING and not state.calls


router = make_router(
    lambda request: (EngineSource(state_of(request)),), login=_log_in, is_leaving=_is_leaving
)
"""For a server: reads `request.app.state.octavo`."""
