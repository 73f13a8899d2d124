"""Preemption: whole workloads in a pool too small for them, under each `--preemption-mode`."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, get_args

from octavo.bench.restore import RestoreCosts, StartEngine
from octavo.config import EngineConfig, PreemptionMode
from octavo.errors import InvalidRequestError
from octavo.events import EventKind
from octavo.request import SamplingParams
from octavo.util import cdiv

if TYPE_CHECKING:
    from octavo import LLM

MODES: tuple[PreemptionMode, ...] = get_args(PreemptionMode)
NEAR = 1.1
"""`auto` is to take at most so many times as long as the better mode."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Requests of one kind; lengths in tokens."""

    num_requests: int
    input_len: int
    output_len: int
    n: int = 1


@dataclass(frozen=True, slots=True)
class Mix:
    """A workload that needs more blocks than there are."""

    name: str
    shapes: tuple[Shape, ...]

    def __str__(self) -> str:
        parts = [
            f"{s.num_requests} x ({s.input_len} in, {s.output_len} out"
            + (f", n={s.n})" if s.n > 1 else ")")
            for s in self.shapes
        ]
        return f"{self.name}: {' and '.join(parts)}"


@dataclass(frozen=True, slots=True)
class ModeRun:
    """A workload under one mode; per round."""

    mode: PreemptionMode
    seconds: tuple[float, ...]
    num_output_tokens: int
    num_preemptions: tuple[int, ...]
    tokens_moved: tuple[int, ...]
    tokens_lost: tuple[int, ...]

    @property
    def median_s(self) -> float:
        """Median seconds."""
        return statistics.median(self.seconds)

    @property
    def output_tokens_per_s(self) -> float:
        """Generated tokens a second, by the median."""
        return self.num_output_tokens / self.median_s


@dataclass(frozen=True, slots=True)
class MixResult:
    """A workload under all modes."""

    workload: str
    runs: tuple[ModeRun, ...]

    @property
    def auto_ratio(self) -> float:
        """Time of `auto` over that of the better of the other two; medians."""
        times = {run.mode: run.median_s for run in self.runs}
        return times["auto"] / min(times["recompute"], times["swap"])

    @property
    def auto_is_near_the_better(self) -> bool:
        """Whether `auto` was within 10 % of it."""
        return self.auto_ratio <= NEAR

    @property
    def auto_did_as(self) -> str | None:
        """The mode with the same preemptions and the same tokens moved and lost in every round."""
        did = {
            run.mode: (run.num_preemptions, run.tokens_moved, run.tokens_lost) for run in self.runs
        }
        return next((m for m in ("swap", "recompute") if did[m] == did["auto"]), None)


@dataclass(frozen=True, slots=True)
class PreemptionResult:
    """Everything that was measured."""

    num_tokens: int
    """Of the sequence that was brought back."""
    pool_tokens: int
    """Tokens in the pool of the workloads."""
    block_size: int
    """Of that pool."""
    costs: Sequence[RestoreCosts]
    mixes: Sequence[MixResult]

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        values = asdict(self)
        for row, cost in zip(values["costs"], self.costs, strict=True):
            row["swap_s"] = cost.swap_s
        for row, mix in zip(values["mixes"], self.mixes, strict=True):
            row["auto_ratio"] = mix.auto_ratio
            row["auto_is_near_the_better"] = mix.auto_is_near_the_better
        return values

    def __str__(self) -> str:
        return "\n".join([*self._costs_table(), *self._mixes_table()])

    def _costs_table(self) -> list[str]:
        if not self.costs:
            return []
        head = ("block", "blocks", "recompute", "out + in", "out", "in", "cheaper")
        lines = [
            f"A sequence of {self.num_tokens} tokens preempted and brought back, ms",
            "".join(f"{name:>11}" for name in head),
        ]
        for row in self.costs:
            times = (row.recompute_s, row.swap_s, row.swap_out_s, row.swap_in_s)
            cheaper = "swap" if row.swap_s < row.recompute_s else "recompute"
            lines.append(
                f"{row.block_size:>11}{row.num_blocks:>11}"
                + "".join(f"{1e3 * seconds:>11,.2f}" for seconds in times)
                + f"{cheaper:>11}"
            )
        return [*lines, ""]

    def _mixes_table(self) -> list[str]:
        head = ("seconds", "tokens/s", "preemptions", "moved", "lost")
        lines = []
        if self.mixes:
            lines += [
                f"Workloads in a pool of {self.pool_tokens:,} tokens, blocks of "
                f"{self.block_size}; medians",
                f"{'':12}" + "".join(f"{name:>13}" for name in head),
            ]
        for mix in self.mixes:
            lines.append(mix.workload)
            for run in mix.runs:
                counts = (run.num_preemptions, run.tokens_moved, run.tokens_lost)
                lines.append(
                    f"  {run.mode:10}{run.median_s:>13,.2f}{run.output_tokens_per_s:>13,.1f}"
                    + "".join(f"{statistics.median(count):>13,.0f}" for count in counts)
                )
            verdict = "within 10 %" if mix.auto_is_near_the_better else "NOT within 10 %"
            if mix.auto_did_as is not None:
                verdict += f"; it did what {mix.auto_did_as} did, the rest is the machine's noise"
            lines.append(f"  auto took {mix.auto_ratio:.2f} x the better mode: {verdict}")
        return lines


