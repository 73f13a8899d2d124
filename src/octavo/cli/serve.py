"""`octavo serve`: an OpenAI-compatible server."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from octavo.cli.flags import EngineFlags, ServeFlags, flags, parse
from octavo.cli.start import note
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.util import human_bytes

if TYPE_CHECKING:
    from octavo.server.state import ServerState


@flags
@dataclass(frozen=True, kw_only=True)
class Serve:
    """Serve a model to OpenAI's clients, and more, over HTTP.

    POST /v1/chat/completions and the like answer as OpenAI's do; /health and /ready are for
    whoever looks after the server. Ctrl-C or SIGTERM lets running requests finish; a second one
    stops at once.
    """

    served: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[MODEL]")] = None
    """Model to serve, as --model."""
    serve: ServeFlags
    engine: EngineFlags


def main(prog: str, argv: Sequence[str]) -> int:
    """Run the command until a signal ends it."""
    args = parse(Serve, prog, argv)
    config, serve_config = args.engine.config(), args.serve.config()
    if args.served is not None:
        if config.model != EngineConfig().model:
            raise ConfigError("the model is given twice: as an argument, or with --model")
        config = dataclasses.replace(config, model=args.served)
    from octavo.engine.models import RichProgress
    from octavo.server.run import Hooks, serve

    note(f"loading {config.model} ...")
    with RichProgress() as progress:
        return serve(config, serve_config, hooks=Hooks(on_ready=_banner, progress=progress))


def _banner(state: ServerState, url: str) -> None:
    """Where it is, what it serves, how to call it; on stdout, for scripts that wait for it."""
    info, name = state.engine.info, state.model_names[0]
    pool = human_bytes(info.num_blocks * info.bytes_per_block)
    socket, base = "", url
    if url.startswith("unix:"):
        socket, base = f"--unix-socket {url.removeprefix('unix:')} ", "http://localhost"
    key = "-H 'Authorization: Bearer KEY' " if state.keys.has_keys else ""
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'
    print(
        f"octavo serves {name} at {url}\n"
        f"  KV pool {pool}: {info.num_blocks} blocks of {info.block_size} tokens; context "
        f"{info.max_model_len} tokens\n"
        f"  try: curl {socket}{base}/v1/chat/completions {key}-H 'Content-Type: application/json' "
        f"-d '{body}'",
        flush=True,
    )
    if state.config.insecure and not state.config.is_loopback and not state.keys.has_keys:
        print("octavo: anyone who can reach this address can use it", file=sys.stderr)
