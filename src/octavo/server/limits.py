"""How much is taken on: of each client, and of all together. Monotonic clocks only."""

from __future__ import annotations

import time
from collections.abc import Callable

from octavo.server.config import ServeConfig
from octavo.server.errors import OverloadedError, RateLimitError
from octavo.server.keys import Client

_RETRY_S = 1.0
"""When to come again where it cannot be foreseen."""


class TokenBucket:
    """Fills by `per_minute`, holds at most a minute's worth, and starts full."""

    def __init__(self, per_minute: float, clock: Callable[[], float]) -> None:
        self.size = per_minute
        self._clock = clock
        self._level, self._at_s = per_minute, clock()

    @property
    def level(self) -> float:
        """What is in it now."""
        now = self._clock()
        self._level = min(self.size, self._level + (now - self._at_s) * self.size / 60)
        self._at_s = now
        return self._level

    def wait_s(self, amount: float) -> float:
        """Until so much is in it; 0 if it is now. More than fits needs it full."""
        missing = min(amount, self.size) - self.level
        return max(0.0, missing * 60 / self.size)

    def take(self, amount: float) -> None:
        """Take out, below nothing if need be: then it takes the longer to fill."""
        self._level = self.level - amount

    def give_back(self, amount: float) -> None:
        """What was taken too much; below 0: too little."""
        self._level = min(self.size, self.level + amount)


class _Account:
    """What one client has under way, and may still ask for."""

    def __init__(self, client: Client, clock: Callable[[], float]) -> None:
        self.num_under_way = 0
        rates = client.requests_per_minute, client.tokens_per_minute
        self.requests, self.tokens = (r and TokenBucket(r, clock) for r in rates)


class Limiter:
    """Admits requests of clients, all prompts of a call or none."""

    def __init__(self, config: ServeConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._clock = config, clock
        self._accounts: dict[str, _Account] = {}
        self.num_under_way = 0

    def admit(self, client: Client, num_requests: int, num_tokens: int, max_num_seqs: int) -> None:
        """Count them as under way. Raises `RateLimitError` where the client has used up its
        share, `OverloadedError` where there is too much of all, with the arithmetic.

        max_num_seqs: what the engine runs at a time; more waits.
        """
        account = self._account(client)
        self._check_client(client, account, num_requests, num_tokens)
        self._check_all(num_requests, max_num_seqs)
        for bucket, amount in ((account.requests, num_requests), (account.tokens, num_tokens)):
            if bucket:
                bucket.take(amount)
        account.num_under_way += num_requests
        self.num_under_way += num_requests

    def ended(self, client: Client, num_unused_tokens: int) -> None:
        """One of them has; so many of its tokens were not used, or, below 0, were used beyond."""
        account = self._account(client)
        account.num_under_way -= 1
        self.num_under_way -= 1
        assert account.num_under_way >= 0 and self.num_under_way >= 0
        if account.tokens:
            account.tokens.give_back(num_unused_tokens)

    def _account(self, client: Client) -> _Account:
        account = self._accounts.get(client.name)
        if account is None:
            account = self._accounts[client.name] = _Account(client, self._clock)
        return account

    def _check_client(
        self, client: Client, account: _Account, num_requests: int, num_tokens: int
    ) -> None:
        most, running = client.max_concurrent, account.num_under_way
        if most is not None and running + num_requests > most:
            raise RateLimitError(
                f"too many requests at a time with this key: {running} under way + {num_requests} "
                f"asked for > {most} (max_concurrent)",
                retry_after_s=_RETRY_S,
            )
        for bucket, amount, what, field in (
            (account.requests, num_requests, "requests", "requests_per_minute"),
            (account.tokens, num_tokens, "tokens", "tokens_per_minute"),
        ):
            if not bucket:
                continue
            wait_s = bucket.wait_s(amount)
            if wait_s > 0:
                raise RateLimitError(
                    f"too many {what} a minute with this key: {amount} asked for, "
                    f"{max(0, int(bucket.level))} of {bucket.size:g} left ({field}); enough in "
                    f"{wait_s:.1f} s",
                    retry_after_s=wait_s,
                )

    def _check_all(self, num_requests: int, max_num_seqs: int) -> None:
        config, after = self._config, self.num_under_way + num_requests
        if after > config.max_concurrent_requests:
            raise OverloadedError(
                f"the server is full: {self.num_under_way} requests under way + {num_requests} "
                f"asked for > {config.max_concurrent_requests} (--max-concurrent-requests)",
                retry_after_s=_RETRY_S,
            )
        most = config.max_queued_requests
        if most is not None and after - max_num_seqs > most:
            raise OverloadedError(
                f"the queue is full: {self.num_under_way} under way + {num_requests} asked "
                f"for - {max_num_seqs} that run at a time (--max-num-seqs) > {most} "
                "(--max-queued-requests)",
                retry_after_s=_RETRY_S,
            )
