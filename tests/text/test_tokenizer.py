"""Tokenizers in Hugging Face folders, against transformers on the same folder."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from octavo.errors import InvalidRequestError, TokenizerError
from octavo.text.tokenizer import load_tokenizer

CORPUS = [
    "the quick brown fox jumps over the lazy dog, don't it? The year 1984 has 366 days.\n",
    "émoji 😀 ünïcödé 漢字かな русский текст\n\n\tdef f(x):\n    return x ** 2\n",
] * 8


def trained() -> Tokenizer:
    """A small byte-level BPE tokenizer with three special tokens."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


@pytest.fixture(scope="module")
def backend_json() -> str:
    return trained().to_str()


@pytest.fixture
def folder(tmp_path: Path, backend_json: str) -> Any:
    """Writes a tokenizer folder: tokenizer.json and the JSON files given."""

    def write(backend: Tokenizer | None = None, **files: Any) -> Path:
        text = backend_json if backend is None else backend.to_str()
        (tmp_path / "tokenizer.json").write_text(text)
        for name, content in files.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return tmp_path

    return write


NAMES = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}


def texts() -> list[str]:
    rng = random.Random(0)
    alphabet = [*"abc XYZ 0123 .,'!\n\t  ", "é", "漢", "😀", "<s>", "</s>", "<|im_end|>", "the "]
    made = ["".join(rng.choices(alphabet, k=rng.randrange(40))) for _ in range(200)]
    return [*CORPUS[:2], "", " ", *made]


@pytest.mark.parametrize(
    "config",
    [
        NAMES,
        NAMES | {"add_bos_token": True, "add_eos_token": True},
        NAMES | {"add_bos_token": False, "tokenizer_class": "LlamaTokenizerFast"},
        {**NAMES, "eos_token": {"content": "<|im_end|>", "__type": "AddedToken", "special": True}},
    ],
)
@pytest.mark.parametrize("post_processor", [False, True])
def test_ids_and_text_equal_transformers(
    folder: Any, config: dict[str, Any], post_processor: bool
) -> None:
    from transformers import AutoTokenizer

    backend = trained()
    if post_processor:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", pair="<s> $A $B", special_tokens=[("<s>", 0), ("</s>", 1)]
        )
    path = folder(backend, tokenizer_config=config, config={"model_type": "llama"})
    ours, theirs = load_tokenizer(path), AutoTokenizer.from_pretrained(path)
    for text in texts():
        for special in (True, False):
            ids = ours.encode(text, special)
            assert ids == theirs.encode(text, add_special_tokens=special), text
            assert ours.decode(ids, special) == theirs.decode(ids, skip_special_tokens=special)
    assert ours.bos_token_id == theirs.bos_token_id
    assert ours.eos_token_ids == (theirs.eos_token_id,)
    assert ours.special_ids >= set(theirs.all_special_ids)
    assert ours.vocab_size == len(theirs)


def test_text_survives_the_round_trip(folder: Any) -> None:
    tokenizer = load_tokenizer(folder(tokenizer_config=NAMES))
    for text in texts():
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_single_tokens(folder: Any) -> None:
    tokenizer = load_tokenizer(folder(tokenizer_config=NAMES))
    assert tokenizer.id_to_token(1) == "</s>" and tokenizer.token_to_id("</s>") == 1
    assert 1 in tokenizer.special_ids and 50 not in tokenizer.special_ids
    for outside in (-1, tokenizer.vocab_size, 10**9):
        assert tokenizer.id_to_token(outside) is None and outside not in tokenizer.special_ids
    assert tokenizer.decode([50, 10**9, -1]) == tokenizer.decode([50])
    assert tokenizer.decode([]) == ""


def test_end_of_sequence_comes_from_the_generation_config(folder: Any) -> None:
    path = folder(tokenizer_config=NAMES, config={"eos_token_id": 1})
    assert load_tokenizer(path).eos_token_ids == (1,)
    folder(generation_config={"eos_token_id": [2, 1]})
    assert load_tokenizer(path).eos_token_ids == (2, 1)
    folder(generation_config={"eos_token_id": None}, config={})
    assert load_tokenizer(path).eos_token_ids == (1,)


