"""GGUF -> `ModelArch` and a stream of dequantized tensors under Hugging Face names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from octavo.arch import ModelArch, RopeConfig
from octavo.errors import UnsupportedModelError, WeightsError
from octavo.hf_config import stretched_context, unknown_architecture
from octavo.weights.gguf_file import GGUFFile, GGUFTensor
from octavo.weights.gguf_rope import fit_llama3

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""`general.architecture` -> name in the registry. Mistral is written as llama."""
_PERMUTED = ("llama",)
"""Architectures whose q and k rows llama.cpp reorders, pairing the halves that rope rotates."""

_NAMES = {
    "token_embd": "model.embed_tokens",
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
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_OUTER = re.compile(r"(\w+)\.(weight|bias)")
_ROPE_FREQS = "rope_freqs.weight"
_NOT_WEIGHTS = re.compile(
    r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight|blk\.\d+\.rope\.freqs"
)

_F32, _F16, _BF16 = 0, 1, 30
_PLAIN = {_F32: torch.float32, _F16: torch.float16, _BF16: torch.bfloat16}
_DTYPE_NAMES = {_F32: "float32", _F16: "float16", _BF16: "bfloat16"}
_CHUNK_ELEMENTS = 1 << 15
"""Elements dequantized at a time. They stay in the cache, and torch converts so few on the calling
thread: with more it wakes its pool for each chunk, which took 5 to 15 times as long where other
processes were busy."""


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`; unknown names stay."""
    layer = _LAYER.fullmatch(name)
    if layer and layer[2] in _LAYER_NAMES:
        return f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{layer[3]}"
    outer = _OUTER.fullmatch(name)
    return f"{_NAMES[outer[1]]}.{outer[2]}" if outer and outer[1] in _NAMES else name


def read_gguf_arch(file: GGUFFile) -> ModelArch:
    """The shape of the model in `file`.

    Raises `UnsupportedModelError` for an architecture or option octavo does not run, `WeightsError`
    when the metadata lacks what every model has or holds it in another type.
    """
    try:
        return _arch(file)
    except (TypeError, ValueError, AttributeError, OverflowError, ZeroDivisionError) as error:
        raise WeightsError(
            f"{file.path} is damaged: its metadata cannot be read ({error}); download it again"
        ) from error


def _arch(file: GGUFFile) -> ModelArch:
    name = ARCHITECTURES.get(file.architecture)
    if name is None:
        raise unknown_architecture(file.architecture, ARCHITECTURES, str(file.path))
    _check_options(file)
    num_heads, hidden_size = (
        _required(file, "attention.head_count"),
        _required(file, "embedding_length"),
    )
    num_kv_heads = _number(file, "attention.head_count_kv", num_heads)
    head_dim = _number(file, "attention.key_length", hidden_size // num_heads)
    if (value_dim := _number(file, "attention.value_length", head_dim)) != head_dim:
        raise UnsupportedModelError(
            f"{file.path}: heads of {head_dim} for keys and {value_dim} for values differ"
        )
    num_layers, stated = _required(file, "block_count"), _required(file, "context_length")
    window = _number(file, "attention.sliding_window", 0)
    rope = _rope(file, head_dim)
    return ModelArch(
        architecture=name,
        vocab_size=_tensor(file, "token_embd.weight").shape[0],
        hidden_size=hidden_size,
        intermediate_size=_required(file, "feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=stretched_context(rope, stated),
        rms_norm_eps=_required_float(file, "attention.layer_norm_rms_epsilon"),
        rope=rope,
        sliding_windows=(window,) * num_layers if window else (),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        tie_word_embeddings="output.weight" not in file.tensors,
        dtype=_DTYPE_NAMES.get(_tensor(file, "blk.0.attn_q.weight").type_id, "float32"),
        bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=file.eos_token_ids,
    )


def _check_options(file: GGUFFile) -> None:
    if (parts := file.metadata.get("split.count", 1)) > 1:
        raise UnsupportedModelError(
            f"{file.path} is one of {parts} parts of a split model; join them with "
            "`llama-gguf-split --merge` and give the joined file"
        )
    for key in ("expert_count", "attention.sliding_window_pattern"):
        if file.arch_key(key):
            raise UnsupportedModelError(
                f"{file.path}: {file.architecture}.{key} = {file.arch_key(key)!r} is not supported"
            )
    for key in ("logit_scale", "embedding_scale", "residual_scale", "attention.scale"):
        if file.arch_key(key, 1.0) not in (0.0, 1.0):
            raise UnsupportedModelError(
                f"{file.path}: {file.architecture}.{key} = {file.arch_key(key)!r} is not supported"
            )


def _rope(file: GGUFFile, head_dim: int) -> RopeConfig:
    theta = float(file.arch_key("rope.freq_base", 10000.0))
    rotary_dim = _number(file, "rope.dimension_count", head_dim)
    if any(n.startswith("rope_factors_") for n in file.tensors):
        raise UnsupportedModelError(f"{file.path}: rope scaling 'longrope' is not supported")
    if _ROPE_FREQS in file.tensors:
        tensor = file.tensors[_ROPE_FREQS]
        return fit_llama3(file.data(tensor).view(np.float32), theta, rotary_dim, str(file.path))
    kind = file.arch_key("rope.scaling.type", "none")
    # before there were types there was one number, which meant linear scaling
    factor = float(file.arch_key("rope.scaling.factor", file.arch_key("rope.scale_linear", 1.0)))
    if "rope.scaling.type" not in _suffixes(file) and factor not in (0.0, 1.0):
        kind = "linear"
    if kind == "none" or (kind == "linear" and factor in (0.0, 1.0)):
        return RopeConfig(theta=theta, rotary_dim=rotary_dim)
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(
            f"{file.path}: rope scaling {kind!r} is not supported; known: linear, yarn, llama3"
        )
    context = _required(file, "context_length")
    extra = float(file.arch_key("rope.scaling.attn_factor", 1.0))
    default_attention = 1.0 if factor <= 1 else 0.1 * float(np.log(factor)) + 1.0
    return RopeConfig(
        theta=theta,
        rotary_dim=rotary_dim,
        scaling_type=kind,
        factor=factor,
        original_max_position=_number(file, "rope.scaling.original_context_length", context),
        beta_fast=float(file.arch_key("rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=float(file.arch_key("rope.scaling.yarn_beta_slow", 1.0)),
        attention_factor=None if extra == 1.0 else extra * default_attention,
    )


def _suffixes(file: GGUFFile) -> set[str]:
    prefix = file.architecture + "."
    return {k.removeprefix(prefix) for k in file.metadata if k.startswith(prefix)}


def _number(file: GGUFFile, key: str, default: int) -> int:
    value = file.arch_key(key, default)
    if isinstance(value, list):  # per layer
        if len(set(value)) != 1:
            raise UnsupportedModelError(
                f"{file.path}: {file.architecture}.{key} differs between layers ({value})"
            )
        value = value[0]
    return int(value)


def _required(file: GGUFFile, key: str) -> int:
    value = _number(file, key, 0)
    if value < 1:
        raise WeightsError(
            f"{file.path} does not state {file.architecture}.{key}; convert the model again with a "
            "current llama.cpp"
        )
    return value


def _required_float(file: GGUFFile, key: str) -> float:
    value = file.arch_key(key)
    if not isinstance(value, float):
        raise WeightsError(
            f"{file.path} does not state {file.architecture}.{key}; convert the model again with a "
            "current llama.cpp"
        )
    # the file holds float32; 1e-5 comes back as 9.999999747378752e-06
    return float(np.format_float_positional(np.float32(value), unique=True))


def _tensor(file: GGUFFile, name: str) -> GGUFTensor:
    if name not in file.tensors:
        raise WeightsError(f"{file.path} has no tensor {name!r}; convert the model again")
    return file.tensors[name]


class GGUFSource:
    """The tensors of a GGUF file, dequantized by package `gguf`; a `WeightSource`.

    Raises `UnsupportedModelError` at once when a tensor's type cannot be dequantized.
    """

    def __init__(self, file: GGUFFile | str | Path, arch: ModelArch | None = None) -> None:
        self._file = file if isinstance(file, GGUFFile) else GGUFFile(file)
        self._arch = arch or read_gguf_arch(self._file)
        self.name = str(self._file.path)
        self._tensors = {
            hf_name(n): t for n, t in self._file.tensors.items() if not _NOT_WEIGHTS.fullmatch(n)
        }
        self._check_types()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See `WeightSource`."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    @property
    def num_bytes(self) -> int:
        """See `WeightSource`."""
        return sum(tensor.num_bytes for tensor in self._tensors.values())

    def tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, torch.Tensor, int]]:
        """See `WeightSource`."""
        for name, packed in self._tensors.items():
            tensor = self._unpack(packed, dtype if len(packed.shape) > 1 else None)
            yield name, self._unpermute(name, tensor), packed.num_bytes

    def _check_types(self) -> None:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

        for type_id in {t.type_id for t in self._tensors.values()} - set(_PLAIN):
            kind = GGMLQuantizationType(type_id)
            try:
                dequantize(np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
            except NotImplementedError:
                example = next(n for n, t in self._tensors.items() if t.type_id == type_id)
                raise UnsupportedModelError(
                    f"{self.name}: tensor {example!r} has type {kind.name}, which cannot be "
                    "dequantized; use a file with another quantization"
                ) from None

    def _unpack(self, packed: GGUFTensor, dtype: torch.dtype | None) -> torch.Tensor:
        """The tensor in `dtype`, expanded a chunk of elements at a time."""
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

        plain = _PLAIN.get(packed.type_id)
        out = torch.empty(packed.num_elements, dtype=dtype or plain or torch.float32)
        raw, kind = self._file.data(packed), GGMLQuantizationType(packed.type_id)
        if plain is out.dtype:
            out.view(torch.uint8).numpy()[:] = raw
            return out.reshape(packed.shape)
        block, block_bytes = GGML_QUANT_SIZES[kind]
        step = _CHUNK_ELEMENTS // block
        for first in range(0, packed.num_elements // block, step):
            chunk = raw[first * block_bytes : (first + step) * block_bytes]
            # copied: torch takes no read-only memory. One long row: gguf works in groups of 16
            # rows, which are short in small models
            row = chunk.copy().reshape(1, -1)
            values = torch.from_numpy(dequantize(row, kind)).reshape(-1)
            out[first * block : first * block + len(values)] = values
        return out.reshape(packed.shape)

    def _unpermute(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Undo llama.cpp's `permute` of q and k: (head, pair, half) rows -> (head, half, pair)."""
        if self._file.architecture not in _PERMUTED:
            return tensor
        if ".q_proj." in name:
            num_heads = self._arch.num_heads
        elif ".k_proj." in name:
            num_heads = self._arch.num_kv_heads
        else:
            return tensor
        if tensor.shape[0] % (2 * num_heads):  # wrong shape: the loader names it
            return tensor
        paired = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])
        return paired.transpose(1, 2).reshape(tensor.shape)
