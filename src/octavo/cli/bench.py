"""`octavo bench throughput | latency | preemption`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from octavo.cli.flags import EngineFlags, flags, parse, refuse_without_effect
from octavo.cli.start import note, start_engine
from octavo.errors import ConfigError, InvalidRequestError
from octavo.request import SamplingParams
from octavo.util import flag_name

if TYPE_CHECKING:
    from octavo import LLM
    from octavo.bench.workload import Workload


@flags
@dataclass(frozen=True, kw_only=True)
class Throughput:
    """Run many requests as one batch and tell the tokens per second, and how full the blocks were.

    Output lengths are exact: end-of-sequence is ignored.
    """

    dataset: Path | None = None
    """Lengths or prompts from a .csv or .jsonl file (.gz or not): rows with input_tokens and
    output_tokens, or with prompt_ids and max_tokens. By default, random lengths."""
    num_prompts: int = 64
    """How many requests, drawn from the dataset by --seed; its own order if it has no more."""
    input_len: int = 160
    """Mean prompt length of random requests."""
    output_len: int = 128
    """Mean output length of random requests."""
    random_range_ratio: float = 0.5
    """Random lengths are up to this share shorter or longer than the mean."""
    n: int = 1
    """Completions of each prompt; more than one need a temperature above 0 to differ."""
    temperature: float = 0.0
    """Logits are divided by it; 0 is greedy."""
    disable_detokenize: bool = False
    """Leave out the work of making text."""
    memory: bool = False
    """Print the memory report at the end."""
    json: bool = False
    """End with one line of JSON."""
    engine: EngineFlags


@flags
@dataclass(frozen=True, kw_only=True)
class Latency:
    """Run a few requests alone, again and again, and tell how soon and how evenly tokens come.

    Output lengths are exact: end-of-sequence is ignored.
    """

    batch_size: int = 1
    """Requests at a time."""
    input_len: int = 32
    """Prompt length."""
    output_len: int = 128
    """Output length."""
    num_iters: int = 5
    """How often to measure."""
    num_iters_warmup: int = 1
    """How often to run before measuring."""
    temperature: float = 0.0
    """Logits are divided by it; 0 is greedy."""
    disable_detokenize: bool = False
    """Leave out the work of making text."""
    memory: bool = False
    """Print the memory report at the end."""
    json: bool = False
    """End with one line of JSON."""
    engine: EngineFlags


@flags
@dataclass(frozen=True, kw_only=True)
class Preemption:
    """Tell what it costs to preempt a sequence and bring it back, by computing it again and by
    copying it, for each block size; and how long three workloads take in a pool that is too small
    for them under each --preemption-mode. Engines are started for it, up to three at a time; their
    prompts are random token ids, drawn by --seed.
    """

    num_tokens: int = 256
    """Length of the sequence."""
    block_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    """Block sizes to measure it at."""
    num_iters: int = 10
    """How often to measure each."""
    pool_tokens: int = 1024
    """Tokens that the pool of the workloads holds."""
    num_rounds: int = 3
    """How often to run the workloads; 0 leaves them out."""
    json: bool = False
    """End with one line of JSON."""
    engine: EngineFlags


class _Result(Protocol):
    def as_dict(self) -> dict[str, object]: ...


def main(prog: str, argv: Sequence[str]) -> int:
    """Run the command that `prog` ends with."""
    commands = {"throughput": _throughput, "latency": _latency, "preemption": _preemption}
    command = commands[prog.split()[-1]]
    command(prog, argv)
    return 0


def _throughput(prog: str, argv: Sequence[str]) -> None:
    args = parse(Throughput, prog, argv)
    params, config = _params(args), args.engine.config()
    _check(args)
    from octavo.bench.throughput import run_throughput

    with start_engine(config) as llm:
        workload = _workload(args, llm)
        result = run_throughput(llm, workload, params, use_tqdm=sys.stderr.isatty())
        if workload.num_too_long:
            print(f"{workload.num_too_long} requests of the dataset exceed the context: left out")
        _print(args, llm, result)


def _check(args: Throughput) -> None:
    """Refuse what cannot be run, and flags that would have no effect."""
    if args.num_prompts < 1:
        raise InvalidRequestError(
            f"--num-prompts must be at least 1, got {args.num_prompts}", parameter="num_prompts"
        )
    if args.dataset is None:
        return
    for name in ("input_len", "output_len", "random_range_ratio"):
        if getattr(args, name) != getattr(Throughput, name):
            flag = flag_name(name)
            raise ConfigError(
                f"{flag} shapes random requests, and --dataset brings its own: drop one"
            )


def _workload(args: Throughput, llm: LLM) -> Workload:
    from octavo.bench.workload import random_workload, read_workload

    if args.dataset is not None:
        return read_workload(args.dataset, args.num_prompts, **_limits(llm))
    return random_workload(
        args.num_prompts,
        args.input_len,
        args.output_len,
        args.random_range_ratio,
        **_limits(llm),
    )


def _latency(prog: str, argv: Sequence[str]) -> None:
    args = parse(Latency, prog, argv)
    params, config = _params(args), args.engine.config()
    for name, minimum in (("batch_size", 1), ("num_iters", 1), ("num_iters_warmup", 0)):
        if getattr(args, name) < minimum:
            flag = flag_name(name)
            raise InvalidRequestError(
                f"{flag} must be at least {minimum}, got {getattr(args, name)}", parameter=name
            )
    from octavo.bench.latency import run_latency
    from octavo.bench.workload import random_workload

    with start_engine(config) as llm:
        limits = _limits(llm)
        seed = limits.pop("seed")
        lengths = (args.batch_size, args.input_len, args.output_len, 0.0)
        workloads = [
            random_workload(*lengths, **limits, seed=seed + i)
            for i in range(args.num_iters_warmup + args.num_iters)
        ]
        result = run_latency(llm, workloads, params, num_warmup=args.num_iters_warmup)
        _print(args, llm, result)


def _preemption(prog: str, argv: Sequence[str]) -> None:
    args = parse(Preemption, prog, argv)
    config = args.engine.config()
    refuse_without_effect(
        config,
        {
            "preemption_mode": "all modes are measured",
            "kv_cache_memory_bytes": "--pool-tokens sizes the pool",
            "num_gpu_blocks_override": "--pool-tokens sizes the pool",
            "max_model_len": "the workloads decide it",
            "kv_disk_dir": "what is measured is the pool and host memory",
            "tokenizer": "prompts are token ids",
            "skip_tokenizer_init": "no tokenizer is loaded anyway",
            "scheduling_policy": "all requests are of one priority",
            "record": "each of its engines would write over it",
        },
    )
    if config.swap_space == 0:
        raise ConfigError("--swap-space 0 leaves nothing to compare with: drop it")
    from octavo.bench.preemption import PreemptionResult, check, measure_mixes, three_mixes
    from octavo.bench.restore import measure_costs

    mixes = three_mixes(args.pool_tokens)
    check(args.num_rounds)
    costs = measure_costs(
        config,
        start_engine,
        num_tokens=args.num_tokens,
        block_sizes=args.block_sizes,
        num_iters=args.num_iters,
    )
    found = measure_mixes(
        config,
        start_engine,
        mixes,
        pool_tokens=args.pool_tokens,
        num_rounds=args.num_rounds,
        tell=note,
    )
    result = PreemptionResult(args.num_tokens, args.pool_tokens, config.block_size, costs, found)
    print(result)
    if args.json:
        engine = {name: getattr(config, name) for name in ("model", "dtype", "seed")}
        print(json.dumps(engine | result.as_dict()))


def _params(args: Throughput | Latency) -> SamplingParams:
    detokenize = not (args.disable_detokenize or args.engine.skip_tokenizer_init)
    n = args.n if isinstance(args, Throughput) else 1
    return SamplingParams(n=n, temperature=args.temperature, detokenize=detokenize)


def _limits(llm: LLM) -> dict[str, Any]:
    """What prompts must keep to."""
    assert llm.config.max_model_len is not None, "resolved with the model"
    return {
        "vocab_size": llm.arch.vocab_size,
        "max_model_len": llm.config.max_model_len,
        "seed": llm.config.seed,
    }


def _print(args: Throughput | Latency, llm: LLM, result: _Result) -> None:
    print(result)
    if args.memory:
        print(f"\n{llm.memory_report()}")
    if args.json:
        names = ("model", "dtype", "block_size")
        engine = {name: getattr(llm.config, name) for name in names}
        print(json.dumps(engine | result.as_dict()))
