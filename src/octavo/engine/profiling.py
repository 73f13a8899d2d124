"""Where a step's time goes: named ranges around the engine's parts, and how busy the GPU is.

The ranges exist only while somebody profiles: `named_ranges` puts wrappers around methods of one
engine's objects and takes them off again, so that an engine that nobody profiles runs none of this.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from octavo import LLM
    from octavo.engine.core import EngineCore
    from octavo.engine.pipeline import Launch

PARTS = ("schedule", "launch", "build inputs", "replay", "attention", "mlp", "sample", "wait",
         "update", "output")  # fmt: skip
"""Names of the ranges, in the order of a step."""
WITHIN = dict.fromkeys(("build inputs", "replay", "attention", "mlp", "sample"), "launch")
"""Ranges that lie in another one. What is recorded and replayed has no layers of its own."""


_INPUT_METHODS = ("apply", "build", "describe", "upload")
_SAMPLE_METHODS = ("_draw", "_choose")


class _Place(NamedTuple):
    """A method that becomes a range."""

    owner: object
    attribute: str
    range: str


@contextmanager
def named_ranges(llm: LLM) -> Iterator[None]:
    """Ranges of `PARTS` in torch's profiler while the context lasts."""
    from torch.profiler import record_function

    core = llm._engine.engine.core
    with ExitStack() as stack:
        for place in _places(llm, core):
            stack.enter_context(patched(place.owner, place.attribute, _ranged(place)))
        launch = core._launch

        def launch_ranged(plan: Any) -> Callable[[], Any]:
            with record_function("launch"):
                wait = launch(plan)  # type: ignore[misc]

            def wait_ranged() -> Any:
                with record_function("wait"):
                    return wait()

            return wait_ranged

        stack.enter_context(patched(core, "_launch", launch_ranged))
        yield


def _places(llm: LLM, core: EngineCore) -> list[_Place]:
    """The methods, as far as this engine has them."""
    runner: Any = getattr(core._launch, "__self__", None)
    inputs = getattr(runner, "inputs", None)
    wanted = [
        _Place(core.scheduler, "schedule", "schedule"),
        _Place(core.scheduler, "update", "update"),
        _Place(llm._engine.engine.outputs, "process", "output"),
        *(_Place(inputs, method, "build inputs") for method in _INPUT_METHODS),
        *(_Place(runner, method, "sample") for method in _SAMPLE_METHODS),
        _Place(getattr(runner, "graphs", None), "replay", "replay"),
        _Place(getattr(runner, "_replay", None), "logits", "replay"),
    ]
    for layer in getattr(getattr(runner, "model", None), "layers", ()):
        wanted += [
            _Place(layer.attn, "_attend", "attention"),
            _Place(layer.mlp, "add_to", "mlp"),
            _Place(layer.mlp, "compute", "mlp"),
        ]
    return [
        place
        for place in wanted
        if hasattr(place.owner, place.attribute) and hasattr(place.owner, "__dict__")
    ]


def _ranged(place: _Place) -> Callable[..., Any]:
    from torch.profiler import record_function

    method = getattr(place.owner, place.attribute)

    @functools.wraps(method)
    def ranged(*args: Any, **kwargs: Any) -> Any:
        with record_function(place.range):
            return method(*args, **kwargs)

    return ranged


@contextmanager
def patched(owner: object, attribute: str, value: object) -> Iterator[None]:
    """An attribute of this one object is something else for a while."""
    own = getattr(owner, "__dict__", {})
    had, before = attribute in own, getattr(owner, attribute)
    setattr(owner, attribute, value)
    try:
        yield
    finally:
        if had:
            setattr(owner, attribute, before)
        else:
            delattr(owner, attribute)


# -- what was seen


class Interval(NamedTuple):
    """Something that ran, in nanoseconds of one clock."""

    begin_ns: int
    end_ns: int


def union_ns(intervals: Iterable[Interval]) -> int:
    """Time in which at least one of them ran."""
    total, until = 0, 0
    for begin, end in sorted(intervals):
        if end > until:
            total += end - max(begin, until)
            until = end
    return total


@dataclass(frozen=True, slots=True)
class Busy:
    """How much of the time the GPU ran something."""

    busy_s: float
    """Time in which at least one kernel or copy ran."""
    wall_s: float
    """From the first one's begin to the last one's end."""

    @property
    def share(self) -> float:
        """`busy_s` of `wall_s`; 0 where nothing ran."""
        return self.busy_s / self.wall_s if self.wall_s else 0.0

    @classmethod
    def of(cls, intervals: Iterable[Interval]) -> Busy:
        """Of what ran on the GPU."""
        found = list(intervals)
        if not found:
            return cls(0.0, 0.0)
        wall = max(i.end_ns for i in found) - min(i.begin_ns for i in found)
        return cls(1e-9 * union_ns(found), 1e-9 * wall)

    def __add__(self, other: Busy) -> Busy:
        return Busy(self.busy_s + other.busy_s, self.wall_s + other.wall_s)


