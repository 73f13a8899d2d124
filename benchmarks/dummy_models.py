"""Shapes of models as folders with a config.json, for `--load-format dummy`: no weights needed."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any


def llama(
    hidden: int, inter: int, layers: int, heads: int, kv_heads: int, head_dim: int, vocab: int,
    tie: bool, **other: Any,
) -> dict[str, Any]:  # fmt: skip
    """A Llama's config.json."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": inter, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "vocab_size": vocab,
        "tie_word_embeddings": tie, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "hidden_act": "silu", "attention_bias": False, "mlp_bias": False,
        "bos_token_id": 0, "eos_token_id": 0, "torch_dtype": "bfloat16",
    }  # fmt: skip
    return config | other


AWQ = {
    "quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm",
}  # fmt: skip
"""`quantization_config` of a checkpoint with weights of 4 bits."""

MODELS = {
    "tiny": llama(64, 96, 2, 4, 2, 16, 320, True),
    "smol135m": llama(576, 1536, 30, 9, 3, 64, 49152, True),
    "llama1b": llama(2048, 8192, 16, 32, 8, 64, 128256, True),
    "llama8b": llama(4096, 14336, 32, 32, 8, 128, 128256, False),
    "llama8b-awq": llama(
        4096, 14336, 32, 32, 8, 128, 128256, False, quantization_config=AWQ
    ),
    "llama2-13b": llama(
        5120, 13824, 40, 40, 40, 128, 32000, False,
        max_position_embeddings=4096, rope_theta=10000.0,
    ),
    "qwen3-0.6b": llama(
        1024, 3072, 28, 16, 8, 128, 151936, True,
        architectures=["Qwen3ForCausalLM"], model_type="qwen3", rms_norm_eps=1e-6,
    ),
}  # fmt: skip


def write_model(name: str, dtype: str = "bfloat16") -> Path:
    """A folder of the system's temporary ones with the config.json of a shape of `MODELS`."""
    folder = Path(tempfile.gettempdir()) / "octavo_dummy_models" / f"{name}-{dtype}"
    folder.mkdir(parents=True, exist_ok=True)
    config = MODELS[name] | {"torch_dtype": dtype}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
