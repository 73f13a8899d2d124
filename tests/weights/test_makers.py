"""What the tools that quantize checkpoints write besides the weights: biases of zeros, scales of a
KV cache, rules for some layers."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_quantized_checkpoints import FORMATS

from octavo.engine.build import load_model
from octavo.engine.inspect import inspect_model
from octavo.errors import UnsupportedModelError, WeightsError
from octavo.quantization import Quantization, read_quantization
from octavo.weights.load import open_model
from octavo.weights.locate import locate
from octavo.weights.packed import StoredWeight

LAYERS = ("model.layers.0.", "model.layers.1.")


def write(
    source: Path, folder: Path, form: str, extra: dict[str, torch.Tensor], **config: Any
) -> Path:
    """The tiny model with its linears in `form`, further tensors, and fields of its quantization
    config."""
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        stem = name.removesuffix(".weight")
        if stem.endswith("_proj"):
            parts = FORMATS[form].write(tensor, generator).parts
            tensors |= {stem + end: part.contiguous() for end, part in parts.items()}
        else:
            tensors[name] = tensor
    folder.mkdir()
    save_file(tensors | extra, folder / "model.safetensors")
    table = json.loads((source / "config.json").read_text())
    table["quantization_config"] = FORMATS[form].config | config
    (folder / "config.json").write_text(json.dumps(table))
    return folder


def test_gptq_biases_of_zeros(tiny_weights_path: Path, tmp_path: Path) -> None:
    """AutoGPTQ writes a bias for every linear, whether its model has one or not."""
    biases = {
        f"{layer}{name}.bias": torch.zeros(size, dtype=torch.float16)
        for layer in LAYERS
        for name, size in (("self_attn.q_proj", 64), ("mlp.down_proj", 64))
    }
    plain = load_model(str(write(tiny_weights_path, tmp_path / "a", "gptq", {})), dtype="float32")
    folder = write(tiny_weights_path, tmp_path / "b", "gptq", biases)
    assert load_model(str(folder), dtype="float32").parameters_spec() == plain.parameters_spec()
    name = f"{LAYERS[1]}mlp.down_proj.bias"
    biases[name][5] = 1e-3
    folder = write(tiny_weights_path, tmp_path / "c", "gptq", biases)
    with pytest.raises(WeightsError, match=rf"has no {name}, and it is not zero"):
        load_model(str(folder), dtype="float32")


@pytest.mark.parametrize(
    ("form", "scheme", "names"),
    [
        ("fp8 tensors, static", "static", ("self_attn.k_scale", "self_attn.v_scale")),
        ("fp8 tensors", None, ("self_attn.kv_scale",)),
        (
            "compressed fp8 tensors, static",
            {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False},
            ("self_attn.k_proj.output_scale", "self_attn.v_proj.output_scale"),
        ),
    ],
    ids=["fp8", "one scale", "compressed-tensors"],
)
def test_scales_of_a_kv_cache_are_left_out(
    form: str, scheme: Any, names: tuple[str, ...], tiny_weights_path: Path, tmp_path: Path
) -> None:
    scales = {layer + name: torch.full((1,), 0.05) for layer in LAYERS for name in names}
    folder = write(tiny_weights_path, tmp_path / "a", form, scales, kv_cache_scheme=scheme)
    load_model(str(folder), dtype="float32")
    source = open_model(locate(str(folder))).source
    assert source is not None and not any("scale" in name for name in source.shapes())
    assert sum(num_bytes for _, _, num_bytes in source.tensors()) == source.num_bytes
    shown = inspect_model(str(folder)).quantization
    assert shown is not None
    assert shown.endswith("KV scales that are not used") == (scheme is not None)


@pytest.mark.parametrize("beside", [False, True], ids=["in config.json", "in a file of its own"])
def test_fp8_of_modelopt(beside: bool, tiny_weights_path: Path, tmp_path: Path) -> None:
    scales = {
        f"{layer}self_attn.{name}_proj.{name}_scale": torch.ones(()) for layer in LAYERS
        for name in "kv"
    }  # fmt: skip
    native = write(tiny_weights_path, tmp_path / "a", "fp8 tensors, static", {})
    folder = write(tiny_weights_path, tmp_path / "b", "fp8 tensors, static", scales)
    config = json.loads((folder / "config.json").read_text())
    table = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
    if beside:
        del config["quantization_config"]
        own = {"producer": {"name": "modelopt"}, "quantization": table}
        own["quantization"] |= {"exclude_modules": ["lm_head", "*norm*"]}
        (folder / "hf_quant_config.json").write_text(json.dumps(own))
    else:
        config["quantization_config"] = table | {"quant_method": "modelopt", "ignore": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    opened, expected = open_model(locate(str(folder))), open_model(locate(str(native)))
    assert opened.quantization is not None and opened.quantization.static_input
    assert opened.quantization.kv_scales and opened.quantization.ignores("lm_head")
    assert opened.quantization.ignores("model.norm") == beside
    assert opened.source is not None and expected.source is not None
    read, wanted = (
        {name: tensor for name, tensor, _ in x.tensors(torch.float32)}
        for x in (opened.source, expected.source)
    )
    assert read.keys() == wanted.keys()
    for name, tensor in read.items():
        assert isinstance(tensor, torch.Tensor) and torch.equal(tensor, wanted[name])


def test_rules_for_some_layers() -> None:
    """GPTQModel's `dynamic`: `-:` leaves linears as they were, others change what is stated."""
    gptq = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}

    def read(rules: dict[str, Any]) -> Quantization:
        found = read_quantization({"quantization_config": gptq | {"dynamic": rules}}, "here")
        assert found is not None
        return found

    found = read({r"-:.*\.mlp\.gate$": {}, "+:.*down_proj": {"bits": 4, "damp_percent": 0.1}})
    assert found.ignores("model.layers.3.mlp.gate")
    assert not found.ignores("model.layers.3.mlp.gate_proj")
    assert not found.ignores("model.layers.3.mlp.down_proj")
    for changes in ({"bits": 8}, {"group_size": 128}, {"desc_act": True}):
        with pytest.raises(UnsupportedModelError, match=r"dynamic=\{'\+:\.\*down_proj'"):
            read({"+:.*down_proj": changes})
    with pytest.raises(UnsupportedModelError, match="nothing to repeat"):
        read({"-:*gate": {}})


