"""Runs engines side by side on one machine, in turns, and tells how they relate.

    python benchmarks/peers/compare.py [--rounds 3] [--json FILE] [--max-wait 300] \
        NAME=COMMAND NAME=COMMAND ... [-- ARGUMENTS FOR EVERY COMMAND]

A command is a `run_*.py` in its own environment. A round runs each once, in the order given;
ratios are those of the first engine to each other one within a round, so that what slows the
machine for a while slows both. Before each run it waits until the machine is quiet; after it, it
tells what share of all CPUs other processes took meanwhile. Linux, no packages.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

QUIET_PCT = 5.0
"""A machine is quiet when other processes take less than this share of all its CPUs."""
WATCH_S = 2.0
COLUMNS = {
    "out_tok_s": "out tok/s",
    "total_tok_s": "all tok/s",
    "single_decode_tok_s": "single tok/s",
    "single_ttft_ms": "TTFT ms",
    "req_s": "requests/s",
    "kv_mib": "KV MiB",
    "startup_s": "start s",
    "peak_rss_mib": "RSS MiB",
}
"""What a script may measure; columns that none of them has are not shown."""
RATIOS = {
    "out_tok_s": "out tok/s",
    "single_decode_tok_s": "single decode tok/s",
    "req_s": "requests/s",
    "kv_mib": "KV memory",
}


@dataclass(frozen=True)
class Clock:
    """CPU seconds so far: of the whole machine, and of what this process ran and waited for."""

    wall: float
    busy: float
    stolen: float
    own: float

    @classmethod
    def now(cls) -> Clock:
        """Read it."""
        line = Path("/proc/stat").read_text().split("\n", 1)[0]
        user, nice, system, _, _, irq, soft_irq, stolen = map(int, line.split()[1:9])
        hz = os.sysconf("SC_CLK_TCK")
        used = [resource.getrusage(w) for w in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
        return cls(
            wall=time.monotonic(),
            busy=(user + nice + system + irq + soft_irq) / hz,
            stolen=stolen / hz,
            own=sum(usage.ru_utime + usage.ru_stime for usage in used),
        )

    def others_pct(self, since: Clock) -> float:
        """Share of all CPUs that other processes took since then."""
        others = (self.busy - since.busy) - (self.own - since.own)
        return self._share(max(0.0, others), since)

    def stolen_pct(self, since: Clock) -> float:
        """Share of all CPUs that the host of a virtual machine kept since then."""
        return self._share(self.stolen - since.stolen, since)

    def _share(self, seconds: float, since: Clock) -> float:
        return round(100 * seconds / ((self.wall - since.wall) * (os.cpu_count() or 1)), 1)


@dataclass(frozen=True)
class Run:
    """One engine in one round."""

    engine: str
    round: int
    waited_s: float
    quiet: bool
    """Whether the machine was quiet when it began."""
    others_pct: float
    stolen_pct: float
    result: dict[str, Any] | None
    """What the script printed; None when it failed."""
    error: str | None


def wait_until_quiet(max_wait_s: float) -> tuple[float, bool]:
    """Seconds waited, and whether it helped."""
    begin = time.monotonic()
    while True:
        before = Clock.now()
        time.sleep(WATCH_S)
        quiet = Clock.now().others_pct(before) < QUIET_PCT
        waited_s = time.monotonic() - begin
        if quiet or waited_s >= max_wait_s:
            return round(waited_s, 1), quiet


def run(engine: str, command: Sequence[str], number: int, max_wait_s: float) -> Run:
    """Wait, run, read the last line."""
    waited_s, quiet = wait_until_quiet(max_wait_s)
    before = Clock.now()
    result, error = None, None
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        result = last_json(done.stdout)
        if done.returncode or result is None:
            lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
            result, error = None, f"exit code {done.returncode}: {' | '.join(lines[-3:])}"
    except OSError as failure:
        error = str(failure)
    after = Clock.now()
    return Run(
        engine=engine,
        round=number,
        waited_s=waited_s,
        quiet=quiet,
        others_pct=after.others_pct(before),
        stolen_pct=after.stolen_pct(before),
        result=result,
        error=error,
    )


def last_json(text: str) -> dict[str, Any] | None:
    """The last line that is a result; engines may say more after it."""
    for line in reversed(text.splitlines()):
        if line.startswith('{"engine"'):
            value: dict[str, Any] = json.loads(line)
            return value
    return None


def ratios(
    runs: Sequence[Run], first: str, other: str, metric: str, max_others_pct: float = 100
) -> list[float]:
    """first / other, of each round in which both ran with so little beside them."""
    values: dict[tuple[str, int], float] = {
        (r.engine, r.round): r.result[metric]
        for r in runs
        if r.result is not None and metric in r.result and r.others_pct <= max_others_pct
    }
    rounds = sorted({r.round for r in runs})
    pairs = [(values.get((first, n)), values.get((other, n))) for n in rounds]
    return [round(a / b, 3) for a, b in pairs if a and b]


def summary(runs: Sequence[Run], names: Sequence[str]) -> dict[str, Any]:
    """Each engine by its medians, and the first one's ratios to the others."""
    ratios_to = {
        name: {
            metric: {
                "all": spread(ratios(runs, names[0], name, metric)),
                "quiet": spread(ratios(runs, names[0], name, metric, QUIET_PCT)),
            }
            for metric in RATIOS
        }
        for name in names[1:]
    }
    engines = {name: medians(runs, names[0], name) for name in names}
    return {"engines": engines, "ratios": {"of": names[0], "to": ratios_to}}


