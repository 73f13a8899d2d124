"""Which tensor of a GGUF file, or which rows of one, is each weight of the model.

Names of GGUF are mapped to the model's; fused tensors and stacked experts are taken apart, and rows
that llama.cpp's converter reordered are put back.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator
from dataclasses import dataclass
from math import prod

import torch

from octavo.arch import ModelArch
from octavo.weights.gguf_file import GGUFFile, GGUFTensor

_NAMES = {
    "token_embd": "model.embed_tokens",
    "position_embd": "model.embed_positions",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "ffn_norm": "post_attention_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_OUTER = re.compile(r"(\w+)\.(weight|bias)")
_STACKED = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.weight")
_SINGLE_EXPERT = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)\.(\d+)\.weight")
"""As experts were written before they were stacked."""
_NOT_WEIGHTS = re.compile(
    r"rope_freqs\.weight|rope_factors_(long|short)\.weight|blk\.\d+\.attn_rot_embd\.weight"
    r"|blk\.\d+\.rope\.freqs"
)


@dataclass(frozen=True, slots=True)
class Part:
    """A weight of the model: neighbouring rows of a tensor in the file."""

    tensor: GGUFTensor
    shape: tuple[int, ...]
    """As the model has it."""
    first_byte: int
    """Of the part, from the tensor's own first byte."""
    num_bytes: int
    paired_heads: int = 0
    """Heads whose rows lie as (pair, half) and have to go back to (half, pair); 0: in order."""

    @classmethod
    def rows(
        cls, tensor: GGUFTensor, first: int, shape: tuple[int, ...], paired_heads: int = 0
    ) -> Part:
        """`shape` from row `first` on; a row has `shape[-1]` elements, of a vector one."""
        width = shape[-1] if len(shape) > 1 else 1
        row_bytes, odd = divmod(tensor.num_bytes * width, max(tensor.num_elements, 1))
        assert not odd, f"{tensor.name}: rows of {width} do not end with blocks"
        count = prod(shape) // width if width else 0
        return cls(tensor, shape, first * row_bytes, count * row_bytes, paired_heads)

    @property
    def tensors(self) -> tuple[GGUFTensor, ...]:
        """What it is read from."""
        return (self.tensor,)

    def row_order(self) -> torch.Tensor | None:
        """Which of the part's rows comes where, [num_rows] int64; None: as they lie.

        It undoes llama.cpp's `permute` of q and k.
        """
        if not self.paired_heads or not self.shape:
            return None
        num_rows = self.shape[0]
        if num_rows % (2 * self.paired_heads):  # a wrong shape: the loader names it
            return None
        order = torch.arange(num_rows).reshape(self.paired_heads, -1, 2)
        return order.transpose(1, 2).reshape(-1)


@dataclass(frozen=True, slots=True)
class LatentPart:
    """kv_b_proj of latent attention, which newer files hold as two tensors, one transposed."""

    keys: GGUFTensor
    """[num_heads, kv_lora_rank, qk_nope_head_dim]."""
    values: GGUFTensor
    """[num_heads, v_head_dim, kv_lora_rank]."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[num_heads * (qk_nope_head_dim + v_head_dim), kv_lora_rank]."""
        heads, rank, nope = self.keys.shape
        return heads * (nope + self.values.shape[1]), rank

    @property
    def num_bytes(self) -> int:
        """In the file."""
        return self.keys.num_bytes + self.values.num_bytes

    @property
    def tensors(self) -> tuple[GGUFTensor, ...]:
        """What it is read from."""
        return self.keys, self.values


def hf_name(name: str, architecture: str = "llama") -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; unknown names stay."""
    layer = _LAYER.fullmatch(name)
    if layer:
        found = _layer_name(layer[2], architecture)
        return f"model.layers.{layer[1]}.{found}.{layer[3]}" if found else name
    outer = _OUTER.fullmatch(name)
    return f"{_NAMES[outer[1]]}.{outer[2]}" if outer and outer[1] in _NAMES else name


def _layer_name(name: str, architecture: str) -> str | None:
    if architecture in ("gemma2", "gemma3") and name == "ffn_norm":
        return "pre_feedforward_layernorm"
    return _LAYER_NAMES.get(name)


def gguf_parts(file: GGUFFile, arch: ModelArch, permuted: bool) -> dict[str, Part | LatentPart]:
    """Every weight by the model's name for it; names that are not known stay as they are."""
    parts: dict[str, Part | LatentPart] = {}
    for tensor in file.tensors.values():
        if not _NOT_WEIGHTS.fullmatch(tensor.name):
            parts |= dict(_parts_of(tensor, file, arch, permuted))
    return parts


