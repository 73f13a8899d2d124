"""RoPE and cache writes against the dense reference."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from octavo.ops import reference
from octavo.ops.gpu.rope_cache import rope_and_cache

# The interpreter rounds bfloat16 towards zero.
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 2e-2}
CASES = [
    # tokens, heads, kv heads, head_dim, rotary_dim, block_size, norms
    (3, 9, 3, 64, 64, 16, False),
    (3, 4, 2, 80, 80, 3, True),
    (2, 6, 6, 128, 64, 1, True),
    (70, 12, 4, 64, 48, 4, False),
]


def _inputs(
    case: tuple[int, int, int, int, int, int, bool], dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor | None]:
    num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim, block_size, norms = case
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = torch.randn(num_tokens, width, device=device).to(dtype)
    q, k, v = qkv.split([num_heads * head_dim] + 2 * [num_kv_heads * head_dim], dim=1)
    angles = torch.randn(11, rotary_dim // 2, device=device)
    num_slots = (num_tokens // block_size + 2) * block_size
    slots = torch.randperm(num_slots, device=device)[:num_tokens]
    slots[-1] = -1
    weights = [torch.rand(head_dim, device=device).to(dtype) + 0.5 if norms else None] * 2
    return {
        "query": q.view(num_tokens, num_heads, head_dim),
        "key": k.view(num_tokens, num_kv_heads, head_dim),
        "value": v.view(num_tokens, num_kv_heads, head_dim),
        "rope_rows": torch.randint(0, 11, (num_tokens,), device=device),
        "cos_sin": torch.cat((angles.cos(), angles.sin()), 1),
        "slot_mapping": slots,
        "q_norm_weight": weights[0],
        "k_norm_weight": weights[1],
    }


def _copy(inputs: dict[str, Tensor | None]) -> list[Tensor]:
    """query, key and value as views into a copy of their one buffer."""
    parts = [inputs[name] for name in ("query", "key", "value")]
    flat = torch.cat([p.flatten(1) for p in parts if p is not None], dim=1)
    sizes = [p[0].numel() for p in parts if p is not None]
    split = flat.split(sizes, dim=1)
    return [s.view(p.shape) for s, p in zip(split, parts, strict=True) if p is not None]


@pytest.mark.parametrize(
    ("case", "dtype"),
    [(case, dtype) for case in CASES[:-1] for dtype in TOLERANCE] + [(CASES[-1], torch.float32)],
    ids=str,
)
def test_rotates_and_writes(
    case: tuple[int, int, int, int, int, int, bool],
    dtype: torch.dtype,
    device: torch.device,
    relative_error: Callable[[Tensor, Tensor], float],
) -> None:
    if case[0] > 64 and device.type == "cpu":
        pytest.skip("many programs are slow under the interpreter")
    torch.manual_seed(sum(case))
    inputs = _inputs(case, dtype, device)
    _, _, num_kv_heads, head_dim, _, block_size, _ = case
    num_blocks = case[0] // block_size + 2
    inner = (3, 2, num_kv_heads, block_size, head_dim)
    size = torch.Size(inner).numel()
    # Blocks lie further apart than what they hold.
    pool = torch.full((num_blocks, size + 32), torch.nan, dtype=dtype, device=device)
    expected_pool = torch.full_like(pool, torch.nan)
    layer = 1
    results = []
    for storage, run in ((pool, rope_and_cache), (expected_pool, None)):
        cache = storage[:, :size].view(num_blocks, *inner)
        q, k, v = _copy(inputs)
        rest = inputs["rope_rows"], inputs["cos_sin"], inputs["slot_mapping"]
        norms = inputs["q_norm_weight"], inputs["k_norm_weight"], 1e-5
        if run is not None:
            run(q, k, v, *rest, cache, None, layer, *norms)
        else:
            reference.rope_and_cache(q, k, v, *rest, cache, layer, *norms)
        results.append((q, k, v))
    for mine, expected in zip(*results, strict=True):
        assert relative_error(mine, expected) < TOLERANCE[dtype]
    assert torch.equal(pool.isnan(), expected_pool.isnan())
    assert relative_error(pool.nan_to_num(), expected_pool.nan_to_num()) < TOLERANCE[dtype]


@pytest.mark.parametrize("rotary_dim", [None, 8, 20])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("planes", [1, 2])
def test_pairs_no_rotation_and_one_plane(
    rotary_dim: int | None,
    interleaved: bool,
    planes: int,
    device: torch.device,
    relative_error: Callable[[Tensor, Tensor], float],
) -> None:
    torch.manual_seed(0)
    inputs = _inputs((5, 4, 2, 20, rotary_dim or 20, 4, True), torch.float16, device)
    rest = inputs["rope_rows"], inputs["cos_sin"] if rotary_dim else None, inputs["slot_mapping"]
    norms = inputs["q_norm_weight"], inputs["k_norm_weight"], 1e-5
    results = []
    for run in (rope_and_cache, reference.rope_and_cache):
        q, k, v = _copy(inputs)
        cache = torch.zeros((4, 3, planes, 2, 4, 20), dtype=torch.float16, device=device)
        values = v if planes == 2 else None
        scales = (None,) if run is rope_and_cache else ()
        run(q, k, values, *rest, cache, *scales, 1, *norms, interleaved=interleaved)
        results.append((q, k, cache))
    for mine, expected in zip(*results, strict=True):
        assert relative_error(mine, expected) < TOLERANCE[torch.float16]
    assert torch.equal(results[0][2] != 0, results[1][2] != 0)


@pytest.mark.parametrize("rotary_dim", [32, 20])
def test_fp8_codes_times_scales_are_the_values(rotary_dim: int, device: torch.device) -> None:
    torch.manual_seed(0)
    case = (6, 4, 2, 32, rotary_dim, 4, False)
    inputs = _inputs(case, torch.float16, device)
    key, value = inputs["key"], inputs["value"]
    assert key is not None and value is not None
    value[0] = 0.0
    value[1, 0] *= 1e4  # a big one beside a small one: each head of each token has its own scale
    value[1, 1] *= 1e-4
    num_blocks, num_layers, layer = 3, 2, 1
    codes_size, scales_size = num_layers * 2 * 2 * 4 * 32, num_layers * 2 * 2 * 4
    pool = torch.zeros(
        (num_blocks, codes_size + 2 * scales_size + 16), dtype=torch.uint8, device=device
    )
    cache = pool[:, :codes_size].view(torch.float8_e4m3fn).view(num_blocks, num_layers, 2, 2, 4, 32)
    scales = pool[:, codes_size : codes_size + 2 * scales_size].view(torch.float16)
    scales = scales.view(num_blocks, num_layers, 2, 2, 4)
    q, k, v = _copy(inputs)
    rest = inputs["rope_rows"], inputs["cos_sin"], inputs["slot_mapping"]
    rope_and_cache(q, k, v, *rest, cache, scales, layer)
    assert not pool[:, codes_size + 2 * scales_size :].any()
    slots = inputs["slot_mapping"]
    assert slots is not None
    kept = slots >= 0
    blocks, at = slots[kept] // 4, slots[kept] % 4
    for part, x in enumerate((k, v)):
        expected = x[kept].double()
        scale = scales[blocks, layer, part, :, at].double()
        read = cache[blocks, layer, part, :, at].double() * scale[..., None]
        assert read.isfinite().all()
        amax = expected.abs().amax(-1)
        assert ((read - expected).abs() <= expected.abs() / 16 + amax[..., None] * 2**-15).all()
        exact = amax / 448
        assert (scale[amax == 0] == 1).all()
        usual = exact > 2**-14
        assert (scale[usual] >= exact[usual]).all()
        assert (scale[usual] <= exact[usual] * (1 + 2**-10)).all()
    untouched = torch.ones(num_blocks * 4, dtype=torch.bool, device=device)
    untouched[slots[kept]] = False
    others = torch.arange(num_blocks * 4, device=device)[untouched]
    written = pool[:, :codes_size].view(num_blocks, num_layers, 2, 2, 4, 32)
    assert not written[others // 4, layer, :, :, others % 4].any()
    assert not written[:, 0].any()


@pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning")
@pytest.mark.parametrize("rotary_dim", [32, 20])
def test_fp8_keeps_what_is_not_finite(rotary_dim: int, device: torch.device) -> None:
    """A damaged model must not become one that answers."""
    torch.manual_seed(0)
    inputs = _inputs((4, 2, 2, 32, rotary_dim, 4, False), torch.float32, device)
    inputs["slot_mapping"] = torch.arange(4, device=device)
    inputs["cos_sin"][:, : rotary_dim // 2], inputs["cos_sin"][:, rotary_dim // 2 :] = 1.0, 0.0
    bad = (float("nan"), float("inf"), -1e9)
    q, k, v = _copy(inputs)
    for token, x in enumerate(bad):
        for part, at in ((k, 3), (k, 31), (v, 7)):
            part[token, int(at == 31), at] = x
    codes = torch.zeros((1, 1, 2, 2, 4, 32), dtype=torch.float8_e4m3fn, device=device)
    scales = torch.zeros((1, 1, 2, 2, 4), dtype=torch.float16, device=device)
    rest = inputs["rope_rows"], inputs["cos_sin"], inputs["slot_mapping"]
    rope_and_cache(q, k, v, *rest, codes, scales, 0)
    of_values = scales[0, 0, 1, 0]
    assert of_values[:3].tolist()[1:] == [float("inf")] * 2 and of_values[0].isnan()
    assert not scales[0, 0, 0, :, :3].isfinite().any()
    assert scales[0, 0, :, :, 3].isfinite().all() and scales[0, 0, 1, 1].isfinite().all()
    read = codes[0, 0, 1, 0].float() * of_values.float()[:, None]
    assert read[0].isnan().all() and read[1, 7] == float("inf") and read[2, 7] == -float("inf")


def test_refuses_what_does_not_fit(device: torch.device) -> None:
    inputs = _inputs(CASES[0], torch.float32, device)
    q, k, v = _copy(inputs)
    rest = inputs["rope_rows"], inputs["cos_sin"], inputs["slot_mapping"]
    cache = torch.empty((2, 3, 2, 3, 16, 64), device=device)
    with pytest.raises(ValueError, match="layer must be in"):
        rope_and_cache(q, k, v, *rest, cache, None, 3)
    with pytest.raises(TypeError, match="kv_cache must be"):
        rope_and_cache(q, k, v, *rest, cache.half(), None, 0)
    with pytest.raises(ValueError, match="dense heads"):
        rope_and_cache(q[:, :, ::2], k, v, *rest, cache, None, 0)
    rows = inputs["rope_rows"]
    with pytest.raises(ValueError, match=r"rope_rows must be \[3\], contiguous"):
        rope_and_cache(q, k, v, rows.repeat_interleave(2)[::2], *rest[1:], cache, None, 0)
    with pytest.raises(ValueError, match="contiguous within a block"):
        rope_and_cache(q, k, v, *rest, cache.transpose(0, 1), None, 0)
