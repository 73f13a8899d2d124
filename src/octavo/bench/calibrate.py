"""Calibration: what steps take on this machine, by what is in them.

Two kinds of measurement, in turns. Plans that no scheduler made give a grid: prompts by chunk and
context, decodes by batch and context, mixtures, copies. Requests that are served give the same as
serving sees it: deciding, computing, sampling and handing out together. Each is repeated in rounds,
and medians over rounds are kept, so that what else the machine did for a moment counts for little.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from octavo.bench.measured_steps import (
    Counts,
    Row,
    RowKind,
    Step,
    Times,
    counts_of,
    median_row,
    wave_rows,
)
from octavo.bench.step_grid import Point, Probe, grid
from octavo.errors import InvalidRequestError
from octavo.plan import BlockCopy, CopyKind, StepPlan, StepResult
from octavo.request import SamplingParams
from octavo.util import cdiv

if TYPE_CHECKING:
    from octavo import LLM
    from octavo.config import EngineConfig
    from octavo.engine.driver import RequestStream

POOL_TOKENS = 32_768
"""Tokens that the pool holds while it is measured: no sequence's KV is in a cache for long."""
_COPIES = (1, 8, 64)


# -- requests that are served


class _Wave(NamedTuple):
    """Requests that are served: lengths in tokens."""

    lengths: tuple[tuple[int, int], ...]
    every: int = 0
    """Steps between one that comes and the next one; 0: they come together."""
    prefix: int = 0
    """Tokens that every second one begins with, the same for all of them."""


