"""`octavo models inspect | verify`: what a model is, and whether octavo computes it right."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from octavo.cli.flags import flags, parse
from octavo.config import DEFAULT_MODEL
from octavo.errors import ConfigError
from octavo.util import human_bytes

if TYPE_CHECKING:
    from octavo.engine.inspect import ModelReport

_REST_BYTES = 3 * 2**30
"""What an engine takes besides weights and KV, about: activations, graphs, the runtime."""

Model = Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[PATH|NAME]")]


@flags
@dataclass(frozen=True, kw_only=True)
class Inspect:
    """Show a model's architecture, parameters, formats and template, what a token's KV takes, and
    on which GPUs it fits. Weights are not read; of a model on the hub only small files are fetched.
    """

    model: Model = DEFAULT_MODEL
    """A folder, a .gguf file, or a name on the Hugging Face hub."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    gpu: tuple[str, ...] = ()
    """GPUs to tell about (h200, a100-80gb ...); by default all that octavo knows."""
    gpu_memory_utilization: float = 0.92
    """Share of a GPU's memory that the engine takes."""
    json: bool = False
    """Write one JSON object."""


@flags
@dataclass(frozen=True, kw_only=True)
class Verify:
    """Load a model here and in transformers, and compare logits on a few prompts. If they differ,
    the error of every layer is shown. Needs the package transformers, and memory for both in
    float32. The exit status is 1 where they differ.
    """

    model: Model = DEFAULT_MODEL
    """A folder, a .gguf file, or a name on the Hugging Face hub."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    prompt: tuple[str, ...] = ()
    """Texts to compare on; by default a few of octavo's own."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What octavo computes in; transformers computes in float32."""
    tolerance: float | None = None
    """Largest difference of a logit; by default 0.002 in float32, 1 in bfloat16, and as many
    thousandths (tenths) of the largest logit where that is more."""
    json: bool = False
    """Write one JSON object."""


def main(prog: str, argv: Sequence[str]) -> int:
    """Run the command that `prog` ends with."""
    return {"inspect": _inspect, "verify": _verify}[prog.split()[-1]](prog, argv)


def _inspect(prog: str, argv: Sequence[str]) -> int:
    args = parse(Inspect, prog, argv)
    from octavo.engine.inspect import inspect_model
    from octavo.engine.models import RichProgress
    from octavo.lab.gpus import find_gpu, gpu_names

    if not 0 < args.gpu_memory_utilization <= 1:
        raise ConfigError(
            f"--gpu-memory-utilization must be above 0 and at most 1, got "
            f"{args.gpu_memory_utilization:g}"
        )
    gpus = [find_gpu(name) for name in args.gpu or gpu_names()]
    with RichProgress() as progress:
        report = inspect_model(args.model, args.revision, progress)
    fits = [
        fit(report, gpu.name, int(gpu.memory_bytes * args.gpu_memory_utilization)) for gpu in gpus
    ]
    if args.json:
        print(json.dumps(report.as_dict() | {"fits": fits}))
        return 0
    print(report)
    print(
        f"\nroom for KV in {args.gpu_memory_utilization:.0%} of one GPU, less the weights and about"
    )
    print(f"{human_bytes(_REST_BYTES)} of activations, graphs and runtime:\n")
    print(f"  {'GPU':<14}{'for KV':>12}{'tokens':>14}{'sequences of ' + _context(report):>30}")
    for row in fits:
        if row["kv_bytes"] is None:
            print(f"  {row['gpu']:<14}{'does not fit':>12}")
        else:
            size = human_bytes(int(row["kv_bytes"]))
            print(f"  {row['gpu']:<14}{size:>12}{row['tokens']:>14,}{row['sequences']:>30,.1f}")
    return 0


def fit(report: ModelReport, gpu: str, share_bytes: int) -> dict[str, str | float | None]:
    """What one GPU has room for. tokens: where each counts in all layers; sequences: of the longest
    context, which keep no more than a window in layers that have one."""
    left = share_bytes - report.weight_bytes - _REST_BYTES
    if left <= 0:
        return {"gpu": gpu, "kv_bytes": None, "tokens": None, "sequences": None}
    longest = report.kept_bytes(report.arch.max_position_embeddings)
    return {
        "gpu": gpu,
        "kv_bytes": left,
        "tokens": left // report.kv_bytes_per_token,
        "sequences": left / longest,
    }


def _context(report: ModelReport) -> str:
    return f"{report.arch.max_position_embeddings:,}"


def _verify(prog: str, argv: Sequence[str]) -> int:
    args = parse(Verify, prog, argv)
    from octavo.engine.models import RichProgress
    from octavo.engine.verify import verify_model

    with RichProgress() as progress:
        found = verify_model(
            args.model,
            args.revision,
            prompts=args.prompt,
            dtype=args.dtype,
            tolerance=args.tolerance,
            progress=progress,
        )
    print(json.dumps(found.as_dict()) if args.json else found, flush=True)
    if not found.equal:
        print("octavo and transformers differ", file=sys.stderr)
    return 0 if found.equal else 1
