"""What weights are rounded to for `qgemm`: int8 codes with a scale for each output channel.

W[n, k] = scales[n] * code[n, k]. Formats of 8 bits and others than the two below are rounded to
int8 (`rounded`). Formats of 4 bits with a scale and perhaps an offset for each 32 values keep their
4 bits, and an integer rule that makes int8 codes of them as they are read (`Codes4`): one product
in integers serves all, at any number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

BLOCK = 32
"""Values along k that share the two numbers of `Codes4`."""
_LEVELS, _MOST_A, _STEPS = 127, 255, 16
_LEVELS_4 = 125
"""Of `Codes4`: its two roundings may each go one further."""


@dataclass(frozen=True, slots=True)
class Codes8:
    """Eight bits for a weight."""

    codes: Tensor
    """int8 [n, k]."""
    scales: Tensor
    """float32 [n]."""

    def values(self) -> Tensor:
        """float32 [n, k]: what it stands for."""
        return self.codes.float() * self.scales[:, None]

    def padded(self, rows: int) -> Codes8:
        """With so many rows of zeros behind it."""
        return Codes8(_padded(self.codes, rows), _padded(self.scales, rows))

    def ordered(self, index: Tensor) -> Codes8:
        """Its rows `index`."""
        return Codes8(self.codes[index], self.scales[index])


@dataclass(frozen=True, slots=True)
class Codes4:
    """Four bits for a weight, sixteen more for each 32: code = (a * q >> 4) + c, modulo 256."""

    q: Tensor
    """uint8 [n, k], 0 to 15; k is a multiple of 32."""
    a: Tensor
    """uint8 [n, k / 32]."""
    c: Tensor
    """int8 [n, k / 32]."""
    scales: Tensor
    """float32 [n]."""

    def widened(self) -> Codes8:
        """The same with its codes spelt out."""
        steps = self.q.unflatten(1, (-1, BLOCK)).int() * self.a[..., None].int() // _STEPS
        return Codes8((steps + self.c[..., None]).flatten(1).to(torch.int8), self.scales)

    def padded(self, rows: int) -> Codes4:
        """With so many rows of zeros behind it."""
        return Codes4(*(_padded(t, rows) for t in (self.q, self.a, self.c, self.scales)))

    def ordered(self, index: Tensor) -> Codes4:
        """Its rows `index`."""
        return Codes4(self.q[index], self.a[index], self.c[index], self.scales[index])


Codes: TypeAlias = Codes8 | Codes4


def rounded(weight: Tensor) -> Codes8:
    """weight [n, k] of any float type in 255 levels, symmetric around zero in each row."""
    values = weight.float()
    scales = _nonzero(values.abs().amax(dim=1) / _LEVELS)
    codes = (values / scales[:, None]).round_().clamp_(-_LEVELS, _LEVELS)
    return Codes8(codes.to(torch.int8), scales)


def from_blocks(q: Tensor, d: Tensor, m: Tensor) -> Codes4:
    """Weights d * q + m, with q [n, k] uint8, 0 to 15, and d, m [n, k / 32] float32.

    d and m are rounded on the int8 grid of their row (d to a sixteenth of its step), which adds a
    twentieth or so to the error that 4 bits have anyway.
    """
    blocks = q.unflatten(1, (-1, BLOCK))
    blocks = torch.where(d[..., None] < 0, 15 - blocks, blocks)
    m, d = torch.where(d < 0, m + 15 * d, m), d.abs()
    values = d[..., None] * blocks + m[..., None]
    least = values.abs().amax(dim=(1, 2)) / _LEVELS_4
    scales = _nonzero(torch.maximum(least, d.amax(dim=1) * _STEPS / _MOST_A))
    a = (d / scales[:, None] * _STEPS).round_().clamp_(0, _MOST_A)
    steps = torch.floor(a[..., None] * blocks / _STEPS)
    # the offset takes what the flooring lost on average
    c = (values / scales[:, None, None] - steps).mean(dim=2).round_()
    highest, lowest = steps.amax(dim=2) + c, steps.amin(dim=2) + c
    assert int(highest.max()) <= _LEVELS and int(lowest.min()) >= -_LEVELS - 1
    # by way of int16: an offset may be below -128 where the steps are high, and then wraps around
    return Codes4(blocks.flatten(1), a.to(torch.uint8), c.short().to(torch.int8), scales)


def concat(parts: list[Codes]) -> Codes:
    """One below the other; all of one kind, or else widened."""
    fours = [part for part in parts if isinstance(part, Codes4)]
    if len(fours) == len(parts):
        return Codes4(
            torch.cat([p.q for p in fours]),
            torch.cat([p.a for p in fours]),
            torch.cat([p.c for p in fours]),
            torch.cat([p.scales for p in fours]),
        )
    eights = [part.widened() if isinstance(part, Codes4) else part for part in parts]
    return Codes8(torch.cat([p.codes for p in eights]), torch.cat([p.scales for p in eights]))


def _nonzero(scales: Tensor) -> Tensor:
    """A row of zeros may have any scale but zero."""
    return torch.where(scales > 0, scales, torch.ones_like(scales))


def _padded(t: Tensor, rows: int) -> Tensor:
    return torch.cat((t, t.new_zeros(rows, *t.shape[1:]))) if rows else t
