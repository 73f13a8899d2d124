"""What happens to every HTTP request before and after its endpoint, as one pure ASGI layer.

Request id, key, life, body size, errors, access log. A streamed chunk passes through one function.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.dashboard.app import COOKIE, DATA
from octavo.server.calls import CALL, LABELS, Call
from octavo.server.errors import (
    AbortedError,
    AuthenticationError,
    BodyEncodingError,
    BodyTooLargeError,
    ForbiddenError,
    SlowBodyError,
    code_of,
    headers_of,
    shape_for,
    status_of,
)
from octavo.server.keys import Client, key_of
from octavo.server.logs import log, logger

if TYPE_CHECKING:
    from octavo.server.state import ServerState

OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/version"})
"""Need no key and are answered at any time."""
_DOCS = frozenset({"/openapi.json", "/docs", "/redoc", "/docs/oauth2-redirect"})
"""Answered at any time, too; as all else, only with a key."""
_PAGE = "/dashboard"
_WATCHING = ("/admin/", _PAGE)
"""Begin paths for administrators, answered while the server starts or drains."""
_SANE_ID = re.compile(rb"[A-Za-z0-9._:@/+=-]{1,128}")
_OF_PROXIES = (b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"via")
_OWN_HOSTS = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?", re.IGNORECASE)


class Front:
    """Around the whole application."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        is_head = scope["method"] == "HEAD"
        if is_head:  # what GET answers, without the body
            scope = {**scope, "method": "GET"}
        seen = _Seen(self._state, scope, receive, send, is_head=is_head)
        try:
            client = _check(self._state, scope, seen.path, seen.header)
            traceparent = seen.header(b"traceparent") if self._state.tracer is not None else None
            parent = None if traceparent is None else traceparent.decode("latin-1")
            call = scope[CALL] = Call(self._state, seen.request_id, client, parent)
            seen.client = client
            try:
                seen.check_body()
                await self._app(scope, seen.receive, seen.send)
            finally:
                call.close()
        except asyncio.CancelledError:  # the server ends while a body comes, or is looked at
            if seen.status:
                raise
            await seen.refuse(AbortedError("the server is shutting down"))
        except Exception as error:
            if status_of(error) == 500:
                logger.exception("request %s failed", seen.request_id)
            if seen.status:  # the head is gone: an end that is no end tells the client
                raise
            await seen.refuse(error)
        finally:
            seen.end()


class _Seen:
    """One HTTP request on its way through."""

    def __init__(
        self, state: ServerState, scope: Scope, receive: Receive, send: Send, *, is_head: bool
    ) -> None:
        self._state, self._scope, self._receive, self._send = state, scope, receive, send
        self._is_head = is_head
        self._headers: list[tuple[bytes, bytes]] = scope["headers"]
        self.path = path_of(scope)
        given = self.header(b"x-request-id")
        is_sane = given is not None and _SANE_ID.fullmatch(given) is not None
        drawn = uuid.uuid4().hex
        self.request_id = given.decode() if given is not None and is_sane else drawn
        self.client: Client | None = None
        self.status = 0
        self._has_body = False
        self._num_bytes, self._limit = 0, state.config.max_body_bytes
        self._begin_s = time.monotonic()

    def header(self, name: bytes) -> bytes | None:
        """The first of that name."""
        for key, value in self._headers:
            if key == name:
                return value
        return None

    def check_body(self) -> None:
        """Refuse a body that is told to be too large, or compressed, before any of it is read."""
        encoding = (self.header(b"content-encoding") or b"identity").decode("latin-1")
        if encoding.lower() != "identity":
            raise BodyEncodingError(f"content-encoding {encoding!r:.40}: send plain JSON")
        length = self.header(b"content-length")
        if length is not None and length.isdigit() and int(length) > self._limit:
            raise self._too_large(int(length))

    def _too_large(self, num_bytes: int) -> BodyTooLargeError:
        return BodyTooLargeError(
            f"the body has {num_bytes} bytes or more > {self._limit} (--max-body-bytes)"
        )

    async def receive(self) -> Message:
        """Counts what comes, for bodies whose length is not told; it must go on coming."""
        if self._has_body:  # whoever waits now waits for the client's leaving
            return await self._receive()
        timeout_s = self._state.config.slow_reader_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                message = await self._receive()
        except TimeoutError:
            raise SlowBodyError(
                f"no more of the body came for {timeout_s:g} s (--slow-reader-timeout-s)"
            ) from None
        if message["type"] == "http.request":
            self._has_body = not message.get("more_body", False)
            self._num_bytes += len(message.get("body", b""))
            if self._num_bytes > self._limit:
                raise self._too_large(self._num_bytes)
        return message

    async def send(self, message: Message) -> None:
        """Adds to the head; all else passes, unless the head alone was asked for: then the client
        has all of it, and the endpoint is told that it is gone."""
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers = [*message.get("headers", ()), (b"x-request-id", self.request_id.encode())]
            if self._state.life.is_leaving:
                headers.append((b"connection", b"close"))
            message["headers"] = headers
        elif self._is_head:
            return
        await self._send(message)
        if self._is_head:
            await self._send({"type": "http.response.body", "body": b""})

    async def refuse(self, error: BaseException) -> None:
        """Answer with an error."""
        body = msgspec.json.encode(shape_for(self.path, error))
        headers = {"content-type": "application/json", "content-length": str(len(body))}
        headers |= headers_of(error)
        raw = [(name.encode(), value.encode()) for name, value in headers.items()]
        start = {"type": "http.response.start", "status": status_of(error), "headers": raw}
        self._state.metrics.refused(code_of(error) or "invalid_value")
        await self.send(start)
        await self.send({"type": "http.response.body", "body": body})

    def end(self) -> None:
        """Tell those who measure and log."""
        route = self._scope.get("route")
        endpoint = getattr(route, "path", "unknown")
        self._state.metrics.answered(endpoint, self.status)
        if self._state.config.log_requests:
            seconds = time.monotonic() - self._begin_s
            log(
                logging.INFO, "request", request_id=self.request_id,
                method="HEAD" if self._is_head else self._scope["method"],
                path=self.path, status=self.status, seconds=round(seconds, 4),
                client=self.client.name if self.client is not None else "",
                **self._scope.get(LABELS, {}),
            )  # fmt: skip


