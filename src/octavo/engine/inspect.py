"""What a model is, from its headers alone: shape, sizes, formats, template, and what it takes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from octavo.arch import ModelArch
from octavo.attention.gather import GatherAttention
from octavo.config import DEFAULT_MODEL
from octavo.errors import ModelNotFoundError, TokenizerError
from octavo.kv_groups import kv_groups
from octavo.models.registry import build_model
from octavo.quantization import PLAIN_TYPES, Quantization
from octavo.text.tokenizer import load_tokenizer
from octavo.util import human_bytes
from octavo.weights.gguf_file import GGUFFile
from octavo.weights.load import OpenModel, open_model
from octavo.weights.locate import ModelFiles, local_path, locate
from octavo.weights.manage import list_models
from octavo.weights.progress import Progress
from octavo.weights.safetensors_source import SafetensorsSource

_ELEMENT_BYTES = 2
"""Of weights that are not quantized, and of KV: bfloat16, in which octavo computes by default."""


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that keep the same of a sequence."""

    num_layers: int
    window: int
    """Tokens that they look back at; 0: all."""
    bytes_per_token: int
    """Of KV, in 16 bits a number, padding included."""
    num_padding: int = 0
    """Layers besides that blocks have room for, so that those of all groups are alike
    (`octavo.kv_groups`)."""

    def kept_bytes(self, num_tokens: int) -> int:
        """What a sequence of so many tokens keeps in these layers."""
        kept = min(num_tokens, self.window) if self.window else num_tokens
        return kept * self.bytes_per_token


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """All that `octavo models inspect` shows."""

    name: str
    path: str
    arch: ModelArch
    num_params: int
    """Tied ones once."""
    num_active_params: int
    """Of them those that a token takes part in: not the experts that it is not sent to."""
    file_bytes: int | None
    """Of the tensors on disk; None: there are none here."""
    weight_bytes: int
    """Of the weights in memory: as they are quantized, by the file or else by config.json; in 16
    bits where they are not."""
    formats: dict[str, int]
    """Type of tensors in the file -> their bytes, the most first."""
    quantization: str | None
    groups: tuple[LayerGroup, ...]
    tokenizer: str
    """Its size, or why there is none."""
    templates: tuple[str, ...]
    """Names of its chat templates."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Over all layers."""
        return sum(group.bytes_per_token for group in self.groups)

    def kept_bytes(self, num_tokens: int) -> int:
        """KV of one sequence of so many tokens, behind whose windows blocks are given back."""
        return sum(group.kept_bytes(num_tokens) for group in self.groups)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.name,
            "path": self.path,
            "architecture": self.arch.architecture,
            "num_params": self.num_params,
            "num_active_params": self.num_active_params,
            "file_bytes": self.file_bytes,
            "weight_bytes": self.weight_bytes,
            "formats": self.formats,
            "quantization": self.quantization,
            "dtype": self.arch.dtype,
            "num_layers": self.arch.num_layers,
            "max_position_embeddings": self.arch.max_position_embeddings,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "layer_groups": [
                {
                    "num_layers": group.num_layers,
                    "num_padding": group.num_padding,
                    "window": group.window,
                    "kv_bytes_per_token": group.bytes_per_token,
                }
                for group in self.groups
            ],
            "tokenizer": self.tokenizer,
            "chat_templates": list(self.templates),
        }

    def __str__(self) -> str:
        rows = [
            ("model", self.name),
            ("files", self.path),
            ("architecture", f"{self.arch.architecture}: {_shape_text(self.arch)}"),
            ("parameters", self._params_text()),
            ("weights", self._weights_text()),
            ("quantization", self.quantization or "none"),
            ("context", f"{self.arch.max_position_embeddings:,} tokens, {_rope_text(self.arch)}"),
            ("KV", f"{self.kv_bytes_per_token:,} B a token in bfloat16"),
            *(("", _group_text(group)) for group in self.groups),
            ("tokenizer", self.tokenizer),
            ("chat template", ", ".join(self.templates) or "none"),
        ]
        return "\n".join(f"{name:13}  {text}" for name, text in rows)

    def _params_text(self) -> str:
        text = f"{self.num_params:,} ({human_number(self.num_params)})"
        if self.num_active_params == self.num_params:
            return text
        active = human_number(self.num_active_params)
        return f"{text}, of which a token takes part in {self.num_active_params:,} ({active})"

    def _weights_text(self) -> str:
        if self.file_bytes is None:
            kind = "bfloat16" if self.quantization is None else "memory"
            return f"not here; {human_bytes(self.weight_bytes)} in {kind}"
        formats = ", ".join(f"{name} {human_bytes(size)}" for name, size in self.formats.items())
        return f"{human_bytes(self.file_bytes)} ({formats})"


