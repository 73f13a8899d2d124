"""Sequences that share: forks, several draws from one row, beams, moved blocks, maintenance."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from runner_support import seq

from octavo.errors import NumericsError
from octavo.ops.cpu import gemm
from octavo.plan import (
    BeamCandidate,
    BeamDraw,
    BlockCopy,
    CopyKind,
    NewSeq,
    SeqFork,
    SeqResult,
    StepPlan,
)
from octavo.request import SamplerParams
from octavo.runner.base import compact
from octavo.runner.input_batch import InputBatch
from octavo.runner.runner import Runner
from octavo.sampling import draw as draw_module

MakeRunner = Callable[..., Runner]
PROMPT = [5, 17, 99, 3, 42, 8]
GREEDY = SamplerParams()


def make_inputs(max_num_seqs: int = 4) -> InputBatch:
    return InputBatch(
        block_size=4, max_num_seqs=max_num_seqs, max_num_tokens=32, max_blocks_per_seq=8
    )


def tokens_of(inputs: InputBatch, seq_id: int) -> list[int]:
    state = inputs.seqs[seq_id]
    return state.tokens(0, state.num_tokens).tolist()


# -- what the runner remembers


def test_forks_appends_and_ends_in_the_plans_order() -> None:
    inputs = make_inputs(max_num_seqs=3)
    inputs.apply(StepPlan(0, new_seqs=[NewSeq(0, PROMPT, GREEDY)], seqs=[seq(0, 0, 6, (3, 4))]))
    inputs.seqs[0].append(11)
    plan = StepPlan(
        1,
        forks=[
            SeqFork(0, 1, 7, GREEDY, 1),
            SeqFork(1, 2, 6, GREEDY, 2),
            SeqFork(0, 3, 7, GREEDY, 3),
        ],
        appends=[(1, 70), (2, 80), (0, 60)],
        finished=[0, 3],
        seqs=[seq(1, 7, 1, (3, 5)), seq(2, 6, 1, (3, 4))],
    )
    inputs.apply(plan)
    assert sorted(inputs.seqs) == [1, 2]
    assert tokens_of(inputs, 1) == [*PROMPT, 11, 70]
    assert tokens_of(inputs, 2) == [*PROMPT, 80]
    assert inputs.seqs[1].num_prompt_tokens == inputs.seqs[2].num_prompt_tokens == 6
    assert inputs.block_table(1) == [3, 5] and inputs.block_table(2) == [3, 4]
    batch = inputs.build(plan.seqs)
    assert batch.token_ids.tolist() == [70, 80] and batch.prompt_lens.tolist() == [6, 6]
    inputs.seqs[1].append(12)  # a fork's tokens are its own
    assert tokens_of(inputs, 2) == [*PROMPT, 80]


def test_a_fork_grows_past_its_first_buffer() -> None:
    inputs = make_inputs()
    inputs.apply(
        StepPlan(0, new_seqs=[NewSeq(0, [9], GREEDY)], forks=[SeqFork(0, 1, 1, GREEDY, 1)])
    )
    for token in range(100):
        inputs.seqs[1].append(token)
    assert tokens_of(inputs, 1) == [9, *range(100)] and tokens_of(inputs, 0) == [9]


def test_moved_blocks_are_renamed_all_at_once() -> None:
    inputs = make_inputs()
    new = [NewSeq(i, PROMPT, GREEDY) for i in range(3)]
    blocks = [(9, 3), (3, 8), (0, 1)]
    inputs.apply(StepPlan(0, new_seqs=new, seqs=[seq(i, 0, 6, blocks[i]) for i in range(3)]))
    inputs.apply(StepPlan(1, moved=[(9, 3), (3, 2), (8, 9), (700, 4)]))
    assert [inputs.block_table(i) for i in range(3)] == [[3, 2], [2, 9], [0, 1]]
    # A plan's new blocks are already named as they will be.
    inputs.apply(StepPlan(2, moved=[(9, 7)], seqs=[seq(1, 6, 3, (9,))]))
    assert inputs.block_table(1) == [2, 7, 9]


def test_more_tables_than_rows_is_an_invariant() -> None:
    inputs = make_inputs(max_num_seqs=1)
    new = [NewSeq(i, [1], GREEDY) for i in range(2)]
    with pytest.raises(AssertionError, match="rows"):
        inputs.apply(StepPlan(0, new_seqs=new, seqs=[seq(i, 0, 1, (i,)) for i in range(2)]))


# -- plans that compute nothing


def test_maintenance_brings_memory_and_tables_up_to_date(make_runner: MakeRunner) -> None:
    runner = make_runner(torch.float32, num_host_blocks=4)
    new = NewSeq(0, PROMPT, GREEDY)
    runner.execute(StepPlan(0, new_seqs=[new], seqs=[seq(0, 0, 6, (12, 13))]))
    content = runner.kv_store.data[12:14].clone()
    result = runner.execute(
        StepPlan(
            1,
            moved=[(12, 1), (13, 0)],
            copies=[
                BlockCopy(12, 1),
                BlockCopy(13, 3, CopyKind.TO_HOST),
                BlockCopy(3, 0, CopyKind.FROM_HOST),
            ],
        )
    )
    assert (result.step_id, result.sampled, result.beams, result.prompt_logprobs) == (1, [], [], {})
    assert result.num_host_copies == 2 and result.copy_s > 0 and result.compute_s == 0
    assert torch.equal(runner.kv_store.data[[1, 0]], content)
    assert runner.inputs.block_table(0) == [1, 0]
    result = runner.execute(StepPlan(2, finished=[0]))
    assert result.sampled == [] and result.copy_s == 0 and 0 not in runner.inputs.seqs
    assert len(runner.sampling) == 0


def test_times_of_a_step(make_runner: MakeRunner) -> None:
    runner = make_runner(torch.float32)
    new = NewSeq(0, PROMPT, GREEDY)
    result = runner.execute(StepPlan(0, new_seqs=[new], seqs=[seq(0, 0, 6, (0, 1))]))
    assert result.compute_s > 0 and result.copy_s == 0 and result.num_host_copies == 0


# -- several samples of one prompt


def lonely(make_runner: MakeRunner, params: SamplerParams, index: int, num: int) -> list[SeqResult]:
    """A sample that runs alone in a runner of its own: its first `num` tokens."""
    runner = make_runner(torch.float32)
    new = NewSeq(0, PROMPT, params, index)
    found = runner.execute(StepPlan(0, new_seqs=[new], seqs=[seq(0, 0, 6, (0, 1, 2))])).sampled
    for step in range(1, num):
        found += runner.execute(StepPlan(step, seqs=[seq(0, 5 + step, 1)])).sampled
    return found


def same(found: SeqResult, expected: SeqResult) -> bool:
    """The same token, and logprobs up to what a matrix product's shape does to its last bits."""
    if found.token_id != expected.token_id:
        return False
    if found.logprobs is None or expected.logprobs is None:
        return found.logprobs is expected.logprobs
    (_, logprob, *rest), (_, other, *other_rest) = found.logprobs, expected.logprobs
    return abs(logprob - other) < 1e-5 and rest[0] == other_rest[0]


