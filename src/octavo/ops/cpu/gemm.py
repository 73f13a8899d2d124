"""bf16 linear layers on CPU with weights packed once: launcher of csrc/gemm.c.

One packed copy of a weight serves every batch size: it is streamed at the speed of memory for one
row, and multiplied in AMX tiles or AVX512_BF16 registers for many. Bias, residual and
gated activation are fused into the pass.

Bits: a row of the result depends on that row of x alone, never on the batch, the number of
threads or the row's place. AMX and AVX512_BF16 add products in different orders, so their results
agree to float32 rounding, not bit for bit. Both treat denormal inputs and products as zero.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from octavo.ops.cpu import native
from octavo.ops.cpu.memory import in_huge_pages

Kind = Literal["plain", "gate_up", "gate_up_gelu_tanh"]
KINDS: dict[Kind, int] = {"plain": 0, "gate_up": 1, "gate_up_gelu_tanh": 2}
GATED = ("silu", "gelu_tanh")
"""Activations that `linear_gated` knows."""

_GROUP, _HALF, _KSTEP = 32, 16, 32
_OUT_F32, _RESIDUAL_F32 = 1, 2
_LEVELS = ("avx512_bf16", "amx")
# struct gemm_args and embedding_args of csrc/gemm.h. Packing bytes is several times faster than
# filling a ctypes.Structure.
_pack_gemm = struct.Struct("@2P5q4P4q2i").pack
_pack_embedding = struct.Struct("@2P5q2P2qi").pack


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight in the layout of csrc/gemm.h, made by `pack` or `pack_gate_up`."""

    data: Tensor
    """bf16 [num_groups, kp / 32, 2, 16, 16, 2]: 32 output channels a group, zero padded."""

    bias: Tensor | None
    """float32 [num_groups * 32] in the order of the packed channels."""

    n: int
    """Columns of the result: out_features, or the intermediate size of a gate-up weight."""

    k: int
    """Columns of x: in_features."""

    kind: Kind

    @property
    def num_bytes(self) -> int:
        """Memory it takes."""
        bias_bytes = 0 if self.bias is None else self.bias.numel() * 4
        return self.data.numel() * 2 + bias_bytes

    def _fields(self) -> tuple[int, int, int, int, int, int, int]:
        """struct gemm_weight."""
        groups, steps = self.data.shape[:2]
        bias = 0 if self.bias is None else self.bias.data_ptr()
        kind = KINDS[self.kind]
        return self.data.data_ptr(), bias, self.n, self.k, steps * _KSTEP, groups, kind


def is_available() -> bool:
    """True if this process can run `linear`: the C library and AVX512_BF16 or AMX.

    Otherwise use torch: `torch.nn.functional.linear`. `pack`, `unpack` need nothing.
    """
    return native.isa() in _LEVELS


def supports(in_features: int) -> bool:
    """True if a weight with that many columns can be packed: a positive even number."""
    return in_features > 0 and in_features % 2 == 0


def pack(weight: Tensor, bias: Tensor | None = None) -> PackedWeight:
    """Packs weight [n, k] (bf16, CPU, k even) and bias [n] (bf16 or float32) for `linear`.

    The copy takes n * k * 2 bytes, with n and k rounded up to multiples of 32.
    Raises: TypeError for dtypes and devices, ValueError for shapes.
    """
    _check_weight("weight", weight)
    n, k = weight.shape
    check_bias(bias, n)
    rows = padded(weight, -n % _GROUP)
    biases = None if bias is None else padded(bias.float(), -n % _GROUP)
    return PackedWeight(_to_groups(rows), biases, n, k, "plain")


def pack_gate_up(
    gate: Tensor, up: Tensor, bias: Tensor | None = None, activation: str = "silu"
) -> PackedWeight:
    """Packs gate and up, both [n, k] (bf16, CPU, k even), for `linear_gated`.

    activation: one of `GATED`; bias: [2 n], gate's then up's (bf16 or float32). 16 channels of
    gate and the same 16 of up lie together, so that the kernel has both sides of a product at once.
    Raises: TypeError for dtypes and devices, ValueError for shapes and activations.
    """
    if activation not in GATED:
        raise ValueError(f"activation must be one of {GATED}: {activation!r}")
    _check_weight("gate", gate)
    _check_weight("up", up)
    if gate.shape != up.shape:
        raise ValueError(f"gate {list(gate.shape)} and up {list(up.shape)} must be alike")
    n, k = gate.shape
    check_bias(bias, 2 * n)
    biases = None if bias is None else interleaved(*bias.float().split(n))
    kind: Kind = "gate_up" if activation == "silu" else "gate_up_gelu_tanh"
    return PackedWeight(_to_groups(interleaved(gate, up)), biases, n, k, kind)


