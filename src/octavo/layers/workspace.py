"""Buffers that every step writes its activations into.

Made once for the largest step: their memory is known before the pool is sized, and their addresses
never change, so that recorded kernel calls can be replayed.
"""

from __future__ import annotations

import torch

from octavo.arch import ModelArch


def workspace_bytes(
    arch: ModelArch, num_tokens: int, num_logit_rows: int, element_bytes: int
) -> tuple[int, int]:
    """What a `Workspace` takes: (activations, logits)."""
    return num_tokens * sum(_widths(arch).values()) * element_bytes, (
        num_logit_rows * arch.vocab_size * 4
    )


def _widths(arch: ModelArch) -> dict[str, int]:
    """Elements a token has in each buffer."""
    return {
        "hidden": arch.hidden_size,
        "normed": arch.hidden_size,
        "qkv": (arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim,
        "attended": arch.num_heads * arch.head_dim,
        "gated": arch.intermediate_size,
    }


class Workspace:
    """Activations of one layer at a time, for up to `num_tokens` tokens, and the logits.

    num_logit_rows: most rows whose logits are computed at once; num_decode_items: most pieces that
    the decodes of a step are cut into, by attention kernels that do so.
    """

    def __init__(
        self,
        arch: ModelArch,
        num_tokens: int,
        num_logit_rows: int,
        dtype: torch.dtype,
        device: torch.device,
        num_decode_items: int = 0,
    ) -> None:
        rows = {
            name: torch.empty((num_tokens, width), dtype=dtype, device=device)
            for name, width in _widths(arch).items()
        }
        self.hidden = rows["hidden"]
        """The residual stream."""
        self.normed, self.qkv = rows["normed"], rows["qkv"]
        self.attended, self.gated = rows["attended"], rows["gated"]
        self.logits = torch.empty(
            (num_logit_rows, arch.vocab_size), dtype=torch.float32, device=device
        )
        self.partial = torch.empty(
            (num_decode_items, arch.num_heads, arch.head_dim), dtype=torch.float32, device=device
        )
        """What each piece of a decode's context attends to."""
        self.partial_lse = torch.empty(
            (num_decode_items, arch.num_heads), dtype=torch.float32, device=device
        )
        """The logarithms of their weights."""

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers but the logits."""
        buffers = (self.hidden, self.normed, self.qkv, self.attended, self.gated)
        return sum(b.nbytes for b in (*buffers, self.partial, self.partial_lse))
