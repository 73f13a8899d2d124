"""Tokenizers rebuilt from GGUF metadata."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from octavo.errors import TokenizerError
from octavo.text.gguf_tokenizer import _PRE_TOKENIZERS, load_gguf_tokenizer
from octavo.text.tokenizer import FastTokenizer, load_tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

CORPUS = [
    "Hello  1234 don't WE'RE the year 2024\r\n\n\tx  y",
    "émoji 😀 漢字 ½²Ⅷ٣ a_b <tool> $+=^~|",
] * 8


def write(path: Path, metadata: Mapping[str, Any]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in metadata.items():
        key = f"tokenizer.ggml.{key}" if not key.startswith("tokenizer.") else key
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


# What the tokenizer.json files of each family have as pre-tokenizer, written out once more.
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
PUBLISHED: dict[str, list[Any]] = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)],
    "smollm": [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ],
    "llama-bpe": [
        pre_tokenizers.Split(Regex(_CONTRACTIONS + r"\p{N}{1,3}" + _TAIL), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
    "qwen2": [
        pre_tokenizers.Split(Regex(_CONTRACTIONS + r"\p{N}" + _TAIL), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ],
}


# the letters that DeepSeek's files list, by a few of each kind and their neighbours
_LETTERS_LISTED = "µÖƺϿԯꙀꞇꞎꭰﬓ𐐀𞤀"
_LETTERS_NOT_LISTED = "ªƻʔաꞑꬰ𝐀"


def reference(pre: str) -> Tokenizer:
    """A trained byte-level BPE with the published pre-tokenizer of a family."""
    backend = Tokenizer(models.BPE(ignore_merges=pre == "llama-bpe"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(PUBLISHED[pre])
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def byte_level_metadata(backend: Tokenizer, pre: str, **more: Any) -> dict[str, Any]:
    model = json.loads(backend.to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    types = [CONTROL if t in ("<s>", "</s>") else NORMAL for t in tokens]
    return {
        "model": "gpt2", "pre": pre, "tokens": tokens, "token_type": types,
        "merges": [" ".join(pair) for pair in model["merges"]],
        "bos_token_id": 0, "eos_token_id": 1,
    } | more  # fmt: skip


@pytest.mark.parametrize("pre", PUBLISHED)
def test_byte_level_equals_the_published_tokenizer(pre: str, tmp_path: Path) -> None:
    backend = reference(pre)
    path = write(tmp_path / "x.gguf", byte_level_metadata(backend, pre, add_bos_token=False))
    tokenizer = load_tokenizer(path)
    for text in [*CORPUS[:2], "", " ", "  12345 67  ", "a<s>b</s>\n", "I'LL \u017f", "\r\n\r\n x"]:
        ids = tokenizer.encode(text)
        assert ids == backend.encode(text).ids, text
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(tokenizer.encode("a<s>b")) == "ab"
    assert tokenizer.special_ids == {0, 1}
    assert tokenizer.vocab_size == backend.get_vocab_size()


def split(pre: str, text: str) -> list[str]:
    """How a family splits, seen through a tokenizer that merges nothing but knows each word."""
    found = []
    pieces = [text]
    for pattern in _PRE_TOKENIZERS[pre].patterns:
        splitter = pre_tokenizers.Split(Regex(pattern), "isolated")
        pieces = [w for p in pieces for w, _ in splitter.pre_tokenize_str(p)]
    found += pieces
    return found


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("default", "Hello, 12345 x=1", ["Hello", ",", " ", "123", "45", " x", "=", "1"]),
        ("gpt-2", "it's 1234  ok", ["it", "'s", " 1234", " ", " ok"]),
        ("smollm", "Hi  1234", ["Hi", "  ", "1", "2", "3", "4"]),
        ("llama-bpe", "x 1234's", ["x", " ", "123", "4", "'s"]),
        ("smaug-bpe", "x 1234's", ["x", " ", "123", "4", "'s"]),
        ("qwen2", "x 1234\n\n y", ["x", " ", "1", "2", "3", "4", "\n\n", " y"]),
        ("falcon", "a+b 1234", ["a", "+", "b", " ", "123", "4"]),
        ("tekken", "helloWORLD 12", ["hello", "WORLD", " ", "1", "2"]),
        ("gpt-4o", "HTTPServer's 1234", ["HTTPServer's", " ", "123", "4"]),
        (
            "deepseek-llm",
            "Hi, x=123\n\n 你a",
            ["Hi", ",", " x", "=", "123", "\n", "\n", " ", "你", "a"],
        ),
        ("deepseek-coder", "f(x+12) 你", ["f", "(", "x", "+", "1", "2", ")", " ", "你"]),
        (
            "deepseek-v3",
            "it's 1234 カナ (x)\n",
            ["it", "'s", " ", "123", "4", " ", "カナ", " (", "x", ")\n"],
        ),
        ("seed-coder", "a 12 !!\n", ["a", " ", "1", "2", " !!", "\n"]),
    ],
)
def test_split_rules(pre: str, text: str, words: list[str]) -> None:
    assert split(pre, text) == words


def test_letters_of_deepseek() -> None:
    """Listed ones stay together, with a space before them; others stand apart from it."""
    for letter in _LETTERS_LISTED:
        assert split("deepseek-llm", f"{letter}{letter} {letter}") == [letter * 2, f" {letter}"]
    for letter in _LETTERS_NOT_LISTED:
        assert f" {letter}" not in split("deepseek-llm", f"{letter}{letter} {letter}")


def test_flags_for_start_and_end(tmp_path: Path) -> None:
    def ids(pre: str, **more: Any) -> list[int]:
        metadata = byte_level_metadata(reference("gpt-2"), pre, **more)
        return load_gguf_tokenizer(write(tmp_path / "x.gguf", metadata)).encode("x")

    x = ids("gpt-2")
    assert len(x) == 1
    assert ids("gpt-2", add_bos_token=True) == [0, *x]
    assert ids("gpt-2", add_bos_token=True, add_eos_token=True) == [0, *x, 1]
    assert ids("llama-bpe") == [0, *x]  # the family adds it unless the file says no
    assert ids("llama-bpe", add_bos_token=False) == x


def test_user_defined_tokens_are_found_whole_but_are_text(tmp_path: Path) -> None:
    metadata = byte_level_metadata(reference("gpt-2"), "gpt-2")
    metadata["tokens"] = [*metadata["tokens"], "<tool>", "<tool>"]
    metadata["token_type"] = [*metadata["token_type"], USER_DEFINED, NORMAL]
    tool = metadata["tokens"].index("<tool>")
    tokenizer = load_gguf_tokenizer(write(tmp_path / "x.gguf", metadata))
    assert tokenizer.encode("a<tool>")[-1] == tool and tool not in tokenizer.special_ids
    assert tokenizer.decode([tool]) == "<tool>"


def test_named_tokens_and_templates(tmp_path: Path) -> None:
    metadata = byte_level_metadata(
        reference("gpt-2"), "gpt-2", padding_token_id=1,
        **{"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"},
    )  # fmt: skip
    tokenizer = load_gguf_tokenizer(write(tmp_path / "x.gguf", metadata))
    assert tokenizer.special_tokens == {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "</s>",
    }
    assert tokenizer.chat_templates == {"default": "plain", "tool_use": "tools"}
    assert tokenizer.bos_token_id == 0 and tokenizer.eos_token_ids == (1,)


# -- SentencePiece

BYTES = [f"<0x{b:02X}>" for b in range(256)]
PIECES = ["▁", "t", "h", "e", "▁t", "he", "▁the", "c", "a", "at", "▁c", "▁cat", "th", "é", "."]


def sentencepiece(tmp_path: Path, **more: Any) -> FastTokenizer:
    """unk, bos, eos, 256 bytes, then pieces; the later, the worse the score."""
    tokens = ["<unk>", "<s>", "</s>", *BYTES, *PIECES]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(PIECES)]
    scores = [0.0] * 259 + [-float(i) for i in range(len(PIECES))]
    metadata = {"model": "llama", "tokens": tokens, "token_type": types, "scores": scores} | more
    return load_gguf_tokenizer(write(tmp_path / "x.gguf", metadata))


def test_sentencepiece_merges_by_score(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path, add_bos_token=False)

    def pieces(text: str) -> list[str | None]:
        return [tokenizer.id_to_token(i) for i in tokenizer.encode(text)]

    # "▁t" scores better than "th", so "▁the" comes from "▁t" + "he"
    assert pieces("the cat") == ["▁the", "▁cat"]
    assert pieces("cathe") == ["▁cat", "he"]
    assert pieces("th") == ["▁t", "h"]
    assert pieces("é😀\n") == ["▁", "é", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "<0x0A>"]
    for text in ("the cat", "  the  cat ", "é😀\n", "a", " ", "漢字 the"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sentencepiece_defaults_and_flags(tmp_path: Path) -> None:
    tokenizer = sentencepiece(tmp_path)
    assert tokenizer.encode("the") == [1, 259 + PIECES.index("▁the")]
    assert tokenizer.encode("the", add_special_tokens=False) == [259 + PIECES.index("▁the")]
    assert (tokenizer.bos_token_id, tokenizer.special_tokens["eos_token"]) == (1, "</s>")
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.special_ids == {0, 1, 2}
    bare = sentencepiece(tmp_path, add_space_prefix=False, add_bos_token=False, add_eos_token=True)
    assert bare.encode("the") == [259 + PIECES.index("t"), 259 + PIECES.index("he"), 2]
    assert bare.decode(bare.encode(" the")) == " the"


def test_sentencepiece_agrees_with_transformers_conversion(tmp_path: Path) -> None:
    from transformers import LlamaTokenizer
    from transformers.tokenization_utils_base import generate_merges

    tokenizer = sentencepiece(tmp_path)
    vocab = {t: i for i, t in enumerate(["<unk>", "<s>", "</s>", *BYTES, *PIECES])}
    scores = {t: -float(i) for i, t in enumerate(vocab)}
    theirs = LlamaTokenizer(vocab=vocab, merges=generate_merges(vocab, scores))
    for text in ("the cat", "thecat.", "é the 😀 cat", "the the\nthe"):
        assert tokenizer.encode(text, False) == theirs.encode(text, add_special_tokens=False), text


# -- refusals


def test_file_without_tokenizer(tmp_path: Path) -> None:
    path = write(tmp_path / "x.gguf", {"model": "no_vocab"})
    with pytest.raises(TokenizerError, match=r"no tokenizer in .*--skip-tokenizer-init"):
        load_tokenizer(path)


def test_unknown_kinds_are_refused(tmp_path: Path) -> None:
    metadata = byte_level_metadata(reference("gpt-2"), "qwen3")
    with pytest.raises(TokenizerError, match=r"'qwen3' is not known \(nearest: qwen2;"):
        load_gguf_tokenizer(write(tmp_path / "x.gguf", metadata))
    with pytest.raises(TokenizerError, match=r"'rwkv' is not supported; known: gpt2, llama"):
        load_gguf_tokenizer(write(tmp_path / "x.gguf", metadata | {"model": "rwkv"}))
    broken = metadata | {"pre": "gpt-2", "merges": ["ab"]}
    with pytest.raises(TokenizerError, match="the merge 'ab' is not a pair"):
        load_gguf_tokenizer(write(tmp_path / "x.gguf", broken))


# -- the default model

GOLDEN = [  # from the model's tokenizer.json
    ("Hello  1234", [19556, 256, 33, 34, 35, 36]),
    ("Hello world! 123", [19556, 905, 17, 216, 33, 34, 35]),
    ("Café déjà vu.", [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30]),
    ("  multiple   spaces", [216, 2701, 256, 5600]),
    ("<|im_start|>user\nHi 😀<|im_end|>\n", [1, 4093, 198, 26843, 40303, 218, 2, 198]),
    ("\r\n\t x\xa0y", [15290, 1792, 15442, 105]),
    ("½²Ⅷ٣", [16738, 19133, 173, 223, 117, 164, 113]),
    ("don't WE'RE I'll", [12420, 982, 26587, 23, 3256, 339, 3060]),
    ("def f(x):\n    return x**2\n", [1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 198]),
]


@pytest.mark.model
def test_default_model(default_model_path: Path) -> None:
    start = time.process_time()
    tokenizer = load_tokenizer(default_model_path)
    assert time.process_time() - start < 2.0  # 0.3 s where nothing else runs
    for text, ids in GOLDEN:
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.vocab_size == 49152 and tokenizer.eos_token_ids == (2,)
    assert tokenizer.bos_token_id == 1 and len(tokenizer.special_ids) == 17
    assert "<|im_start|>" in (tokenizer.chat_template or "")
