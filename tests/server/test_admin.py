"""Endpoints for the administrator."""

from __future__ import annotations

import threading
from typing import Any

import pytest

KEY = "the-admins-key"


def test_only_programs_of_this_machine(server: Any) -> None:
    assert "text" in server.call("/admin/memory").json
    assert server.call("/admin/memory", host="evil.example").status == 403
    assert server.call("/admin/memory", origin="http://evil.example").status == 403


def test_the_key_of_the_flag(start_server: Any) -> None:
    server = start_server("--admin-key", KEY)
    assert server.call("/admin/memory").status == 401
    assert server.call("/admin/memory", authorization="Bearer other-admin").status == 401
    assert server.call("/admin/memory", authorization=f"Bearer {KEY}").status == 200
    assert server.complete().status == 200, "clients need no key"


def test_a_request_is_aborted(server: Any) -> None:
    answers: list[Any] = []
    body = {"prompt": "hi", "max_tokens": 240, "ignore_eos": True, "n": 8}
    thread = threading.Thread(
        target=lambda: answers.append(server.call("/v1/completions", body, x_request_id="long"))
    )
    thread.start()
    under_way = {"requests": [{"id": "long", "client": ""}]}
    server.until(lambda: server.call("/admin/requests").json == under_way)
    assert server.call("/admin/abort", {"request_id": "cmpl-long"}).json == {"num_aborted": 1}
    thread.join(30)
    assert answers[0].status == 503 and answers[0].error["code"] == "aborted"
    assert server.call("/admin/abort", {"request_id": "long"}).status == 404
    assert server.call("/admin/requests").json == {"requests": []}


def test_the_pool_is_resized(server: Any) -> None:
    before = server.call("/admin/memory").json
    half = server.call("/admin/resize_kv_cache", {"num_bytes": 2 * 2**20})
    assert half.status == 200, half.body
    restored = server.call("/admin/resize_kv_cache", {"num_bytes": 4 * 2**20}).json
    assert 0 < half.json["num_bytes"] < restored["num_bytes"]
    block = before["plan"]["kv_bytes"] // before["plan"]["num_blocks"]
    assert half.json == {"num_bytes": 2 * 2**20 // block * block}, "whole blocks of what was asked"
    assert (
        server.call("/admin/memory").json["text"].splitlines()[0]
        == (before["text"].splitlines()[0])
    )
    assert server.call("/admin/resize_kv_cache", {"num_bytes": 1}).status == 400


def test_prefixes_are_forgotten(server: Any) -> None:
    prompt = "a prompt of more than one block of sixteen tokens"

    def num_cached() -> int:
        usage = server.complete(prompt=prompt).json["usage"]
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    num_cached()
    assert num_cached() > 0
    assert server.call("/admin/reset_prefix_cache", b"").json["num_blocks"] > 0
    assert num_cached() == 0


def test_events_and_log_level(server: Any) -> None:
    server.call("/admin/resize_kv_cache", {"num_bytes": 4 * 2**20 - 4096})
    server.call("/admin/resize_kv_cache", {"num_bytes": 4 * 2**20})
    assert server.call("/admin/events").json["events"][-1]["kind"] == "resized"
    assert server.call("/admin/events?request_id=nobody").json == {"events": []}
    assert server.call("/admin/log_level", {"level": "debug"}).json == {"level": "debug"}
    assert server.call("/admin/log_level", {"level": "info"}).status == 200
    assert server.call("/admin/log_level", {"level": "loud"}).status == 400


@pytest.mark.parametrize("body", [{}, {"request_id": 3}, {"request_id": "a", "more": 1}])
def test_bodies_are_strict(server: Any, body: Any) -> None:
    assert server.call("/admin/abort", body).status == 400


def test_drain_and_undrain(server: Any) -> None:
    assert server.call("/admin/drain", b"").json["phase"] == "draining"
    answer = server.complete()
    assert answer.status == 503 and answer.headers["retry-after"]
    assert answer.headers["connection"] == "close"
    assert server.call("/ready").status == 503 and server.call("/health").status == 200
    assert server.call("/admin/undrain", b"").json["phase"] == "serving"
    assert server.complete().status == 200
