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


def has_branches(arch: ModelArch) -> bool:
    """Whether what a sublayer computes is held before it is added to the residual stream."""
    return arch.norm_placement != "pre" or arch.parallel_residual or arch.residual_scale != 1.0


def _widths(arch: ModelArch) -> dict[str, int]:
    """Elements a token has in each buffer."""
    return {
        "hidden": arch.hidden_size,
        "normed": arch.hidden_size,
        "branch": arch.hidden_size if has_branches(arch) else 0,
        "qkv": 0 if arch.mla else (arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim,
        "attended": arch.num_heads * (arch.mla.v_head_dim if arch.mla else arch.head_dim),
        "gated": max(arch.intermediate_size, arch.moe.shared_size if arch.moe else 0),
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
        self.branch = rows["branch"]
        """What a sublayer is about to add to it; [num_tokens, 0] where it adds directly."""
        self.normed, self.qkv = rows["normed"], rows["qkv"]
        self.attended, self.gated = rows["attended"], rows["gated"]
        self.logits = torch.empty(
            (num_logit_rows, arch.vocab_size), dtype=torch.float32, device=device
        )
        value_dim = arch.head_dim if arch.mla is None else arch.mla.kv_lora_rank
        self.partial = torch.empty(
            (num_decode_items, arch.num_heads, value_dim), dtype=torch.float32, device=device
        )
        """What each piece of a decode's context attends to."""
        self.partial_lse = torch.empty(
            (num_decode_items, arch.num_heads), dtype=torch.float32, device=device
        )
        """The logarithms of their weights."""

    @property
    def num_bytes(self) -> int:
        """Memory of all buffers but the logits."""
        buffers = (
            self.hidden, self.branch, self.normed, self.qkv, self.attended, self.gated
        )  # fmt: skip
        return sum(b.nbytes for b in (*buffers, self.partial, self.partial_lse))
