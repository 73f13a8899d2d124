"""`octavo bench step`: plans that are what they say, and the work that is counted for them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import octavo.bench.step as module
from octavo import LLM, SamplingParams
from octavo.arch import MLAConfig, MoEConfig
from octavo.attention.gather import GatherAttention
from octavo.bench.roofline import Rates
from octavo.bench.step import (
    StepOptions,
    attention_flops,
    engine_config,
    linear_weights,
    mean_attended,
    run_steps,
)
from octavo.bench.step_runs import StepRuns
from octavo.config import EngineConfig
from octavo.engine.profiling import launcher
from octavo.errors import InvalidRequestError
from octavo.models.decoder import Decoder
from octavo.plan import SeqPlan, StepPlan, StepResult

OPTIONS = StepOptions((1, 3), context=20, prefill_batch=3, prefill_len=24, num_steps=2, num_iters=2)


@pytest.fixture(scope="module")
def llm(tiny_model_path: Path) -> Iterator[LLM]:
    config = EngineConfig(
        model=str(tiny_model_path), load_format="dummy", device="cpu", max_num_seqs=4,
        max_num_batched_tokens=32,
    )  # fmt: skip
    with LLM(config=engine_config(config, OPTIONS, gpu=False)) as engine:
        yield engine


@pytest.fixture(autouse=True)
def rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "measure_rates", lambda *_: Rates("m", "bfloat16", 1e9, 1e12))


def watched(llm: LLM, runs: StepRuns) -> list[tuple[StepPlan, StepResult]]:
    """What `runs` has carried out from now on."""
    found: list[tuple[StepPlan, StepResult]] = []
    launch = launcher(llm)

    def launched(plan: StepPlan) -> Callable[[], StepResult]:
        wait = launch(plan)

        def waited() -> StepResult:
            result = wait()
            found.append((plan, result))
            return result

        return waited

    runs._launch = launched
    return found


def test_every_step_is_measured_and_nothing_stays(llm: LLM) -> None:
    found = run_steps(llm, OPTIONS)
    assert [(r.kind, r.batch, r.tokens) for r in found.rows] == [
        ("decode", 1, 20), ("decode", 3, 20), ("prefill", 3, 24),
    ]  # fmt: skip
    assert all(0 < r.device_s <= r.step_s and r.share > 0 for r in found.rows)
    assert found.rows[2].num_steps == 3  # 72 tokens, 32 a step
    assert "decode    3 x 20" in str(found)
    runner = llm._engine.engine.core._launch.__self__  # type: ignore[union-attr]
    assert not runner.inputs.seqs
    (output,) = llm.generate(
        [[5]], SamplingParams(max_tokens=3), use_tqdm=False
    )  # the engine still serves
    assert output.finished


def test_decodes_compute_one_token_of_each_sequence(llm: LLM) -> None:
    runs = StepRuns(llm)
    seen = watched(llm, runs)
    module._decode(llm, runs, OPTIONS, 3, Rates("m", "bfloat16", 1e9, 1e12))
    decodes = [(plan, result) for plan, result in seen if len(plan.seqs) == 3]
    starts = [plan.seqs[0].start for plan, _ in decodes]
    assert starts == list(range(20, 20 + 3 + 2 * 2))
    for number, (plan, result) in enumerate(decodes):
        assert all(s.num_tokens == 1 and s.sample for s in plan.seqs)
        assert all(bool(s.new_block_ids) == (number == 0) for s in plan.seqs)
        assert len(result.sampled) == 3


def test_equal_contexts_give_equal_tokens(llm: LLM) -> None:
    """Blocks are filled with one prompt's K and V: the same last token, the same next one."""
    runs = StepRuns(llm)
    runs._random.choices = lambda population, k: [7] * k  # type: ignore[method-assign,assignment]
    tables = runs.tables(2, 32)
    runs.fill(tables, 20)
    seen = watched(llm, runs)
    with runs.known(2, 21) as seqs:
        pairs = zip(seqs, tables, strict=True)
        runs.run([[SeqPlan(seq, 20, 1, table, None, True) for seq, table in pairs]])
    (tokens,) = [[s.token_id for s in r.sampled] for p, r in seen if p.seqs]
    once = SamplingParams(temperature=0, max_tokens=1)
    (alone,) = llm.generate([[7] * 21], once, use_tqdm=False)
    assert tokens == [alone.outputs[0].token_ids[0]] * 2


