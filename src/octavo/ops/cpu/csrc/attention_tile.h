/* Paged attention in float32 for one vector width; included between vec.h and vec_end.h.
 *
 * bf16 and int8 caches are widened while a tile is staged. Both products run through one
 * micro-kernel, C[rows][vectors] (+)= A[rows][k] B[k][vectors], whose sums run over k in order
 * whatever the number of rows, so that a row's result does not depend on its neighbours.
 */

#include "attention_scores.h"

OCTAVO_INLINE vf FN(load_codes)(const int8_t *p) {
#if VW == 16
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p)));
#elif VW == 8
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)p)));
#else
    return (vf){p[0], p[1], p[2], p[3]};
#endif
}

#if VW == 16
#define ROW_BLOCK 8
#else
#define ROW_BLOCK 4
#endif

/* C = (factors ? factors * C : 0) + A B for `rows` <= ROW_BLOCK and `vectors` <= 2, constants. */
OCTAVO_INLINE void FN(multiply_block)(const int rows, const int vectors, const float *a,
                                      int a_stride, const float *const *b, int b_offset, int k,
                                      float *c, int c_stride, const float *factors) {
    vf sum[ROW_BLOCK][2];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int j = 0; j < vectors; j++)
            sum[r][j] = factors ? FN(load)(c + r * c_stride + j * VW) * factors[r] : (vf){0};
    for (int i = 0; i < k; i++) {
        vf right[2];
#pragma GCC unroll 2
        for (int j = 0; j < vectors; j++) right[j] = FN(load)(b[i] + b_offset + j * VW);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            const vf left = FN(set1)(a[r * a_stride + i]);
#pragma GCC unroll 2
            for (int j = 0; j < vectors; j++) sum[r][j] += left * right[j];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int j = 0; j < vectors; j++) FN(store)(c + r * c_stride + j * VW, sum[r][j]);
}

#define CASE(n) \
    case n: \
        if (vectors == 2) \
            FN(multiply_block)(n, 2, a, a_stride, b, b_offset, k, c, c_stride, factors); \
        else \
            FN(multiply_block)(n, 1, a, a_stride, b, b_offset, k, c, c_stride, factors); \
        break;

/* The same for any number of rows and a width that is a multiple of VW. */
static void FN(multiply)(int rows, int width, const float *a, int a_stride,
                         const float *const *b, int k, float *c, int c_stride,
                         const float *factors) {
    for (int b_offset = 0; b_offset < width; b_offset += 2 * VW) {
        const int vectors = width - b_offset >= 2 * VW ? 2 : 1;
        for (int left = rows; left > 0;) {
            const int blocks = (left + ROW_BLOCK - 1) / ROW_BLOCK, n = left / blocks;
            switch (n) {
                CASE(1) CASE(2) CASE(3) CASE(4)
#if ROW_BLOCK == 8
                CASE(5) CASE(6) CASE(7) CASE(8)
#endif
            }
            left -= n;
            a += n * a_stride;
            c += n * c_stride;
            if (factors) factors += n;
        }
        a -= rows * a_stride;
        c += 2 * VW - rows * c_stride;
        if (factors) factors -= rows;
    }
}
#undef CASE

/* out[d][i] = rows[i][d] for ATTN_TILE rows. Four values of each of VW rows are transposed in
 * registers; a head dimension that is no multiple of 4 leaves a scalar rest. */
