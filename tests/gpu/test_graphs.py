"""Recorded steps on a real GPU: what a CPU cannot show of the runner."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from octavo.arch import ModelArch, RopeConfig
from octavo.layers.workspace import Workspace
from octavo.models.decoder import Decoder
from octavo.plan import NewSeq, SeqPlan, SeqResult, StepPlan
from octavo.request import SamplerParams
from octavo.runner.gpu.graphs import RoomCalls, StepGraphs, mixed_sizes
from octavo.runner.gpu.layout import Room
from octavo.runner.gpu.runner import GpuRunner
from octavo.runner.kv_store import KVStore

pytestmark = pytest.mark.gpu

ARCH = ModelArch(
    architecture="LlamaForCausalLM",
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=1024,
    num_layers=4,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    max_position_embeddings=1024,
    rope=RopeConfig(rotary_dim=64),
)
SEATS, BLOCK, PER_SEQ = 32, 16, 8
GREEDY = SamplerParams()


@pytest.fixture(scope="module")
def model() -> Decoder:
    from octavo.attention.triton import TritonAttention

    device = torch.device("cuda", torch.cuda.current_device())
    model = Decoder(ARCH, TritonAttention(), torch.bfloat16, 1024, device)
    generator = torch.Generator().manual_seed(0)
    for name, shape in model.parameters_spec().items():
        model.load(name, torch.randn(shape, generator=generator) * 0.05)
    return model


@pytest.fixture
def allowing_syncs() -> Iterator[None]:
    yield
    torch.cuda.set_sync_debug_mode("default")


def make_runner(model: Decoder, graphs: bool, num_blocks: int = SEATS * PER_SEQ + 8) -> GpuRunner:
    shape = (ARCH.num_layers, ARCH.num_kv_heads, BLOCK, ARCH.head_dim)
    store = KVStore(num_blocks, *shape, torch.bfloat16, model.device, max_blocks=4 * num_blocks)
    work = Workspace(ARCH, 1024, 64, torch.bfloat16, model.device, num_decode_items=4096)
    runner = GpuRunner(
        model, store, work, max_num_seqs=SEATS, max_num_tokens=1024, max_blocks_per_seq=PER_SEQ,
        graphs=graphs,
    )  # fmt: skip
    runner.profile_run()
    captured = runner.capture()
    assert bool(captured.sizes) == graphs and captured.seconds < 60
    return runner


def plans_of(num_seqs: int, num_steps: int, params: SamplerParams = GREEDY) -> list[StepPlan]:
    """Prompts of 20 tokens and more, then decodes of all of them."""
    new = [NewSeq(i, [7 * i + k for k in range(20 + i % 5)], params) for i in range(num_seqs)]
    blocks = [tuple(range(i * PER_SEQ, (i + 1) * PER_SEQ)) for i in range(num_seqs)]
    first = [SeqPlan(i, 0, 20 + i % 5, blocks[i], None, True) for i in range(num_seqs)]
    plans = [StepPlan(0, new_seqs=new, seqs=first)]
    for k in range(num_steps):
        seqs = [SeqPlan(i, 20 + i % 5 + k, 1, (), None, True) for i in range(num_seqs)]
        plans.append(StepPlan(k + 1, seqs=seqs))
    return plans


def run(runner: GpuRunner, plans: list[StepPlan]) -> list[list[SeqResult]]:
    found, before = [], None
    for plan in plans:
        wait = runner.launch(plan)
        if before is not None:
            found.append(before().sampled)
        before = wait
    assert before is not None
    return [*found, before().sampled]


@pytest.mark.parametrize("num_seqs", [1, 2, 3, 8, 21, 32])
def test_replayed_steps_are_the_steps(
    model: Decoder, num_seqs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a size is recorded, the same kernels run on the same numbers: equal tokens and KV."""
    plans = plans_of(num_seqs, 30)
    eager, graphs = make_runner(model, graphs=False), make_runner(model, graphs=True)
    monkeypatch.setattr(graphs.inputs, "fits", lambda *_: False)  # prompts go another way
    expected, found = run(eager, plans), run(graphs, plans)
    if Room(num_seqs, mixed=False) in graphs.graphs.rooms_for(num_seqs):
        assert found == expected
    tokens = [r.token_id for step in found for r in step]
    others = [r.token_id for step in expected for r in step]
    same = sum(a == b for a, b in zip(tokens, others, strict=True)) / len(tokens)
    # A bfloat16 tie broken otherwise changes all that follows, but not the numbers before it.
    assert same > 0.5
    prompts = [
        runner.kv_store.data[: num_seqs * PER_SEQ : PER_SEQ, :, :, :, :16].float()
        for runner in (eager, graphs)
    ]
    assert prompts[0].isfinite().all() and prompts[0].norm() > 0
    assert (prompts[0] - prompts[1]).norm() < 0.02 * prompts[0].norm()


