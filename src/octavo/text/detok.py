"""Token ids to text as they come, without ever taking back a character; and stop strings in it.

Two small machines in a row: `IncrementalDetokenizer` yields characters once no later token can
change them, `StopChecker` yields them once they cannot become part of a stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

REPLACEMENT = "\ufffd"
"""What decoders put for bytes that are not (yet) a character."""

_MAX_PENDING_TOKENS = 4
"""A UTF-8 character has at most 4 bytes: what more tokens have not completed never will be."""
_WINDOW = 16
"""Tokens that are decoded together; a longer window is cut to what follows still needs."""
_HOPELESS_WINDOW = 64
"""The same inside a run of bytes that are no characters, where no clean cut exists."""
_MIN_CONTEXT, _MAX_CONTEXT = 4, 24


class Decoder(Protocol):
    """The part of a tokenizer that turns ids into text."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Tokens that `skip_special_tokens` leaves out."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`."""

    def decode(
        self,
        ids: Sequence[int],
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> str:
        """Text of `ids`."""


class TokenTexts:
    """What single tokens read as in the middle of a text, remembered. Shared by all requests.

    A token's text is found behind another token, so that a leading space shows; by itself a
    decoder would strip it as the start of the text.
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self._anchor = decoder.encode("a", add_special_tokens=False)[-1:]
        self._anchor_text = decoder.decode(self._anchor, skip_special_tokens=False)
        self._texts: dict[int, str] = {}
        self.whole: dict[int, str] = {}
        """Of tokens that were met: those that are text by themselves, and not special."""

    def text(self, token_id: int) -> str:
        """The token's own text, special tokens too; bytes that are no character read U+FFFD."""
        text = self._texts.get(token_id)
        if text is None:
            both = self.decoder.decode([*self._anchor, token_id], skip_special_tokens=False)
            text = self._texts[token_id] = both[len(self._anchor_text) :]
            if text and REPLACEMENT not in text and token_id not in self.decoder.special_ids:
                self.whole[token_id] = text
        return text


class IncrementalDetokenizer:
    """Text of one sequence's output, piece by piece.

    The pieces joined are what decoding prompt and output at once would put behind the prompt, so
    the first piece starts with a space where the text has one. A prompt that ends inside a
    character gives that character to the output. Each token costs a bounded amount of work, most
    a table look-up.

    texts: shared by the sequences of one tokenizer, which it brings along.
    """

    def __init__(
        self,
        texts: TokenTexts,
        prompt_token_ids: Sequence[int] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
    ) -> None:
        self._texts = texts
        self._whole = texts.whole
        self._decoder = texts.decoder
        self._special_ids = texts.decoder.special_ids
        self._skip = skip_special_tokens
        self._spaces = spaces_between_special_tokens
        # The window's text is decoded as a whole; `_num_given` of its characters are handed out
        # (None: all of them, not counted yet), `_clean` tokens of it end with a whole character.
        self._window, text = self._context_of(prompt_token_ids)
        self._num_given: int | None = len(text.rstrip(REPLACEMENT))
        self._clean = len(self._window)

    def push(self, token_ids: Sequence[int]) -> str:
        """Take in the next output tokens; returns the characters that are now certain."""
        return "".join([self.push_one(token_id) for token_id in token_ids])

    def push_one(self, token_id: int) -> str:
        """`push` of one token."""
        if self._num_given is None:  # the window is one token that was text by itself
            piece = self._whole.get(token_id)
            if piece is not None:
                self._window[0] = token_id
                return piece
        return self._push(token_id)

    def flush(self) -> str:
        """The end: what was held back, as the decoder reads it."""
        if self._num_given is None:
            return ""
        text = self._decode(self._window)
        rest = text[self._num_given :]
        self._num_given = max(self._num_given, len(text))
        return rest

    def _push(self, token_id: int) -> str:
        special = token_id in self._special_ids
        if special and self._skip:
            return ""  # not in the window either: there it would hide the text's own start
        window = self._window
        if self._clean == len(window) and window and not special:
            # Behind whole characters a token that is text by itself reads the same anywhere.
            piece = self._texts.text(token_id)
            if not piece:
                return ""
            if REPLACEMENT not in piece and window[-1] not in self._special_ids:
                self._window = [token_id]
                self._clean, self._num_given = 1, None
                return piece
        if self._num_given is None:
            self._num_given = len(self._decode(window))
        window.append(token_id)
        return self._advance()

    def _advance(self) -> str:
        """Decode the window; hand out what is certain, and cut the window where that is safe."""
        assert self._num_given is not None
        window = self._window
        text = self._decode(window)
        certain = len(text.rstrip(REPLACEMENT))
        num_pending = len(window) - self._clean
        if certain < len(text) and num_pending > _MAX_PENDING_TOKENS:
            certain = len(text) - 1  # these bytes stay broken; only the last may yet be a start
        piece = text[self._num_given : certain]
        self._num_given = max(self._num_given, certain)
        if certain == len(text):
            if len(window) > _WINDOW:
                self._cut(self._clean, held=0)
            self._clean = len(self._window)
        elif len(window) > _HOPELESS_WINDOW:
            self._cut(len(window) - _WINDOW, held=len(text) - self._num_given)
            self._clean = 0
        return piece

    def _cut(self, first: int, held: int) -> None:
        """Drop the window's tokens before `first`; `held` characters at its end are not out yet."""
        self._window = self._window[first:]
        self._num_given = max(0, len(self._decode(self._window)) - held)

    def _decode(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(
            ids,
            skip_special_tokens=self._skip,
            spaces_between_special_tokens=self._spaces,
        )

    def _context_of(self, prompt_token_ids: Sequence[int]) -> tuple[list[int], str]:
        """The prompt's last tokens, from the start of a character on, and their text."""
        tail: list[int] = []
        for token_id in reversed(prompt_token_ids):
            if self._skip and token_id in self._special_ids:
                continue
            tail.insert(0, token_id)
            if len(tail) >= _MAX_CONTEXT:
                break
            if len(tail) >= _MIN_CONTEXT:
                text = self._decode(tail)
                if not text.startswith(REPLACEMENT):
                    return tail, text
        return tail, self._decode(tail)


class StopFound(NamedTuple):
    """What a `StopChecker` made of a piece of text."""

    text: str
    """What may be shown now."""
    stop: str | None
    """The stop string that ended the text; nothing comes after `text` then."""


class StopChecker:
    """Finds stop strings in text that comes in pieces, and never lets a part of one out.

    The stop string whose end comes first wins, the longest of those ending together; so the answer
    does not depend on how the text was cut into pieces. Text is held back exactly as long as it
    could still become the start of a stop string (Knuth, Morris, Pratt: one step a character).
    """

    def __init__(
        self, stops: Sequence[str], *, include_in_output: bool = False, min_tokens: int = 0
    ) -> None:
        self._stops = list(dict.fromkeys(stops))
        self._fallbacks = [_fallbacks(stop) for stop in self._stops]
        self._matched = [0] * len(self._stops)
        self._first_characters = {stop[0] for stop in self._stops}
        self._include = include_in_output
        self._min_tokens = min_tokens
        self._held = ""

    def push(self, text: str, num_tokens: int) -> StopFound:
        """Take in the text that output token number `num_tokens` (from 1) added.

        A stop string that is complete within the first `min_tokens` tokens does not stop.
        """
        if not self._held and self._first_characters.isdisjoint(text):
            return StopFound(text, None)
        waiting = self._held + text
        for place, character in enumerate(text, start=len(self._held)):
            stop = self._step(character)
            if stop is not None and num_tokens > self._min_tokens:
                self._held = ""
                end = place + 1
                return StopFound(waiting[: end if self._include else end - len(stop)], stop)
        num_held = max(self._matched)
        shown = len(waiting) - num_held
        self._held = waiting[shown:]
        return StopFound(waiting[:shown], None)

    def flush(self) -> str:
        """The end came for another reason: what was held back."""
        held, self._held = self._held, ""
        self._matched = [0] * len(self._stops)
        return held

    def _step(self, character: str) -> str | None:
        """Advance every stop string by one character; the longest that is complete."""
        found: str | None = None
        for i, stop in enumerate(self._stops):
            fallback = self._fallbacks[i]
            length = self._matched[i]
            while length and stop[length] != character:
                length = fallback[length]
            if stop[length] == character:
                length += 1
            if length == len(stop):
                if found is None or len(stop) > len(found):
                    found = stop
                length = fallback[length]
            self._matched[i] = length
        return found


def _fallbacks(word: str) -> list[int]:
    """For each length, the longest proper prefix of `word` that ends its prefix of that length."""
    table = [0, 0]
    length = 0
    for character in word[1:]:
        while length and word[length] != character:
            length = table[length]
        if word[length] == character:
            length += 1
        table.append(length)
    return table
