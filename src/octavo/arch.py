"""The shape of a model as plain data, no torch. `hf_config` and `weights.gguf` make it.

The device rooms build a decoder from it, the memory room counts KV bytes from it, and the lab
plans with it when there are no weights at hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field

ROPE_SCALING_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
"""`su`, as older files say, is longrope."""
NORMS = ("rms", "layer")
NORM_PLACEMENTS = ("pre", "post", "sandwich")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
POSITIONS = ("rope", "learned", "alibi", "none")
QK_NORMS = ("none", "head", "all", "layer_head")


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
    interleaved: bool = False
    """Rotated pairs are elements (2 i, 2 i + 1); else (i, i + rotary_dim / 2)."""
    low_freq_factor: float = 1.0
    """llama3 only."""
    high_freq_factor: float = 4.0
    """llama3 only."""
    beta_fast: float = 32.0
    """yarn only."""
    beta_slow: float = 1.0
    """yarn only."""
    attention_factor: float | None = None
    """yarn, longrope: multiplies cos and sin; None computes it from the factor."""
    mscale: float | None = None
    """yarn only."""
    mscale_all_dim: float | None = None
    """yarn only."""
    truncate: bool = True
    """yarn only: round the correction range to whole dimensions."""
    short_factor: tuple[float, ...] = ()
    """longrope only, [rotary_dim / 2]: what frequencies are divided by within
    `original_max_position`."""
    long_factor: tuple[float, ...] = ()
    """longrope only: the same beyond it."""


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """A mixture of experts in place of the MLP: a router picks some experts for each token."""

    num_experts: int
    experts_per_token: int
    expert_size: int
    """Intermediate size of one expert."""
    normalize: bool = True
    """Whether the weights of the chosen experts are made to add up to 1."""
    scoring: str = "softmax"
    """How router logits become weights: softmax (over all experts) or sigmoid."""
    router_float32: bool = False
    """Router logits are computed in float32 whatever the model is (DeepSeek)."""
    routed_scale: float = 1.0
    """Multiplies the sum of the chosen experts."""
    num_groups: int = 1
    """Experts stand in so many groups (DeepSeek) ..."""
    groups_per_token: int = 1
    """... of which a token may use so many, by their best expert."""
    shared_size: int = 0
    """Intermediate size of an MLP that every token takes besides; 0: there is none."""
    shared_gate: bool = False
    """Whether the shared MLP's result is multiplied by a sigmoid gate of its own (Qwen2-MoE)."""
    dense_layers: tuple[int, ...] = ()
    """Indices of layers that have a plain MLP of `ModelArch.intermediate_size`."""


