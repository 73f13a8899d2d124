"""SentencePiece vocabularies -> package `tokenizers`, from GGUF metadata or a tokenizer.model.

`tokenizer.model` is a protocol buffer; the few fields that matter are read here, so that neither
package sentencepiece nor transformers is needed.
Format: https://github.com/google/sentencepiece/blob/master/src/sentencepiece_model.proto.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from octavo.errors import TokenizerError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Types of pieces; `tokenizer.ggml.token_type` has the same."""
_SPACE = "\u2581"
_UNIGRAM, _BPE = 1, 2
"""`trainer_spec.model_type`."""
_NEVER = -1e6
"""Score of unigram pieces that must not be found in text."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """A vocabulary and how text is prepared for it."""

    tokens: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]
    unigram: bool = False
    """The likeliest split of all; else neighbours are joined, best score first."""
    unk_id: int = 0
    bos_id: int = 1
    eos_id: int = 2
    pad_id: int = -1
    byte_fallback: bool = True
    """Characters without a piece are spelled in bytes."""
    add_prefix: bool = True
    """Text starts with a space."""
    prefix_once: bool = False
    """Only at the very start; else behind each special token as well."""
    collapse_spaces: bool = False
    """Spaces at the ends go, and of several in a row all but one."""
    charsmap: bytes = b""
    """Compiled replacements of characters."""
    merges: Sequence[tuple[str, str]] = ()
    """Given ones; else they follow from the scores."""
    isolated: frozenset[str] = frozenset()
    """User-defined tokens that are found whole without ending the text before them: no prefix is
    put behind them, as it is behind tokens that were added later."""

    @property
    def ids(self) -> dict[str, int]:
        """Token -> id; of two spelled alike (padding) the first is meant."""
        return {t: i for i, t in reversed(list(enumerate(self.tokens)))}

    def token(self, token_id: int) -> str | None:
        """None for an id that there is not, as -1 is written for a token that is missing."""
        return self.tokens[token_id] if 0 <= token_id < len(self.tokens) else None


def build(pieces: Pieces) -> tokenizers.Tokenizer:
    """A tokenizer that splits text as SentencePiece does; special tokens are not added yet."""
    backend = tokenizers.Tokenizer(_unigram(pieces) if pieces.unigram else _bpe(pieces))
    steps: list[normalizers.Normalizer] = []
    if pieces.charsmap:
        steps.append(normalizers.Precompiled(pieces.charsmap))
    if pieces.collapse_spaces:
        steps.append(normalizers.Replace(Regex(r"\A +| +\z"), ""))
        steps.append(normalizers.Replace(Regex(" {2,}"), " "))
    if pieces.add_prefix and not pieces.prefix_once:
        steps.append(normalizers.Prepend(_SPACE))
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)])
    splits: list[pre_tokenizers.PreTokenizer] = []
    if pieces.add_prefix and pieces.prefix_once:
        splits.append(
            pre_tokenizers.Metaspace(replacement=_SPACE, prepend_scheme="first", split=False)
        )
    if pieces.isolated:
        longest_first = sorted(pieces.isolated, key=len, reverse=True)
        pattern = Regex("|".join(re.escape(token) for token in longest_first))
        splits.append(pre_tokenizers.Split(pattern, behavior="isolated"))
    if splits:
        backend.pre_tokenizer = pre_tokenizers.Sequence(splits)
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        + ([decoders.Strip(content=" ", left=1, right=0)] if pieces.add_prefix else [])
    )
    return backend


def add_special(backend: tokenizers.Tokenizer, pieces: Pieces, unknown: bool = True) -> None:
    """Control tokens are special; user-defined ones are found whole in text but are text.

    unknown: the unknown token is special, too.
    """
    kinds = (CONTROL, UNKNOWN) if unknown else (CONTROL,)
    special, plain = [], []
    for token, kind in zip(pieces.tokens, pieces.types, strict=False):
        if token and kind in kinds:
            special.append(AddedToken(token, normalized=False, special=True))
        elif token and kind == USER_DEFINED and token not in pieces.isolated:
            plain.append(AddedToken(token, normalized=False, special=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)


def _bpe(pieces: Pieces) -> models.Model:
    ids = pieces.ids
    return models.BPE(
        vocab=ids,
        merges=list(pieces.merges) or _merges_by_score(pieces, ids),
        unk_token=pieces.token(pieces.unk_id),
        fuse_unk=True,
        byte_fallback=pieces.byte_fallback,
        ignore_merges=bool(pieces.isolated),  # no merges lead to them
    )


def _merges_by_score(pieces: Pieces, ids: dict[str, int]) -> list[tuple[str, str]]:
    """SentencePiece has no merges: neighbours that make a token may join, best score first."""
    scores, left_out = pieces.scores, pieces.isolated | {""}
    mergeable = {
        token: index
        for token, index in ids.items()
        if pieces.types[index] in (NORMAL, USER_DEFINED) and token not in left_out
    }
    best_first = sorted(mergeable, key=lambda token: (-scores[mergeable[token]], mergeable[token]))
    return [
        (token[:cut], token[cut:])
        for token in best_first
        for cut in range(1, len(token))
        if token[:cut] in mergeable and token[cut:] in mergeable
    ]


def _unigram(pieces: Pieces) -> models.Model:
    found_in_text = (NORMAL, USER_DEFINED, UNKNOWN, BYTE)
    vocab = [
        (token, score if kind in found_in_text else _NEVER)
        for token, score, kind in zip(pieces.tokens, pieces.scores, pieces.types, strict=True)
    ]
    return models.Unigram(vocab, pieces.unk_id, pieces.byte_fallback)


def read_model(path: Path) -> Pieces:
    """The vocabulary in a `tokenizer.model`. Raises `TokenizerError` when it is none."""
    try:
        pieces = _read(path.read_bytes())
    except OSError as error:
        raise TokenizerError(f"{path} cannot be read: {error.strerror}") from error
    except (IndexError, ValueError, struct.error, TypeError) as error:
        raise TokenizerError(
            f"{path} is no SentencePiece model, or is damaged ({error}); download it again, or "
            "name another tokenizer with --tokenizer"
        ) from error
    return pieces


def _read(data: bytes) -> Pieces:
    tokens, scores, types = [], [], []
    trainer: dict[int, _Value] = {}
    normalizer: dict[int, _Value] = {}
    for number, value in _fields(data):
        if number == 1:
            piece = dict(_fields(_bytes(value)))
            tokens.append(_bytes(piece[1]).decode("utf-8"))
            scores.append(struct.unpack("<f", _bytes(piece.get(2, bytes(4))))[0])
            types.append(_int(piece.get(3, NORMAL)))
        elif number == 2:
            trainer = dict(_fields(_bytes(value)))
        elif number == 3:
            normalizer = dict(_fields(_bytes(value)))
    kind = _int(trainer.get(3, _UNIGRAM))
    if not tokens or kind not in (_UNIGRAM, _BPE):
        raise ValueError(f"{len(tokens)} pieces, model type {kind}; known: 1 (unigram), 2 (BPE)")
    return Pieces(
        tokens, scores, types,
        unigram=kind == _UNIGRAM,
        unk_id=_int(trainer.get(40, 0)),
        bos_id=_int(trainer.get(41, 1)),
        eos_id=_int(trainer.get(42, 2)),
        pad_id=_int(trainer.get(43, -1)),
        byte_fallback=bool(trainer.get(35, 0)),
        add_prefix=bool(normalizer.get(3, 1)),
        collapse_spaces=bool(normalizer.get(4, 1)),
        charsmap=_bytes(normalizer.get(2, b"")),
    )  # fmt: skip


_Value = int | bytes


def _bytes(value: _Value) -> bytes:
    if not isinstance(value, bytes):
        raise TypeError("a field has another type")
    return value


def _int(value: _Value) -> int:
    if not isinstance(value, int):
        raise TypeError("a field has another type")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, _Value]]:
    """(number, value) of each field of a protocol buffer message."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire = key & 7
        if wire == 0:
            number, at = _varint(data, at)
            # a negative int32 is written as 64 bits
            yield key >> 3, number - (1 << 64) if number >> 63 else number
            continue
        if wire == 2:
            length, at = _varint(data, at)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise ValueError(f"a field has the unknown wire type {wire}")
        if at + length > len(data):
            raise ValueError("it is cut short")
        yield key >> 3, data[at : at + length]
        at += length


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value & (1 << 64) - 1, at
        shift += 7
        if shift > 63:
            raise ValueError("a number is too long")