def test_zero_points_of_another_height_are_damage() -> None:
    parts = FORMATS["gptq"].write(torch.randn(16, 64), torch.Generator()).parts
    parts[".qzeros"] = torch.cat([parts[".qzeros"]] * 2, 1)
    weight = StoredWeight("a", parts, (16, 64), Quantization("gptq", "int", bits=4, group_size=32))
    with pytest.raises(WeightsError, match=r"a: zero points of \[32, 2\] for 2 groups of 16"):
        weight.grouped()


def test_codes_in_words_of_another_size_are_damage(tiny_weights_path: Path, tmp_path: Path) -> None:
    folder = write(tiny_weights_path, tmp_path / "a", "gptq", {})
    tensors = load_file(folder / "model.safetensors")
    name = f"{LAYERS[0]}mlp.up_proj.qzeros"
    tensors[name] = tensors[name].long()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"mlp\.up_proj has qzeros of type I64, and not I32"):
        open_model(locate(str(folder)))


def test_odd_values_are_refused_in_words_or_mean_something() -> None:
    odd = (None, -1, 0.5, True, "x", [1], {"a": 1}, ["re:("], 2**70)

    def tables(table: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for key, value in table.items():
            yield from (table | {key: other} for other in odd)
            if isinstance(value, dict):
                yield from (table | {key: other} for other in tables(value))

    for form in FORMATS.values():
        for table in tables(form.config | {"dynamic": {"-:a": {}}, "ignore": ["a"]}):
            with contextlib.suppress(UnsupportedModelError):
                found = read_quantization({"quantization_config": table}, "here")
                assert found is None or (found.text and not found.ignores("b"))
