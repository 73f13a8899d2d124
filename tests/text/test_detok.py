"""Incremental text equals decoding everything at once, and stop strings never leak."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from octavo.text.detok import IncrementalDetokenizer, StopChecker, TokenTexts

BOS, EOS, TOOL = 256, 257, 258


class ByteTokenizer:
    """Byte-level: tokens 0..255 are bytes, then special tokens, then pieces of several bytes."""

    special_ids = frozenset({BOS, EOS, TOOL})
    names = {BOS: "<s>", EOS: "</s>", TOOL: "<tool>"}  # noqa: RUF012
    pieces = [b"he", b"\xe2\x82", b"\xac!", b"\xff\xfe", b"a\xf0", b"\x9f\x98", b"\xac\xe2"]  # noqa: RUF012

    def __init__(self) -> None:
        self.num_decoded = 0

    def encode(self, text, add_special_tokens=True):
        return [BOS] * add_special_tokens + list(text.encode())

    def bytes_of(self, token_id):
        if token_id < 256:
            return bytes([token_id])
        if token_id in self.special_ids:
            return self.names[token_id].encode()
        return self.pieces[token_id - 259] if token_id < 259 + len(self.pieces) else b""

    def decode(self, ids, skip_special_tokens=True, spaces_between_special_tokens=True):
        self.num_decoded += len(ids)
        parts = []
        for i, token_id in enumerate(ids):
            special = token_id in self.special_ids
            if special and skip_special_tokens:
                continue
            if spaces_between_special_tokens and special and i and ids[i - 1] in self.special_ids:
                parts.append(b" ")
            parts.append(self.bytes_of(token_id))
        return b"".join(parts).decode(errors="replace")


class SentencePieceTokenizer:
    """A Llama-like decoder: word starts, byte fallback, the text's first space stripped."""

    words = ("<unk>", "<s>", "</s>", "▁Hello", "▁world", "lo", "▁", "é", "a", "▁a")
    special_ids = frozenset({1, 2})

    def __init__(self) -> None:
        vocab = {word: i for i, word in enumerate(self.words)}
        vocab |= {f"<0x{byte:02X}>": len(self.words) + byte for byte in range(256)}
        self.backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
        self.backend.add_special_tokens(["<s>", "</s>"])
        self.backend.decoder = decoders.Sequence(
            [
                decoders.Replace("▁", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        )

    def byte(self, value):
        return len(self.words) + value

    def encode(self, text, add_special_tokens=True):
        return [1] * add_special_tokens + self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids, skip_special_tokens=True, spaces_between_special_tokens=True):
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)


TOKENIZERS = {"bytes": ByteTokenizer(), "sentencepiece": SentencePieceTokenizer()}


def pieces_of(tokenizer, ids, prompt=(), **options) -> list[str]:
    detok = IncrementalDetokenizer(TokenTexts(tokenizer), prompt, **options)
    return [detok.push([token_id]) for token_id in ids] + [detok.flush()]


def whole_text(tokenizer, ids, prompt=(), **options) -> str:
    before = tokenizer.decode(list(prompt), **options)
    return tokenizer.decode([*prompt, *ids], **options)[len(before) :]


def test_split_characters_are_held_back() -> None:
    tokenizer = TOKENIZERS["bytes"]
    ids = list("a€😀é".encode())
    assert pieces_of(tokenizer, ids) == ["a", "", "", "€", "", "", "", "😀", "", "é", ""]


def test_incomplete_end_is_flushed() -> None:
    tokenizer = TOKENIZERS["bytes"]
    assert pieces_of(tokenizer, list("ok€".encode())[:-1]) == ["o", "k", "", "", "�"]


def test_tokens_that_end_one_character_and_start_the_next() -> None:
    """Text flows although every token leaves something open."""
    tokenizer = TOKENIZERS["bytes"]
    open_end = 259 + tokenizer.pieces.index(b"\xe2\x82")
    both = 259 + tokenizer.pieces.index(b"\xac\xe2")
    ids = [open_end] + [both, 0x82] * 30 + [0xAC]
    pieces = pieces_of(tokenizer, ids)
    assert "".join(pieces) == "€" * 31
    assert max(len(piece) for piece in pieces) == 1


def test_leading_space_shows_behind_a_prompt_only() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    hello, world = 3, 4
    assert pieces_of(tokenizer, [hello, world], [1, hello]) == [" Hello", " world", ""]
    assert pieces_of(tokenizer, [hello, world], [1]) == ["Hello", " world", ""]
    assert pieces_of(tokenizer, [hello, world]) == ["Hello", " world", ""]


def test_skipped_special_tokens_do_not_eat_spaces() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    hello, world = 3, 4
    assert pieces_of(tokenizer, [hello, 2, 1, world]) == ["Hello", "", "", " world", ""]
    assert pieces_of(tokenizer, [2, 2, 2, world], [hello]) == ["", "", "", " world", ""]


def test_many_skipped_special_tokens() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    assert "".join(pieces_of(tokenizer, [3] + [2] * 50 + [4])) == "Hello world"


