"""Windows in the lab: what attention reads of them, and what they give back."""

from __future__ import annotations

import pytest

from octavo.attended import attended, attended_pairs
from octavo.lab.capacity import Load
from octavo.lab.config import SimConfig
from octavo.lab.costs import StepShape
from octavo.lab.gpus import find_gpu, pool_blocks
from octavo.lab.machine import GpuMachine
from octavo.lab.null_model import NullModel, shape_of
from octavo.lab.padded import PaddedBatch
from octavo.lab.prompts import PromptMaker
from octavo.lab.replay_workload import RecordedWorkload
from octavo.lab.replica import Replica
from octavo.lab.roofline import RooflineCosts
from octavo.lab.shapes import find_shape
from octavo.lab.simulator import simulate
from octavo.lab.slices import Slice
from octavo.lab.trace import TraceRequest
from octavo.plan import SeqPlan, StepPlan

WINDOWS = (0, 8, 8, 3)


def looked_at(length: int, windows: tuple[int, ...]) -> float:
    return sum(min(length, w) if w else length for w in windows) / len(windows)


@pytest.mark.parametrize("windows", [(0,), (8,), WINDOWS], ids=str)
@pytest.mark.parametrize(("start", "num"), [(0, 5), (0, 30), (2, 1), (7, 3), (20, 4)])
def test_pairs_are_those_of_each_token_and_layer(
    start: int, num: int, windows: tuple[int, ...]
) -> None:
    each = [looked_at(start + i + 1, windows) for i in range(num)]
    assert attended(start + num, windows) == pytest.approx(each[-1])
    assert attended_pairs(start, num, windows) == pytest.approx(sum(each))


class Spied:
    """Costs that keep what they are asked."""

    name = "spied"

    def __init__(self) -> None:
        self.shapes: list[StepShape] = []

    def step_s(self, shape: StepShape) -> float:
        self.shapes.append(shape)
        return 1.0

    def copy_s(self, num_host_blocks: int) -> float:
        return 0.0


def test_a_step_counts_each_sequence_by_itself() -> None:
    seqs = [
        SeqPlan(0, 0, 20, (), None, True),  # a prompt of 20
        SeqPlan(1, 99, 1, (), None, True),  # decodes at 100
        SeqPlan(2, 3, 1, (), None, True),  # and at 4
    ]
    shape = shape_of(StepPlan(0, seqs=seqs), WINDOWS)
    assert shape.prefill_context == round(sum(looked_at(i + 1, WINDOWS) for i in range(20)))
    assert shape.decode_context == round(looked_at(100, WINDOWS) + looked_at(4, WINDOWS))
    assert shape_of(StepPlan(0, seqs=seqs)).decode_context == 104


CONFIG = SimConfig(
    num_blocks=120, block_size=4, max_model_len=400, max_num_seqs=8,
    max_num_batched_tokens=64, watermark=0.0,
    windows=(0, 16, 16), layer_windows=(16, 16, 16, 16, 0),
)  # fmt: skip
"""Groups of two layers, of which the full one is padded."""


def test_blocks_behind_windows_are_given_back() -> None:
    """A sequence of 300 tokens: 75 blocks in the group that keeps all, and in each other those that
    16 - 1 + 64 tokens touch while its prompt runs. Without windows it would be three times 75."""
    costs = Spied()
    result = simulate([TraceRequest(num_input=100, num_output=200)], CONFIG, costs, sample_s=0)
    assert result.num_refused == 0 and len(result.times) == 1
    most = max(s.tokens + s.reserved + s.internal for s in result.samples)
    assert 300 <= most <= 4 * (75 + 2 * 21)
    last = costs.shapes[-1]
    assert last.num_decodes == 1
    assert last.decode_context == round((299 + 4 * 16) / 5)  # the 200th needs no step
    plain = CONFIG.replace(windows=(0, 0, 0))
    request = TraceRequest(num_input=100, num_output=200)
    assert simulate([request], plain, Spied()).num_refused == 1


def test_policies_before_paging_keep_all_layers_in_one_group() -> None:
    """Of the same bytes: a third as many blocks, three times as large. Attention reads no more than
    the windows all the same."""
    config = CONFIG.replace(kv_policy="orca-oracle")
    assert (config.pool_windows, config.pool_blocks, config.num_slots) == ((0,), 40, 160)
    assert simulate([TraceRequest(num_input=100, num_output=200)], config, Spied()).num_refused == 1
    costs = Spied()
    result = simulate([TraceRequest(num_input=60, num_output=40)], config, costs)
    assert result.num_refused == 0
    assert costs.shapes[-1].decode_context == round((99 + 4 * 16) / 5)


def test_recorded_steps_are_counted_by_the_groups_of_the_record() -> None:
    replica = Replica(CONFIG, Spied(), prompts=PromptMaker())
    replica.add(TraceRequest(num_input=100, num_output=50), 0.0, 0)
    recorded, scheduler, model, now_s = RecordedWorkload(), replica.scheduler, NullModel(), 0.0
    recorded.begun(replica.kv, scheduler)
    while (plan := scheduler.schedule(now_s)) is not None:
        recorded.scheduled(plan, now_s)
        now_s += 1.0
        result = model.answer(plan, copy_s=0.0, compute_s=1.0)
        recorded.updated(plan, result, now_s)
        scheduler.update(result, now_s)
    first, last = recorded.steps[0].shape, recorded.steps[-1].shape
    chunk = 64 * 65 // 2 + 2 * (16 * 17 // 2 + 48 * 16)
    assert (first.num_prefill_tokens, first.prefill_context) == (64, round(chunk / 3))
    assert last.decode_context == round((148 + 16 + 16) / 3)


