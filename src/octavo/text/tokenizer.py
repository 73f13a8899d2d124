"""Text <-> token ids, whatever the tokenizer lies in: a Hugging Face folder or a GGUF file.

The work is done by `tokenizers`; transformers is imported only for folders without a
`tokenizer.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from octavo.errors import InvalidRequestError, TokenizerError
from octavo.hf_config import token_ids

if TYPE_CHECKING:
    import tokenizers

_NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "pad_token",
    "sep_token",
    "cls_token",
    "mask_token",
)
DEFAULT_TEMPLATE = "default"
_WAY_OUT = "download it again, or name another tokenizer with --tokenizer"


class Tokenizer(Protocol):
    """What the engine and the server need of a tokenizer."""

    vocab_size: int
    """One more than the largest token id."""
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    """Tokens that end a sequence (a chat model often has several)."""
    special_ids: frozenset[int]
    """Tokens that `skip_special_tokens` leaves out."""
    special_tokens: Mapping[str, str]
    """`bos_token`, `eos_token` ... -> text, as chat templates use them."""
    chat_templates: Mapping[str, str]
    """Name -> Jinja source; the usual one is called `default`. Empty when there is none."""

    @property
    def chat_template(self) -> str | None:
        """The default chat template's source."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids; `add_special_tokens` adds what the model expects around a plain prompt.

        Special tokens written out in `text` are recognised. Raises `InvalidRequestError` for text
        that is no valid Unicode.
        """

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Text of `ids`; ids without a token (padding of the embedding) give nothing.

        spaces_between_special_tokens False: an added token right after another is written without
        the space that word-piece-like decoders put before it.
        """

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; None when there is no such id."""

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it; None when there is none."""

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` leaves the token out."""


class FastTokenizer:
    """A `Tokenizer` over the `tokenizers` library.

    add_bos, add_eos: None leaves it to the backend's own post-processor (a tokenizer.json has one
    and transformers, too, lets it win over tokenizer_config.json); otherwise the tokens are put
    around the text here.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_token_ids: Sequence[int] = (),
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
        add_bos: bool | None = None,
        add_eos: bool | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.special_tokens: Mapping[str, str] = dict(special_tokens or {})
        self.chat_templates: Mapping[str, str] = dict(chat_templates or {})
        self.bos_token_id = self._named_id("bos_token")
        eos = self._named_id("eos_token")
        self.eos_token_ids = tuple(eos_token_ids) or (() if eos is None else (eos,))
        self._added_ids = frozenset(backend.get_added_tokens_decoder())
        self.special_ids = frozenset(
            i for i, t in backend.get_added_tokens_decoder().items() if t.special
        )
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self._own_ends = add_bos is not None or add_eos is not None
        self._prefix = [self.bos_token_id] if add_bos and self.bos_token_id is not None else []
        self._suffix = [eos] if add_eos and eos is not None else []

    def _named_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)

    @property
    def chat_template(self) -> str | None:
        """See `Tokenizer`."""
        return self.chat_templates.get(DEFAULT_TEMPLATE)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """See `Tokenizer`."""
        by_backend = add_special_tokens and not self._own_ends
        try:
            ids = self._backend.encode(text, add_special_tokens=by_backend).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequestError(
                "the prompt is not valid Unicode text (half of a surrogate pair, or bytes that are "
                "not UTF-8)",
                parameter="prompt",
            ) from error
        if add_special_tokens and self._own_ends:
            return self._prefix + ids + self._suffix
        return ids

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """See `Tokenizer`."""
        known = [i for i in ids if 0 <= i < self.vocab_size]
        if spaces_between_special_tokens or skip_special_tokens:
            return self._backend.decode(known, skip_special_tokens=skip_special_tokens)
        # the decoder puts no space before the first token it is given
        starts = [0, *self._after_added(known), len(known)]
        spans = (known[i:j] for i, j in pairwise(starts))
        return "".join(self._backend.decode(s, skip_special_tokens=False) for s in spans)

    def _after_added(self, ids: list[int]) -> list[int]:
        """Positions of added tokens that follow an added token."""
        added = self._added_ids
        return [i for i in range(1, len(ids)) if ids[i] in added and ids[i - 1] in added]

    def id_to_token(self, token_id: int) -> str | None:
        """See `Tokenizer`."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < self.vocab_size else None

    def token_to_id(self, token: str) -> int | None:
        """See `Tokenizer`."""
        return self._backend.token_to_id(token)

    def is_special(self, token_id: int) -> bool:
        """See `Tokenizer`."""
        return token_id in self.special_ids


def load_tokenizer(source: str | Path) -> Tokenizer:
    """The tokenizer in a folder or a .gguf file, as `locate` names it.

    Raises `TokenizerError` when there is none or it cannot be read.
    """
    path = Path(source)
    if path.suffix == ".gguf" and path.is_file():
        from octavo.text.gguf_tokenizer import load_gguf_tokenizer

        return load_gguf_tokenizer(path)
    if not path.is_dir():
        raise TokenizerError(f"no tokenizer at {path}: not a folder or .gguf file")
    if (path / "tokenizer.json").is_file():
        return _from_folder(path)
    if any((path / f).is_file() for f in ("tokenizer.model", "vocab.json")):
        return _through_transformers(path)
    raise TokenizerError(
        f"no tokenizer in {path} (no tokenizer.json, tokenizer.model or vocab.json); name one with "
        "--tokenizer, or use --skip-tokenizer-init and pass token ids"
    )


def _from_folder(folder: Path) -> FastTokenizer:
    import tokenizers

    path = folder / "tokenizer.json"
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise TokenizerError(f"{path} cannot be read: {error}; {_WAY_OUT}") from error
    config = _read_json(folder / "tokenizer_config.json")
    named = _named_tokens(_read_json(folder / "special_tokens_map.json") | config)
    try:
        _add_missing(backend, config, list(named.values()))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise TokenizerError(
            f"{folder / 'tokenizer_config.json'} is damaged: its added tokens cannot be read "
            f"({error!r}); {_WAY_OUT}"
        ) from error
    return FastTokenizer(
        backend,
        eos_token_ids=_folder_eos(folder),
        special_tokens=named,
        chat_templates=_folder_templates(folder, config),
    )


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token` ... -> text; a token may be given as a string or as an AddedToken's fields."""
    named = {}
    for name in _NAMED:
        value = config.get(name)
        text = value.get("content") if isinstance(value, Mapping) else value
        if isinstance(text, str):
            named[name] = text
    return named


