"""Which attention backend runs here, and the one reason that is logged."""

from __future__ import annotations

import logging

from octavo.attention.base import AttentionBackend
from octavo.attention.cpu import CpuAttention
from octavo.attention.gather import GatherAttention
from octavo.ops.cpu import native

logger = logging.getLogger("octavo")


def select_attention(name: str = "auto") -> AttentionBackend:
    """The backend called `name`, or by capability for "auto".

    Raises `ValueError` for an unknown name.
    """
    if name == "auto":
        name, reason = _by_capability()
        logger.info("attention backend: %s (%s)", name, reason)
    backends: dict[str, type[AttentionBackend]] = {"cpu": CpuAttention, "gather": GatherAttention}
    if name not in backends:
        raise ValueError(f"unknown attention backend {name!r}; known: {', '.join(backends)}")
    return backends[name]()


def _by_capability() -> tuple[str, str]:
    if native.load() is not None:
        return "cpu", f"C kernels, {native.isa()}"
    return "gather", "no compiled kernels here: install a C compiler for several times the speed"