def test_long_runs_of_byte_tokens() -> None:
    """The window is cut between characters only: half of one would spoil the whole run."""
    tokenizer = TOKENIZERS["sentencepiece"]
    text = "€é😀€€" * 30
    ids = [tokenizer.byte(b) for b in text.encode()]
    pieces = pieces_of(tokenizer, ids, [3])
    assert "".join(pieces) == text
    assert max(len(piece) for piece in pieces) == 1


def test_byte_fallback() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = [3, *(tokenizer.byte(b) for b in "é€\n".encode()), 9, tokenizer.byte(0xE2), 4]
    expected = ["Hello", "", "é", "", "", "€", "\n", " a", "", "� world", ""]
    assert pieces_of(tokenizer, ids) == expected


def test_special_tokens_shown_and_spaced() -> None:
    tokenizer = TOKENIZERS["bytes"]
    ids = [ord("x"), TOOL, EOS, ord("y"), TOOL]
    shown = pieces_of(tokenizer, ids, skip_special_tokens=False)
    assert shown == ["x", "<tool>", " </s>", "y", "<tool>", ""]
    tight = pieces_of(
        tokenizer, ids, skip_special_tokens=False, spaces_between_special_tokens=False
    )
    assert tight == ["x", "<tool>", "</s>", "y", "<tool>", ""]
    assert pieces_of(tokenizer, ids) == ["x", "", "", "y", "", ""]


def test_prompt_that_ends_inside_a_character() -> None:
    tokenizer = TOKENIZERS["bytes"]
    prompt = list("abcdef€".encode())
    assert pieces_of(tokenizer, prompt[-1:], prompt[:-1]) == ["€", ""]
    assert pieces_of(tokenizer, [ord("x")], prompt[:-1]) == ["x", ""]


def test_context_starts_at_a_character() -> None:
    """The window over the prompt's end must not begin with the rest of a character."""
    tokenizer = TOKENIZERS["sentencepiece"]
    prompt = [3, *(tokenizer.byte(b) for b in "€€€".encode())]
    ids = [tokenizer.byte(b) for b in "é".encode()]
    assert pieces_of(tokenizer, ids, prompt) == ["", "é", ""]


def test_ids_without_a_token_are_nothing() -> None:
    tokenizer = TOKENIZERS["bytes"]
    assert pieces_of(tokenizer, [104, 9999, 105]) == ["h", "", "i", ""]


def test_endless_broken_bytes_come_out_and_cost_is_bounded() -> None:
    tokenizer = ByteTokenizer()
    ids = [0xFF] * 3000
    detok = IncrementalDetokenizer(TokenTexts(tokenizer), [65])
    shown = "".join(detok.push([token_id]) for token_id in ids)
    assert len(shown) >= len(ids) - 8
    assert "".join([shown, detok.flush()]) == "�" * 3000
    assert tokenizer.num_decoded < 80 * len(ids)


@pytest.mark.parametrize("text", ["hello world ", "€😀é日本", "a€"])
def test_work_per_token_does_not_grow(text: str) -> None:
    tokenizer = ByteTokenizer()
    texts = TokenTexts(tokenizer)
    costs = []
    for repeats in (20, 400):
        ids = list(text.encode()) * repeats
        before = tokenizer.num_decoded
        detok = IncrementalDetokenizer(texts)
        assert "".join([detok.push(ids), detok.flush()]) == text * repeats
        costs.append((tokenizer.num_decoded - before) / len(ids))
    assert costs[1] < costs[0] * 1.2 + 0.1


BYTE_IDS = st.lists(st.integers(0, 258 + 9), max_size=60)
TEXT_IDS = st.lists(
    st.one_of(
        st.sampled_from([BOS, EOS, TOOL]).map(lambda i: [i]),
        st.text(st.characters(codec="utf-8", exclude_characters="�"), max_size=4).map(
            lambda t: list(t.encode())
        ),
    ),
    max_size=15,
).map(lambda parts: [i for part in parts for i in part])


@given(ids=BYTE_IDS, skip=st.booleans(), spaces=st.booleans())
def test_any_bytes_read_as_the_whole_does(ids, skip, spaces) -> None:
    tokenizer = TOKENIZERS["bytes"]
    options = dict(skip_special_tokens=skip, spaces_between_special_tokens=spaces)
    assert "".join(pieces_of(tokenizer, ids, **options)) == whole_text(tokenizer, ids, **options)


@given(prompt=TEXT_IDS, ids=TEXT_IDS, skip=st.booleans(), cuts=st.lists(st.integers(1, 5)))
def test_any_text_behind_any_prompt_in_any_pieces(prompt, ids, skip, cuts) -> None:
    tokenizer = TOKENIZERS["bytes"]
    detok = IncrementalDetokenizer(TokenTexts(tokenizer), prompt, skip_special_tokens=skip)
    shown, place = "", 0
    for cut in [*cuts, len(ids)]:
        shown += detok.push(ids[place : place + cut])
        place += cut
    assert "�" not in shown
    assert shown + detok.flush() == whole_text(
        tokenizer, ids, prompt, skip_special_tokens=skip, spaces_between_special_tokens=True
    )


