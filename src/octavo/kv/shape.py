"""What of a model decides how large its KV is: bytes of a token, a slot, a block."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.util import cdiv


@dataclass(frozen=True, slots=True)
class KVShape:
    """What of a model decides the bytes of a token's KV."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    element_bytes: int
    """Bytes of one number in the KV cache: 2 for bfloat16, 4 for float32, 1 for fp8 and int8."""
    scale_bytes: int = 0
    """Bytes of the scale that each head of a token has in each plane: 2 under fp8 and int8."""
    planes: int = 2
    """2: K and V. 1: what is kept of a token serves as both (a latent, MLA)."""
    windows: tuple[int, ...] = (0,)
    """By group of layers the attention window in tokens, 0: all before. Groups have equally many
    layers; a block holds tokens for the layers of one group."""
    num_padding: int = 0
    """Of `num_layers` those that the model does not have: groups are filled up."""

    @property
    def layers_per_block(self) -> int:
        """Layers whose KV a block holds: those of a group."""
        return self.num_layers // len(self.windows)

    @property
    def bytes_per_token(self) -> int:
        """layers x kv_heads x head_dim x 2 (K and V) x bytes per element (paper section 3), and
        the scales; of one token that no layer has given up."""
        per_head = self.head_dim * self.element_bytes + self.scale_bytes
        return self.num_layers * self.num_kv_heads * self.planes * per_head

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one token in one block."""
        return self.bytes_per_token // len(self.windows)

    def bytes_per_block(self, block_size: int) -> int:
        """Bytes of one block of `block_size` tokens, over all layers of a group; with scales behind
        its codes it is filled up to whole 16 bytes."""
        num_bytes = block_size * self.bytes_per_slot
        return num_bytes if not self.scale_bytes else cdiv(num_bytes, 16) * 16

    def block_terms(self, block_size: int) -> str:
        """The arithmetic of `bytes_per_block`, without its result."""
        text = f"{block_size} tokens x {self.bytes_per_slot:,} B"
        padding = self.bytes_per_block(block_size) - block_size * self.bytes_per_slot
        return f"{text} + {padding} B of padding" if padding else text

    def __str__(self) -> str:
        kind = "2 (K, V)" if self.planes == 2 else "1 (latent)"
        element = f"{self.head_dim} x {kind} x {self.element_bytes} B"
        if self.scale_bytes:
            element = f"{kind} x ({self.head_dim} x {self.element_bytes} + {self.scale_bytes}) B"
        of_them = f" ({self.num_padding} of padding)" if self.num_padding else ""
        text = (
            f"{self.num_layers} layers{of_them} x {self.num_kv_heads} kv heads x {element} = "
            f"{self.bytes_per_token:,} B a token"
        )
        return f"{text}, {self.groups_phrase}" if any(self.windows) else text

    @property
    def groups_phrase(self) -> str:
        """`1 group of 3 layers that keeps all, 5 that keep 512 tokens`."""
        parts: list[str] = []
        for window in dict.fromkeys(self.windows):
            num = self.windows.count(window)
            what = f"{window:,} tokens" if window else "all"
            noun = "" if parts else f" group{'s' * (num > 1)} of {self.layers_per_block} layers"
            parts.append(f"{num}{noun} that keep{'s' * (num == 1)} {what}")
        return ", ".join(parts)
