"""`octavo bench attention | step | startup`: kernels, steps and starts, against the machine."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from octavo.cli.flags import EngineFlags, flags, parse, refuse_without_effect
from octavo.cli.start import note, start_engine
from octavo.config import DEFAULT_MODEL, AttentionName, Device, DType, KVCacheDType
from octavo.errors import ConfigError, InvalidRequestError
from octavo.util import flag_name

if TYPE_CHECKING:
    from octavo.engine.kernels import AttentionCase, HeadShape

_HEADS = ("num_heads", "num_kv_heads", "head_dim")


@flags
@dataclass(frozen=True, kw_only=True)
class Attention:
    """Time the attention kernels of the backend in use, on random keys and values: decodes for each
    batch and context, and prompts. Beside them: the same with each sequence's keys and values in
    one piece, which tells what paging costs; and the rates at which this machine copies and
    multiplies, measured first.

    Caches are cold: calls go from layer to layer, of 16 at most, of a pool that no cache holds; but
    for a single short context.
    """

    model: str = DEFAULT_MODEL
    """Its heads are taken; its weights are not read."""
    revision: str | None = None
    """Branch, tag or commit of a hub model."""
    num_heads: int | None = None
    """Query heads; with --num-kv-heads and --head-dim in the place of a model."""
    num_kv_heads: int | None = None
    """Key and value heads."""
    head_dim: int | None = None
    """Elements of a head."""
    batch_sizes: tuple[int, ...] = (1, 8, 32, 128, 256)
    """Sequences of a decode."""
    contexts: tuple[int, ...] = (512, 1024, 4096)
    """Tokens of each."""
    prompts: tuple[str, ...] = ("1x2048", "8x1024")
    """Prefills: prompts x tokens; 4x512of2048 computes the last 512 of 2,048 tokens each."""
    block_sizes: tuple[int, ...] = (16,)
    """Tokens in a KV block."""
    device: Device = "auto"
    """Where the kernels run; auto: the first NVIDIA GPU, or the CPU where there is none."""
    dtype: DType = "auto"
    """Of queries, keys and values; auto: bfloat16, on CPUs only where it is fast."""
    kv_cache_dtype: KVCacheDType = "auto"
    """Type of the KV cache; auto: as --dtype. fp8 on GPUs, int8 on CPUs."""
    attention_backend: AttentionName = "auto"
    """Attention kernels; auto: what the engine would choose."""
    num_threads: int | None = None
    """CPU threads for computing; torch's default when not set."""
    seed: int = 0
    """Source of the random data."""
    json: bool = False
    """End with one line of JSON."""


@flags
@dataclass(frozen=True, kw_only=True)
class Step:
    """Time the model's steps alone: a token for each sequence of a batch, and prompts from their
    first token on; what the device and the host take of it, and how near that is to what the
    machine needs at least: weights and KV at the rate of a copy, or all arithmetic at the rate of
    a matrix product.

    The engine's runner carries them out, without a scheduler. Prompts are random token ids, drawn
    by --seed.
    """

    batch_sizes: tuple[int, ...] = (1, 8, 32, 128, 256)
    """Sequences of a decode step."""
    context: int = 512
    """Tokens of each sequence."""
    prefill_batch: int = 8
    """Prompts; 0 leaves the prefill out."""
    prefill_len: int = 512
    """Tokens of each prompt."""
    num_steps: int = 20
    """Decode steps in a row."""
    num_iters: int = 5
    """How often; medians are kept."""
    json: bool = False
    """End with one line of JSON."""
    engine: EngineFlags


@flags
@dataclass(frozen=True, kw_only=True)
class Startup:
    """Start the engine in processes of their own, and tell how long it takes to the first token,
    part by part: cold, with no kernel compiled yet, and warm.
    """

    num_cold: int = 1
    """Starts with empty compilers' caches."""
    num_warm: int = 1
    """Starts that find what a cold one compiled."""
    json: bool = False
    """End with one line of JSON."""
    engine: EngineFlags


class _Result(Protocol):
    def as_dict(self) -> dict[str, Any]: ...


def main(prog: str, argv: Sequence[str]) -> int:
    """Run the command that `prog` ends with."""
    commands = {"attention": _attention, "step": _step, "startup": _startup}
    commands[prog.split()[-1]](prog, argv)
    return 0


