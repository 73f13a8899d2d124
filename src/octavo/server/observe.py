"""What the server tells whoever measures it: `octavo.server.metrics.Metrics`, or nobody."""

from __future__ import annotations

from typing import Protocol

from octavo.outputs import RequestOutput


class Observer(Protocol):
    """Called in the event loop; must not wait."""

    def news(self, num_tokens: int, seconds: float) -> None:
        """A streamed request got tokens, so long after those before."""

    def ended(self, output: RequestOutput, n: int) -> None:
        """A request has got its last output. n: completions asked for."""

    def completion_ended(self, reason: str) -> None:
        """One of a request's completions has ended."""

    def aborted(self, reason: str) -> None:
        """A request ended without an answer."""

    def refused(self, code: str) -> None:
        """An HTTP request was refused with this error code."""

    def answered(self, endpoint: str, status: int) -> None:
        """An HTTP request was answered. endpoint: the route, never the path as it was asked."""

    def in_flight(self, num: int) -> None:
        """So many calls are under way."""

    def engine_up(self, is_up: bool) -> None:
        """Whether the engine takes requests."""

    def engine_restarted(self) -> None:
        """The engine's process was started again."""


class NullObserver:
    """Nobody measures."""

    def news(self, num_tokens: int, seconds: float) -> None:
        """Nothing."""

    def ended(self, output: RequestOutput, n: int) -> None:
        """Nothing."""

    def completion_ended(self, reason: str) -> None:
        """Nothing."""

    def aborted(self, reason: str) -> None:
        """Nothing."""

    def refused(self, code: str) -> None:
        """Nothing."""

    def answered(self, endpoint: str, status: int) -> None:
        """Nothing."""

    def in_flight(self, num: int) -> None:
        """Nothing."""

    def engine_up(self, is_up: bool) -> None:
        """Nothing."""

    def engine_restarted(self) -> None:
        """Nothing."""
