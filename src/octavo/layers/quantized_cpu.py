"""Linear layers on CPUs whose weights stay quantized: int8 and GGUF, through `ops.cpu.qgemm`.

GGUF's formats of 4 bits with a scale for each 32 weights (Q4_0, Q4_1, Q4_K) are held in 4.5 bits a
weight; all others, and plain weights that are to be quantized here, in int8 with a scale for each
output channel (Q8_0 and Q6_K lose nothing that could be measured).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from octavo.layers.activation import gated
from octavo.layers.gguf_weight import GGUFWeight
from octavo.layers.norm import Norm
from octavo.layers.quantized import QuantizedWeight, Weight
from octavo.ops.cpu import gemm, qgemm
from octavo.ops.cpu.qcodes import BLOCK, Codes, Codes4, concat, from_blocks, rounded

_CHUNK_ELEMENTS = 1 << 22
"""Weights whose codes are made at a time: some 80 MiB of intermediate values."""


class QuantizedLinear:
    """`x W^T + b` with W in codes; a `Linear`."""

    replayable = True

    def __init__(self, codes: Codes, bias: Tensor | None) -> None:
        self.packed = qgemm.pack(codes, bias)
        self.num_bytes = self.packed.num_bytes

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        return qgemm.linear(x, self.packed, out)

    def normed(self, x: Tensor, norm: Norm, buffer: Tensor, out: Tensor) -> Tensor:
        return self(norm(x, buffer), out)

    def add_to(self, x: Tensor, residual: Tensor) -> None:
        qgemm.linear(x, self.packed, residual, residual)


class QuantizedGated:
    """`act(x Wg^T + bg) * (x Wu^T + bu)` in one pass, for the activations of `gemm.GATED`; a
    `Gated`."""

    replayable = True

    def __init__(self, gate: Weight, up: Weight, bias: Tensor | None, activation: str) -> None:
        self._packed = qgemm.pack_gate_up(codes_of(gate), codes_of(up), bias, activation)
        self.num_bytes = self._packed.num_bytes

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        return qgemm.linear_gated(x, self._packed, out)

    def normed(self, x: Tensor, norm: Norm, buffer: Tensor, out: Tensor) -> Tensor:
        return self(norm(x, buffer), out)


class QuantizedPlainGated:
    """The same with any activation: one product, then the activation; a `Gated`."""

    replayable = False

    def __init__(self, gate: Weight, up: Weight, bias: Tensor | None, activation: str) -> None:
        self._packed = qgemm.pack(concat([codes_of(gate), codes_of(up)]), bias)
        self._activation, self.num_bytes = activation, self._packed.num_bytes

    def __call__(self, x: Tensor, out: Tensor) -> Tensor:
        both = qgemm.linear(x, self._packed, x.new_empty((len(x), self._packed.n)))
        return gated(both, self._activation, out)

    def normed(self, x: Tensor, norm: Norm, buffer: Tensor, out: Tensor) -> Tensor:
        return self(norm(x, buffer), out)


class QuantizedRows:
    """Rows of a packed weight as embeddings; an `Embedding`."""

    replayable = True

    def __init__(self, packed: qgemm.QuantizedPack, num_bytes: int) -> None:
        self._packed, self.num_bytes = packed, num_bytes

    def __call__(self, token_ids: Tensor, out: Tensor) -> Tensor:
        return qgemm.embedding(self._packed, token_ids, out)


def make_quantized_linear(
    weight: Weight, bias: Tensor | None = None, quantize: str | None = None
) -> QuantizedLinear:
    """weight [out_features, in_features] on the CPU: kept quantized, or, a plain one, made int8."""
    _check(weight, quantize)
    return QuantizedLinear(codes_of(weight), bias)


def make_quantized_joined(
    weights: Sequence[Weight], bias: Tensor | None = None
) -> QuantizedLinear | None:
    """One layer of weights one below the other, whatever their formats; None where some of them are
    held in 4 bits and some in 8."""
    codes = [codes_of(weight) for weight in weights]
    if len({type(part) for part in codes}) > 1:
        return None
    return QuantizedLinear(concat(codes), bias)


def make_quantized_gated(
    gate: Weight,
    up: Weight,
    bias: Tensor | None = None,
    activation: str = "silu",
    quantize: str | None = None,
) -> QuantizedGated | QuantizedPlainGated:
    """gate and up [intermediate, hidden], each as for `make_quantized_linear`."""
    _check(gate, quantize)
    if activation in gemm.GATED:
        return QuantizedGated(gate, up, bias, activation)
    return QuantizedPlainGated(gate, up, bias, activation)


def make_quantized_embedding(table: Weight, tied_head: object | None = None) -> QuantizedRows:
    """An embedding of table [vocab_size, hidden_size]; it reads a tied head's codes."""
    if isinstance(tied_head, QuantizedLinear):
        return QuantizedRows(tied_head.packed, 0)
    packed = qgemm.pack(codes_of(table))
    return QuantizedRows(packed, packed.num_bytes)


