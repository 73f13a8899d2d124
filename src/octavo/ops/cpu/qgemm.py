"""Linear layers on CPU with quantized weights: launcher of csrc/qgemm.c.

Weights are int8 codes with a scale for each output channel, held in 8 bits or made from 4 as they
are read (`qcodes`). A row of activations is rounded with a step of its own, to 8 bits but for the
few values that are far above its root mean square, which get 16 (8 bits for all would cost 2 % of
perplexity), and all products are summed as integers.

Bits: a row of the result depends on that row of x alone, never on the batch, the number of
threads, the row's place or the kernel that computed it: sums of integers are exact. Without
AVX512_VNNI bias, residual and activation may be rounded differently.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from octavo.ops.cpu import native
from octavo.ops.cpu.gemm import (
    GATED,
    KINDS,
    Kind,
    check_bias,
    check_found,
    check_ids,
    check_rows,
    interleaved,
    padded,
)
from octavo.ops.cpu.memory import in_huge_pages
from octavo.ops.cpu.qcodes import BLOCK, Codes, Codes4, Codes8, concat

_GROUP, _HALF, _KSTEP = 32, 16, 64
_OUT_F32, _RESIDUAL_F32, _X_F32 = 1, 2, 1 << 16
_MAX_K = 1 << 16
"""255 * 128 * k, the largest sum of low bytes, must fit 31 bits."""
_LEVELS = ("avx512_bf16", "amx")
_NO_MEMORY = 2
# struct qgemm_args and qgemm_rows_args of csrc/qgemm.h.
_pack_gemm = struct.Struct("@2P5q2Pq3P4q2i").pack
_pack_rows = struct.Struct("@2P5q2Pq2P2q2i").pack
_FLOATS = (torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class QuantizedPack:
    """A weight in the layout of csrc/qgemm.h, made by `pack` or `pack_gate_up`."""

    data: Tensor
    """uint8: [num_groups, kp / 64, 2048] codes of 8 bits, or [num_groups, kp / 32, 576] of 4."""
    scales: Tensor
    """float32 [num_groups * 32]."""
    sums: Tensor
    """int32 [num_groups * 32]: of each channel's codes."""
    bias: Tensor | None
    """float32 [num_groups * 32] in the order of the packed channels."""
    bits: int
    n: int
    """Columns of the result: out_features, or the intermediate size of a gate-up weight."""
    k: int
    """Columns of x: in_features."""
    kind: Kind

    @property
    def num_bytes(self) -> int:
        """Memory it takes."""
        parts = (self.data, self.scales, self.sums, self.bias)
        return sum(part.nbytes for part in parts if part is not None)

    def _fields(self) -> tuple[int, ...]:
        """struct qgemm_weight."""
        groups, steps = self.data.shape[:2]
        kp = steps * (_KSTEP if self.bits == 8 else BLOCK)
        bias = 0 if self.bias is None else self.bias.data_ptr()
        kind = KINDS[self.kind]
        return (
            self.data.data_ptr(), bias, self.n, self.k, kp, groups, kind,
            self.scales.data_ptr(), self.sums.data_ptr(), self.bits,
        )  # fmt: skip


def is_available() -> bool:
    """True if this process can run `linear` at all: the C library is there."""
    return native.isa() != "none"


def is_fast() -> bool:
    """True if it runs with AVX512_VNNI or AMX, and so faster than bf16 or float32."""
    return native.isa() in _LEVELS


def supports(in_features: int) -> bool:
    """True if weights of so many columns can be packed: the sums fit 32 bits."""
    return 0 < in_features <= _MAX_K


def pack(codes: Codes, bias: Tensor | None = None) -> QuantizedPack:
    """Packs the codes of a weight [n, k] and bias [n] (bf16 or float32) for `linear`.

    Raises: TypeError or ValueError for a bias of the wrong kind, ValueError for too large a k.
    """
    n = len(codes.scales)
    check_bias(bias, n)
    biases = None if bias is None else padded(bias.float(), -n % _GROUP)
    return _packed(codes.padded(-n % _GROUP), biases, n, "plain")


def pack_gate_up(
    gate: Codes, up: Codes, bias: Tensor | None = None, activation: str = "silu"
) -> QuantizedPack:
    """Packs gate and up, both [n, k], for `linear_gated`; bias [2 n], gate's then up's.

    As `gemm.pack_gate_up`. If only one of them is `Codes4` it is widened.
    """
    if activation not in GATED:
        raise ValueError(f"activation must be one of {GATED}: {activation!r}")
    n = len(gate.scales)
    if n != len(up.scales):
        raise ValueError(f"gate and up must be alike, not of {n} and {len(up.scales)} rows")
    check_bias(bias, 2 * n)
    biases = None if bias is None else interleaved(*bias.float().split(n))
    fill = -n % _HALF
    both = concat([gate.padded(fill), up.padded(fill)])
    rows = torch.arange(2 * (n + fill)).view(2, -1, _HALF).transpose(0, 1).flatten()
    kind: Kind = "gate_up" if activation == "silu" else "gate_up_gelu_tanh"
    return _packed(both.ordered(rows), biases, n, kind)


