"""SentencePiece vocabularies: tokenizer.model alone in a folder, and what GGUF makes of them.

tests/text/data has two models that SentencePiece 0.2.3 trained on tests/data/public_domain.txt (BPE
with byte fallback, and unigram; `<tool>` is user-defined), and the ids it gives for some texts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest

from octavo.errors import TokenizerError
from octavo.text import sentencepiece
from octavo.text.tokenizer import Tokenizer, load_tokenizer

DATA = Path(__file__).parent / "data"
EXPECTED: dict[str, dict[str, list[int]]] = json.loads((DATA / "expected.json").read_text("utf-8"))
CONTROL_WRITTEN_OUT = "<s>hi</s>"
"""Special tokens are recognised in text here, which SentencePiece leaves to its callers."""

Folder = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """A folder with one of the models and whatever JSON files a test adds."""

    def make(kind: str, **files: Any) -> Path:
        shutil.copy(DATA / f"{kind}.model", tmp_path / "tokenizer.model")
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return tmp_path

    return make


@pytest.mark.parametrize("kind", EXPECTED)
def test_ids_are_sentencepieces(kind: str, folder: Folder) -> None:
    tokenizer = load_tokenizer(folder(kind))
    for text, ids in EXPECTED[kind].items():
        if text != CONTROL_WRITTEN_OUT:
            assert tokenizer.encode(text, add_special_tokens=False) == ids, text


def test_bytes_spell_what_has_no_piece_and_come_back_as_text(folder: Folder) -> None:
    tokenizer = load_tokenizer(folder("bpe"))
    for text in ("naïve 😀 漢字", "x\n\ny\tz", "  two  spaces ", " lead", "<tool>"):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids) == text
    assert "<0xF0>" in [tokenizer.id_to_token(i) for i in tokenizer.encode("😀")]


def test_ends_and_special_tokens(folder: Folder) -> None:
    plain = load_tokenizer(folder("bpe"))
    assert plain.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    assert (plain.bos_token_id, plain.eos_token_ids) == (1, (2,))
    assert plain.encode("a") == [1, *plain.encode("a", add_special_tokens=False)]
    assert plain.encode(CONTROL_WRITTEN_OUT, False)[0] == 1
    assert plain.decode(plain.encode("a<s>b", False)) == "a b"  # a new text starts behind <s>
    both = load_tokenizer(
        folder("bpe", tokenizer_config={"add_bos_token": False, "add_eos_token": True})
    )
    assert both.encode("a") == [*plain.encode("a", False), 2]
    assert load_tokenizer(folder("unigram", tokenizer_config={})).encode("a")[0] != 1


def test_tokens_of_other_files_keep_their_ids(folder: Folder) -> None:
    size = len(sentencepiece.read_model(DATA / "bpe.model").tokens)
    path = folder(
        "bpe",
        added_tokens={"<extra>": size},
        tokenizer_config={
            "added_tokens_decoder": {
                str(size + 3): {"content": "<|im_end|>", "special": True},
                "0": {"content": "<unk>", "special": True},
            },
            "eos_token": "<|im_end|>",
            "chat_template": "{{ messages }}",
        },
    )
    tokenizer = load_tokenizer(path)
    assert tokenizer.vocab_size == size + 4
    assert tokenizer.encode("<extra><|im_end|>", False) == [size, size + 3]
    assert size + 3 in tokenizer.special_ids and size not in tokenizer.special_ids
    assert tokenizer.eos_token_ids == (size + 3,)
    assert tokenizer.chat_template == "{{ messages }}"


def test_prefix_behind_added_tokens_is_what_legacy_means(folder: Folder) -> None:
    old = load_tokenizer(folder("bpe", tokenizer_config={"legacy": True}))
    new = load_tokenizer(folder("bpe", tokenizer_config={"legacy": False}))
    a, b = (t.encode("<s>truth", add_special_tokens=False) for t in (old, new))
    assert old.id_to_token(a[1]).startswith("\u2581")  # type: ignore[union-attr]
    assert not new.id_to_token(b[1]).startswith("\u2581")  # type: ignore[union-attr]
    assert old.encode("truth") == new.encode("truth")


def test_transformers_is_not_needed(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    assert load_tokenizer(folder("bpe")).encode("Hello")


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"\x0a\xff", b"IQ== 0\nIg== 1\n", b"\x08\x01"],
    ids=["empty", "json", "cut short", "tiktoken", "no pieces"],
)  # fmt: skip
def test_what_is_no_sentencepiece_model_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(TokenizerError, match=r"tokenizer\.model is no SentencePiece model"):
        load_tokenizer(tmp_path)


def test_every_cut_of_a_model_gives_a_tokenizer_error_or_a_vocabulary(tmp_path: Path) -> None:
    data = (DATA / "bpe.model").read_bytes()
    path = tmp_path / "tokenizer.model"
    for end in range(0, len(data), 97):
        path.write_bytes(data[:end])
        try:
            assert sentencepiece.read_model(path).tokens
        except TokenizerError:
            continue


def test_id_far_behind_the_vocabulary_is_refused(folder: Folder) -> None:
    with pytest.raises(TokenizerError, match="has the id 99999999"):
        load_tokenizer(folder("bpe", added_tokens={"<x>": 99999999}))


def in_gguf(kind: str, path: Path, model: str, **more: Any) -> Tokenizer:
    pieces = sentencepiece.read_model(DATA / f"{kind}.model")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_token_list(list(pieces.tokens))
    writer.add_token_scores(list(pieces.scores))
    writer.add_token_types(list(pieces.types))
    writer.add_unk_token_id(0)
    for key, value in more.items():
        writer.add_bool(f"tokenizer.ggml.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return load_tokenizer(path)


def test_gguf_bpe_and_unigram_give_the_same_ids(tmp_path: Path) -> None:
    bpe = in_gguf("bpe", tmp_path / "b.gguf", "llama", add_bos_token=False)
    unigram = in_gguf(
        "unigram", tmp_path / "u.gguf", "t5", remove_extra_whitespaces=True, add_eos_token=False
    )
    for tokenizer, kind in ((bpe, "bpe"), (unigram, "unigram")):
        for text, ids in EXPECTED[kind].items():
            if text not in (CONTROL_WRITTEN_OUT, "a<tool>b"):  # llama.cpp puts a space behind it
                assert tokenizer.encode(text) == ids, (kind, text)


def test_gguf_unigram_ends_a_prompt_by_default(tmp_path: Path) -> None:
    tokenizer = in_gguf("unigram", tmp_path / "u.gguf", "t5")
    assert tokenizer.encode("Hello")[-1] == 1


def test_gguf_word_pieces(tmp_path: Path) -> None:
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "\u2581un", "want", "ed", "\u2581,", "\u2581run"]
    writer = gguf.GGUFWriter(tmp_path / "w.gguf", "bert")
    writer.add_tokenizer_model("bert")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 2, 3, 3, 1, 1, 1, 1, 1])
    writer.add_bos_token_id(2)
    writer.add_sep_token_id(3)
    writer.add_unk_token_id(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = load_tokenizer(tmp_path / "w.gguf")
    assert tokenizer.encode("UNwantéd, run zz") == [2, 4, 5, 6, 7, 8, 1, 3]
    assert tokenizer.decode([2, 4, 5, 6, 7, 8, 3]) == "unwanted, run"
