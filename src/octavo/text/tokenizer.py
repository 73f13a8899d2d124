"""Text <-> token ids, whatever the tokenizer lies in: a Hugging Face folder or a GGUF file.

The work is done by `tokenizers`; transformers is imported only for folders with neither a
`tokenizer.json` nor a SentencePiece `tokenizer.model`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from octavo.errors import InvalidRequestError, TokenizerError
from octavo.text.folder_files import (
    DEFAULT_TEMPLATE,
    NAMED_TOKENS,
    WAY_OUT,
    add_missing,
    folder_eos,
    folder_templates,
    named_tokens,
    read_json,
)

if TYPE_CHECKING:
    import tokenizers

LONG_TEXT = 8_192
"""Characters, or tokens, from which on a text is worth another thread: some 2 ms."""


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
            ids = self._encode(text, by_backend)
        except (UnicodeEncodeError, TypeError) as error:
            raise InvalidRequestError(
                "the prompt is not valid Unicode text (half of a surrogate pair, or bytes that are "
                "not UTF-8)",
                parameter="prompt",
            ) from error
        if add_special_tokens and self._own_ends:
            return self._prefix + ids + self._suffix
        return ids

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """A long one without the interpreter's lock, which the backend lets go of for lists only:
        with it, another thread would hold up all others as well."""
        if len(text) <= LONG_TEXT:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        (found,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return found.ids

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """See `Tokenizer`."""
        known = [i for i in ids if 0 <= i < self.vocab_size]
        if spaces_between_special_tokens or skip_special_tokens:
            if len(known) > LONG_TEXT:  # as in `_encode`
                (text,) = self._backend.decode_batch([known], skip_special_tokens)
                return text
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
    if (path / "tokenizer.model").is_file():
        from octavo.text.spm_folder import load_spm_folder

        return load_spm_folder(path)
    if (path / "vocab.json").is_file():
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
        raise TokenizerError(f"{path} cannot be read: {error}; {WAY_OUT}") from error
    config = read_json(folder / "tokenizer_config.json")
    named = named_tokens(read_json(folder / "special_tokens_map.json") | config)
    try:
        add_missing(backend, config, list(named.values()))
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise TokenizerError(
            f"{folder / 'tokenizer_config.json'} is damaged: its added tokens cannot be read "
            f"({error!r}); {WAY_OUT}"
        ) from error
    return FastTokenizer(
        backend,
        eos_token_ids=folder_eos(folder),
        special_tokens=named,
        chat_templates=folder_templates(folder, config),
    )


def _through_transformers(folder: Path) -> FastTokenizer:
    """Folders with a vocabulary and merges only: transformers converts them."""
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
        config = read_json(folder / "tokenizer_config.json")
    except Exception as error:  # whatever its many converters raise
        reason = " ".join(str(error).split())  # some are paragraphs
        raise TokenizerError(
            f"the tokenizer in {folder} cannot be read: {reason}; {WAY_OUT}"
        ) from error
    if backend is None:
        raise TokenizerError(
            f"the tokenizer in {folder} has no fast form ({type(loaded).__name__}); name another "
            "with --tokenizer"
        )
    named = {n: getattr(loaded, n) for n in NAMED_TOKENS if getattr(loaded, n, None) is not None}
    return FastTokenizer(
        backend,
        eos_token_ids=folder_eos(folder),
        special_tokens=named,
        chat_templates=folder_templates(folder, config),
    )
