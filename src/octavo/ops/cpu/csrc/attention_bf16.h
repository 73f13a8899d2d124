/* Paged attention for bf16 caches on AVX512_BF16; included once, between vec.h (VW 16) and
 * vec_end.h, inside a region that has the feature and after attention_tile.h's for AVX512.
 *
 * vdpbf16ps multiplies 16 pairs of bf16 and adds each pair's two products into one float. Keys
 * are transposed to [head_dim / 2][ATTN_TILE] pairs and values interleaved to
 * [ATTN_TILE / 2][padded_dim] pairs, so that both products are sums over broadcast pairs of the
 * left side and need no horizontal sums. Interleaving works within 128-bit lanes: of each 32
 * dimensions the first vector holds 8 L .. 8 L + 3 in lane L and the second 8 L + 4 .. 8 L + 7;
 * finish puts them in order.
 */

#include "attention_scores.h"

enum { BF16_ROW_BLOCK = 8 };

/* C = (factors ? factors * C : 0) + A B over k pairs, rows <= 8 and vectors <= 2 constants. */
OCTAVO_INLINE void bf16_multiply_block(const int rows, const int vectors, const uint32_t *a,
                                       int a_stride, const uint32_t *b, int b_stride, int k,
                                       float *c, int c_stride, const float *factors) {
    __m512 sum[BF16_ROW_BLOCK][2];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int j = 0; j < vectors; j++)
            sum[r][j] = factors ? _mm512_mul_ps(_mm512_loadu_ps(c + r * c_stride + j * 16),
                                                _mm512_set1_ps(factors[r]))
                                : _mm512_setzero_ps();
    for (int i = 0; i < k; i++, b += b_stride) {
        __m512i right[2];
#pragma GCC unroll 2
        for (int j = 0; j < vectors; j++) right[j] = _mm512_loadu_si512(b + j * 16);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const __m512bh left = (__m512bh)_mm512_set1_epi32((int)a[r * a_stride + i]);
#pragma GCC unroll 2
            for (int j = 0; j < vectors; j++)
                sum[r][j] = _mm512_dpbf16_ps(sum[r][j], left, (__m512bh)right[j]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int j = 0; j < vectors; j++)
            _mm512_storeu_ps(c + r * c_stride + j * 16, sum[r][j]);
}

#define CASE(n) \
    case n: bf16_multiply_block(n, 2, a, a_stride, b, b_stride, k, c, c_stride, factors); break;

/* The same for any number of rows and a width that is a multiple of 32 floats. */
static void bf16_multiply(int rows, int width, const uint32_t *a, int a_stride,
                          const uint32_t *b, int b_stride, int k, float *c, int c_stride,
                          const float *factors) {
    for (int column = 0; column < width; column += 32, b += 32) {
        for (int left = rows; left > 0;) {
            const int blocks = (left + BF16_ROW_BLOCK - 1) / BF16_ROW_BLOCK, n = left / blocks;
            switch (n) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) }
            left -= n;
            a += n * a_stride;
            c += n * c_stride;
            if (factors) factors += n;
        }
        a -= rows * a_stride;
        c += 32 - rows * c_stride;
        if (factors) factors -= rows;
    }
}
#undef CASE

/* out[d][i] = pair d of row i. 128-bit lane L of a loaded vector takes row 4 L + r, so that two
 * in-lane shuffle steps leave the tokens in order; masked broadcasts keep the rest off the
 * shuffle port. */
static void bf16_transpose(const char *const *rows, int dim, uint32_t *out) {
    for (int d = 0; d < dim; d += 8, out += 4 * ATTN_TILE)
        for (int i = 0; i < ATTN_TILE; i += 16) {
            const char *const *p = rows + i;
            __m512i a[4];
            for (int r = 0; r < 4; r++) {
                __m512i x = _mm512_castsi128_si512(_mm_loadu_si128((const void *)(p[r] + 2 * d)));
                x = _mm512_mask_broadcast_i32x4(
                    x, 0x00f0, _mm_loadu_si128((const void *)(p[4 + r] + 2 * d)));
                x = _mm512_mask_broadcast_i32x4(
                    x, 0x0f00, _mm_loadu_si128((const void *)(p[8 + r] + 2 * d)));
                a[r] = _mm512_mask_broadcast_i32x4(
                    x, 0xf000, _mm_loadu_si128((const void *)(p[12 + r] + 2 * d)));
            }
            const __m512i b0 = _mm512_unpacklo_epi32(a[0], a[1]);
            const __m512i b1 = _mm512_unpackhi_epi32(a[0], a[1]);
            const __m512i b2 = _mm512_unpacklo_epi32(a[2], a[3]);
            const __m512i b3 = _mm512_unpackhi_epi32(a[2], a[3]);
            _mm512_store_si512(out + i, _mm512_unpacklo_epi64(b0, b2));
            _mm512_store_si512(out + ATTN_TILE + i, _mm512_unpackhi_epi64(b0, b2));
            _mm512_store_si512(out + 2 * ATTN_TILE + i, _mm512_unpacklo_epi64(b1, b3));
            _mm512_store_si512(out + 3 * ATTN_TILE + i, _mm512_unpackhi_epi64(b1, b3));
        }
}

