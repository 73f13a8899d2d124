"""What flags of `ModelArch` mean for memory and for how a step runs; what they compute is compared
with transformers in `test_families`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, quantize
from torch import Tensor

from octavo.arch import ModelArch, RopeConfig
from octavo.attention.select import select_attention
from octavo.errors import UnsupportedModelError
from octavo.layers.gguf_weight import GGUFWeight
from octavo.layers.quantized import Weight
from octavo.layers.workspace import Workspace, workspace_bytes
from octavo.models.decoder import Decoder
from octavo.ops.cpu import gemm
from octavo.plan import NewSeq, SeqPlan, StepPlan
from octavo.request import SamplerParams
from octavo.runner.kv_store import KVStore
from octavo.runner.runner import Runner
from octavo.weights.dummy import DummySource
from octavo.weights.load import load_weights
from octavo.weights.source import Keep

CPU = torch.device("cpu")
ARCH = ModelArch(
    architecture="LlamaForCausalLM", vocab_size=96, hidden_size=64, intermediate_size=128,
    num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, max_position_embeddings=64,
    rope=RopeConfig(rotary_dim=16),
)  # fmt: skip


def loaded(arch: ModelArch, dtype: torch.dtype = torch.float32) -> Decoder:
    model = Decoder(arch, select_attention("auto", CPU), dtype, 32, CPU)
    load_weights(model, DummySource(model.parameters_spec(), 0, CPU), arch, dtype=dtype)
    return model


FLAGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True, "head_bias": True},
    "tied with a head bias": {"tie_word_embeddings": True, "head_bias": True},
    "layer norm": {"norm": "layer", "norm_bias": True},
    "sandwich": {"norm_placement": "sandwich", "norm_offset": 1.0, "tie_word_embeddings": True},
    "post": {"norm_placement": "post", "qk_norm": "all"},
    "parallel": {"parallel_residual": True},
    "shared norm": {"parallel_residual": True, "shared_norm": True},
    "no gate": {"gated_mlp": False, "activation": "relu"},
    "learned": {"positions": "learned", "position_offset": 2},
    "alibi": {"positions": "alibi"},
    "norm of each head": {"qk_norm": "head"},
    "a norm for each head": {"qk_norm": "layer_head"},
    "two ropes": {"local_rope": RopeConfig(theta=100.0, rotary_dim=16), "sliding_windows": (8, 0)},
}


@pytest.mark.parametrize("name", FLAGS)
def test_weight_bytes_are_those_of_the_tensors_and_tables(name: str) -> None:
    """float32, so that nothing is packed with padding; a tied head is counted once."""
    model = loaded(replace(ARCH, **FLAGS[name]))
    parameters = sum(torch.Size(shape).numel() for shape in model.parameters_spec().values())
    arch = model.arch
    tables = {"rope": 32 * 16, "alibi": arch.num_heads}.get(arch.positions, 0)
    tables += 32 * 16 if arch.local_rope is not None else 0
    tables -= arch.position_offset * arch.hidden_size  # rows that no position has
    assert model.weight_bytes == 4 * (parameters + tables)


@pytest.mark.parametrize("name", FLAGS)
def test_the_workspace_is_as_large_as_it_says(name: str) -> None:
    arch = replace(ARCH, **FLAGS[name])
    activations, logits = workspace_bytes(arch, 10, 3, 4)
    made = Workspace(arch, 10, 3, torch.float32, CPU)
    assert (made.num_bytes, made.logits.nbytes) == (activations, logits)
    branches = name in ("sandwich", "post", "parallel", "shared norm")
    assert made.branch.shape == (10, 64 if branches else 0)


NOT_REPLAYED: dict[str, dict[str, Any]] = {
    **{name: FLAGS[name] for name in ("layer norm", "no gate", "a norm for each head")},
    "clipped": {"qkv_clip": 1.0},
    "gelu": {"activation": "gelu"},
}
REPLAYED: dict[str, dict[str, Any]] = {
    **{name: flags for name, flags in FLAGS.items() if name not in NOT_REPLAYED},
    "scaled": {"embedding_scale": 8.0, "residual_scale": 0.5, "logits_scale": 0.5},
    "capped": {"attention_soft_cap": 5.0, "logits_soft_cap": 3.0, "activation": "gelu_tanh"},
}
needs_kernel = pytest.mark.skipif(
    not gemm.is_available(), reason="needs AVX512_BF16 and the C library"
)


@needs_kernel
@pytest.mark.parametrize("name", NOT_REPLAYED)
def test_what_torch_computes_is_not_replayed(name: str) -> None:
    model = loaded(replace(ARCH, **NOT_REPLAYED[name]), torch.bfloat16)
    assert not model.replayable
    assert model.transient_bytes(10) > 0


def decoded(model: Decoder, replay: bool) -> list[Tensor]:
    """Logits of steps that decode after two prompts."""
    arch = model.arch
    store = KVStore(
        12, arch.num_layers, arch.num_kv_heads, 4, arch.head_dim, model.dtype, model.device
    )
    runner = Runner(
        model, store, Workspace(arch, 16, 4, model.dtype, model.device),
        max_num_seqs=4, max_num_tokens=16, max_blocks_per_seq=8, replay=replay,
    )  # fmt: skip
    assert (runner._replay is not None) == replay
    new = [NewSeq(i, [5 + i, 9, 3, 40], SamplerParams()) for i in range(2)]
    prompts = [SeqPlan(i, 0, 4, (i, 4 + i), None, True) for i in range(2)]
    runner.execute(StepPlan(0, new_seqs=new, seqs=prompts))
    found = []
    for step in range(3):
        decodes = [SeqPlan(i, 4 + step, 1, (), None, True) for i in range(2)]
        runner.execute(StepPlan(1 + step, seqs=decodes))
        found.append(runner.workspace.logits[:2].clone())
    return found


@needs_kernel
@pytest.mark.parametrize("name", REPLAYED)
def test_replayed_steps_have_the_same_logits(name: str) -> None:
    model = loaded(replace(ARCH, **REPLAYED[name]), torch.bfloat16)
    assert model.replayable
    assert model.transient_bytes(10) == (0 if model.embeds_replayably else 10 * 64 * 4)
    expected, found = decoded(model, False), decoded(model, True)
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
    assert not torch.equal(expected[0], expected[1])


def test_norms_with_an_offset_are_held_in_float32() -> None:
    arch = replace(ARCH, norm_offset=1.0, norm_placement="sandwich", qk_norm="head")
    model = loaded(arch, torch.bfloat16)
    norms = [model.final_norm, *model.layers[0].norms]
    assert len(norms) == 5
    assert {norm.weight.dtype for norm in norms} == {torch.float32}
    assert model.embed_positions is None
    plain = loaded(replace(arch, norm_offset=0.0), torch.bfloat16)
    assert {norm.weight.dtype for norm in plain.layers[0].norms} == {torch.bfloat16}
    olmo2 = loaded(replace(ARCH, norm_placement="post", qk_norm="all"), torch.bfloat16)
    assert {norm.weight.dtype for norm in olmo2.layers[0].norms} == {torch.float32}


@needs_kernel
def test_layers_of_other_formats_are_of_another_kind() -> None:
    """As in Q4_K_M files, some of whose matrices have more bits; a GPU compiles each kind."""

    class Mixed(DummySource):
        def tensors(
            self, dtype: torch.dtype | None = None, keep: Keep | None = None
        ) -> Iterator[tuple[str, Weight, int]]:
            for name, weight, num_bytes in super().tensors(dtype, keep):
                if name.endswith("down_proj.weight") and isinstance(weight, Tensor):
                    is_first = ".layers.0." in name
                    kind = GGMLQuantizationType.Q8_0 if is_first else GGMLQuantizationType.Q4_0
                    raw = torch.from_numpy(quantize(weight.float().numpy(), kind))
                    weight = GGUFWeight.of(raw, int(kind), weight.shape[1])
                yield name, weight, num_bytes

    arch = replace(ARCH, num_layers=3)
    model = Decoder(arch, select_attention("auto", CPU), torch.bfloat16, 32, CPU)
    source = Mixed(model.parameters_spec(), 0, CPU)
    load_weights(model, source, arch, dtype=torch.bfloat16, keep=model.quantizable)
    kinds = [layer.kind for layer in model.layers]
    assert kinds[0] != kinds[1] == kinds[2]


def test_the_embedding_scale_is_rounded_as_embeddings_are() -> None:
    """transformers multiplies Gemma's bfloat16 embeddings by a bfloat16 number."""
    arch = replace(ARCH, hidden_size=64, embedding_scale=640**0.5)
    model = loaded(arch, torch.bfloat16)
    workspace = Workspace(arch, 3, 1, torch.bfloat16, CPU)
    ids = torch.tensor([5, 0, 5])
    raw = model.embed(ids, torch.empty((3, 64), dtype=torch.bfloat16))
    scaled = raw * torch.tensor(640**0.5).bfloat16()

    assert torch.equal(model.embedded(ids, torch.arange(3), workspace), scaled)


def test_two_ropes_do_not_go_with_one_that_depends_on_the_prompt() -> None:
    rope = RopeConfig(rotary_dim=16, scaling_type="dynamic", factor=2.0, original_max_position=16)
    arch = replace(ARCH, rope=rope, local_rope=RopeConfig(rotary_dim=16), sliding_windows=(8, 0))
    with pytest.raises(UnsupportedModelError, match="--max-model-len to the trained context of 16"):
        loaded(arch)


def test_what_may_come_quantized() -> None:
    model = loaded(replace(ARCH, qkv_bias=True, positions="learned", qk_norm="head"))
    kept = {name for name in model.parameters_spec() if model.quantizable(name)}
    assert kept == {"model.embed_tokens.weight", "lm_head.weight"} | {
        f"model.layers.{i}.{part}_proj.weight"
        for i in range(2)
        for part in (
            "self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up",
            "mlp.down",
        )
    }  # fmt: skip
    assert not model.quantizable("model.layers.0.mlp.nothing.weight")
