"""The GPU's runner against the CPU's, on the same plans: every token, in whatever way it came."""

from __future__ import annotations

import contextlib
import gc
import random
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from octavo.arch import RopeConfig
from octavo.errors import DeviceLostError, NumericsError
from octavo.plan import BeamDraw, BlockCopy, NewSeq, SeqFork, SeqPlan, SeqResult, StepPlan
from octavo.request import SamplerParams
from octavo.runner.gpu.cutting import Cutter
from octavo.runner.gpu.failure import device_errors
from octavo.runner.gpu.layout import Room
from octavo.runner.gpu.pending import Answer
from octavo.runner.gpu.runner import GpuRunner
from octavo.runner.runner import Runner

MakeGpu = Callable[..., GpuRunner]
MakeCpu = Callable[..., Runner]
GREEDY = SamplerParams()
WARM = SamplerParams(temperature=2.0, seed=3)
# top_p and top_k draw in another order on GPUs: the same distribution, other tokens for a seed.
DYNAMIC = RopeConfig(rotary_dim=16, scaling_type="dynamic", factor=2.0, original_max_position=8)
BLOCK = 4


class Traffic:
    """Random plans of sequences that come, are computed in chunks, decode, share a step with
    others, lose their blocks, come back and end. No plan depends on which tokens are drawn, so
    each can be made before the tokens of the one before it are known."""

    def __init__(self, seed: int, params: Sequence[SamplerParams], max_running: int = 7) -> None:
        self.rng, self.params, self.max_running = random.Random(seed), params, max_running
        self.free = list(range(32))
        self.rng.shuffle(self.free)
        self.next_id = 0
        self.lengths: dict[int, int] = {}
        """Tokens that each sequence has, those that are being sampled included."""
        self.done: dict[int, int] = {}
        self.blocks: dict[int, list[int]] = {}

    def _drop(self, seq_id: int) -> None:
        self.free += self.blocks.pop(seq_id, [])
        self.done[seq_id] = 0

    def plan(self, step_id: int) -> StepPlan:
        rng, plan = self.rng, StepPlan(step_id)
        for seq_id in list(self.lengths):
            if rng.random() < 0.06 or self.lengths[seq_id] > 40:
                self._drop(seq_id)
                del self.lengths[seq_id], self.done[seq_id]
                plan.finished.append(seq_id)
            elif seq_id in self.blocks and rng.random() < 0.06:
                self._drop(seq_id)
                plan.preempted.append(seq_id)
        while len(self.lengths) < self.max_running and rng.random() < 0.6:
            tokens = [rng.randrange(128) for _ in range(rng.randint(1, 14))]
            seq_id, self.next_id = self.next_id, self.next_id + 1
            plan.new_seqs.append(NewSeq(seq_id, tokens, self.params[seq_id % len(self.params)]))
            self.lengths[seq_id], self.done[seq_id] = len(tokens), 0
        budget = 32
        order = [seq_id for seq_id in self.lengths if seq_id not in plan.preempted]
        rng.shuffle(order)
        for seq_id in order:
            missing = self.lengths[seq_id] - self.done[seq_id]
            count = min(missing, rng.choice((1, 3, 8, 20)), budget)
            need = -(-(self.done[seq_id] + count) // BLOCK) - len(self.blocks.get(seq_id, ()))
            if not count or need > len(self.free) or rng.random() < 0.1:
                continue
            budget -= count
            held = self.blocks.setdefault(seq_id, [])
            new = tuple(self.free.pop() for _ in range(need))
            replaced = None
            if held and self.free and self.done[seq_id] % BLOCK and rng.random() < 0.1:
                index = self.done[seq_id] // BLOCK  # copy-on-write
                block = self.free.pop()
                plan.copies.append(BlockCopy(held[index], block))
                self.free.append(held[index])
                held[index], replaced = block, (index, block)
            held += new
            sample = count == missing
            plan.seqs.append(SeqPlan(seq_id, self.done[seq_id], count, new, replaced, sample))
            self.done[seq_id] += count
            self.lengths[seq_id] += sample
        return plan


def one_by_one(runner: Runner, plans: list[StepPlan]) -> list[list[SeqResult]]:
    return [runner.execute(plan).sampled for plan in plans]


def overlapped(runner: GpuRunner, plans: list[StepPlan]) -> list[list[SeqResult]]:
    """Each step is launched before the tokens of the one before it are looked at."""
    under_way: deque[Callable] = deque()
    found = []
    for plan in plans:
        under_way.append(runner.launch(plan))
        if len(under_way) == 2:
            found.append(under_way.popleft()().sampled)
    return [*found, *(wait().sampled for wait in under_way)]


def tokens_of(steps: list[list[SeqResult]]) -> list[list[tuple[int, int]]]:
    return [[(result.seq_id, result.token_id) for result in step] for step in steps]


def watched(runner: GpuRunner) -> list[Room]:
    """The recorded steps that will be used, as they are."""
    rooms: list[Room] = []
    replay = runner.graphs.replay

    def noted(room: Room) -> None:
        rooms.append(room)
        replay(room)

    runner.graphs.replay = noted  # type: ignore[method-assign]
    return rooms


def seq(
    seq_id: int, start: int, count: int, blocks: tuple[int, ...] = (), sample: bool = True
) -> SeqPlan:
    return SeqPlan(seq_id, start, count, blocks, None, sample)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "padded"])