def test_padding_writes_no_byte_of_the_pool(model: Decoder) -> None:
    runner = make_runner(model, graphs=True)
    plans = plans_of(21, 3)  # filled up to 24
    run(runner, plans[:2])
    torch.cuda.synchronize()
    num_blocks = runner.kv_store.num_blocks
    pool = runner.kv_store.data[:num_blocks].reshape(num_blocks, -1).view(torch.uint8)
    before = pool.clone()
    run(runner, plans[2:3])
    changed = (pool != before).any(dim=1).nonzero()[:, 0].tolist()
    assert changed == [i * PER_SEQ + (21 + i % 5) // BLOCK for i in range(21)]


def mixed_plans(num_steps: int) -> list[StepPlan]:
    """Each step brings a prompt of 30 tokens and more, in two chunks, beside all that decode."""
    plans = [StepPlan(step) for step in range(num_steps)]
    for i in range(min(num_steps - 2, SEATS)):
        first, rest = 10 + 3 * (i % 7), 20 + i % 5
        blocks = tuple(range(i * PER_SEQ, (i + 1) * PER_SEQ))
        prompt = [7 * i + k for k in range(first + rest)]
        plans[i].new_seqs.append(NewSeq(i, prompt, GREEDY))
        plans[i].seqs.append(SeqPlan(i, 0, first, blocks, None, False))
        plans[i + 1].seqs.append(SeqPlan(i, first, rest, (), None, True))
        for k in range(i + 2, num_steps):
            plans[k].seqs.append(SeqPlan(i, first + rest + k - i - 2, 1, (), None, True))
    return plans


def test_replayed_steps_with_prompts_are_the_steps(
    model: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the same matrix products: of as many rows as the recorded step has. Equal KV and tokens
    where no product depends on how many rows there are; nearly all where it does."""
    plans = mixed_plans(24)
    eager, graphs = make_runner(model, graphs=False), make_runner(model, graphs=True)
    rooms: list[Room] = []
    replay = graphs.graphs.replay
    monkeypatch.setattr(graphs.graphs, "replay", lambda room: (rooms.append(room), replay(room)))
    expected, found = run(eager, plans), run(graphs, plans)
    assert len(rooms) == len(plans) and sum(room.mixed for room in rooms) == 23
    tokens = [[(r.seq_id, r.token_id) for r in step] for step in found]
    others = [[(r.seq_id, r.token_id) for r in step] for step in expected]
    pairs = [pair for a, b in zip(tokens, others, strict=True) for pair in zip(a, b, strict=True)]
    assert all(a[0] == b[0] for a, b in pairs)
    assert sum(a == b for a, b in pairs) / len(pairs) > 0.5  # a tie broken otherwise goes on
    again = make_runner(model, graphs=True)
    assert run(again, plans) == found
    # The first ten tokens of each prompt; those behind depend on what was drawn.
    one, two, three = (
        runner.kv_store.data[: 22 * PER_SEQ : PER_SEQ, :, :, :, :10].float()
        for runner in (graphs, again, eager)
    )
    assert torch.equal(one, two)
    assert (one - three).norm() < 0.02 * three.norm()


def test_padding_beside_prompts_writes_no_byte_of_the_pool(model: Decoder) -> None:
    runner = make_runner(model, graphs=True)
    plans = mixed_plans(12)
    run(runner, plans[:10])
    torch.cuda.synchronize()
    num_blocks = runner.kv_store.num_blocks
    pool = runner.kv_store.data[:num_blocks].reshape(num_blocks, -1).view(torch.uint8)
    before = pool.clone()
    run(runner, plans[10:11])
    changed = (pool != before).any(dim=1).nonzero()[:, 0].tolist()
    expected: set[int] = set()
    for seq in plans[10].seqs:
        slots = range(seq.start, seq.start + seq.num_tokens)
        expected |= {seq.seq_id * PER_SEQ + slot // BLOCK for slot in slots}
    assert changed == sorted(expected)


def test_a_mixed_step_is_launched_in_less_than_a_millisecond(model: Decoder) -> None:
    runner = make_runner(model, graphs=True)
    plans = mixed_plans(24)
    run(runner, plans[:4])
    times = []
    for plan in plans[4:]:
        begun = time.perf_counter()
        wait = runner.launch(plan)
        times.append(time.perf_counter() - begun)
        wait()
    assert sorted(times)[len(times) // 2] < 1.5e-3, times


def test_recorded_steps_outlive_resizes(model: Decoder) -> None:
    """A pool that grows in place keeps its address; one that moves has its steps recorded anew."""
    runner, still = make_runner(model, graphs=True), make_runner(model, graphs=True)
    plans = plans_of(8, 11)
    expected = run(still, plans)
    found = run(runner, plans[:4])
    for i, num_blocks in enumerate((600, 300, 64, 2000)):
        runner.resize_pool(num_blocks)
        found += run(runner, plans[4 + 2 * i : 6 + 2 * i])
    assert found == expected and runner.graphs.has_any


def test_a_step_never_waits_for_the_device(model: Decoder, allowing_syncs: None) -> None:
    """Prompts, mixed steps, greedy and drawn decodes are queued without one synchronisation."""
    warm = SamplerParams(temperature=0.8, seed=3, top_p=0.9)
    for params in (GREEDY, warm):
        runner = make_runner(model, graphs=True)
        plans = plans_of(9, 6, params)
        late = StepPlan(
            7,
            new_seqs=[NewSeq(40, list(range(50)), params)],
            seqs=[
                SeqPlan(0, 26, 1, (), None, True),
                SeqPlan(40, 0, 50, tuple(range(100, 104)), None, True),
            ],
        )
        run(runner, plans[:2])
        torch.cuda.set_sync_debug_mode("error")
        found = run(runner, [*plans[2:], late])
        torch.cuda.set_sync_debug_mode("default")
        assert len(found[-1]) == 2


def test_launching_does_not_take_as_long_as_computing(model: Decoder) -> None:
    runner = make_runner(model, graphs=True)
    plans = plans_of(32, 20)
    run(runner, plans[:4])
    torch.cuda._sleep(200_000_000)  # about 0.1 s of the GPU
    begun = time.perf_counter()
    first = runner.launch(plans[4])
    second = runner.launch(plans[5])
    assert time.perf_counter() - begun < 0.05
    results = [first(), second()]
    assert time.perf_counter() - begun > 0.05
    assert [len(result.sampled) for result in results] == [32, 32]
    assert 0 < results[1].compute_s < 0.05


def test_memory_of_recorded_steps_is_measured(model: Decoder) -> None:
    runner = make_runner(model, graphs=True)
    captured = runner.capture()
    assert captured.sizes == (1, 2, 4, 8, 16, 24, 32)
    assert captured.mixed_sizes == mixed_sizes(1024) and len(captured.mixed_sizes) == 20
    assert captured.num_bytes < 1 << 29
    reserved = torch.cuda.memory_reserved()
    runner.capture()
    assert torch.cuda.memory_reserved() - reserved < 16 << 20, "a new stream's workspace"
    kept: list[torch.Tensor] = []

    def step() -> None:
        kept.append(torch.empty(64 << 20, dtype=torch.uint8, device=model.device))

    graphs = StepGraphs(model.device, lambda _: RoomCalls(prepare=lambda: None, step=step))
    assert 64 << 20 <= graphs.capture((1,), ()).num_bytes < 96 << 20


def test_what_breaks_a_recording_is_what_is_told(model: Decoder) -> None:
    """The recording cannot be ended any more either; that is no news."""

    def breaks() -> None:
        with suppress(RuntimeError):
            torch.cuda.synchronize()  # not allowed while a stream records
        raise ValueError("first")

    graphs = StepGraphs(model.device, lambda _: RoomCalls(prepare=lambda: None, step=breaks))
    with pytest.raises(ValueError, match="first"):
        graphs.capture((1,), ())
    assert not graphs.has_any