def unpack(packed: PackedWeight) -> Tensor:
    """The weight [n, k] as `pack` took it; of a gate-up weight gate over up, [2 n, k]."""
    words = packed.data.view(torch.int32).squeeze(-1)  # [groups, steps, 2, k-pairs, channels]
    rows = words.permute(0, 2, 4, 1, 3).reshape(-1, words.shape[1] * _HALF)
    rows = rows.view(torch.bfloat16)[:, : packed.k]
    if packed.kind == "plain":
        return rows[: packed.n].contiguous()
    both = rows.reshape(-1, 2, _HALF, packed.k).transpose(0, 1).reshape(2, -1, packed.k)
    return both[:, : packed.n].reshape(2 * packed.n, packed.k)


def linear(
    x: Tensor,
    packed: PackedWeight,
    out: Tensor | None = None,
    residual: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`x W^T + bias + residual`. Sums in float32 and rounds once, at the end.

    Args:
        x: bf16 [num_rows, k], dense rows at any stride.
        packed: from `pack`.
        out: [num_rows, n], bf16 or float32, dense rows at any stride; must not overlap x.
        residual: [num_rows, n], bf16 or float32; may be `out`, but not overlap it otherwise.
        out_dtype: of the result if `out` is not given; default bf16.

    Returns: out, or a new tensor.
    Raises: TypeError for dtypes, ValueError for shapes and strides, RuntimeError where
    `is_available()` is False.
    """
    if packed.kind != "plain":
        raise ValueError("linear needs a weight from pack, this one is from pack_gate_up")
    return _run(x, packed, out, residual, out_dtype)


def linear_gated(x: Tensor, packed: PackedWeight, out: Tensor | None = None) -> Tensor:
    """`act(x Wg^T + bg) * (x Wu^T + bu)`, [num_rows, n] bf16, without the [num_rows, 2 n] between.

    Arguments as for `linear`, packed from `pack_gate_up`. float32 inside, rounded once.
    """
    if packed.kind == "plain":
        raise ValueError("linear_gated needs a weight from pack_gate_up, this one is from pack")
    return _run(x, packed, out, None, None)


def embedding(packed: PackedWeight, ids: Tensor, out: Tensor | None = None) -> Tensor:
    """Rows `ids` of the weight given to `pack`, so that tied embeddings are held once.

    Args:
        ids: int64 or int32 [count], each in [0, n).
        out: bf16 [count, k], dense rows at any stride.

    Returns: out, or a new tensor.
    Raises: TypeError for dtypes; ValueError for shapes, ids out of range (nothing is written
    then) and gate-up weights; RuntimeError without the C library.
    """
    check_ids(packed.kind, ids)
    count, ids = ids.shape[0], ids.long().contiguous()
    if out is None:
        out = torch.empty(count, packed.k, dtype=torch.bfloat16)
    else:
        check_rows("out", out, count, packed.k, (torch.bfloat16,))
    args = _pack_embedding(
        *packed._fields(), ids.data_ptr(), out.data_ptr(), count, out.stride(0),
        torch.get_num_threads(),
    )  # fmt: skip
    check_found(_call("octavo_gemm_embedding", args), ids, packed.n)
    return out


def check_ids(kind: str, ids: Tensor) -> None:
    """Of an embedding's arguments those that weights of all kinds have."""
    if kind != "plain":
        raise ValueError("embedding needs a weight from pack, this one is from pack_gate_up")
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"ids must be int64 or int32, not {ids.dtype}")
    if ids.dim() != 1:
        raise ValueError(f"ids must be [count], not {list(ids.shape)}")


def check_found(status: int, ids: Tensor, num_rows: int) -> None:
    """Raise what the library says of ids: 0, or 1 more than the place of the first out of range."""
    bad = status - 1
    if bad >= 0:
        raise ValueError(f"ids[{bad}] is {int(ids[bad])}; ids must be in [0, {num_rows})")


