"""A Hugging Face folder whose tokenizer is a SentencePiece `tokenizer.model` and nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from octavo.errors import TokenizerError
from octavo.text import sentencepiece
from octavo.text.folder_files import (
    WAY_OUT,
    add_missing,
    folder_eos,
    folder_templates,
    named_tokens,
    read_json,
)
from octavo.text.sentencepiece import CONTROL, UNUSED, USER_DEFINED, Pieces
from octavo.text.tokenizer import FastTokenizer

_MAX_ADDED = 100_000
"""An id farther than this behind the last piece is a mistake in the file."""


def load_spm_folder(folder: Path) -> FastTokenizer:
    """The tokenizer of `folder`. Raises `TokenizerError` when a file of it cannot be read.

    Pieces are tokenizer.model's; added_tokens.json and tokenizer_config.json add further ones and
    say what is put around a prompt.
    """
    pieces = sentencepiece.read_model(folder / "tokenizer.model")
    config = read_json(folder / "tokenizer_config.json")
    named = _own_names(pieces) | named_tokens(
        read_json(folder / "special_tokens_map.json") | config
    )
    try:
        pieces = _extended(pieces, folder, config)
        backend = sentencepiece.build(pieces)
        sentencepiece.add_special(backend, pieces)
        add_missing(backend, config, list(named.values()))
    except TokenizerError:
        raise
    except Exception as error:  # tokenizers raises bare Exception
        raise TokenizerError(
            f"the tokenizer in {folder} is damaged: it cannot be built ({error!r}); {WAY_OUT}"
        ) from error
    return FastTokenizer(
        backend,
        eos_token_ids=folder_eos(folder),
        special_tokens=named,
        chat_templates=folder_templates(folder, config),
        add_bos=bool(config.get("add_bos_token", not pieces.unigram)),
        add_eos=bool(config.get("add_eos_token", False)),
    )


def _own_names(pieces: Pieces) -> dict[str, str]:
    """`bos_token` ... as tokenizer.model itself has them."""
    ids = {
        "bos_token": pieces.bos_id,
        "eos_token": pieces.eos_id,
        "unk_token": pieces.unk_id,
        "pad_token": pieces.pad_id,
    }
    return {name: token for name, i in ids.items() if (token := pieces.token(i)) is not None}


def _extended(pieces: Pieces, folder: Path, config: Mapping[str, Any]) -> Pieces:
    """With the tokens that other files add, each under the id that it has there."""
    added = {
        int(i): (str(token), False) for token, i in read_json(folder / "added_tokens.json").items()
    }
    for key, fields in (config.get("added_tokens_decoder") or {}).items():
        added[int(key)] = (str(fields["content"]), bool(fields.get("special", False)))
    tokens, scores, types = list(pieces.tokens), list(pieces.scores), list(pieces.types)
    if added and not 0 <= max(added) < len(tokens) + _MAX_ADDED:
        raise TokenizerError(
            f"{folder}: the added token {added[max(added)][0]!r} has the id {max(added)}, but the "
            f"vocabulary has {len(tokens)} pieces; {WAY_OUT}"
        )
    for index, (token, special) in sorted(added.items()):
        for gap in range(len(tokens), index + 1):  # ids without a token keep their place
            tokens.append(f"<unused id {gap}>")
            scores.append(0.0)
            types.append(UNUSED)
        known = tokens[index] == token and not special
        tokens[index] = token
        types[index] = types[index] if known else CONTROL if special else USER_DEFINED
    isolated = {
        token
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind == USER_DEFINED and i not in added
    }
    return replace(
        pieces,
        isolated=frozenset(isolated),
        tokens=tokens,
        scores=scores,
        types=types,
        # what transformers calls legacy is the default of its older tokenizers
        prefix_once=not config.get("legacy", True),
        add_prefix=bool(config.get("add_prefix_space", pieces.add_prefix)),
    )