static void FN(transpose)(const float *const *rows, int dim, float *out) {
    int d = 0;
    for (; d + 4 <= dim; d += 4)
        for (int i = 0; i < ATTN_TILE; i += VW) {
            const float *const *p = rows + i;
            float *o = out + d * ATTN_TILE + i;
#if VW == 16
            __m512 a[4];
            for (int r = 0; r < 4; r++) {
                /* 128-bit lane L takes row 4 L + r, so that lanes end up in token order */
                __m512 x = _mm512_castps128_ps512(_mm_loadu_ps(p[r] + d));
                x = _mm512_mask_broadcast_f32x4(x, 0x00f0, _mm_loadu_ps(p[4 + r] + d));
                x = _mm512_mask_broadcast_f32x4(x, 0x0f00, _mm_loadu_ps(p[8 + r] + d));
                a[r] = _mm512_mask_broadcast_f32x4(x, 0xf000, _mm_loadu_ps(p[12 + r] + d));
            }
            const __m512d b0 = _mm512_castps_pd(_mm512_unpacklo_ps(a[0], a[1]));
            const __m512d b1 = _mm512_castps_pd(_mm512_unpackhi_ps(a[0], a[1]));
            const __m512d b2 = _mm512_castps_pd(_mm512_unpacklo_ps(a[2], a[3]));
            const __m512d b3 = _mm512_castps_pd(_mm512_unpackhi_ps(a[2], a[3]));
            _mm512_storeu_pd(o, _mm512_unpacklo_pd(b0, b2));
            _mm512_storeu_pd(o + ATTN_TILE, _mm512_unpackhi_pd(b0, b2));
            _mm512_storeu_pd(o + 2 * ATTN_TILE, _mm512_unpacklo_pd(b1, b3));
            _mm512_storeu_pd(o + 3 * ATTN_TILE, _mm512_unpackhi_pd(b1, b3));
#elif VW == 8
            __m256 a[4];
            for (int r = 0; r < 4; r++)
                a[r] = _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p[r] + d)),
                                            _mm_loadu_ps(p[4 + r] + d), 1);
            const __m256d b0 = _mm256_castps_pd(_mm256_unpacklo_ps(a[0], a[1]));
            const __m256d b1 = _mm256_castps_pd(_mm256_unpackhi_ps(a[0], a[1]));
            const __m256d b2 = _mm256_castps_pd(_mm256_unpacklo_ps(a[2], a[3]));
            const __m256d b3 = _mm256_castps_pd(_mm256_unpackhi_ps(a[2], a[3]));
            _mm256_storeu_ps(o, _mm256_castpd_ps(_mm256_unpacklo_pd(b0, b2)));
            _mm256_storeu_ps(o + ATTN_TILE, _mm256_castpd_ps(_mm256_unpackhi_pd(b0, b2)));
            _mm256_storeu_ps(o + 2 * ATTN_TILE, _mm256_castpd_ps(_mm256_unpacklo_pd(b1, b3)));
            _mm256_storeu_ps(o + 3 * ATTN_TILE, _mm256_castpd_ps(_mm256_unpackhi_pd(b1, b3)));
#else
            for (int c = 0; c < 4; c++)
                FN(store)(o + c * ATTN_TILE,
                          (vf){p[0][d + c], p[1][d + c], p[2][d + c], p[3][d + c]});
#endif
        }
    for (; d < dim; d++)
        for (int i = 0; i < ATTN_TILE; i++) out[d * ATTN_TILE + i] = rows[i][d];
}

/* out[i] = float(row i), zero up to padded_dim. */
static void FN(widen)(const char *const *rows, int dtype, int dim, int padded_dim, float *out) {
    for (int i = 0; i < ATTN_TILE; i++, out += padded_dim) {
        int d = 0;
        if (dtype == OCTAVO_F32) {
            const float *row = (const float *)rows[i];
            for (; d + VW <= dim; d += VW) FN(store)(out + d, FN(load)(row + d));
            for (; d < dim; d++) out[d] = row[d];
        } else if (dtype == OCTAVO_I8) {
            const int8_t *row = (const int8_t *)rows[i];
            for (; d + VW <= dim; d += VW)
                FN(store)(out + d, FN(load_codes)(row + d));
            for (; d < dim; d++) out[d] = row[d];
        } else {
            const uint16_t *row = (const uint16_t *)rows[i];
            for (; d + VW <= dim; d += VW) FN(store)(out + d, FN(load_bf16)(row + d));
            for (; d < dim; d++) out[d] = FN(bf16_to_float)(row[d]);
        }
        for (; d < padded_dim; d++) out[d] = 0;
    }
}

