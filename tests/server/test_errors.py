"""Errors as status, headers and body."""

from __future__ import annotations

import pytest

from octavo.errors import (
    CapacityError,
    ConfigError,
    EngineDeadError,
    InvalidRequestError,
    NumericsError,
    RequestCapacityError,
    StepFailedError,
)
from octavo.server import errors
from octavo.server.errors import (
    anthropic_error_shape,
    code_of,
    error_shape,
    headers_of,
    shape_for,
    status_of,
)
from octavo.server.openai.answer import ModelNotServedError


def test_status_and_code() -> None:
    for error, status, code in (
        (InvalidRequestError("x", parameter="n"), 400, "invalid_value"),
        (RequestCapacityError("x"), 400, "capacity_exceeded"),
        (CapacityError("x"), 400, "capacity_exceeded"),
        (ConfigError("x"), 400, "invalid_value"),
        (EngineDeadError("x"), 503, "engine_dead"),
        (StepFailedError("x", request_ids=[]), 500, "step_failed"),
        (NumericsError("x"), 500, "internal_error"),
        (KeyError("secret"), 500, "internal_error"),
        (ModelNotServedError("x"), 404, "model_not_found"),
        (errors.RateLimitError("x"), 429, "rate_limit_exceeded"),
        (errors.SlowBodyError("x"), 408, "slow_body"),
        (errors.BodyEncodingError("x"), 415, "unsupported_encoding"),
    ):
        assert (status_of(error), code_of(error)) == (status, code), error
        assert error_shape(error)["error"]["code"] == code


def test_a_parameter_is_named() -> None:
    told = error_shape(InvalidRequestError("n must", parameter="n"))["error"]
    expected = ("n must", "invalid_request_error", "n")
    assert (told["message"], told["type"], told["param"]) == expected


def test_what_is_a_bug_tells_nothing() -> None:
    assert "secret" not in error_shape(KeyError("secret"))["error"]["message"]


def test_headers() -> None:
    assert headers_of(errors.RateLimitError("x", retry_after_s=1.2)) == {"retry-after": "2"}
    assert headers_of(errors.OverloadedError("x", retry_after_s=0.01)) == {"retry-after": "1"}
    assert headers_of(errors.AuthenticationError("x")) == {"www-authenticate": "Bearer"}
    assert headers_of(errors.RequestTimeoutError("x")) == {"x-should-retry": "false"}
    assert headers_of(errors.BodyTooLargeError("x")) == {"connection": "close"}
    assert "retry-after" in headers_of(EngineDeadError("x"))
    assert headers_of(InvalidRequestError("x")) == {}


def test_anthropics_shape_on_its_paths() -> None:
    error = errors.RateLimitError("slow down")
    assert shape_for("/v1/messages", error) == {
        "type": "error",
        "error": {"type": "rate_limit_error", "message": "slow down"},
    }
    assert "param" in shape_for("/v1/completions", error)["error"]


@pytest.mark.parametrize("kind", errors.RefusedError.__subclasses__())
def test_every_refusal_is_whole(kind: type[errors.RefusedError]) -> None:
    error = kind("why")
    assert 400 <= status_of(error) <= 503 and error.code and str(error) == "why"
    assert anthropic_error_shape(error)["error"]["type"] != "api_error" or error.status == 405
