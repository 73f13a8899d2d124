"""Which backend reads a pool of latents, and what is refused for such models."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from octavo import LLM
from octavo.attention.select import select_attention
from octavo.config import AttentionName
from octavo.errors import ConfigError

CONFIG = {
    "architectures": ["DeepseekV2ForCausalLM"], "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "kv_lora_rank": 16,
    "num_key_value_heads": 2, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "first_k_dense_replace": 1, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """One that is only asked what it is."""
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H200")
    return torch.device("cuda")


def test_a_gpu_takes_the_kernels_for_latents(
    gpu: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="octavo"):
        backend = select_attention("auto", gpu, mla=True)
    assert (backend.name, backend.capturable) == ("latent", True)
    assert "attention backend: latent (Triton kernels over cached latents, H200)" in caplog.text
    assert select_attention("auto", gpu).name == "triton"
    assert select_attention("gather", gpu, mla=True).name == "gather"


@pytest.mark.parametrize("name", ["triton", "flashinfer", "fa3"])
def test_kernels_for_keys_and_values_are_refused(name: str, gpu: torch.device) -> None:
    with pytest.raises(ConfigError, match=f"backend {name} .*this model caches latents.*leave it"):
        select_attention(name, gpu, mla=True)


def test_kernels_for_latents_are_refused_elsewhere(gpu: torch.device) -> None:
    with pytest.raises(ConfigError, match="latent reads cached latents, and this model caches key"):
        select_attention("latent", gpu)
    with pytest.raises(ConfigError, match="latent runs on NVIDIA GPUs, and device is cpu"):
        select_attention("latent", torch.device("cpu"), mla=True)


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def test_an_int8_cache_is_refused(model: str) -> None:
    with pytest.raises(
        ConfigError, match=r"--kv-cache-dtype int8 is for keys and values, and .*MLA"
    ):
        LLM(
            model,
            device="cpu",
            load_format="dummy",
            skip_tokenizer_init=True,
            kv_cache_dtype="int8",
        )


@pytest.mark.parametrize("name", ["cpu", "gather"])
def test_a_token_takes_one_latent_a_layer(model: str, name: AttentionName) -> None:
    """16 of the latent and 4 of the rotated key, for all heads together."""
    with LLM(
        model, device="cpu", load_format="dummy", skip_tokenizer_init=True, dtype="float32",
        block_size=4, attention_backend=name, num_gpu_blocks_override=8,
    ) as llm:  # fmt: skip
        plan = llm.memory_report().plan
    assert plan.bytes_per_block == 4 * 2 * (16 + 4) * 4
    assert "1 kv heads x 20" in str(plan.shape) and "2 (K, V)" not in str(plan.shape)
