"""Steps recorded as CUDA graphs, for a ladder of sizes each: decodes, and decodes beside prompts.

A recorded step names fixed addresses only - inputs, workspace, pool, tables - and is replayed with
whatever they hold. A step of fewer tokens than a size has is filled up with tokens that write
nothing.
"""

from __future__ import annotations

import gc
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from typing import Any, NamedTuple

import torch

from octavo.runner.gpu.layout import MAX_MIXED_TOKENS, Room
from octavo.weights.progress import NullProgress, Progress

Run = Callable[[], None]

_CHEAP_TOKENS = 256
"""Up to about so many tokens the weights' reading is what takes time."""


class RoomCalls(NamedTuple):
    """Of a step on fixed addresses; they queue kernels, and allocate nothing that outlives them."""

    prepare: Run
    """Compiles all kernels of the step, and lets libraries take their memory."""
    step: Run


class Captured(NamedTuple):
    """What recording came to."""

    num_bytes: int
    """Memory of the GPU that the recorded steps hold."""
    seconds: float
    sizes: tuple[int, ...]
    """Numbers of sequences of steps in which all decode, ascending."""
    mixed_sizes: tuple[int, ...]
    """Numbers of tokens of steps with chunks of prompts, ascending."""


def graph_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """Numbers of sequences that steps of decodes are recorded for; the last is `max_num_seqs`.

    A step costs as much as the size that it is filled up to, on average a twentieth more rows than
    it has. Where that is much more (9 run as 16) rows cost next to nothing: weights are read once.
    """
    ladder = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 512, 32)]
    ladder += range(512, max_num_seqs, 64)
    return (*(size for size in ladder if size < max_num_seqs), max_num_seqs)


def mixed_sizes(max_num_tokens: int) -> tuple[int, ...]:
    """Numbers of tokens that steps with chunks of prompts are recorded for, ascending.

    Up to about 200 tokens reading the weights is what takes time, behind that every token does.
    """
    most = min(max_num_tokens, MAX_MIXED_TOKENS)
    ladder = (16, 32, 48, 64, 96, *range(128, most, 64))
    return (*(size for size in ladder if size < most), most)


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings of a process: for each stream that ever multiplied, torch keeps 32 MiB
    of workspace for good."""
    return torch.cuda.Stream(device)


class StepGraphs:
    """Recorded steps by what they have room for.

    calls_of: the calls of a step; device: where they run. On a CPU nothing is recorded and the
    calls are made each time: steps are filled up all the same, as tests want.
    """

    def __init__(self, device: torch.device, calls_of: Callable[[Room], RoomCalls]) -> None:
        self._device, self._calls_of = device, calls_of
        self._sizes: dict[bool, tuple[int, ...]] = {}
        """Whether with prompts -> numbers of tokens."""
        self._replays: dict[Room, Run] = {}
        self._pool: Any = None

    @property
    def has_any(self) -> bool:
        """Whether steps of any size are recorded."""
        return any(self._sizes.values())

    def rooms_for(self, num_tokens: int, mixed: bool = False) -> Iterator[Room]:
        """The recorded steps that hold so many tokens, smallest first: of each ladder the next one,
        and larger mixed ones as long as filling up costs less than launching from Python."""
        sizes = self._sizes.get(mixed, ())
        for place in range(bisect_left(sizes, num_tokens), len(sizes)):
            yield Room(sizes[place], mixed)
            if not mixed or sizes[place] >= max(_CHEAP_TOKENS, 2 * num_tokens):
                return

    def replay(self, room: Room) -> None:
        """Queue a recorded step; its inputs lie in their places."""
        self._replays[room]()

    def capture(
        self, sizes: tuple[int, ...], mixed: tuple[int, ...], progress: Progress | None = None
    ) -> Captured:
        """Record steps of these sizes, in place of those that were; the inputs must be harmless.

        The largest comes first, so that all others find their memory in the pool that it leaves.
        """
        begun = time.perf_counter()
        self.clear()
        progress = progress or NullProgress()
        progress.start("recording steps")
        free = self._free_bytes()
        rooms = [Room(size, True) for size in reversed(mixed)]
        rooms += [Room(size, False) for size in reversed(sizes)]
        try:
            if self._device.type == "cuda":
                self._record(rooms)
            else:
                self._replays = {room: self._calls_of(room).step for room in rooms}
        except torch.OutOfMemoryError:
            self.clear()  # not after other errors: on a lost device a graph must not be destroyed
            raise
        finally:
            progress.finish()
        self._sizes = {False: sizes, True: mixed}
        num_bytes = max(0, free - self._free_bytes())
        return Captured(num_bytes, time.perf_counter() - begun, sizes, mixed)

    def clear(self) -> None:
        """Forget all; their memory goes back once none of them runs any more."""
        if self._device.type == "cuda" and self._replays:
            torch.cuda.synchronize(self._device)
        self._sizes, self._replays, self._pool = {}, {}, None

    def _record(self, rooms: list[Room]) -> None:
        # torch.cuda.graph() collects garbage before each graph, which takes longer than recording.
        gc.collect()
        stream = _recording_stream(self._device)
        with torch.cuda.stream(stream):
            for room in rooms:
                calls = self._calls_of(room)
                calls.prepare()
                stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    calls.step()
                except BaseException:
                    _recording_stream.cache_clear()  # who knows what state it is in
                    with suppress(RuntimeError):  # what went wrong first is what is told
                        graph.capture_end()
                    raise
                graph.capture_end()
                self._pool = self._pool or graph.pool()
                self._replays[room] = graph.replay
        torch.cuda.current_stream(self._device).wait_stream(stream)

    def _free_bytes(self) -> int:
        if self._device.type != "cuda":
            return 0
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]
