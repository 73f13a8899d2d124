"""Weights that stay as the file packs them, types that are written by hand, and split files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Quant
from kquants import quantize
from to_gguf import random_checkpoint, to_gguf

from octavo.errors import ModelNotFoundError, WeightsError
from octavo.layers.gguf_weight import GGUFWeight
from octavo.weights.gguf import GGUFSource
from octavo.weights.gguf_arch import read_gguf_arch
from octavo.weights.gguf_file import GGUFFile
from octavo.weights.load import open_model
from octavo.weights.locate import from_folder, locate

STEPS = {
    "F32": 0.0, "F16": 2**-11, "BF16": 2**-8, "Q8_0": 1 / 220, "Q4_0": 1 / 7, "Q4_1": 1 / 14,
    "Q5_0": 1 / 15, "Q5_1": 1 / 30, "Q4_K": 1 / 15, "Q5_K": 1 / 31, "Q6_K": 1 / 60,
}  # fmt: skip
"""By how much a value may differ, as a part of the largest in its row."""


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A checkpoint whose rows are whole super-blocks."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=256, intermediate_size=512, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    return random_checkpoint(config, tmp_path_factory.mktemp("wide")), config


@pytest.mark.parametrize("kind", STEPS)
def test_every_type_loads_within_its_error_and_exactly_as_package_gguf(
    kind: str, wide: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, config = wide
    path = to_gguf(folder, tmp_path / "x.gguf", "llama", config, Quant[kind], quantize)
    truth = open_model(locate(str(folder))).source
    assert truth is not None
    exact = dict((n, t) for n, t, _ in truth.tensors())
    read = dict((n, t) for n, t, _ in GGUFSource(path).tensors())
    kept = dict((n, t) for n, t, _ in GGUFSource(path).tensors(keep=lambda name: True))
    assert read.keys() == exact.keys()
    for name, tensor in read.items():
        original = exact[name]
        assert isinstance(original, torch.Tensor) and isinstance(tensor, torch.Tensor)
        error = (tensor.float() - original).abs()
        bound = STEPS[kind] * original.abs().amax(-1, keepdim=True) if tensor.ndim > 1 else 0.0
        assert (error <= bound + 1e-7).all(), name
        weight = kept[name]
        if tensor.ndim < 2 or kind in ("F32", "F16", "BF16"):
            assert isinstance(weight, torch.Tensor)
            continue
        assert isinstance(weight, GGUFWeight) and weight.format == kind
        assert torch.equal(weight.dequantize(torch.float32), tensor), name
    # what package gguf makes of the same bytes; rows of q and k are in another order
    raw = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.ffn_down.weight")
    down = read["model.layers.0.mlp.down_proj.weight"]
    assert isinstance(down, torch.Tensor)
    assert np.array_equal(down.float().numpy(), gguf.dequantize(raw.data, raw.tensor_type))


def test_only_what_is_asked_for_stays_packed_and_owns_its_bytes(
    wide: tuple[Path, Any], tmp_path: Path
) -> None:
    folder, config = wide
    path = to_gguf(folder, tmp_path / "x.gguf", "llama", config, Quant.Q4_K, quantize)
    source = GGUFSource(path)
    got = {n: t for n, t, _ in source.tensors(torch.bfloat16, lambda name: "k_proj" in name)}
    name = "model.layers.0.self_attn.k_proj.weight"
    assert [n for n, t in got.items() if isinstance(t, GGUFWeight)] == [name]
    plain = dict((n, t) for n, t, _ in source.tensors(torch.bfloat16))
    kept = got[name]
    assert isinstance(kept, GGUFWeight)
    assert kept.num_bytes == 128 * 144 and kept.shape == (128, 256)
    assert torch.equal(kept.dequantize(torch.bfloat16), plain[name])
    assert source.quantizations() == {"Q4_K": source.num_bytes - 3 * 256 * 4}
    path.write_bytes(b"")  # nothing is read from the file any more
    assert torch.equal(kept.dequantize(torch.bfloat16), plain[name])


def q8(rows: int, columns: int = 64, seed: int = 0, kind: Quant = Quant.Q8_0) -> GGUFWeight:
    values = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    return GGUFWeight.of(torch.from_numpy(gguf.quantize(values, kind)), int(kind), columns)


def test_rows_are_taken_joined_and_moved_without_expanding() -> None:
    weight = q8(6)
    values = weight.dequantize(torch.float32)
    assert torch.equal(weight.rows(slice(1, 4)).dequantize(torch.float32), values[1:4])
    order = torch.tensor([5, 0, 0, 3])
    assert torch.equal(weight.rows(order).dequantize(torch.float32), values[order])
    assert weight.rows(order).shape == (4, 64)
    other = q8(3, seed=1)
    joined = weight.joined_with([other, weight])
    assert joined is not None and joined.shape == (15, 64)
    expected = torch.cat([values, other.dequantize(torch.float32), values])
    assert torch.equal(joined.dequantize(torch.float32), expected)
    assert joined.num_bytes == 15 * 2 * 34
    moved = weight.to(torch.device("cpu"))
    assert moved.device.type == "cpu" and torch.equal(moved.raw, weight.raw)


def test_weights_of_different_formats_or_widths_are_not_joined() -> None:
    assert q8(2).joined_with([q8(2, kind=Quant.Q4_0)]) is None
    assert q8(2).joined_with([q8(2, columns=32)]) is None


def test_experts_and_fused_weights_are_slices_of_what_is_packed(tmp_path: Path) -> None:
    size = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
            "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0}  # fmt: skip
    cases = (
        ("llama", transformers.MixtralConfig(**size, num_local_experts=4), "experts.3.up_proj"),
        ("phi3", transformers.Phi3Config(**size), "self_attn.v_proj"),
    )
    for arch, config, part in cases:
        folder = random_checkpoint(config, tmp_path / arch)
        path = to_gguf(folder, tmp_path / f"{arch}.gguf", arch, config, Quant.Q8_0)
        plain = dict((n, t) for n, t, _ in GGUFSource(path).tensors())
        kept = {n: t for n, t, _ in GGUFSource(path).tensors(keep=lambda name: True)}
        (name,) = (n for n in kept if part in n)
        assert isinstance(kept[name], GGUFWeight)
        for weight, tensor in kept.items():
            if isinstance(tensor, GGUFWeight):
                assert torch.equal(tensor.dequantize(torch.float32), plain[weight]), weight


Split = Callable[[int], list[Path]]


@pytest.fixture
def split(wide: tuple[Path, Any], tmp_path: Path) -> Split:
    """A model in several files, as llama-gguf-split leaves it."""
    folder, config = wide
    whole = to_gguf(folder, tmp_path / "whole.gguf", "llama", config, Quant.Q8_0)

    def make(count: int, stated: int | None = None) -> list[Path]:
        reader = gguf.GGUFReader(whole)
        paths = []
        for part in range(count):
            path = tmp_path / f"m-{part + 1:05}-of-{count:05}.gguf"
            writer = gguf.GGUFWriter(path, "llama")
            if part == 0:
                for key, value in GGUFFile(whole).metadata.items():
                    if key.startswith("llama."):
                        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
                        add(key, value)
            writer.add_uint16("split.no", part)
            writer.add_uint16("split.count", count)
            writer.add_int32("split.tensors.count", stated or len(reader.tensors))
            for tensor in reader.tensors[part::count]:
                writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            paths.append(path)
        return paths

    return make


def test_split_model_is_read_as_one_from_any_of_its_files(split: Split, tmp_path: Path) -> None:
    whole = {n: t for n, t, _ in GGUFSource(tmp_path / "whole.gguf").tensors()}
    for path in split(3):
        file = GGUFFile(path)
        assert read_gguf_arch(file) == read_gguf_arch(GGUFFile(tmp_path / "whole.gguf"))
        read = {n: t for n, t, _ in GGUFSource(file).tensors()}
        assert read.keys() == whole.keys()
        assert all(torch.equal(read[n], whole[n]) for n in whole)  # type: ignore[arg-type]
    (tmp_path / "whole.gguf").unlink()
    assert from_folder(tmp_path, "auto", "m").path.name == "m-00001-of-00003.gguf"


def test_missing_or_renamed_part_of_a_split_model_is_named(split: Split, tmp_path: Path) -> None:
    paths = split(3)
    paths[1].unlink()
    with pytest.raises(WeightsError, match=r"1 of the 3 parts.*m-00002-of-00003\.gguf"):
        GGUFFile(paths[0])
    with pytest.raises(ModelNotFoundError, match="m-00002-of-00003"):
        GGUFFile(paths[1])
    renamed = paths[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(WeightsError, match=r"one of 3 parts.*NAME-00001-of-00003"):
        GGUFFile(renamed)


def test_split_model_of_two_versions_is_refused(split: Split) -> None:
    with pytest.raises(WeightsError, match="tensors instead of 99"):
        GGUFFile(split(2, stated=99)[0])
