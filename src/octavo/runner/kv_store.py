"""The KV pool's tensor: one allocation, one block one contiguous piece of it."""

from __future__ import annotations

import torch

from octavo.ops.cpu.memory import use_huge_pages
from octavo.plan import BlockCopy


class KVStore:
    """K and V of every block.

    Layout `[num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim]`: all that belongs to a
    block, over all layers, is one contiguous piece, so that copying it, swapping it out or sending
    it elsewhere is one copy; inside, the tokens of one head lie side by side (HND), which is the
    order in which an attention kernel streams them.
    """

    def __init__(
        self,
        num_blocks: int,
        num_layers: int,
        num_kv_heads: int,
        block_size: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim)
        # Unwritten slots are never read, so the memory needs no initial value; on a CPU the
        # operating system hands out pages only as blocks are first written.
        self.data = torch.empty(shape, dtype=dtype, device=device)
        if device.type == "cpu":
            use_huge_pages(self.data)

    def copy(self, copies: list[BlockCopy]) -> None:
        """Copy whole blocks, in order. A later copy may read what an earlier one wrote."""
        for src, dst in copies:
            self.data[dst].copy_(self.data[src])
