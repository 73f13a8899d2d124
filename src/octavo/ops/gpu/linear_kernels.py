"""The kernels of `ops.gpu.linear`.

Program p of P has the output features [p N / P, (p + 1) N / P) of N. Weights come from memory once,
in the order of a program's features; the first of them are read before the kernel's inputs are
there, and always some more while the last ones are used.
"""

import triton
import triton.language as tl


@triton.jit
def _share(out_features):
    """This program's first feature, and the end."""
    pid = tl.program_id(0).to(tl.int64)
    num_programs = tl.num_programs(0)
    first = pid * out_features // num_programs
    last = (pid + 1) * out_features // num_programs
    return first.to(tl.int32), last.to(tl.int32)


@triton.jit
def _weights(weight, rows, last, k, in_features, EVEN_K: tl.constexpr):
    """[rows, k] of the weight, zero outside; nobody reads them again this step."""
    at = weight + rows.to(tl.int64)[:, None] * in_features + k[None, :]
    mask = (rows < last)[:, None]
    if not EVEN_K:
        mask = mask & (k < in_features)[None, :]
    return tl.load(at, mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _prefetch(weight, row, last, in_features, NUM_BYTES: tl.constexpr, THREADS: tl.constexpr):
    """Asks the L2 cache for the NUM_BYTES that follow the beginning of a row, up to `last`: one
    request a warp, as its lanes would have to queue."""
    if NUM_BYTES > 0:
        size: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
        PIECE: tl.constexpr = NUM_BYTES // (THREADS // 32)
        present = (last - row) * in_features * size
        if present >= PIECE:
            begin = weight + row.to(tl.int64) * in_features
            offset = tl.minimum(tl.arange(0, THREADS) // 32 * PIECE, present - PIECE)
            tl.inline_asm_elementwise(
                """{
                .reg .pred first;
                .reg .u32 lane;
                mov.u32 lane, %laneid;
                setp.eq.u32 first, lane, 0;
                @first cp.async.bulk.prefetch.L2.global [$1], $2;
                mov.u32 $0, 0;
                }""",
                "=r,l,r",
                [begin.to(tl.int64) + offset, tl.full([THREADS], PIECE, tl.int32)],
                dtype=tl.int32,
                is_pure=False,
                pack=1,
            )


@triton.jit
def _finish(
    value, bias, out, at, bias_at, mask, HAS_BIAS: tl.constexpr, RESIDUAL: tl.constexpr
):  # fmt: skip
    """Adds bias and residual in float32 and stores, rounded once."""
    if HAS_BIAS:
        value += tl.load(bias + bias_at, mask=mask, other=0.0).to(tl.float32)
    if RESIDUAL:
        value += tl.load(out + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _gate(gate, up, bias, bias_at, mask, out_features, HAS_BIAS: tl.constexpr):
    """silu(gate) * up, each with its bias."""
    if HAS_BIAS:
        gate += tl.load(bias + bias_at, mask=mask, other=0.0).to(tl.float32)
        up += tl.load(bias + out_features + bias_at, mask=mask, other=0.0).to(tl.float32)
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit
def row_kernel(
    x, weight, bias, norm_weight, out, out_features, in_features, eps,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, NORM: tl.constexpr, HAS_BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    EARLY: tl.constexpr, PREFETCH: tl.constexpr, AFTER: tl.constexpr, THREADS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One row, held in registers: out[n] (+)= sum_k w[n, k] x[k] + b[n], in float32.

    x [in_features] (normalised first under NORM); weight [out_features, in_features], or gate over
    up [2 * out_features, in_features] under GATED, whose result is silu(gate) * up.

    Where all wait for x, the memory would idle: PREFETCH bytes are asked for before, AFTER bytes
    once x is there. The next kernel is let in EARLY tiles before the end, to do the same.
    """
    first, last = _share(out_features)
    lanes, k = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    up = weight + out_features.to(tl.int64) * in_features
    next_w = _weights(weight, first + lanes, last, k, in_features, EVEN_K)
    next_u = _weights(up, first + lanes, last, k, in_features, EVEN_K) if GATED else next_w
    if PDL:
        _prefetch(weight, first + BLOCK_N, last, in_features, PREFETCH, THREADS)
        if GATED:
            _prefetch(up, first + BLOCK_N, last, in_features, PREFETCH, THREADS)
        tl.extra.cuda.gdc_wait()
        if EARLY == 0:
            tl.extra.cuda.gdc_launch_dependents()
        _prefetch(weight, first + BLOCK_N, last, in_features, AFTER, THREADS)
        if GATED:
            _prefetch(up, first + BLOCK_N, last, in_features, AFTER, THREADS)
    inside = k < in_features
    row = tl.load(x + k, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(row * row, 0) / in_features + eps)
        row = (row * scale).to(x.dtype.element_ty).to(tl.float32)
        row *= tl.load(norm_weight + k, mask=inside, other=0.0).to(tl.float32)
        row = row.to(x.dtype.element_ty).to(tl.float32)
    for start in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        if PDL and EARLY > 0:  # noqa: SIM102 - known when compiled, unlike the next
            if start + EARLY * BLOCK_N >= last:
                tl.extra.cuda.gdc_launch_dependents()
        rows = start + lanes
        mask = rows < last
        # Registers hold the next rows while these are summed.
        w, u = next_w, next_u
        next_w = _weights(weight, rows + BLOCK_N, last, k, in_features, EVEN_K)
        next_u = _weights(up, rows + BLOCK_N, last, k, in_features, EVEN_K) if GATED else next_w
        value = tl.sum(w.to(tl.float32) * row[None, :], 1)
        if GATED:
            value_up = tl.sum(u.to(tl.float32) * row[None, :], 1)
            value = _gate(value, value_up, bias, rows, mask, out_features, HAS_BIAS)
        _finish(value, bias, out, rows, rows, mask, HAS_BIAS and not GATED, RESIDUAL)


@triton.jit
def _scale(x, tokens, token_mask, x_stride, in_features, eps, BLOCK_K: tl.constexpr):
    """1 / rms of each row: float32 [tokens]."""
    total = tl.zeros([tokens.shape[0]], tl.float32)
    for start in range(0, in_features, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        at = x + tokens[:, None] * x_stride + k[None, :]
        mask = token_mask[:, None] & (k < in_features)[None, :]
        part = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        total += tl.sum(part * part, 1)
    return tl.rsqrt(total / in_features + eps)


@triton.jit
def _inputs(
    x, tokens, token_mask, k, x_stride, in_features, norm_weight, scale,
    EVEN_K: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """x[tokens, k], normalised under NORM."""
    mask = token_mask[:, None]
    if not EVEN_K:
        mask = mask & (k < in_features)[None, :]
    part = tl.load(x + tokens[:, None] * x_stride + k[None, :], mask=mask, other=0.0)
    if NORM:
        weights = tl.load(norm_weight + k, mask=k < in_features, other=0.0).to(tl.float32)
        part = (part.to(tl.float32) * scale[:, None]).to(x.dtype.element_ty)
        part = (part.to(tl.float32) * weights[None, :]).to(x.dtype.element_ty)
    return part


@triton.jit
def _product(part, w, acc, WIDE: tl.constexpr):
    """acc + part w^T, transposed under WIDE."""
    if WIDE:
        return tl.dot(w, tl.trans(part), acc, input_precision="ieee")
    else:
        return tl.dot(part, tl.trans(w), acc, input_precision="ieee")


@triton.jit(do_not_specialize=["num_tokens"])
def tile_kernel(
    x, weight, bias, norm_weight, out, num_tokens, out_features, in_features, x_stride, out_stride,
    eps, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, STAGES: tl.constexpr,
    GATED: tl.constexpr, NORM: tl.constexpr, HAS_BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    EARLY: tl.constexpr, PREFETCH: tl.constexpr, AFTER: tl.constexpr, THREADS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`row_kernel` for up to BLOCK_M tokens, by tensor cores.

    x [num_tokens, in_features], out [num_tokens, out_features]. Tiles of [BLOCK_N, BLOCK_K] in one
    flat loop, so that loads run ahead over the ends of rows too: into registers with 1 stage, into
    shared memory with more.
    """
    AHEAD: tl.constexpr = STAGES == 1
    WIDE: tl.constexpr = BLOCK_N >= 64  # the weight on the side of Hopper's 64 rows
    first, last = _share(out_features)
    num_k = tl.cdiv(in_features, BLOCK_K)
    lanes, k_lanes = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    up = weight + out_features.to(tl.int64) * in_features
    if AHEAD:
        next_w = _weights(weight, first + lanes, last, k_lanes, in_features, EVEN_K)
        next_u = (
            _weights(up, first + lanes, last, k_lanes, in_features, EVEN_K) if GATED else next_w
        )
    if PDL:
        _prefetch(weight, first, last, in_features, PREFETCH, THREADS)
        if GATED:
            _prefetch(up, first, last, in_features, PREFETCH, THREADS)
        tl.extra.cuda.gdc_wait()
        if EARLY == 0:
            tl.extra.cuda.gdc_launch_dependents()
        _prefetch(weight, first, last, in_features, AFTER, THREADS)
        if GATED:
            _prefetch(up, first, last, in_features, AFTER, THREADS)
    tokens = tl.arange(0, BLOCK_M)
    token_mask = tokens < num_tokens
    scale = _scale(x, tokens, token_mask, x_stride, in_features, eps, BLOCK_K) if NORM else 1.0
    if AHEAD:
        next_part = _inputs(x, tokens, token_mask, k_lanes, x_stride, in_features, norm_weight,
                            scale, EVEN_K, NORM)  # fmt: skip
    if WIDE:
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    else:
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    acc_up = acc
    num_steps = tl.cdiv(last - first, BLOCK_N) * num_k
    for step in tl.range(0, num_steps, num_stages=STAGES):
        if PDL and EARLY > 0:  # noqa: SIM102 - known when compiled, unlike the next
            if step + EARLY >= num_steps:
                tl.extra.cuda.gdc_launch_dependents()
        rows = first + step // num_k * BLOCK_N + lanes
        if AHEAD:
            w, u, part = next_w, next_u, next_part
            k = (step + 1) % num_k * BLOCK_K + k_lanes
            next_rows = first + (step + 1) // num_k * BLOCK_N + lanes
            next_w = _weights(weight, next_rows, last, k, in_features, EVEN_K)
            next_u = _weights(up, next_rows, last, k, in_features, EVEN_K) if GATED else next_w
            next_part = _inputs(x, tokens, token_mask, k, x_stride, in_features, norm_weight,
                                scale, EVEN_K, NORM)  # fmt: skip
        else:
            k = step % num_k * BLOCK_K + k_lanes
            part = _inputs(x, tokens, token_mask, k, x_stride, in_features, norm_weight, scale,
                           EVEN_K, NORM)  # fmt: skip
            w = _weights(weight, rows, last, k, in_features, EVEN_K)
            u = _weights(up, rows, last, k, in_features, EVEN_K) if GATED else w
        acc = _product(part, w, acc, WIDE)
        if GATED:
            acc_up = _product(part, u, acc_up, WIDE)
        if step % num_k == num_k - 1:
            value = tl.trans(acc) if WIDE else acc
            inside = token_mask[:, None] & (rows < last)[None, :]
            out_at = tokens[:, None].to(tl.int64) * out_stride + rows[None, :]
            bias_at = rows[None, :] + tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
            if GATED:
                value_up = tl.trans(acc_up) if WIDE else acc_up
                value = _gate(value, value_up, bias, bias_at, inside, out_features, HAS_BIAS)
            _finish(value, bias, out, out_at, bias_at, inside, HAS_BIAS and not GATED, RESIDUAL)
            acc = tl.zeros_like(acc)
            acc_up = acc