/* query[r] = scale log2(e) q_r in float. */
static void FN(begin)(const struct attn_task *t, struct attn_scratch *s) {
    const int dim = t->args->head_dim;
    const float scale = t->args->scale * ATTN_LOG2E;
    for (int r = 0; r < t->num_rows; r++) {
        float *out = s->query + r * dim;
        if (t->args->dtype == OCTAVO_F32) {
            const float *q = (const float *)attn_query_row(t, r, 4);
            for (int d = 0; d < dim; d++) out[d] = q[d] * scale;
        } else {
            const uint16_t *q = (const uint16_t *)attn_query_row(t, r, 2);
            for (int d = 0; d < dim; d++) out[d] = FN(bf16_to_float)(q[d]) * scale;
        }
    }
}

/* Online softmax of one tile: scores become probabilities against the rows' new maxima, factors
 * say how much the growth of a maximum shrinks what was summed before. special: a constant. */
OCTAVO_INLINE void FN(softmax_rows)(const struct attn_task *t, struct attn_scratch *s, int start,
                                    int masked, float *max, const int special) {
    enum { N = ATTN_TILE / VW };
    const int scaled = special && t->key_scale;
    for (int r = 0; r < t->num_rows; r++) {
        float *row = s->scores + r * ATTN_TILE;
        vf x[N];
        for (int j = 0; j < N; j++) x[j] = FN(load)(row + j * VW);
        if (scaled)
            for (int j = 0; j < N; j++) x[j] *= FN(load)(s->key_scales + j * VW);
        if (special && t->adjusts) {
            const int from = start - t->first_pos - r / t->group;
            for (int j = 0; j < N; j++)
                x[j] = FN(adjusted)(t, r % t->group, from + j * VW, x[j]);
        }
        if (masked) {
            int lo, hi;
            attn_row_range(t, r, &lo, &hi);
            lo -= start;
            hi -= start;
            for (int j = 0; j < N; j++) {
                const vi token = FN(load_int)(attn_iota + j * VW);
                const vi seen = (token >= lo) & (token < hi);
                x[j] = (vf)(((vi)x[j] & seen) | ((vi)FN(set1)(-INFINITY) & ~seen));
            }
        }
        vf top = x[0];
        for (int j = 1; j < N; j++) top = FN(vmax)(top, x[j]);
        const float old = max[r], highest = FN(max)(top), now = highest > old ? highest : old;
        vf sum = {0};
        for (int j = 0; j < N; j++) {
            const vf p = FN(exp2)(x[j] - now);
            FN(store)(row + j * VW, scaled ? p * FN(load)(s->value_scales + j * VW) : p);
            sum += p;
        }
        const float factor = now == old ? 1.0f : FN(exp2)(FN(set1)(old - now))[0];
        float *lanes = s->lane_sums + r * 16;
        FN(store)(lanes, FN(load)(lanes) * factor + sum);
        s->factors[r] = factor;
        max[r] = now;
    }
}

static void FN(softmax)(const struct attn_task *t, struct attn_scratch *s, int start, int masked,
                        float *max) {
    if (t->special)
        FN(softmax_rows)(t, s, start, masked, max, 1);
    else
        FN(softmax_rows)(t, s, start, masked, max, 0);
}