def _check(weight: Weight, quantize: str | None) -> None:
    assert quantize in (None, "int8"), f"{quantize!r} is not made on a CPU"
    assert isinstance(weight, QuantizedWeight) or quantize is not None


def codes_of(weight: Weight) -> Codes:
    """The codes of a weight, made of some rows at a time."""
    step = max(1, _CHUNK_ELEMENTS // weight.shape[1])
    parts = []
    for first in range(0, weight.shape[0], step):
        rows = slice(first, first + step)
        parts.append(_codes(weight[rows] if isinstance(weight, Tensor) else weight.rows(rows)))
    return parts[0] if len(parts) == 1 else concat(parts)


def _codes(weight: Weight) -> Codes:
    if isinstance(weight, Tensor):
        return rounded(weight)
    if isinstance(weight, GGUFWeight):
        four_bits = _FOUR_BITS.get(weight.format)
        if four_bits is not None:
            return four_bits(weight.raw)
    return rounded(weight.dequantize(torch.float32))


# -- GGUF's formats of 4 bits (https://github.com/ggml-org/ggml, src/ggml-quants.c). A raw row is a
# number of blocks; halves of 16 bits come first.


def _blocks(raw: Tensor, num_bytes: int, num_halves: int) -> tuple[Tensor, Tensor]:
    """float32 [rows, blocks, num_halves] numbers, and uint8 [rows, blocks, the rest]."""
    blocks = raw.contiguous().unflatten(1, (-1, num_bytes))
    halves = blocks[..., : 2 * num_halves].contiguous().view(torch.float16).float()
    return halves, blocks[..., 2 * num_halves :]


def _nibbles(packed: Tensor) -> Tensor:
    """uint8 [..., bytes] -> [..., 2 * bytes]: all low halves, then all high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _q4_0(raw: Tensor) -> Codes4:
    """d * (q - 8)."""
    halves, packed = _blocks(raw, 18, 1)
    d = halves[..., 0]
    return from_blocks(_nibbles(packed).flatten(1), d, -8 * d)


def _q4_1(raw: Tensor) -> Codes4:
    """d * q + m."""
    halves, packed = _blocks(raw, 20, 2)
    return from_blocks(_nibbles(packed).flatten(1), halves[..., 0], halves[..., 1])


def _q4_k(raw: Tensor) -> Codes4:
    """d * s * q - dmin * t: 256 weights with eight pairs (s, t) of 6 bits."""
    halves, rest = _blocks(raw, 144, 2)
    packed, q = rest[..., :12], rest[..., 12:]
    low, high = packed[..., :8] & 63, packed[..., :8] >> 6
    last = packed[..., 8:]
    s = torch.cat((low[..., :4], (last & 15) | (high[..., :4] << 4)), dim=-1)
    t = torch.cat((low[..., 4:], (last >> 4) | (high[..., 4:] << 4)), dim=-1)
    d = (halves[..., :1] * s).flatten(1)
    m = -(halves[..., 1:] * t).flatten(1)
    # 32 bytes hold two blocks of 32, one in their low halves and one in their high ones
    return from_blocks(_nibbles(q.unflatten(-1, (4, BLOCK))).flatten(1), d, m)


_FOUR_BITS: dict[str, Callable[[Tensor], Codes4]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q4_K": _q4_k}