def waves(config: EngineConfig, seed: int) -> list[_Wave]:
    """Batches of equal requests, from few to many, one of many kinds, and such as come one after
    another, some of which find a part of their prompt in the prefix cache."""
    rng = random.Random(f"waves {seed}")
    assert config.max_model_len is not None
    longest = config.max_model_len
    equal = [(1, 32, 24), (4, 48, 24), (12, 64, 24), (32, 64, 32), (64, 48, 32)]
    found = [
        _Wave(((i, o),) * count) for count, i, o in equal if count <= config.limits().max_num_seqs
    ]
    found.append(_Wave(tuple((rng.randint(8, 320), rng.randint(4, 128)) for _ in range(32))))
    one_by_one = tuple((rng.randint(8, 160), rng.randint(8, 96)) for _ in range(24))
    found.append(_Wave(one_by_one, every=4, prefix=min(256, longest // 4)))
    most = longest // 2
    return [
        wave._replace(
            lengths=tuple(
                (max(1, min(i, most - wave.prefix)), min(o, most)) for i, o in wave.lengths
            )
        )
        for wave in found
    ]


@contextmanager
def _watched(llm: LLM, then: Callable[[], None]) -> Iterator[list[Step]]:
    """What is in each step of the engine, and what it takes from one step's end to the next's.

    `then` is called after each, and what it takes belongs to the next one."""
    core = llm._engine.engine.core
    launch, windows = core._launch, llm.arch.sliding_windows
    assert launch is not None
    found: list[Step] = []
    now: list[tuple[Counts, StepResult]] = []
    last = time.perf_counter()

    def watched(plan: StepPlan) -> Callable[[], StepResult]:
        wait = launch(plan)

        def wait_watched() -> StepResult:
            nonlocal last
            result = wait()
            looking = time.perf_counter()
            now.append((counts_of(plan, windows), result))
            last += time.perf_counter() - looking  # is no part of the step
            return result

        return wait_watched

    def after_step() -> None:
        nonlocal last
        moment = time.perf_counter()
        for counts, result in now:
            found.append((counts, Times(moment - last, result.compute_s, result.copy_s)))
        now.clear()
        last = moment
        then()

    before = llm.after_step
    core._launch, llm.after_step = watched, after_step
    try:
        yield found
    finally:
        llm.after_step = before
        if core._launch is watched:
            core._launch = launch


def serve(llm: LLM, wave: _Wave, rng: random.Random) -> list[Step]:
    """The steps of a wave. Its requests come after a step, as they do to an engine that serves:
    what it takes to add them lies between two steps, and is in what their first one takes."""
    vocab_size, detokenize = llm.arch.vocab_size, llm.get_tokenizer() is not None

    def draw(count: int) -> list[int]:
        return [rng.randrange(vocab_size) for _ in range(count)]

    prefix = draw(wave.prefix)
    prompts = [draw(1)]  # goes ahead: the time of its step began before it was there
    prompts += [prefix * (i % 2) + draw(length) for i, (length, _) in enumerate(wave.lengths)]
    params = [
        SamplingParams(temperature=0, max_tokens=num, ignore_eos=True, detokenize=detokenize)
        for num in (1, *(num_output for _, num_output in wave.lengths))
    ]
    streams: list[RequestStream] = []

    def add() -> None:
        place = len(streams)
        streams.append(llm.stream(prompts[place], params[place], final_only=True))

    def add_due() -> None:
        while len(streams) < len(prompts) and (len(streams) - 1) * wave.every < len(steps):
            add()

    try:
        with _watched(llm, add_due) as steps:
            for number in range(len(prompts)):
                if len(streams) == number:  # nobody is left
                    add()
                for _ in streams[number]:
                    pass
    finally:
        for stream in streams:
            stream.close()
        # the plan of another request tells the runner who has ended
        llm.generate([prompts[0]], params[0], use_tqdm=False)
    return steps[1:]


# -- all of it


@dataclass
class Calibration:
    """What was measured so far; `rows` tells it."""

    num_rounds: int = 0
    _grid: dict[Point, list[Step]] = field(default_factory=dict)
    _waves: dict[int, list[list[Step]]] = field(default_factory=dict)
    _copies: dict[tuple[RowKind, int], list[Times]] = field(default_factory=dict)

    def add_point(self, point: Point, found: Sequence[Step]) -> None:
        """Steps of a point of the grid."""
        self._grid.setdefault(point, []).extend(found)

    def add_copies(self, kind: RowKind, num_blocks: int, times: Times) -> None:
        """So many blocks copied."""
        self._copies.setdefault((kind, num_blocks), []).append(times)

    def add_wave(self, number: int, steps: list[Step]) -> None:
        """Requests that were served: the same plans every time."""
        self._waves.setdefault(number, []).append(steps)

    def rows(self) -> list[Row]:
        """Medians."""
        found = [
            median_row(point.kind, [pair[0] for pair in pairs], [[pair[1] for pair in pairs]])
            for point, pairs in self._grid.items()
        ]
        for (kind, count), times in self._copies.items():
            found.append(median_row(kind, [Counts()], [times], num_blocks=count))
        for runs in self._waves.values():
            found += wave_rows(runs)
        return found


def engine_config(config: EngineConfig) -> EngineConfig:
    """The engine that is measured in the place of another one: the same but for its pool."""
    blocks = max(cdiv(POOL_TOKENS, config.block_size), 2 * max(_COPIES))
    if config.num_gpu_blocks_override is not None:
        blocks = min(blocks, config.num_gpu_blocks_override)
    return config.replace(
        num_gpu_blocks_override=blocks,
        kv_cache_memory_bytes=None,
        disable_hybrid_kv_cache_manager=True,  # plans that no scheduler made know one group
    )


def measure_round(llm: LLM, found: Calibration, tell: Callable[[str], None]) -> None:
    """All points once, in an order of this round's own, between them the served requests."""
    probe = Probe(llm)
    number = found.num_rounds
    rng = random.Random(f"{llm.config.seed} round {number}")
    if number == 0:
        llm.reset_prefix_cache()
        probe.touch_pool()
    jobs: list[Callable[[], None]] = [partial(_measure_copies, probe, found)]
    for point in grid(llm.config, probe.num_blocks):
        jobs.append(partial(_measure_point, probe, found, point))
    for place, wave in enumerate(waves(llm.config, llm.config.seed)):
        jobs.append(partial(_measure_wave, llm, found, place, wave, rng))
    rng.shuffle(jobs)
    try:
        for index, job in enumerate(jobs):
            tell(f"round {number + 1}: {index + 1} of {len(jobs)}")
            job()
    finally:
        llm.reset_prefix_cache()  # what it remembers was overwritten
    found.num_rounds += 1


def _measure_point(probe: Probe, found: Calibration, point: Point) -> None:
    found.add_point(point, point.measure(probe))


def _measure_wave(
    llm: LLM, found: Calibration, place: int, wave: _Wave, rng: random.Random
) -> None:
    found.add_wave(place, serve(llm, wave, rng))


def _measure_copies(probe: Probe, found: Calibration) -> None:
    for count in _COPIES:
        if 2 * count <= probe.num_blocks:
            copies = [BlockCopy(i, count + i) for i in range(count)]
            found.add_copies("pool copy", count, probe.run(copies=copies))
        if count <= min(probe.num_blocks, probe.num_host_blocks):
            ways: tuple[tuple[RowKind, CopyKind], ...] = (
                ("to host", CopyKind.TO_HOST),
                ("from host", CopyKind.FROM_HOST),
            )
            for name, kind in ways:
                copies = [BlockCopy(i, i, kind) for i in range(count)]
                found.add_copies(name, count, probe.run(copies=copies))


def calibrate(
    llm: LLM,
    *,
    max_s: float = 75.0,
    max_rounds: int = 7,
    tell: Callable[[str], None] = lambda _: None,
    announce: Callable[[str], None] = lambda _: None,
) -> Calibration:
    """Measure in rounds, one of which is a warm-up, until the time is over: at least one counts.

    llm: an engine without requests, of `engine_config`. `tell` is told where it is, `announce`
    after the warm-up how long it will be. Raises `InvalidRequestError` for limits that leave
    nothing to measure.
    """
    if max_rounds < 1 or not max_s > 0:
        name, value = ("rounds", max_rounds) if max_rounds < 1 else ("seconds", max_s)
        raise InvalidRequestError(f"--{name} must be above 0, got {value}", parameter=name)
    begin = time.perf_counter()
    measure_round(llm, Calibration(), lambda text: tell(f"warming up, {text}"))
    announce(plan_of(time.perf_counter() - begin, max_s, max_rounds))
    found = Calibration()
    while found.num_rounds < max_rounds:
        started = time.perf_counter()
        measure_round(llm, found, tell)
        now = time.perf_counter()
        if now - begin + (now - started) > max_s:
            break
    return found


def plan_of(round_s: float, max_s: float, max_rounds: int) -> str:
    """How long it will be, for people. round_s: what the warm-up took."""
    rounds = min(max_rounds, max(1, int(max_s / round_s) - 1))
    times = "once" if rounds == 1 else f"{rounds} times"
    return (
        f"a round takes {round_s:.0f} s: everything is measured {times}, in "
        f"{rounds * round_s:.0f} s"
    )
