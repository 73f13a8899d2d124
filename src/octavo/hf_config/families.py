"""The one table of architectures: what `config.json` calls them, and who reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from octavo.arch import ModelArch
from octavo.hf_config import classic, experts, gemma, llama
from octavo.hf_config.fields import Fields


@dataclass(frozen=True, slots=True)
class Family:
    """How the configurations of an architecture are read."""

    architecture: str
    """Its name in the registry."""
    model_type: str
    read: Callable[[Fields], ModelArch]
    names: Mapping[str, str] = field(default_factory=dict)
    """What it calls fields that others call differently."""
    part: str | None = None
    """The field that holds the text model's configuration, where the model is more than that."""


_GPT2 = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
}
_FALCON = {"intermediate_size": "ffn_hidden_size", "hidden_size": "n_embed"}
_REFINED_WEB = _FALCON | {
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "num_kv_heads": "n_head_kv",
}

_ALL = (
    Family("LlamaForCausalLM", "llama", llama.llama),
    Family("SmolLM3ForCausalLM", "smollm3", llama.smollm3),
    Family("OlmoForCausalLM", "olmo", llama.olmo),
    Family("Olmo2ForCausalLM", "olmo2", llama.olmo2),
    Family("GraniteForCausalLM", "granite", llama.granite),
    Family("InternLM2ForCausalLM", "internlm2", llama.internlm2),
    Family("InternLM3ForCausalLM", "internlm3", llama.internlm3),
    Family("MistralForCausalLM", "mistral", llama.mistral),
    Family("MinistralForCausalLM", "ministral", llama.ministral),
    Family("MixtralForCausalLM", "mixtral", experts.mixtral),
    Family("Qwen2ForCausalLM", "qwen2", llama.qwen2),
    Family("Qwen2MoeForCausalLM", "qwen2_moe", experts.qwen2_moe),
    Family("Qwen3ForCausalLM", "qwen3", llama.qwen3),
    Family("Qwen3MoeForCausalLM", "qwen3_moe", experts.qwen3_moe),
    Family("GemmaForCausalLM", "gemma", gemma.gemma),
    Family("Gemma2ForCausalLM", "gemma2", gemma.gemma2),
    Family("Gemma3ForCausalLM", "gemma3_text", gemma.gemma3),
    Family("PhiForCausalLM", "phi", classic.phi),
    Family("Phi3ForCausalLM", "phi3", classic.phi3),
    Family("GPT2LMHeadModel", "gpt2", classic.gpt2, _GPT2),
    Family("GPTNeoXForCausalLM", "gpt_neox", classic.gpt_neox),
    Family("OPTForCausalLM", "opt", classic.opt, {"intermediate_size": "ffn_dim"}),
    Family("StableLmForCausalLM", "stablelm", classic.stablelm),
    Family("FalconForCausalLM", "falcon", classic.falcon, _FALCON),
    Family("DeepseekV2ForCausalLM", "deepseek_v2", experts.deepseek_v2),
)

FAMILIES: dict[str, Family] = {family.architecture: family for family in _ALL} | {
    # Gemma 3 from 4B up sees images; its text model is the same
    "Gemma3ForConditionalGeneration": Family(
        "Gemma3ForCausalLM", "gemma3", gemma.gemma3, part="text_config"
    ),
    # and so does Mistral Small from 3.1 up
    "Mistral3ForConditionalGeneration": Family(
        "MistralForCausalLM", "mistral3", llama.mistral, part="text_config"
    ),
    "RWForCausalLM": Family("FalconForCausalLM", "RefinedWebModel", classic.falcon, _REFINED_WEB),
    # what first releases and conversions called themselves
    "LLaMAForCausalLM": Family("LlamaForCausalLM", "llama", llama.llama),
    "YiForCausalLM": Family("LlamaForCausalLM", "Yi", llama.llama),
    "InternLMForCausalLM": Family("LlamaForCausalLM", "internlm", llama.internlm),
    "StableLMEpochForCausalLM": Family(
        "StableLmForCausalLM",
        "stablelm_epoch",
        classic.stablelm,
        {"layer_norm_eps": "norm_eps", "partial_rotary_factor": "rope_pct"},
    ),
}
"""By what stands in `architectures`."""
