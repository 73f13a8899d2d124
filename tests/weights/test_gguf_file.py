"""The GGUF header reader: agrees with package gguf, and says what is wrong with damaged files."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from octavo.errors import ModelNotFoundError, OctavoError, UnsupportedModelError, WeightsError
from octavo.weights.gguf_file import GGUFFile

METADATA: dict[str, Any] = {
    "general.name": "tiny ünïcödé",
    "llama.block_count": 2,
    "llama.rope.freq_base": 10000.0,
    "a.flag": True,
    "tokenizer.ggml.tokens": ["<s>", "", "▁the", "\n"],
    "tokenizer.ggml.scores": [0.0, -1.5, -2.0, -3.0],
    "tokenizer.ggml.token_type": [3, 1, 1, 6],
}


@pytest.fixture
def tiny(write_gguf: Any) -> Path:
    rng = np.random.default_rng(0)
    tensors = {
        "model.embed_tokens.weight": rng.standard_normal((5, 32)).astype(np.float32),
        "model.norm.weight": rng.standard_normal(32).astype(np.float32),
    }
    path: Path = write_gguf(tensors, METADATA, quant=gguf.GGMLQuantizationType.Q8_0)
    return path


def test_agrees_with_package_gguf(tiny: Path) -> None:
    ours, theirs = GGUFFile(tiny), gguf.GGUFReader(tiny)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents(), key
    assert ours.metadata["general.architecture"] == ours.architecture == "llama"
    assert list(ours.tensors) == [t.name for t in theirs.tensors]
    for reference in theirs.tensors:
        tensor = ours.tensors[reference.name]
        assert tensor.shape == tuple(reversed(reference.shape.tolist()))
        assert tensor.offset == reference.data_offset
        assert np.array_equal(ours.data(tensor), reference.data.reshape(-1).view(np.uint8))


def test_every_truncation_is_a_weights_error(tiny: Path, tmp_path: Path) -> None:
    whole = tiny.read_bytes()
    cut = tmp_path / "cut.gguf"
    end = max(t.offset + t.num_bytes for t in GGUFFile(tiny).tensors.values())
    for size in [*range(0, 700, 7), end - 1]:
        cut.write_bytes(whole[:size])
        with pytest.raises(WeightsError, match=r"truncated|not a GGUF file"):
            GGUFFile(cut)
    cut.write_bytes(whole[:end])
    GGUFFile(cut)


def test_truncated_tensor_is_named_with_the_bytes(tiny: Path) -> None:
    whole = tiny.read_bytes()
    last = max(GGUFFile(tiny).tensors.values(), key=lambda t: t.offset)
    tiny.write_bytes(whole[: last.offset + 10])
    with pytest.raises(WeightsError, match=rf"'{last.name}' ends at byte .* download it again"):
        GGUFFile(tiny)


def test_flipped_bytes_never_escape_as_other_errors(tiny: Path, tmp_path: Path) -> None:
    whole, rng = tiny.read_bytes(), np.random.default_rng(1)
    header = min(t.offset for t in GGUFFile(tiny).tensors.values())
    damaged = tmp_path / "damaged.gguf"
    refused = 0
    for _ in range(400):
        data = bytearray(whole)
        for at in rng.integers(0, header, 3):
            data[at] = rng.integers(0, 256)
        damaged.write_bytes(data)
        try:
            GGUFFile(damaged)
        except OctavoError:
            refused += 1
    assert refused > 200


@pytest.mark.parametrize("content", [b"", b"GG", b"\x80\x02}q\x00" * 20, b"<!DOCTYPE html>" * 9])
def test_other_files_are_not_gguf(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(WeightsError, match="not a GGUF file"):
        GGUFFile(path)


@pytest.mark.parametrize(
    ("version", "said"), [(1, "version 1"), (9, "version 9"), (3 << 24, "big-endian")]
)
def test_versions(tmp_path: Path, version: int, said: str) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
    with pytest.raises(UnsupportedModelError, match=said):
        GGUFFile(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=r"none\.gguf"):
        GGUFFile(tmp_path / "none.gguf")


def test_huge_counts_end_at_once(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    key = b"\x01\0\0\0\0\0\0\0k"
    array = struct.pack("<IIQ", 9, 8, 1 << 60)  # an array of 2**60 strings
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + array)
    with pytest.raises(WeightsError, match="truncated or damaged"):
        GGUFFile(path)


def test_end_of_sequence_tokens_of_known_families(write_gguf: Any) -> None:
    tokens = ["a", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"]
    base = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1, 3, 3, 3],
        "tokenizer.ggml.eos_token_id": 2,
    }
    assert GGUFFile(write_gguf({}, base)).eos_token_ids == (2,)
    llama3 = GGUFFile(write_gguf({}, base | {"tokenizer.ggml.pre": "llama-bpe"}))
    assert llama3.eos_token_ids == (2, 1, 3)
    stated = GGUFFile(write_gguf({}, base | {"tokenizer.ggml.eot_token_id": 3}))
    assert stated.eos_token_ids == (2, 3)