def _attention(prog: str, argv: Sequence[str]) -> None:
    args = parse(Attention, prog, argv)
    cases = _cases(args)
    for name in ("block_sizes", "num_threads", *_HEADS):
        _check_positive(name, getattr(args, name))
    from octavo.bench.attention import run_attention

    if args.num_threads is not None:
        import torch

        torch.set_num_threads(args.num_threads)
    result = run_attention(
        _shape(args),
        cases=cases,
        block_sizes=args.block_sizes,
        dtype=args.dtype,
        kv_cache_dtype=args.kv_cache_dtype,
        device=args.device,
        backend=args.attention_backend,
        seed=args.seed,
        tell=_tell,
    )
    _print(result, as_json=args.json)


def _shape(args: Attention) -> HeadShape:
    """The heads that were given, or the model's."""
    from octavo.engine.kernels import HeadShape

    given = {name: getattr(args, name) for name in _HEADS}
    if all(value is None for value in given.values()):
        return HeadShape.of_model(args.model, args.revision)
    missing = [flag_name(name) for name, value in given.items() if value is None]
    if missing:
        raise ConfigError(f"a shape without {' and '.join(missing)} is none: give all three")
    if args.model != DEFAULT_MODEL or args.revision is not None:
        raise ConfigError("--model has no effect beside a shape of its own: drop one")
    shape = HeadShape(**given)
    if shape.num_heads % shape.num_kv_heads:
        raise ConfigError(
            f"--num-heads {shape.num_heads} must be a multiple of --num-kv-heads "
            f"{shape.num_kv_heads}: so many query heads share one"
        )
    return shape


def _cases(args: Attention) -> list[AttentionCase]:
    from octavo.engine.kernels import AttentionCase

    for name in ("batch_sizes", "contexts"):
        _check_positive(name, getattr(args, name))
    cases = [AttentionCase(b, c) for b in args.batch_sizes for c in args.contexts]
    for text in args.prompts:
        match = re.fullmatch(r"(\d+)x(\d+)(?:of(\d+))?", text)
        numbers = [int(n) for n in match.groups() if n is not None] if match else []
        if not numbers or min(numbers) < 1 or numbers[1] < 2 or numbers[-1] < numbers[1]:
            raise InvalidRequestError(
                f"--prompts {text!r} must read as 8x1024 (prompts x tokens, at least 2) or as "
                "4x512of2048 (the last 512 tokens of 2,048)",
                parameter="prompts",
            )
        cases.append(AttentionCase(numbers[0], numbers[-1], numbers[1]))
    if not cases:
        raise InvalidRequestError(
            "no --batch-sizes and --contexts, and no --prompts: nothing to measure",
            parameter="batch_sizes",
        )
    return cases


def _check_positive(name: str, value: int | tuple[int, ...] | None) -> None:
    for one in (value,) if isinstance(value, int) else value or ():
        if one < 1:
            raise InvalidRequestError(
                f"{flag_name(name)} must be at least 1, got {one}", parameter=name
            )


_NO_EFFECT = {
    "kv_policy": "steps take as long under every policy",
    "preemption_mode": "nobody is preempted",
    "preemption_victim": "nobody is preempted",
    "scheduling_policy": "there are no requests",
    "kv_disk_dir": "no block goes to a disk",
    "swap_space": "no block goes to the host",
    "tokenizer": "prompts are token ids",
    "skip_tokenizer_init": "no tokenizer is loaded anyway",
    "record": "no scheduler decides",
}


def _step(prog: str, argv: Sequence[str]) -> None:
    args = parse(Step, prog, argv)
    config = args.engine.config()
    refuse_without_effect(config, _NO_EFFECT)
    from octavo.bench.step import StepOptions, engine_config, run_steps
    from octavo.engine.kernels import pick_device

    names = [field.name for field in dataclasses.fields(StepOptions)]
    options = StepOptions(**{name: getattr(args, name) for name in names})
    options.check()
    gpu = pick_device(config.device).type == "cuda"
    with start_engine(engine_config(config, options, gpu=gpu)) as llm:
        result = run_steps(llm, options, _tell)
    _print(result, as_json=args.json)


def _startup(prog: str, argv: Sequence[str]) -> None:
    args = parse(Startup, prog, argv)
    config = args.engine.config()
    refuse_without_effect(config, {"record": "each start would write over it"})
    from octavo.bench.startup import run_startup

    result = run_startup(config, num_cold=args.num_cold, num_warm=args.num_warm, tell=_tell)
    _print(result, as_json=args.json)


def _tell(text: str) -> None:
    note(f"{text}\033[K", end="\r")


def _print(result: _Result, *, as_json: bool) -> None:
    if sys.stderr.isatty():
        note("\033[K", end="\r")
    print(result)
    if as_json:
        print(json.dumps(result.as_dict()))
