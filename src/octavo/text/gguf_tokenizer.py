"""The tokenizer inside a GGUF file, rebuilt with the `tokenizers` library.

Byte-level BPE (`tokenizer.ggml.model` gpt2) with the pre-tokenizer that `tokenizer.ggml.pre`
names, SentencePiece (llama: BPE with byte fallback, t5: unigram) and WordPiece (bert). Splitting
rules are llama.cpp's, in the regular expressions of the original tokenizer.json files where it
quotes them.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from octavo.errors import OctavoError, TokenizerError
from octavo.text import sentencepiece
from octavo.text.folder_files import DEFAULT_TEMPLATE
from octavo.text.sentencepiece import NORMAL, Pieces
from octavo.text.tokenizer import FastTokenizer
from octavo.weights.gguf_file import GGUFFile

_KINDS = ("gpt2", "llama", "t5", "bert")
"""Values of `tokenizer.ggml.model`."""
_SPACE = "\u2581"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
    r"|%s| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_CASED_LETTERS = (
    r"[\p{Lu}\p{Ll}\p{Lt}&&[^\x{560}-\x{588}\x{10c7}-\x{10ff}\x{1c80}-\x{1c8a}\x{2d00}-\x{2d2d}"
    r"\x{a790}-\x{a7ff}\x{ab30}-\x{ab6f}\x{10570}-\x{105bf}\x{10d50}-\x{10d85}"
    r"\x{16e40}-\x{16e7f}\x{1d400}-\x{1d7ff}\x{1df00}-\x{1dfff}]]+"
)
"""What DeepSeek's tokenizer lists one by one."""
_MARKS = r"\s?[!-/:-~\x{ff01}-\x{ff0f}\x{ff1a}-\x{ff5e}\x{2018}-\x{201f}\x{3000}-\x{3002}]+"
_EAST_ASIAN = r"[\x{4e00}-\x{9fa5}\x{0800}-\x{4e00}\x{ac00}-\x{d7ff}]+"
_SEED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


_DEFAULT_IDS = {
    "llama": {"bos": 1, "eos": 2, "unk": 0},
    "t5": {"eos": 1, "unk": 2},
    "bert": {"bos": 101, "unk": 100, "sep": 102, "pad": 0},
}
"""Kind -> ids of tokens that the file need not state, as llama.cpp has them."""


@dataclass(frozen=True, slots=True)
class _Pre:
    """How text is split before merging: each pattern in turn isolates its matches."""

    patterns: tuple[str, ...]
    add_bos: bool = False
    """When the file does not say."""
    ignore_merges: bool = False
    """A word that is a token is taken whole."""
    nfc: bool = False


_DEFAULT = _Pre((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"))
_PLAIN = _Pre((_GPT2,))
_DIGITS = _Pre((r"\p{N}", _GPT2))
_LLAMA3 = _Pre((_WORDS % r"\p{N}{1,3}",), add_bos=True, ignore_merges=True)
_LLAMA3_WORDS = _Pre((_WORDS % r"\p{N}{1,3}",))
_QWEN2 = _Pre((_WORDS % r"\p{N}",), nfc=True)
_GPT4O = _Pre((_CASED % (_SUFFIX, _SUFFIX, r"\p{N}{1,3}"),))

_PRE_TOKENIZERS: dict[str, _Pre] = {
    "": _DEFAULT,
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4"), _PLAIN),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell"), _DIGITS),
    **dict.fromkeys(("exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe", "glm4"), _LLAMA3_WORDS),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "hunyuan"), _QWEN2),
    "stablelm2": _Pre((_WORDS % r"\p{N}",)),
    "falcon": _Pre((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, r"[0-9][0-9][0-9]")),
    "tekken": _Pre((_CASED % ("", "", r"\p{N}"),), add_bos=True, ignore_merges=True),
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT4O),
    "deepseek-llm": _Pre(
        (r"[\r\n]", r"\s?" + _CASED_LETTERS, _MARKS, r"\s+$", _EAST_ASIAN, r"\p{N}+")
    ),
    "deepseek-coder": _Pre((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense"),
        _Pre((r"\p{N}{1,3}", r"[\x{4e00}-\x{9fa5}\x{3040}-\x{30ff}]+", _DEEPSEEK3)),
    ),
    "seed-coder": _Pre((_SEED,)),
}
"""`tokenizer.ggml.pre` -> how to split."""


def load_gguf_tokenizer(source: str | Path | GGUFFile) -> FastTokenizer:
    """Build the tokenizer of a GGUF file.

    Raises `TokenizerError` when the file has none or one of a kind octavo does not know.
    """
    file = source if isinstance(source, GGUFFile) else GGUFFile(source)
    try:
        return _build(file)
    except OctavoError:
        raise
    except Exception as error:  # tokenizers raises bare Exception
        raise TokenizerError(
            f"{file.path} is damaged: its tokenizer cannot be built ({error}); download it again, "
            "or name another tokenizer with --tokenizer"
        ) from error


