"""The shape of a model as plain data, no torch. `hf_config` and `weights.gguf` make it.

The device rooms build a decoder from it, the memory room counts KV bytes from it, and the lab
plans with it when there are no weights at hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field

ROPE_SCALING_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding and how it is stretched. Field names are `config.json`'s."""

    theta: float = 10000.0
    rotary_dim: int = 64
    """Leading dimensions of each head that are rotated."""
    scaling_type: str = "default"
    """One of `ROPE_SCALING_TYPES`."""
    factor: float = 1.0
    original_max_position: int = 0
    """Context the model was trained with before stretching; 0 when there is no scaling."""
    low_freq_factor: float = 1.0
    """llama3 only."""
    high_freq_factor: float = 4.0
    """llama3 only."""
    beta_fast: float = 32.0
    """yarn only."""
    beta_slow: float = 1.0
    """yarn only."""
    attention_factor: float | None = None
    """yarn only: multiplies cos and sin; None computes it from the factor."""
    mscale: float | None = None
    """yarn only."""
    mscale_all_dim: float | None = None
    """yarn only."""
    truncate: bool = True
    """yarn only: round the correction range to whole dimensions."""


@dataclass(frozen=True, slots=True)
class ModelArch:
    """A decoder-only transformer, by the flags in which families differ."""

    architecture: str
    """Name in the registry, as `config.json` has it: `LlamaForCausalLM`."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = field(default_factory=RopeConfig)
    sliding_windows: tuple[int, ...] = ()
    """Per layer the attention window in tokens, 0 for full attention; empty: all full."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMSNorm over each head of q and k before rope (Qwen3)."""
    tie_word_embeddings: bool = False
    dtype: str = "float32"
    """The checkpoint's own dtype: float32, float16 or bfloat16."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def window(self, layer: int) -> int:
        """Attention window of a layer in tokens; 0 for full attention."""
        return self.sliding_windows[layer] if self.sliding_windows else 0