@pytest.mark.parametrize(
    "params",
    [
        SamplerParams(temperature=1.5, seed=4, num_logprobs=2),
        SamplerParams(temperature=1.5, seed=4, repetition_penalty=1.5, num_logprobs=0),
        SamplerParams(temperature=1.5, seed=4, top_k=20, frequency_penalty=1.0),
        SamplerParams(),
    ],
    ids=["plain", "repetition", "frequency", "greedy"],
)
def test_samples_are_those_of_lonely_runs(make_runner: MakeRunner, params: SamplerParams) -> None:
    """Samples 1 to 3 draw from sample 0's row, then each goes on; beside them another request."""
    runner = make_runner(torch.float32)
    other = SamplerParams(temperature=1.5, seed=9)
    plan = StepPlan(
        0,
        new_seqs=[NewSeq(50, PROMPT, other), NewSeq(0, PROMPT, params), NewSeq(51, PROMPT, other)],
        forks=[SeqFork(0, i, 6, params, i) for i in (1, 2, 3)],
        seqs=[seq(50, 0, 6, (14, 15)), seq(0, 0, 6, (0, 1)), seq(51, 0, 4, (13,), sample=False)],
        extra_draws={0: (1, 2, 3)},
    )
    first = runner.execute(plan).sampled
    assert [result.seq_id for result in first] == [50, 0, 1, 2, 3]
    expected = [lonely(make_runner, params, i, 3) for i in range(4)]
    assert all(same(first[1 + i], expected[i][0]) for i in range(4))
    assert first[0].token_id == lonely(make_runner, other, 0, 1)[0].token_id
    copies = [BlockCopy(1, 1 + i) for i in (1, 2, 3)]
    tables = {i: (0, 1 + i) for i in (1, 2, 3)}
    second = runner.execute(
        StepPlan(1, copies=copies, seqs=[seq(0, 6, 1), *(seq(i, 6, 1, tables[i]) for i in tables)])
    ).sampled
    third = runner.execute(StepPlan(2, seqs=[seq(i, 7, 1) for i in (3, 1, 0, 2)])).sampled
    third.sort(key=lambda result: result.seq_id)
    for i in range(4):
        assert same(second[i], expected[i][1]) and same(third[i], expected[i][2])
    drawn = {result.token_id for result in (*first[1:], *second, *third)}
    assert len(drawn) > 3 or not params.temperature


