"""Live engines that are recorded, and their records served again with other limits."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.errors import CapacityError
from octavo.lab.replay import replay
from octavo.lab.replay_costs import FittedCosts
from octavo.lab.replay_meter import Meter
from octavo.lab.replay_whatif import WhatIf, changed_limits, what_if
from octavo.lab.replay_workload import RecordedWorkload
from octavo.outputs import OutputKind
from octavo.record import EngineLimits, RecordReader

NUM_BLOCKS = 36
OPTIONS: dict[str, Any] = {
    "load_format": "dummy",
    "dtype": "float32",
    "max_model_len": 64,
    "block_size": 4,
    "num_gpu_blocks_override": NUM_BLOCKS,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 64,
    "num_threads": 1,
    "swap_space": 0.0005,
}
EXACT = {"ignore_eos": True, "temperature": 1.0}
Recorded = Callable[..., tuple[Path, Any]]
"""The fixture `recorded`: what an engine does, and options -> (its record, its memory report)."""


def mixed_requests(num: int = 16) -> tuple[list[Any], list[Any]]:
    """Greedy, several samples, best of several, beams; prompts that begin alike. Seeded."""
    rng = random.Random(5)
    common = [rng.randrange(250) for _ in range(20)]
    prompts, params = [], []
    for i in range(num):
        own = [rng.randrange(250) for _ in range(rng.randrange(1, 16))]
        prompts.append({"prompt_token_ids": common[: rng.randrange(2, 20)] + own})
        max_tokens = rng.randrange(4, 20)
        params.append(
            (
                SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
                SamplingParams(n=3, max_tokens=max_tokens, seed=i, **EXACT),
                SamplingParams(n=1, best_of=4, max_tokens=max_tokens, seed=i, **EXACT),
                BeamSearchParams(beam_width=3, max_tokens=max_tokens),
            )[i % 4]
        )
    return prompts, params


def live(folder: Path, file: Path | None, act: Callable[[LLM], None], **options: Any) -> Any:
    """Run an engine; its memory report."""
    with LLM(str(folder), record=None if file is None else str(file), **OPTIONS | options) as llm:
        act(llm)
        return llm.memory_report()


def everything(llm: LLM) -> None:
    """All that can be asked of an engine, some of it in the middle of a run."""
    prompts, params = mixed_requests()
    engine, block_bytes = llm._engine.engine, llm.memory_report().plan.bytes_per_block
    for i, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        engine.add(str(i), prompt, one, kind=OutputKind.FINAL_ONLY, priority=i % 3)
    for step in range(400):
        if step == 5:
            engine.abort("4")
            engine.abort("1", 1)
        if step == 9:
            pin = llm.pin_prefix(prompts[0])
        if step == 12:
            llm.resize_kv_cache(block_bytes * (NUM_BLOCKS - 6))
        if step == 20:
            llm.reset_prefix_cache()
            llm.resize_kv_cache(block_bytes * (NUM_BLOCKS + 4))
        if step == 25:
            llm.unpin_prefix(pin.pin_id)
            with pytest.raises(CapacityError):
                llm.resize_kv_cache(block_bytes * 10**9)
        if not engine.has_unfinished() and step > 25:
            break
        engine.step()
    stopping = SamplingParams(temperature=0, max_tokens=12, stop=[chr(c) for c in range(97, 123)])
    llm.generate(["a stop string", "another"], stopping, use_tqdm=False)
    llm.generate(prompts[:6], params[:6], use_tqdm=False)


def only_requests(llm: LLM) -> None:
    prompts, params = mixed_requests()
    llm.generate(prompts, params, use_tqdm=False)


def greedy_only(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    prompts = [{"prompt_token_ids": [i] * 20} for i in range(12)]
    llm.generate(prompts, params, use_tqdm=False)


def twice(llm: LLM) -> None:
    prompts, params = mixed_requests()
    llm.generate(prompts, params, use_tqdm=False)
    llm.generate(prompts[:6], params[:6], use_tqdm=False)


def simulated(file: Path, **changes: Any) -> tuple[WhatIf, RecordedWorkload, EngineLimits]:
    reader = RecordReader(file)
    workload, meter = RecordedWorkload(), Meter()
    assert replay(reader, (workload, meter)).is_identical
    limits = reader.header.limits
    changed = changed_limits(limits, changes)
    costs = FittedCosts(workload.steps)
    return what_if(workload, meter.figures(), limits, changed, costs), workload, changed
