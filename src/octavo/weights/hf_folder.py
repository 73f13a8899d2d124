"""Which files of a Hugging Face folder are its weights; no torch, no headers."""

from __future__ import annotations

import json
from pathlib import Path

from octavo.errors import ModelNotFoundError, WeightsError

INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
"""Endings of weight files that are never opened."""
CONVERT = (
    'convert them where you trust them: python -c "import transformers as t; '
    "t.AutoModelForCausalLM.from_pretrained('{}', dtype='auto').save_pretrained('converted')\""
)
"""What to do with them."""


def safetensors_files(folder: Path) -> list[Path]:
    """The weight files of a folder, in order; see `SafetensorsSource` for errors."""
    index = folder / INDEX
    if index.exists():
        return _indexed(index)
    single = folder / "model.safetensors"
    if single.exists():
        return [single]
    # consolidated.safetensors holds the same weights again under Mistral's own names
    found = sorted(p for p in folder.glob("*.safetensors") if not p.name.startswith("consolidated"))
    if not found:
        raise ModelNotFoundError(f"no safetensors file in {folder}")
    return found


def _indexed(index: Path) -> list[Path]:
    try:
        files = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise WeightsError(f"{index} is damaged: {error!r}; download it again") from error
    paths = [index.parent / file for file in sorted(files)]
    outside = [p for p in paths if p.parent != index.parent]
    if outside:
        raise WeightsError(f"{index} names files outside its folder: {outside[0]}")
    missing = [p.name for p in paths if not p.exists()]
    if missing:
        raise WeightsError(
            f"{len(missing)} of {len(paths)} shards named in {index} are missing: "
            f"{', '.join(missing)}; download the model again"
        )
    return paths
