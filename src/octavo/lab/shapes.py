"""Where shapes of models are from: a `config.json`, or by name those that ship with octavo
(`data/shapes.json`). No weights are needed."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from octavo.arch import MLAConfig, ModelArch, MoEConfig
from octavo.errors import ModelNotFoundError, UnsupportedModelError
from octavo.hf_config import read_hf_config
from octavo.lab.model_shape import ModelShape


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
        return _from_shipped(key, shipped[key])
    path = Path(name_or_path)
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return shape_of(read_hf_config(_read(path), where=str(path)), _name_of(path), str(path))
    near = difflib.get_close_matches(key.rsplit("/", 1)[-1], shipped, n=1, cutoff=0.5)
    hint = f" (did you mean {near[0]}?)" if near else ""
    raise ModelNotFoundError(
        f"no shape {text!r}{hint}: neither a folder with a config.json, nor such a file, nor one "
        f"of {', '.join(shipped)}"
    )


def shape_of(arch: ModelArch, name: str, source: str = "", element_bytes: int = 2) -> ModelShape:
    """The shape of a model that octavo runs."""
    biases = arch.norm_bias and arch.qkv_bias and arch.o_bias and arch.mlp_bias
    learned = arch.positions == "learned"
    num_norms = 1 if arch.shared_norm else 4 if arch.norm_placement == "sandwich" else 2
    if arch.norm == "layer" and not arch.norm_bias:  # without weights (OLMo 1)
        num_norms = 0
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
        num_norms=num_norms,
        biased=biases,
        qkv_biased=arch.qkv_bias,
        qk_norm=arch.qk_norm,
        sliding_windows=arch.sliding_windows,
        moe=arch.moe,
        mla=arch.mla,
        element_bytes=element_bytes,
        source=source,
    )


def _from_shipped(name: str, values: Mapping[str, Any]) -> ModelShape:
    """window: of all layers but every `full_every`th one."""
    fields = dict(values)
    window, every = fields.pop("window", 0), fields.pop("full_every", 0)
    if window:
        fields["sliding_windows"] = tuple(
            0 if every and (layer + 1) % every == 0 else window
            for layer in range(fields["num_layers"])
        )
    if "moe" in fields:
        moe = fields["moe"]
        fields["moe"] = MoEConfig(**(moe | {"dense_layers": tuple(moe.get("dense_layers", ()))}))
    if "mla" in fields:
        fields["mla"] = MLAConfig(**fields["mla"])
    return ModelShape(name=name, **fields)


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
