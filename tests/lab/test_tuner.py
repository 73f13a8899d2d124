"""The block size tuner on workloads whose best size is known."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from octavo.errors import CapacityError, ConfigError
from octavo.lab.capacity import Placement
from octavo.lab.config import SimConfig
from octavo.lab.costs import FixedCosts, StepCosts, StepShape
from octavo.lab.slices import Slice
from octavo.lab.trace import TraceRequest
from octavo.lab.tune_report import report, verdict
from octavo.lab.tuner import Place, ResizedCosts, TuneOptions, Tuning, affordable, tune

STEADY = FixedCosts(0.01, 0.0, 0.0)
CONFIG = SimConfig(num_blocks=1, max_num_seqs=256, max_num_batched_tokens=2048, watermark=0.0)


def part_of(requests: list[TraceRequest], block_tokens: int = 0) -> Slice:
    rate = float(len(requests))
    return Slice(requests, 0, len(requests), rate, rate, block_tokens)


def alike(num: int, prompt: int, output: int, every_s: float = 0.0) -> list[TraceRequest]:
    return [
        TraceRequest(num_input=prompt, num_output=output, arrival_s=i * every_s) for i in range(num)
    ]


def pool(slots: int, costs: StepCosts = STEADY) -> Place:
    return lambda size: Placement(num_gpus=1, costs=costs, pool_bytes=slots, token_bytes=1)


def tuned(part: Slice, place: Place, *sizes: int, saturated: bool = True) -> Tuning:
    options = TuneOptions(config=CONFIG, sizes=sizes, saturated=saturated, measure_host=False)
    return tune(part, place, options)


def test_small_blocks_where_sequences_are_short() -> None:
    """1,024 slots; sequences of 9 tokens take 9 of them in blocks of 1, 16 in blocks of 16, 256 in
    blocks of 256: 113, 64 or 4 at a time, and a step takes the same for any number."""
    found = tuned(part_of(alike(400, 1, 9)), pool(1024), 1, 16, 256)
    one, usual, large = found.rows
    assert (one.block_size, one.num_blocks, large.num_blocks) == (1, 1024, 4)
    assert one.unfilled == 0 and usual.unfilled > 0.4 and large.unfilled > 0.97
    assert large.mean_batch == pytest.approx(4, rel=0.02)
    assert usual.score == 1.0
    assert one.score == pytest.approx(one.tokens_per_s / usual.tokens_per_s) and one.score > 1.3
    assert large.score == pytest.approx(4 / 64, rel=0.2)
    assert (found.best, found.recommended, found.as_good) == (1, 1, (1,))
    assert found.matters and found.against_usual == pytest.approx(one.score - 1)
    assert found.against_worst == pytest.approx(one.score / large.score - 1)


class ByBlock:
    """A millisecond for every block that is read, besides 10 for a step."""

    name = "by block"

    def __init__(self, size: int) -> None:
        self._size = size

    def step_s(self, shape: StepShape) -> float:
        return 0.01 + 0.001 * shape.decode_context / self._size

    def copy_s(self, num_host_blocks: int) -> float:
        return 0.0


def test_large_blocks_where_kernels_pay_for_each() -> None:
    def place(size: int) -> Placement:
        return replace(pool(100_000)(size), costs=ByBlock(size))

    found = tuned(part_of(alike(60, 64, 32)), place, 4, 16, 64)
    assert found.recommended == found.best == 64 and found.as_good == (64,)
    small, usual, large = found.rows
    assert small.decode_ms > usual.decode_ms > large.decode_ms > 10
    assert found.against_usual > 0.5
    assert small.table_entries == pytest.approx(80 / 4 + 0.5)
    assert small.table_bytes == pytest.approx(20.5 * 4 * small.mean_batch)


def test_latency_counts_where_requests_have_times() -> None:
    """One request at a time: nothing but the blocks that are read."""

    def place(size: int) -> Placement:
        return replace(pool(100_000)(size), costs=ByBlock(size))

    found = tuned(part_of(alike(20, 64, 8, every_s=10.0)), place, 16, 32, saturated=False)
    assert found.recommended == 32
    usual, twice = found.rows
    assert usual.normalized_s == pytest.approx(0.01 + 0.001 * 68 / 16 * 7 / 8, rel=0.01)
    assert twice.score == pytest.approx(usual.normalized_s / twice.normalized_s)


def test_it_does_not_matter_where_there_is_room() -> None:
    found = tuned(part_of(alike(50, 30, 20)), pool(100_000), 8, 16, 32, 64)
    assert not found.matters and found.recommended == 16
    assert found.as_good == (8, 16, 32, 64) and found.noise == 0.01
    assert all(row.score == pytest.approx(1.0, abs=0.005) for row in found.rows)
    assert "it does not matter here" in "\n".join(verdict(found))


def test_prefixes_are_found_with_every_size() -> None:
    """40 tokens of 50 are the same; blocks of 64 hold them only in part, and that is found too."""
    requests = [
        TraceRequest(
            num_input=50, num_output=4, arrival_s=float(i), prefix="system", prefix_tokens=40
        )
        for i in range(20)
    ]
    options = TuneOptions(
        config=CONFIG.replace(enable_prefix_caching=True), sizes=(1, 16, 64), measure_host=False
    )
    found = tune(part_of(requests), pool(4096), options)
    assert found.has_prefixes
    for row in found.rows:
        assert row.hit_rate == pytest.approx(19 * 40 / (20 * 50), abs=0.15)


def test_sizes_that_cannot_serve_are_named() -> None:
    found = tuned(part_of(alike(30, 60, 60)), pool(200), 16, 64, 128, 256)
    assert [row.block_size for row in found.rows] == [16, 64, 128]
    assert found.refused == {256: "a block of 256 tokens is 256 B, and the pool 200 B"}
    assert found.matters


def test_nothing_to_compare() -> None:
    with pytest.raises(CapacityError, match="no block size can serve this"):
        tuned(part_of(alike(3, 60, 60)), pool(50), 16, 64)
    with pytest.raises(ConfigError, match="--block-sizes must be numbers of tokens"):
        tuned(part_of(alike(3, 6, 6)), pool(500), 16, 0)


def test_fewer_long_prompts_are_simulated() -> None:
    """Blocks of 1 and 16 of 8,000 tokens: 85,000 us a request, half as much again for the noise."""
    part = part_of(alike(2000, 8000, 1))
    assert affordable(part, (1, 16), prefixes=True) == round(40e6 / (1.5 * (85_000 + 8)))
    assert affordable(part, (1, 16), prefixes=False) == 1000
    assert affordable(part_of(alike(10, 10**6, 1)), (1,), prefixes=True) == 40


def test_the_host_is_timed() -> None:
    options = TuneOptions(config=CONFIG, sizes=(16,), saturated=True)
    (row,) = tune(part_of(alike(20, 30, 20)), pool(10_000), options).rows
    assert row.host_us is not None and 1 < row.host_us < 100_000


def test_measured_sizes_correct_what_was_measured_with_another() -> None:
    base = FixedCosts(0.01, 0.001, 0.0005)
    costs = ResizedCosts(base, 64, base=16, extra_token_s=1e-6)
    assert costs.copy_s(2) == pytest.approx(2 * 4 * 0.0005)
    decode = StepShape(0, 0, 2, 1000, 2)
    assert costs.step_s(decode) == pytest.approx(base.step_s(decode) + 1000e-6)
    swap = decode._replace(num_host_blocks=3)
    assert costs.step_s(swap) == pytest.approx(costs.step_s(decode) + 3 * 4 * 0.0005)
    quick = ResizedCosts(base, 16, base=16, extra_token_s=-1.0)
    assert quick.step_s(decode) == pytest.approx(0.1 * base.step_s(decode))


def test_the_report_says_what_to_take() -> None:
    found = tuned(part_of(alike(400, 1, 9)), pool(1024), 1, 16, 256)
    text = report(found, "short requests", "a small pool")
    lines = text.splitlines()
    assert lines[:2] == ["short requests", "a small pool"]
    assert "recommended: --block-size 1" in lines
    assert "against 16: +" in text and "against the worst, 256: +" in text
    values = json.loads(json.dumps(found.as_dict()))
    assert [row["block_size"] for row in values["rows"]] == [1, 16, 256]
    assert values["recommended"] == 1