def linear(x: Tensor, packed: QuantizedPack, out: Tensor, residual: Tensor | None = None) -> Tensor:
    """`x W^T + bias + residual`, rounded once, at the end.

    Args:
        x: bf16 or float32 [num_rows, k], dense rows at any stride.
        packed: from `pack`.
        out: [num_rows, n], bf16 or float32, dense rows at any stride; must not overlap x.
        residual: [num_rows, n], bf16 or float32; may be `out`, but not overlap it otherwise.

    Returns: out.
    Raises: TypeError for dtypes, ValueError for shapes and strides, RuntimeError where
    `is_available()` is False, MemoryError.
    """
    if packed.kind != "plain":
        raise ValueError("linear needs a weight from pack, this one is from pack_gate_up")
    return _run(x, packed, out, residual)


def linear_gated(x: Tensor, packed: QuantizedPack, out: Tensor) -> Tensor:
    """`act(x Wg^T + bg) * (x Wu^T + bu)`, [num_rows, n]; as `linear`, packed by `pack_gate_up`."""
    if packed.kind == "plain":
        raise ValueError("linear_gated needs a weight from pack_gate_up, this one is from pack")
    return _run(x, packed, out, None)


def embedding(packed: QuantizedPack, ids: Tensor, out: Tensor) -> Tensor:
    """Rows `ids` (int64 or int32 [count]) of the weight into out, [count, k] bf16 or float32.

    Raises: TypeError for dtypes; ValueError for shapes, ids out of range (nothing is written
    then) and gate-up weights; RuntimeError without the C library.
    """
    check_ids(packed.kind, ids)
    count, ids = ids.shape[0], ids.long().contiguous()
    check_rows("out", out, count, packed.k, _FLOATS)
    args = _pack_rows(
        *packed._fields(), ids.data_ptr(), out.data_ptr(), count, out.stride(0),
        int(out.dtype is torch.float32), torch.get_num_threads(),
    )  # fmt: skip
    check_found(_call("octavo_qgemm_rows", args), ids, packed.n)
    return out


def _run(x: Tensor, packed: QuantizedPack, out: Tensor, residual: Tensor | None) -> Tensor:
    num_rows = x.shape[0] if x.dim() == 2 else -1
    check_rows("x", x, num_rows, packed.k, _FLOATS)
    check_rows("out", out, num_rows, packed.n, _FLOATS)
    flags = _OUT_F32 if out.dtype is torch.float32 else 0
    flags |= _X_F32 if x.dtype is torch.float32 else 0
    residual_ptr = residual_stride = 0
    if residual is not None:
        check_rows("residual", residual, num_rows, packed.n, _FLOATS)
        residual_ptr, residual_stride = residual.data_ptr(), residual.stride(0)
        flags |= _RESIDUAL_F32 if residual.dtype is torch.float32 else 0
    args = _pack_gemm(
        *packed._fields(), x.data_ptr(), out.data_ptr(), residual_ptr,
        x.stride(0), num_rows, out.stride(0), residual_stride,
        flags, torch.get_num_threads(),
    )  # fmt: skip
    if num_rows and _call("octavo_qgemm", args) == _NO_MEMORY:
        raise MemoryError(f"no memory to round {num_rows} rows of {packed.k} activations")
    return out


def _call(name: str, args: bytes) -> int:
    function = native.function(name)
    if function is None:
        raise RuntimeError("the C library of the CPU kernels is not available")
    return function(args)


def _packed(codes: Codes, bias: Tensor | None, n: int, kind: Kind) -> QuantizedPack:
    """codes: of whole groups, in the order of the packed channels."""
    wide = codes.widened() if isinstance(codes, Codes4) else codes
    k = wide.codes.shape[1]
    if not supports(k):
        raise ValueError(f"k must be from 1 to {_MAX_K}, not {k}: sums of products fit 32 bits")
    sums = wide.codes.sum(dim=1, dtype=torch.int32)
    data = _to_groups4(codes) if isinstance(codes, Codes4) else _to_groups8(wide)
    bits = 4 if isinstance(codes, Codes4) else 8
    data = in_huge_pages(data)
    return QuantizedPack(data, codes.scales.contiguous(), sums, bias, bits, n, k, kind)


def _to_groups8(codes: Codes8) -> Tensor:
    rows = codes.codes
    if rows.shape[1] % _KSTEP:
        rows = torch.nn.functional.pad(rows, (0, -rows.shape[1] % _KSTEP))
    quads = rows.contiguous().view(torch.int32)  # an element is four codes along k
    quads = quads.view(-1, 2, _HALF, quads.shape[1] // _HALF, _HALF)
    groups = quads.permute(0, 3, 1, 4, 2).contiguous()
    return groups.view(torch.uint8).flatten(2)


def _to_groups4(codes: Codes4) -> Tensor:
    q, fill = codes.q, -codes.q.shape[1] % _KSTEP
    if fill:
        q = torch.nn.functional.pad(q, (0, fill))
    blocks = q.contiguous().view(torch.int32)
    # [group, half, channel, block, first or second quad, quad]
    blocks = blocks.view(-1, 2, _HALF, blocks.shape[1] // 8, 2, 4)
    both = blocks[..., 0, :] | (blocks[..., 1, :] << 4)
    both = both.permute(0, 3, 1, 4, 2).contiguous().view(torch.uint8).flatten(2)
    parts = [both]
    for shared in (codes.a, codes.c.view(torch.uint8)):
        filled = torch.nn.functional.pad(shared, (0, fill // BLOCK)) if fill else shared
        parts.append(filled.view(-1, _GROUP, filled.shape[1]).transpose(1, 2))
    return torch.cat(parts, dim=2)
