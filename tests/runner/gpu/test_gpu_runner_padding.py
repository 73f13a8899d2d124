"""Recorded steps of the GPU's runner that are filled up: what they write, and which are taken."""

from __future__ import annotations

import pytest
import torch
from gpu_traffic import (
    GREEDY,
    WARM,
    MakeCpu,
    MakeGpu,
    one_by_one,
    overlapped,
    tokens_of,
    watched,
)
from runner_support import seq

from octavo.plan import NewSeq, StepPlan
from octavo.runner.gpu.cutting import Cutter
from octavo.runner.gpu.layout import Room


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
