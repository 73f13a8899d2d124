"""GGUF: shapes, names, permutation and dequantization against transformers and package gguf."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Quant
from to_gguf import permute

from octavo.arch import RopeConfig
from octavo.errors import UnsupportedModelError, WeightsError
from octavo.hf_config import read_hf_config
from octavo.weights.gguf import GGUFSource
from octavo.weights.gguf_arch import read_gguf_arch
from octavo.weights.gguf_file import GGUFFile
from octavo.weights.gguf_parts import hf_name
from octavo.weights.gguf_rope import fit_llama3, llama3_factors

Metadata = Callable[..., dict[str, Any]]


def arrays(model: Any, tied: bool) -> dict[str, np.ndarray]:
    state = {k: v.detach().numpy() for k, v in model.state_dict().items()}
    if tied:
        state.pop("lm_head.weight")
    return state


FAMILIES = {
    "llama": "llama", "llama-bias": "llama", "llama-tied": "llama", "mistral": "llama",
    "qwen2": "qwen2", "qwen3": "qwen3",
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_families_give_back_transformers_tensors_and_shape(
    family: str, tiny_configs: Any, tiny_model: Any, write_gguf: Any, llama_metadata: Metadata
) -> None:
    arch_name, config = FAMILIES[family], tiny_configs[family]
    state = arrays(tiny_model(family), tied=family == "llama-tied")
    stored = dict(state)
    if arch_name == "llama":
        for name, values in state.items():
            if ".q_proj." in name or ".k_proj." in name:
                stored[name] = permute(values, 4 if ".q_proj." in name else 2)
    window = {"attention.sliding_window": 8} if family == "mistral" else {}
    path = write_gguf(stored, llama_metadata(arch_name, **window), arch=arch_name)

    file = GGUFFile(path)
    arch = read_gguf_arch(file)
    expected = read_hf_config(config.to_dict())
    for field in (
        "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
        "num_kv_heads", "head_dim", "max_position_embeddings", "norm_eps", "rope",
        "sliding_windows", "qkv_bias", "o_bias", "mlp_bias", "qk_norm", "tie_word_embeddings",
    ):  # fmt: skip
        assert getattr(arch, field) == getattr(expected, field), field

    read = {name: tensor for name, tensor, _ in GGUFSource(file).tensors()}
    assert read.keys() == state.keys()
    for name, values in state.items():
        assert np.array_equal(read[name].numpy(), values), name


def dequantizable() -> list[Quant]:
    kinds = []
    for kind in Quant:
        try:
            gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError:
            continue
        kinds.append(kind)
    assert len(kinds) > 20
    return kinds


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # random scales overflow
@pytest.mark.parametrize("kind", dequantizable(), ids=lambda kind: kind.name)
def test_every_quantization_equals_package_gguf(
    kind: Quant, tmp_path: Path, write_gguf: Any, llama_metadata: Metadata
) -> None:
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    columns = max(block, 256)
    rng = np.random.default_rng(int(kind))
    packed = rng.integers(0, 256, (6, columns // block * block_bytes), dtype=np.uint8)
    if kind in (Quant.F32, Quant.F16):
        packed = rng.standard_normal((6, columns)).astype(
            np.float32 if kind == Quant.F32 else np.float16
        )
    expected = gguf.dequantize(packed, kind).reshape(6, columns)
    q = np.zeros((64, 64), np.float32)
    path = write_gguf(
        {"model.embed_tokens.weight": q, "model.layers.0.self_attn.q_proj.weight": q},
        llama_metadata(),
        raw={"blk.0.ffn_up.weight": (packed, kind)},
    )
    tensors = {n: t for n, t, _ in GGUFSource(path).tensors()}
    up = tensors["model.layers.0.mlp.up_proj.weight"]
    assert np.array_equal(up.float().numpy(), expected, equal_nan=True)
    assert up.dtype == {Quant.F16: torch.float16, Quant.BF16: torch.bfloat16}.get(
        kind, torch.float32
    )


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantized_model_is_near_the_original(
    kind: str, tiny_model: Any, write_gguf: Any, llama_metadata: Metadata
) -> None:
    state = arrays(tiny_model("qwen2"), tied=False)
    path = write_gguf(state, llama_metadata("qwen2"), arch="qwen2", quant=Quant[kind])
    steps = {"F16": 2**-10, "BF16": 2**-7, "Q8_0": 1 / 127, "Q4_0": 1 / 7, "Q4_1": 1 / 7,
             "Q5_0": 1 / 15, "Q5_1": 1 / 15}[kind]  # fmt: skip
    for name, tensor, _ in GGUFSource(path).tensors():
        values = state[name]
        bound = 0.0 if values.ndim == 1 else steps * np.abs(values).max()
        assert np.abs(tensor.float().numpy() - values).max() <= bound, name


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("kind", [Quant.F32, Quant.F16, Quant.BF16, Quant.Q8_0])
def test_matrices_come_in_the_dtype_asked_for_and_vectors_exact(
    kind: Quant, tiny_model: Any, write_gguf: Any, llama_metadata: Metadata
) -> None:
    path = write_gguf(
        arrays(tiny_model("qwen2"), tied=False), llama_metadata("qwen2"), "qwen2", kind
    )
    exact = {n: t for n, t, _ in GGUFSource(path).tensors()}
    for name, tensor, _ in GGUFSource(path).tensors(torch.bfloat16):
        if tensor.ndim > 1:
            assert tensor.dtype == torch.bfloat16
            assert torch.equal(tensor, exact[name].bfloat16())
        else:
            assert torch.equal(tensor, exact[name])


def test_names_are_mapped_and_unknown_ones_kept() -> None:
    assert hf_name("blk.11.attn_output.weight") == "model.layers.11.self_attn.o_proj.weight"
    assert hf_name("output.weight") == "lm_head.weight"
    assert hf_name("blk.0.ffn_gate_exps.weight") == "blk.0.ffn_gate_exps.weight"
    assert hf_name("v.patch_embd.weight") == "v.patch_embd.weight"


@pytest.fixture
def qwen(write_gguf: Any, llama_metadata: Metadata) -> Callable[..., GGUFFile]:
    """A file whose metadata is what the test says."""

    def make(arch: str = "qwen2", extra: dict[str, Any] | None = None, **more: Any) -> GGUFFile:
        q = np.zeros((64, 64), np.float32)
        tensors = {"model.embed_tokens.weight": q, "model.layers.0.self_attn.q_proj.weight": q}
        metadata = llama_metadata(arch, **more)
        metadata = {k: v for k, v in metadata.items() if v is not None}
        return GGUFFile(write_gguf(tensors | (extra or {}), metadata, arch=arch))

    return make


def test_unknown_architecture_lists_known_and_nearest(qwen: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'qwen2vl'.*known: llama.*nearest: qwen2"):
        read_gguf_arch(qwen("qwen2vl"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("expert_count", 8),
        ("logit_scale", 0.25),
        ("attention.head_count_kv", [2, 1]),
        ("attention.sliding_window_pattern", 4),
        ("attention.clamp_kqv", 8.0),
        ("attention.temperature_scale", 0.1),
        ("attention.causal", False),
    ],
)
def test_options_that_would_be_ignored_are_refused(qwen: Any, key: str, value: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=key):
        read_gguf_arch(qwen(**{key: value}))


def test_missing_metadata_is_named(qwen: Any) -> None:
    with pytest.raises(WeightsError, match=r"qwen2\.block_count"):
        read_gguf_arch(qwen(block_count=None))


def test_defaults_of_metadata(qwen: Any) -> None:
    bare = read_gguf_arch(
        qwen(**dict.fromkeys(("attention.key_length", "attention.value_length",
                              "attention.head_count_kv", "rope.freq_base",
                              "rope.dimension_count")))
    )  # fmt: skip
    assert (bare.head_dim, bare.num_kv_heads) == (16, 4)
    assert bare.rope == RopeConfig(theta=10000.0, rotary_dim=16)
    assert bare.tie_word_embeddings


def test_linear_and_yarn_scaling(qwen: Any) -> None:
    linear = read_gguf_arch(qwen(**{"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}))
    assert (linear.rope.scaling_type, linear.rope.factor) == ("linear", 4.0)
    old = read_gguf_arch(qwen(**{"rope.scale_linear": 2.0}))
    assert (old.rope.scaling_type, old.rope.factor) == ("linear", 2.0)
    yarn = read_gguf_arch(
        qwen(
            **{
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 64,
            }
        )
    )
    assert (yarn.rope.scaling_type, yarn.rope.original_max_position) == ("yarn", 64)
    assert (yarn.rope.attention_factor, yarn.max_position_embeddings) == (None, 256)
    with pytest.raises(UnsupportedModelError, match="longrope"):
        read_gguf_arch(qwen(**{"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0}))


@pytest.mark.parametrize(
    ("theta", "dim", "factor", "low", "high", "original"),
    [
        (500000.0, 128, 8.0, 1.0, 4.0, 8192),
        (500000.0, 64, 32.0, 1.0, 4.0, 8192),
        (10000.0, 128, 4.0, 1.0, 8.0, 2048),
        (10000.0, 64, 16.0, 2.0, 6.0, 4096),
    ],
)
def test_llama3_scaling_is_recovered_from_its_factors(
    theta: float, dim: int, factor: float, low: float, high: float, original: int
) -> None:
    truth = RopeConfig(
        theta=theta, rotary_dim=dim, scaling_type="llama3", factor=factor,
        original_max_position=original, low_freq_factor=low, high_freq_factor=high,
    )  # fmt: skip
    factors = llama3_factors(truth).astype(np.float32)
    fitted = fit_llama3(factors, theta, dim, "x.gguf")
    np.testing.assert_allclose(llama3_factors(fitted), factors, rtol=1e-3)
    if low == 1.0:
        assert fitted.original_max_position == original


def test_llama3_factors_agree_with_transformers() -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_theta": 500000.0,
    }  # fmt: skip
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=2, rope_parameters=scaling,
        max_position_embeddings=131072,
    )  # fmt: skip
    inv_freq, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = 500000.0 ** (-np.arange(0, 128, 2) / 128)
    rope = read_hf_config(config.to_dict() | {"architectures": ["LlamaForCausalLM"]}).rope
    np.testing.assert_allclose(llama3_factors(rope), plain / inv_freq.numpy(), rtol=1e-4)


def test_rope_freqs_in_a_file_mean_llama3(qwen: Any) -> None:
    truth = RopeConfig(
        theta=10000.0, rotary_dim=16, scaling_type="llama3", factor=8.0,
        original_max_position=8192, low_freq_factor=1.0, high_freq_factor=4.0,
    )  # fmt: skip
    factors = llama3_factors(truth).astype(np.float32)
    file = qwen("llama", extra={"rope_freqs.weight": factors})
    assert read_gguf_arch(file).rope == truth
    assert "rope_freqs.weight" not in GGUFSource(file).shapes()
    odd = qwen("llama", extra={"rope_freqs.weight": np.linspace(1, 9, 8, dtype=np.float32)[::-1]})
    with pytest.raises(UnsupportedModelError, match=r"rope_freqs\.weight"):
        read_gguf_arch(odd)


def test_type_that_cannot_be_dequantized_is_refused_by_name(
    write_gguf: Any, llama_metadata: Metadata
) -> None:
    q = np.zeros((64, 64), np.float32)
    path = write_gguf(
        {"model.embed_tokens.weight": q, "model.layers.0.self_attn.q_proj.weight": q},
        llama_metadata(),
        raw={"blk.0.ffn_up.weight": (np.zeros((4, 4), np.int32), Quant.I32)},
    )
    with pytest.raises(UnsupportedModelError, match=r"blk\.0\.ffn_up\.weight.*I32"):
        GGUFSource(path)
