"""Rotary embedding and cache writes against the float64 reference, on every instruction set."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.ops import reference
from octavo.ops.cpu import native
from octavo.ops.cpu.rope_cache import rope_and_cache

ISAS = native.ISA_LEVELS if native.load() is not None else ("none",)
DTYPES = (torch.float32, torch.bfloat16)
EPS = 1e-5
each_isa = pytest.mark.parametrize("isa", ISAS)
examples = settings(max_examples=30, deadline=None, derandomize=True)

pytestmark = pytest.mark.usefixtures("best_isa_afterwards", "one_torch_thread")


def use_isa(name: str) -> None:
    if name != "none" and native.set_isa(name) != name:
        pytest.skip(f"this machine has no {name}")


def rope_arguments(
    tokens: int, heads: int, kv_heads: int, head_dim: int, rotary_dim: int, block_size: int,
    dtype: torch.dtype, seed: int, normed: bool, int8: bool = False, interleaved: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """Arguments of rope_and_cache: query, key and value are views of one projection's output."""
    rng = torch.Generator().manual_seed(seed)
    num_blocks = tokens + 2
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim, generator=rng).to(dtype)
    query, key, value = (
        part.view(tokens, -1, head_dim)
        for part in torch.split(qkv, [n * head_dim for n in (heads, kv_heads, kv_heads)], dim=1)
    )
    slots = torch.randperm(num_blocks * block_size - 1, generator=rng)[:tokens]
    slots[0] = num_blocks * block_size - 1  # the far end of the pool
    slots[1:2] = -1
    weights = torch.rand(2, head_dim, generator=rng) + 0.5
    weights = weights.to(torch.float32 if seed % 2 else dtype)
    cache_shape = (num_blocks, 2, 2, kv_heads, block_size, head_dim)
    return {
        "query": query, "key": key, "value": value,
        "positions": torch.randint(0, 50, (tokens,), generator=rng),
        "cos_sin": torch.randn(50, rotary_dim, generator=rng),
        "slot_mapping": slots,
        "kv_cache": torch.zeros(cache_shape, dtype=torch.int8 if int8 else dtype),
        "layer": 1,
        "q_norm_weight": weights[0] if normed else None,
        "k_norm_weight": weights[1] if normed else None,
        "eps": EPS,
        "interleaved": interleaved,
        "kv_scales": torch.zeros(cache_shape[:-1], dtype=torch.float16) if int8 else None,
    }  # fmt: skip


