"""benchmarks/predict.py: its workloads, what it measures, and the two sides that it compares."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from octavo import LLM
from octavo.lab.costs import FixedCosts
from octavo.lab.trace import TraceRequest


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    path = Path(__file__).parents[2] / "benchmarks" / "predict.py"
    spec = importlib.util.spec_from_file_location("benchmark_predict", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def llm(tiny_model_path: Path) -> Iterator[LLM]:
    with LLM(
        model=str(tiny_model_path), load_format="dummy", max_model_len=256, num_threads=1,
        num_gpu_blocks_override=128, max_num_seqs=8, max_num_batched_tokens=64,
    ) as engine:  # fmt: skip
        yield engine


def test_figures(script: ModuleType) -> None:
    """(arrival, first token, end, output tokens)."""
    times = [(0.0, 1.0, 3.0, 5), (2.0, 4.0, 10.0, 3), (5.0, 6.0, 6.0, 1)]
    found = script.Figures.of(times).values
    assert found[0] == pytest.approx(9 / 10)
    assert found[1] == pytest.approx(1e3 * (1 + 2 + 1) / 3)
    assert found[2] == pytest.approx(1e3 * (2 / 4 + 6 / 2) / 2)  # of one token there is none
    assert found[3] == pytest.approx(1e3 * (3 + 8 + 1) / 3)
    figures = [script.Figures((v, -v, v, v)) for v in (1.0, 5.0, 3.0)]
    assert script.Figures.median(figures).values == (3.0, -3.0, 3.0, 3.0)


def test_workloads_are_the_same_every_time(script: ModuleType) -> None:
    batch = script.batch_requests(32, 0.4, 0)
    assert batch == script.batch_requests(32, 0.4, 0) != script.batch_requests(32, 0.4, 1)
    assert {request.arrival_s for request in batch} == {0.0}
    poisson = script.poisson_requests(400, 0.4, 5.0, 0)
    arrivals = [request.arrival_s for request in poisson]
    assert arrivals == sorted(arrivals)
    assert 399 / arrivals[-1] == pytest.approx(5.0, rel=0.15)
    prefixes = script.prefix_requests(40, 0.4, 5.0, 0)
    assert len({(r.prefix, r.prefix_tokens) for r in prefixes}) == 4
    assert all(r.num_input > r.prefix_tokens >= 240 for r in prefixes)


def test_requests_come_when_they_should(script: ModuleType, llm: LLM) -> None:
    """The second while the first runs or has ended, the third after an idle while."""
    requests = [
        TraceRequest(num_input=20, num_output=30, arrival_s=0.0),
        TraceRequest(num_input=40, num_output=2, arrival_s=0.01, prefix="p", prefix_tokens=32),
        TraceRequest(num_input=40, num_output=2, arrival_s=0.5, prefix="p", prefix_tokens=32),
    ]
    before = llm.cache_stats().hit_tokens
    begin = time.monotonic()
    figures = script.serve(llm, requests, "seed")
    assert time.monotonic() - begin > 0.5
    assert figures.values[0] <= 34 / 0.5
    assert all(value > 0 for value in figures.values)
    assert llm.cache_stats().hit_tokens - before == 32
    assert llm.after_step is None


def test_the_simulator_is_given_the_engine(script: ModuleType, llm: LLM) -> None:
    config = script.sim_config(llm)
    assert (config.num_blocks, config.block_size, config.max_num_seqs) == (128, 16, 8)
    assert (config.max_num_batched_tokens, config.max_model_len) == (64, 256)
    assert config.enable_prefix_caching
    # four at once: 64 prompt tokens in the first step, then three tokens each
    requests = [TraceRequest(num_input=16, num_output=4, arrival_s=0.0)] * 4
    found = script.predict(requests, config, FixedCosts(step_s=0.1, token_s=0.001))
    steps = [0.1 + 0.064, *[0.1 + 0.004] * 3]
    ends = list(itertools.accumulate(steps))
    expected = (16 / ends[-1], 1e3 * ends[0], 1e3 * 0.104, 1e3 * ends[-1])
    assert found.values == pytest.approx(expected)
    text = "\n".join(script.table("batch", found, [found, found]))
    assert "+0.0%" in text and "mean TTFT, ms" in text
