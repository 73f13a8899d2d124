"""Limits: of a client, and of all together."""

from __future__ import annotations

import pytest

from octavo.server.config import ServeConfig
from octavo.server.errors import OverloadedError, RateLimitError
from octavo.server.keys import Client
from octavo.server.limits import Limiter


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_requests_a_minute_fill_up_again() -> None:
    clock = Clock()
    limiter, client = Limiter(ServeConfig(), clock), Client(name="a", requests_per_minute=2)
    for _ in range(2):
        limiter.admit(client, 1, 10, 8)
    with pytest.raises(RateLimitError, match="1 asked for, 0 of 2 left") as refused:
        limiter.admit(client, 1, 10, 8)
    assert refused.value.retry_after_s == pytest.approx(30)
    limiter.admit(Client(name="b", requests_per_minute=2), 1, 10, 8)
    clock.now = 30.0
    limiter.admit(client, 1, 10, 8)
    assert limiter.num_under_way == 4


def test_unused_tokens_are_given_back() -> None:
    limiter, client = Limiter(ServeConfig(), Clock()), Client(name="a", tokens_per_minute=100)
    limiter.admit(client, 1, 100, 8)
    with pytest.raises(RateLimitError, match="tokens_per_minute"):
        limiter.admit(client, 1, 60, 8)
    limiter.ended(client, 70)
    limiter.admit(client, 1, 60, 8)
    with pytest.raises(RateLimitError):
        limiter.admit(client, 1, 60, 8)


def test_tokens_beyond_those_asked_for_are_taken() -> None:
    clock, client = Clock(), Client(name="a", tokens_per_minute=60)
    limiter = Limiter(ServeConfig(), clock)
    limiter.admit(client, 1, 10, 8)
    limiter.ended(client, -90)
    with pytest.raises(RateLimitError) as refused:
        limiter.admit(client, 1, 10, 8)
    assert refused.value.retry_after_s == pytest.approx(50)
    clock.now = 50.0
    limiter.admit(client, 1, 10, 8)


def test_at_a_time() -> None:
    limiter, client = Limiter(ServeConfig(), Clock()), Client(name="a", max_concurrent=2)
    limiter.admit(client, 2, 0, 8)
    with pytest.raises(RateLimitError, match=r"2 under way \+ 1 asked for > 2"):
        limiter.admit(client, 1, 0, 8)
    limiter.ended(client, 0)
    limiter.admit(client, 1, 0, 8)


def test_of_all_together() -> None:
    limiter = Limiter(ServeConfig(max_concurrent_requests=3, max_queued_requests=1), Clock())
    with pytest.raises(OverloadedError, match=r"0 requests under way \+ 4 asked for > 3"):
        limiter.admit(Client(), 4, 0, 8)
    limiter.admit(Client(), 2, 0, 1)
    with pytest.raises(OverloadedError, match="max-queued-requests"):
        limiter.admit(Client(), 1, 0, 1)
    limiter.admit(Client(), 1, 0, 2)
