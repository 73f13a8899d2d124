"""`octavo models pull | list | rm`: the models on this machine's disk."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from octavo.cli.flags import flags, parse
from octavo.config import DEFAULT_MODEL, LoadFormat
from octavo.errors import ConfigError
from octavo.util import human_bytes


@flags
@dataclass(frozen=True, kw_only=True)
class Pull:
    """Fetch a model, so that it starts at once, or bring one that is here up to date."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]")] = DEFAULT_MODEL
    """A name on the Hugging Face hub; after a colon, which of its GGUF files (org/name:Q4_K_M)."""
    revision: str | None = None
    """Branch, tag or commit."""
    load_format: LoadFormat = "auto"
    """Which weights to fetch, where there are several kinds."""


@flags
@dataclass(frozen=True, kw_only=True)
class List:
    """List the models in octavo's cache and in the Hugging Face hub's."""

    json: bool = False
    """Write one JSON object a model."""


@flags
@dataclass(frozen=True, kw_only=True)
class Remove:
    """Delete fetched models from octavo's cache and from the Hugging Face hub's."""

    models: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="NAME ...")]
    """Names as `octavo models list` prints them."""


def main(prog: str, argv: Sequence[str]) -> int:
    """Run the command that `prog` ends with."""
    command = {"pull": _pull, "list": _list, "rm": _remove}[prog.split()[-1]]
    command(prog, argv)
    return 0


def _pull(prog: str, argv: Sequence[str]) -> None:
    args = parse(Pull, prog, argv)
    from octavo.engine import models

    with models.RichProgress() as progress:
        files = models.pull(args.model, args.revision, args.load_format, progress)
    print(f"{args.model} is at {files.path}", file=sys.stderr)


def _list(prog: str, argv: Sequence[str]) -> None:
    args = parse(List, prog, argv)
    from octavo.engine import models

    stored = models.list_models()
    if not stored and not args.json:
        print("no models yet: 'octavo models pull' fetches the default one", file=sys.stderr)
    width = max((len(model.name) for model in stored), default=0)
    for model in stored:
        formats = ", ".join(model.formats) or "nothing to load"
        if args.json:
            values = {
                "name": model.name, "where": model.where, "path": str(model.path),
                "num_bytes": model.num_bytes, "formats": model.formats,
            }  # fmt: skip
            print(json.dumps(values))
        else:
            size = human_bytes(model.num_bytes)
            print(f"{model.name:{width}}  {size:>10}  {model.where:6}  {formats:12}  {model.path}")


def _remove(prog: str, argv: Sequence[str]) -> None:
    args = parse(Remove, prog, argv)
    if not args.models:
        raise ConfigError("name the models to delete; 'octavo models list' shows them")
    from octavo.engine import models

    for name in args.models:
        for model in models.remove(name):
            print(f"deleted {model.path} ({human_bytes(model.num_bytes)})")