def unit_norms(arch: ModelArch, names: Container[str]) -> dict[str, tuple[int, ...]]:
    """Norms of a family that has no weights for them (OLMo 1), which are ones."""
    if arch.norm != "layer" or arch.norm_bias or "model.norm.weight" in names:
        return {}
    layer = ("input_layernorm", "post_attention_layernorm")
    wanted = [f"model.layers.{i}.{n}.weight" for i in range(arch.num_layers) for n in layer]
    return {name: (arch.hidden_size,) for name in [*wanted, "model.norm.weight"]}


def _parts_of(
    tensor: GGUFTensor, file: GGUFFile, arch: ModelArch, permuted: bool
) -> Iterator[tuple[str, Part | LatentPart]]:
    if (stacked := _STACKED.fullmatch(tensor.name)) and len(tensor.shape) == 3:
        num_experts, *matrix = tensor.shape
        for expert in range(num_experts):
            name = f"model.layers.{stacked[1]}.mlp.experts.{expert}.{stacked[2]}_proj.weight"
            yield name, Part.rows(tensor, expert * matrix[0], tuple(matrix))
        return
    if single := _SINGLE_EXPERT.fullmatch(tensor.name):
        name = f"model.layers.{single[1]}.mlp.experts.{single[3]}.{single[2]}_proj.weight"
        yield name, Part.rows(tensor, 0, tensor.shape)
        return
    if (latent := _latent(tensor, file)) is not None:
        yield from latent
        return
    if (fused := _fused(tensor, file.architecture, arch)) is not None:
        first = 0
        for name, num_rows in fused:
            yield name, Part.rows(tensor, first, (num_rows, *tensor.shape[1:]))
            first += num_rows
        return
    name, shape, heads = hf_name(tensor.name, file.architecture), tensor.shape, 0
    if file.architecture == "falcon":
        name = _falcon_norm(name, tensor.name, file)
    if name.endswith("shared_expert_gate.weight") and len(shape) == 1:
        shape = (1, *shape)  # the converter drops dimensions of one
    if permuted and ".self_attn.q_proj." in name:
        heads = arch.num_heads
    elif permuted and ".self_attn.k_proj." in name:
        heads = arch.num_kv_heads
    yield name, Part.rows(tensor, 0, shape, heads)


def _fused(tensor: GGUFTensor, architecture: str, arch: ModelArch) -> list[tuple[str, int]] | None:
    """What stands below each other in a tensor, with the rows of each; None when it is one thing.

    A tensor of another height stays whole, under its own name, for the loader to name.
    """
    layer = _LAYER.fullmatch(tensor.name)
    if layer is None or not tensor.shape:
        return None
    prefix, kind = f"model.layers.{layer[1]}.", layer[3]
    if layer[2] == "attn_qkv":
        q, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        rows = [("self_attn.q_proj", q), ("self_attn.k_proj", kv), ("self_attn.v_proj", kv)]
    elif layer[2] == "ffn_up" and architecture == "phi3":
        rows = [("mlp.gate_proj", arch.intermediate_size), ("mlp.up_proj", arch.intermediate_size)]
    else:
        return None
    if sum(n for _, n in rows) != tensor.shape[0]:
        return None
    return [(f"{prefix}{name}.{kind}", n) for name, n in rows]


def _latent(tensor: GGUFTensor, file: GGUFFile) -> list[tuple[str, Part | LatentPart]] | None:
    """kv_b_proj, made with the keys' tensor; nothing with the values' own."""
    layer = _LAYER.fullmatch(tensor.name)
    if layer is None or layer[2] not in ("attn_k_b", "attn_v_b"):
        return None
    keys = file.tensors.get(f"blk.{layer[1]}.attn_k_b.weight")
    values = file.tensors.get(f"blk.{layer[1]}.attn_v_b.weight")
    fit = (
        keys is not None
        and values is not None
        and len(keys.shape) == len(values.shape) == 3
        and (keys.shape[0], keys.shape[1]) == (values.shape[0], values.shape[2])
    )
    if keys is None or values is None or not fit:
        return None
    if tensor is values:
        return []
    return [(f"model.layers.{layer[1]}.self_attn.kv_b_proj.weight", LatentPart(keys, values))]


def _falcon_norm(name: str, raw_name: str, file: GGUFFile) -> str:
    """Falcon 40B's two norms: attn_norm is the MLP's, attn_norm_2 attention's."""
    layer = _LAYER.fullmatch(raw_name)
    if layer is None or not layer[2].startswith("attn_norm"):
        return name
    both = f"blk.{layer[1]}.attn_norm_2.weight" in file.tensors
    mlp = both and layer[2] == "attn_norm"
    own = "post_attention_layernorm" if mlp else "input_layernorm"
    return f"model.layers.{layer[1]}.{own}.{layer[3]}"
