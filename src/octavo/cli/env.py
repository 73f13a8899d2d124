"""`octavo env`: what to paste into a bug report."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from octavo.cli.flags import flags, parse


@flags
@dataclass(frozen=True, kw_only=True)
class Env:
    """Print versions, CPU, memory, compiler and settings, to paste into a bug report."""

    json: bool = False
    """Write one JSON object."""


def main(prog: str, argv: Sequence[str]) -> int:
    """Run the command."""
    args = parse(Env, prog, argv)
    from octavo.engine.environment import environment

    facts = environment()
    if args.json:
        print(json.dumps(facts))
        return 0
    for name, fact in facts.items():
        print(f"{name:12} {fact}")
    return 0
