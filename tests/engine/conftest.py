"""A tokenizer that needs no files: UTF-8 bytes, and a few words and special tokens behind them."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from octavo import LLM

sys.path.insert(0, str(Path(__file__).parent))  # the tests import `llm_support` from here

BOS, EOS, TOOL, SPACE_CAT = 256, 257, 258, 259


class ByteTokenizer:
    """Tokens 0..255 are bytes; " cat" is one token of its own."""

    vocab_size = 260
    bos_token_id = BOS
    eos_token_ids = (EOS,)
    special_ids = frozenset({BOS, EOS, TOOL})
    special_tokens = {"bos_token": "<s>", "eos_token": "</s>"}  # noqa: RUF012
    chat_templates: dict[str, str] = {}  # noqa: RUF012
    chat_template = None
    _names = {BOS: "<s>", EOS: "</s>", TOOL: "<tool>", SPACE_CAT: " cat"}  # noqa: RUF012

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids = [BOS] if add_special_tokens else []
        for i, part in enumerate(text.split(" cat")):
            ids += [SPACE_CAT] * (i > 0) + list(part.encode())
        return ids

    def decode(self, ids, skip_special_tokens=True, spaces_between_special_tokens=True) -> str:
        parts = []
        for i, token_id in enumerate(ids):
            special = token_id in self.special_ids
            if special and skip_special_tokens:
                continue
            if special and spaces_between_special_tokens and i and ids[i - 1] in self.special_ids:
                parts.append(b" ")
            parts.append(
                bytes([token_id]) if token_id < 256 else self._names.get(token_id, "").encode()
            )
        return b"".join(parts).decode(errors="replace")

    def id_to_token(self, token_id: int) -> str | None:
        return self.decode([token_id], skip_special_tokens=False)

    def token_to_id(self, token: str) -> int | None:
        return next((i for i, name in self._names.items() if name == token), None)


@pytest.fixture
def byte_tokenizer() -> ByteTokenizer:
    return ByteTokenizer()


@pytest.fixture(scope="session")
def blank_path(tiny_weights_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights are zero: to it every token is equally likely, always."""
    folder = Path(shutil.copytree(tiny_weights_path, tmp_path_factory.mktemp("blank") / "model"))
    file = folder / "model.safetensors"
    save_file({name: torch.zeros_like(t) for name, t in load_file(file).items()}, file)
    return folder


@pytest.fixture
def llm(tiny_model_path: Path) -> Iterator[LLM]:
    """A tiny engine with random weights, and the proof that it was left with nothing running."""
    from llm_support import OPTIONS, assert_drained

    with LLM(str(tiny_model_path), **OPTIONS) as llm:
        yield llm
        assert_drained(llm)
