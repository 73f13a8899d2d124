"""A mixture of experts against transformers' blocks, and what routing can do to it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV2Config, MixtralConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Moe
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from octavo.arch import ModelArch, MoEConfig
from octavo.layers import experts as experts_module
from octavo.layers.experts import SeparateExperts, StackedExperts, route
from octavo.layers.fp8 import Fp8Weight
from octavo.layers.norm import make_norm
from octavo.layers.workspace import Workspace
from octavo.models.moe import MoEMLP
from octavo.ops.cpu import gemm, qgemm

HIDDEN, SIZE, EXPERTS = 32, 24, 8
COMMON = {"hidden_size": HIDDEN, "num_experts_per_tok": 3, "hidden_act": "silu"}
QWEN = {**COMMON, "moe_intermediate_size": SIZE, "num_experts": EXPERTS}
DEEPSEEK = {
    **COMMON, "moe_intermediate_size": SIZE, "n_routed_experts": EXPERTS, "n_shared_experts": 2,
    "num_attention_heads": 4, "num_key_value_heads": 4,
}  # fmt: skip
GROUPED = {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2}

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def arch_of(**moe: Any) -> ModelArch:
    fields: dict[str, Any] = {"num_experts": EXPERTS, "experts_per_token": 3, "expert_size": SIZE}
    return ModelArch(
        architecture="", vocab_size=8, hidden_size=HIDDEN, intermediate_size=64, num_layers=1,
        num_heads=2, num_kv_heads=2, head_dim=16, max_position_embeddings=64,
        moe=MoEConfig(**{**fields, **moe}),
    )  # fmt: skip


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "mixtral": (
        lambda: MixtralSparseMoeBlock(
            MixtralConfig(intermediate_size=SIZE, num_local_experts=EXPERTS, **COMMON)
        ),
        {"normalize": True},
    ),
    "qwen2": (
        lambda: Qwen2MoeSparseMoeBlock(
            Qwen2MoeConfig(shared_expert_intermediate_size=40, norm_topk_prob=False, **QWEN)
        ),
        {"normalize": False, "shared_size": 40, "shared_gate": True},
    ),
    "qwen3": (
        lambda: Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(norm_topk_prob=True, **QWEN)),
        {"normalize": True},
    ),
    "deepseek": (
        lambda: DeepseekV2Moe(DeepseekV2Config(routed_scaling_factor=2.5, **DEEPSEEK)),
        {"normalize": False, "shared_size": 2 * SIZE, "routed_scale": 2.5, "router_float32": True},
    ),
    "deepseek-groups": (
        lambda: DeepseekV2Moe(DeepseekV2Config(**GROUPED, **DEEPSEEK)),
        {
            "normalize": False, "shared_size": 2 * SIZE, "router_float32": True,
            "num_groups": 4, "groups_per_token": 2,
        },
    ),
}  # fmt: skip


def filled(block: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(3)
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, 0.0, 0.3)
    return block.float().eval()


PREFIX = "model.layers.0.mlp."


def canonical(block: torch.nn.Module) -> dict[str, Tensor]:
    """Weights under the names that `MoEMLP` waits for, an expert's each on its own."""
    found = {}
    for name, tensor in block.state_dict().items():
        if name == "experts.gate_up_proj":
            for expert, both in enumerate(tensor):
                gate, up = both.chunk(2)
                found[f"experts.{expert}.gate_proj.weight"] = gate
                found[f"experts.{expert}.up_proj.weight"] = up
        elif name == "experts.down_proj":
            found |= {f"experts.{e}.down_proj.weight": down for e, down in enumerate(tensor)}
        else:
            found[name.replace("shared_expert.", "shared_experts.")] = tensor
    return {PREFIX + name: tensor for name, tensor in found.items()}


def loaded(
    arch: ModelArch, weights: dict[str, Tensor], dtype: torch.dtype, quantize: str | None = None
) -> MoEMLP:
    mlp = MoEMLP(arch, PREFIX, quantize)
    groups = {name: group for group in mlp.pending() for name in group.shapes}
    assert set(groups) == set(weights)
    for name in reversed(weights):  # any order will do
        assert groups[name].shapes[name] == tuple(weights[name].shape)
        groups[name].put(name, weights[name].to(dtype).contiguous())
    return mlp


def context(arch: ModelArch, dtype: torch.dtype = torch.float32) -> Any:
    return SimpleNamespace(workspace=Workspace(arch, 64, 1, dtype, torch.device("cpu")))


