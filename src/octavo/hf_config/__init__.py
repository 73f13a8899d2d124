"""`config.json` of a Hugging Face model -> `ModelArch`. Plain data in and out, no torch.

Defaults are those of transformers' config classes, so a file that leaves a field out means here
what it means there. What octavo cannot honour is refused rather than ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.arch import ModelArch
from octavo.errors import UnsupportedModelError
from octavo.hf_config.families import FAMILIES, Family
from octavo.hf_config.fields import Fields, token_ids, unknown_architecture
from octavo.hf_config.ropes import stretched_context

__all__ = [
    "KNOWN_ARCHITECTURES",
    "read_hf_config",
    "stretched_context",
    "token_ids",
    "unknown_architecture",
]

KNOWN_ARCHITECTURES: tuple[str, ...] = tuple(FAMILIES)
"""Names of `config.json` that octavo runs."""


def read_hf_config(
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None = None,
    where: str = "config.json",
) -> ModelArch:
    """The shape of a model from its parsed `config.json`.

    `generation_config` (the parsed `generation_config.json`) wins for the end-of-sequence tokens,
    as it does in transformers; `where` names the file in errors. Raises `UnsupportedModelError`
    for an architecture, option or value that octavo cannot run.
    """
    try:
        family = _family(config, where)
        fields = Fields(
            _text_part(config, family), generation_config or {}, where, family.architecture,
            family.names,
        )  # fmt: skip
        return family.read(fields)
    except (TypeError, ValueError, KeyError, AttributeError, OverflowError) as error:
        raise UnsupportedModelError(
            f"{where} is damaged: a field is not of the type it should be ({error}); download it "
            "again"
        ) from error


def _family(config: Mapping[str, Any], where: str) -> Family:
    names = config.get("architectures") or []
    if isinstance(names, str):
        names = [names]
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UnsupportedModelError(
            f"{where}: architectures must be a list of names, got {names!r:.80}"
        )
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    if names:
        raise unknown_architecture(str(names[0]), FAMILIES, where)
    model_type = config.get("model_type")
    for family in FAMILIES.values():
        if family.model_type == model_type:
            return family
    if model_type is None:
        raise UnsupportedModelError(
            f"{where}: names no model (neither architectures nor model_type); known: "
            + ", ".join(FAMILIES)
        )
    raise unknown_architecture(str(model_type), FAMILIES, where)


def _text_part(config: Mapping[str, Any], family: Family) -> Mapping[str, Any]:
    """The text model's own configuration; what it leaves out is looked for around it."""
    part = config.get(family.part) if family.part else None
    if not isinstance(part, Mapping):
        return config
    around = {name: config[name] for name in _AROUND if config.get(name) is not None}
    return around | {name: value for name, value in part.items() if value is not None}


_AROUND = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "tie_word_embeddings")
