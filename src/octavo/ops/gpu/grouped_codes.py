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