@dataclass(slots=True)
class Observed:
    """What torch's profiler saw of some steps."""

    ranges_s: dict[str, float] = field(default_factory=dict)
    """Seconds in each named range, all together."""
    range_counts: dict[str, int] = field(default_factory=dict)
    kernels_s: dict[str, float] = field(default_factory=dict)
    """Seconds of each kernel and copy of the GPU, all together."""
    kernel_counts: dict[str, int] = field(default_factory=dict)
    busy: Busy = field(default_factory=lambda: Busy(0.0, 0.0))
    """Of the GPU; nothing without one."""


class Watch:
    """torch's profiler around some steps, and named ranges if they are wanted.

    ranges: whether the host's ranges are recorded too; the GPU's work always is, where there is
    one. One object watches once.
    """

    def __init__(self, llm: LLM, *, ranges: bool) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile

        gpu = torch.cuda.is_available()
        activities = [ProfilerActivity.CUDA] if gpu else []
        if ranges or not gpu:
            activities.append(ProfilerActivity.CPU)
        self._profile = profile(activities=activities, acc_events=True)
        self._ranges = named_ranges(llm) if ranges else None

    @staticmethod
    def warm_up() -> None:
        """Load what the first profile of a process loads, so that it does not hold up a step."""
        import torch
        from torch.profiler import profile, record_function

        with profile(), record_function("warm up"):
            if torch.cuda.is_available():
                torch.zeros(1, device="cuda").add_(1)
                torch.cuda.synchronize()

    def start(self) -> None:
        """Begin to watch."""
        if self._ranges is not None:
            self._ranges.__enter__()
        self._profile.start()

    def stop(self) -> Observed:
        """End, and tell. What is still running on the GPU is waited for."""
        self._profile.stop()
        if self._ranges is not None:
            self._ranges.__exit__(None, None, None)
        return _observed(self._profile.profiler.kineto_results.events())  # type: ignore[union-attr]

    def write(self, path: Path) -> None:
        """As a Chrome trace, for chrome://tracing or ui.perfetto.dev; gzipped if it is named so."""
        self._profile.export_chrome_trace(str(path))


def _observed(events: Iterable[Any]) -> Observed:
    found, ran = Observed(), list[Interval]()
    for event in events:
        name, seconds = event.name(), 1e-9 * event.duration_ns()
        if event.device_type().name == "CPU":
            if name in PARTS:
                found.ranges_s[name] = found.ranges_s.get(name, 0.0) + seconds
                found.range_counts[name] = found.range_counts.get(name, 0) + 1
        elif not event.is_user_annotation() and name not in PARTS:
            begin = event.start_ns()
            ran.append(Interval(begin, begin + event.duration_ns()))
            found.kernels_s[name] = found.kernels_s.get(name, 0.0) + seconds
            found.kernel_counts[name] = found.kernel_counts.get(name, 0) + 1
    found.busy = Busy.of(ran)
    return found


def launcher(llm: LLM) -> Launch:
    """The runner of an engine, to carry out plans that no scheduler made: launches one, and returns
    what waits for its result. At most two may be under way, while the engine has no requests, and
    every sequence that they bring has to be told to be finished again."""
    core = llm._engine.engine.core
    assert not core.live_request_ids, "the engine has requests of its own"
    return core.become_quiet()


class BusyWindows:
    """How busy the GPU is while an engine serves: every so many steps a few are watched.

    every: steps from one window's begin to the next one's; length: steps of a window.
    """

    def __init__(self, llm: LLM, *, every: int = 200, length: int = 20) -> None:
        assert 0 < length < every
        self._llm, self._every, self._length = llm, every, length
        self._watch: Watch | None = None
        self._num_steps = 0
        self.found: list[Busy] = []
        """Of each window in which the GPU ran something."""

    @property
    def total(self) -> Busy:
        """Of all windows."""
        return sum(self.found, Busy(0.0, 0.0))

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch while the engine serves in this context."""
        Watch.warm_up()
        before = self._llm.after_step
        self._llm.after_step = self._after_step
        try:
            yield
        finally:
            self._llm.after_step = before
            self._end()

    def _after_step(self) -> None:
        self._num_steps += 1
        place = self._num_steps % self._every
        if place == 0:
            self._watch = Watch(self._llm, ranges=False)
            self._watch.start()
        elif place == self._length:
            self._end()

    def _end(self) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            busy = watch.stop().busy
            if busy.wall_s:
                self.found.append(busy)