def test_a_padded_batch_reads_no_more_than_windows() -> None:
    costs = Spied()
    batch = PaddedBatch(costs, [(1, 20), (1, 12)], WINDOWS)
    batch._reach(5)
    first, last = costs.shapes[0], costs.shapes[-1]
    assert first.prefill_context == 2 * round(sum(looked_at(i + 1, WINDOWS) for i in range(20)))
    assert last.decode_context == round(2 * looked_at(24, WINDOWS))


def test_gemma_on_a_gpu_by_hand() -> None:
    """Gemma 2 9B: 42 layers of 8 KV heads of 256, every second one with a window of 4096."""
    shape, gpu = find_shape("gemma-2-9b"), find_gpu("h200")
    pool = pool_blocks(shape, gpu, block_size=16)
    layer_bytes = 8 * 256 * 2 * 2
    assert pool.shape.bytes_per_block(16) == 16 * 21 * layer_bytes
    left = int(gpu.memory_bytes * 0.9) - sum(
        pool.terms()[name] for name in ("weights", "activations", "runtime")
    )
    assert pool.num_blocks == left // (16 * 21 * layer_bytes)
    assert pool.num_slots == pool.num_blocks * 8  # a token takes a slot in both groups
    assert "1 group of 21 layers that keeps all, 1 that keeps 4,096 tokens" in str(pool)
    placement = GpuMachine(shape, gpu).place(1, 16)
    assert placement.windows == (0, 4096) and placement.token_bytes == 42 * layer_bytes
    assert placement.block_bytes(16) == 16 * 21 * layer_bytes
    # sequences of 8000 tokens that generate one: 8001 and 4096 slots, three half blocks at ends
    part = Slice([TraceRequest(num_input=8000, num_output=1, arrival_s=0.0)], 0, 1, 1.0, 1.0)
    load = Load.of(part, layer_windows=placement.layer_windows)
    assert load.context == 8000.5 and load.read == (8001 + 4096) / 2
    assert load.slots(16, placement.windows) == 8000.5 + 4096 + 3 * 8
    assert load.pairs(8000) == pytest.approx(
        (8000 * 8001 / 2 + 4096 * 4097 / 2 + (8000 - 4096) * 4096) / 2
    )


def test_reading_kv_is_of_the_layers_that_there_are() -> None:
    """Groups of Gemma 3 1B are padded to 28 layers: 26 are read, and copies are of a group."""
    shape = find_shape("gemma-3-1b")
    costs = RooflineCosts(shape, find_gpu("h200"))
    long, short = (costs.step_s(StepShape(0, 0, 8, n * 10**6, 8)) for n in (2, 1))
    soft = costs.software
    reading = soft.kv_share * 4.8e12 / (1 + soft.block_overhead_tokens / 16)
    assert long - short == pytest.approx(10**6 * 26 * 1024 / reading, rel=1e-6)
    copied = costs.step_s(StepShape(0, 0, 0, 0, 0, num_copied_blocks=7))
    assert copied == pytest.approx(7 * 16 * 4 * 1024 / (4.8e12 * soft.pool_share))
    whole = RooflineCosts(shape, find_gpu("h200"), in_groups=False)
    copied = whole.step_s(StepShape(0, 0, 0, 0, 0, num_copied_blocks=7))
    assert copied == pytest.approx(7 * 16 * 26 * 1024 / (4.8e12 * soft.pool_share))


def test_experts_make_larger_batches_read_more() -> None:
    """A decode of Qwen3-30B-A3B reads 3 B weights for one sequence and nearly all for 64; what it
    multiplies is what the tokens are sent to."""
    shape, gpu = find_shape("qwen3-30b-a3b"), find_gpu("h200")
    costs = RooflineCosts(shape, gpu)

    def weights_s(batch: int) -> float:
        step = costs.step_s(StepShape(0, 0, batch, 0, batch))
        soft, layers = costs.software, shape.num_layers
        return step - soft.step_s - layers * soft.layer_s - batch * soft.seq_s

    reading = 4.8e12 * costs.software.weight_share
    assert weights_s(1) == pytest.approx(shape.read_bytes(1) / reading, rel=0.01)
    assert weights_s(32) / weights_s(1) == pytest.approx(
        shape.read_bytes(32) / shape.read_bytes(1), rel=0.02
    )
    assert shape.read_bytes(1) == pytest.approx(2 * 3.04e9, rel=0.01)
    many = costs.step_s(StepShape(0, 0, 0, 0, 0)) or 0.0
    many += costs.step_s(StepShape(65536, 0, 0, 0, 0, num_prompts=1))
    flops = 2 * 65536 * shape.token_params / (gpu.flops * costs.software.flops_share)
    assert many == pytest.approx(flops, rel=0.05)
