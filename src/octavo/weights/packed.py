"""How AWQ, GPTQ and compressed-tensors pack integers, and their repacking for kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from octavo.errors import WeightsError
from octavo.layers.grouped import GroupedWeight
from octavo.layers.quantized import QuantizedWeight
from octavo.ops.gpu.grouped import pack
from octavo.quantization import Quantization

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Of 8 columns those that lie in a word, lowest bits first."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredWeight(QuantizedWeight):
    """A linear of small integers as it lies in the file; repacked on the device it goes to."""

    name: str
    parts: dict[str, Tensor]
    """End of a tensor's name -> the tensor."""
    shape: tuple[int, int]
    """(out_features, in_features)."""
    quantization: Quantization

    @property
    def format(self) -> str:  # type: ignore[override]
        """The method's name."""
        return self.quantization.method

    @property
    def num_bytes(self) -> int:
        """See `QuantizedWeight`."""
        return sum(part.nbytes for part in self.parts.values())

    @property
    def device(self) -> torch.device:
        """See `QuantizedWeight`."""
        return next(iter(self.parts.values())).device

    def to(self, device: torch.device) -> GroupedWeight:
        """See `QuantizedWeight`. Raises `WeightsError` for parts that contradict each other."""
        return replace(self, parts={k: part.to(device) for k, part in self.parts.items()}).grouped()

    def rows(self, index: slice | Tensor) -> GroupedWeight:
        """See `QuantizedWeight`."""
        return self.grouped().rows(index)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """See `QuantizedWeight`."""
        return self.grouped().dequantize(dtype)

    def joined_with(self, others: Sequence[QuantizedWeight]) -> GroupedWeight | None:
        """See `QuantizedWeight`."""
        given = [w.grouped() if isinstance(w, StoredWeight) else w for w in others]
        return self.grouped().joined_with(given)

    def grouped(self) -> GroupedWeight:
        """In the packing of kernels, where it lies."""
        method = self.quantization.method
        readers = {"awq": self._awq, "gptq": self._gptq, "compressed-tensors": self._compressed}
        codes, scales, zeros, g_idx = readers[method]()
        width = self.shape[1]
        group = self.quantization.group_size
        if group < 0 or group > width:
            group = -(-width // 16) * 16
        num_groups = -(-width // group)
        for what, found in (("scales", scales), ("zero points", zeros)):
            if found is not None and found.shape != (self.shape[0], num_groups):
                raise WeightsError(
                    f"{self.name}: {what} of {list(found.shape)} for {num_groups} groups of "
                    f"{self.shape[0]} outputs ({self.quantization.text}); download the file again"
                )
        order = self._order(g_idx, group)
        if order is not None:
            codes = codes[:, order]
        bits = max(self.quantization.bits, 4)
        return GroupedWeight(
            pack(codes, bits),
            scales.contiguous(),
            None if zeros is None else zeros.to(scales.dtype).contiguous(),
            bits,
            group,
            self.shape,
            method,
            zero_point=0 if zeros is not None else 2 ** (self.quantization.bits - 1),
            order=None if order is None else order.to(torch.int32),
        )

    def _order(self, g_idx: Tensor | None, group: int) -> Tensor | None:
        """Inputs by group, where they do not come so."""
        if g_idx is None:
            return None
        width = self.shape[1]
        as_they_come = torch.arange(width, device=g_idx.device) // group
        order = g_idx.argsort(stable=True)
        if not torch.equal(g_idx[order].long(), as_they_come):
            raise WeightsError(
                f"{self.name}: g_idx does not put {group} inputs into each group; download the "
                "file again"
            )
        return None if torch.equal(g_idx.long(), as_they_come) else order

    # -- [out, in] uint8 codes; [out, groups] scales and zero points; groups of inputs

    def _awq(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        codes = _unpacked(self.parts[".qweight"], 4, _AWQ_ORDER)
        zeros = _unpacked(self.parts[".qzeros"], 4, _AWQ_ORDER)
        return codes.t(), self.parts[".scales"].t(), zeros.t(), None

    def _gptq(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        bits, offset = self.quantization.bits, self.quantization.zero_offset
        codes = _unpacked(self.parts[".qweight"].t(), bits)
        zeros = _unpacked(self.parts[".qzeros"], bits)
        # what was 0 is stored as the largest number, where 1 is taken off
        zeros = (zeros + offset) & (2**bits - 1)
        return codes, self.parts[".scales"].t(), zeros.t(), self.parts.get(".g_idx")

    def _compressed(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        bits, (num_rows, width) = self.quantization.bits, self.shape
        codes = _unpacked(self.parts[".weight_packed"], bits)[:, :width]
        zeros = None
        if not self.quantization.symmetric:
            zeros = _unpacked(self.parts[".weight_zero_point"].t(), bits).t()[:num_rows]
        scales = self.parts[".weight_scale"]
        return codes, scales, zeros, self.parts.get(".weight_g_idx")


def _unpacked(words: Tensor, bits: int, order: Sequence[int] = ()) -> Tensor:
    """[rows, n] int32 -> [rows, n * 32 / bits] uint8, from the lowest bits up, or in some order."""
    per_word, per_byte = 32 // bits, 8 // bits
    # a byte at a time, since words lie with their lowest byte first
    shifts = torch.arange(per_byte, dtype=torch.uint8, device=words.device) * bits
    octets = words.contiguous().view(torch.uint8)
    codes = ((octets[:, :, None] >> shifts) & (2**bits - 1)).view(len(words), -1, per_word)
    if order:
        places = [order.index(i) for i in range(per_word)]
        codes = codes[:, :, places]
    return codes.reshape(len(words), -1)
