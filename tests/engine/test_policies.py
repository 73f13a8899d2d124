"""I4 across policies: contiguous regions hold the same KV as blocks anywhere, so tokens are equal.

In pools that hold a few regions only; and samples and beams against requests that ran alone.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, get_args

import pytest

from octavo import LLM, BeamSearchParams, SamplingParams
from octavo.config import EngineConfig, KVPolicy
from octavo.engine.history import PoolHistory
from octavo.errors import CapacityError, ConfigError, RequestCapacityError
from octavo.kv import KVCacheManager, SeqDemand
from octavo.plan import StepPlan

POLICIES: tuple[KVPolicy, ...] = get_args(KVPolicy)
RESERVING = tuple(policy for policy in POLICIES if policy != "paged")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(3)
    lengths = (1, 5, 15, 16, 17, 31, 40, 65)
    return [[rng.randrange(320) for _ in range(length)] for length in lengths]


def exactly(num_tokens: int) -> SamplingParams:
    """The best tokens of random weights are the same ones again and again; these are not."""
    return SamplingParams(temperature=1, seed=num_tokens, max_tokens=num_tokens, ignore_eos=True)


LENGTHS = (10, 3, 7, 12, 1, 9, 8, 14)


def answers(path: Path, prompts: list[list[int]], **options: Any) -> tuple[list[list[int]], LLM]:
    llm = LLM(
        str(path), dtype="float32", max_model_len=80, max_num_seqs=8, num_gpu_blocks_override=20,
        max_num_batched_tokens=64, num_threads=1, **options,
    )  # fmt: skip
    with llm:
        params = [exactly(num) for num in LENGTHS]
        outputs = llm.generate([*prompts], params, use_tqdm=False)
        report = llm.memory_report()
        assert report.ledger.num_physical_blocks == 0
        assert report.kv_policy == options["kv_policy"]
        if options["kv_policy"] != "paged":
            assert report.num_preemptions == 0
            assert report.history.peak_seqs < len(prompts)  # the pool was too small for all
    return [output.outputs[0].token_ids for output in outputs], llm


@pytest.fixture(scope="module")
def paged(tiny_weights_path: Path, prompts: list[list[int]]) -> list[list[int]]:
    return answers(tiny_weights_path, prompts, kv_policy="paged")[0]


@pytest.mark.parametrize("policy", RESERVING)
def test_every_policy_gives_the_same_tokens(
    policy: KVPolicy, tiny_weights_path: Path, prompts: list[list[int]], paged: list[list[int]]
) -> None:
    found, _ = answers(tiny_weights_path, prompts, kv_policy=policy)
    assert [len(tokens) for tokens in found] == list(LENGTHS)
    assert found == paged


# -- samples, beams, refusals


@pytest.mark.parametrize("policy", POLICIES)
def test_samples_and_beams_do_not_depend_on_the_policy(
    policy: KVPolicy, tiny_weights_path: Path
) -> None:
    with LLM(str(tiny_weights_path), dtype="float32", max_model_len=64, block_size=8) as alone:
        requests = mixed()
        expected = [texts(alone.generate([p], [s], use_tqdm=False)) for p, s in requests]
    with LLM(
        str(tiny_weights_path), dtype="float32", max_model_len=64, block_size=8, kv_policy=policy,
        num_gpu_blocks_override=40, max_num_seqs=8, max_num_batched_tokens=16,
    ) as llm:  # fmt: skip
        outputs = llm.generate([p for p, _ in requests], [s for _, s in requests], use_tqdm=False)
        assert [texts([output]) for output in outputs] == expected
        assert llm.memory_report().ledger.free == 40 * 8 or policy == "paged"


def mixed() -> list[tuple[list[int], SamplingParams | BeamSearchParams]]:
    rng = random.Random(11)
    found: list[tuple[list[int], SamplingParams | BeamSearchParams]] = []
    for i in range(9):
        prompt = [rng.randrange(3, 250) for _ in range(rng.randrange(1, 30))]
        if i % 3 == 2:
            found.append((prompt, BeamSearchParams(beam_width=3, max_tokens=9)))
        else:
            params = SamplingParams(
                n=1 + i % 4, temperature=0.9, seed=i, max_tokens=4 + 2 * i, ignore_eos=True
            )
            found.append((prompt, params))
    return found


def texts(outputs: Any) -> list[Any]:
    return [
        [list(s.token_ids) for s in output.outputs]
        if hasattr(output, "outputs")
        else [list(s.tokens) for s in output.sequences]
        for output in outputs
    ]


@pytest.mark.parametrize("policy", ["orca-max", "contiguous"])
def test_more_samples_than_regions_are_refused_with_the_arithmetic(
    policy: KVPolicy, tiny_weights_path: Path
) -> None:
    with LLM(
        str(tiny_weights_path), dtype="float32", max_model_len=64, block_size=8, kv_policy=policy,
        num_gpu_blocks_override=24, max_num_seqs=16,
    ) as llm:  # fmt: skip
        with pytest.raises(RequestCapacityError, match=r"\b4\b.*\b3\b"):
            llm.generate([[1, 2, 3]], SamplingParams(n=4, temperature=1), use_tqdm=False)
        (output,) = llm.generate([[1, 2, 3]], SamplingParams(n=3, temperature=1), use_tqdm=False)
        assert len(output.outputs) == 3


@pytest.mark.parametrize("policy", RESERVING)
def test_what_needs_paging_is_refused_or_off(policy: KVPolicy, tiny_weights_path: Path) -> None:
    for option in (
        {"swap_space": 1}, {"preemption_mode": "swap"}, {"kv_disk_dir": "x"},
        {"preemption_victim": "lowest-cost"}, {"preemption_victim": "priority"},
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=rf"{next(iter(option))}.*kv_policy='{policy}'"):
            EngineConfig(kv_policy=policy, **option)
    with LLM(
        str(tiny_weights_path), max_model_len=64, num_gpu_blocks_override=16, kv_policy=policy
    ) as llm:
        assert not llm.config.enable_prefix_caching
        assert llm.config.swap_space == 0
        with pytest.raises(CapacityError, match=f"--kv-policy {policy} its size is fixed"):
            llm.resize_kv_cache(llm.memory_report().plan.bytes_per_block * 8)


def test_a_context_longer_than_the_largest_region_is_refused(tiny_weights_path: Path) -> None:
    with pytest.raises(CapacityError, match=r"longest region .* holds 64 tokens"):
        LLM(
            str(tiny_weights_path),
            max_model_len=100,
            num_gpu_blocks_override=7,
            kv_policy="orca-max",
        )
    # Unasked, contexts are as long as regions can be.
    with LLM(str(tiny_weights_path), num_gpu_blocks_override=7, kv_policy="orca-max") as llm:
        assert llm.config.max_model_len == 64


def test_means_over_a_run_weigh_all_of_it_alike() -> None:
    """Also when samples had to be thinned out: half of the time 8 tokens are in the pool. Time in
    which no step ran does not count."""
    kv = KVCacheManager(4, 4)
    history = PoolHistory(kv)
    for _ in range(3000):
        history.record(StepPlan(0), 0.4)
    kv.start(0, SeqDemand(8, 16))
    kv.grow(0, 8, 0)
    kv.commit(0, 8)
    for _ in range(24_000):  # 3,000 times 0.4 s
        history.record(StepPlan(0), 0.05)
    settled = history.summary().settled
    assert settled is not None
    assert settled.tokens == pytest.approx(4.0, rel=0.02)


def test_what_was_reserved_in_vain_is_told_when_the_request_has_ended(
    tiny_weights_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octavo.engine.history._SPACING_S", 0.0)
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    with LLM(
        str(tiny_weights_path), dtype="float32", max_model_len=64, block_size=8,
        kv_policy="orca-max", num_gpu_blocks_override=8,
    ) as llm:  # fmt: skip
        at_once = SamplingParams(max_tokens=40, stop_token_ids=list(range(320)))
        llm.generate([prompt], at_once, use_tqdm=False)
        settled = llm.memory_report().history.settled
        assert settled is not None
        # Its one sample was taken while 40 slots might still have been used, and 16 never; its one
        # token was not computed.
        assert (settled.tokens, settled.reserved, settled.internal) == (8, 1, 55)
        assert settled.undecided == 0
        assert "as it turned out: tokens 12.5%, reserved 1.6%, internal 85.9%" in str(
            llm.memory_report()
        )
        stream = llm.stream(prompt, SamplingParams(max_tokens=40, ignore_eos=True))
        next(iter(stream))
        settled = llm.memory_report().history.settled
        assert settled is not None
        assert settled.undecided > 0
        assert "of the reserved not decided yet" in str(llm.memory_report())
