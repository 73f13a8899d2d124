"""`octavo serve`: an OpenAI-compatible server."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from octavo.cli.flags import EngineFlags, ServeFlags, flags, parse
from octavo.cli.start import note, with_model
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
    config, serve_config = with_model(args.engine.config(), args.served), args.serve.config()
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
    path, body = _example(state)
    dashboard = f"  dashboard: {url}/dashboard\n" if state.config.dashboard and not socket else ""
    print(
        f"octavo serves {name} at {url}\n"
        f"  KV pool {pool}: {info.num_blocks} blocks of {info.block_size} tokens; context "
        f"{info.max_model_len} tokens\n{dashboard}"
        f"  try: curl {socket}{base}{path} {key}-H 'Content-Type: application/json' -d '{body}'",
        flush=True,
    )


def _example(state: ServerState) -> tuple[str, str]:
    """A path and a body that the model can answer."""
    tokenizer, asked = state.engine.tokenizer, {"model": state.model_names[0]}
    if tokenizer is None:
        return "/v1/completions", json.dumps(asked | {"prompt": [1, 2, 3]})
    if state.chat_template is None and tokenizer.chat_template is None:
        return "/v1/completions", json.dumps(asked | {"prompt": "Hello"})
    message = {"role": "user", "content": "Hello"}
    return "/v1/chat/completions", json.dumps(asked | {"messages": [message]})