def human_number(number: int) -> str:
    """`134.5 M`, `8.03 B`."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.4g} {unit}"
    return str(number)


def inspect_model(
    model: str, revision: str | None = None, progress: Progress | None = None
) -> ModelReport:
    """Look at `model` without reading its weights. Of one on the hub that is not on this machine
    only the small files are fetched. Raises `ModelError`s that name the file."""
    files = _found(model, revision, progress)
    opened = open_model(files)
    arch, source = opened.arch, opened.source
    shapes = build_model(
        arch, GatherAttention(), torch.float32, 1, torch.device("cpu")
    ).parameters_spec()
    shapes = {name: shape for name, shape in shapes.items() if not _is_made(name, arch)}
    formats = _formats(files)
    file_bytes = None if source is None else sum(formats.values())
    quantization = _quantization(opened, formats)
    weight_bytes = file_bytes
    if weight_bytes is None or quantization is None:
        weight_bytes = _expected_bytes(shapes, opened.quantization)
    tokenizer, templates = _tokenizer(files)
    return ModelReport(
        name=model,
        path=str(files.path),
        arch=arch,
        num_params=sum(map(math.prod, shapes.values())),
        num_active_params=_num_active(shapes, arch),
        file_bytes=file_bytes,
        weight_bytes=weight_bytes,
        formats=formats,
        quantization=quantization,
        groups=layer_groups(arch),
        tokenizer=tokenizer,
        templates=templates,
    )


def _is_made(name: str, arch: ModelArch) -> bool:
    """Whether it is a LayerNorm without weights, for which files have no tensor (OLMo 1)."""
    return arch.norm == "layer" and not arch.norm_bias and name.endswith("norm.weight")


def _num_active(shapes: Mapping[str, tuple[int, ...]], arch: ModelArch) -> int:
    sent = sum(math.prod(shape) for name, shape in shapes.items() if ".experts." in name)
    total = sum(map(math.prod, shapes.values()))
    if arch.moe is None:
        return total
    return total - sent + sent // arch.moe.num_experts * arch.moe.experts_per_token


def _expected_bytes(
    shapes: Mapping[str, tuple[int, ...]], quantization: Quantization | None
) -> int:
    """Of weights in 16 bits, but for linears of layers that config.json says are quantized."""
    total = 0.0
    for name, shape in shapes.items():
        size = float(_ELEMENT_BYTES)
        linear = name.removesuffix(".weight")
        if quantization is not None and linear.endswith("_proj") and linear != name:
            size = size if quantization.ignores(linear) else _quantized_size(quantization, shape[1])
        total += math.prod(shape) * size
    return int(total)


def _quantized_size(quantization: Quantization, in_features: int) -> float:
    """Bytes of a weight and its share of a scale and a zero point of 16 bits."""
    size = quantization.bits / 8
    if quantization.codes == "fp8":
        return size
    group = in_features if quantization.group_size < 0 else quantization.group_size
    return size + (2 if quantization.symmetric else 4) / group


def layer_groups(arch: ModelArch) -> tuple[LayerGroup, ...]:
    """Layers by their window, those without one first; one as long as the context is none."""
    per_layer = arch.kv_planes * arch.kv_num_heads * arch.kv_head_dim * _ELEMENT_BYTES
    found = kv_groups(arch, arch.max_position_embeddings)
    layers: Counter[int] = Counter()
    for group in found.groups:
        layers[group.window] += len(group.layers)
    held = {w: num * found.layers_per_block for w, num in Counter(found.windows).items()}
    return tuple(
        LayerGroup(num, w, held[w] * per_layer, held[w] - num) for w, num in layers.items()
    )


def _found(model: str, revision: str | None, progress: Progress | None) -> ModelFiles:
    """Its weights, too, where they are on this machine; else what tells its shape."""
    if not _is_here(model):
        return locate(model, revision, "dummy", progress)
    try:
        return locate(model, revision, "auto")
    except ModelNotFoundError:
        path = local_path(model)
        if path is None or not (path / "config.json").is_file():
            raise
        return locate(model, revision, "dummy")


def _is_here(model: str) -> bool:
    return (
        local_path(model) is not None
        or model == DEFAULT_MODEL
        or any(stored.name == model for stored in list_models())
    )


def _formats(files: ModelFiles) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    if files.kind == "gguf":
        from gguf import GGMLQuantizationType

        for tensor in GGUFFile(files.path).tensors.values():
            sizes[GGMLQuantizationType(tensor.type_id).name] += tensor.num_bytes
    elif files.kind == "hf":
        sizes.update(SafetensorsSource(files.path, quantized=True).formats())
    return dict(sizes.most_common())


def _quantization(opened: OpenModel, formats: dict[str, int]) -> str | None:
    if opened.quantization is not None:
        return opened.quantization.text
    kinds = [kind for kind in formats if kind not in PLAIN_TYPES]
    return f"GGUF {', '.join(kinds)}" if kinds else None


def _tokenizer(files: ModelFiles) -> tuple[str, tuple[str, ...]]:
    try:
        tokenizer = load_tokenizer(files.tokenizer)
    except TokenizerError as error:
        return f"none: {error}", ()
    return f"{tokenizer.vocab_size:,} tokens", tuple(tokenizer.chat_templates)


def _shape_text(arch: ModelArch) -> str:
    text = (
        f"{_count(arch.num_layers, 'layer')} of {arch.hidden_size:,}, "
        f"{_count(arch.num_heads, 'head')} of {arch.head_dim}"
    )
    if arch.mla is not None:
        text += f", a latent of {arch.kv_head_dim} for all"
    elif arch.num_kv_heads != arch.num_heads:
        text += f", {_count(arch.num_kv_heads, 'KV head')}"
    if arch.moe is not None:
        text += f", {arch.moe.num_experts} experts, {arch.moe.experts_per_token} a token"
    return f"{text}, vocabulary {arch.vocab_size:,}{', tied' * arch.tie_word_embeddings}"


def _rope_text(arch: ModelArch) -> str:
    if arch.positions != "rope":
        return {"learned": "learned positions", "alibi": "ALiBi"}.get(arch.positions, "none")
    rope = arch.rope
    text = f"rope {rope.theta:,.0f}"
    if rope.scaling_type != "default":
        text += f", {rope.scaling_type} x {rope.factor:g}"
    if 0 < rope.original_max_position < arch.max_position_embeddings:
        text += f" from {rope.original_max_position:,}"
    return text


def _group_text(group: LayerGroup) -> str:
    padding = f" and {group.num_padding} of padding" if group.num_padding else ""
    text = f"{_count(group.num_layers, 'layer')}{padding}: {group.bytes_per_token:,} B a token"
    if not group.window:
        return f"{text}, all tokens are kept"
    return f"{text} of the last {group.window:,}, at most {human_bytes(group.kept_bytes(10**9))}"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