def test_overlapped_steps_have_the_same_tokens(
    make_gpu_runner: MakeGpu, make_cpu_runner: MakeCpu, graphs: bool
) -> None:
    params = (WARM, GREEDY, SamplerParams(temperature=1.5, seed=8, logit_bias=((5, 3.0),)))
    traffic = Traffic(1, params)
    plans = [traffic.plan(step) for step in range(24 if graphs else 12)]
    if graphs:
        assert sum(bool(plan.preempted) for plan in plans) > 3
        assert sum(seq.replaced is not None for plan in plans for seq in plan.seqs) > 1
    expected = one_by_one(make_cpu_runner(), plans)
    runner = make_gpu_runner(graphs=graphs)
    rooms = watched(runner)
    assert tokens_of(overlapped(runner, plans)) == tokens_of(expected)
    if graphs:  # all steps were filled up
        assert len(rooms) == sum(bool(plan.seqs) for plan in plans)
        assert {Room(16, True), Room(32, True)} < set(rooms) and {r.mixed for r in rooms} == {0, 1}
    assert set(runner.inputs.seqs) == set(traffic.lengths)
    assert len(runner.sampling) == len(traffic.lengths)
    for seq_id, blocks in traffic.blocks.items():
        assert runner.inputs.block_table(seq_id) == blocks
        row = runner.inputs.seqs[seq_id].row
        assert runner.inputs.tables[row, : len(blocks)].tolist() == blocks


def test_only_greedy_rows_never_draw(make_gpu_runner: MakeGpu, make_cpu_runner: MakeCpu) -> None:
    traffic = Traffic(5, (GREEDY,))
    plans = [traffic.plan(step) for step in range(12)]
    expected = one_by_one(make_cpu_runner(), plans)
    runner = make_gpu_runner(graphs=True)
    runner.sampler.launch = None  # type: ignore[method-assign, assignment]
    assert tokens_of(overlapped(runner, plans)) == tokens_of(expected)