def test_special_tokens_map_and_flags(folder: Any) -> None:
    backend = trained()
    backend.add_tokens([AddedToken("<tool>", special=False), AddedToken("<pad>", special=False)])
    path = folder(
        backend,
        special_tokens_map={"pad_token": {"content": "<pad>"}, "bos_token": "<s>"},
        tokenizer_config={"eos_token": "</s>", "unk_token": "<nowhere>"},
    )
    tokenizer = load_tokenizer(path)
    assert tokenizer.special_tokens["pad_token"] == "<pad>" and tokenizer.bos_token_id == 0
    pad, tool = tokenizer.token_to_id("<pad>"), tokenizer.token_to_id("<tool>")
    assert pad in tokenizer.special_ids and tool not in tokenizer.special_ids
    assert tokenizer.token_to_id("<nowhere>") is None  # no id behind the embedding is made up
    assert tokenizer.decode([tool, pad]) == "<tool>"


def test_added_tokens_that_only_the_config_lists(folder: Any) -> None:
    entry = {"content": "<think>", "special": False, "normalized": False, "lstrip": False,
             "rstrip": False, "single_word": False}  # fmt: skip
    size = trained().get_vocab_size()
    path = folder(tokenizer_config=NAMES | {"added_tokens_decoder": {str(size): entry}})
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("<think>") == [size] and tokenizer.vocab_size == size + 1
    assert tokenizer.decode([size]) == "<think>"


def test_truncation_and_padding_of_the_file_are_not_applied(folder: Any) -> None:
    backend = trained()
    backend.enable_truncation(4)
    backend.enable_padding(length=64)
    tokenizer = load_tokenizer(folder(backend))
    assert 4 < len(tokenizer.encode("the quick brown fox jumps over")) < 64


def test_spaces_between_special_tokens(folder: Any) -> None:
    backend = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="<s>"))
    backend.add_special_tokens(["<s>", "</s>"])
    tokenizer = load_tokenizer(folder(backend))  # no decoder: tokens are joined by spaces
    ids = [0, 1, 2, 3, 1, 0, 2]
    assert tokenizer.decode(ids, False, True) == "<s> </s> a b </s> <s> a"
    assert tokenizer.decode(ids, False, False) == "<s></s> a b </s><s> a"
    assert tokenizer.decode(ids, True, False) == "a b a"


def test_chat_templates_from_every_place(folder: Any, tmp_path: Path) -> None:
    assert load_tokenizer(folder()).chat_template is None
    folder(tokenizer_config={"chat_template": "one"})
    assert load_tokenizer(tmp_path).chat_templates == {"default": "one"}
    named = [{"name": "default", "template": "two"}, {"name": "tool_use", "template": "tools"}]
    folder(tokenizer_config={"chat_template": named})
    assert load_tokenizer(tmp_path).chat_templates == {"default": "two", "tool_use": "tools"}
    (tmp_path / "chat_template.jinja").write_text("three")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("documents")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.chat_template == "three" and tokenizer.chat_templates["rag"] == "documents"


def test_text_that_is_no_unicode_is_a_request_error(folder: Any) -> None:
    tokenizer = load_tokenizer(folder())
    with pytest.raises(InvalidRequestError, match="not valid Unicode") as caught:
        tokenizer.encode("half a surrogate \ud800")
    assert caught.value.parameter == "prompt"


def test_no_tokenizer_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="--tokenizer, or use --skip-tokenizer-init"):
        load_tokenizer(tmp_path)
    with pytest.raises(TokenizerError, match=r"not a folder or \.gguf file"):
        load_tokenizer(tmp_path / "none")


@pytest.mark.parametrize(
    ("name", "text"),
    [("tokenizer.json", "{"), ("tokenizer.json", "{}"), ("tokenizer_config.json", "{"),
     ("tokenizer_config.json", "[]")],
)  # fmt: skip
def test_damaged_files_are_named(folder: Any, name: str, text: str) -> None:
    path = folder()
    (path / name).write_text(text)
    with pytest.raises(TokenizerError, match=name.replace(".", r"\.")):
        load_tokenizer(path)


def test_vocabulary_and_merges_alone_go_through_transformers(tmp_path: Path) -> None:
    model = json.loads(trained().to_str())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + merges + "\n")
    config = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer, reference = load_tokenizer(tmp_path), trained()
    for text in CORPUS[:2]:
        assert tokenizer.encode(text) == reference.encode(text).ids
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token_ids == (1,)
