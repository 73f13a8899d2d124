"""`octavo top`: a server's KV memory, live in the terminal."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from octavo.cli.flags import flags, parse
from octavo.errors import ConfigError


@flags
@dataclass(frozen=True, kw_only=True)
class Top:
    """Watch the KV memory of a running server: the pool as a picture, where its memory is, who
    runs, who waits and why, and how fast it is. Keys: space pauses, s goes one frame further, q
    ends.
    """

    url: str = "http://127.0.0.1:8000"
    """Where the server is; of 'octavo demo memory' the address that it prints."""
    api_key: str | None = None
    """Its admin key; by default OCTAVO_ADMIN_KEY of the environment, which nobody sees in a list of
    processes."""
    source: int = 0
    """Which pool, where there are several."""
    hz: float = 4.0
    """Frames a second."""


def main(prog: str, argv: Sequence[str]) -> int:
    """Run the command."""
    args = parse(Top, prog, argv)
    parts = urlsplit(args.url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--url must be like http://127.0.0.1:8000, got {args.url!r}")
    if args.source < 0:
        raise ConfigError(f"--source must be 0 or more, got {args.source}")
    key = args.api_key or os.environ.get("OCTAVO_ADMIN_KEY") or None

    from octavo.dashboard.client import FrameClient
    from octavo.dashboard.terminal import TopApp

    client = FrameClient(args.url, key, source=args.source, hz=args.hz)
    asyncio.run(client.check())  # what is wrong is told before the screen is taken
    app = TopApp(client)
    app.run()
    if app.failure is not None:
        raise ConfigError(app.failure)
    return 0
