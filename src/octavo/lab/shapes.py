"""Shapes of models: what their weights and the KV of a token take. No weights are needed.

A shape comes from a `config.json`, or by name from those that ship with octavo
(`data/shapes.json`).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from octavo.arch import ModelArch
from octavo.errors import ModelNotFoundError, UnsupportedModelError
from octavo.hf_config import read_hf_config
from octavo.kv.sizing import KVShape
from octavo.util import cdiv, human_bytes

_LOGIT_BYTES = 4
"""Logits are float32."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder as costs and pools see it. Sizes in elements, unless the name says bytes."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    """Longest sequence, in tokens."""
    tied: bool = False
    """Whether the head is the embedding."""
    gated: bool = True
    """Whether the MLP has a gate: three matrices instead of two."""
    num_learned_positions: int = 0
    """Rows of a table of positions; 0 where positions are rotated in."""
    biased: bool = False
    """Whether every matrix has a bias and norms have two vectors (OPT)."""
    qkv_biased: bool = False
    """Whether q, k and v alone have one."""
    qk_norm: bool = False
    element_bytes: int = 2
    """Bytes of a weight, and of a number in the KV cache."""
    source: str = ""
    """Where the facts are from."""

    @cached_property
    def layer_matrix_params(self) -> int:
        """Weights of the matrices of one layer: what each token is multiplied with."""
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        attention = self.hidden_size * (2 * q + 2 * kv)
        return attention + (3 if self.gated else 2) * self.hidden_size * self.intermediate_size

    @cached_property
    def head_params(self) -> int:
        """Weights of the head: what each token that samples is multiplied with."""
        return self.vocab_size * self.hidden_size

    @cached_property
    def num_params(self) -> int:
        """All weights, tied ones once."""
        hidden, q, kv = self.hidden_size, self.num_heads * self.head_dim, self._kv_size
        layer = self.layer_matrix_params + 2 * hidden * (2 if self.biased else 1)
        if self.biased:
            layer += q + 2 * kv + hidden + self.intermediate_size + hidden
        elif self.qkv_biased:
            layer += q + 2 * kv
        if self.qk_norm:
            layer += 2 * self.head_dim
        final_norm = hidden * (2 if self.biased else 1)
        tables = self.head_params * (1 if self.tied else 2) + self.num_learned_positions * hidden
        return self.num_layers * layer + final_norm + tables

    @property
    def _kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.num_params * self.element_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes of the weights that a step reads: of an embedding that is not the head only the
        rows of its tokens."""
        return (self.num_layers * self.layer_matrix_params + self.head_params) * self.element_bytes

    def kv_shape(self, num_gpus: int = 1) -> KVShape:
        """What one GPU of so many keeps of a token: its share of the KV heads, whole ones."""
        num_heads = cdiv(self.num_kv_heads, num_gpus)
        return KVShape(self.num_layers, num_heads, self.head_dim, self.element_bytes)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's K and V over all layers."""
        return self.kv_shape().bytes_per_token

    def activation_bytes(self, num_tokens: int, num_samples: int, num_gpus: int = 1) -> int:
        """An estimate of a GPU's working set in a step: the residual stream and its norm, q, k, v
        and the attended values, both halves of the MLP, and the logits in float32."""
        shared = (2 * self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        shared += 2 * self.intermediate_size
        width = 2 * self.hidden_size + cdiv(shared, num_gpus)
        return num_tokens * width * self.element_bytes + (
            num_samples * self.vocab_size * _LOGIT_BYTES
        )

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.num_params / 1e9:,.2f} billion parameters, "
            f"{human_bytes(self.weight_bytes)}; KV {self.kv_shape()}"
        )


def shape_names() -> tuple[str, ...]:
    """Names of the shapes that ship with octavo."""
    return tuple(_shipped())


def find_shape(name_or_path: str | Path) -> ModelShape:
    """The shape of a shipped name (`llama-3.1-8b`), a folder with a `config.json`, or such a file.

    Raises `ModelNotFoundError` for a name that is neither, with the nearest of those that are
    known, and `UnsupportedModelError` for a file that cannot be used.
    """
    text = str(name_or_path)
    shipped = _shipped()
    key = text.lower()
    if key in shipped:
        return ModelShape(name=key, **shipped[key])
    path = Path(name_or_path)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return shape_of(read_hf_config(_read(path), where=str(path)), _name_of(path), str(path))
    near = difflib.get_close_matches(key.rsplit("/", 1)[-1], shipped, n=1, cutoff=0.5)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise ModelNotFoundError(
        f"no shape {text!r}: neither a folder with a config.json, nor such a file, nor one of "
        f"{', '.join(shipped)}{hint}"
    )


def shape_of(arch: ModelArch, name: str, source: str = "", element_bytes: int = 2) -> ModelShape:
    """The shape of a model that octavo runs.

    Raises `UnsupportedModelError` for those whose tokens are not all multiplied with the same
    weights, or whose cache is not keys and values: their costs are not modelled.
    """
    for part, what in ((arch.moe, "mixtures of experts"), (arch.mla, "latent attention (MLA)")):
        if part is not None:
            raise UnsupportedModelError(
                f"{source or name}: the costs of {what} are not modelled, though octavo runs such "
                "models; `octavo models inspect` tells their memory"
            )
    biases = arch.norm_bias and arch.qkv_bias and arch.o_bias and arch.mlp_bias
    learned = arch.positions == "learned"
    return ModelShape(
        name=name,
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        intermediate_size=arch.intermediate_size,
        num_heads=arch.num_heads,
        num_kv_heads=arch.num_kv_heads,
        head_dim=arch.head_dim,
        vocab_size=arch.vocab_size,
        max_position_embeddings=arch.max_position_embeddings,
        tied=arch.tie_word_embeddings,
        gated=arch.gated_mlp,
        num_learned_positions=(
            arch.max_position_embeddings + arch.position_offset if learned else 0
        ),
        biased=biases,
        qkv_biased=arch.qkv_bias,
        qk_norm=arch.qk_norm != "none",
        element_bytes=element_bytes,
        source=source,
    )


def _name_of(path: Path) -> str:
    folder = path.resolve().parent.name if path.name == "config.json" else path.stem
    return folder or str(path)


def _shipped() -> dict[str, dict[str, Any]]:
    text = (files("octavo.lab") / "data" / "shapes.json").read_text(encoding="utf-8")
    shapes = json.loads(text)["shapes"]
    assert isinstance(shapes, dict)
    return shapes


def _read(path: Path) -> Mapping[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnsupportedModelError(f"{path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UnsupportedModelError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise UnsupportedModelError(f"{path} holds no object, but {type(config).__name__}")
    return config
