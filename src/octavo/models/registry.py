"""The families that octavo runs: what each is, how it differs, and which tests speak for it.

One table gives the choices, the error text and docs/models.md.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass

import torch

from octavo.arch import ModelArch
from octavo.attention.base import AttentionBackend
from octavo.errors import UnsupportedModelError
from octavo.models.decoder import Decoder


@dataclass(frozen=True, slots=True)
class FamilyInfo:
    """A line of docs/models.md."""

    title: str
    """The models that have this architecture."""
    flags: str
    """How its decoder differs from Llama's."""
    rows: tuple[str, ...]
    """Rows of the table in tests/models/family_cases.py."""
    refused: str = ""
    """What of the family is not run."""


ARCHITECTURES: dict[str, FamilyInfo] = {
    "LlamaForCausalLM": FamilyInfo(
        "Llama 1, 2 and 3; Yi; SmolLM 1 and 2; InternLM 1; and many more",
        "biases of attention and MLP; every rope scaling",
        (
            "llama", "llama-tied", "llama-mha-biased", "llama-wide-heads-gelu", "llama-linear",
            "llama-llama3", "llama-yarn", "llama-dynamic",
        ),
    ),
    "SmolLM3ForCausalLM": FamilyInfo(
        "SmolLM 3", "layers without rope, windows on them", ("smollm3", "smollm3-untied-window")
    ),
    "OlmoForCausalLM": FamilyInfo(
        "OLMo 1", "LayerNorm without weights; q, k and v clipped", ("olmo", "olmo-tied")
    ),
    "Olmo2ForCausalLM": FamilyInfo(
        "OLMo 2", "norms after attention and MLP; norms over all of q and k",
        ("olmo2", "olmo2-tied-mha"),
    ),
    "GraniteForCausalLM": FamilyInfo(
        "Granite 3", "embeddings, residuals, attention and logits scaled",
        ("granite", "granite-untied"),
    ),
    "InternLM2ForCausalLM": FamilyInfo(
        "InternLM 2 and 2.5", "q, k and v in one matrix, a group of heads after another",
        ("internlm2", "internlm2-tied"),
    ),
    "InternLM3ForCausalLM": FamilyInfo("InternLM 3", "as Llama", ("internlm3",)),
    "MistralForCausalLM": FamilyInfo(
        "Mistral 7B, Nemo, Small; the text model of those with images, too",
        "a window on every layer",
        ("mistral", "mistral-window", "mistral-with-images"),
        refused="images (the vision tower's weights are left out); Ministral 3, whose queries are "
        "scaled by position",
    ),
    "MinistralForCausalLM": FamilyInfo(
        "Ministral", "windows on some layers", ("ministral", "ministral-tied")
    ),
    "MixtralForCausalLM": FamilyInfo(
        "Mixtral", "mixture of experts; a window", ("mixtral", "mixtral-window")
    ),
    "Qwen2ForCausalLM": FamilyInfo(
        "Qwen 2 and 2.5", "biases of q, k and v; windows on upper layers",
        ("qwen2", "qwen2-tied", "qwen2-window"),
    ),
    "Qwen2MoeForCausalLM": FamilyInfo(
        "Qwen 1.5 and 2 MoE", "mixture of experts with a gated shared one; dense layers; windows",
        ("qwen2-moe", "qwen2-moe-normalized"),
    ),
    "Qwen3ForCausalLM": FamilyInfo(
        "Qwen 3", "norms on heads of q and k; windows on upper layers", ("qwen3", "qwen3-tied")
    ),
    "Qwen3MoeForCausalLM": FamilyInfo(
        "Qwen 3 MoE", "norms on heads of q and k; mixture of experts; dense layers",
        ("qwen3-moe", "qwen3-moe-tied-window"),
    ),
    "GemmaForCausalLM": FamilyInfo(
        "Gemma 1", "norms of 1 + weight; embeddings scaled; GELU", ("gemma", "gemma-untied"),
        refused="bidirectional attention",
    ),
    "Gemma2ForCausalLM": FamilyInfo(
        "Gemma 2", "as Gemma 1; norms before and after; soft caps; every other layer a window",
        ("gemma2", "gemma2-untied"), refused="bidirectional attention",
    ),
    "Gemma3ForCausalLM": FamilyInfo(
        "Gemma 3, the text model of those with images, too",
        "as Gemma 2; norms on heads of q and k; five layers with a window and a rope of their own "
        "to each without",
        ("gemma3", "gemma3-linear", "gemma3-with-images"),
        refused="images (the vision tower's weights are left out); bidirectional attention; a soft "
        "cap on scores",
    ),
    "PhiForCausalLM": FamilyInfo(
        "Phi 1, 1.5 and 2", "LayerNorm; attention beside the MLP behind one norm; partial rope",
        ("phi", "phi-tied"), refused="qk_layernorm",
    ),
    "Phi3ForCausalLM": FamilyInfo(
        "Phi 3, 3.5 and 4, mini to medium",
        "q, k and v in one matrix, gate and up in another; longrope; partial rope; a window",
        ("phi3", "phi3-partial-tied", "phi3-longrope-short", "phi3-longrope-beyond"),
        refused="Phi-3-small and the MoE and vision models, which are other architectures",
    ),
    "GPT2LMHeadModel": FamilyInfo(
        "GPT-2", "LayerNorm; learned positions; matrices the other way round",
        ("gpt2", "gpt2-untied"),
        refused="scale_attn_by_inverse_layer_idx; cross-attention",
    ),
    "GPTNeoXForCausalLM": FamilyInfo(
        "GPT-NeoX and Pythia", "LayerNorm; attention beside the MLP; partial rope",
        ("gpt-neox", "gpt-neox-sequential"),
    ),
    "OPTForCausalLM": FamilyInfo(
        "OPT, Galactica", "LayerNorm, with weights or without; learned positions; ReLU",
        ("opt", "opt-untied-plain"),
        refused="OPT-350M: norms after the residual is added, embeddings of another width",
    ),
    "StableLmForCausalLM": FamilyInfo(
        "StableLM 2 and 3B, Zephyr",
        "LayerNorm; partial rope; a norm for each head; attention beside the MLP",
        ("stablelm", "stablelm-parallel"),
    ),
    "FalconForCausalLM": FamilyInfo(
        "Falcon 7B, 11B, 40B, 180B and RW",
        "LayerNorm; attention beside the MLP; one key head; ALiBi",
        ("falcon-7b", "falcon-40b", "falcon-11b", "falcon-rw"),
    ),
    "DeepseekV2ForCausalLM": FamilyInfo(
        "DeepSeek-V2 and V2-Lite",
        "latent attention: the latent is what is paged; mixture of experts in groups, shared ones",
        ("deepseek-v2", "deepseek-v2-yarn-groups"),
        refused="norm_topk_prob",
    ),
}  # fmt: skip
"""By the name that `ModelArch.architecture` has."""


def build_model(
    arch: ModelArch,
    attention: AttentionBackend,
    dtype: torch.dtype,
    max_model_len: int,
    device: torch.device,
    quantize: str | None = None,
    quantize_head: str | None = None,
) -> Decoder:
    """An empty model of `arch`. Raises `UnsupportedModelError` naming the nearest known one."""
    if arch.architecture not in ARCHITECTURES:
        near = difflib.get_close_matches(arch.architecture, ARCHITECTURES, n=1, cutoff=0.3)
        hint = f"; the nearest is {near[0]}" if near else ""
        raise UnsupportedModelError(
            f"architecture {arch.architecture!r} is not known; octavo runs "
            f"{', '.join(ARCHITECTURES)}{hint}"
        )
    return Decoder(arch, attention, dtype, max_model_len, device, quantize, quantize_head)
