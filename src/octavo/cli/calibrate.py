"""`octavo lab calibrate`: how long steps take on this machine, for the lab's commands."""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.cli.flags import EngineFlags, flags, parse, refuse_without_effect
from octavo.cli.start import note, start_engine
from octavo.config import EngineConfig
from octavo.errors import ConfigError

if TYPE_CHECKING:
    from octavo import LLM
    from octavo.bench.calibrate import Calibration

DEFAULT_OUT = Path("calibration.json")


@flags
@dataclass(frozen=True, kw_only=True)
class Calibrate:
    """Measure how long steps take with this model on this machine: prompts by chunk and context,
    decodes by batch and context, mixtures, copies; and requests as they are served. What is written
    is what --costs of the other commands reads.

    Leave the machine alone meanwhile: what else runs is measured too.
    """

    out: Path = DEFAULT_OUT
    """The file to write."""
    seconds: float = 75.0
    """Measure for about so long, after the model is loaded. A warm-up and one round are the least,
    however long they take; how long it will be is said after the warm-up."""
    rounds: int = 7
    """Measure everything at most so many times; medians are kept."""
    json: bool = False
    """End with one line of JSON: the file's contents but for the table of what was measured."""
    engine: EngineFlags


def main(prog: str, argv: Sequence[str]) -> int:
    """Run the command."""
    args = parse(Calibrate, prog, argv)
    config = args.engine.config()
    _check(args, config)
    from octavo.bench.calibrate import calibrate, engine_config

    with start_engine(engine_config(config)) as llm:
        found = calibrate(
            llm,
            max_s=args.seconds,
            max_rounds=args.rounds,
            tell=lambda text: note(f"{text}\033[K", end="\r"),
            announce=lambda text: note(f"{text}\033[K"),
        )
        note("\033[K", end="\r")
        values = contents(llm, found)
    try:
        args.out.write_text(as_json(values), encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"cannot write {args.out}: {error.strerror or error}; name another file with --out"
        ) from error
    print(summary(values))
    print(f"written to {args.out}; --costs {args.out} reads it")
    if args.json:
        print(json.dumps({key: value for key, value in values.items() if key != "rows"}))
    return 0


def contents(llm: LLM, found: Calibration) -> dict[str, Any]:
    """What the file says. Raises `ConfigError` for an engine too small to be told from noise."""
    from octavo.lab.calibrated import calibration

    config = llm.config
    assert config.num_threads is not None, "resolved with the model"
    ledger = llm.memory_report().ledger
    return calibration(
        [dataclasses.asdict(row) for row in found.rows()],
        model=config.model,
        dtype=config.dtype,
        block_size=config.block_size,
        num_threads=config.num_threads,
        machine=_machine(),
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        block_bytes=ledger.bytes_per_block,
        max_num_seqs=config.limits().max_num_seqs,
        max_num_batched_tokens=config.limits().max_num_batched_tokens,
        num_rounds=found.num_rounds,
    )


def summary(values: dict[str, Any]) -> str:
    """For people: what steps take, and how well that tells what was measured."""
    from octavo.lab.calibrated import CalibratedCosts
    from octavo.lab.costs import StepShape

    costs = CalibratedCosts.of(values)
    lines = [
        f"{costs.name}; {values['num_threads']} threads, {values['num_rounds']} rounds",
        "",
        "decode step, ms, by batch and context",
    ]
    contexts = (64, 256, 1024)
    lines.append(f"{'':>8}" + "".join(f"{context:>10,}" for context in contexts))
    for batch in (1, 4, 16, 64, 256):
        if batch <= values["max_num_seqs"]:
            shapes = [StepShape(0, 0, batch, batch * context, batch) for context in contexts]
            times = "".join(f"{1e3 * costs.step_s(shape):>10,.1f}" for shape in shapes)
            lines.append(f"{batch:>8}{times}")
    lines += ["", "prompt tokens/s by chunk: " + ", ".join(_speeds(costs, values))]
    found = costs.constants
    size = values["block_bytes"]
    for name, seconds in (
        ("the pool", found.pool_copy_s),
        ("and from the host", found.host_copy_s),
    ):
        where = "inside" if name == "the pool" else "to"
        if seconds:
            lines.append(
                f"a block copied {where} {name}: {1e6 * seconds:,.0f} us, "
                f"{size / seconds / 1e9:,.1f} GB/s"
            )
    lines += ["", f"{'':12}{'rows':>6}{'mean error':>12}{'worst':>8}{'in all':>8}{'noise':>8}"]
    for row in values["residuals"]:
        noise = [r["spread"] for r in values["rows"] if r["kind"] == row["kind"]]
        lines.append(
            f"{row['kind']:12}{row['num_rows']:>6}{row['mean']:>12.1%}{row['worst']:>8.0%}"
            f"{row['total']:>+8.1%}{sum(noise) / len(noise):>8.0%}"
        )
    return "\n".join(lines)


def _speeds(costs: Any, values: dict[str, Any]) -> list[str]:
    from octavo.lab.costs import StepShape

    found = []
    for chunk in (16, 64, 128, 256, 512, 1024, 2048):
        if chunk <= values["max_num_batched_tokens"]:
            shape = StepShape(chunk, chunk * (chunk + 1) // 2, 0, 0, 1, num_prompts=1)
            found.append(f"{chunk}: {chunk / costs.step_s(shape):,.0f}")
    return found


def _machine() -> dict[str, Any]:
    """What is measured, as far as a reader of the file wants to know."""
    from octavo.engine.environment import environment

    facts = environment()
    named = ("octavo", "python", "platform", "torch", "cpu", "cpu kernels", "memory")
    return {name: facts[name] for name in named} | {"load": os.getloadavg()[0]}


def as_json(values: dict[str, Any]) -> str:
    """The file: one row a line, so that people can read it and a difference shows what changed."""
    rows = ",\n  ".join(json.dumps(_short(row)) for row in values["rows"])
    head = json.dumps({key: value for key, value in values.items() if key != "rows"}, indent=1)
    return head.removesuffix("\n}") + ',\n "rows": [\n  ' + rows + "\n ]\n}\n"


def _short(row: dict[str, Any]) -> dict[str, Any]:
    """Six digits are more than was measured."""
    return {k: float(f"{v:.6g}") if isinstance(v, float) else v for k, v in row.items()}


def _check(args: Calibrate, config: EngineConfig) -> None:
    """Refuse flags that would have no effect, and a file that cannot be written, before minutes of
    work."""
    refuse_without_effect(
        config,
        {
            "kv_cache_memory_bytes": "the pool that is measured has a size of its own",
            "kv_policy": "steps take as long under every policy",
            "preemption_victim": "nobody is preempted",
            "scheduling_policy": "all requests are of one priority",
            "kv_disk_dir": "what is measured is the pool and host memory",
        },
    )
    folder = args.out.resolve().parent
    if not folder.is_dir() or args.out.is_dir():
        raise ConfigError(f"cannot write {args.out}: no such folder; name another file with --out")
