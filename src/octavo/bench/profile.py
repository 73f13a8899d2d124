"""`octavo profile`: some steps of a workload as a trace, and where their time went."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.bench.workload import Workload
from octavo.engine.profiling import PARTS, WITHIN, Observed, Watch
from octavo.errors import ConfigError, InvalidRequestError
from octavo.request import SamplingParams

if TYPE_CHECKING:
    from octavo import LLM

_MAX_KERNELS = 12
_NAME_WIDTH = 60


class _EnoughError(Exception):
    """All steps were seen: the rest of the workload is not run."""


@dataclass(frozen=True, slots=True)
class ProfileResult:
    """What the watched steps took."""

    workload: str
    num_skipped: int
    """Steps before the first one that was watched."""
    num_steps: int
    wall_s: float
    """From the end of the step before the first to the end of the last."""
    seen: Observed
    trace: str
    """The file."""

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        values = asdict(self)
        values["gpu_busy_share"] = self.seen.busy.share if self.seen.busy.wall_s else None
        return values

    def __str__(self) -> str:
        lines = [
            f"{self.workload}",
            f"steps {self.num_skipped + 1:,} to {self.num_skipped + self.num_steps:,}: "
            f"{1e3 * self.wall_s / self.num_steps:,.3f} ms a step, being watched",
            "",
            f"{'host':24}{'ms a step':>12}{'share':>8}{'times':>9}",
        ]
        rest = self.wall_s
        for name in PARTS:
            if name not in self.seen.ranges_s:
                continue
            seconds, inside = self.seen.ranges_s[name], name in WITHIN
            rest -= 0.0 if inside else seconds
            lines.append(self._line("  " * inside + name, seconds, self.seen.range_counts[name]))
        lines.append(self._line("else", max(0.0, rest), None))
        return "\n".join([*lines, *self._gpu_lines(), "", f"trace: {self.trace}"])

    def _line(self, title: str, seconds: float, times: int | None) -> str:
        count = "" if times is None else f"{times:,}"
        return (
            f"{title:24}{1e3 * seconds / self.num_steps:>12,.3f}{seconds / self.wall_s:>8.1%}"
            f"{count:>9}"
        )

    def _gpu_lines(self) -> list[str]:
        busy = self.seen.busy
        if not busy.wall_s:
            return []
        lines = [
            "",
            f"GPU busy {busy.share:.1%} of the time from its first kernel to its last",
            f"{'kernel':{_NAME_WIDTH}}{'ms a step':>12}{'share':>8}{'times':>9}",
        ]
        by_time = sorted(self.seen.kernels_s.items(), key=lambda item: -item[1])
        for name, seconds in by_time[:_MAX_KERNELS]:
            short = name if len(name) < _NAME_WIDTH else name[: _NAME_WIDTH - 2] + "…"
            lines.append(
                f"{short:{_NAME_WIDTH}}{1e3 * seconds / self.num_steps:>12,.3f}"
                f"{seconds / busy.busy_s:>8.1%}{self.seen.kernel_counts[name]:>9,}"
            )
        others = by_time[_MAX_KERNELS:]
        if others:
            seconds = sum(s for _, s in others)
            lines.append(
                f"{f'{len(others)} others':{_NAME_WIDTH}}{1e3 * seconds / self.num_steps:>12,.3f}"
                f"{seconds / busy.busy_s:>8.1%}"
            )
        return lines


def run_profile(
    llm: LLM,
    workload: Workload,
    params: SamplingParams,
    out: Path,
    *,
    num_steps: int,
    num_skipped: int,
) -> ProfileResult:
    """Serve a workload until `num_steps` steps after the first `num_skipped` ones were watched, and
    write their trace.

    params: sampling; lengths are the workload's, exactly. A workload that ends earlier is watched
    to its end. Raises `InvalidRequestError` if it ends before the first, `ConfigError` if the file
    cannot be written.
    """
    for name, value, least in (("num_steps", num_steps, 1), ("num_skipped", num_skipped, 0)):
        if value < least:
            flag = name.replace("_", "-")
            raise InvalidRequestError(
                f"--{flag} must be at least {least}, got {value}", parameter=name
            )
    watched = _Watched(Watch(llm, ranges=True), num_steps, num_skipped)
    Watch.warm_up()
    each = [
        SamplingParams.from_dict({**asdict(params), "max_tokens": s.output_len, "ignore_eos": True})
        for s in workload.samples
    ]
    before = llm.after_step
    llm.after_step = watched.after_step
    try:
        watched.begin_if_due()
        llm.generate([s.prompt_token_ids for s in workload.samples], each, use_tqdm=False)
    except _EnoughError:
        pass
    finally:
        llm.after_step = before
        watched.end()
    if watched.seen is None:
        raise InvalidRequestError(
            f"the workload has {watched.num_ended} steps, and --num-skipped is {num_skipped}: "
            "lower it, or take longer outputs",
            parameter="num_skipped",
        )
    try:
        watched.watch.write(out)
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"cannot write {out}: {error}; name another file with --out") from error
    return ProfileResult(
        workload.description,
        num_skipped,
        watched.num_ended - num_skipped,
        watched.wall_s,
        watched.seen,
        str(out),
    )


class _Watched:
    """Counts steps, and watches those that are wanted."""

    def __init__(self, watch: Watch, num_steps: int, num_skipped: int) -> None:
        self.watch = watch
        self._first, self._last = num_skipped, num_skipped + num_steps
        self._begun_s: float | None = None
        self.num_ended = 0
        self.wall_s = 0.0
        self.seen: Observed | None = None

    def begin_if_due(self) -> None:
        """Begin to watch, if so many steps have ended."""
        if self.num_ended == self._first:
            self.watch.start()
            self._begun_s = time.perf_counter()

    def after_step(self) -> None:
        """A step has ended."""
        self.num_ended += 1
        if self.num_ended == self._last:
            self.end()
            raise _EnoughError
        self.begin_if_due()

    def end(self) -> None:
        """No more steps."""
        if self._begun_s is not None and self.seen is None:
            self.wall_s = time.perf_counter() - self._begun_s
            self.seen = self.watch.stop()
