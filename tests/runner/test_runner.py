"""The runner on hand-written plans: block tables by difference, copies, replayed decode steps."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from runner_support import seq

from octavo.ops.cpu import gemm
from octavo.plan import BlockCopy, NewSeq, SeqPlan, StepPlan
from octavo.request import SamplerParams
from octavo.runner.input_batch import InputBatch
from octavo.runner.runner import Runner

MakeRunner = Callable[..., Runner]


def test_batch_is_flat_and_follows_the_tables() -> None:
    inputs = InputBatch(block_size=4, max_num_seqs=4, max_num_tokens=32, max_blocks_per_seq=8)
    plan = StepPlan(
        0,
        new_seqs=[
            NewSeq(7, [10, 11, 12, 13, 14], SamplerParams()),
            NewSeq(9, [20], SamplerParams()),
        ],
        seqs=[seq(7, 0, 5, (3, 8)), seq(9, 0, 1, (2,))],
    )
    inputs.apply(plan)
    batch = inputs.build(plan.seqs)
    assert batch.token_ids.tolist() == [10, 11, 12, 13, 14, 20]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 0]
    assert batch.slot_mapping[0].tolist() == [12, 13, 14, 15, 32, 8]
    assert batch.query_start_loc.tolist() == [0, 5, 6]
    assert batch.seq_lens.tolist() == [5, 1]
    assert batch.prompt_lens.tolist() == [5] * 5 + [1]
    assert batch.last_rows.tolist() == [4, 5]
    assert batch.block_tables[0][0, :2].tolist() == [3, 8] and batch.block_tables[0][1, 0] == 2


def test_tables_change_by_difference() -> None:
    inputs = InputBatch(block_size=4, max_num_seqs=1, max_num_tokens=32, max_blocks_per_seq=8)
    new = [NewSeq(0, [1, 2, 3, 4, 5], SamplerParams())]
    inputs.apply(StepPlan(0, new_seqs=new, seqs=[seq(0, 0, 5, (3, 8))]))
    inputs.apply(StepPlan(1, seqs=[SeqPlan(0, 5, 1, (), (1, 6), True)]))
    assert inputs.block_table(0) == [3, 6]
    inputs.apply(StepPlan(2, preempted=[0]))
    assert inputs.block_table(0) == []
    # Its row is free again: there is only one.
    inputs.apply(StepPlan(3, new_seqs=[NewSeq(1, [9], SamplerParams())], seqs=[seq(1, 0, 1, (5,))]))
    assert inputs.block_table(1) == [5]
    inputs.apply(StepPlan(4, finished=[1], seqs=[seq(0, 0, 5, (1, 2))]))
    assert inputs.block_table(0) == [1, 2] and 1 not in inputs.seqs


def test_forgetting_what_never_came_is_fine(make_runner: MakeRunner) -> None:
    runner = make_runner(torch.float32)
    plan = StepPlan(
        0,
        finished=[5],
        preempted=[6],
        new_seqs=[NewSeq(0, [1, 2], SamplerParams())],
        seqs=[seq(0, 0, 2, (0,))],
    )
    assert len(runner.execute(plan).sampled) == 1


def test_copies_happen_in_order_before_the_step(make_runner: MakeRunner) -> None:
    runner = make_runner(torch.float32)
    pool = runner.kv_store.data
    pool.copy_(torch.randn(pool.shape, generator=torch.Generator().manual_seed(1)))
    before = pool.clone()
    plan = StepPlan(
        0,
        copies=[BlockCopy(1, 2), BlockCopy(2, 3)],
        new_seqs=[NewSeq(0, [1], SamplerParams())],
        seqs=[seq(0, 0, 1, (1,))],
    )
    runner.execute(plan)
    assert torch.equal(pool[2], before[1]) and torch.equal(pool[3], before[1])
    assert not torch.equal(pool[1], before[1])
    untouched = [i for i in range(16) if i not in (1, 2, 3)]
    assert torch.equal(pool[untouched], before[untouched])


@pytest.mark.skipif(not gemm.is_available(), reason="needs the packed bf16 kernel")
def test_replayed_steps_are_the_steps(make_runner: MakeRunner) -> None:
    """The same requests through a runner that replays and one that does not: equal bits."""

    def run(replays: bool) -> tuple[list[list[int]], torch.Tensor]:
        runner = make_runner(torch.bfloat16)
        assert runner._replay is not None
        if not replays:
            runner._replay = None
        runner.kv_store.data.zero_()
        # Sampled at high temperature: with random weights greedy tokens repeat and show nothing.
        params = [SamplerParams(temperature=2.0, seed=i) for i in range(3)]
        new = [NewSeq(i, [3 + i] * (i + 1), params[i]) for i in range(3)]
        blocks = [(0, 1, 2), (3, 4, 5), (6, 7, 8)]
        plans = [StepPlan(0, new_seqs=new, seqs=[seq(i, 0, i + 1, blocks[i]) for i in range(3)])]
        for step in range(1, 9):  # the middle one sits out every third step: sizes 3 and 2
            running = [i for i in range(3) if i != 1 or step % 3]
            counts = {0: step, 1: 1 + step - step // 3, 2: 2 + step}
            plans.append(StepPlan(step, seqs=[seq(i, counts[i], 1) for i in running]))
        tokens = [[r.token_id for r in runner.execute(plan).sampled] for plan in plans]
        if replays:
            assert {num_seqs for num_seqs, _ in runner._replay._steps} == {2, 3}
        return tokens, runner.kv_store.data[:9].float()

    tokens, pool = run(replays=True)
    expected_tokens, expected_pool = run(replays=False)
    assert tokens == expected_tokens
    assert torch.equal(pool, expected_pool)
    assert len(np.unique(np.concatenate(tokens))) > 10
