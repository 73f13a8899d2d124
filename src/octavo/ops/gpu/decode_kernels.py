"""Kernels of paged decode attention; `decode_attention` launches them."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

import triton
import triton.language as tl

# Under fp8, float16 holds probability * scale / what none so far exceeded * _LIFT, at most _LIFT:
# nothing overflows, and what is a 10^-8th of the largest is no subnormal yet.
_LIFT = tl.constexpr(32768.0)
_LOG2_E = tl.constexpr(1.4426950408889634)
_LEAST_TOP = tl.constexpr(2.0**-126)


@triton.jit
def _two_codes(pairs, ASM: tl.constexpr):
    """int16 pairs of float8_e4m3fn codes -> float16 values: (first codes, second codes).

    Pairs come out of shared memory as 16-bit numbers do; bytes would be fetched one by one.
    """
    if ASM:
        return tl.inline_asm_elementwise(
            """
            {
            .reg .b32 first, second;
            .reg .b16 two_first, two_second;
            prmt.b32 first, $2, 0, 0x4420;
            prmt.b32 second, $2, 0, 0x4431;
            cvt.u16.u32 two_first, first;
            cvt.u16.u32 two_second, second;
            cvt.rn.f16x2.e4m3x2 $0, two_first;
            cvt.rn.f16x2.e4m3x2 $1, two_second;
            }
            """,
            "=r,=r,r",
            [pairs],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    else:
        first = pairs.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        second = (pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True)
        return first.to(tl.float16), second.to(tl.float16)


@triton.jit(do_not_specialize=["window"])
def merge_kernel(
    out, partial, partial_lse, seq_lens, items, item_start, window,
    OUT_STRIDE: tl.constexpr, NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM_PAD: tl.constexpr, HEADS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """sum_i w_i partial_i / sum_i w_i with w_i = 2^lse_i over the items of a sequence that reach
    into the window, if they are several: HEADS query heads of a sequence a program."""
    seq = tl.program_id(1)
    seq_len = tl.load(seq_lens + seq)
    first = tl.load(item_start + seq)
    start = tl.load(items + first * 3 + 1)
    length = tl.load(items + first * 3 + 2) - start  # of all the sequence's items but the last
    length = tl.maximum(length, 1)
    skipped = tl.maximum(seq_len - window - start, 0) // length
    count = tl.cdiv(seq_len - start, length) - skipped
    if PDL:
        # One program waits in any case: successors wait for this kernel only.
        if (count > 1) | (tl.program_id(0) + seq == 0):
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if count > 1:
        dims = tl.arange(0, DIM_PAD)
        heads = tl.program_id(0) * HEADS + tl.arange(0, HEADS)
        head_ok, dim_ok = heads < NUM_HEADS, dims < HEAD_DIM
        best = tl.full([HEADS], -float("inf"), tl.float32)
        total = tl.zeros([HEADS], tl.float32)
        acc = tl.zeros([HEADS, DIM_PAD], tl.float32)
        for done in range(0, count, CHUNK):
            slots = done + tl.arange(0, CHUNK)
            inside = (slots < count)[:, None] & head_ok[None, :]
            at = (first + skipped + slots).to(tl.int64)[:, None] * NUM_HEADS + heads[None, :]
            lse = tl.load(partial_lse + at, mask=inside, other=-float("inf"))
            part = tl.load(
                partial + at[:, :, None] * HEAD_DIM + dims[None, None, :],
                mask=inside[:, :, None] & dim_ok[None, None, :],
                other=0.0,
            )
            new_best = tl.maximum(best, tl.max(lse, 0))
            fade, weights = tl.exp2(best - new_best), tl.exp2(lse - new_best[None, :])
            total = total * fade + tl.sum(weights, 0)
            acc = acc * fade[:, None] + tl.sum(weights[:, :, None] * part, 0)
            best = new_best
        acc /= total[:, None]
        at = seq.to(tl.int64) * OUT_STRIDE + heads[:, None] * HEAD_DIM + dims[None, :]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=head_ok[:, None] & dim_ok[None, :])


@triton.jit
def _clear_padding(out, seq_lens, padding, cells, mask, OUT_STRIDE: tl.constexpr):
    """Zeros for a sequence of padding, which has no tokens."""
    if tl.load(seq_lens + padding, mask=padding >= 0, other=1) == 0:
        at = padding.to(tl.int64) * OUT_STRIDE + cells
        tl.store(out + at, tl.zeros_like(cells).to(out.dtype.element_ty), mask=mask)


@triton.jit
def _slots(
    table, start, position, inside, end,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, GROUPED: tl.constexpr, STEP: tl.constexpr = 1,
):  # fmt: skip
    """(Block, slot in it) of each position of a tile, or under GROUPED of each STEP-th; GROUPED: an
    entry of the table is read once for all its tokens, as no block begins within their share of
    the tile."""
    if GROUPED:
        share: tl.constexpr = TILE if TILE < BLOCK_SIZE else BLOCK_SIZE
        slot = tl.arange(0, TILE // STEP) * STEP % BLOCK_SIZE
        slot += start % BLOCK_SIZE if BLOCK_SIZE > TILE else 0
        index = start // BLOCK_SIZE + tl.arange(0, TILE // share)
        block = tl.load(table + index, mask=index * BLOCK_SIZE < end, other=0)
        block = tl.broadcast_to(block[:, None], (TILE // share, share // STEP))
        block = block.reshape((TILE // STEP,))
    else:
        slot = position % BLOCK_SIZE
        block = tl.load(table + position // BLOCK_SIZE, mask=inside, other=0)
    return block.to(tl.int64), slot


@triton.jit
def _pairs_of_scales(
    planes, table, start, low, end, inside,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """float32 scales of a tile's tokens, 0 outside; every two tokens', of which the first has an
    even slot, are read as one number: the compiler lets no load of 16 bits run ahead."""
    block, slot = _slots(table, start, None, None, end, BLOCK_SIZE, TILE, True, 2)
    position = start + tl.arange(0, TILE // 2) * 2
    both = tl.load(
        planes.to(tl.pointer_type(tl.int32), bitcast=True) + (block * STRIDE + slot) // 2,
        mask=(position + 1 >= low) & (position < end),
        other=0,
    )
    first = both.to(tl.int16).to(tl.float16, bitcast=True)
    second = (both >> 16).to(tl.int16).to(tl.float16, bitcast=True)
    scales = tl.reshape(tl.join(first, second), (TILE,)).to(tl.float32)
    return tl.where(inside, scales, 0.0)


@triton.jit
def _power_above(x):
    """(The least power of two that is no less than x, one over it), for x >= 0 in float32."""
    bits = (x.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    return bits.to(tl.float32, bitcast=True), (0x7F000000 - bits).to(tl.float32, bitcast=True)


@triton.jit
def _scaled(scores, scale_log2, soft_cap, slopes, distance, SOFT_CAP: tl.constexpr):
    """Scores in base 2: scaled, capped (scale_log2 is 2 log2(e) scale / c then), and with what
    `slopes`, if there are any, add for the distance."""
    if SOFT_CAP:
        scores = soft_cap - 2.0 * soft_cap / (tl.exp2(scores * scale_log2) + 1.0)
    else:
        scores *= scale_log2
    if slopes is not None:
        scores += slopes[:, None] * distance.to(tl.float32)[None, :]
    return scores


@triton.jit(do_not_specialize=["layer", "num_seqs", "window"])
def decode_kernel(
    out, query, keys, values, kv_scales, block_tables, table_rows, seq_lens, items, partial,
    partial_lse, alibi, layer, num_seqs, window, scale_log2, soft_cap,
    OUT_STRIDE: tl.constexpr, QUERY_STRIDE: tl.constexpr, BLOCK_STRIDE: tl.constexpr,
    SCALE_STRIDE: tl.constexpr, TABLE_STRIDE: tl.constexpr, NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    DIM_PAD: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
    PAGED: tl.constexpr, GROUPED: tl.constexpr, SOFT_CAP: tl.constexpr, ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One item and KV head (and, of large groups, ROWS of its query heads) a program.

    Over the item's tokens j of positions > seq_len - 1 - window, in base 2:

        s_j = scale_log2 q.k_j (soft cap: c tanh(scale q.k_j / c) / ln 2), plus, of `alibi`
              slopes [NUM_HEADS], slope (j - seq_len + 1) / ln 2
        lse = log2 sum_j 2^s_j,   result = sum_j 2^(s_j - lse) v_j

    The result goes to out [num_seqs, NUM_HEADS, HEAD_DIM] if no other item of the sequence reaches
    into the window, else to partial [items, NUM_HEADS, HEAD_DIM], lse to partial_lse [items,
    NUM_HEADS], for `merge_kernel`.

    keys is the pool, [blocks, layers, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM] with blocks
    BLOCK_STRIDE apart; or, with PAGED False, keys and values are [sequences, NUM_KV_HEADS,
    BLOCK_SIZE, HEAD_DIM]. Under fp8, even and odd dimensions are multiplied apart, in float16
    (float32 for such queries); probabilities times their tokens' scales are there divided by a
    power of two that none exceeds, and the sums multiplied by it again in float32.
    """
    item = tl.program_id(1)
    head, part = tl.program_id(0) % NUM_KV_HEADS, tl.program_id(0) // NUM_KV_HEADS
    group: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    fp8: tl.constexpr = kv_scales is not None
    numbers: tl.constexpr = 2 if fp8 else 1  # of each element of keys
    width: tl.constexpr = HEAD_DIM // numbers
    to_values: tl.constexpr = NUM_KV_HEADS * BLOCK_SIZE * width
    dims, tokens = tl.arange(0, DIM_PAD), tl.arange(0, TILE)
    columns = tl.arange(0, DIM_PAD // numbers)
    rows = part * ROWS + tl.arange(0, ROWS)
    heads = head * group + rows
    row_mask = (rows < group)[:, None] & (dims < HEAD_DIM)[None, :]
    cells = heads[:, None] * HEAD_DIM + dims[None, :]

    seq = tl.load(items + item * 3)
    first = tl.load(items + item * 3 + 1)
    end = tl.load(items + item * 3 + 2)
    if seq < 0:
        # The last of the unused items stand for the last sequences: padding, which has none.
        if PDL:
            tl.extra.cuda.gdc_wait()
        padding = num_seqs - tl.num_programs(1) + item
        _clear_padding(out, seq_lens, padding, cells, row_mask, OUT_STRIDE)
        return
    seq_len = tl.load(seq_lens + seq)
    window_start = tl.maximum(seq_len - window, 0)
    low = tl.maximum(first, window_start)
    seq_long = seq.to(tl.int64)
    plane: tl.constexpr = BLOCK_SIZE * HEAD_DIM
    if PAGED:
        table = block_tables
        if table_rows is None:
            table += seq_long * TABLE_STRIDE
        else:
            table += tl.load(table_rows + seq).to(tl.int64) * TABLE_STRIDE
        plane_id = (layer * (2 * NUM_KV_HEADS) + head).to(tl.int64)
        keys += plane_id * plane
        if fp8:
            key_scales = kv_scales + plane_id * BLOCK_SIZE
            value_scales = key_scales + NUM_KV_HEADS * BLOCK_SIZE
            pairs: tl.constexpr = GROUPED and BLOCK_SIZE % 2 == 0 and SCALE_STRIDE % 2 == 0
            keys = keys.to(tl.pointer_type(tl.int16), bitcast=True)
    else:
        keys += seq_long * BLOCK_STRIDE + head * plane
        values += seq_long * BLOCK_STRIDE + head * plane
    if PDL:
        # What is read above came with the step's upload and `inputs.prepare`, which is no PDL.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    best = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM_PAD // numbers], tl.float32)
    q_at = query + seq_long * QUERY_STRIDE + heads[:, None] * HEAD_DIM + numbers * columns[None, :]
    q_mask = (rows < group)[:, None] & (columns < width)[None, :]
    q = tl.load(q_at, mask=q_mask, other=0.0)
    slopes = None
    if alibi is not None:
        slopes = tl.load(alibi + heads, mask=rows < group, other=0.0) * _LOG2_E
    if fp8:
        second_acc = tl.zeros_like(acc)
        # What no probability times scale has exceeded so far, which the sums are in units of.
        top = tl.full([ROWS], _LEAST_TOP, tl.float32)
        second_q = tl.load(q_at + 1, mask=q_mask, other=0.0)
        if q.dtype != tl.float32:  # codes are exact in it, and scores larger than in bfloat16
            q, second_q = q.to(tl.float16), second_q.to(tl.float16)

    begin = low
    if GROUPED:
        share: tl.constexpr = TILE if TILE < BLOCK_SIZE else BLOCK_SIZE
        begin = low // share * share
    for start in tl.range(begin, end, TILE, num_stages=STAGES):
        position = start + tokens
        inside = (position >= low) & (position < end)
        if not PAGED:
            at = position.to(tl.int64) * width
        else:
            block, slot = _slots(table, start, position, inside, end, BLOCK_SIZE, TILE, GROUPED)
            at = block * (BLOCK_STRIDE // numbers) + slot * width
        mask = inside[:, None]
        if DIM_PAD != HEAD_DIM:
            mask = mask & (columns < width)[None, :]
        key_at = keys + at[:, None] + columns[None, :]
        value_at = key_at + to_values if PAGED else values + at[:, None] + columns[None, :]
        k = tl.load(key_at, mask=mask, other=0)
        v = tl.load(value_at, mask=mask, other=0)
        if fp8:
            k, second_k = _two_codes(k, ASM)
            scores = tl.dot(second_q, tl.trans(second_k.to(q.dtype)), input_precision="ieee")
            scores = tl.dot(q, tl.trans(k.to(q.dtype)), scores, input_precision="ieee")
            if pairs:
                k_scale = _pairs_of_scales(
                    key_scales, table, start, low, end, inside, BLOCK_SIZE, TILE, SCALE_STRIDE
                )
                v_scale = _pairs_of_scales(
                    value_scales, table, start, low, end, inside, BLOCK_SIZE, TILE, SCALE_STRIDE
                )
            else:
                scale_at = key_scales + block * SCALE_STRIDE + slot
                k_scale = tl.load(scale_at, mask=inside, other=0.0).to(tl.float32)
                scale_at += NUM_KV_HEADS * BLOCK_SIZE
                v_scale = tl.load(scale_at, mask=inside, other=0.0).to(tl.float32)
            scores *= k_scale[None, :]
        else:
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        distance = position - (seq_len - 1)
        scores = _scaled(scores, scale_log2, soft_cap, slopes, distance, SOFT_CAP)
        scores = tl.where(inside[None, :], scores, -float("inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        fade, weights = tl.exp2(best - new_best), tl.exp2(scores - new_best[:, None])
        total = total * fade + tl.sum(weights, 1)
        if fp8:
            weights *= v_scale[None, :]
            fade *= top
            top, inverse = _power_above(tl.maximum(fade, tl.max(weights, 1)))
            weights = (weights * inverse[:, None] * _LIFT).to(q.dtype)
            fade *= inverse
            v, second_v = _two_codes(v, ASM)
            second_acc = tl.dot(
                weights, second_v.to(q.dtype), second_acc * fade[:, None], input_precision="ieee"
            )
            acc = tl.dot(weights, v.to(q.dtype), acc * fade[:, None], input_precision="ieee")
        else:
            acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        best = new_best

    if fp8:
        acc = tl.join(acc, second_acc).reshape((ROWS, DIM_PAD)) * (top / _LIFT)[:, None]
    total = tl.where(total > 0.0, total, 1.0)
    acc /= total[:, None]
    if (first <= window_start) & (end == seq_len):
        at = seq_long * OUT_STRIDE + cells
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=row_mask)
    elif end > window_start:
        at = item.to(tl.int64) * NUM_HEADS
        tl.store(partial + at * HEAD_DIM + cells, acc, mask=row_mask)
        tl.store(partial_lse + at + heads, best + tl.log2(total), mask=rows < group)