def three_mixes(pool_tokens: int) -> tuple[Mix, ...]:
    """Workloads that need two to four times a pool of so many tokens.

    Raises `InvalidRequestError` for a pool too small to cut them from.
    """
    unit = pool_tokens // 64
    if unit < 1:
        raise InvalidRequestError(
            f"--pool-tokens must be at least 64, got {pool_tokens}", parameter="pool_tokens"
        )
    return (
        Mix("short prompts, long outputs", (Shape(16, unit, 8 * unit),)),
        Mix("long prompts", (Shape(12, 10 * unit, 8 * unit),)),
        Mix(
            "parallel samples among others",
            (Shape(6, 2 * unit, 5 * unit, 4), Shape(8, 8 * unit, 3 * unit)),
        ),
    )


def check(num_rounds: int) -> None:
    """Raise `InvalidRequestError` for a number of rounds that cannot be run."""
    if num_rounds < 0:
        raise InvalidRequestError(
            f"--num-rounds must be at least 0, got {num_rounds}", parameter="num_rounds"
        )


def measure_mixes(
    config: EngineConfig,
    start: StartEngine,
    mixes: Sequence[Mix],
    *,
    pool_tokens: int,
    num_rounds: int,
    tell: Callable[[str], None] = lambda _: None,
) -> list[MixResult]:
    """Run each workload under each mode, in turns. No rounds: no results. `tell` hears of progress.
    Prompts are drawn by the configuration's seed.

    Three engines are held at a time, one a mode, each with its own weights. A first round is not
    counted: kernels are recorded and costs learned in it.
    """
    check(num_rounds)
    if not num_rounds:
        return []
    changed = config.replace(
        num_gpu_blocks_override=cdiv(pool_tokens, config.block_size),
        kv_cache_memory_bytes=None,
        skip_tokenizer_init=True,
        tokenizer=None,
    )
    found: dict[tuple[str, PreemptionMode], list[_Run]] = {}
    with ExitStack() as stack:
        engines = {
            mode: stack.enter_context(start(changed.replace(preemption_mode=mode)))
            for mode in MODES
        }
        for number in range(num_rounds + 1):
            tell(f"round {number} of {num_rounds} ..." if number else "warming up ...")
            for mix in mixes:
                for mode in (*MODES[number % 3 :], *MODES[: number % 3]):
                    run = _run(engines[mode], mix, f"{config.seed} {number} {mix.name}")
                    if number:
                        found.setdefault((mix.name, mode), []).append(run)
    return [
        MixResult(str(mix), tuple(_mode_run(mode, found[mix.name, mode]) for mode in MODES))
        for mix in mixes
    ]


@dataclass(frozen=True, slots=True)
class _Run:
    seconds: float
    num_output_tokens: int
    num_preemptions: int
    tokens_moved: int
    tokens_lost: int


def _mode_run(mode: PreemptionMode, runs: Sequence[_Run]) -> ModeRun:
    return ModeRun(
        mode=mode,
        seconds=tuple(run.seconds for run in runs),
        num_output_tokens=runs[0].num_output_tokens,
        num_preemptions=tuple(run.num_preemptions for run in runs),
        tokens_moved=tuple(run.tokens_moved for run in runs),
        tokens_lost=tuple(run.tokens_lost for run in runs),
    )


def _run(llm: LLM, mix: Mix, seed: str) -> _Run:
    """All requests of a workload at once; prompts differ from round to round."""
    prompts, params = _requests(mix, llm.arch.vocab_size, seed)
    num_before = llm.memory_report().num_preemptions
    begin = time.monotonic()  # the engine's clock
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.monotonic() - begin
    preempted = [e for e in llm.events() if e.kind is EventKind.PREEMPTED and e.time_s >= begin]
    return _Run(
        seconds=seconds,
        num_output_tokens=sum(len(s.token_ids) for out in outputs for s in out.outputs),
        num_preemptions=llm.memory_report().num_preemptions - num_before,
        tokens_moved=sum(event.tokens_moved for event in preempted),
        tokens_lost=sum(event.tokens_lost for event in preempted),
    )


def _requests(mix: Mix, vocab_size: int, seed: str) -> tuple[list[list[int]], list[SamplingParams]]:
    rng = random.Random(seed)
    rows = [
        (
            rng.random(),
            [rng.randrange(vocab_size) for _ in range(shape.input_len)],
            SamplingParams(
                n=shape.n,
                temperature=1.0,
                seed=rng.getrandbits(32),
                max_tokens=shape.output_len,
                ignore_eos=True,
                detokenize=False,
            ),
        )
        for shape in mix.shapes
        for _ in range(shape.num_requests)
    ]
    rows.sort(key=lambda row: row[0])
    return [prompt for _, prompt, _ in rows], [params for _, _, params in rows]
