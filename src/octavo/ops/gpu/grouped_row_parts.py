"""How the kernel of `grouped_row_linear` gets at weights: loads of packed words, scales and zeros,
and the operands of tensor cores that become of them, in registers alone."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def column(inputs, i: tl.constexpr, ASM: tl.constexpr):
    """inputs [parts, 16, 8] in column i, 0 in others."""
    kept = (tl.arange(0, 8) == i)[None, None, :]
    if ASM:  # not `pure`, or it would be done once for all rows and take too many registers
        multiply: tl.constexpr = (
            "{ .reg .b32 zero; mov.b32 zero, 0; fma.rn.bf16x2 $0, $1, $2, zero; }"
            if inputs.dtype == tl.bfloat16
            else "mul.rn.f16x2 $0, $1, $2;"
        )
        return tl.inline_asm_elementwise(
            multiply,
            "=r,r,r",
            [inputs, tl.where(kept, 1.0, 0.0).to(inputs.dtype)],
            dtype=inputs.dtype,
            is_pure=False,
            pack=2,
        )
    else:
        return tl.where(kept, inputs, 0.0)


@triton.jit
def as_operand(words, PARTS: tl.constexpr):
    """[parts, 16 rows, 16] of what was made of `fetch_tile`'s words, one by one: in the order of
    inputs in which `inputs_of` has them."""
    halves = tl.permute(tl.reshape(words, (2, PARTS, 8, 4, 2, 2)), (1, 0, 2, 4, 3, 5))
    return tl.reshape(halves, (PARTS, 16, 16))


@triton.jit
def inputs_of(values, PARTS: tl.constexpr):
    """[parts, 16, 8] of [parts * 128] inputs: column i has those of place i.

    Tensor cores take of an operand's 16 numbers a row the pairs 2 t, 2 t + 1 and 2 t + 8, 2 t + 9
    from lane t of 4. In this order of inputs those are neighbours, as they were loaded.
    """
    apart = tl.permute(tl.reshape(values, (PARTS, 8, 4, 2, 2)), (0, 3, 2, 4, 1))
    return tl.reshape(apart, (PARTS, 16, 8))


@triton.jit
def sides(first, second, SIZE: tl.constexpr):
    """[parts, 16, SIZE] of two times [parts, 8, SIZE]."""
    both = tl.permute(tl.join(first, second), (0, 3, 1, 2))
    return tl.reshape(both, (first.shape[0], 16, SIZE))


@triton.jit
def per_row(first, second, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """float32 [parts, 16, 8] of what 16 rows have for each of COLUMNS parts of a block."""
    first = tl.reshape(first.to(tl.float32), (PARTS, 8, COLUMNS, 1))
    second = tl.reshape(second.to(tl.float32), (PARTS, 8, COLUMNS, 1))
    shape: tl.constexpr = (PARTS, 8, COLUMNS, 8 // COLUMNS)
    first = tl.reshape(tl.broadcast_to(first, shape), (PARTS, 8, 8))
    second = tl.reshape(tl.broadcast_to(second, shape), (PARTS, 8, 8))
    return sides(first, second, 8)


@triton.jit
def _groups(first, PARTS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr,
            COLUMNS: tl.constexpr):  # fmt: skip
    """The groups of [parts * 8 rows * COLUMNS] parts of blocks from `first` on."""
    i = tl.arange(0, PARTS * 8 * COLUMNS)
    block: tl.constexpr = 512 // BITS
    return ((first + i // (8 * COLUMNS)) * block + i % COLUMNS * (block // COLUMNS)) // GROUP


@triton.jit
def places_of(
    tables, behind, num_words, num_groups,
    PARTS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Where the first round of row 0's tile lies: words [2 halves * parts * 8 rows, 16], and of
    each half scales and zeros [parts * 8 rows * COLUMNS]. The second half is `behind` rows on.

    Vectors and matrices, so that neighbouring lanes get neighbours of the last dimension, then
    rows; warps get parts.
    """
    codes, scales, zeros = tables
    i, j = tl.arange(0, 2 * PARTS * 8)[:, None], tl.arange(0, 16)[None, :]
    behind = tl.cast(behind, tl.int64)
    words = i // (8 * PARTS) * (behind * num_words) + (i % 8 * num_words + i // 8 % PARTS * 16 + j)
    groups = tl.arange(0, PARTS * 8 * COLUMNS) // COLUMNS % 8 * num_groups
    if PARTS * (512 // BITS) % GROUP == 0:
        groups += _groups(0, PARTS, BITS, GROUP, COLUMNS)
    far = groups + behind * num_groups
    return codes + words, scales + groups, zeros + groups, scales + far, zeros + far


@triton.jit
def moved(places, row, num_words, num_groups):
    """`places_of`, so many rows on."""
    words, scales, zeros, far_scales, far_zeros = places
    far = tl.cast(row, tl.int64)
    on = far * num_groups
    return words + far * num_words, scales + on, zeros + on, far_scales + on, far_zeros + on


@triton.jit
def _load_groups(at, mask, EVEN_K: tl.constexpr):
    return tl.load(at, mask=mask) if EVEN_K else tl.load(at, mask=mask, other=0.0)


@triton.jit
def fetch_tile(
    places, rows_left, num_words, num_groups, ROUND: tl.constexpr, PARTS: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, ZERO: tl.constexpr, COLUMNS: tl.constexpr,
    EVEN_K: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Words of a round of a tile, which nobody reads again, and each half's scales and zeros; of
    rows that are not there anything. rows_left: of the tile and those after it; under GATED of
    either half."""
    words, scales, zeros, far_scales, far_zeros = places
    i = tl.arange(0, 2 * PARTS * 8)[:, None]
    row = i % 8 if GATED else i // (8 * PARTS) * 8 + i % 8
    mask = row < rows_left
    if not EVEN_K:
        mask = mask & ((ROUND * PARTS + i // 8 % PARTS) * 16 < num_words)
    words = tl.load(words + ROUND * PARTS * 16, mask=mask, eviction_policy="evict_first")
    row = tl.arange(0, PARTS * 8 * COLUMNS) // COLUMNS % 8
    near, far = row < rows_left, row < (rows_left if GATED else rows_left - 8)
    groups = _groups(ROUND * PARTS, PARTS, BITS, GROUP, COLUMNS)
    if not EVEN_K:
        near, far = near & (groups < num_groups), far & (groups < num_groups)
    if PARTS * (512 // BITS) % GROUP == 0:
        groups = ROUND * (PARTS * (512 // BITS) // GROUP)
    scale = _load_groups(scales + groups, near, EVEN_K)
    far_scale = _load_groups(far_scales + groups, far, EVEN_K)
    zero, far_zero = scale, far_scale
    if ZERO != "point":
        zero = _load_groups(zeros + groups, near, EVEN_K)
        far_zero = _load_groups(far_zeros + groups, far, EVEN_K)
    return words, scale, zero, far_scale, far_zero
