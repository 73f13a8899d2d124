"""What each family calls its modules, and what the decoder calls them: one table.

A family that is not here uses the decoder's names, which are Llama's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_STACKED = re.compile(r"(.*\.mlp\.experts\.(?:gate_up_proj|down_proj))")
_TENSOR = re.compile(r"(.+)\.(weight|bias)")
_LAYER = re.compile(r"(?:layers|h)\.(\d+)\.(.+)")
_NORM_OF_HEAD = re.compile(r"(self_attn)\.([qk])_layernorm\.norms\.(\d+)")


@dataclass(frozen=True, slots=True)
class Module:
    """A tensor's place in the decoder."""

    module: str
    """With the decoder's names; `qkv_proj`, `gate_up_proj` and stacks are not cut yet."""
    kind: str
    """weight or bias."""
    transposed: bool = False
    """Weights lie as [in_features, out_features]."""
    stacked: bool = False
    """It holds all experts."""
    head: int | None = None
    """It is of this head alone."""


@dataclass(frozen=True, slots=True)
class Naming:
    """How a family's names become the decoder's."""

    layer: Mapping[str, str] = field(default_factory=dict)
    """Pattern of a module's name within a layer: the decoder's name."""
    outer: Mapping[str, str] = field(default_factory=dict)
    """Other modules, without `prefix`: the decoder's name. The rest keep theirs under `model.`"""
    prefix: str = r"model\."
    """Pattern of what stands before all names, or may not."""
    left_out: str = r"(?!)"
    """Pattern of tensors that are no weights of the text model."""
    grouped_qkv: bool = False
    """`qkv_proj` has for each key head its queries, it and its values, not all queries first."""
    transposed: tuple[str, ...] = ()
    """Modules of a layer, by the family's names, whose weights lie the other way round."""

    def is_left_out(self, name: str) -> bool:
        """Whether the decoder has no use for a tensor."""
        return re.fullmatch(self.left_out, name) is not None

    def parse(self, name: str) -> Module | None:
        """Where a tensor of the file belongs; None for a name that no rule knows."""
        stacked = _STACKED.fullmatch(name)
        if stacked:
            return Module(stacked[1], "weight", stacked=True)
        tensor = _TENSOR.fullmatch(name)
        if tensor is None:
            return None
        inner = re.sub(f"^(?:{self.prefix})", "", tensor[1])
        in_layer = _LAYER.fullmatch(inner)
        if in_layer is None:
            if inner == "lm_head":
                return Module("lm_head", tensor[2])
            return Module(self.outer.get(inner, f"model.{inner}"), tensor[2])
        prefix, own = f"model.layers.{in_layer[1]}.", in_layer[2]
        norm = _NORM_OF_HEAD.fullmatch(own)
        if norm:
            return Module(f"{prefix}{norm[1]}.{norm[2]}_norm", tensor[2], head=int(norm[3]))
        return Module(prefix + self._of_layer(own), tensor[2], own in self.transposed)

    def _of_layer(self, own: str) -> str:
        for pattern, name in self.layer.items():
            match = re.fullmatch(pattern, own)
            if match:
                return match.expand(name)
        return own


_GPT_MLP = {"mlp.dense_h_to_4h": "mlp.up_proj", "mlp.dense_4h_to_h": "mlp.down_proj"}
_WITH_IMAGES = Naming(
    prefix=r"language_model\.model\.|model\.language_model\.|language_model\.|model\.",
    left_out=r"(model\.)?(vision_tower|multi_modal_projector)\..*",
)
"""The text model's place in one that sees images, and what lies beside it."""
_FC = {"fc1": "mlp.up_proj", "fc2": "mlp.down_proj"}