@given(
    prompt=st.lists(st.sampled_from(range(3, 10)), max_size=30),
    parts=st.lists(
        st.one_of(st.integers(1, 9), st.sampled_from(["é", "€", "😀", "\n", "A"])), max_size=40
    ),
    skip=st.booleans(),
)
def test_sentencepiece_reads_as_the_whole_does(prompt, parts, skip) -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = []
    for part in parts:
        ids += [part] if isinstance(part, int) else [tokenizer.byte(b) for b in part.encode()]
    options = dict(skip_special_tokens=skip)
    assert "".join(pieces_of(tokenizer, ids, prompt, **options)) == whole_text(
        tokenizer, ids, prompt, **options
    )


def test_single_token_texts() -> None:
    texts = TokenTexts(TOKENIZERS["sentencepiece"])
    assert [texts.text(i) for i in (3, 5, 2)] == [" Hello", "lo", "</s>"]
    assert texts.text(TOKENIZERS["sentencepiece"].byte(0xE2)) == "�"


# -- stop strings -------------------------------------------------------------------------------


def run_checker(checker: StopChecker, pieces) -> tuple[list[str], str | None]:
    shown = []
    for number, piece in enumerate(pieces, start=1):
        found = checker.push(piece, number)
        shown.append(found.text)
        if found.stop is not None:
            return shown, found.stop
    shown.append(checker.flush())
    return shown, None


def test_stop_string_across_pieces_is_never_shown() -> None:
    shown, stop = run_checker(StopChecker(["END"]), ["abc", "E", "N", "xE", "ND", "more"])
    assert (shown, stop) == (["abc", "", "", "ENx", ""], "END")


def test_text_that_only_began_like_a_stop_string_is_shown_at_the_end() -> None:
    assert run_checker(StopChecker(["END"]), ["abcE", "N"]) == (["abc", "", "EN"], None)


def test_stop_string_in_the_output() -> None:
    checker = StopChecker(["END"], include_in_output=True)
    assert run_checker(checker, ["abE", "NDxyz"]) == (["ab", "END"], "END")


@pytest.mark.parametrize(
    ("stops", "text", "shown", "stop"),
    [
        (["bc", "abcd"], "abcd", "a", "bc"),  # its end comes first
        (["bc", "abc"], "xabc", "x", "abc"),  # both end here: the longest
        (["abab", "b!"], "abaabab!", "aba", "abab"),  # falls back inside a match
        (["aab"], "aaab", "a", "aab"),
        (["\n\n"], "a\nb\n\nc", "a\nb", "\n\n"),
        (["日本"], "x日本", "x", "日本"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 99])
def test_which_stop_string_wins_does_not_depend_on_pieces(stops, text, shown, stop, size) -> None:
    pieces = [text[i : i + size] for i in range(0, len(text), size)]
    got, found = run_checker(StopChecker(stops), pieces)
    assert ("".join(got), found) == (shown, stop)


def test_stop_string_within_min_tokens_is_text() -> None:
    checker = StopChecker(["b"], min_tokens=3)
    assert run_checker(checker, ["a", "b", "b", "c", "b", "d"])[1] == "b"
    shown, stop = run_checker(StopChecker(["bb"], min_tokens=3), ["a", "b", "b", "b", "c"])
    assert ("".join(shown), stop) == ("ab", "bb")  # complete with the fourth token


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    text=st.text("abc", max_size=40),
    cuts=st.lists(st.integers(0, 5), max_size=40),
    include=st.booleans(),
)
def test_stop_strings_against_a_search_in_the_whole_text(stops, text, cuts, include) -> None:
    ends = [(text.find(stop) + len(stop), -len(stop), stop) for stop in stops if stop in text]
    end, stop = (min(ends)[0], min(ends)[2]) if ends else (len(text), None)
    expected = text[:end] if include or stop is None else text[: end - len(stop)]
    pieces, place = [], 0
    for cut in [*cuts, len(text)]:
        pieces.append(text[place : place + cut])
        place += cut
    shown, found = run_checker(StopChecker(stops, include_in_output=include), pieces)
    assert ("".join(shown), found) == (expected, stop)
    # Nothing is held back longer than it must be.
    given = "".join(shown[:-1]) if stop is None else None
    if given is not None:
        held = text[len(given) :]
        assert not held or any(s.startswith(held) and s != held for s in stops)


@given(
    stop=st.text("ab", min_size=1, max_size=4), text=st.text("ab", max_size=20), k=st.integers(0, 9)
)
def test_min_tokens_against_a_search(stop, text, k) -> None:
    """One character a token: the first occurrence that ends behind the first k tokens stops."""
    ends = [i for i in range(k + 1, len(text) + 1) if text[:i].endswith(stop)]
    assume(ends)
    shown, found = run_checker(StopChecker([stop], min_tokens=k), list(text))
    assert ("".join(shown), found) == (text[: ends[0] - len(stop)], stop)