def test_rows_that_need_their_past_wait_for_it(
    make_gpu_runner: MakeGpu, make_cpu_runner: MakeCpu
) -> None:
    params = (
        SamplerParams(temperature=1.0, seed=1, frequency_penalty=1.5, num_logprobs=2),
        SamplerParams(repetition_penalty=1.8, min_tokens=3, min_tokens_masked_ids=(7,)),
        WARM,
    )
    traffic = Traffic(2, params)
    plans = [traffic.plan(step) for step in range(12)]
    expected = one_by_one(make_cpu_runner(), plans)
    found = one_by_one(make_gpu_runner(), plans)
    assert tokens_of(found) == tokens_of(expected)
    pairs = [
        (a.logprobs, b.logprobs)
        for mine, others in zip(found, expected, strict=True)
        for a, b in zip(mine, others, strict=True)
    ]
    assert any(a is not None for a, _ in pairs)
    for a, b in pairs:
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            assert a.rank == b.rank and abs(a.logprob - b.logprob) < 1e-4
            assert [token for token, _ in a.top] == [token for token, _ in b.top]


def test_triton_attention_is_fed_what_it_wants(
    make_gpu_runner: MakeGpu, make_cpu_runner: MakeCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    from octavo.attention.triton import TritonAttention
    from octavo.ops.gpu import decode_attention

    new = [NewSeq(0, [1, 2, 3, 4, 5], GREEDY), NewSeq(1, [9, 8], GREEDY)]
    plans = [
        StepPlan(0, new_seqs=new[:1], seqs=[seq(0, 0, 5, (3, 8))]),
        StepPlan(1, new_seqs=new[1:], seqs=[seq(1, 0, 2, (5,)), seq(0, 5, 1)]),
        StepPlan(2, seqs=[seq(1, 2, 1), seq(0, 6, 1)]),
        StepPlan(3, seqs=[seq(0, 7, 1)]),
    ]
    expected = tokens_of(one_by_one(make_cpu_runner(), plans))
    runner = make_gpu_runner(graphs=True, attention=TritonAttention(), max_num_seqs=4)
    runner.workspace.partial.fill_(torch.nan)
    rooms = watched(runner)
    decode, zeroed = decode_attention.paged_decode, []

    def noted(out: torch.Tensor, *rest: Any, **options: Any) -> None:
        out.fill_(7.0)
        decode(out, *rest, **options)
        zeroed.append((out == 0.0).flatten(1).all(dim=1).tolist())

    monkeypatch.setattr(decode_attention, "paged_decode", noted)
    assert tokens_of(overlapped(runner, plans)) == expected
    assert rooms == [Room(16, True), Room(16, True), Room(2, False), Room(1, False)]
    if runner.device.type == "cpu":  # recorded launches are not made from Python again
        # Beside one decode, its launch wrote zeros over the prompt's two rows: tiles came after.
        assert zeroed[2] == [False, True, True, True]


def test_dynamic_rope_is_computed_for_each_step(
    make_gpu_runner: MakeGpu, make_cpu_runner: MakeCpu
) -> None:
    traffic = Traffic(3, (WARM, GREEDY))
    plans = [traffic.plan(step) for step in range(15)]
    runner = make_gpu_runner(graphs=True, rope=DYNAMIC)
    assert not runner.graphs.has_any
    expected = one_by_one(make_cpu_runner(rope=DYNAMIC), plans)
    assert tokens_of(overlapped(runner, plans)) == tokens_of(expected)


def test_hidden_states_come_in_the_plans_order(
    make_gpu_runner: MakeGpu, make_cpu_runner: MakeCpu
) -> None:
    new = [NewSeq(0, [1, 2, 3, 4, 5], GREEDY), NewSeq(1, [9], GREEDY), NewSeq(2, [7, 8], GREEDY)]
    plan = StepPlan(
        0, new_seqs=new, seqs=[seq(2, 0, 2, (4,)), seq(1, 0, 1, (2,)), seq(0, 0, 5, (3, 8))]
    )
    expected = make_cpu_runner().forward(plan)
    assert torch.allclose(make_gpu_runner().forward(plan).cpu(), expected, atol=1e-4)


def test_general_and_ordinary_rows_in_one_step(
    make_gpu_runner: MakeGpu, make_cpu_runner: MakeCpu
) -> None:
    """Beams, further samples and prompt logprobs beside rows that go on by themselves."""
    prompt = [5, 17, 99, 3, 42, 8]
    asks = SamplerParams(temperature=1.5, seed=4, num_prompt_logprobs=1)
    plans = [
        StepPlan(
            0,
            new_seqs=[NewSeq(i, prompt, p) for i, p in ((0, WARM), (1, asks), (2, GREEDY))],
            forks=[SeqFork(1, 3, 6, WARM, 1), SeqFork(1, 4, 6, GREEDY, 2)],
            seqs=[seq(2, 0, 6, (0, 1)), seq(0, 0, 6, (2, 3)), seq(1, 0, 6, (4, 5))],
            extra_draws={1: (3, 4)},
            beams=[BeamDraw((2,), (0.0,), 4)],
        ),
        StepPlan(
            1,
            forks=[SeqFork(2, 5, 6, GREEDY, 1)],
            appends=[(2, 70), (5, 71)],
            copies=[BlockCopy(1, 6), BlockCopy(5, 7), BlockCopy(5, 8)],
            seqs=[
                seq(5, 6, 1, (0, 6)), seq(0, 6, 1), seq(3, 6, 1, (4, 7)), seq(2, 6, 1),
                seq(1, 6, 1), seq(4, 6, 1, (4, 8)),
            ],
            beams=[BeamDraw((2, 5), (-0.5, -0.6), 5)],
        ),
        StepPlan(2, finished=[2, 5], seqs=[seq(i, 7, 1) for i in (4, 0, 1, 3)]),
    ]  # fmt: skip
    for graphs in (False, True):
        cpu, gpu = make_cpu_runner(), make_gpu_runner(graphs=graphs)
        for plan in plans:
            expected, found = cpu.execute(plan), gpu.execute(plan)
            assert tokens_of([found.sampled]) == tokens_of([expected.sampled])
            for mine, other in zip(found.beams, expected.beams, strict=True):
                assert [c[:2] for c in mine] == [c[:2] for c in other]
            assert list(found.prompt_logprobs) == list(expected.prompt_logprobs)
            for seq_id, logprobs in found.prompt_logprobs.items():
                others = expected.prompt_logprobs[seq_id]
                assert [p.token_id for p in logprobs] == [p.token_id for p in others]


def test_further_samples_are_those_of_lonely_runs(make_gpu_runner: MakeGpu) -> None:
    """Top_p draws in another order here than on a CPU: first tokens must too."""
    prompt, params = [5, 17, 99, 3], SamplerParams(temperature=2.0, seed=4, top_p=0.9)
    further = tuple(range(1, 10))  # more than the workspace has rows
    plan = StepPlan(
        0,
        new_seqs=[NewSeq(0, prompt, params)],
        forks=[SeqFork(0, i, 4, params, i) for i in further],
        seqs=[seq(0, 0, 4, (0,))],
        extra_draws={0: further},
    )
    runner = make_gpu_runner()
    (found,) = tokens_of([runner.execute(plan).sampled])
    for i in (0, 1, 9):
        new = [NewSeq(10 + i, prompt, params, i)]
        alone = runner.execute(StepPlan(1 + i, new_seqs=new, seqs=[seq(10 + i, 0, 4, (1 + i,))]))
        assert alone.sampled[0].token_id == found[i][1]
    assert len({token for _, token in found}) > 4


def test_padding_writes_nothing(make_gpu_runner: MakeGpu) -> None:
    """Three sequences in a recorded step of four: no byte of the pool but theirs changes."""
    runner = make_gpu_runner(graphs=True)
    pool = runner.kv_store.data[:32].view(32, -1).view(torch.uint8)
    new = [NewSeq(i, [3 + i] * 4, GREEDY) for i in range(3)]
    first = [seq(i, 0, 4, (10 * i + 1,)) for i in range(3)]
    runner.execute(StepPlan(0, new_seqs=new, seqs=first))
    before, tables = pool.clone(), runner.inputs.tables.clone()
    last = runner.inputs.last_tokens.clone()
    plan = StepPlan(1, seqs=[seq(i, 4, 1, (10 * i + 2,)) for i in range(3)])
    runner.execute(plan)
    changed = (pool != before).any(dim=1).nonzero()[:, 0].tolist()
    assert changed == [2, 12, 22]
    rows = [runner.inputs.seqs[i].row for i in range(3)]
    others = [row for row in range(8) if row not in rows]
    assert torch.equal(runner.inputs.tables[others], tables[others])
    assert torch.equal(runner.inputs.last_tokens[others], last[others])


def test_padding_beside_prompts_writes_nothing(make_gpu_runner: MakeGpu) -> None:
    """Two decodes and chunks of 3 and 6 tokens, filled up to 16: 11 slots of the pool change."""
    runner = make_gpu_runner(graphs=True)
    pool = runner.kv_store.data[:32].view(32, -1).view(torch.uint8)
    new = [NewSeq(i, [3 + i] * (4 + 3 * (i == 3)), GREEDY) for i in range(4)]
    first = [seq(i, 0, 4, (4 * i + 1,)) for i in range(2)]
    runner.execute(StepPlan(0, new_seqs=new[:2], seqs=first))
    rooms, before = watched(runner), pool.clone()
    tables, last = runner.inputs.tables.clone(), runner.inputs.last_tokens.clone()
    chunks = [seq(3, 0, 6, (13, 14), sample=False), seq(2, 0, 3, (9,), sample=False)]
    plan = StepPlan(1, new_seqs=new[2:], seqs=[*chunks, seq(0, 4, 1, (2,)), seq(1, 4, 1, (6,))])
    found = runner.execute(plan)
    assert [result.seq_id for result in found.sampled] == [0, 1] and rooms == [Room(16, True)]
    changed = (pool != before).view(32, -1, 4, 16 * 4).any(dim=3).any(dim=1)
    written = [(b, s) for b, s in changed.nonzero().tolist()]
    assert written == [
        (2, 0), (6, 0), (9, 0), (9, 1), (9, 2), *((13, s) for s in range(4)), (14, 0), (14, 1)
    ]  # fmt: skip
    rows = [runner.inputs.seqs[i].row for i in range(4)]
    others = [row for row in range(8) if row not in rows]
    assert torch.equal(runner.inputs.tables[others], tables[others])
    kept = [row for row in range(8) if row not in rows[:2]]
    assert torch.equal(runner.inputs.last_tokens[kept], last[kept])


def test_many_short_chunks_take_a_larger_recorded_step(
    make_gpu_runner: MakeGpu, make_cpu_runner: MakeCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the smallest that holds their tokens has too few tiles; none where all have."""
    monkeypatch.setattr(Cutter, "max_tiles", lambda _, num_tokens, __: num_tokens // 4)
    new = [NewSeq(i, [i, 2 * i, 7], GREEDY) for i in range(16)]
    chunks = [seq(i, 0, 2 if i < 7 else 1, (i,), sample=False) for i in range(16)]
    nine = [seq(i, 1, 2, sample=False) for i in range(7, 16)]
    plans = [
        StepPlan(0, new_seqs=new, seqs=chunks),
        StepPlan(1, seqs=nine),
        StepPlan(2, seqs=[seq(i, 2, 1) for i in range(7)]),
    ]
    expected = tokens_of(one_by_one(make_cpu_runner(max_num_seqs=16), plans))
    runner = make_gpu_runner(graphs=True, max_num_seqs=16)
    rooms = watched(runner)
    assert tokens_of(overlapped(runner, plans)) == expected
    assert rooms == [Room(32, True), Room(8, False)]


def test_more_changes_of_tables_than_a_step_takes(
    make_gpu_runner: MakeGpu, make_cpu_runner: MakeCpu
) -> None:
    """A policy that gives a sequence all its blocks at once; and many sequences at once."""
    new = [NewSeq(i, [4 * i + 1], WARM) for i in range(2)]
    blocks = [tuple(range(16 * i, 16 * i + 16)) for i in range(2)]
    plans = [StepPlan(0, new_seqs=new, seqs=[seq(i, 0, 1, blocks[i]) for i in range(2)])]
    plans += [StepPlan(k, seqs=[seq(i, k, 1) for i in range(2)]) for k in range(1, 8)]
    expected = tokens_of(one_by_one(make_cpu_runner(), plans))
    for graphs, most in ((True, 40), (False, 7)):
        runner = make_gpu_runner(graphs=graphs)
        assert runner.inputs._max_changes == 40
        runner.inputs._max_changes = most
        assert tokens_of(overlapped(runner, plans)) == expected
        assert runner.inputs.tables[runner.inputs.seqs[1].row].tolist() == list(blocks[1])


def test_moved_blocks_and_resizes(make_gpu_runner: MakeGpu, make_cpu_runner: MakeCpu) -> None:
    new = [NewSeq(i, [3 + i] * 4, WARM) for i in range(2)]
    first = StepPlan(0, new_seqs=new, seqs=[seq(0, 0, 4, (30,)), seq(1, 0, 4, (31,))])
    moves = [(30, 1), (31, 0)]
    copies = [BlockCopy(old, new) for old, new in moves]
    shrink = StepPlan(1, moved=moves, copies=copies)
    after = [
        StepPlan(2, seqs=[seq(0, 4, 1, (5,)), seq(1, 4, 1, (6,))]),
        StepPlan(3, seqs=[seq(0, 5, 1), seq(1, 5, 1)]),
    ]
    found = []
    for runner in (make_cpu_runner(), make_gpu_runner(graphs=True)):
        results = [runner.execute(first).sampled]
        assert runner.execute(shrink).sampled == []
        runner.resize_pool(16)
        results += [runner.execute(plan).sampled for plan in after]
        assert runner.inputs.block_table(0) == [1, 5]
        found.append(tokens_of(results))
    assert found[0] == found[1]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_numbers_that_are_not_finite_name_their_sequences(make_gpu_runner: MakeGpu) -> None:
    for params in (GREEDY, WARM):
        runner = make_gpu_runner()
        runner.model.embed.table = runner.model.embed.table.clone()  # the head's stays as it is
        runner.model.embed.table[77] = float("nan")
        new = [NewSeq(4, [1, 2], params), NewSeq(5, [77], params), NewSeq(6, [3], params)]
        plan = StepPlan(
            0, new_seqs=new, seqs=[seq(4, 0, 2, (0,)), seq(5, 0, 1, (1,)), seq(6, 0, 1, (2,))]
        )
        wait = runner.launch(plan)
        with pytest.raises(NumericsError, match=r"sequences \[5\]"):
            wait()


def test_a_failed_launch_leaves_tables_that_are_brought_up_to_date(
    make_gpu_runner: MakeGpu, make_cpu_runner: MakeCpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner, oracle = make_gpu_runner(), make_cpu_runner()
    both = [NewSeq(0, [1, 2, 3], WARM), NewSeq(1, [4, 5], WARM)]
    plans = [
        StepPlan(0, new_seqs=both[:1], seqs=[seq(0, 0, 3, (3,))]),
        StepPlan(1, new_seqs=both[1:], seqs=[seq(1, 0, 2, (9,))]),
        StepPlan(2, finished=[1], seqs=[seq(0, 3, 1)]),
        StepPlan(3, seqs=[seq(0, 4, 1, (9,))]),
    ]  # fmt: skip
    expected = tokens_of([oracle.execute(plan).sampled for plan in plans])
    first = runner.launch(plans[0])
    with monkeypatch.context() as patch:
        patch.setattr(runner._forward, "hidden", lambda *_: 1 / 0)
        for step in range(3):  # however many fail, the one under way keeps its answer
            new = [NewSeq(10 + step, [4, 5], WARM)] if step < 2 else plans[1].new_seqs
            seqs = [seq(new[0].seq_id, 0, 2, (9,))]
            with pytest.raises(ZeroDivisionError):
                runner.launch(StepPlan(1, new_seqs=new, seqs=seqs))
    assert list(runner._latest) == [first]  # what holds it if the device is lost
    found = [first().sampled, *(runner.execute(plan).sampled for plan in plans[2:])]
    assert tokens_of(found) == [expected[0], *expected[2:]]


def test_a_lost_device_is_told_from_a_failed_step(
    make_gpu_runner: MakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(error: Exception) -> Callable[..., None]:
        def raises(*_: object) -> None:
            raise error

        return raises

    runner = make_gpu_runner()
    plan = StepPlan(0, new_seqs=[NewSeq(0, [1], GREEDY)], seqs=[seq(0, 0, 1, (0,))])
    under_way = runner.launch(plan)
    runner.device = runner._answers._answers[1].device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H200")
    broken = RuntimeError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setattr(runner, "_launch", fail(broken))
    monkeypatch.setattr(torch.cuda, "synchronize", fail(broken))
    with pytest.raises(DeviceLostError, match=r"H200.*illegal memory access.*restart"):
        runner.launch(plan)
    monkeypatch.setattr(Answer, "wait", fail(broken))
    with pytest.raises(DeviceLostError, match=r"H200.*illegal memory access.*restart"):
        under_way()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    with pytest.raises(RuntimeError, match="illegal"):
        runner.launch(plan)
    monkeypatch.setattr(runner, "_launch", fail(torch.OutOfMemoryError("no room")))
    with pytest.raises(torch.OutOfMemoryError, match="no room"):
        runner.launch(plan)


def test_what_lies_on_a_lost_device_is_never_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    class Thing:
        pass

    def broken(*_: object) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H200")
    for is_lost in (False, True):
        monkeypatch.setattr(torch.cuda, "synchronize", broken if is_lost else lambda _: None)
        owner, draw = Thing(), Thing()
        owners = weakref.ref(owner), weakref.ref(draw)

        def step(half_made: Thing, owner: Thing) -> None:
            with device_errors(torch.device("cuda"), owner):
                broken(half_made)

        with contextlib.suppress(RuntimeError, DeviceLostError):
            step(draw, owner)
        del owner, draw
        gc.collect()
        assert [held() is not None for held in owners] == [is_lost, is_lost]


def test_maintenance_plans_and_times(make_gpu_runner: MakeGpu) -> None:
    runner = make_gpu_runner()
    result = runner.execute(StepPlan(0, copies=[BlockCopy(1, 2)]))
    assert (result.step_id, result.sampled, result.compute_s) == (0, [], 0.0)
    result = runner.execute(StepPlan(1, finished=[8], preempted=[9]))
    assert result.sampled == [] and result.beams == [] and result.prompt_logprobs == {}


def test_measuring_leaves_nothing_behind(
    make_gpu_runner: MakeGpu, make_cpu_runner: MakeCpu
) -> None:
    runner = make_gpu_runner(graphs=True, max_num_seqs=2)
    transient = runner.profile_run()
    assert (min(transient) > 0) == (runner.device.type == "cuda")
    runner.warm_up()
    assert not runner.inputs.seqs and not len(runner.sampling)
    traffic = Traffic(4, (WARM,), max_running=2)
    plans = [traffic.plan(step) for step in range(6)]
    expected = tokens_of(one_by_one(make_cpu_runner(), plans))
    assert tokens_of(overlapped(runner, plans)) == expected