/* out[i] = values of tokens 2 i and 2 i + 1 as pairs, in the order described above. */
static void bf16_interleave(const char *const *rows, int dim, int padded_dim, uint32_t *out) {
    for (int i = 0; i < ATTN_TILE; i += 2, out += padded_dim)
        for (int d = 0; d < dim; d += 32) {
            const __mmask32 mask = dim - d >= 32 ? 0xffffffffu : (1u << (dim - d)) - 1;
            const __m512i a = _mm512_maskz_loadu_epi16(mask, rows[i] + 2 * d);
            const __m512i b = _mm512_maskz_loadu_epi16(mask, rows[i + 1] + 2 * d);
            _mm512_store_si512(out + d, _mm512_unpacklo_epi16(a, b));
            _mm512_store_si512(out + d + 16, _mm512_unpackhi_epi16(a, b));
        }
}

OCTAVO_INLINE __m512i bf16_widen(__m256i codes) {
    const __m512i low = _mm512_cvtepi8_epi32(_mm256_castsi256_si128(codes));
    const __m512i high = _mm512_cvtepi8_epi32(_mm256_extracti128_si256(codes, 1));
    return (__m512i)_mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(high), _mm512_cvtepi32_ps(low));
}

/* Codes of an int8 cache as bf16, one row behind the other; rows are then these. */
static void bf16_from_codes(const char **rows, int dim, uint16_t *out) {
    const int rest = dim % 32;
    const __mmask32 mask = (1u << rest) - 1;
    for (int i = 0; i < ATTN_TILE; i++, out += dim) {
        const char *row = rows[i];
        int d = 0;
        for (; d + 32 <= dim; d += 32)
            _mm512_storeu_si512(out + d, bf16_widen(_mm256_loadu_si256((const void *)(row + d))));
        if (rest)
            _mm512_mask_storeu_epi16(out + d, mask,
                                     bf16_widen(_mm256_maskz_loadu_epi8(mask, row + d)));
        rows[i] = (const char *)out;
    }
}

/* bf16_interleave of codes. */
static void bf16_interleave_codes(const char *const *rows, int dim, int padded_dim,
                                  uint32_t *out) {
    for (int i = 0; i < ATTN_TILE; i += 2, out += padded_dim)
        for (int d = 0; d < dim; d += 32) {
            const __mmask32 mask = dim - d >= 32 ? 0xffffffffu : (1u << (dim - d)) - 1;
            const __m512i a = bf16_widen(_mm256_maskz_loadu_epi8(mask, rows[i] + d));
            const __m512i b = bf16_widen(_mm256_maskz_loadu_epi8(mask, rows[i + 1] + d));
            _mm512_store_si512(out + d, _mm512_unpacklo_epi16(a, b));
            _mm512_store_si512(out + d + 16, _mm512_unpackhi_epi16(a, b));
        }
}

/* The tile's values as pairs. */
static void bf16_values(const struct attn_task *t, const struct attn_scratch *s, uint32_t *out) {
    if (t->key_scale)
        bf16_interleave_codes(s->value_rows, t->args->value_dim, t->padded_dim, out);
    else
        bf16_interleave(s->value_rows, t->args->value_dim, t->padded_dim, out);
}

/* The tile's rows and, of an int8 cache, scales; codes of keys become bf16. */
static void bf16_gather(const struct attn_task *t, struct attn_scratch *s, int start, int lo,
                        int hi) {
    attn_gather(t, start, lo, hi, s->key_rows, s->value_rows);
    if (!t->key_scale) return;
    FN(tile_scales)(t, s, start, lo, hi);
    bf16_from_codes(s->key_rows, t->args->head_dim, (uint16_t *)s->wide);
}

/* Online softmax of row r over one tile, given its 32 products q.k: probs become pairs of bf16
 * against the row's new maximum, factors how much the maximum's growth leaves of older sums.
 * special: a constant, whether there may be scales, a soft cap or slopes. */
