"""`canonical`: what families call their tensors, and how they cut them, becomes the decoder's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from octavo.arch import ModelArch, MoEConfig
from octavo.errors import WeightsError
from octavo.layers.quantized import QuantizedWeight, Weight
from octavo.weights.names import canonical
from octavo.weights.safetensors_source import SafetensorsSource
from octavo.weights.source import Keep


class Source:
    """Tensors in a dictionary; remembers which it has handed out."""

    def __init__(self, tensors: dict[str, Weight]) -> None:
        self.name, self._tensors = "the file", tensors
        self.given: list[str] = []
        self.kept: dict[str, bool] = {}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    @property
    def num_bytes(self) -> int:
        return 10 * len(self._tensors)

    def tensors(
        self, dtype: torch.dtype | None = None, keep: Keep | None = None
    ) -> Iterator[tuple[str, Weight, int]]:
        for name, tensor in self._tensors.items():
            self.given.append(name)
            self.kept[name] = keep is not None and keep(name)
            yield name, tensor, 10


class Packed(QuantizedWeight):
    """A quantized matrix whose codes are its values."""

    format = "test"

    def __init__(self, values: torch.Tensor) -> None:
        self.values, self.shape = values, (values.shape[0], values.shape[1])

    @property
    def num_bytes(self) -> int:
        return self.values.nbytes

    @property
    def device(self) -> torch.device:
        return self.values.device

    def to(self, device: torch.device) -> Packed:
        return self

    def rows(self, index: slice | torch.Tensor) -> Packed:
        return Packed(self.values[index])

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        return self.values.to(dtype)

    def joined_with(self, others: Sequence[QuantizedWeight]) -> None:
        return None


def arch(architecture: str, **more: object) -> ModelArch:
    fields = {
        "vocab_size": 11, "hidden_size": 8, "intermediate_size": 6, "num_layers": 1,
        "num_heads": 4, "num_kv_heads": 2, "head_dim": 2, "max_position_embeddings": 16,
    } | more  # fmt: skip
    return ModelArch(architecture=architecture, **fields)  # type: ignore[arg-type]


def numbered(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)


def read(source: Source, model: ModelArch) -> dict[str, torch.Tensor]:
    """Everything, checked against the shapes that were promised and the bytes of the file."""
    made = canonical(source, model)
    out, num_bytes = {}, 0
    for name, tensor, size in made.tensors():
        assert isinstance(tensor, torch.Tensor) and name not in out
        out[name], num_bytes = tensor, num_bytes + size
    assert {name: tuple(tensor.shape) for name, tensor in out.items()} == made.shapes()
    assert num_bytes <= made.num_bytes == source.num_bytes
    return out


ATTN, MLP = "model.layers.0.self_attn.", "model.layers.0.mlp."


def test_families_with_the_decoders_names_pass_through() -> None:
    source = Source({"model.norm.weight": numbered(8)})
    assert canonical(source, arch("LlamaForCausalLM")) is source


def test_gpt2_of_the_hub_has_no_prefix_and_carries_its_mask() -> None:
    source = Source({
        "h.0.attn.bias": numbered(1, 1, 16, 16),
        "h.0.attn.masked_bias": torch.tensor(-1e4),
        "h.0.attn.c_attn.weight": numbered(8, 24),
        "h.0.attn.c_attn.bias": numbered(24),
        "wpe.weight": numbered(16, 8),
    })  # fmt: skip
    got = read(source, arch("GPT2LMHeadModel", num_kv_heads=4))
    whole = numbered(8, 24).t()
    for i, part in enumerate("qkv"):
        rows = slice(8 * i, 8 * i + 8)
        assert torch.equal(got[f"{ATTN}{part}_proj.weight"], whole[rows])
        assert torch.equal(got[f"{ATTN}{part}_proj.bias"], numbered(24)[rows])
    assert set(got) - {n for n in got if ATTN in n} == {"model.embed_positions.weight"}


@pytest.mark.parametrize(
    ("architecture", "name"),
    [
        ("FalconForCausalLM", "transformer.h.0.self_attention.query_key_value"),
        ("InternLM2ForCausalLM", "model.layers.0.attention.wqkv"),
    ],
)
def test_grouped_q_k_v_are_taken_apart(architecture: str, name: str) -> None:
    fused = numbered(16, 8)
    got = read(Source({f"{name}.weight": fused}), arch(architecture))
    heads = fused.view(2, 4, 2, 8)  # key head; two queries, key, value; dimension; input
    assert torch.equal(got[f"{ATTN}q_proj.weight"], heads[:, :2].reshape(8, 8))
    assert torch.equal(got[f"{ATTN}k_proj.weight"], heads[:, 2].reshape(4, 8))
    assert torch.equal(got[f"{ATTN}v_proj.weight"], heads[:, 3].reshape(4, 8))


def test_fused_rows_must_be_those_of_the_configuration() -> None:
    source = Source({"model.layers.0.self_attn.qkv_proj.weight": numbered(15, 8)})
    with pytest.raises(WeightsError, match=r"qkv_proj.weight has 15 rows, and 16 by"):
        canonical(source, arch("Phi3ForCausalLM"))


def test_stacked_experts_are_taken_apart() -> None:
    moe = MoEConfig(num_experts=3, experts_per_token=1, expert_size=5)
    both, down = numbered(3, 10, 8), numbered(3, 8, 5)
    names = ("model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj")
    source = Source(dict(zip(names, (both, down), strict=True)))
    got = read(source, arch("Qwen3MoeForCausalLM", moe=moe))
    assert len(got) == 9
    for e in range(3):
        assert torch.equal(got[f"{MLP}experts.{e}.gate_proj.weight"], both[e, :5])
        assert torch.equal(got[f"{MLP}experts.{e}.up_proj.weight"], both[e, 5:])
        assert torch.equal(got[f"{MLP}experts.{e}.down_proj.weight"], down[e])


def test_norms_of_heads_are_stacked_in_whatever_order_they_come() -> None:
    own = {f"model.layers.0.self_attn.q_layernorm.norms.{i}.weight": numbered(2) + i
           for i in (2, 0, 3, 1)}  # fmt: skip
    got = read(Source(dict(own)), arch("StableLmForCausalLM", norm="layer", norm_bias=True))
    assert torch.equal(
        got[f"{ATTN}q_norm.weight"], torch.stack([numbered(2) + i for i in range(4)])
    )


def test_norms_without_weights_become_ones() -> None:
    got = read(Source({"model.embed_tokens.weight": numbered(11, 8)}),
               arch("OlmoForCausalLM", norm="layer"))  # fmt: skip
    norms = {name for name in got if "norm" in name}
    assert norms == {
        "model.norm.weight", "model.layers.0.input_layernorm.weight",
        "model.layers.0.post_attention_layernorm.weight",
    }  # fmt: skip
    assert all(torch.equal(got[name], torch.ones(8)) for name in norms)


def test_gemma_adds_one_to_its_norms_in_float32() -> None:
    weight = torch.tensor([2**-9, -0.5], dtype=torch.bfloat16).repeat(4)
    source = Source({"model.norm.weight": weight, "model.embed_tokens.weight": numbered(11, 8)})
    got = read(source, arch("GemmaForCausalLM", norm_offset=1.0))
    assert torch.equal(got["model.norm.weight"], weight.float() + 1)  # 1 + 2**-9 is no bfloat16
    assert torch.equal(got["model.embed_tokens.weight"], numbered(11, 8))


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_gemma3_with_images_leaves_them_out(prefix: str) -> None:
    source = Source({
        f"{prefix}layers.0.mlp.up_proj.weight": numbered(6, 8),
        f"{prefix}norm.weight": numbered(8),
        "vision_tower.vision_model.embeddings.patch_embedding.bias": numbered(3),
        "model.vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight": numbered(3, 3),
        "multi_modal_projector.mm_soft_emb_norm.weight": numbered(3),
        "language_model.lm_head.weight": numbered(11, 8),
    })  # fmt: skip
    got = read(source, arch("Gemma3ForCausalLM"))
    assert set(got) == {f"{MLP}up_proj.weight", "model.norm.weight", "lm_head.weight"}


def test_unknown_names_stay_for_the_loader_to_list() -> None:
    got = read(Source({"adapter": numbered(2), "transformer.h.0.extra.weight": numbered(2)}),
               arch("GPT2LMHeadModel"))  # fmt: skip
    assert set(got) == {"adapter", "model.layers.0.extra.weight"}


def test_only_one_of_the_files_tensors_is_out_at_a_time() -> None:
    names = [f"model.layers.{i}.mlp.gate_up_proj.weight" for i in range(3)]
    source = Source({name: numbered(12, 8) for name in names})
    stream = canonical(source, arch("Phi3ForCausalLM", num_layers=3)).tensors()
    assert source.given == []
    for count in (1, 1, 2, 2, 3, 3):
        next(stream)
        assert len(source.given) == count


def test_quantized_matrices_are_cut_as_they_are() -> None:
    fused, plain = (
        "transformer.h.0.self_attention.query_key_value.weight",
        "transformer.ln_f.weight",
    )
    source = Source({fused: Packed(numbered(16, 8)), plain: numbered(8)})
    made = canonical(source, arch("FalconForCausalLM"))
    got = {n: w for n, w, _ in made.tensors(keep=lambda name: name.endswith("_proj.weight"))}
    assert source.kept == {fused: True, plain: False}
    key = got[f"{ATTN}k_proj.weight"]
    assert isinstance(key, Packed) and key.shape == (4, 8)
    assert torch.equal(key.values, numbered(16, 8).view(2, 4, 2, 8)[:, 2].reshape(4, 8))


def test_a_matrix_stays_quantized_only_if_all_of_it_may() -> None:
    fused = "model.layers.0.self_attn.qkv_proj.weight"
    source = Source({fused: numbered(16, 8)})
    list(canonical(source, arch("Phi3ForCausalLM")).tensors(keep=lambda name: "q_proj" in name))
    assert source.kept == {fused: False}
    turned = Source({"h.0.mlp.c_fc.weight": numbered(8, 6)})
    list(canonical(turned, arch("GPT2LMHeadModel")).tensors(keep=lambda name: True))
    assert turned.kept == {"h.0.mlp.c_fc.weight": False}


def test_masks_of_bits_in_old_files_are_passed_over(tmp_path: Path) -> None:
    tensors = {
        "gpt_neox.layers.0.attention.bias": torch.ones(1, 1, 4, 4, dtype=torch.bool),
        "gpt_neox.layers.0.attention.masked_bias": torch.tensor(-1e9),
        "gpt_neox.layers.0.attention.rotary_emb.inv_freq": numbered(2),
        "embed_out.weight": numbered(11, 8),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    made = canonical(SafetensorsSource(tmp_path), arch("GPTNeoXForCausalLM", num_kv_heads=4))
    assert made.shapes() == {"lm_head.weight": (11, 8)}
    assert [name for name, _, _ in made.tensors(torch.bfloat16)] == ["lm_head.weight"]
