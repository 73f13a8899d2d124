"""Bytes of a token, and blocks from a budget, against the paper's figures."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.errors import CapacityError
from octavo.kv.memory_plan import GPUTerms, MemoryPlan
from octavo.kv.shape import KVShape
from octavo.kv.sizing import plan_memory, resized

GIB = 1 << 30
OPT_13B = KVShape(40, 40, 128, 2)
OPT_66B = KVShape(64, 72, 128, 2)
OPT_175B = KVShape(96, 96, 128, 2)
SMOLLM2 = KVShape(30, 3, 64, 2)


@pytest.mark.parametrize(
    ("shape", "num_bytes"),
    [(OPT_13B, 819_200), (OPT_66B, 2_359_296), (OPT_175B, 4_718_592), (SMOLLM2, 23_040)],
)
def test_bytes_per_token(shape: KVShape, num_bytes: int) -> None:
    assert shape.bytes_per_token == num_bytes
    assert shape.bytes_per_block(16) == 16 * num_bytes


def plan(shape: KVShape = SMOLLM2, **changes: object) -> MemoryPlan:
    values: dict[str, object] = {
        "available_bytes": 4 * GIB, "weights_bytes": GIB, "activation_bytes": GIB // 2,
        "logits_bytes": GIB // 2, "block_size": 16, "max_model_len": 2048, "max_num_seqs": 256,
    }  # fmt: skip
    return plan_memory(shape=shape, **(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shape", "kv_gib", "num_slots"),
    [(OPT_13B, 12.0, 15_728), (OPT_66B, 21.3, 9_680), (OPT_175B, 264.0, 60_064)],
)
def test_slots_of_the_papers_set_ups(shape: KVShape, kv_gib: float, num_slots: int) -> None:
    """Table 1: 15.7K, 9.7K and 60.1K slots."""
    sized = plan(shape, available_bytes=1000 * GIB, kv_cache_memory_bytes=int(kv_gib * GIB))
    assert sized.num_slots == num_slots
    assert sized.num_slots // 2048 == {OPT_13B: 7, OPT_66B: 4, OPT_175B: 29}[shape]


def test_the_terms_add_up_to_the_budget() -> None:
    sized = plan(kv_share=0.5)
    assert sized.num_blocks == GIB // (16 * 23_040)
    assert sum(sized.terms().values()) == sized.budget_bytes
    assert sized.budget_bytes + sized.left_bytes == sized.available_bytes
    assert sized.left_bytes >= GIB
    assert sized.max_seq_len == 2048


def test_the_plan_prints_as_arithmetic() -> None:
    lines = str(plan(num_blocks=100, max_model_len=64)).splitlines()
    assert lines[0].split() == ["weights", "1.0", "GiB"]
    assert lines[1].split()[:2] == ["+", "activations"]
    assert lines[3].split("  ")[-1] == (
        "100 blocks x 16 tokens x 23,040 B, --num-gpu-blocks-override"
    )
    assert lines[4].startswith("= budget")
    assert "30 layers x 3 kv heads x 64 x 2 (K, V) x 2 B = 23,040 B a token" in lines[5]


def test_no_more_than_the_sequences_can_use() -> None:
    sized = plan(max_num_seqs=2, max_model_len=100)
    assert sized.num_blocks == 2 * 7
    assert sized.chosen_by == "all that 2 sequences of 100 tokens can use"


def test_an_exact_number_is_taken_if_there_is_memory_for_it() -> None:
    sized = plan(num_blocks=700, kv_cache_memory_bytes=5)
    assert sized.num_blocks == 700
    assert sized.left_bytes >= 0
    with pytest.raises(CapacityError, match="--num-gpu-blocks-override 1,000,000,000 x"):
        plan(num_blocks=10**9)


def test_not_one_block_says_the_arithmetic_and_the_flag() -> None:
    with pytest.raises(CapacityError) as error:
        plan(available_bytes=2 * GIB)
    for part in (
        "16 tokens x 23,040 B = 360.0 KiB", "2.0 GiB free - 1.0 GiB weights", "= 0 B",
        "--max-num-batched-tokens",
    ):  # fmt: skip
        assert part in str(error.value)
    with pytest.raises(CapacityError, match=r"is 1,000; raise it to at least 368,640"):
        plan(kv_cache_memory_bytes=1000)
    with pytest.raises(CapacityError, match="set --kv-cache-memory-bytes to 368,640"):
        plan(available_bytes=2 * GIB + 400_000)
    with pytest.raises(CapacityError, match=r"= -\d.*free some memory"):
        plan(available_bytes=GIB)


def test_more_kv_than_is_left_is_refused() -> None:
    with pytest.raises(CapacityError, match=rf"lower it to at most {2 * GIB:,}"):
        plan(kv_cache_memory_bytes=3 * GIB)


def test_a_length_that_was_asked_for_must_fit() -> None:
    with pytest.raises(CapacityError) as error:
        plan(num_blocks=100)
    for part in (
        "max_model_len=2,048 tokens needs 128 KV blocks", "the pool has 100",
        "--max-model-len to at most 1,600", "--num-gpu-blocks-override to 128",
    ):  # fmt: skip
        assert part in str(error.value)
    with pytest.raises(CapacityError, match=r"--kv-cache-memory-bytes to at least 47,185,920"):
        plan(kv_cache_memory_bytes=40_000_000)
    with pytest.raises(CapacityError, match=r"to at most [\d,]+, or use --kv-cache-dtype int8$"):
        plan(max_model_len=10**6)
    relaxed = plan(num_blocks=100, require_max_model_len=False)
    assert (relaxed.max_model_len, relaxed.max_seq_len) == (2048, 1600)
    assert plan(num_blocks=100, max_model_len=1600).max_seq_len == 1600


def test_the_default_host_tier() -> None:
    """A quarter of what the pool leaves, but at most 4 GiB and four times the pool."""
    block = 16 * 23_040
    quarter = plan(swap_space=None, kv_cache_memory_bytes=GIB)
    assert quarter.num_host_blocks == int(quarter_of(quarter)) // block
    assert quarter.host_chosen_by == "25% of what the pool leaves"
    few = plan(swap_space=None, num_blocks=128)
    assert (few.num_host_blocks, few.host_chosen_by) == (512, "4 x the pool")
    rich = plan(swap_space=None, available_bytes=100 * GIB, kv_cache_memory_bytes=40 * GIB)
    assert rich.num_host_blocks == 4 * GIB // block
    assert rich.host_chosen_by == "the most that is taken by default"


def quarter_of(sized: MemoryPlan) -> float:
    return (sized.left_bytes + sized.host_bytes) / 4


def test_the_host_tier_is_a_term_of_the_budget() -> None:
    sized = plan(swap_space=0.5, kv_cache_memory_bytes=GIB)
    assert sized.num_host_blocks == GIB // 2 // (16 * 23_040)
    assert sized.terms()["host tier"] == sized.host_bytes
    assert sum(sized.terms().values()) == sized.budget_bytes
    assert sized.budget_bytes + sized.left_bytes == sized.available_bytes
    assert "+ host tier" in str(sized) and "--swap-space" in str(sized)
    none = plan(swap_space=0)
    assert none.num_host_blocks == 0 and "host tier" not in str(none)


def test_a_host_tier_that_cannot_be_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"--swap-space 1.5 GiB is more.*at most 0.99"):
        plan(swap_space=1.5, kv_cache_memory_bytes=GIB + 2**20)
    with pytest.raises(CapacityError, match=r"--swap-space has no room for one KV block"):
        plan(swap_space=0.0001)
    with pytest.raises(CapacityError, match="--kv-disk-dir needs a host tier"):
        plan(swap_space=None, kv_cache_memory_bytes=2 * GIB, need_host="--kv-disk-dir")


def test_a_pool_is_resized_within_what_the_rest_leaves() -> None:
    block = 16 * 23_040
    sized = plan(swap_space=0.25, kv_cache_memory_bytes=GIB)
    larger = resized(sized, GIB + GIB // 2)
    assert larger.num_blocks == (GIB + GIB // 2) // block
    assert larger.budget_bytes + larger.left_bytes == larger.available_bytes
    most = sized.kv_bytes + sized.left_bytes
    assert resized(sized, most).num_blocks == most // block
    with pytest.raises(CapacityError, match=rf"host tier = .*at most {most:,}"):
        resized(sized, most + 1)
    with pytest.raises(CapacityError, match=r"less than one KV block of 368,640 B"):
        resized(sized, block - 1)


# -- on a GPU

FP8 = KVShape(30, 3, 64, 1, 2)
"""11,880 B a token: 30 x 3 x 2 x (64 + 2)."""


def gpu_plan(**changes: object) -> MemoryPlan:
    """20 GiB of 140, of which 18 GiB are taken, and 2 more by others."""
    terms: dict[str, Any] = {
        "graph_bytes": GIB, "runtime_bytes": GIB, "total_bytes": 140 * GIB,
        "others_bytes": 2 * GIB, "host_available_bytes": 8 * GIB,
    }  # fmt: skip
    terms |= {name: changes.pop(name) for name in list(changes) if name in terms}
    values: dict[str, object] = {
        "available_bytes": 20 * GIB, "weights_bytes": 15 * GIB, "gpu": GPUTerms(**terms),
        "swap_space": None,
    }  # fmt: skip
    return plan(**(values | changes))  # type: ignore[arg-type]


def test_a_pool_on_a_gpu_gets_all_that_is_left() -> None:
    sized = gpu_plan(max_num_seqs=1)
    block = 16 * 23_040
    assert sized.num_blocks == 2 * GIB // block
    assert list(sized.terms()) == [
        "weights", "activations", "logits", "graphs", "runtime", "KV cache",
    ]  # fmt: skip
    assert sized.budget_bytes == 18 * GIB + sized.kv_bytes
    assert 0 <= sized.left_bytes < block
    text = str(sized)
    assert "of 20.0 GiB of the GPU's 140.0 GiB (2.0 GiB held by others)" in text
    assert "all that --gpu-memory-utilization leaves" in text


def test_the_host_tier_of_a_gpu_is_of_the_hosts_memory() -> None:
    sized = gpu_plan()
    block = sized.bytes_per_block
    assert sized.num_host_blocks == 2 * GIB // block
    assert sized.host_chosen_by == "25% of free host memory"
    assert sized.host_left_bytes == 8 * GIB - sized.host_bytes
    assert gpu_plan(swap_space=0).left_bytes == sized.left_bytes
    with pytest.raises(CapacityError, match=r"than the host has free, 8.0 GiB; .*at most 8$"):
        gpu_plan(swap_space=9)


def test_a_block_of_fp8_is_filled_up_to_16_bytes_and_says_so() -> None:
    assert FP8.bytes_per_token == 11_880
    assert FP8.bytes_per_block(16) == 190_080 == 16 * 11_880
    assert FP8.bytes_per_block(1) == 11_888
    sized = gpu_plan(shape=FP8, block_size=1)
    assert sized.kv_bytes == sized.num_blocks * 11_888
    assert "blocks x (1 tokens x 11,880 B + 8 B of padding), all" in str(sized)
    assert "blocks x 16 tokens x 11,880 B, all" in str(gpu_plan(shape=FP8))
    with pytest.raises(CapacityError, match=r"block of 11,888 B: 1 tokens x 11,880 B \+ 8 B of"):
        resized(sized, 10)


def test_a_pool_on_a_gpu_is_resized() -> None:
    sized = gpu_plan()
    block, most = sized.bytes_per_block, sized.kv_bytes + sized.left_bytes
    assert most == 2 * GIB
    assert resized(sized, GIB).num_blocks == GIB // block
    assert resized(resized(sized, GIB), most).num_blocks == sized.num_blocks
    with pytest.raises(CapacityError) as error:
        resized(sized, most + 1)
    assert str(error.value).endswith(f"- 1.0 GiB runtime = 2.0 GiB; ask for at most {most:,}")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        # 2 of others, 18 that are taken, and 10: 30 / 140
        (
            {"kv_cache_memory_bytes": 10 * GIB},
            "lower it to at most 2,147,483,648, or raise --gpu-memory-utilization to at least "
            "0.215",
        ),
        ({"num_blocks": 10**9}, "lower it to at most 5,825"),
        (
            {"available_bytes": 10 * GIB},
            "(--gpu-memory-utilization 0.0857 of 140.0 GiB, less 2.0 GiB held by others) - 15.0 "
            "GiB weights - 512.0 MiB activations - 512.0 MiB logits - 1.0 GiB graphs - 1.0 GiB "
            "runtime = -8.0 GiB; end other processes on the GPU, raise --gpu-memory-utilization to "
            "at least 0.143, take a smaller --model, or lower --max-num-batched-tokens "
            "(activations) or --max-num-seqs (logits, graphs)",
        ),
        (
            {"available_bytes": 18 * GIB + 100},
            "= 100 B; end other processes on the GPU, raise --gpu-memory-utilization to at least "
            "0.143, take",
        ),
        # 1,000,000 tokens: 21.5 GiB, so 41.5 / 140
        (
            {"max_model_len": 10**6},
            "to at most 93,200, or raise --gpu-memory-utilization to at least 0.297, or use "
            "--kv-cache-dtype fp8",
        ),
        (
            {"max_model_len": 10**6, "kv_cache_memory_bytes": 10**9, "available_bytes": 100 * GIB},
            "or set --kv-cache-memory-bytes to at least 23,040,000,000",
        ),
        ({"max_model_len": 10**7}, "to at most 93,200, or use --kv-cache-dtype fp8"),
    ],
)  # fmt: skip
def test_refusals_on_a_gpu_name_what_helps(changes: dict[str, object], says: str) -> None:
    with pytest.raises(CapacityError) as error:
        gpu_plan(**changes)
    assert says in str(error.value)
    if "num_blocks" in changes:
        assert str(error.value).endswith(says)  # no share of the GPU would do