@pytest.mark.parametrize("num_tokens", [1, 2, 50])
@pytest.mark.parametrize("case", list(CASES))
def test_against_transformers(case: str, num_tokens: int) -> None:
    make, fields = CASES[case]
    block, arch = filled(make()), arch_of(**fields)
    mlp, ctx = loaded(arch, canonical(block), torch.float32), context(arch)
    x = torch.randn((num_tokens, HIDDEN))
    with torch.inference_mode():
        expected = block(x[None])[0]
        out = mlp.compute(x, None, ctx, torch.full_like(x, torch.nan))
        torch.testing.assert_close(out, expected, rtol=0, atol=2e-5)
        # behind a norm, onto the residual stream
        norm = make_norm(torch.rand(HIDDEN) + 0.5, 1e-6)
        normed = norm(x, torch.empty_like(x))
        residual = x.clone()
        mlp.add_to(residual, norm, ctx)
        torch.testing.assert_close(residual, x + block(normed[None])[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("case", list(CASES))
def test_bfloat16_is_near(case: str) -> None:
    """Through the packed kernel, where there is one: tokens whose experts are not in doubt."""
    make, fields = CASES[case]
    block, arch = filled(make()).bfloat16(), arch_of(**fields)
    mlp = loaded(arch, canonical(block), torch.bfloat16)
    x = torch.randn((40, HIDDEN)).bfloat16()
    with torch.inference_mode():
        out = mlp.compute(x, None, context(arch, torch.bfloat16), torch.empty_like(x))
        wide = block.float()(x.float()[None])[0]
    error = (out.float() - wide).norm(dim=-1) / wide.norm(dim=-1)
    assert error.median() < 0.02


def test_more_tokens_than_are_computed_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    block, arch = filled(CASES["mixtral"][0]()), arch_of()
    mlp, ctx = loaded(arch, canonical(block), torch.float32), context(arch)
    x = torch.randn((50, HIDDEN))
    whole = mlp.compute(x, None, ctx, torch.empty_like(x))
    monkeypatch.setattr(experts_module, "_MAX_ROWS", 7)
    parts = mlp.compute(x, None, ctx, torch.empty_like(x))
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-6)


def test_experts_without_tokens_are_not_called() -> None:
    """All tokens at one expert: the others hold NaN."""
    arch = arch_of(experts_per_token=1)
    experts = SeparateExperts(arch.moe, HIDDEN, "silu")
    for expert in range(EXPERTS):
        value = 0.1 if expert == 5 else torch.nan
        weight = torch.full((SIZE, HIDDEN), value)
        experts.set_gate_up(expert, weight, weight.clone())
        experts.set_down(expert, torch.full((HIDDEN, SIZE), value))
    x = torch.rand((7, HIDDEN))
    out = experts(x, torch.full((7, 1), 5), torch.ones((7, 1)))
    gate = (x.double() * 0.1).sum(-1, keepdim=True)
    expected = gate * gate.sigmoid() * gate * SIZE * 0.1
    torch.testing.assert_close(out.double(), expected.expand(7, HIDDEN), rtol=1e-5, atol=0)


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    """Far from bitwise in float32, whose products torch cuts as it likes: to a few roundings."""
    block, arch = filled(CASES["mixtral"][0]()), arch_of()
    mlp, ctx = loaded(arch, canonical(block), torch.float32), context(arch)
    x = torch.randn((50, HIDDEN))
    whole = mlp.compute(x, None, ctx, torch.empty_like(x))
    for i in (0, 17, 49):
        alone = mlp.compute(x[i : i + 1], None, ctx, torch.empty((1, HIDDEN)))
        torch.testing.assert_close(alone[0], whole[i], rtol=0, atol=1e-6)


@pytest.mark.skipif(not gemm.is_available(), reason="needs AVX512_BF16 or AMX")
@pytest.mark.parametrize("case", list(CASES))
def test_bfloat16_does_not_depend_on_the_batch(case: str) -> None:
    """To the bit, by the packed kernel."""
    block, arch = filled(CASES[case][0]()).bfloat16(), arch_of(**CASES[case][1])
    mlp, ctx = loaded(arch, canonical(block), torch.bfloat16), context(arch, torch.bfloat16)
    x = torch.randn((50, HIDDEN)).bfloat16()
    whole = mlp.compute(x, None, ctx, torch.empty_like(x))
    for rows in (slice(0, 1), slice(17, 18), slice(20, 50)):
        part = mlp.compute(x[rows], None, ctx, torch.empty_like(x[rows]))
        assert torch.equal(part, whole[rows])


def test_stacked_experts_compute_the_same() -> None:
    """The kernels of a GPU, where Triton's interpreter runs them on a CPU too."""
    pytest.importorskip("triton")
    arch = arch_of()
    separate = SeparateExperts(arch.moe, HIDDEN, "silu")
    stacked = StackedExperts(arch.moe, HIDDEN, "silu", torch.float32, torch.device("cpu"))
    torch.manual_seed(0)
    for experts in (separate, stacked):
        torch.manual_seed(0)
        for expert in range(EXPERTS):
            gate, up = torch.randn((2, SIZE, HIDDEN)) / 6
            experts.set_down(expert, torch.randn((HIDDEN, SIZE)) / 5)
            experts.set_gate_up(expert, gate.clone(), up.clone())
    x = torch.randn((9, HIDDEN))
    chosen = route(torch.randn((9, EXPERTS)), arch.moe)
    torch.testing.assert_close(stacked(x, *chosen), separate(x, *chosen), rtol=0, atol=1e-5)
    assert stacked.num_bytes == separate.num_bytes == EXPERTS * 3 * SIZE * HIDDEN * 4
    assert stacked.capturable and not separate.capturable


@pytest.mark.parametrize("in_groups", [False, True])
def test_stacked_experts_in_fp8(in_groups: bool) -> None:
    """Of a checkpoint, with scales of rows or of 128 x 128, and made of weights as they are."""
    pytest.importorskip("triton")
    arch = arch_of(expert_size=128)
    hidden, size = 256, 128
    separate = SeparateExperts(arch.moe, hidden, "silu")
    device = torch.device("cpu")
    stacked = StackedExperts(arch.moe, hidden, "silu", torch.float8_e4m3fn, device, in_groups)
    torch.manual_seed(0)
    for expert in range(EXPERTS):
        gate, up, down = (
            Fp8Weight.of(
                torch.randn(shape).to(torch.float8_e4m3fn),
                torch.rand((shape[0] // 128, shape[1] // 128) if in_groups else shape[0]) / 8,
            )
            for shape in ((size, hidden), (size, hidden), (hidden, size))
        )
        stacked.set_gate_up(expert, gate, up)
        plain = expert == 1 and not in_groups
        wide = down.dequantize(torch.float32)
        stacked.set_down(expert, wide if plain else down)
        separate.set_gate_up(expert, gate.dequantize(torch.float32), up.dequantize(torch.float32))
        separate.set_down(expert, wide)
    x = torch.randn((9, hidden)) / 16
    chosen = route(torch.randn((9, EXPERTS)), arch.moe)
    expected = separate(x, *chosen)
    error = (stacked(x, *chosen) - expected).norm() / expected.norm()
    assert error < (1e-5 if in_groups else 2e-2)
    per_row = hidden // 128 + 1 if in_groups else 2
    num_scales = 2 * size * (per_row - 1) + hidden
    assert stacked.num_bytes == EXPERTS * (3 * size * hidden + 4 * num_scales)
    assert stacked.capturable


def test_routing() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0], [0.0, 0.0, 5.0, 4.9]])
    scores = logits.softmax(-1)
    moe = MoEConfig(4, 2, 8, normalize=False, routed_scale=3.0)
    ids, weights = route(logits.bfloat16(), moe)
    assert ids.tolist() == [[1, 2], [2, 3]] and weights.dtype == torch.float32
    torch.testing.assert_close(weights, scores.gather(1, ids) * 3.0, rtol=2e-2, atol=0)
    _, weights = route(logits, MoEConfig(4, 2, 8, normalize=True, routed_scale=0.5))
    torch.testing.assert_close(weights.sum(-1), torch.tensor([0.5, 0.5]))
    _, weights = route(logits, MoEConfig(4, 2, 8, normalize=False, scoring="sigmoid"))
    torch.testing.assert_close(weights[0], torch.tensor([3.0, 2.0]).sigmoid())
    # the best group is taken whole, however good the second best expert of another is
    grouped = MoEConfig(4, 2, 8, normalize=False, num_groups=2, groups_per_token=1)
    ids, weights = route(logits, grouped)
    assert ids.tolist() == [[1, 0], [2, 3]]
    torch.testing.assert_close(weights, scores.gather(1, ids))


