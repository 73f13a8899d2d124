"""How a kernel makes floats of packed integers (`ops.gpu.grouped`).

An integer becomes a float32 by being put into the mantissa of 2048 (or 128) where its lowest bit
counts 1: two or three instructions. For tensor cores two integers of 4 bits at a time become 16-bit
numbers likewise. The 2048 is taken off in sums, or from each.
"""

# mypy: disable-error-code="assignment"
# ruff: noqa: RUF005 - kernels know no unpacking

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def lifted_code(words, i: tl.constexpr, BITS: tl.constexpr, ASM: tl.constexpr):
    """The code at place i of int32 words, and 2048 (128 at odd places of 4 bits): float32."""
    left: tl.constexpr = 12 - 8 * (i * BITS // 8)
    shifted = words << left if left > 0 else words >> -left
    high: tl.constexpr = BITS == 4 and i % 2 == 1
    mask: tl.constexpr = 0xF0000 if high else (0xF000 if BITS == 4 else 0xFF000)
    base: tl.constexpr = 0x43000000 if high else 0x45000000
    if ASM:  # and, or: one instruction, which compilers do not always find
        bits = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xEA;",
            "=r,r,r,r",
            [shifted, mask, base],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        bits = (shifted & mask) | base
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def lift(i: tl.constexpr, BITS: tl.constexpr):
    """What `lifted_code` adds at place i."""
    return 128.0 if BITS == 4 and i % 2 == 1 else 2048.0


@triton.jit
def codes_of(words, TYPE: tl.constexpr, ASM: tl.constexpr):
    """The 4-bit codes of words, one tensor for each place, and 128 or 1024; bits of TYPE."""
    base: tl.constexpr = 0x43004300 if TYPE.is_bf16() else 0x64006400
    if ASM:  # two codes of two words at once
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high, moved;
            prmt.b32 low, $8, $9, 0x5410;
            prmt.b32 high, $8, $9, 0x7632;
            lop3.b32 $0, low, 0x000F000F, $10, 0xEA;
            shr.u32 moved, low, 4;
            lop3.b32 $1, moved, 0x000F000F, $10, 0xEA;
            shr.u32 moved, low, 8;
            lop3.b32 $2, moved, 0x000F000F, $10, 0xEA;
            shr.u32 moved, low, 12;
            lop3.b32 $3, moved, 0x000F000F, $10, 0xEA;
            lop3.b32 $4, high, 0x000F000F, $10, 0xEA;
            shr.u32 moved, high, 4;
            lop3.b32 $5, moved, 0x000F000F, $10, 0xEA;
            shr.u32 moved, high, 8;
            lop3.b32 $6, moved, 0x000F000F, $10, 0xEA;
            shr.u32 moved, high, 12;
            lop3.b32 $7, moved, 0x000F000F, $10, 0xEA;
            }""",
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r",
            [words, base],
            dtype=(
                tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16,
            ),
            is_pure=True,
            pack=2,
        )  # fmt: skip
    else:
        codes = ()
        for i in tl.static_range(8):
            codes = codes + ((((words >> (4 * i)) & 15) | (base & 0xFFFF)).to(tl.int16),)
        return codes


@triton.jit
def value_of(
    words, scale, zero, i: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr,
    ZERO_POINT: tl.constexpr, EXACT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Weight i of each word, in float32; scale and zero [outputs, 1].

    Unless EXACT, what is lifted is taken off the product: one instruction, and a float16's
    rounding of the smallest weights is twice its error.
    """
    code = lifted_code(words, i, BITS, ASM)
    if ZERO == "offsets":
        if EXACT:
            return (code - lift(i, BITS)) * scale + zero
        return code * scale + (zero - lift(i, BITS) * scale)
    point = zero
    if ZERO == "point":
        point = ZERO_POINT
    if EXACT:
        return (code - (lift(i, BITS) + point)) * scale
    return code * scale - (lift(i, BITS) + point) * scale


@triton.jit
def _centred(codes, zero, TYPE: tl.constexpr, ASM: tl.constexpr):
    """codes of `codes_of` less 128 (or 1024) and zero, whole numbers, exact: in TYPE."""
    codes = codes.to(TYPE, bitcast=True)
    lifted: tl.constexpr = 128.0 if TYPE.is_bf16() else 1024.0
    offset = (-lifted - zero).to(TYPE)
    if ASM:  # two at once
        add: tl.constexpr = (
            "{ .reg .b32 one; mov.b32 one, 0x3F803F80; fma.rn.bf16x2 $0, $1, one, $2; }"
            if TYPE.is_bf16()
            else "add.rn.f16x2 $0, $1, $2;"
        )
        return tl.inline_asm_elementwise(
            add, "=r,r,r", [codes, offset], dtype=codes.dtype, is_pure=True, pack=2
        )
    else:
        return codes + offset


@triton.jit
def _side_by_side(parts, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """[n, 16 COUNT] of [n, 16] tensors, 1, 2, 4 or 8 of them from parts[FIRST] on.

    Where it becomes an operand of tensor cores this moves nothing: they take 16 columns at a time,
    and lanes have the same ones of each 16.
    """
    n: tl.constexpr = parts[FIRST].shape[0]
    if COUNT == 1:
        return parts[FIRST]
    elif COUNT == 2:
        two = tl.join(parts[FIRST], parts[FIRST + 1])
        return tl.reshape(tl.permute(two, (0, 2, 1)), (n, 32))
    elif COUNT == 4:
        even = tl.join(parts[FIRST], parts[FIRST + 2])
        odd = tl.join(parts[FIRST + 1], parts[FIRST + 3])
        return tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 3, 1)), (n, 64))
    else:
        even = tl.join(tl.join(parts[0], parts[4]), tl.join(parts[2], parts[6]))
        odd = tl.join(tl.join(parts[1], parts[5]), tl.join(parts[3], parts[7]))
        return tl.reshape(tl.permute(tl.join(even, odd), (0, 2, 3, 4, 1)), (n, 128))


@triton.jit
def add_product(
    total, words, of_places, scale, zero, rows, unit: tl.constexpr, PER_UNIT: tl.constexpr,
    BITS: tl.constexpr, ZERO: tl.constexpr, ZERO_POINT: tl.constexpr, SCALED_SUMS: tl.constexpr,
    EXACT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """total [outputs, rows] and the product of inputs that share scales with rows.

    words [outputs, 16]; the inputs are those of PER_UNIT places from unit * PER_UNIT on, rows
    [16 PER_UNIT, rows]; scale and zero [outputs, 1] float32. Under SCALED_SUMS (codes of 4 bits,
    `of_places` being their `codes_of`, with zeros) codes less zero, exact, are multiplied, and
    their sums scaled. Else weights are scaled and rounded to rows' type.
    """
    dtype: tl.constexpr = rows.dtype
    if SCALED_SUMS:
        if ZERO == "point":
            zero = tl.full(scale.shape, ZERO_POINT, tl.float32)
        codes = _side_by_side(of_places, unit * PER_UNIT, PER_UNIT)
        return total + tl.dot(_centred(codes, zero, dtype, ASM), rows) * scale
    else:
        values = ()
        for i in tl.static_range(PER_UNIT):
            w = value_of(
                words, scale, zero, unit * PER_UNIT + i, BITS, ZERO, ZERO_POINT, EXACT, ASM
            )
            values = values + (w.to(dtype),)
        precision: tl.constexpr = "ieee" if EXACT else "tf32"
        return tl.dot(_side_by_side(values, 0, PER_UNIT), rows, total, input_precision=precision)
