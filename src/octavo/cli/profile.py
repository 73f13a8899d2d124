"""`octavo profile`: a Chrome trace of some steps, and a table of where their time went."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.cli.flags import EngineFlags, flags, parse
from octavo.cli.start import start_engine
from octavo.errors import ConfigError, InvalidRequestError
from octavo.request import SamplingParams


@flags
@dataclass(frozen=True, kw_only=True)
class Profile:
    """Serve requests of random token ids, and watch some of the steps: each part of the engine is
    a named range of a trace that chrome://tracing and ui.perfetto.dev show, beside the kernels of
    the GPU. A table tells where the time went, and how much of it the GPU was busy.

    Watching itself takes time, of the host above all: shares tell more than milliseconds.
    """

    out: Path = Path("octavo-trace.json.gz")
    """The file to write; gzipped if it ends in .gz."""
    num_steps: int = 30
    """Steps to watch."""
    num_skipped: int = 20
    """Steps before those."""
    num_prompts: int = 64
    """Requests, all at once."""
    input_len: int = 160
    """Mean prompt length."""
    output_len: int = 128
    """Mean output length."""
    random_range_ratio: float = 0.5
    """Lengths are up to this share shorter or longer than the mean."""
    dataset: Path | None = None
    """Lengths or prompts from a .csv or .jsonl file, as of 'octavo bench throughput'."""
    temperature: float = 0.0
    """Logits are divided by it; 0 is greedy."""
    json: bool = False
    """End with one line of JSON."""
    engine: EngineFlags


def main(prog: str, argv: Sequence[str]) -> int:
    """Run the command."""
    args = parse(Profile, prog, argv)
    config = args.engine.config()
    params = SamplingParams(
        temperature=args.temperature, detokenize=not args.engine.skip_tokenizer_init
    )
    if args.num_prompts < 1:
        raise InvalidRequestError(
            f"--num-prompts must be at least 1, got {args.num_prompts}", parameter="num_prompts"
        )
    folder = args.out.resolve().parent
    if not folder.is_dir() or (args.out.exists() and not args.out.is_file()):
        # a device would be replaced by a file: the trace is renamed to its name at the end
        why = "no regular file" if folder.is_dir() else "no such folder"
        raise ConfigError(f"cannot write {args.out}: {why}; name another file with --out")
    from octavo.bench.profile import run_profile
    from octavo.bench.workload import random_workload, read_workload

    with start_engine(config) as llm:
        assert llm.config.max_model_len is not None, "resolved with the model"
        limits: dict[str, Any] = {
            "vocab_size": llm.arch.vocab_size,
            "max_model_len": llm.config.max_model_len,
            "seed": llm.config.seed,
        }
        if args.dataset is None:
            workload = random_workload(
                args.num_prompts, args.input_len, args.output_len, args.random_range_ratio, **limits
            )
        else:
            workload = read_workload(args.dataset, args.num_prompts, **limits)
        result = run_profile(
            llm, workload, params, args.out, num_steps=args.num_steps, num_skipped=args.num_skipped
        )
    print(result)
    if args.json:
        print(json.dumps(result.as_dict()))
    return 0