def test_under_overlap_a_step_is_launched_before_the_last_ones_result(llm: LLM) -> None:
    runs = StepRuns(llm)
    runs.overlap = True
    happened: list[str] = []

    def launch(plan: StepPlan) -> Callable[[], StepResult]:
        happened.append(f"launch {plan.step_id}")

        def wait() -> StepResult:
            happened.append(f"wait {plan.step_id}")
            return StepResult(plan.step_id, [], compute_s=0.5)

        return wait

    runs._launch = launch
    times = runs.run([[], [], []])
    assert happened == ["launch 1", "launch 2", "wait 1", "launch 3", "wait 2", "wait 3"]
    assert (times.num_steps, times.compute_s) == (3, 1.5)


def test_chunks_hold_all_tokens_once(llm: LLM) -> None:
    runs = StepRuns(llm)
    plans = runs.chunks([1, 2, 3], [(0,), (1,), (2,)], 24)
    assert [sum(s.num_tokens for s in plan) for plan in plans] == [32, 32, 8]
    by_seq = {seq: [s for plan in plans for s in plan if s.seq_id == seq] for seq in (1, 2, 3)}
    for shares in by_seq.values():
        assert [s.start for s in shares] == [0, *(s.start + s.num_tokens for s in shares[:-1])]
        assert [s.sample for s in shares] == [False] * (len(shares) - 1) + [True]
        assert [bool(s.new_block_ids) for s in shares] == [True] + [False] * (len(shares) - 1)


def test_tables_share_no_block(llm: LLM) -> None:
    tables = StepRuns(llm).tables(3, 30)
    assert len({block for table in tables for block in table}) == 6


def test_what_has_no_room_is_refused(llm: LLM) -> None:
    runs = StepRuns(llm)
    with pytest.raises(InvalidRequestError, match=r"need 4,000 blocks of 16, and the pool has"):
        runs.tables(4, 16_000)
    with (
        pytest.raises(InvalidRequestError, match="a batch of 5 is more than the 4 sequences"),
        runs.known(5, 3),
    ):
        pass
    with pytest.raises(InvalidRequestError, match="--num-steps must be at least 1, got 0"):
        StepOptions(num_steps=0).check()
    with pytest.raises(InvalidRequestError, match="--batch-sizes must be at least 1, got 0"):
        StepOptions((4, 0)).check()
    small = EngineConfig(max_num_seqs=8)
    with pytest.raises(InvalidRequestError, match="--max-num-seqs 8 is less than the largest"):
        engine_config(small, StepOptions(), gpu=False)


def test_windows_end_what_a_token_attends_to(llm: LLM) -> None:
    assert mean_attended(llm.arch, 40) == 40
    assert mean_attended(llm.arch, 1, 4) == (1 + 2 + 3 + 4) / 4
    windows = dataclasses.replace(llm.arch, sliding_windows=(2, 0))
    assert mean_attended(windows, 40) == (2 + 40) / 2
    assert mean_attended(windows, 1, 4) == ((1 + 2 + 2 + 2) + (1 + 2 + 3 + 4)) / 2 / 4


def test_weights_are_those_of_the_shape(llm: LLM) -> None:
    # 2 layers of 64 wide, 4 + 2 x 2 heads of 16, 96 in the MLP, 320 tokens
    layer = 64 * 8 * 16 + 4 * 16 * 64 + 3 * 64 * 96
    assert linear_weights(llm.arch, head=False) == 2 * layer
    assert linear_weights(llm.arch) == 2 * layer + 64 * 320
    assert attention_flops(llm.arch, 10) == 4 * 2 * 4 * 16 * 10


def test_weights_of_experts_and_latents(llm: LLM) -> None:
    """Counted where all experts serve every token: every matrix there is."""
    mla = MLAConfig(32, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=12, q_lora_rank=20)
    moe = MoEConfig(3, 3, expert_size=24, shared_size=40, dense_layers=(0,))
    whole = dataclasses.replace(llm.arch, mla=mla, moe=moe, head_dim=24, num_kv_heads=4)
    for arch in (whole, dataclasses.replace(whole, mla=dataclasses.replace(mla, q_lora_rank=None))):
        decoder = Decoder(arch, GatherAttention(), torch.float32, 32, torch.device("cpu"))
        shapes = decoder.parameters_spec()
        matrices = sum(math.prod(s) for n, s in shapes.items() if len(s) == 2 and ".layers." in n)
        assert linear_weights(arch, head=False) == matrices
    assert attention_flops(whole, 10) == 2 * 2 * 4 * (32 + 8 + 32) * 10
    half = dataclasses.replace(whole, moe=dataclasses.replace(moe, experts_per_token=1))
    assert linear_weights(whole) - linear_weights(half) == 2 * 3 * 24 * 64
