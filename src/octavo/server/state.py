"""What all endpoints of a server share: `request.app.state.octavo`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from fastapi import Request

from octavo.engine.async_engine import AsyncEngine
from octavo.engine.remote.renderer import Renderer
from octavo.server.config import ServeConfig
from octavo.server.keys import KeyRing
from octavo.server.life import Life
from octavo.server.limits import Limiter
from octavo.server.metrics import Metrics

if TYPE_CHECKING:
    from octavo.server.calls import Call
    from octavo.server.tracing import Tracer


class ServerState:
    """One a server. model_names: the first is what answers tell."""

    def __init__(
        self,
        config: ServeConfig,
        engine: AsyncEngine,
        keys: KeyRing,
        *,
        model_names: Sequence[str],
        chat_template: str | None = None,
        metrics: Metrics,
        tracer: Tracer | None = None,
    ) -> None:
        self.config, self.engine, self.keys = config, engine, keys
        self.model_names = tuple(model_names)
        self.chat_template = chat_template
        """The text of `--chat-template`; None: the model's own."""
        self.metrics = metrics
        self.tracer = tracer
        """Makes a span of each request; None: nobody wants them."""
        self.renderer: Renderer | None = None
        """Renders templates that requests bring; None: they may bring none."""
        if config.trust_request_chat_template:
            self.renderer = Renderer(config.max_body_bytes)
        self.limits = Limiter(config)
        self.life = Life(engine)
        self.calls: dict[str, Call] = {}
        """Under way: those that have submitted requests which have not ended, by request id."""
        self.started_s = time.time()
        """For people; nothing is measured by it."""


def state_of(request: Request) -> ServerState:
    """The state of the server that a request has come to."""
    return cast("ServerState", request.app.state.octavo)
