"""Whether the server takes requests: starting, serving, draining, stopping."""

from __future__ import annotations

from enum import StrEnum

from octavo.engine.async_engine import AsyncEngine, EngineState
from octavo.server.errors import NotServingError


class Phase(StrEnum):
    """Of the server; its engine has a state of its own."""

    STARTING = "starting"
    SERVING = "serving"
    DRAINING = "draining"
    """Running requests finish, new ones are turned away; can be taken back."""
    STOPPING = "stopping"
    """The same, with the process's end to follow."""


_RETRY_S = {Phase.STARTING: 5.0, Phase.DRAINING: 10.0, Phase.STOPPING: 10.0}


class Life:
    """Answers for `/health` and `/ready`."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self.phase = Phase.STARTING

    @property
    def why_not_alive(self) -> str | None:
        """None while the engine loads or serves; the reason while its process is gone."""
        engine = self._engine
        if engine.state in (EngineState.RESTARTING, EngineState.DEAD):
            return f"the engine is {engine.state}: {engine.why_not_ready}"
        return None

    @property
    def why_not_ready(self) -> str | None:
        """None while requests are taken."""
        if self.phase is Phase.STARTING:
            return f"the server is starting: {self._engine.why_not_ready or 'almost there'}"
        if self.phase is not Phase.SERVING:
            return f"the server is {self.phase}: it takes no new requests"
        if self._engine.state is not EngineState.READY:
            return f"the engine is {self._engine.state}: {self._engine.why_not_ready}"
        return None

    def check(self) -> None:
        """Raises `NotServingError` unless requests are taken."""
        if self.phase is Phase.SERVING and self._engine.state is EngineState.READY:
            return
        why = self.why_not_ready
        assert why is not None
        raise NotServingError(why, retry_after_s=_RETRY_S.get(self.phase, 5.0))

    @property
    def is_leaving(self) -> bool:
        """Whether connections are better closed after an answer."""
        return self.phase in (Phase.DRAINING, Phase.STOPPING)

    def serve(self) -> None:
        """The engine is ready, or draining was taken back; not once the end has begun."""
        if self.phase is not Phase.STOPPING:
            self.phase = Phase.SERVING

    def drain(self) -> None:
        """Take no new requests."""
        if self.phase is Phase.SERVING:
            self.phase = Phase.DRAINING

    def stop(self) -> None:
        """As `drain`, for good."""
        self.phase = Phase.STOPPING
