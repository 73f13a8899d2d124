"""Latent attention against transformers' DeepSeek-V2, through the pool, whole and in chunks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV2Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import (
    DeepseekV2Attention,
    DeepseekV2RotaryEmbedding,
)

from octavo.arch import ModelArch
from octavo.attention.base import AttentionBackend, ForwardContext
from octavo.attention.select import select_attention
from octavo.hf_config import read_hf_config
from octavo.layers.norm import make_norm
from octavo.layers.rope import RotaryTable
from octavo.layers.workspace import Workspace
from octavo.models.mla import LatentAttention
from octavo.ops.cpu import gemm

BLOCK, LAYERS, LAYER = 4, 3, 1
COMMON: dict[str, Any] = {
    "hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 32,
    "qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 20, "num_hidden_layers": LAYERS,
    "intermediate_size": 64, "num_experts_per_tok": 2, "max_position_embeddings": 256,
    "architectures": ["DeepseekV2ForCausalLM"], "first_k_dense_replace": LAYERS,
    "rms_norm_eps": 1e-3,  # not that of the latents' norms
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.1,
    "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1,
}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "lite": {"q_lora_rank": None},
    "query-latent": {"q_lora_rank": 28},
    "biased": {"q_lora_rank": 28, "attention_bias": True},
    "yarn": {"q_lora_rank": None, "rope_parameters": YARN},
}
LENGTHS = (1, 9, 23)

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def made(case: str) -> tuple[DeepseekV2Config, DeepseekV2Attention, ModelArch]:
    config = DeepseekV2Config(**COMMON, **CASES[case])
    config._attn_implementation = "eager"
    torch.manual_seed(5)
    attention = DeepseekV2Attention(config, LAYER).eval()
    for name, parameter in attention.named_parameters():
        around = 1.0 if "norm" in name else 0.0
        torch.nn.init.normal_(parameter, around, 0.3)
    return config, attention, read_hf_config(config.to_dict())


def loaded(
    arch: ModelArch, reference: DeepseekV2Attention, backend: AttentionBackend
) -> LatentAttention:
    prefix = f"model.layers.{LAYER}.self_attn."
    layer = LatentAttention(arch, prefix, LAYER, backend)
    weights = {prefix + name: weight for name, weight in reference.state_dict().items()}
    groups = {name: group for group in layer.pending() for name in group.shapes}
    assert set(groups) == set(weights)
    for name, weight in weights.items():
        assert groups[name].shapes[name] == tuple(weight.shape)
        groups[name].put(name, weight.clone())
    return layer


@torch.inference_mode()
def expected(config: DeepseekV2Config, reference: DeepseekV2Attention, x: Tensor) -> Tensor:
    angles = DeepseekV2RotaryEmbedding(config)(x[None], torch.arange(len(x))[None])
    mask = torch.full((len(x), len(x)), -torch.inf).triu(1)[None, None]
    return reference(x[None], attention_mask=mask, position_embeddings=angles)[0][0]


class Pool:
    """A pool of NaN, and tables of blocks in no order for sequences of `LENGTHS`."""

    def __init__(self, arch: ModelArch, dtype: torch.dtype = torch.float32) -> None:
        counts = [-(-length // BLOCK) for length in LENGTHS]
        shape = (
            sum(counts) + 2,
            LAYERS,
            arch.kv_planes,
            arch.kv_num_heads,
            BLOCK,
            arch.kv_head_dim,
        )
        self.data = torch.full(shape, torch.nan, dtype=dtype)
        order = torch.randperm(shape[0], generator=torch.Generator().manual_seed(2)).int()
        self.tables = torch.full((len(LENGTHS), max(counts) + 1), 2**30, dtype=torch.int32)
        for row, count in enumerate(counts):
            self.tables[row, :count] = order[sum(counts[:row]) :][:count]
        self.rotary = RotaryTable(arch.rope, 64, torch.device("cpu"))
        self.work = Workspace(arch, 64, 1, dtype, torch.device("cpu"))

    def context(self, parts: list[tuple[int, int, int]]) -> ForwardContext:
        """Of a step that computes positions [first, end) of sequences."""
        positions = torch.cat([torch.arange(first, end) for _, first, end in parts])
        slots = [
            self.tables[seq, torch.arange(first, end) // BLOCK].long() * BLOCK
            + torch.arange(first, end) % BLOCK
            for seq, first, end in parts
        ]
        counts = torch.tensor([0] + [end - first for _, first, end in parts])
        return ForwardContext(
            kv_cache=self.data,
            block_tables=self.tables[[seq for seq, _, _ in parts]],
            seq_lens=torch.tensor([end for _, _, end in parts], dtype=torch.int32),
            query_start_loc=counts.cumsum(0).int(),
            slot_mapping=torch.cat(slots),
            rope_rows=positions,
            cos_sin=self.rotary.table,
            workspace=self.work,
        )


@pytest.fixture(params=["cpu", "gather"])
def backend(request: pytest.FixtureRequest) -> AttentionBackend:
    return select_attention(request.param)


@pytest.mark.parametrize("case", list(CASES))
def test_against_transformers(case: str, backend: AttentionBackend) -> None:
    config, reference, arch = made(case)
    assert (arch.kv_planes, arch.kv_num_heads, arch.kv_head_dim) == (1, 1, 48)
    layer = loaded(arch, reference, backend)
    xs = [torch.randn((length, 48)) for length in LENGTHS]
    want = torch.cat([expected(config, reference, x) for x in xs])
    with torch.inference_mode():
        for chunk in (64, 5, 1):
            got = [torch.empty((0, 48)) for _ in LENGTHS]
            pool = Pool(arch)
            for start in range(0, max(LENGTHS), chunk):
                parts = [
                    (i, start, min(start + chunk, n)) for i, n in enumerate(LENGTHS) if n > start
                ]
                x = torch.cat([xs[i][first:end] for i, first, end in parts])
                out = layer.compute(x, None, pool.context(parts), torch.full_like(x, torch.nan))
                for part, rows in zip(
                    parts, out.split([end - first for _, first, end in parts]), strict=True
                ):
                    got[part[0]] = torch.cat((got[part[0]], rows))
            torch.testing.assert_close(torch.cat(got), want, rtol=0, atol=2e-5)


def test_residual_and_norm(backend: AttentionBackend) -> None:
    config, reference, arch = made("lite")
    layer, pool = loaded(arch, reference, backend), Pool(arch)
    x, norm = torch.randn((9, 48)), make_norm(torch.rand(48) + 0.5, 1e-6)
    want = x + expected(config, reference, norm(x, torch.empty_like(x)))
    with torch.inference_mode():
        layer.add_to(x, norm, pool.context([(1, 0, 9)]))
    torch.testing.assert_close(x, want, rtol=0, atol=2e-5)
    others = pool.data.clone()
    others[:, LAYER] = torch.nan
    assert others.isnan().all(), "only its own layer is written"


def test_a_mixed_step_equals_its_parts(backend: AttentionBackend) -> None:
    """Decodes beside a chunk of a prompt, in any order of the batch."""
    _, reference, arch = made("yarn")
    layer = loaded(arch, reference, backend)
    xs = [torch.randn((length, 48)) for length in LENGTHS]
    with torch.inference_mode():
        whole, mixed = Pool(arch), Pool(arch)
        want = [
            layer.compute(x, None, whole.context([(i, 0, len(x))]), torch.empty_like(x))
            for i, x in enumerate(xs)
        ]
        first = torch.cat((xs[2][:22], xs[1][:4]))
        layer.compute(first, None, mixed.context([(2, 0, 22), (1, 0, 4)]), torch.empty_like(first))
        x = torch.cat((xs[0], xs[1][4:], xs[2][22:]))
        ctx = mixed.context([(0, 0, 1), (1, 4, 9), (2, 22, 23)])
        out = layer.compute(x, None, ctx, torch.empty_like(x))
    torch.testing.assert_close(
        out, torch.cat((want[0], want[1][4:], want[2][22:])), rtol=0, atol=2e-5
    )


def test_padding_writes_nothing(backend: AttentionBackend) -> None:
    """Tokens of no sequence, with slot -1."""
    _, reference, arch = made("lite")
    layer, pool = loaded(arch, reference, backend), Pool(arch)
    ctx = pool.context([(1, 0, 9)])
    padded = dataclasses.replace(
        ctx,
        slot_mapping=torch.cat((ctx.slot_mapping, torch.tensor([-1]))),
        rope_rows=torch.cat((ctx.rope_rows, torch.tensor([0]))),
    )
    x = torch.randn((10, 48))
    with torch.inference_mode():
        want = layer.compute(x[:9], None, ctx, torch.empty((9, 48)))
        before = pool.data.clone()
        out = layer.compute(x, None, padded, torch.empty((10, 48)))
    torch.testing.assert_close(out[:9], want, rtol=0, atol=2e-5)
    torch.testing.assert_close(pool.data, before, equal_nan=True)


@pytest.mark.skipif(not gemm.is_available(), reason="needs AVX512_BF16 or AMX")
def test_bfloat16_does_not_depend_on_the_batch() -> None:
    """To the bit, by the kernels: a step of all sequences and one of each alone."""
    _, reference, arch = made("query-latent")
    layer = loaded(arch, reference.bfloat16(), select_attention("cpu"))
    xs = [torch.randn((length, 48)).bfloat16() for length in LENGTHS]
    with torch.inference_mode():
        pool, x = Pool(arch, torch.bfloat16), torch.cat(xs)
        ctx = pool.context([(i, 0, n) for i, n in enumerate(LENGTHS)])
        together = layer.compute(x, None, ctx, torch.empty_like(x))
        pool = Pool(arch, torch.bfloat16)
        alone = [
            layer.compute(x, None, pool.context([(i, 0, len(x))]), torch.empty_like(x))
            for i, x in enumerate(xs)
        ]
    assert together.isfinite().all()
    assert torch.equal(together, torch.cat(alone))


def test_memory() -> None:
    _, reference, arch = made("query-latent")
    layer = loaded(arch, reference, select_attention("gather"))
    assert layer.num_bytes == sum(w.nbytes for w in reference.state_dict().values())
    assert not layer.replayable
    assert layer.transient_bytes(10, 4) == 10 * layer.transient_bytes(1, 4) > 0