OCTAVO_INLINE void bf16_softmax_row(const struct attn_task *t, struct attn_scratch *s, int r,
                                    int start, int masked, vf x0, vf x1, float *max,
                                    const int special) {
    const int scaled = special && t->key_scale;
    const float scale = t->args->scale * ATTN_LOG2E;
    x0 *= scale;
    x1 *= scale;
    if (scaled) {
        x0 *= FN(load)(s->key_scales);
        x1 *= FN(load)(s->key_scales + 16);
    }
    if (special && t->adjusts) {
        const int from = start - t->first_pos - r / t->group;
        x0 = FN(adjusted)(t, r % t->group, from, x0);
        x1 = FN(adjusted)(t, r % t->group, from + 16, x1);
    }
    if (masked) {
        int lo, hi;
        attn_row_range(t, r, &lo, &hi);
        lo = lo > start ? lo - start : 0;
        hi = hi > start ? hi - start : 0;
        const uint32_t below = hi >= 32 ? 0xffffffffu : (1u << hi) - 1;
        const uint32_t seen = lo >= 32 ? 0 : below & (0xffffffffu << lo);
        const __m512 nothing = _mm512_set1_ps(-INFINITY);
        x0 = (vf)_mm512_mask_mov_ps(nothing, (__mmask16)seen, (__m512)x0);
        x1 = (vf)_mm512_mask_mov_ps(nothing, (__mmask16)(seen >> 16), (__m512)x1);
    }
    const float old = max[r], highest = FN(max)(FN(vmax)(x0, x1));
    const float now = highest > old ? highest : old;
    const vf p0 = FN(exp2)(x0 - now), p1 = FN(exp2)(x1 - now);
    vf w0 = p0, w1 = p1;
    if (scaled) {
        w0 *= FN(load)(s->value_scales);
        w1 *= FN(load)(s->value_scales + 16);
    }
    _mm512_store_si512(s->probs + r * (ATTN_TILE / 2),
                       (__m512i)_mm512_cvtne2ps_pbh((__m512)w1, (__m512)w0));
    const float factor = now == old ? 1.0f : FN(exp2)(FN(set1)(old - now))[0];
    float *lanes = s->lane_sums + r * 16;
    FN(store)(lanes, FN(load)(lanes) * factor + (p0 + p1));
    s->factors[r] = factor;
    max[r] = now;
}

OCTAVO_INLINE void bf16_softmax_rows(const struct attn_task *t, struct attn_scratch *s, int start,
                                     int masked, float *max, const int special) {
    for (int r = 0; r < t->num_rows; r++) {
        const float *row = s->scores + r * ATTN_TILE;
        bf16_softmax_row(t, s, r, start, masked, FN(load)(row), FN(load)(row + 16), max, special);
    }
}

static void bf16_softmax(const struct attn_task *t, struct attn_scratch *s, int start, int masked,
                         float *max) {
    if (t->special)
        bf16_softmax_rows(t, s, start, masked, max, 1);
    else
        bf16_softmax_rows(t, s, start, masked, max, 0);
}

static void bf16_begin(const struct attn_task *t, struct attn_scratch *s) {
    const int bytes = t->args->head_dim * 2;
    for (int r = 0; r < t->num_rows; r++)
        __builtin_memcpy((char *)s->query + r * bytes, attn_query_row(t, r, 2), (size_t)bytes);
}

static void bf16_chunk(const struct attn_task *t, struct attn_scratch *s, int lo, int hi,
                       struct attn_state state) {
    const int dim = t->args->head_dim, padded = t->padded_dim, rows = t->num_rows;
    uint32_t *keys = (uint32_t *)s->keys, *values = (uint32_t *)s->values;
    const uint32_t *query = (const uint32_t *)s->query, *probs = (const uint32_t *)s->probs;
    for (int r = 0; r < rows; r++) state.max[r] = ATTN_EMPTY;
    __builtin_memset(s->lane_sums, 0, (size_t)rows * 64);
    __builtin_memset(state.acc, 0, (size_t)rows * padded * 4);
    int first_lo, first_hi, last_lo, last_hi;
    attn_row_range(t, 0, &first_lo, &first_hi);
    attn_row_range(t, rows - 1, &last_lo, &last_hi);

    const int first = lo / ATTN_TILE * ATTN_TILE;
    for (int start = first; start < hi; start += ATTN_TILE) {
        bf16_gather(t, s, start, lo, hi);
        attn_prefetch(t, start, ATTN_AHEAD, 0);
        bf16_transpose(s->key_rows, dim, keys);
        bf16_multiply(rows, ATTN_TILE, query, dim / 2, keys, ATTN_TILE, dim / 2, s->scores,
                      ATTN_TILE, 0);
        attn_prefetch(t, start, ATTN_AHEAD, 1);
        bf16_softmax(t, s, start, start < last_lo || start + ATTN_TILE > first_hi, state.max);
        bf16_values(t, s, values);
        bf16_multiply(rows, padded, probs, ATTN_TILE / 2, values, padded, ATTN_TILE / 2,
                      state.acc, padded, s->factors);
    }
    for (int r = 0; r < rows; r++) state.sum[r] = FN(sum)(FN(load)(s->lane_sums + r * 16));
}

static void bf16_finish(const struct attn_task *t, struct attn_state state) {
    const int dim = t->args->value_dim;
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    for (int r = 0; r < t->num_rows; r++) {
        const float *acc = state.acc + (int64_t)r * t->padded_dim;
        uint16_t *out = (uint16_t *)attn_out_row(t, r, 2);
        const vf inverse = FN(set1)(1.0f / state.sum[r]);
        for (int d = 0; d < dim; d += 32) {
            const __mmask32 mask = dim - d >= 32 ? 0xffffffffu : (1u << (dim - d)) - 1;
            const vf low = FN(load)(acc + d) * inverse, high = FN(load)(acc + d + 16) * inverse;
            const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
            _mm512_mask_storeu_epi16(out + d, mask, _mm512_permutexvar_epi64(order, both));
        }
    }
}

static const struct attn_kernel bf16_kernel = {bf16_begin, bf16_chunk, merge_avx512, bf16_finish,
                                               0, 32};
