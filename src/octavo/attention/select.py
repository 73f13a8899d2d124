"""Which attention backend runs here, and the one reason that is logged."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import get_args

import torch

from octavo.attention.base import AttentionBackend
from octavo.attention.cpu import CpuAttention
from octavo.attention.gather import GatherAttention
from octavo.config import AttentionName
from octavo.errors import ConfigError
from octavo.ops.cpu import native

logger = logging.getLogger("octavo")

BACKENDS = tuple(name for name in get_args(AttentionName) if name != "auto")
_TRITON_CAPABILITY = (8, 0)
"""Ampere: the first with bfloat16 and asynchronous copies."""


def select_attention(
    name: str = "auto",
    device: torch.device | None = None,
    *,
    head_dim: int | None = None,
    fp8: bool = False,
    alibi: bool = False,
    mla: bool = False,
) -> AttentionBackend:
    """The backend called `name`, or for "auto" the fastest on the device, with the reason logged.

    head_dim, fp8, alibi, mla (latents are cached, not keys and values): of the model and its cache,
    which not every backend takes. Raises `ConfigError` for a backend that cannot run here, saying
    what it lacks, and for a GPU on which no model runs: all its layers are Triton kernels, whatever
    computes attention.
    """
    device = device or torch.device("cpu")
    if device.type == "cuda":
        no_triton = _why_no_triton(device)
        if no_triton is not None:
            raise ConfigError(
                f"device {device} ({torch.cuda.get_device_name(device)}) cannot be used: a model's "
                f"layers run there as Triton kernels, and triton {no_triton}; or use --device cpu"
            )
    if name != "auto" and name not in BACKENDS:
        raise ConfigError(f"unknown attention backend {name!r}; known: auto, {', '.join(BACKENDS)}")
    if name == "auto":
        name, reason = _by_capability(device, mla)
        logger.info("attention backend: %s (%s)", name, reason)
    lacks = _why_not_latents(name, mla) or _what_is_missing(name, device, head_dim, fp8, alibi)
    if lacks is not None:
        raise ConfigError(f"--attention-backend {name} {lacks}; leave it out to have one chosen")
    return _make(name, fp8)


def _by_capability(device: torch.device, mla: bool) -> tuple[str, str]:
    if device.type == "cuda" and mla:
        return "latent", f"Triton kernels over cached latents, {torch.cuda.get_device_name(device)}"
    if device.type == "cuda":
        return "triton", f"Triton kernels, {torch.cuda.get_device_name(device)}"
    if native.load() is not None:
        return "cpu", f"C kernels, {native.isa()}"
    return "gather", "no compiled kernels here: install a C compiler for several times the speed"


def _why_not_latents(name: str, mla: bool) -> str | None:
    """What keeps a backend from what the model caches, as the end of a sentence; None: nothing."""
    if name == "latent" and not mla:
        return "reads cached latents, and this model caches keys and values"
    if mla and name in ("triton", "flashinfer", "fa3"):
        return "reads cached keys and values, and this model caches latents (MLA)"
    return None


def _what_is_missing(
    name: str, device: torch.device, head_dim: int | None, fp8: bool, alibi: bool
) -> str | None:
    """What keeps a backend from running here, as the end of a sentence; None: nothing."""
    if name == "gather":
        return "reads no fp8 cache" if fp8 else None
    if name == "cpu":
        return None if device.type == "cpu" else f"runs on CPUs, and device is {device}"
    if device.type != "cuda":
        return f"runs on NVIDIA GPUs, and device is {device}"
    if name in ("triton", "latent"):
        return _why_no_triton(device)
    from octavo.attention import libraries

    capability = torch.cuda.get_device_capability(device)
    return libraries.what_is_missing(name, capability, head_dim=head_dim, fp8=fp8, alibi=alibi)


def _why_no_triton(device: torch.device) -> str | None:
    """What keeps Triton kernels from running on a GPU, as the end of a sentence."""
    if find_spec("triton") is None:
        return "needs its package: pip install triton"
    capability = torch.cuda.get_device_capability(device)
    if capability < _TRITON_CAPABILITY:
        needed, shown = (".".join(map(str, c)) for c in (_TRITON_CAPABILITY, capability))
        return f"needs a GPU of compute capability {needed}, and this one has {shown}"
    return None


def _make(name: str, fp8: bool) -> AttentionBackend:
    if name == "triton":
        from octavo.attention.triton import TritonAttention

        return TritonAttention(reads_fresh=not fp8)
    if name == "latent":
        from octavo.attention.latent import LatentKernels

        return LatentKernels()
    if name in ("flashinfer", "fa3"):
        from octavo.attention import libraries

        return libraries.make(name)
    return CpuAttention() if name == "cpu" else GatherAttention()
