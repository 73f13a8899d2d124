"""Buffers that every step writes its activations into.

Made once for the largest step: a step then allocates nothing, its memory is known to the byte, and
its addresses never change, so that recorded kernel calls can be replayed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.arch import ModelArch


class Workspace:
    """Activations of one layer at a time, for up to `num_tokens` tokens, and the logits.

    num_logit_rows: most rows whose logits are computed at once.
    """

    def __init__(
        self,
        arch: ModelArch,
        num_tokens: int,
        num_logit_rows: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        def rows(width: int) -> Tensor:
            return torch.empty((num_tokens, width), dtype=dtype, device=device)

        qkv_size = (arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim
        self.hidden = rows(arch.hidden_size)
        """The residual stream."""
        self.normed = rows(arch.hidden_size)
        self.qkv = rows(qkv_size)
        self.attended = rows(arch.num_heads * arch.head_dim)
        self.gated = rows(arch.intermediate_size)
        self.logits = torch.empty(
            (num_logit_rows, arch.vocab_size), dtype=torch.float32, device=device
        )

    @property
    def activation_bytes(self) -> int:
        """Everything but the logits."""
        parts = (self.hidden, self.normed, self.qkv, self.attended, self.gated)
        return sum(part.numel() * part.element_size() for part in parts)

    @property
    def logits_bytes(self) -> int:
        """The logits of a step."""
        return self.logits.numel() * self.logits.element_size()