def test_memory_is_that_of_the_weights() -> None:
    """No more is held than what came."""
    block, arch = filled(CASES["qwen2"][0]()), arch_of(**CASES["qwen2"][1])
    weights = canonical(block)
    mlp = loaded(arch, weights, torch.float32)
    assert mlp.num_bytes == sum(w.numel() * 4 for w in weights.values())
    assert not mlp.replayable and not mlp.capturable
    assert mlp.transient_bytes(10, 4) > mlp.transient_bytes(1, 4) > 0


@pytest.mark.skipif(not qgemm.is_available(), reason="needs the C kernels")
def test_quantized_experts() -> None:
    """Experts and the shared MLP in int8, the router and its gate as they are."""
    block, arch = filled(CASES["qwen2"][0]()).bfloat16(), arch_of(**CASES["qwen2"][1])
    plain = loaded(arch, canonical(block), torch.bfloat16)
    small = loaded(arch, canonical(block), torch.bfloat16, "int8")
    x = torch.randn((40, HIDDEN)).bfloat16()
    ctx = context(arch, torch.bfloat16)
    with torch.inference_mode():
        want = plain.compute(x, None, ctx, torch.empty_like(x)).float()
        out = small.compute(x, None, ctx, torch.empty_like(x)).float()
    assert 0 < (out - want).norm() < 0.03 * want.norm()