def medians(runs: Sequence[Run], first: str, name: str) -> dict[str, Any]:
    """One engine's row."""
    mine = [r for r in runs if r.engine == name]
    results = [r.result for r in mine if r.result is not None]
    row = {m: _median([r[m] for r in results if m in r]) for m in COLUMNS}
    return row | {
        "version": results[0]["version"] if results else None,
        "num_ok": sum(bool(r["outputs_ok"]) for r in results),
        "num_runs": len(mine),
        "max_others_pct": max((r.others_pct for r in mine), default=None),
        "same_first_ids": agreement(runs, first, name),
    }


def _median(values: list[float]) -> float | None:
    return statistics.median(values) if values else None


def spread(values: list[float]) -> dict[str, Any] | None:
    """Median, extremes and all of them."""
    if not values:
        return None
    median = round(statistics.median(values), 3)
    return {"median": median, "min": min(values), "max": max(values), "rounds": values}


def agreement(runs: Sequence[Run], first: str, other: str) -> float | None:
    """Share of requests that begin with the same token in both engines' first results.

    Far from 1, they do not run the same model; a little below, bf16 tips near ties. Of beams it is
    the share whose best beams are equal as a whole.
    """
    mine, theirs = first_ids(runs, first), first_ids(runs, other)
    if not mine or len(mine) != len(theirs):
        return None
    return round(sum(a == b for a, b in zip(mine, theirs, strict=True)) / len(mine), 3)


def first_ids(runs: Sequence[Run], engine: str) -> list[Any]:
    """Of the engine's first run that has a result."""
    found: list[list[Any]] = [
        r.result["first_ids"] for r in runs if r.engine == engine and r.result
    ]
    return found[0] if found else []


