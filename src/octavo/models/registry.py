"""Architecture name -> how to build it. One table gives the choices and the error text."""

from __future__ import annotations

import difflib

import torch

from octavo.arch import ModelArch
from octavo.attention.base import AttentionBackend
from octavo.errors import UnsupportedModelError
from octavo.models.decoder import Decoder

ARCHITECTURES: dict[str, type[Decoder]] = {
    "LlamaForCausalLM": Decoder,
    "MistralForCausalLM": Decoder,
    "Qwen2ForCausalLM": Decoder,
    "Qwen3ForCausalLM": Decoder,
}


def build_model(
    arch: ModelArch,
    attention: AttentionBackend,
    dtype: torch.dtype,
    max_model_len: int,
    device: torch.device,
) -> Decoder:
    """An empty model of `arch`. Raises `UnsupportedModelError` naming the nearest known one."""
    build = ARCHITECTURES.get(arch.architecture)
    if build is None:
        near = difflib.get_close_matches(arch.architecture, ARCHITECTURES, n=1, cutoff=0.3)
        hint = f"; the nearest is {near[0]}" if near else ""
        raise UnsupportedModelError(
            f"architecture {arch.architecture!r} is not known; octavo runs "
            f"{', '.join(ARCHITECTURES)}{hint}"
        )
    return build(arch, attention, dtype, max_model_len, device)
