"""safetensors folders: single, sharded, and each way they can be broken."""

from __future__ import annotations

import json
import struct
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from octavo.errors import ModelNotFoundError, UnsupportedModelError, WeightsError
from octavo.layers.quantized import Weight
from octavo.weights.load import load_weights, open_model
from octavo.weights.locate import from_folder
from octavo.weights.safetensors_source import SafetensorsSource


@pytest.fixture
def sharded(tmp_path: Path, tiny_model: Any) -> Path:
    tiny_model("llama").save_pretrained(tmp_path / "m", max_shard_size="40KB")
    assert len(list((tmp_path / "m").glob("*.safetensors"))) > 2
    return tmp_path / "m"


@pytest.mark.parametrize("shard_size", ["40KB", "5GB"])
def test_gives_back_what_transformers_saved(
    tmp_path: Path, tiny_model: Any, shard_size: str
) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "m", max_shard_size=shard_size)
    source = SafetensorsSource(tmp_path / "m")
    state = model.state_dict()
    assert source.shapes() == {k: tuple(v.shape) for k, v in state.items()}
    read = {name: tensor for name, tensor, _ in source.tensors()}
    assert read.keys() == state.keys()
    assert all(torch.equal(read[k], v) for k, v in state.items())
    assert source.num_bytes == sum(n for *_, n in source.tensors())
    assert source.num_bytes == sum(v.numel() * 4 for v in state.values())


def test_matrices_come_in_the_dtype_asked_for(sharded: Path) -> None:
    for name, tensor, _ in SafetensorsSource(sharded).tensors(torch.bfloat16):
        assert tensor.dtype == (torch.float32 if "norm" in name else torch.bfloat16)


def test_missing_shards_are_listed(sharded: Path) -> None:
    names = sorted(p.name for p in sharded.glob("*.safetensors"))
    for name in names[1:3]:
        (sharded / name).unlink()
    with pytest.raises(WeightsError, match=f"2 of {len(names)} shards.*{names[1]}, {names[2]}"):
        SafetensorsSource(sharded)


def test_truncated_file_says_by_how_much(sharded: Path) -> None:
    victim = sorted(sharded.glob("*.safetensors"))[1]
    size = victim.stat().st_size
    victim.write_bytes(victim.read_bytes()[: size - 100])
    with pytest.raises(
        WeightsError, match=rf"{victim.name} is truncated.*{size:,}.*{size - 100:,}"
    ):
        SafetensorsSource(sharded)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x10",
        b"<html>404 not found</html>",
        struct.pack("<Q", 50) + b"{}",
        struct.pack("<Q", 4) + b"nope",
        struct.pack("<Q", 8) + b'{"a": 3}',
        struct.pack("<Q", 2) + b"[]",
    ],
)
def test_garbage_is_a_weights_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightsError, match=r"model\.safetensors"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": 3}'])
def test_damaged_index(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(WeightsError, match=r"index\.json is damaged"):
        SafetensorsSource(tmp_path)


def test_index_must_not_lead_out_of_its_folder(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "../other/model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightsError, match="outside its folder"):
        SafetensorsSource(tmp_path)


def test_quantized_tensors_are_refused(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(4, 4, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="'w' has type I8"):
        SafetensorsSource(tmp_path)


def test_two_files_with_the_same_tensor(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_file({"w": torch.zeros(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(WeightsError, match="'w' is both in"):
        SafetensorsSource(tmp_path)


def test_mistral_original_copy_is_not_read_twice(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(2)}, tmp_path / "part.safetensors")
    save_file({"w": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    assert SafetensorsSource(tmp_path).shapes() == {"w": (2,)}


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match="no safetensors file"):
        SafetensorsSource(tmp_path)


class Bar:
    """Progress that remembers what it was told."""

    def __init__(self) -> None:
        self.total: int | None = None
        self.done: list[int] = []

    def start(self, what: str, total_bytes: int | None = None) -> None:
        self.total = total_bytes

    def update(self, done_bytes: int) -> None:
        self.done.append(done_bytes)

    def finish(self) -> None:
        self.done.append(-1)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_one_tensor_at_a_time_is_alive(sharded: Path, dtype: torch.dtype | None) -> None:
    """A model that drops what it is given shows what the loader itself holds on to."""
    source = open_model(from_folder(sharded, "auto", "m")).source
    assert source is not None
    alive: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    peak = 0

    class Dropping:
        def parameters_spec(self) -> dict[str, tuple[int, ...]]:
            return source.shapes()

        def load(self, name: str, weight: Weight) -> None:
            nonlocal peak
            assert isinstance(weight, torch.Tensor)
            alive.add(weight)
            peak = max(peak, sum(t.numel() * t.element_size() for t in alive))

    bar, arch = Bar(), open_model(from_folder(sharded, "auto", "m")).arch
    load_weights(Dropping(), source, arch, dtype=dtype, progress=bar)
    largest = max(int(np.prod(shape)) for shape in source.shapes().values())
    assert peak <= 2 * 4 * largest  # the one handed over, and the next one read meanwhile
    assert peak < source.num_bytes / 4
    assert bar.total == source.num_bytes == bar.done[-2]
    assert bar.done[:-1] == sorted(bar.done[:-1]) and bar.done[-1] == -1
    assert len(bar.done) == len(source.shapes()) + 1