def test_more_samples_than_rows_and_pieces(make_runner: MakeRunner, monkeypatch) -> None:
    """The workspace has 8 rows; 20 samples of one prompt and 3 of another, in pieces of 2 rows."""
    monkeypatch.setattr(draw_module, "CHUNK_ELEMENTS", 2 * 128)
    runner = make_runner(torch.float32)
    params = SamplerParams(temperature=2.0, seed=1, num_logprobs=1, logit_bias=((4, 1.0),))
    plan = StepPlan(
        0,
        new_seqs=[NewSeq(0, PROMPT, params), NewSeq(100, PROMPT, params)],
        forks=[SeqFork(0, i, 6, params, i) for i in range(1, 20)]
        + [SeqFork(100, 100 + i, 6, params, i) for i in (1, 2)],
        seqs=[seq(100, 0, 6, (2, 3)), seq(0, 0, 6, (0, 1))],
        extra_draws={0: tuple(range(1, 20)), 100: (101, 102)},
    )
    sampled = runner.execute(plan).sampled
    assert [result.seq_id for result in sampled] == [100, 101, 102, *range(20)]
    tokens = {result.seq_id: result.token_id for result in sampled}
    assert [tokens[100 + i] for i in range(3)] == [tokens[i] for i in range(3)]
    assert tokens[0] == lonely(make_runner, params, 0, 1)[0].token_id
    assert tokens[13] == lonely(make_runner, params, 13, 1)[0].token_id
    assert len(set(tokens.values())) > 5


def test_prompt_logprobs_are_the_carriers(make_runner: MakeRunner) -> None:
    runner = make_runner(torch.float32)
    params = SamplerParams(num_prompt_logprobs=1)
    plan = StepPlan(
        0,
        new_seqs=[NewSeq(0, PROMPT, params)],
        forks=[SeqFork(0, 1, 6, params, 1)],
        seqs=[seq(0, 0, 6, (0, 1))],
        extra_draws={0: (1,)},
    )
    found = runner.execute(plan).prompt_logprobs
    assert list(found) == [0] and len(found[0]) == 5
    plan = StepPlan(1, preempted=[0, 1], seqs=[seq(1, 0, 7, (0, 1)), seq(0, 0, 7, (2, 3))])
    assert runner.execute(plan).prompt_logprobs == {}


# -- beams