NAMINGS: dict[str, Naming] = {
    "GPT2LMHeadModel": Naming(
        layer={
            "ln_1": "input_layernorm",
            "ln_2": "post_attention_layernorm",
            "attn.c_attn": "self_attn.qkv_proj",
            "attn.c_proj": "self_attn.o_proj",
            "mlp.c_fc": "mlp.up_proj",
            "mlp.c_proj": "mlp.down_proj",
        },
        outer={
            "wte": "model.embed_tokens",
            "wpe": "model.embed_positions",
            "ln_f": "model.norm",
        },
        prefix=r"transformer\.",
        left_out=r".*h\.\d+\.attn\.(masked_)?bias",
        transposed=("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"),
    ),
    "GPTNeoXForCausalLM": Naming(
        layer={
            "attention.query_key_value": "self_attn.qkv_proj",
            "attention.dense": "self_attn.o_proj",
            **_GPT_MLP,
        },
        outer={
            "embed_in": "model.embed_tokens",
            "final_layer_norm": "model.norm",
            "embed_out": "lm_head",
        },
        prefix=r"gpt_neox\.",
        left_out=r".*attention\.((masked_)?bias|rotary_emb\.inv_freq)",
        grouped_qkv=True,
    ),
    "OPTForCausalLM": Naming(
        layer={
            "self_attn_layer_norm": "input_layernorm",
            "final_layer_norm": "post_attention_layernorm",
            "self_attn.out_proj": "self_attn.o_proj",
            **_FC,
        },
        outer={"final_layer_norm": "model.norm"},
        prefix=r"(?:model\.)?decoder\.",
    ),
    "FalconForCausalLM": Naming(
        layer={
            "ln_attn": "input_layernorm",
            "ln_mlp": "post_attention_layernorm",
            "self_attention.query_key_value": "self_attn.qkv_proj",
            "self_attention.dense": "self_attn.o_proj",
            **_GPT_MLP,
        },
        outer={"word_embeddings": "model.embed_tokens", "ln_f": "model.norm"},
        prefix=r"transformer\.",
        grouped_qkv=True,
    ),
    "InternLM2ForCausalLM": Naming(
        layer={
            "attention.wqkv": "self_attn.qkv_proj",
            "attention.wo": "self_attn.o_proj",
            "attention_norm": "input_layernorm",
            "ffn_norm": "post_attention_layernorm",
            "feed_forward.w1": "mlp.gate_proj",
            "feed_forward.w2": "mlp.down_proj",
            "feed_forward.w3": "mlp.up_proj",
        },
        outer={"tok_embeddings": "model.embed_tokens", "output": "lm_head"},
        grouped_qkv=True,
    ),
    "PhiForCausalLM": Naming(
        layer={
            "self_attn.dense": "self_attn.o_proj",
            **{f"mlp.{own}": name for own, name in _FC.items()},
        },
        outer={"final_layernorm": "model.norm"},
    ),
    "Phi3ForCausalLM": Naming(),
    "StableLmForCausalLM": Naming(),
    "OlmoForCausalLM": Naming(),
    "GemmaForCausalLM": Naming(),
    "Gemma2ForCausalLM": Naming(),
    "Gemma3ForCausalLM": _WITH_IMAGES,
    "MistralForCausalLM": _WITH_IMAGES,
    "MixtralForCausalLM": Naming(
        layer={
            r"block_sparse_moe\.gate": "mlp.gate",
            r"block_sparse_moe\.experts\.(\d+)\.w1": r"mlp.experts.\1.gate_proj",
            r"block_sparse_moe\.experts\.(\d+)\.w2": r"mlp.experts.\1.down_proj",
            r"block_sparse_moe\.experts\.(\d+)\.w3": r"mlp.experts.\1.up_proj",
        },
    ),
    "Qwen2MoeForCausalLM": Naming(
        layer={r"mlp\.shared_expert\.(\w+)": r"mlp.shared_experts.\1"},
    ),
    "Qwen3MoeForCausalLM": Naming(),
    "DeepseekV2ForCausalLM": Naming(),
}
"""By name in the registry."""