static void FN(chunk)(const struct attn_task *t, struct attn_scratch *s, int lo, int hi,
                      struct attn_state state) {
    const int dim = t->args->head_dim, value_dim = t->args->value_dim;
    const int padded = t->padded_dim, key_padded = (dim + VW - 1) / VW * VW;
    const int dtype = t->args->kv_dtype, rows = t->num_rows;
    const float *key_rows[ATTN_TILE], *value_rows[ATTN_TILE], *transposed[ATTN_MAX_DIM];
    for (int i = 0; i < ATTN_TILE; i++) {
        key_rows[i] = s->wide + i * key_padded;
        value_rows[i] = s->values + i * padded;
    }
    for (int d = 0; d < dim; d++) transposed[d] = s->keys + d * ATTN_TILE;
    for (int r = 0; r < rows; r++) state.max[r] = ATTN_EMPTY;
    for (int i = 0; i < rows * 16; i++) s->lane_sums[i] = 0;
    for (int i = 0; i < rows * padded; i++) state.acc[i] = 0;
    int first_lo, first_hi, last_lo, last_hi;
    attn_row_range(t, 0, &first_lo, &first_hi);
    attn_row_range(t, rows - 1, &last_lo, &last_hi);

    const int first = lo / ATTN_TILE * ATTN_TILE;
    for (int start = first; start < hi; start += ATTN_TILE) {
        attn_gather(t, start, lo, hi, s->key_rows, s->value_rows);
        if (dtype == OCTAVO_I8)
            FN(tile_scales)(t, s, start, lo, hi);
        attn_prefetch(t, start, ATTN_AHEAD, 0);
        const float *const *keys = (const float *const *)s->key_rows;
        const float *const *values = (const float *const *)s->value_rows;
        if (dtype != OCTAVO_F32) {
            FN(widen)(s->key_rows, dtype, dim, key_padded, s->wide);
            keys = key_rows;
        }
        FN(transpose)(keys, dim, s->keys);
        FN(multiply)(rows, ATTN_TILE, s->query, dim, transposed, dim, s->scores, ATTN_TILE, 0);
        attn_prefetch(t, start, ATTN_AHEAD, 1);
        FN(softmax)(t, s, start, start < last_lo || start + ATTN_TILE > first_hi, state.max);
        if (dtype != OCTAVO_F32 || padded != value_dim) {
            FN(widen)(s->value_rows, dtype, value_dim, padded, s->values);
            values = value_rows;
        }
        FN(multiply)(rows, padded, s->scores, ATTN_TILE, values, ATTN_TILE, state.acc, padded,
                     s->factors);
    }
    for (int r = 0; r < rows; r++) state.sum[r] = FN(sum)(FN(load)(s->lane_sums + r * 16));
}

/* into += other, both rescaled to the larger of their maxima. */
static void FN(merge)(const struct attn_task *t, struct attn_state into, struct attn_state other) {
    const int padded = t->padded_dim;
    for (int r = 0; r < t->num_rows; r++) {
        const float x = into.max[r], y = other.max[r], max = x > y ? x : y;
        const float a = FN(exp2)(FN(set1)(x - max))[0], b = FN(exp2)(FN(set1)(y - max))[0];
        float *acc = into.acc + (int64_t)r * padded;
        const float *add = other.acc + (int64_t)r * padded;
        into.max[r] = max;
        into.sum[r] = into.sum[r] * a + other.sum[r] * b;
        for (int d = 0; d < padded; d += VW)
            FN(store)(acc + d, FN(load)(acc + d) * a + FN(load)(add + d) * b);
    }
}

static void FN(finish)(const struct attn_task *t, struct attn_state state) {
    const int dim = t->args->value_dim;
    for (int r = 0; r < t->num_rows; r++) {
        const float *acc = state.acc + (int64_t)r * t->padded_dim;
        const float inverse = 1.0f / state.sum[r];
        int d = 0;
        if (t->args->dtype == OCTAVO_F32) {
            float *out = (float *)attn_out_row(t, r, 4);
            for (; d + VW <= dim; d += VW) FN(store)(out + d, FN(load)(acc + d) * inverse);
            for (; d < dim; d++) out[d] = acc[d] * inverse;
        } else {
            uint16_t *out = (uint16_t *)attn_out_row(t, r, 2);
            for (; d + VW <= dim; d += VW) FN(store_bf16)(out + d, FN(load)(acc + d) * inverse);
            for (; d < dim; d++) out[d] = FN(float_to_bf16)(acc[d] * inverse);
        }
    }
}

static const struct attn_kernel FN(attn_kernel) = {FN(begin), FN(chunk), FN(merge), FN(finish),
                                                   0, VW};
#undef ROW_BLOCK