def reference_candidates(
    runner: Runner, sequences: list[list[int]], scores: list[float], num: int
) -> list[BeamCandidate]:
    """By whole prompts in a fresh sequence each: log_softmax, sum, sort."""
    every = []
    with torch.inference_mode():
        for beam, (tokens, score) in enumerate(zip(sequences, scores, strict=True)):
            blocks = tuple(range(-(-len(tokens) // 4)))
            plan = StepPlan(
                0,
                new_seqs=[NewSeq(0, tokens, GREEDY)],
                seqs=[seq(0, 0, len(tokens), blocks)],
            )
            hidden = runner.forward(plan)
            logits = runner.model.logits(hidden[-1:], runner.workspace)[0]
            sums = torch.log_softmax(logits, dim=-1) + torch.tensor(score)
            every += [BeamCandidate(beam, token, s) for token, s in enumerate(sums.tolist())]
            runner.execute(StepPlan(0, finished=[0]))
    return sorted(every, key=lambda c: (-c.score, c.beam, c.token_id))[:num]


def assert_candidates(found: list[BeamCandidate], expected: list[BeamCandidate]) -> None:
    assert [c[:2] for c in found] == [c[:2] for c in expected]
    assert [c.score for c in found] == pytest.approx([c.score for c in expected], abs=2e-5)


def test_beams_beside_other_sequences(make_runner: MakeRunner) -> None:
    """Two beams of one request, one of another, a greedy one and one with `n`, all in one step."""
    runner, oracle = make_runner(torch.float32), make_runner(torch.float32)
    sampled = SamplerParams(temperature=1.5, seed=4, num_logprobs=1, min_tokens=1)
    new = [NewSeq(0, PROMPT, GREEDY), NewSeq(1, [7, 7], GREEDY), NewSeq(2, [1, 2, 3], GREEDY)]
    first = runner.execute(
        StepPlan(
            0,
            new_seqs=new,
            seqs=[seq(0, 0, 6, (0, 1)), seq(1, 0, 2, (2,)), seq(2, 0, 3, (3,))],
            beams=[BeamDraw((2,), (0.0,), 2), BeamDraw((0,), (0.0,), 4)],
        )
    )
    assert [result.seq_id for result in first.sampled] == [1]
    assert_candidates(first.beams[0], reference_candidates(oracle, [[1, 2, 3]], [0.0], 2))
    assert_candidates(first.beams[1], reference_candidates(oracle, [PROMPT], [0.0], 4))
    one, two = first.beams[1][:2]
    second = runner.execute(
        StepPlan(
            1,
            new_seqs=[NewSeq(4, PROMPT, sampled)],
            forks=[SeqFork(0, 3, 6, GREEDY, 1), SeqFork(4, 5, 6, sampled, 1)],
            appends=[(0, one.token_id), (3, two.token_id), (2, 77)],
            copies=[BlockCopy(1, 4)],
            seqs=[
                seq(0, 6, 1),
                seq(2, 3, 1),
                seq(1, 2, 1),
                seq(4, 0, 6, (8, 9)),
                seq(3, 6, 1, (0, 4)),
            ],
            extra_draws={4: (5,)},
            beams=[BeamDraw((0, 3), (one.score, two.score), 6), BeamDraw((2,), (-0.5,), 3)],
        )
    )
    assert [result.seq_id for result in second.sampled] == [1, 4, 5]
    expected = [lonely(make_runner, sampled, i, 1)[0] for i in (0, 1)]
    assert all(same(a, b) for a, b in zip(second.sampled[1:], expected, strict=True))
    ways = [[*PROMPT, one.token_id], [*PROMPT, two.token_id]]
    assert_candidates(
        second.beams[0], reference_candidates(oracle, ways, [one.score, two.score], 6)
    )
    assert_candidates(second.beams[1], reference_candidates(oracle, [[1, 2, 3, 77]], [-0.5], 3))
    greedy_alone = make_runner(torch.float32)
    tokens = (
        greedy_alone.execute(
            StepPlan(0, new_seqs=[NewSeq(0, [7, 7], GREEDY)], seqs=[seq(0, 0, 2, (0,))])
        ).sampled
        + greedy_alone.execute(StepPlan(1, seqs=[seq(0, 2, 1)])).sampled
    )
    assert [t.token_id for t in tokens] == [
        first.sampled[0].token_id, second.sampled[0].token_id,
    ]  # fmt: skip


def test_beams_take_their_temperature_and_nothing_else(make_runner: MakeRunner) -> None:
    params = [
        SamplerParams(temperature=2.0),
        SamplerParams(temperature=2.0, repetition_penalty=2.0, top_k=1, allowed_token_ids=(1,)),
        SamplerParams(temperature=0.5),
    ]
    found = []
    for each in params:
        runner = make_runner(torch.float32)
        plan = StepPlan(
            0,
            new_seqs=[NewSeq(0, PROMPT, each)],
            seqs=[seq(0, 0, 6, (0, 1))],
            beams=[BeamDraw((0,), (0.0,), 8)],
        )
        found.append(runner.execute(plan).beams[0])
    assert found[0] == found[1] != found[2]
    assert [c.token_id for c in found[0]] == [c.token_id for c in found[2]]
    assert found[0][0].score < found[2][0].score


@given(st.lists(st.integers(0, 11), unique=True).map(sorted), st.integers(1, 5))
def test_rows_move_to_the_front(rows: list[int], at_once: int) -> None:
    logits = torch.arange(12.0)[:, None].repeat(1, 3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draw_module, "CHUNK_ELEMENTS", 3 * at_once)
        assert compact(logits, rows)[:, 0].tolist() == rows


def test_beams_that_are_not_finite_fail_the_step(make_runner: MakeRunner) -> None:
    runner = make_runner(torch.float32)
    runner.model.final_norm.weight.fill_(float("nan"))
    plan = StepPlan(
        0,
        new_seqs=[NewSeq(0, PROMPT, GREEDY)],
        seqs=[seq(0, 0, 6, (0, 1))],
        beams=[BeamDraw((0,), (0.0,), 8)],
    )
    with pytest.raises(NumericsError, match=r"\[0\]"):
        runner.execute(plan)


# -- recorded decode steps


@pytest.mark.skipif(not gemm.is_available(), reason="needs the packed bf16 kernel")
def test_replayed_steps_with_beams_and_extra_draws(make_runner: MakeRunner) -> None:
    """Decode steps with beams, with further samples and with neither share one recording."""

    def run(replays: bool) -> list[object]:
        runner = make_runner(torch.bfloat16)
        assert runner._replay is not None
        if not replays:
            runner._replay = None
        params = SamplerParams(temperature=2.0, seed=3)
        # One token each from the start on: even the first step is a decode by its shape.
        new = [NewSeq(i, [3 + i], params if i else GREEDY) for i in range(3)]
        plans = [
            StepPlan(0, new_seqs=new, seqs=[seq(i, 0, 1, (4 * i, 4 * i + 1)) for i in range(3)]),
            StepPlan(
                1,
                seqs=[seq(i, 1, 1) for i in range(3)],
                beams=[BeamDraw((1,), (0.0,), 4)],
            ),
            StepPlan(
                2,
                appends=[(1, 60)],
                forks=[SeqFork(2, 7, 3, params, 1), SeqFork(2, 8, 3, params, 2)],
                seqs=[seq(2, 2, 1), seq(1, 2, 1), seq(0, 2, 1)],
                extra_draws={2: (7, 8)},
                beams=[BeamDraw((1,), (-1.0,), 4)],
            ),
            StepPlan(3, finished=[1], seqs=[seq(2, 3, 1), seq(7, 3, 1, (8, 9)), seq(0, 3, 1)]),
        ]
        # Sequence 1 draws its first token itself; from then on it is a beam.
        results = [runner.execute(plan) for plan in plans]
        if replays:
            assert {num_seqs for num_seqs, _ in runner._replay._steps} == {3}
        return [(r.sampled, r.beams) for r in results]

    found = run(replays=True)
    assert found == run(replays=False)
    assert [r.seq_id for r in found[2][0]] == [2, 7, 8, 0]  # type: ignore[index]


@pytest.mark.skipif(not gemm.is_available(), reason="needs the packed bf16 kernel")
@pytest.mark.parametrize("max_blocks", [16, 40], ids=["moves", "in place"])
def test_the_pool_grows_between_replayed_steps(make_runner: MakeRunner, max_blocks: int) -> None:
    def run(resized: bool) -> list[int]:
        runner = make_runner(torch.bfloat16, max_blocks=max_blocks)
        params = SamplerParams(temperature=2.0, seed=3)
        plans = [
            StepPlan(0, new_seqs=[NewSeq(0, PROMPT, params)], seqs=[seq(0, 0, 6, (14, 15))]),
            *(StepPlan(i, seqs=[seq(0, 5 + i, 1)]) for i in (1, 2)),
            StepPlan(3, seqs=[seq(0, 8, 1, (33 if resized else 3,))]),
            StepPlan(4, seqs=[seq(0, 9, 1)]),
        ]
        tokens = []
        for plan in plans:
            if resized and plan.step_id == 3:
                assert runner._replay is not None and runner._replay._steps
                runner.resize_pool(40)
                assert bool(runner._replay._steps) == (max_blocks == 40)
            tokens.append(runner.execute(plan).sampled[0].token_id)
        return tokens

    assert run(resized=True) == run(resized=False)