def _run(
    x: Tensor,
    packed: PackedWeight,
    out: Tensor | None,
    residual: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    num_rows = x.shape[0] if x.dim() == 2 else -1
    fields = packed._fields()
    k, kp = fields[3], fields[4]
    check_rows("x", x, num_rows, k, (torch.bfloat16,))
    if out is None:
        dtype = torch.bfloat16 if out_dtype is None else out_dtype
        check_dtype("out_dtype", dtype, _RESULTS)
        out = torch.empty(num_rows, packed.n, dtype=dtype)
    else:
        check_rows("out", out, num_rows, packed.n, _RESULTS)
        if out_dtype is not None and out_dtype != out.dtype:
            raise TypeError(f"out is {out.dtype}, but out_dtype is {out_dtype}")
    flags = _OUT_F32 if out.dtype is torch.float32 else 0
    residual_ptr = residual_stride = scratch_ptr = 0
    if residual is not None:
        check_rows("residual", residual, num_rows, packed.n, _RESULTS)
        residual_ptr, residual_stride = residual.data_ptr(), residual.stride(0)
        flags |= _RESIDUAL_F32 if residual.dtype is torch.float32 else 0
    if k != kp:
        native.cannot_replay()
        scratch = torch.empty(num_rows, kp, dtype=torch.bfloat16)
        scratch_ptr = scratch.data_ptr()
    args = _pack_gemm(
        *fields, x.data_ptr(), out.data_ptr(), residual_ptr, scratch_ptr,
        x.stride(0), num_rows, out.stride(0), residual_stride,
        flags, torch.get_num_threads(),
    )  # fmt: skip
    if num_rows and _call("octavo_gemm", args):
        raise RuntimeError(f"linear needs one of {_LEVELS}; this process has {native.isa()!r}")
    return out


_RESULTS = (torch.bfloat16, torch.float32)


def _call(name: str, args: bytes) -> int:
    function = native.function(name)
    if function is None:
        raise RuntimeError("the C library of the CPU kernels is not available")
    return function(args)


def check_dtype(name: str, dtype: torch.dtype, allowed: tuple[torch.dtype, ...]) -> None:
    if dtype not in allowed:
        raise TypeError(f"{name} must be {' or '.join(map(str, allowed))}, not {dtype}")


def check_rows(
    name: str, t: Tensor, num_rows: int, size: int, dtypes: tuple[torch.dtype, ...]
) -> None:
    """A CPU tensor [num_rows, size] with dense rows."""
    if t.dtype not in dtypes or not t.is_cpu:
        allowed = " or ".join(map(str, dtypes))
        raise TypeError(f"{name} must be {allowed} on the CPU, not {t.dtype} on {t.device}")
    if t.shape != (num_rows, size):
        rows = "num_rows" if num_rows < 0 else num_rows
        raise ValueError(f"{name} must be [{rows}, {size}], not {list(t.shape)}")
    if t.stride(1) != 1 and size > 1:
        raise ValueError(f"{name} must have dense rows, but its strides are {t.stride()}")


def _check_weight(name: str, weight: Tensor) -> None:
    if weight.dtype is not torch.bfloat16 or not weight.is_cpu:
        raise TypeError(
            f"{name} must be bfloat16 on the CPU, not {weight.dtype} on {weight.device}"
        )
    if weight.dim() != 2 or weight.shape[0] == 0 or not supports(weight.shape[1]):
        raise ValueError(
            f"{name} must be [n, k] with n > 0 and k a positive even number, "
            f"not {list(weight.shape)}"
        )


def check_bias(bias: Tensor | None, size: int) -> None:
    if bias is None:
        return
    if bias.dtype not in _RESULTS or not bias.is_cpu:
        raise TypeError(
            f"bias must be bfloat16 or float32 on the CPU, not {bias.dtype} on {bias.device}"
        )
    if bias.shape != (size,):
        raise ValueError(f"bias must be [{size}], not {list(bias.shape)}")


def padded(t: Tensor, rows: int) -> Tensor:
    """t with that many rows of zeros behind it."""
    return torch.cat((t, t.new_zeros(rows, *t.shape[1:]))) if rows else t


def interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """Rows of gate and up in turns of 16, [num_groups * 32, ...], zero padded."""
    both = [padded(t, -len(t) % _HALF).unflatten(0, (-1, _HALF)) for t in (gate, up)]
    return torch.stack(both, dim=1).flatten(0, 2)


def _to_groups(rows: Tensor) -> Tensor:
    """[num_groups * 32, k] to the packed layout."""
    k = rows.shape[1]
    if k % _KSTEP:
        rows = torch.nn.functional.pad(rows, (0, -k % _KSTEP))
    words = rows.contiguous().view(torch.int32)  # a word is a pair along k
    words = words.view(-1, 2, _HALF, words.shape[1] // _HALF, _HALF)
    groups = words.permute(0, 3, 1, 4, 2).contiguous()
    return in_huge_pages(groups.unsqueeze(-1).view(torch.bfloat16))