def path_of(scope: Scope) -> str:
    """Without what a proxy put in front of it."""
    path, root = str(scope["path"]), str(scope.get("root_path", ""))
    return path[len(root) :] if root and path.startswith(root + "/") else path


def _check(
    state: ServerState, scope: Scope, path: str, header: Callable[[bytes], bytes | None]
) -> Client:
    """Who it is. Raises `RefusedError` for who may not, or not now."""
    if path in OPEN_PATHS or (scope["method"] == "OPTIONS" and state.config.allowed_origins):
        return Client()
    key = key_of(header)
    if _is_page(path):
        return Client()
    if path.startswith(_WATCHING):
        cookie = _cookie_of(header) if path.startswith(_PAGE) else None
        if not state.keys.is_cookie(cookie):
            check_admin(state, key, header)
        return Client(name="admin")
    if path == "/metrics" and (state.config.is_loopback or state.keys.is_admin(key)):
        return Client()
    client = state.keys.client(key)
    if client is None:
        what = "no API key was given" if key is None else "the API key is not known"
        raise AuthenticationError(f"{what}: send the header 'Authorization: Bearer KEY'")
    if path not in _DOCS and path != "/metrics":
        state.life.check()
    return client


def _is_page(path: str) -> bool:
    """The dashboard's page and its files, which hold no data, and the login."""
    if path == _PAGE:
        return True
    first = path.removeprefix(_PAGE + "/").partition("/")[0]
    return path.startswith(_PAGE + "/") and first not in DATA


def _cookie_of(header: Callable[[bytes], bytes | None]) -> str | None:
    """What the dashboard's login gave to a browser."""
    for part in (header(b"cookie") or b"").decode("latin-1").split(";"):
        name, _, value = part.strip().partition("=")
        if name == COOKIE:
            return value
    return None


def check_admin(
    state: ServerState, key: str | None, header: Callable[[bytes], bytes | None]
) -> None:
    """Raises `RefusedError` unless it is an administrator.

    Without an admin key that is who is on this machine, where nobody else can reach the server;
    but no web page that a browser on this machine shows.
    """
    if state.keys.has_admin_key:
        if not state.keys.is_admin(key):
            what = "no admin key was given" if key is None else "the admin key is wrong"
            raise AuthenticationError(f"{what}: send the header 'Authorization: Bearer KEY'")
        return
    if not state.config.is_loopback:
        raise ForbiddenError("admin endpoints need a key here: start with OCTAVO_ADMIN_KEY")
    host = (header(b"host") or b"").decode("latin-1")
    origin = (header(b"origin") or b"").decode("latin-1")
    is_own = state.config.uds is not None or _OWN_HOSTS.fullmatch(host) is not None
    if state.config.root_path or any(header(name) is not None for name in _OF_PROXIES):
        raise ForbiddenError(
            "behind a proxy, whose clients may be anyone, admin endpoints need a key: start with "
            "OCTAVO_ADMIN_KEY"
        )
    if not is_own or (origin and origin.partition("://")[2] != host):
        raise ForbiddenError(
            "without an admin key, admin endpoints answer this machine's programs only, called by "
            "a loopback address: start with OCTAVO_ADMIN_KEY"
        )