def copied(arguments: dict[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in arguments.items()}


@each_isa
@examples
@given(
    tokens=st.integers(1, 6), heads=st.integers(1, 5), kv_heads=st.integers(1, 3),
    dims=st.sampled_from([(16, 16), (64, 64), (80, 32), (128, 128), (20, 10), (6, 2)]),
    block_size=st.sampled_from([1, 3, 16]), dtype=st.sampled_from(DTYPES),
    normed=st.booleans(), narrow=st.booleans(), interleaved=st.booleans(), int8=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_rope_and_cache(
    isa: str, tokens: int, heads: int, kv_heads: int, dims: tuple[int, int], block_size: int,
    dtype: torch.dtype, normed: bool, narrow: bool, interleaved: bool, int8: bool, seed: int,
) -> None:  # fmt: skip
    use_isa(isa)
    arguments = rope_arguments(
        tokens, heads, kv_heads, *dims, block_size, dtype, seed, normed, int8, interleaved
    )
    if narrow:
        arguments["positions"] = arguments["positions"].int()
    expected = copied(arguments)
    reference.rope_and_cache(**expected)
    rope_and_cache(**arguments)
    if int8:
        held, wanted = (x["kv_cache"] * x["kv_scales"][..., None] for x in (arguments, expected))
        assert (held - wanted).abs().max() <= (0.02 if dtype == torch.float32 else 0.1)
        written = written_slots(arguments)
        assert torch.equal(arguments["kv_scales"] != 0, written)
        for x in (arguments, expected):
            del x["kv_cache"]
    for name in {"query", "key", "value", "kv_cache"} & arguments.keys():
        actual, wanted = arguments[name], expected[name]
        assert (actual.double() - wanted.double()).abs().max() <= (
            4e-6 if dtype == torch.float32 else 0.05
        )
        assert torch.equal(actual == 0, wanted == 0) or dtype == torch.bfloat16


def written_slots(arguments: dict[str, Any]) -> torch.Tensor:
    """bool [num_blocks, num_layers, 2, num_kv_heads, block_size]: what a call writes."""
    written = torch.zeros(arguments["kv_scales"].shape, dtype=torch.bool)
    slots = arguments["slot_mapping"]
    slots, block_size = slots[slots >= 0], written.shape[-1]
    written[slots // block_size, arguments["layer"], :, :, slots % block_size] = True
    return written


@each_isa
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [3, 64, 80, 100])
def test_int8_codes_are_the_references(isa: str, dtype: torch.dtype, head_dim: int) -> None:
    """Bit for bit; halves between two codes, tiny and huge numbers, zeros and what is no number."""
    use_isa(isa)
    arguments = rope_arguments(9, 2, 2, head_dim, 2, 4, dtype, 0, normed=False, int8=True)
    arguments["cos_sin"] = None
    value = arguments["value"]
    value[2] = 0.0
    value[3] *= 1e-30
    value[4] *= 1e20
    value[5, 0, 0], value[5, 1, -1] = math.nan, math.inf
    value[6] = torch.arange(head_dim) + 0.5
    value[6, :, 0] = 127.0
    value[7] = -torch.arange(head_dim) * 0.25
    value[8] = 65504.0 * 127 * 2
    expected = copied(arguments)
    rope_and_cache(**arguments)
    reference.rope_and_cache(**expected)
    scales = expected["kv_scales"]
    assert torch.equal(arguments["kv_scales"].view(torch.int16), scales.view(torch.int16))
    finite = scales.isfinite()
    assert torch.equal(arguments["kv_cache"][finite], expected["kv_cache"][finite])
    assert {0x3C00, 0x0400, 0x7C00, 0x7E00} <= set(scales.view(torch.int16).unique().tolist())


@each_isa
def test_no_rotation_and_one_plane(isa: str) -> None:
    use_isa(isa)
    arguments = rope_arguments(5, 3, 1, 24, 8, 4, torch.float32, 3, normed=True)
    arguments |= {"value": None, "cos_sin": None, "positions": torch.full((5,), 1000)}
    arguments["kv_cache"] = torch.zeros(7, 3, 1, 1, 4, 24)
    expected = copied(arguments)
    rope_and_cache(**arguments)
    reference.rope_and_cache(**expected)
    for name in ("query", "key", "kv_cache"):
        assert torch.allclose(arguments[name], expected[name], rtol=0, atol=4e-6)
    assert torch.equal(arguments["kv_cache"] != 0, expected["kv_cache"] != 0)
    bare = rope_arguments(5, 3, 1, 24, 8, 4, torch.float32, 3, normed=False) | {"cos_sin": None}
    before = copied(bare)
    rope_and_cache(**bare)
    assert torch.equal(bare["query"], before["query"]) and torch.equal(bare["key"], before["key"])


def test_blocks_that_lie_apart() -> None:
    """Codes and scales of a block in one piece, as the pool holds them."""
    arguments = rope_arguments(6, 2, 2, 16, 16, 4, torch.float32, 0, normed=False, int8=True)
    expected = copied(arguments)
    reference.rope_and_cache(**expected)
    shape = arguments["kv_cache"].shape
    codes, scales = shape[1:].numel(), shape[1:-1].numel()
    rows = torch.zeros(shape[0], codes + 2 * scales + 6, dtype=torch.uint8)
    arguments["kv_cache"] = rows[:, :codes].view(torch.int8).unflatten(1, shape[1:])
    behind = rows[:, codes : codes + 2 * scales].view(torch.float16)
    arguments["kv_scales"] = behind.unflatten(1, shape[1:-1])
    rope_and_cache(**arguments)
    assert torch.equal(arguments["kv_scales"], expected["kv_scales"])
    assert (arguments["kv_cache"] - expected["kv_cache"]).abs().max() <= 1
    assert not rows[:, codes + 2 * scales :].any()


def test_bf16_rope_differs_from_the_reference_by_rounding_only() -> None:
    arguments = rope_arguments(6, 4, 2, 64, 64, 16, torch.bfloat16, 0, normed=False)
    query, cos_sin = arguments["query"], arguments["cos_sin"]
    expected = reference.rope(query, arguments["positions"], cos_sin)
    rope_and_cache(**arguments)
    assert (query == expected).float().mean() > 0.99


ROPE_MISUSES: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "query": (lambda x: x.double(), TypeError, "query must be float32 or bfloat16"),
    "key": (lambda x: x[:, :1], ValueError, "key must be"),
    "value": (lambda x: x.mT.contiguous().mT, ValueError, "value must be"),
    "positions": (lambda x: x.float(), TypeError, "positions must be"),
    "cos_sin": (lambda x: x[:, :15].contiguous(), ValueError, "cos_sin must be"),
    "slot_mapping": (lambda x: x[:2], ValueError, "slot_mapping must be"),
    "kv_cache": (lambda x: x.half(), TypeError, "kv_cache must have query's type"),
    "kv_scales": (lambda _: torch.ones(2), TypeError, "or be int8 with kv_scales"),
    "layer": (lambda _: 2, ValueError, "layer must be"),
    "q_norm_weight": (lambda x: x[:3], ValueError, "q_norm_weight must be"),
}


@pytest.mark.parametrize("name", ROPE_MISUSES)
def test_rope_misuse(name: str) -> None:
    change, error, message = ROPE_MISUSES[name]
    arguments = rope_arguments(3, 4, 2, 16, 16, 4, torch.float32, 0, normed=True)
    arguments[name] = change(arguments[name])
    with pytest.raises(error, match=message):
        rope_and_cache(**arguments)


@pytest.mark.skipif(ISAS == ("none",), reason="checked by the library")
@pytest.mark.parametrize(
    "name, value", [("positions", 50), ("positions", -1), ("slot_mapping", 20)]
)
def test_out_of_range_positions_and_slots_write_nothing(name: str, value: int) -> None:
    arguments = rope_arguments(3, 4, 2, 16, 16, 4, torch.float32, 0, normed=True)
    arguments[name][2] = value
    before = copied(arguments)
    with pytest.raises(ValueError, match=rf"{name}\[2\]"):
        rope_and_cache(**arguments)
    for key in ("query", "key", "kv_cache"):
        assert torch.equal(arguments[key], before[key])