def tables(found: dict[str, Any], names: Sequence[str]) -> str:
    """For people."""
    width = max(len(name) for name in names) + 2
    rows = [found["engines"][name] for name in names]
    measured = {m: label for m, label in COLUMNS.items() if any(row[m] is not None for row in rows)}
    columns = measured | {"max_others_pct": "others %", "same_first_ids": "same 1st"}
    lines = [" " * width + "".join(f"{head:>14}" for head in [*columns.values(), "ok"])]
    for name in names:
        row = found["engines"][name]
        cells = [*(_cell(row[key]) for key in columns), f"{row['num_ok']}/{row['num_runs']}"]
        lines.append(f"{name:{width}}" + "".join(f"{cell:>14}" for cell in cells))
    for metric, label in RATIOS.items():
        if metric not in measured:
            continue
        if names[1:]:
            lines += ["", f"{names[0]} / other, {label}: median (min to max) of the rounds"]
            lines += [f"{'':{width}}{'all':24}others below {QUIET_PCT:g} % in both"]
        for name in names[1:]:
            of_rounds = found["ratios"]["to"][name][metric]
            cells = [_spread_cell(of_rounds[which]) for which in ("all", "quiet")]
            lines.append(f"{name:{width}}{cells[0]:24}{cells[1]}")
    return "\n".join(lines)


def _spread_cell(row: dict[str, Any] | None) -> str:
    return f"{row['median']:.2f} ({row['min']:.2f} to {row['max']:.2f})" if row else "-"


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:,.2f}" if value < 10 else f"{value:,.1f}"


def machine() -> dict[str, Any]:
    """What it ran on."""
    info = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.split(":", 1)[1].strip() for line in info if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.machine(),
        "num_cpus": os.cpu_count(),
        "kernel": platform.release(),
    }


def parse(argv: list[str]) -> tuple[argparse.Namespace, dict[str, list[str]]]:
    """Options, and each engine's command with the common arguments behind it."""
    split = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engines", nargs="+", metavar="NAME=COMMAND")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all that was measured")
    parser.add_argument(
        "--max-wait", type=float, default=300, metavar="S", help="longest wait for quiet, each run"
    )
    args = parser.parse_args(argv[:split])
    commands = {}
    for engine in args.engines:
        name, equals, command = engine.partition("=")
        if not (name and equals and command) or name in commands:
            parser.error(f"{engine!r} is not NAME=COMMAND, or is there twice")
        commands[name] = shlex.split(command) + argv[split + 1 :]
    return args, commands


def main() -> int:
    """Run the rounds; 1 if any run failed or gave wrong outputs."""
    args, commands = parse(sys.argv[1:])
    runs: list[Run] = []
    for number in range(1, args.rounds + 1):
        for name, command in commands.items():
            runs.append(run(name, command, number, args.max_wait))
            print(describe(runs[-1]), file=sys.stderr, flush=True)
            if args.json:  # after each run: what was measured stays when a later one hangs
                args.json.write_text(json.dumps(report(commands, runs), indent=1) + "\n", "utf-8")
    facts, names = machine(), list(commands)
    print(f"\n{facts['cpu']}, {facts['num_cpus']} CPUs; medians of {args.rounds} rounds\n")
    print(tables(summary(runs, names), names))
    return int(any(r.result is None or not r.result["outputs_ok"] for r in runs))


def report(commands: dict[str, list[str]], runs: Sequence[Run]) -> dict[str, Any]:
    """Everything, for `--json`."""
    return {
        "machine": machine(),
        "commands": {name: shlex.join(command) for name, command in commands.items()},
        "runs": [asdict(r) for r in runs],
        "summary": summary(runs, list(commands)),
    }


def describe(one: Run) -> str:
    """One line."""
    start = f"round {one.round} {one.engine}: waited {one.waited_s} s"
    if not one.quiet:
        start += ", never quiet"
    start += f"; others {one.others_pct} %, stolen {one.stolen_pct} %; "
    if one.result is None:
        return start + f"failed, {one.error}"
    wrong = "" if one.result["outputs_ok"] else "; WRONG OUTPUT LENGTHS"
    measured = {m: label for m, label in COLUMNS.items() if m in one.result}
    return start + ", ".join(f"{one.result[m]} {label}" for m, label in measured.items()) + wrong


if __name__ == "__main__":
    sys.exit(main())
