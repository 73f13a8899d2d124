"""`octavo bench startup`: how long it takes from nothing to the first token, and where it goes.

Each start is a process of its own. A cold one finds no kernels compiled: Triton's cache and that of
octavo's C kernels are new folders; a warm one finds what the cold one left there. Files of the
model are in the system's page cache after the first start, as on a machine that restarts a server.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import octavo
from octavo.errors import InvalidRequestError, OctavoError

if TYPE_CHECKING:
    from octavo.config import EngineConfig

_MARK = "octavo-startup "
_PROMPT_LEN = 32
_SCRIPT = "from octavo.bench.startup import child; child()"


class StartupError(OctavoError):
    """A start failed: the message ends with what its process said."""


@dataclass(frozen=True, slots=True)
class Startup:
    """Seconds of one start. The parts but `compile_s` follow each other and add up to `total_s`."""

    cold: bool
    python_s: float
    """Until the interpreter runs the first line."""
    import_s: float
    """octavo, torch and what the engine needs of them."""
    load_s: float
    """The model's weights, on the device and packed."""
    capture_s: float
    """The largest step run once, and decode steps recorded; nothing on a CPU."""
    rest_s: float
    """All else of building the engine: sizing, the pool, the host tier, the tokenizer."""
    first_token_s: float
    """One request of 32 tokens, until its first token."""
    compile_s: float
    """Of the parts above, compiling kernels (or finding them compiled)."""
    num_compiled: int
    """Kernels that were compiled, and not found in the cache."""
    total_s: float
    """From the command to the first token."""


_PARTS = ("python_s", "import_s", "load_s", "capture_s", "rest_s", "first_token_s")


@dataclass(frozen=True, slots=True)
class StartupResult:
    """Medians are for reading; the runs are all here."""

    model: str
    device: str
    runs: list[Startup]

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain values."""
        return asdict(self)

    def median(self, name: str, *, cold: bool) -> float | None:
        """Of the cold or the warm runs; None without any."""
        values = [getattr(run, name) for run in self.runs if run.cold is cold]
        return statistics.median(values) if values else None

    def __str__(self) -> str:
        kinds = {kind: cold for kind, cold in (("cold", True), ("warm", False))
                 if any(run.cold is cold for run in self.runs)}  # fmt: skip
        counts = ", ".join(
            f"{sum(r.cold is cold for r in self.runs)} {kind}" for kind, cold in kinds.items()
        )
        lines = [
            f"{self.model} on {self.device}: {counts} starts, medians",
            "",
            f"{'seconds':22}" + "".join(f"{kind:>9}" for kind in kinds),
        ]
        for name in (*_PARTS, "total_s"):
            title = {"python_s": "python", "rest_s": "rest of the engine"}.get(name)
            title = title or name.removesuffix("_s").replace("_", " ")
            lines.append(f"{title:22}" + self._cells(name, kinds, "{:>9.2f}"))
        lines.append(f"{'  of it compiling':22}" + self._cells("compile_s", kinds, "{:>9.2f}"))
        lines.append(f"{'  kernels compiled':22}" + self._cells("num_compiled", kinds, "{:>9.0f}"))
        return "\n".join(lines)

    def _cells(self, name: str, kinds: dict[str, bool], text: str) -> str:
        values = (self.median(name, cold=cold) for cold in kinds.values())
        return "".join(text.format(value) for value in values if value is not None)


def run_startup(
    config: EngineConfig,
    *,
    num_cold: int = 1,
    num_warm: int = 1,
    tell: Callable[[str], None] = lambda _: None,
) -> StartupResult:
    """Start so often, cold first. Raises `StartupError` for a start that fails."""
    for name, value in (("num_cold", num_cold), ("num_warm", num_warm)):
        if value < 0:
            raise InvalidRequestError(
                f"--{name.replace('_', '-')} must be at least 0, got {value}", parameter=name
            )
    if num_cold + num_warm == 0:
        raise InvalidRequestError(
            "--num-cold and --num-warm are both 0: nothing to measure", parameter="num_cold"
        )
    runs: list[Startup] = []
    device = ""
    with tempfile.TemporaryDirectory(prefix="octavo-startup-") as folder:
        for number in range(num_cold):
            tell(f"cold start {number + 1} of {num_cold}")
            cache = os.path.join(folder, f"cold-{number}")
            run, device = _start(config, cache, cold=True)
            runs.append(run)
        cache = os.path.join(folder, f"cold-{max(0, num_cold - 1)}")
        if not num_cold:
            tell("filling the caches")
            _start(config, cache, cold=True)
        for number in range(num_warm):
            tell(f"warm start {number + 1} of {num_warm}")
            run, device = _start(config, cache, cold=False)
            runs.append(run)
    return StartupResult(config.model, device, runs)


def _start(config: EngineConfig, cache: str, *, cold: bool) -> tuple[Startup, str]:
    """One start in a new process, with its compilers' caches in a folder."""
    values = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    environment = dict(os.environ, TRITON_CACHE_DIR=os.path.join(cache, "triton"))
    package = str(Path(octavo.__file__).parents[1])  # this very octavo
    script = f"import sys; sys.path.insert(0, {package!r}); " + _SCRIPT
    begin = time.time()
    run = subprocess.run(
        [sys.executable, "-c", script, cache],
        input=json.dumps(values),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    found = [line for line in run.stdout.splitlines() if line.startswith(_MARK)]
    if run.returncode or not found:
        said = run.stderr.strip().splitlines()[-1:] or [f"status {run.returncode}"]
        raise StartupError(f"a start of {config.model} failed: {said[0]}")
    told = json.loads(found[-1].removeprefix(_MARK))
    device = told.pop("device")
    python_s = told.pop("began") - begin
    return Startup(cold, python_s, **told, total_s=told_end(told, python_s)), device


def told_end(told: dict[str, Any], python_s: float) -> float:
    """Seconds from the command to the first token: the sum of the parts."""
    return python_s + float(sum(told[name] for name in _PARTS if name != "python_s"))


def child() -> None:
    """The process that starts: configuration as JSON on stdin, its times as JSON on stdout."""
    began = time.time()
    values = json.load(sys.stdin)
    try:
        told = _times(sys.argv[1], values)
    except OctavoError as error:
        sys.exit(" ".join(str(error).split()))
    print(_MARK + json.dumps({"began": began, **told}), flush=True)
    os._exit(0)  # what ends here took no part in starting


def _times(cache: str, values: dict[str, Any]) -> dict[str, Any]:
    """Start, in this process, and measure."""
    begin = time.perf_counter()
    from octavo import LLM, SamplingParams
    from octavo.config import EngineConfig
    from octavo.engine.kernels import device_name, pick_device
    from octavo.engine.startup_clock import StartupClock

    clock = StartupClock(cache)
    imported = time.perf_counter()
    config = EngineConfig(**values)
    with clock.running():
        llm = LLM(config=config)
        built = time.perf_counter()
        ids = [7 + i for i in range(_PROMPT_LEN)]
        once = SamplingParams(temperature=0, max_tokens=1, detokenize=False, ignore_eos=True)
        llm.generate([ids], once, use_tqdm=False)
        answered = time.perf_counter()
    return {
        "device": device_name(pick_device(config.device)),
        "import_s": imported - begin,
        "load_s": clock.load_s,
        "capture_s": clock.capture_s,
        "rest_s": built - imported - clock.load_s - clock.capture_s,
        "first_token_s": answered - built,
        "compile_s": clock.compile_s,
        "num_compiled": clock.num_compiled,
    }
