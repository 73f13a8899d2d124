"""The GPU's runner against the CPU's, on the same plans: every token, in whatever way it came."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_traffic import (
    DYNAMIC,
    GREEDY,
    WARM,
    MakeCpu,
    MakeGpu,
    Traffic,
    one_by_one,
    overlapped,
    tokens_of,
    watched,
)
from runner_support import seq

from octavo.plan import BeamDraw, BlockCopy, NewSeq, SeqFork, StepPlan
from octavo.request import SamplerParams
from octavo.runner.gpu.layout import Room


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
