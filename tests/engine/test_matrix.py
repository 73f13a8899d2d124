"""The same tokens under every combination: kind of request x prefix cache x preemption x chunking.

One crowd of all kinds of requests (greedy, sampled, n, best_of, beams; short and long; prompts that
begin alike) runs together in every configuration. Each request's tokens must be those of its lonely
run in a roomy engine without prefix cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from octavo import LLM, BeamSearchParams, EngineEvent, SamplingParams
from octavo.engine.report import MemoryReport
from octavo.outputs import OutputKind

pytestmark = pytest.mark.usefixtures("one_torch_thread")

Params = SamplingParams | BeamSearchParams
COMMON = [65 + i % 26 for i in range(22)]
"""What several prompts begin with: five blocks of 4 and a half."""


def crowd() -> list[tuple[list[int], Params]]:
    """(prompt, parameters) of every request."""
    greedy = {"temperature": 0.0, "ignore_eos": True}
    hot = {"temperature": 1.3, "ignore_eos": True}
    return [
        (COMMON, SamplingParams(**greedy, max_tokens=17)),
        (COMMON, SamplingParams(**greedy, max_tokens=9)),
        (COMMON[:20], SamplingParams(**hot, seed=3, max_tokens=15)),
        ([*COMMON, 40, 41, 42], SamplingParams(**hot, seed=5, n=3, max_tokens=12)),
        ([*COMMON[:21], 99], SamplingParams(**hot, seed=6, n=2, best_of=4, max_tokens=8)),
        (COMMON[:9], BeamSearchParams(beam_width=3, max_tokens=11, ignore_eos=True)),
        (COMMON + [7] * 9, BeamSearchParams(beam_width=2, max_tokens=14)),
        ([5], SamplingParams(**greedy, max_tokens=21, repetition_penalty=1.4)),
        ([9, 8, 7, 6], SamplingParams(**hot, seed=9, max_tokens=6, top_k=20, logprobs=2)),
        (COMMON[:16], SamplingParams(**greedy, max_tokens=5, prompt_logprobs=1)),
        ([200 - i for i in range(31)], SamplingParams(**hot, seed=1, n=2, max_tokens=10)),
    ]


class Run(NamedTuple):
    tokens: list[list[list[int]]]
    """Of every completion of every request."""
    report: MemoryReport
    events: list[EngineEvent]


def run(
    model: Path,
    requests: list[tuple[list[int], Params]],
    priorities: Iterable[int] = itertools.repeat(0),
    **options: Any,
) -> Run:
    """All requests in one engine at one time."""
    llm = LLM(
        str(model), dtype="float32", max_model_len=80, block_size=4, skip_tokenizer_init=True,
        **options,
    )  # fmt: skip
    with llm:
        engine = llm._engine.engine
        for i, ((prompt, params), rank) in enumerate(zip(requests, priorities, strict=False)):
            engine.add(f"r{i}", prompt, params, kind=OutputKind.FINAL_ONLY, priority=rank)
        found = {}
        while engine.has_unfinished():
            for output in engine.step():
                found[output.request_id] = [c.token_ids for c in output.outputs]
            engine.core.kv.check_integrity()
        report = llm.memory_report()
        assert report.ledger.num_physical_blocks == 0
        return Run([found[f"r{i}"] for i in range(len(requests))], report, llm.events())


@pytest.fixture(scope="module")
def lonely(tiny_weights_path: Path) -> list[list[list[int]]]:
    tokens = []
    for request in crowd():
        tokens += run(tiny_weights_path, [request], enable_prefix_caching=False).tokens
    return tokens


@pytest.mark.parametrize(
    ("caching", "mode", "budget", "num_blocks"),
    list(
        itertools.product(
            [True, False], ["recompute", "swap", "auto"], [512, 24], [200, 44]
        )
    ),
)  # fmt: skip
def test_every_combination(
    tiny_weights_path: Path,
    lonely: list[list[list[int]]],
    caching: bool,
    mode: str,
    budget: int,
    num_blocks: int,
) -> None:
    tokens, report, _ = run(
        tiny_weights_path,
        crowd(),
        enable_prefix_caching=caching,
        preemption_mode=mode,
        max_num_batched_tokens=budget,
        max_num_seqs=24,
        num_gpu_blocks_override=num_blocks,
    )
    assert tokens == lonely
    is_small = num_blocks == 44
    assert bool(report.num_preemptions) == is_small, report.num_preemptions
    assert bool(report.cache.hit_tokens) == caching
    moved = {mode: sums.tokens_moved for mode, sums in report.pressure.by_mode.items()}
    if is_small and mode != "auto":
        assert set(moved) == {mode} and bool(moved[mode]) == (mode == "swap"), moved


@pytest.mark.parametrize("victim", ["last-come", "lowest-cost", "priority"])
@pytest.mark.parametrize("swap_space", [0.0, 1e-5, 0.01])
def test_victims_and_scarce_host_memory(
    tiny_weights_path: Path, lonely: list[list[list[int]]], victim: str, swap_space: float
) -> None:
    """1e-5 GiB is a few blocks: some victims are swapped, others must be recomputed."""
    ranks = [(5 * i) % 11 for i in range(11)] if victim == "priority" else [0] * 11
    tokens, report, events = run(
        tiny_weights_path, crowd(), ranks, preemption_victim=victim, swap_space=swap_space,
        preemption_mode="auto", num_gpu_blocks_override=44, max_num_seqs=24,
    )  # fmt: skip
    assert tokens == lonely
    assert report.num_preemptions
    if victim == "priority":
        chosen = {e.request_id for e in events if "priority " in e.why}
        assert len(chosen) > 1, events