@dataclass(frozen=True, slots=True)
class MLAConfig:
    """Multi-head latent attention (DeepSeek-V2): keys and values of all heads are read out of one
    latent vector a token, which is what is cached."""

    kv_lora_rank: int
    """Width of the latent."""
    qk_rope_head_dim: int
    """Width of the key that all heads share and that alone is rotated."""
    qk_nope_head_dim: int
    """Width of the part of a head's query and key that is not rotated."""
    v_head_dim: int
    q_lora_rank: int | None = None
    """Width of the queries' own latent; None: queries are projected at once."""


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
    norm: str = "rms"
    """One of `NORMS`: RMSNorm or LayerNorm, everywhere but in `qk_norm`."""
    norm_eps: float = 1e-6
    norm_bias: bool = False
    """LayerNorm adds a bias."""
    norm_offset: float = 0.0
    """What is added to norm weights as they are loaded (Gemma: checkpoints hold weight - 1)."""
    norm_placement: str = "pre"
    """One of `NORM_PLACEMENTS`: before attention and MLP; after each, before the residual is added
    (OLMo 2); or both (Gemma 2 and 3)."""
    parallel_residual: bool = False
    """Attention and MLP both read the layer's input: x + attn(norm1(x)) + mlp(norm2(x))."""
    shared_norm: bool = False
    """With `parallel_residual`: norm1 serves the MLP as well (Falcon 7B, Phi-2)."""
    activation: str = "silu"
    """One of `ACTIVATIONS`."""
    gated_mlp: bool = True
    """down(act(gate(x)) * up(x)); else down(act(up(x)))."""
    positions: str = "rope"
    """One of `POSITIONS`."""
    position_offset: int = 0
    """Row of the learned table that position 0 has (OPT: 2)."""
    rope: RopeConfig = field(default_factory=RopeConfig)
    local_rope: RopeConfig | None = None
    """Of layers with a window, where theirs differs (Gemma 3)."""
    no_rope_layers: tuple[int, ...] = ()
    """Indices of layers that do not rotate at all (SmolLM 3)."""
    alibi_scale: float = 1.0
    """Multiplies ALiBi's slopes (Falcon: head_dim ** -0.5)."""
    embedding_scale: float = 1.0
    """Multiplies embeddings (Gemma: hidden_size ** 0.5, which it rounds to the model's dtype)."""
    residual_scale: float = 1.0
    """Multiplies what attention and MLP add to the residual stream (Granite)."""
    attention_scale: float | None = None
    """Multiplies attention scores; None: head_dim ** -0.5."""
    logits_scale: float = 1.0
    """Multiplies logits."""
    attention_soft_cap: float = 0.0
    """Scores become cap * tanh(score / cap) (Gemma 2); 0: they stay."""
    logits_soft_cap: float = 0.0
    """The same for logits, after `logits_scale`."""
    sliding_windows: tuple[int, ...] = ()
    """Per layer the attention window in tokens, 0 for full attention; empty: all full."""
    qkv_clip: float = 0.0
    """q, k and v are clamped to +- this before anything else (OLMo 1); 0: they are not."""
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    qk_norm: str = "none"
    """One of `QK_NORMS`: what q and k pass before rope. head: RMSNorm over each head, one weight
    for all (Qwen3); all: RMSNorm over all heads at once (OLMo 2); layer_head: LayerNorm over each
    head, which has a weight of its own (StableLM)."""
    moe: MoEConfig | None = None
    mla: MLAConfig | None = None
    tie_word_embeddings: bool = False
    dtype: str = "float32"
    """The checkpoint's own dtype: float32, float16 or bfloat16."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        assert self.norm in NORMS and self.norm_placement in NORM_PLACEMENTS
        assert self.activation in ACTIVATIONS and self.positions in POSITIONS
        assert self.qk_norm in QK_NORMS
        assert not (self.norm_bias and self.norm == "rms"), "RMSNorm has no bias"
        assert self.norm_placement == "pre" or not self.parallel_residual
        assert self.parallel_residual or not self.shared_norm

    def window(self, layer: int) -> int:
        """Attention window of a layer in tokens; 0 for full attention."""
        return self.sliding_windows[layer] if self.sliding_windows else 0

    def rotates(self, layer: int) -> bool:
        """Whether a layer applies rotary embedding."""
        return self.positions == "rope" and layer not in self.no_rope_layers

    def is_moe_layer(self, layer: int) -> bool:
        """Whether a layer has a mixture of experts."""
        return self.moe is not None and layer not in self.moe.dense_layers

    @property
    def wide_norms(self) -> bool:
        """Whether norm weights are held in float32, which also means that a row is rounded once,
        after its weight: with an offset they are no numbers of the checkpoint's dtype; OLMo 2, too,
        was trained so."""
        return self.norm == "rms" and (self.norm_offset != 0.0 or self.norm_placement == "post")

    @property
    def kv_planes(self) -> int:
        """Vectors a head caches of a token: K and V; 1 where the latent stands for both."""
        return 2 if self.mla is None else 1

    @property
    def kv_num_heads(self) -> int:
        """Heads that the pool holds: those of K and V; the latent is one."""
        return self.num_kv_heads if self.mla is None else 1

    @property
    def kv_head_dim(self) -> int:
        """Elements of each of them: a head's; the latent's and the rotated key's."""
        if self.mla is None:
            return self.head_dim
        return self.mla.kv_lora_rank + self.mla.qk_rope_head_dim
