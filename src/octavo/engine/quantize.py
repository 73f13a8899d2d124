"""What becomes of a checkpoint's weights on this device: kept quantized, expanded, or rounded."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Protocol

import torch

from octavo.config import EngineConfig, QuantizationName
from octavo.errors import ConfigError
from octavo.ops.cpu import native, qgemm
from octavo.quantization import PLAIN_TYPES
from octavo.weights.gguf import GGUFSource
from octavo.weights.load import OpenModel
from octavo.weights.source import Keep

_EMBEDDING = "model.embed_tokens.weight"
_log = logging.getLogger(__name__)


class _Model(Protocol):
    def quantizable(self, name: str) -> bool:
        """As of `Decoder`."""


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """How the weights of linear layers are held."""

    name: QuantizationName
    """What `EngineConfig.quantization` resolves to; none: in the computation type."""
    keeps: bool = False
    """Whether weights that are quantized in the file stay so."""
    keeps_embedding: bool = True
    """Whether the embedding does, too."""
    quantize: str | None = None
    """How plain weights of layers are quantized as they arrive."""
    quantize_head: str | None = None
    """The same for the head and the embedding."""

    def keep(self, model: _Model) -> Keep | None:
        """Which weights the loader hands on as they are in the file."""
        if not self.keeps or self.keeps_embedding:
            return model.quantizable if self.keeps else None
        return lambda name: name != _EMBEDDING and model.quantizable(name)


def plan_weights(config: EngineConfig, opened: OpenModel, device: torch.device) -> WeightPlan:
    """Raises `ConfigError` for a `quantization` that this checkpoint or device does not have."""
    own, asked = checkpoint_method(opened), config.quantization
    if asked in ("gguf", "awq", "gptq", "compressed-tensors") and asked != own:
        has = "are not quantized" if own is None else f"are quantized with {own}"
        raise ConfigError(
            f"quantization={asked!r} is of checkpoints, and the weights of {config.model} {has}: "
            "leave --quantization out"
        )
    if asked == "none" or (asked is None and own is None):
        return WeightPlan("none")
    if device.type == "cuda":
        return _on_gpu(config, opened, own, device)
    return _on_cpu(config, own)


def checkpoint_method(opened: OpenModel) -> QuantizationName | None:
    """How the weights to be read are quantized: gguf, awq, ...; None if they are not, or random."""
    if opened.source is None:
        return None if opened.quantization is None else opened.quantization.method
    if isinstance(opened.source, GGUFSource):
        kinds = opened.source.quantizations()
        return "gguf" if any(kind not in PLAIN_TYPES for kind in kinds) else None
    return None if opened.quantization is None else opened.quantization.method


def _on_cpu(config: EngineConfig, own: QuantizationName | None) -> WeightPlan:
    asked = config.quantization
    if asked == "int8" or (asked == "gguf" and own == "gguf"):
        if not qgemm.is_available():
            raise ConfigError(
                f"quantization={asked!r} needs the C library of the CPU kernels, which is not "
                "available (the reason is in the log): leave --quantization out"
            )
        if not qgemm.is_fast():
            _log.warning(
                "quantization=%r: this CPU has no AVX512_VNNI (%s), so it saves memory and costs "
                "speed", asked, native.isa(),
            )  # fmt: skip
        if asked == "int8":
            return WeightPlan("int8", quantize="int8", quantize_head="int8")
        return WeightPlan("gguf", keeps=True)
    if asked is not None:
        raise ConfigError(
            f"quantization={asked!r} needs a GPU and device is 'cpu': use --quantization int8, or "
            "leave it out"
        )
    reason = _why_expanded(config, own)
    if reason is None:
        # Not the file's own 4 bits: laid out for these kernels they lose enough to change answers
        # that the expanded file gives. 8 bits do not.
        _log.info("weights are held in 8 bits, which this CPU multiplies fast (%s)", native.isa())
        return WeightPlan("int8", quantize="int8", quantize_head="int8")
    _log.info("%s weights are expanded: %s", own, reason)
    return WeightPlan("none")


def _why_expanded(config: EngineConfig, own: QuantizationName | None) -> str | None:
    if own != "gguf":
        return "their kernels are for GPUs"
    if config.dtype == "float32":
        return "dtype is float32"
    if not qgemm.is_fast():
        return f"multiplying by them is slower without AVX512_VNNI ({native.isa()})"
    return None


def _on_gpu(
    config: EngineConfig, opened: OpenModel, own: QuantizationName | None, device: torch.device
) -> WeightPlan:
    asked = config.quantization
    if asked == "int8":
        raise ConfigError(
            "quantization='int8' is for CPUs and device is 'cuda': use --quantization fp8, or "
            "--device cpu"
        )
    if asked == "fp8" and own != "fp8":
        if own is not None:
            raise ConfigError(
                f"quantization='fp8' is made of weights that are not quantized, and those of "
                f"{config.model} are, with {own}: leave --quantization out"
            )
        return WeightPlan("fp8", quantize="fp8")
    assert own is not None
    from octavo.layers.quantized_gpu import why_expanded

    source = opened.source
    kinds = source.quantizations() if isinstance(source, GGUFSource) else ()
    reason = why_expanded(opened.quantization or own, device, kinds)
    if reason is None:
        return WeightPlan(own, keeps=True, keeps_embedding=False)
    if asked is not None:
        raise ConfigError(
            f"quantization={asked!r} cannot be kept here: {reason}; use --quantization none"
        )
    _log.info("%s weights are expanded: %s", own, reason)
    return WeightPlan("none")
