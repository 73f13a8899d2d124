"""What goes wrong while a request is answered, as status, headers and a JSON body."""

from __future__ import annotations

import math
from typing import Any

from octavo.errors import (
    CapacityError,
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    OctavoError,
    StepFailedError,
    TokenizerError,
)

_RETRY_DEAD_S = 5.0
"""When to come again while the engine is started anew."""


class RefusedError(OctavoError):
    """A request that the server does not answer, with how to say so in HTTP."""

    status = 400
    kind = "invalid_request_error"
    """OpenAI's `type`."""
    code: str | None = None
    is_closing = False
    """Whether the connection is closed after the answer."""

    def __init__(
        self, message: str, *, retry_after_s: float | None = None, parameter: str | None = None
    ) -> None:
        super().__init__(message)
        self.retry_after_s, self.parameter = retry_after_s, parameter


class AuthenticationError(RefusedError):
    """No key, or one that is not known."""

    status, kind, code = 401, "authentication_error", "invalid_api_key"


class ForbiddenError(RefusedError):
    """Known or not: this is not for that client."""

    status, kind, code = 403, "permission_error", "forbidden"


class NotFoundError(RefusedError):
    """There is nothing of that name."""

    status, kind, code = 404, "invalid_request_error", "not_found"


class BodyTooLargeError(RefusedError):
    """The rest of the body is not read."""

    status, code, is_closing = 413, "body_too_large", True


class BodyEncodingError(RefusedError):
    """The body is compressed; it is not read."""

    status, code, is_closing = 415, "unsupported_encoding", True


class SlowBodyError(RefusedError):
    """The client has stopped sending in the midst of its request."""

    status, code, is_closing = 408, "slow_body", True


class ClientGoneError(RefusedError):
    """The client left before its answer was begun. nginx's status for it, which logs show."""

    status, code = 499, "client_gone"


class RateLimitError(RefusedError):
    """One client asks for more than its share."""

    status, kind, code = 429, "rate_limit_error", "rate_limit_exceeded"


class OverloadedError(RefusedError):
    """All clients together ask for more than is served."""

    status, kind, code = 503, "overloaded_error", "overloaded"


class NotServingError(RefusedError):
    """The server is starting, draining, or its engine is being started again."""

    status, kind, code = 503, "service_unavailable_error", "not_ready"


class RequestTimeoutError(RefusedError):
    """The answer took longer than `--request-timeout-s`."""

    status, kind, code = 503, "timeout_error", "request_timeout"


class AbortedError(RefusedError):
    """Ended before its time by an administrator or the server's end."""

    status, kind, code = 503, "aborted_error", "aborted"


_NOT_AGAIN = (RequestTimeoutError, AbortedError, SlowBodyError)
"""The same again would likely end the same: clients are told not to retry by themselves."""


def status_of(error: BaseException) -> int:
    """The HTTP status of an error."""
    if isinstance(error, RefusedError):
        return error.status
    if isinstance(error, EngineDeadError):
        return 503
    if isinstance(error, InvalidRequestError | CapacityError | ConfigError | TokenizerError):
        return 400
    return 500


def code_of(error: BaseException) -> str | None:
    """A word for programs."""
    if isinstance(error, RefusedError):
        return error.code
    if isinstance(error, EngineDeadError):
        return "engine_dead"
    if isinstance(error, CapacityError):
        return "capacity_exceeded"
    if isinstance(error, StepFailedError):
        return "step_failed"
    return "invalid_value" if status_of(error) == 400 else "internal_error"


def headers_of(error: BaseException) -> dict[str, str]:
    """What the answer says besides its body."""
    headers: dict[str, str] = {}
    retry_s = _RETRY_DEAD_S if isinstance(error, EngineDeadError) else None
    if isinstance(error, RefusedError):
        retry_s = error.retry_after_s
        if error.is_closing:
            headers["connection"] = "close"
    if retry_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(retry_s)))
    if isinstance(error, AuthenticationError):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, _NOT_AGAIN):
        headers["x-should-retry"] = "false"  # the openai and anthropic clients look at it
    return headers


_MAX_TOLD = 2000
"""Characters; a field's name may be as long as a body."""


def _told(text: str) -> str:
    """As JSON can hold it: what clients send may have half a surrogate pair."""
    return text[:_MAX_TOLD].encode("utf-8", "backslashreplace").decode()


def error_shape(error: BaseException) -> dict[str, Any]:
    """OpenAI's error object."""
    parameter = getattr(error, "parameter", None)
    return {
        "error": {
            "message": _message(error),
            "type": _kind(error),
            "param": None if parameter is None else _told(str(parameter))[:200],
            "code": code_of(error),
        }
    }


_ANTHROPIC = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error",
    404: "not_found_error", 408: "invalid_request_error", 413: "request_too_large",
    415: "invalid_request_error", 499: "invalid_request_error",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


def anthropic_error_shape(error: BaseException) -> dict[str, Any]:
    """Anthropic's error object."""
    kind = _ANTHROPIC.get(status_of(error), "api_error")
    return {"type": "error", "error": {"type": kind, "message": _message(error)}}


def shape_for(path: str, error: BaseException) -> dict[str, Any]:
    """The error object that clients of this path know."""
    return anthropic_error_shape(error) if is_anthropic(path) else error_shape(error)


def is_anthropic(path: str) -> bool:
    """Whether a path is one of Anthropic's."""
    return path.startswith("/v1/messages")


def _message(error: BaseException) -> str:
    if isinstance(error, OctavoError):
        return _told(str(error))
    return "internal error: the server's log has it under this request's X-Request-Id"


def _kind(error: BaseException) -> str:
    if isinstance(error, RefusedError):
        return error.kind
    status = status_of(error)
    if status == 400:
        return "invalid_request_error"
    return "service_unavailable_error" if status == 503 else "server_error"