def _build(file: GGUFFile) -> FastTokenizer:
    vocab = _Vocabulary(file)
    pieces, add_bos, add_eos = vocab.pieces(), False, False
    if vocab.kind == "gpt2":
        pre = _pre_tokenizer(vocab)
        backend, add_bos = _byte_level(vocab, pre), pre.add_bos
    elif vocab.kind in ("llama", "t5"):
        backend, add_bos, add_eos = sentencepiece.build(pieces), not pieces.unigram, pieces.unigram
    elif vocab.kind == "bert":
        backend, add_bos, add_eos = _word_piece(vocab), True, True
    else:
        raise TokenizerError(
            f"{vocab.path}: tokenizer {vocab.kind!r} is not supported; known: {', '.join(_KINDS)}; "
            "name another with --tokenizer"
        )
    sentencepiece.add_special(backend, pieces, unknown=vocab.kind != "gpt2")
    return FastTokenizer(
        backend,
        eos_token_ids=file.eos_token_ids,
        special_tokens=vocab.named_tokens(),
        chat_templates=_templates(file.metadata),
        add_bos=bool(vocab.get("add_bos_token", add_bos)),
        add_eos=bool(vocab.get("add_eos_token", add_eos)),
    )


class _Vocabulary:
    """`tokenizer.ggml.*` of a file, checked."""

    def __init__(self, file: GGUFFile) -> None:
        self.path, self._metadata = file.path, file.metadata
        self.kind: str = self.get("model", "none")
        self.tokens: list[str] = self.get("tokens", [])
        if not self.tokens:
            raise TokenizerError(
                f"no tokenizer in {self.path} (no tokenizer.ggml.tokens); name one with "
                "--tokenizer, or use --skip-tokenizer-init and pass token ids"
            )
        self.types: list[int] = self.get("token_type") or [NORMAL] * len(self.tokens)
        # of two tokens spelled alike (padding) the first is meant
        self.ids = {t: i for i, t in reversed(list(enumerate(self.tokens)))}

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def merges(self) -> list[tuple[str, str]]:
        """The file's merges; either side may itself start with a space."""
        merges = []
        for line in self.get("merges", []):
            at = line.find(" ", 1)
            if at < 0:
                raise TokenizerError(f"{self.path} is damaged: the merge {line!r} is not a pair")
            merges.append((line[:at], line[at + 1 :]))
        return merges

    def named_tokens(self) -> dict[str, str]:
        """`bos_token` ... -> text."""
        keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator"}
        defaults = _DEFAULT_IDS.get(self.kind, {})
        named = {}
        for name, key in keys.items():
            token_id = self.get(f"{key}_token_id", defaults.get(name))
            if isinstance(token_id, int) and 0 <= token_id < len(self.tokens):
                named[f"{name}_token"] = self.tokens[token_id]
        if self.kind == "bert" and "sep_token" in named:
            named.setdefault("eos_token", named["sep_token"])
        return named

    def pieces(self) -> Pieces:
        """Tokens with scores, types and what else SentencePiece wants to know."""
        unigram, defaults = self.kind == "t5", _DEFAULT_IDS.get(self.kind, {})
        charsmap = self.get("precompiled_charsmap", [])
        return Pieces(
            self.tokens,
            self.get("scores") or [0.0] * len(self.tokens),
            self.types,
            unigram=unigram,
            unk_id=int(self.get("unknown_token_id", defaults.get("unk", 0))),
            byte_fallback=not unigram,
            add_prefix=bool(self.get("add_space_prefix", True)),
            collapse_spaces=bool(self.get("remove_extra_whitespaces", False)),
            charsmap=bytes(byte & 255 for byte in charsmap) if unigram else b"",
            merges=self.merges() if self.kind == "llama" else (),
        )


def _pre_tokenizer(vocab: _Vocabulary) -> _Pre:
    name = vocab.get("pre", "")
    pre = _PRE_TOKENIZERS.get(name)
    if pre is None:
        known = [k for k in _PRE_TOKENIZERS if k]
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)[0]
        raise TokenizerError(
            f"{vocab.path}: pre-tokenizer {name!r} is not known (nearest: {near}; known: "
            f"{', '.join(known)}); name another tokenizer with --tokenizer"
        )
    return pre


def _byte_level(vocab: _Vocabulary, pre: _Pre) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab.ids, merges=vocab.merges(), ignore_merges=pre.ignore_merges)
    )
    splits = [pre_tokenizers.Split(Regex(p), behavior="isolated") for p in pre.patterns]
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
    if pre.nfc:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _word_piece(vocab: _Vocabulary) -> tokenizers.Tokenizer:
    """BERT's: the file marks the starts of words, the original their further pieces."""
    ids = {_bert_spelling(token): index for token, index in vocab.ids.items()}
    unknown = vocab.named_tokens().get("unk_token", "[UNK]")
    backend = tokenizers.Tokenizer(models.WordPiece(ids, unk_token=unknown))
    # llama.cpp lowers and takes accents off whatever the model was trained on
    backend.normalizer = normalizers.BertNormalizer(lowercase=True, strip_accents=True)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


def _bert_spelling(token: str) -> str:
    if token.startswith("[") and token.endswith("]"):
        return token
    return token[1:] if token.startswith(_SPACE) else f"##{token}"


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """`tokenizer.chat_template`, and `tokenizer.chat_template.NAME` for further ones."""
    prefix = "tokenizer.chat_template"
    templates = {}
    for key, value in metadata.items():
        if key == prefix and isinstance(value, str):
            templates[DEFAULT_TEMPLATE] = value
        elif key.startswith(prefix + ".") and isinstance(value, str):
            templates[key.removeprefix(prefix + ".")] = value
    return templates