def _add_missing(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], named: list[str]
) -> None:
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


def _folder_eos(folder: Path) -> tuple[int, ...]:
    for file in ("generation_config.json", "config.json"):
        ids = token_ids(_read_json(folder / file).get("eos_token_id"), str(folder / file))
        if ids:
            return ids
    return ()


def _folder_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Chat templates by name. Raises `TokenizerError` for what is none."""
    try:
        templates = _read_templates(folder, config)
    except (OSError, TypeError, ValueError, KeyError) as error:
        raise TokenizerError(
            f"the chat templates in {folder} cannot be read ({error!r}); {_WAY_OUT}"
        ) from error
    for name, template in templates.items():
        if not isinstance(template, str):
            raise TokenizerError(f"{folder}: chat template {name!r} is no text; {_WAY_OUT}")
    return templates


def _read_templates(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """A file of its own wins over tokenizer_config.json, which may hold one or a list by name."""
    templates: dict[str, str] = {}
    stated = config.get("chat_template")
    if isinstance(stated, str):
        templates[DEFAULT_TEMPLATE] = stated
    elif isinstance(stated, list):
        templates |= {entry["name"]: entry["template"] for entry in stated}
    legacy = _read_json(folder / "chat_template.json").get("chat_template")
    if isinstance(legacy, str):
        templates[DEFAULT_TEMPLATE] = legacy
    single = folder / "chat_template.jinja"
    if single.is_file():
        templates[DEFAULT_TEMPLATE] = single.read_text("utf-8")
    more = folder / "additional_chat_templates"
    templates |= {p.stem: p.read_text("utf-8") for p in sorted(more.glob("*.jinja"))}
    return templates


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty when there is no such file."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}; {_WAY_OUT}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} is damaged: not a JSON object; {_WAY_OUT}")
    return value


def _through_transformers(folder: Path) -> FastTokenizer:
    """Folders with SentencePiece or vocab and merges only: transformers converts them."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        raise TokenizerError(
            f"{folder} has no tokenizer.json, and converting its tokenizer needs transformers: "
            "pip install transformers, or name another tokenizer with --tokenizer"
        ) from error
    try:
        loaded = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        backend = getattr(loaded, "backend_tokenizer", None)
        config = _read_json(folder / "tokenizer_config.json")
    except Exception as error:  # whatever its many converters raise
        reason = " ".join(str(error).split())  # some are paragraphs
        raise TokenizerError(
            f"the tokenizer in {folder} cannot be read: {reason}; {_WAY_OUT}"
        ) from error
    if backend is None:
        raise TokenizerError(
            f"the tokenizer in {folder} has no fast form ({type(loaded).__name__}); name another "
            "with --tokenizer"
        )
    named = {n: getattr(loaded, n) for n in _NAMED if getattr(loaded, n, None) is not None}
    return FastTokenizer(
        backend,
        eos_token_ids=_folder_eos(folder),
        special_tokens=named,
        chat_templates=_folder_templates(folder, config),
    )
