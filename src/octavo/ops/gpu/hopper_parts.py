"""The roles of the warps in `hopper_attention`, in Gluon: a mover and two groups that compute.

A program takes several items one after the other. An item is a tile of 128 rows of queries, tokens
times PACK heads of one KV head. Barriers: `k_ready` and its like are completed by the bytes that
arrive, `k_empty` by both groups having read; use n of a barrier completes its phase n.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

# Two names that changed between Triton 3.6 and 3.9.
_RENAMED = gl.constexpr(hasattr(getattr(gl, "shared_memory_descriptor", object), "reinterpret"))
_copy = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def _view(buffer, count: gl.constexpr, rows: gl.constexpr, layout: gl.constexpr):
    """A buffer as [count, rows, 64]."""
    if _RENAMED:
        return buffer.reinterpret(buffer.dtype, [count, rows, 64], layout)
    else:
        return buffer._reinterpret(buffer.dtype, [count, rows, 64], layout)


@gluon.jit
def _clean(buffer, start, seq_len, TILE: gl.constexpr):
    """Zeros in the rows of a tile of V behind the context, which may hold anything: 0 times NaN is
    NaN. 16 rows at a time, for a single warp has few registers."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    rows = gl.arange(0, 16, gl.SliceLayout(1, layout))
    shared: gl.constexpr = buffer.layout
    pieces = _view(buffer, TILE // 16, 16, shared)
    for j in range(TILE // 16):
        if start + j * 16 + 16 > seq_len:
            piece = pieces.index(j)
            x = piece.load(layout)
            piece.store(gl.where((start + j * 16 + rows < seq_len)[:, None], x, gl.zeros_like(x)))


@gluon.jit
def _item(query_start, seq_lens, tiles, item, total, GROUPS: gl.constexpr, PAGED: gl.constexpr):
    """(sequence or -1, first token in the chunk, chunk's row, its length, context length)."""
    tile = gl.minimum(item, total - 1) // GROUPS
    seq = gl.load(tiles + 2 * tile)
    first = gl.load(tiles + 2 * tile + 1)
    at = gl.maximum(seq, 0)
    chunk = gl.load(query_start + at)
    chunk_len = gl.load(query_start + at + 1) - chunk
    seq_len = chunk_len
    if PAGED:
        seq_len = gl.load(seq_lens + at)
    return seq, first, chunk, chunk_len, seq_len


@gluon.jit
def _span(seq, first, chunk_len, seq_len, PACK: gl.constexpr, TILE: gl.constexpr):
    """(lowest position, highest, tiles of keys that all rows see entirely, tiles) of an item."""
    lowest = seq_len - chunk_len + first
    highest = gl.minimum(lowest + 128 // PACK, seq_len) - 1
    num_tiles = gl.where(seq < 0, 0, gl.cdiv(highest + 1, TILE))
    return lowest, highest, (lowest + 1) // TILE, num_tiles


@gluon.jit
def _copy_tile(
    desc, bar, low, high, box, at, row0, column, table, last_block, block_rows,
    PAGED: gl.constexpr, BLOCK: gl.constexpr, BOX: gl.constexpr, BOXES: gl.constexpr,
):  # fmt: skip
    """TILE keys or values from position `at` on: halves of 64 elements into `low` and `high`."""
    for j in gl.static_range(BOXES):
        row = row0 + at + j * BOX
        if PAGED:
            # Entries past the last block are never read; the last one stands for them.
            block = gl.load(table + gl.minimum((at + j * BOX) // BLOCK, last_block))
            row = block * block_rows + row0 + (at + j * BOX) % BLOCK
        _copy(desc, [row, column], bar, low.index(box + j))
        _copy(desc, [row, column + 64], bar, high.index(box + j))


@gluon.jit
def move(
    bars, buffers, queries, desc_q, desc_k, desc_v, tables, table_stride, table_rows, seq_lens,
    query_start, tiles, total, layer_row, block_rows,
    PAGED: gl.constexpr, ROWED: gl.constexpr, GROUP: gl.constexpr, NUM_KV_HEADS: gl.constexpr,
    PACK: gl.constexpr, BLOCK: gl.constexpr, BOX: gl.constexpr, TILE: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The mover: queries, keys and values of all items of this program, as buffers come free."""
    k_ready, k_empty, v_ready, v_empty, q_ready, q_empty, tail = bars
    k0, k1, v0, v1 = buffers
    BOXES: gl.constexpr = TILE // BOX
    GROUPS: gl.constexpr = GROUP * NUM_KV_HEADS // PACK
    shared: gl.constexpr = k0.layout  # as an argument it must be a constexpr first
    k_low = _view(k0, STAGES * BOXES, BOX, shared)
    k_high = _view(k1, STAGES * BOXES, BOX, shared)
    v_low = _view(v0, STAGES * BOXES, BOX, shared)
    v_high = _view(v1, STAGES * BOXES, BOX, shared)
    step, turn, tails = 0, 0, 0
    for item in range(gl.program_id(0), total, gl.num_programs(0)):
        seq, first, chunk, chunk_len, seq_len = _item(
            query_start, seq_lens, tiles, item, total, GROUPS, PAGED
        )
        _low, _high, _full, num_tiles = _span(seq, first, chunk_len, seq_len, PACK, TILE)
        head = (item % GROUPS) * PACK
        kv_head = head // GROUP
        last_block = (seq_len - 1) // BLOCK
        table_row = gl.maximum(seq, 0)
        if ROWED:
            table_row = gl.load(table_rows + table_row)
        table = tables + table_row.to(gl.int64) * table_stride
        if PAGED:
            row_k = layer_row + kv_head * BLOCK
            row_v = row_k + NUM_KV_HEADS * BLOCK
            column = kv_head * 0
        else:
            row_k = chunk
            row_v = chunk
            column = kv_head * 128
        if num_tiles > 0:
            bar = q_ready.index(turn % 2)
            mbarrier.wait(q_empty.index(turn % 2), ((turn // 2) & 1) ^ 1)
            mbarrier.expect(bar, 128 * 128 * 2)
            for j in gl.static_range(4):
                # Rows behind the chunk are of other tokens, or zero; nobody stores their results.
                token = chunk + first + (j // 2) * (64 // PACK)
                _copy(desc_q, [token, head, (j % 2) * 64], bar, queries.index((turn % 2) * 4 + j))
        for i in range(num_tiles):
            stage = step % STAGES
            phase = (step // STAGES) & 1
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            mbarrier.expect(k_ready.index(stage), TILE * 128 * 2)
            _copy_tile(
                desc_k, k_ready.index(stage), k_low, k_high, stage * BOXES, i * TILE, row_k, column,
                table, last_block, block_rows, PAGED, BLOCK, BOX, BOXES,
            )  # fmt: skip
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            if (i + 1) * TILE > seq_len:
                mbarrier.expect(tail, TILE * 128 * 2)
                _copy_tile(
                    desc_v, tail, v_low, v_high, stage * BOXES, i * TILE, row_v, column,
                    table, last_block, block_rows, PAGED, BLOCK, BOX, BOXES,
                )  # fmt: skip
                mbarrier.wait(tail, tails & 1)
                _clean(v0.index(stage), i * TILE, seq_len, TILE)
                _clean(v1.index(stage), i * TILE, seq_len, TILE)
                fence_async_shared()
                mbarrier.arrive(v_ready.index(stage), count=1)
                tails = tails + 1
            else:
                mbarrier.expect(v_ready.index(stage), TILE * 128 * 2)
                _copy_tile(
                    desc_v, v_ready.index(stage), v_low, v_high, stage * BOXES, i * TILE, row_v,
                    column, table, last_block, block_rows, PAGED, BLOCK, BOX, BOXES,
                )  # fmt: skip
            step = step + 1
        turn = turn + gl.where(num_tiles > 0, 1, 0)


@gluon.jit
def _scores(q0, q1, k0, k1, TILE: gl.constexpr, S: gl.constexpr):
    """q . k of 64 rows and TILE keys, begun."""
    zero = gl.zeros([64, TILE], gl.float32, S)
    s = warpgroup_mma(q0, k0.permute((1, 0)), zero, use_acc=False, is_async=True)
    return warpgroup_mma(q1, k1.permute((1, 0)), s, is_async=True)


@gluon.jit
def _soften(
    s, best, total, start, row_positions, scale, MASKED: gl.constexpr, TILE: gl.constexpr,
    S: gl.constexpr,
):  # fmt: skip
    """(weights, best, total, fade) as in `prefill_attention.fold_tile`."""
    if MASKED:
        positions = start + gl.arange(0, TILE, gl.SliceLayout(0, S))
        seen = positions[None, :] <= row_positions[:, None]
        s = gl.where(seen, s, gl.full_like(s, -float("inf")))
    new_best = gl.maximum(best, gl.max(s, 1) * scale)
    weights = gl.exp2(s * scale - new_best[:, None])
    fade = gl.exp2(best - new_best)
    total = total * fade + gl.sum(weights, 1)
    return weights, new_best, total, fade


@gluon.jit
def _rounds(
    acc0, acc1, p, best, total, q0, q1, bars, buffers, step, first, end, row_positions, scale,
    MASKED: gl.constexpr, TILE: gl.constexpr, STAGES: gl.constexpr, S: gl.constexpr,
    A: gl.constexpr,
):  # fmt: skip
    """Tiles [first, end): scores of each with the values of the one before it, whose products go on
    during this one's softmax. Tile i is the program's (step + i)-th."""
    k_ready, k_empty, v_ready, v_empty, _q_ready, _q_empty, _tail = bars
    k0, k1, v0, v1 = buffers
    P: gl.constexpr = gl.DotOperandLayout(0, A, k_width=2)
    for i in range(first, end):
        n = step + i
        stage = n % STAGES
        before = (n - 1) % STAGES
        mbarrier.wait(k_ready.index(stage), (n // STAGES) & 1)
        s = _scores(q0, q1, k0.index(stage), k1.index(stage), TILE, S)
        mbarrier.wait(v_ready.index(before), ((n - 1) // STAGES) & 1)
        a0 = warpgroup_mma(p, v0.index(before), acc0, is_async=True)
        a1 = warpgroup_mma(p, v1.index(before), acc1, is_async=True)
        s = warpgroup_mma_wait(2, deps=(s,))
        mbarrier.arrive(k_empty.index(stage), count=1)
        weights, best, total, fade = _soften(
            s, best, total, i * TILE, row_positions, scale, MASKED, TILE, S
        )
        acc0, acc1, p = warpgroup_mma_wait(0, deps=(a0, a1, p))
        mbarrier.arrive(v_empty.index(before), count=1)
        fade = gl.convert_layout(fade, gl.SliceLayout(1, A))[:, None]
        acc0 = acc0 * fade
        acc1 = acc1 * fade
        p = gl.convert_layout(weights.to(p.dtype), P)
    return acc0, acc1, p, best, total


@gluon.jit
def compute(
    bars, buffers, queries, out, out_stride, seq_lens, query_start, tiles, num_items, scale,
    PAGED: gl.constexpr, GROUP: gl.constexpr, NUM_KV_HEADS: gl.constexpr, PACK: gl.constexpr,
    TILE: gl.constexpr, STAGES: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Rows 64 PART .. 64 PART + 63 of all items of this program."""
    S: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TILE, 16])
    A: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, A, k_width=2)
    B: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    k_ready, k_empty, v_ready, v_empty, q_ready, q_empty, _tail = bars
    k0, k1, v0, v1 = buffers
    shared: gl.constexpr = k0.layout
    flat_q = _view(queries, 8, 64, shared)
    GROUPS: gl.constexpr = GROUP * NUM_KV_HEADS // PACK
    rows = PART * 64 + gl.arange(0, 64, gl.SliceLayout(1, B))
    dims = gl.arange(0, 64, gl.SliceLayout(0, B))
    score_rows = PART * 64 + gl.arange(0, 64, gl.SliceLayout(1, S))
    step, turn = 0, 0
    # The next item is looked up while this one is computed.
    seq, first, chunk, chunk_len, seq_len = _item(
        query_start, seq_lens, tiles, gl.program_id(0), num_items, GROUPS, PAGED
    )
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        lowest, highest, num_full, num_tiles = _span(seq, first, chunk_len, seq_len, PACK, TILE)
        row_tokens = first + rows // PACK
        valid = (row_tokens < chunk_len)[:, None]
        token_at = (chunk + row_tokens).to(gl.int64)
        head = (item % GROUPS) * PACK
        seq, first, chunk, chunk_len, seq_len = _item(
            query_start, seq_lens, tiles, item + gl.num_programs(0), num_items, GROUPS, PAGED
        )
        if num_tiles > 0:
            row_positions = gl.minimum(lowest + score_rows // PACK, highest)
            acc0 = gl.zeros([64, 64], gl.float32, A)
            acc1 = gl.zeros([64, 64], gl.float32, A)
            best = gl.full([64], -float("inf"), gl.float32, gl.SliceLayout(1, S))
            total = gl.zeros([64], gl.float32, gl.SliceLayout(1, S))
            q0 = flat_q.index((turn % 2) * 4 + 2 * PART)
            q1 = flat_q.index((turn % 2) * 4 + 2 * PART + 1)
            mbarrier.wait(q_ready.index(turn % 2), (turn // 2) & 1)
            stage = step % STAGES
            mbarrier.wait(k_ready.index(stage), (step // STAGES) & 1)
            s = _scores(q0, q1, k0.index(stage), k1.index(stage), TILE, S)
            s = warpgroup_mma_wait(0, deps=(s,))
            mbarrier.arrive(k_empty.index(stage), count=1)
            weights, best, total, _fade = _soften(
                s, best, total, 0, row_positions, scale, True, TILE, S
            )
            p = gl.convert_layout(weights.to(queries.dtype), P)
            acc0, acc1, p, best, total = _rounds(
                acc0, acc1, p, best, total, q0, q1, bars, buffers, step, 1, num_full,
                row_positions, scale, False, TILE, STAGES, S, A,
            )  # fmt: skip
            acc0, acc1, p, best, total = _rounds(
                acc0, acc1, p, best, total, q0, q1, bars, buffers, step, gl.maximum(num_full, 1),
                num_tiles, row_positions, scale, True, TILE, STAGES, S, A,
            )  # fmt: skip
            mbarrier.arrive(q_empty.index(turn % 2), count=1)
            n = step + num_tiles - 1
            stage = n % STAGES
            mbarrier.wait(v_ready.index(stage), (n // STAGES) & 1)
            a0 = warpgroup_mma(p, v0.index(stage), acc0, is_async=True)
            a1 = warpgroup_mma(p, v1.index(stage), acc1, is_async=True)
            acc0, acc1 = warpgroup_mma_wait(0, deps=(a0, a1))
            mbarrier.arrive(v_empty.index(stage), count=1)
            norm = gl.convert_layout(1.0 / total, gl.SliceLayout(1, A))[:, None]
            o0 = gl.convert_layout((acc0 * norm).to(queries.dtype), B)
            o1 = gl.convert_layout((acc1 * norm).to(queries.dtype), B)
            to = (token_at * out_stride)[:, None] + ((head + rows % PACK) * 128)[:, None]
            to = to + dims[None, :]
            gl.store(out + to, o0, mask=valid)
            gl.store(out + to + 64, o1, mask=valid)
        step = step + num_tiles
        turn = turn + gl.where(num_tiles > 0, 1, 0)
