"""What lies around a tokenizer in a Hugging Face folder: special tokens, ends, chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octavo.errors import TokenizerError
from octavo.hf_config import token_ids

if TYPE_CHECKING:
    import tokenizers

NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)
DEFAULT_TEMPLATE = "default"
WAY_OUT = "download it again, or name another tokenizer with --tokenizer"


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` ... -> text; a token may be given as a string or as an AddedToken's fields."""
    named = {}
    for name in NAMED_TOKENS:
        value = config.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            named[name] = text
    return named


def add_missing(backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: list[str]) -> None:
    """Added tokens that stand in tokenizer_config.json alone, and the special flag of named ones.

    Only tokens that have an id already: a new id would point behind the embedding.
    """
    from tokenizers import AddedToken

    flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
    present = backend.get_added_tokens_decoder()
    for key, fields in sorted(
        config.get("added_tokens_decoder", {}).items(), key=lambda kv: int(kv[0])
    ):
        if int(key) not in present:
            token = AddedToken(fields["content"], **{f: fields[f] for f in flags if f in fields})
            backend.add_tokens([token])
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    entries = list(extra.values() if isinstance(extra, Mapping) else extra)
    texts = [str(e.get("content", "")) if isinstance(e, Mapping) else str(e) for e in entries]
    flagged = {t.content for t in backend.get_added_tokens_decoder().values() if t.special}
    wanted = [t for t in dict.fromkeys(texts + named) if t not in flagged]
    backend.add_special_tokens([t for t in wanted if backend.token_to_id(t) is not None])


def folder_eos(folder: Path) -> tuple[int, ...]:
    """Tokens that end a sequence, by the model's own files; empty when they do not say."""
    for file in ("generation_config.json", "config.json"):
        ids = token_ids(read_json(folder / file).get("eos_token_id"), str(folder / file))
        if ids:
            return ids
    return ()


def folder_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name. Raises `TokenizerError` for what is none."""
    try:
        templates = _read_templates(folder, config)
    except (OSError, TypeError, ValueError, KeyError) as error:
        raise TokenizerError(
            f"the chat templates in {folder} cannot be read ({error!r}); {WAY_OUT}"
        ) from error
    for name, template in templates.items():
        if not isinstance(template, str):
            raise TokenizerError(f"{folder}: chat template {name!r} is no text; {WAY_OUT}")
    return templates


def _read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """A file of its own wins over tokenizer_config.json, which may hold one or a list by name."""
    templates: dict[str, str] = {}
    stated = config.get("chat_template")
    if isinstance(stated, str):
        templates[DEFAULT_TEMPLATE] = stated
    elif isinstance(stated, list):
        templates |= {entry["name"]: entry["template"] for entry in stated}
    legacy = read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(legacy, str):
        templates[DEFAULT_TEMPLATE] = legacy
    single = folder / "chat_template.jinja"
    if single.is_file():
        templates[DEFAULT_TEMPLATE] = single.read_text("utf-8")
    more = folder / "additional_chat_templates"
    templates |= {p.stem: p.read_text("utf-8") for p in sorted(more.glob("*.jinja"))}
    return templates


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty when there is no such file.

    Raises `TokenizerError` for anything else.
    """
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}; {WAY_OUT}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} is damaged: not a JSON object; {WAY_OUT}")
    return value
