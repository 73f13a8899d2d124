"""Checkpoints of each quantized format, written here as their tools write them, and what octavo
makes of them: the weights that an independent reading gives, kept or expanded, and the logits of
the expanded model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from octavo.errors import UnsupportedModelError, WeightsError
from octavo.layers.fp8 import Fp8Weight
from octavo.layers.grouped import GroupedWeight
from octavo.layers.quantized import QuantizedWeight
from octavo.quantization import Quantization, read_quantization
from octavo.weights.load import open_model
from octavo.weights.locate import locate
from octavo.weights.quantized import QuantizedDummySource, QuantizedSource
from octavo.weights.safetensors_source import SafetensorsSource

Parts = dict[str, Tensor]


class Written(NamedTuple):
    """A linear's tensors in the file, and what they stand for."""

    parts: Parts
    """End of the name -> tensor."""
    weight: Tensor
    """[out_features, in_features] float64."""


class Format(NamedTuple):
    config: dict[str, Any]
    write: Callable[[Tensor, torch.Generator], Written]


# -- int, a number at a time: slow, and nothing like the code under test


def _codes(weight: Tensor, bits: int, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """([out, in] codes, [out, groups] float16 scales, [out, groups] zero points)."""
    num_rows, width = weight.shape
    groups = weight.view(num_rows, -1, group)
    low, high = groups.amin(2), groups.amax(2)
    most = 2**bits - 1
    if symmetric:
        scales = (groups.abs().amax(2) / (most // 2)).half()
        zeros = torch.full(scales.shape, 2 ** (bits - 1), dtype=torch.int64)
    else:
        scales = ((high - low).clamp(min=1e-4) / most).half()
        zeros = (-low / scales.float()).round().clamp(0, most).long()
    codes = (groups / scales.float()[..., None]).round() + zeros[..., None]
    return codes.clamp(0, most).long().view(num_rows, width), scales, zeros


def _wide(codes: Tensor, scales: Tensor, zeros: Tensor, group_of: Tensor) -> Tensor:
    return (codes - zeros[:, group_of]).double() * scales.double()[:, group_of]


def _word(codes: list[int], bits: int) -> int:
    """Codes from the lowest bits up, as a signed number of 32 bits."""
    word = sum(code << (bits * i) for i, code in enumerate(codes))
    return word - 2**32 if word >= 2**31 else word


def _packed_columns(matrix: Tensor, bits: int, order: tuple[int, ...] = ()) -> Tensor:
    """Neighbouring columns in a word, in some order."""
    per_word = 32 // bits
    rows = []
    for row in matrix.tolist():
        row = row + [0] * (-len(row) % per_word)
        parts = [row[i : i + per_word] for i in range(0, len(row), per_word)]
        rows.append([_word([p[i] for i in order] if order else p, bits) for p in parts])
    return torch.tensor(rows, dtype=torch.int32)


def _awq(weight: Tensor, generator: torch.Generator) -> Written:
    codes, scales, zeros = _codes(weight, 4, 32, symmetric=False)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {
        ".qweight": _packed_columns(codes.t(), 4, order),
        ".qzeros": _packed_columns(zeros.t(), 4, order),
        ".scales": scales.t().contiguous(),
    }
    return Written(parts, _wide(codes, scales, zeros, torch.arange(codes.shape[1]) // 32))


def _gptq(
    bits: int = 4, group: int = 32, v2: bool = False, act_order: bool = False
) -> Callable[[Tensor, torch.Generator], Written]:
    def write(weight: Tensor, generator: torch.Generator) -> Written:
        width = weight.shape[1]
        size = width if group < 0 else group
        group_of = torch.arange(width) // size
        if act_order:
            group_of = group_of[torch.randperm(width, generator=generator)]
        order = group_of.argsort(stable=True)
        sorted_codes, scales, zeros = _codes(weight[:, order], bits, size, symmetric=v2)
        codes = torch.empty_like(sorted_codes)
        codes[:, order] = sorted_codes
        stored = zeros if v2 else (zeros - 1) % 2**bits
        parts = {
            ".qweight": _packed_columns(codes, bits).t().contiguous(),
            ".qzeros": _packed_columns(stored.t(), bits),
            ".scales": scales.t().contiguous(),
            ".g_idx": group_of.to(torch.int32),
        }
        return Written(parts, _wide(codes, scales, zeros, group_of))

    return write


def _packed(symmetric: bool) -> Callable[[Tensor, torch.Generator], Written]:
    def write(weight: Tensor, generator: torch.Generator) -> Written:
        codes, scales, zeros = _codes(weight, 4, 32, symmetric)
        parts = {
            ".weight_packed": _packed_columns(codes, 4),
            ".weight_scale": scales.bfloat16(),
            ".weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            parts[".weight_zero_point"] = _packed_columns(zeros.t(), 4).t().contiguous()
        wide = _wide(codes, scales.bfloat16(), zeros, torch.arange(codes.shape[1]) // 32)
        return Written(parts, wide)

    return write


# -- fp8


def _fp8(
    kind: str, name: str = ".weight_scale", static: bool = False
) -> Callable[[Tensor, torch.Generator], Written]:
    def write(weight: Tensor, generator: torch.Generator) -> Written:
        if kind == "tensor":
            scale = (weight.abs().amax() / 448).float().reshape(1)
            wide = scale.double().expand(weight.shape)
        elif kind == "channel":
            scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
            wide = scale.double().expand(weight.shape)
        else:
            blocks = [-(-size // 128) for size in weight.shape]
            scale = torch.rand(blocks, generator=generator) / 2000 + 1e-4
            rows, columns = (torch.arange(size) // 128 for size in weight.shape)
            wide = scale.double()[rows][:, columns]
        codes = (weight.double() / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        parts = {".weight": codes, name: scale}
        if static:
            parts[".input_scale"] = torch.rand((), generator=generator) / 100 + 1e-3
        return Written(parts, codes.double() * wide)

    return write


def _compressed(
    weights: dict[str, Any], inputs: dict[str, Any] | None, form: str
) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
        "config_groups": {"group_0": group | {"output_activations": None}},
        "kv_cache_scheme": None, "quantization_status": "compressed",
    }  # fmt: skip


def _float8(**other: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "symmetric": True, **other}


_INT4 = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
_TOKEN, _TENSOR = (
    _float8(strategy="token", dynamic=True), _float8(strategy="tensor", dynamic=False)
)  # fmt: skip

FORMATS = {
    "awq": Format(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        _awq,
    ),
    "gptq": Format(_GPTQ, _gptq()),
    "gptq v2": Format(_GPTQ | {"sym": True, "checkpoint_format": "gptq_v2"}, _gptq(v2=True)),
    "gptq by activation": Format(_GPTQ | {"desc_act": True}, _gptq(act_order=True)),
    "gptq whole rows": Format(_GPTQ | {"group_size": -1}, _gptq(group=-1)),
    "gptq 8 bits": Format(_GPTQ | {"bits": 8}, _gptq(bits=8)),
    "gptq 2 bits": Format(_GPTQ | {"bits": 2}, _gptq(bits=2)),
    "packed": Format(
        _compressed(_INT4 | {"symmetric": True}, None, "pack-quantized"), _packed(True)
    ),
    "packed with zero points": Format(
        _compressed(_INT4 | {"symmetric": False}, None, "pack-quantized"), _packed(False)
    ),
    "fp8 tensors, static": Format(
        {"quant_method": "fp8", "activation_scheme": "static"}, _fp8("tensor", static=True)
    ),
    "fp8 tensors": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic"}, _fp8("tensor")
    ),
    "fp8 blocks": Format(
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
        _fp8("block", ".weight_scale_inv"),
    ),
    "compressed fp8 channels": Format(
        _compressed(_float8(strategy="channel"), _TOKEN, "float-quantized"), _fp8("channel")
    ),
    "compressed fp8 tensors, static": Format(
        _compressed(_float8(strategy="tensor"), _TENSOR, "float-quantized"),
        _fp8("tensor", static=True),
    ),
}  # fmt: skip

_LAYER = {
    "self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64),
    "self_attn.o_proj": (64, 64), "mlp.gate_proj": (96, 64), "mlp.up_proj": (96, 64),
    "mlp.down_proj": (64, 96),
}  # fmt: skip


class Checkpoint(NamedTuple):
    quantized: Path
    expanded: Path
    """The same weights in float32."""
    weights: dict[str, Tensor]
    """Of quantized linears, in float64."""


@pytest.fixture(params=FORMATS)
def checkpoint(
    request: pytest.FixtureRequest, tiny_weights_path: Path, tmp_path: Path
) -> Checkpoint:
    """The tiny model with its linears quantized, in two shards, and expanded again."""
    form = FORMATS[request.param]
    generator = torch.Generator().manual_seed(0)
    plain = load_file(tiny_weights_path / "model.safetensors")
    quantized, expanded, weights = {}, {}, {}
    for name, tensor in plain.items():
        stem = name.removesuffix(".weight")
        if not stem.endswith("_proj"):
            quantized[name] = expanded[name] = tensor
            continue
        written = form.write(tensor, generator)
        quantized |= {stem + end: part.contiguous() for end, part in written.parts.items()}
        weights[name] = written.weight
        expanded[name] = written.weight.float()
    config = json.loads((tiny_weights_path / "config.json").read_text())
    folders = tmp_path / "quantized", tmp_path / "expanded"
    for folder in folders:
        folder.mkdir()
    # parts of a linear may lie in different shards
    names = sorted(quantized)
    shards = [{n: quantized[n] for n in names[i::2]} for i in range(2)]
    index = {}
    for i, shard in enumerate(shards):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        save_file(shard, folders[0] / file)
        index |= dict.fromkeys(shard, file)
    (folders[0] / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folders[0] / "config.json").write_text(
        json.dumps(config | {"quantization_config": form.config})
    )
    save_file(expanded, folders[1] / "model.safetensors")
    (folders[1] / "config.json").write_text(json.dumps(config))
    return Checkpoint(*folders, weights)


def test_weights_are_those_of_another_reading(checkpoint: Checkpoint) -> None:
    opened = open_model(locate(str(checkpoint.quantized)))
    source = opened.source
    assert source is not None and opened.quantization is not None
    shapes = source.shapes()
    assert {n: tuple(t.shape) for n, t in checkpoint.weights.items()}.items() <= shapes.items()
    assert not any("scale" in name or "qweight" in name for name in shapes)
    seen, num_bytes = set(), 0
    for name, weight, size in source.tensors(torch.float32):
        assert isinstance(weight, Tensor)
        seen.add(name)
        num_bytes += size
        if name in checkpoint.weights:
            expected = checkpoint.weights[name].float()
            torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-9)
    assert seen == set(shapes)
    assert num_bytes == source.num_bytes


def test_kept_weights_expand_to_the_same(checkpoint: Checkpoint) -> None:
    source = open_model(locate(str(checkpoint.quantized))).source
    assert source is not None
    kept = 0
    for name, weight, _ in source.tensors(torch.float32, lambda name: "mlp" in name):
        assert isinstance(weight, QuantizedWeight) == ("mlp." in name)
        if not isinstance(weight, QuantizedWeight):
            continue
        kept += 1
        assert weight.shape == tuple(checkpoint.weights[name].shape)
        expected = checkpoint.weights[name].float()
        on_device = weight.to(torch.device("cpu"))
        assert isinstance(on_device, Fp8Weight | GroupedWeight)
        for held in (weight, on_device):
            torch.testing.assert_close(
                held.dequantize(torch.float32), expected, rtol=1e-6, atol=1e-9
            )
        assert torch.equal(
            on_device.rows(slice(3, 9)).dequantize(torch.float32),
            weight.dequantize(torch.float32)[3:9],
        )
        assert weight.num_bytes < 4 * expected.numel()
    assert kept == 6


def test_gate_and_up_join(checkpoint: Checkpoint) -> None:
    source = open_model(locate(str(checkpoint.quantized))).source
    assert source is not None
    found = {
        name.split(".")[-2]: weight
        for name, weight, _ in source.tensors(None, lambda name: "layers.0.mlp" in name)
        if isinstance(weight, QuantizedWeight)
    }
    both = found["gate_proj"].joined_with([found["up_proj"]])
    if getattr(found["gate_proj"].to(torch.device("cpu")), "order", None) is not None:
        assert both is None  # each has groups of its own here
        return
    assert both is not None
    expected = torch.cat([found[p].dequantize(torch.float32) for p in ("gate_proj", "up_proj")])
    assert torch.equal(both.dequantize(torch.float32), expected)


def test_logits_are_those_of_the_expanded_model(checkpoint: Checkpoint) -> None:
    from octavo import LLM, SamplingParams

    answers = []
    for folder in (checkpoint.quantized, checkpoint.expanded):
        with LLM(
            model=str(folder), dtype="float32", device="cpu", skip_tokenizer_init=True,
            num_gpu_blocks_override=8, max_num_seqs=1,
        ) as llm:  # fmt: skip
            assert llm.config.quantization == "none"
            params = SamplingParams(
                temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=1, detokenize=False
            )
            (output,) = llm.generate([[5, 80, 33, 7, 200]], params, use_tqdm=False)
            assert output.prompt_logprobs is not None
            answers.append(
                (
                    output.outputs[0].token_ids,
                    [max(p.logprob for p in of.values()) for of in output.prompt_logprobs[1:]],
                )
            )
    assert answers[0][0] == answers[1][0]
    assert answers[0][1] == pytest.approx(answers[1][1], abs=1e-4)


# -- damage, and what is refused


def _write(folder: Path, tensors: Parts) -> SafetensorsSource:
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    return SafetensorsSource(folder, quantized=True)


def test_missing_and_contradicting_parts(tmp_path: Path) -> None:
    gptq = Quantization("gptq", "int", bits=4, group_size=32, zero_offset=1)
    parts = _gptq()(torch.randn(16, 64), torch.Generator()).parts
    tensors = {"a" + end: part for end, part in parts.items()}
    without = {name: t for name, t in tensors.items() if name != "a.scales"}
    with pytest.raises(WeightsError, match="a has no scales beside its codes"):
        QuantizedSource(_write(tmp_path, without), gptq)
    with pytest.raises(WeightsError, match=r"scales \[2, 8\] for a weight of \[16, 64\]"):
        QuantizedSource(_write(tmp_path, tensors | {"a.scales": tensors["a.scales"][:, :8]}), gptq)
    few = QuantizedSource(_write(tmp_path, tensors | {"a.scales": tensors["a.scales"][:1]}), gptq)
    with pytest.raises(WeightsError, match="for 2 groups of 16 outputs"):
        list(few.tensors())
    uneven = tensors | {"a.g_idx": torch.zeros(64, dtype=torch.int32)}
    with pytest.raises(WeightsError, match="g_idx does not put 32 inputs"):
        list(QuantizedSource(_write(tmp_path, uneven), gptq).tensors())
    fp8 = Quantization("fp8", "fp8", static_input=True)
    codes = torch.zeros(4, 4).to(torch.float8_e4m3fn)
    with pytest.raises(WeightsError, match="no weight_scale beside its weight"):
        QuantizedSource(_write(tmp_path, {"a.weight": codes}), fp8)
    scaled = {"a.weight": codes, "a.weight_scale": torch.ones(())}
    with pytest.raises(WeightsError, match="no input_scale"):
        QuantizedSource(_write(tmp_path, scaled), fp8)
    wrong = scaled | {"a.weight_scale": torch.ones(3)}
    with pytest.raises(WeightsError, match=r"scales \[3\] for a weight of \[4, 4\]"):
        QuantizedSource(_write(tmp_path, wrong), fp8)


def test_quantized_tensors_need_a_quantization_config(tmp_path: Path) -> None:
    save_file({"a.qweight": torch.zeros(2, 2, dtype=torch.int32)}, tmp_path / "model.safetensors")
    with pytest.raises(
        UnsupportedModelError, match=r"has type I32, as quantized .* no quantization_config"
    ):
        SafetensorsSource(tmp_path)


REFUSED = {
    "bitsandbytes": ({"quant_method": "bitsandbytes"}, "known: awq, compressed-tensors, fp8, gptq"),
    "modelopt fp4": ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo='NVFP4'"),
    "awq gemv": ({"quant_method": "awq", "version": "gemv"}, "version='gemv'"),
    "awq 3 bits": ({"quant_method": "awq", "bits": 3}, "bits=3"),
    "gptq 3 bits": ({"quant_method": "gptq", "bits": 3}, "known: 2, 4, 8"),
    "gptq rules": ({"quant_method": "gptq", "dynamic": {"x": {"bits": 8}}}, "dynamic="),
    "group": ({"quant_method": "gptq", "group_size": 48}, "group_size=48"),
    "fp8 e5m2": ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt='e5m2'"),
    "fp8 blocks": ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "weight_block_size"),
    "static blocks": (
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "static"},
        "activation_scheme='static'",
    ),
    "int8 inputs": (
        _compressed(
            {"num_bits": 8, "type": "int", "strategy": "channel"}, {"num_bits": 8}, "int-quantized"
        ),
        "format='int-quantized'",
    ),
    "weights alone": (
        _compressed(_float8(strategy="tensor"), None, "float-quantized"), "input_activations"
    ),
    "no object": (["awq"], "must be an object"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_honoured_is_refused(name: str) -> None:
    table, message = REFUSED[name]
    with pytest.raises(UnsupportedModelError, match=r"^here: .*") as caught:
        read_quantization({"quantization_config": table}, "here")
    assert message in str(caught.value)


def test_readings() -> None:
    assert read_quantization({}, "here") is None
    found = {
        name: read_quantization({"quantization_config": form.config}, "here")
        for name, form in FORMATS.items()
    }
    assert found["gptq"] == Quantization(
        "gptq", "int", bits=4, group_size=32, symmetric=False, zero_offset=1
    )
    assert found["fp8 blocks"] == Quantization("fp8", "fp8", blocks=True)
    static = found["compressed fp8 tensors, static"]
    assert static is not None and static.static_input and static.ignores("lm_head")
    assert static.text == ("compressed-tensors, 8 bits (e4m3), scales of tensors, static inputs")
    pattern = Quantization("fp8", "fp8", ignored=("re:.*gate_proj", "q_proj"))
    assert pattern.ignores("model.layers.0.mlp.gate_proj")
    assert pattern.ignores("model.layers.0.self_attn.q_proj")
    assert not pattern.ignores("model.layers.0.mlp.up_proj")


@pytest.mark.parametrize("name", ["awq", "gptq whole rows", "fp8 tensors, static"])
def test_dummy_weights_of_a_quantized_shape(name: str) -> None:
    quantization = read_quantization({"quantization_config": FORMATS[name].config}, "here")
    assert quantization is not None
    spec = {f"model.layers.0.{n}.weight": shape for n, shape in _LAYER.items()}
    spec |= {"model.norm.weight": (64,), "model.embed_tokens.weight": (320, 64)}
    source = QuantizedDummySource(spec, quantization, seed=3)
    kept = dict((n, w) for n, w, _ in source.tensors(torch.float32, lambda name: True))
    assert {n for n, w in kept.items() if isinstance(w, QuantizedWeight)} == {
        n for n in spec if "_proj" in n
    }
    for name_, weight, _ in source.tensors(torch.float32):
        assert isinstance(weight, Tensor) and tuple(weight.shape) == spec[name_]
        held = kept[name_]
        if isinstance(held, QuantizedWeight):
            assert torch.equal(held.dequantize(torch.float32), weight)
            assert 0.015 < weight.std() < 0.025
