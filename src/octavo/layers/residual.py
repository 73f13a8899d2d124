"""Adding to the residual stream, and scaling what enters it."""

from __future__ import annotations

from torch import Tensor

from octavo.ops.cpu import elementwise


def add_branch(x: Tensor, branch: Tensor, scale: float = 1.0) -> None:
    """x += scale * branch in place; both [num_tokens, hidden_size]."""
    if x.is_cpu:
        elementwise.add_scaled(x, branch, scale)
    else:
        x.add_(branch, alpha=scale)


def scale_embeddings(x: Tensor, scale: float) -> None:
    """x *= scale in place; [num_tokens, hidden_size]."""
    if x.is_cpu:
        elementwise.scale_rows(x, scale)
    else:
        x.mul_(scale)
