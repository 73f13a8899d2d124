"""schemathesis on /openapi.json: what it thinks of is answered as described, and never by a 5xx."""

from __future__ import annotations

from typing import Any

import pytest

schemathesis = pytest.importorskip("schemathesis")

_EXAMPLES = 12
_GENERATING = {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"}
_LEFT_OUT = {"/dashboard/frames", "/admin/drain", "/admin/resize_kv_cache", "/admin/log_level"}
"""Streams without an end, and what would take the server from the other tests."""
_FEW: dict[str, Any] = {"max_tokens": 2, "max_completion_tokens": 2, "max_output_tokens": 2}
"""Longer answers are tested elsewhere."""
_NEEDED = ("prompt", "messages", "input", "max_tokens")
_MOST = 1
"""Other fields at one time: several together contradict each other nearly always."""
_DECIDED = ("model", "priority", "chat_template", "logit_bias")
"""No text of the schema can be right by chance: a name, a policy, ids of the vocabulary."""


def likely(body: dict[str, Any]) -> dict[str, Any]:
    """A body that has a chance to be answered."""
    body = {name: whole(value) for name, value in body.items() if name not in _DECIDED}
    others = [name for name in body if name not in _NEEDED]
    for name in others[_MOST:]:
        del body[name]
    body |= {name: value for name, value in _FEW.items() if name in body}
    return body


def whole(value: Any) -> Any:
    """5.0 as 5: integers in JSON's schema, not in strict parsers."""
    if isinstance(value, list):
        return [whole(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def asker(operation: Any, seen: dict[int, int]) -> Any:
    """Sends examples of an operation, and counts the statuses."""
    import hypothesis
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi import checks

    told = [
        not_a_server_error,
        checks.status_code_conformance,
        checks.content_type_conformance,
        checks.response_schema_conformance,
    ]

    @hypothesis.given(case=operation.as_strategy())
    @hypothesis.settings(
        max_examples=_EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    def ask(case: Any) -> None:
        if operation.path in _GENERATING and isinstance(case.body, dict):
            case.body = likely(case.body)
        response = case.call(timeout=60)
        seen[response.status_code] = seen.get(response.status_code, 0) + 1
        case.validate_response(response, checks=told)

    return ask


def test_nothing_is_answered_with_a_5xx(server: Any) -> None:
    schema = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    statuses: dict[str, dict[int, int]] = {}
    for result in schema.get_all_operations():
        operation = result.ok()
        if operation.path not in _LEFT_OUT:
            asker(operation, statuses.setdefault(operation.path, {}))()
    assert set(statuses) >= _GENERATING
    assert all(status < 500 for told in statuses.values() for status in told), statuses
    for path in _GENERATING - {"/v1/chat/completions"}:  # whose roles are the template's to know
        assert 200 in statuses[path], (path, statuses[path])
    assert server.call("/health").status == 200
