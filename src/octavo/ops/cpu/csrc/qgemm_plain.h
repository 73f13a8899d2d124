/* Part of qgemm.c: what runs on any CPU, one number at a time. It has the bits of the other kernels
 * up to the rounding of the epilogue. */
#ifndef OCTAVO_QGEMM_PLAIN_H
#define OCTAVO_QGEMM_PLAIN_H

#include <math.h>
#include <string.h>

#include "qgemm.h"

static float plain_load(const void *p, int64_t i, int is_f32) {
    if (is_f32) return ((const float *)p)[i];
    union { uint32_t u; float f; } x = {(uint32_t)((const uint16_t *)p)[i] << 16};
    return x.f;
}

static void plain_store(void *p, int64_t i, int is_f32, float v) {
    if (is_f32) {
        ((float *)p)[i] = v;
        return;
    }
    union { float f; uint32_t u; } x = {v};
    ((uint16_t *)p)[i] =
        v != v ? 0x7fc0 : (uint16_t)((x.u + 0x7fff + ((x.u >> 16) & 1)) >> 16);
}

/* How many fine steps (QGEMM_FINE) there are in 1, in a row whose largest magnitude has the bits
 * `most`; 0 for a row of zeros (or nearly), a NaN for one with an infinity or NaN. */
OCTAVO_INLINE float row_fine(uint32_t most) {
    union { uint32_t u; float f; } x = {most};
    if (most >= 0x7f800000) return __builtin_nanf("");
    return x.f < 1e-30f ? 0.0f : QGEMM_FINE / x.f;
}

/* The steps of a row in 1, from the sum of its squares in fine steps. */
OCTAVO_INLINE float row_levels(float fine, int64_t squares, int64_t k) {
    const float end = QGEMM_SPREAD * (float)sqrt((double)squares / (double)k);
    return fine * (127.0f / (end < QGEMM_FINE ? end : QGEMM_FINE));
}

/* Low bytes of a row without values: of zeros, or one whose step spoils every sum. */
OCTAVO_INLINE float round_to_nothing(float fine, int64_t kp, uint8_t *low) {
    memset(low, 128, (size_t)kp);
    return fine;
}

/* Appends quad `quad` of a row if one of its high bytes is not 0. */
OCTAVO_INLINE qgemm_quad *add_quad_of(qgemm_quad *end, int64_t row, int64_t quad, int32_t high) {
    if (!high) return end;
    int8_t four[4];
    memcpy(four, &high, 4);
    const int sum = four[0] + four[1] + four[2] + four[3];
    *end = (qgemm_quad){(int32_t)row, (int32_t)quad, high, -128 * sum};
    return end + 1;
}

/* Rounds row `row` of x to low [kp] and appends to *quads. Returns the row's step. */
static float plain_round_row(const void *x, int is_f32, int64_t k, int64_t kp, int64_t row,
                             uint8_t *low, qgemm_quad **quads) {
    uint32_t most = 0;
    for (int64_t i = 0; i < k; ++i) {
        union { float f; uint32_t u; } v = {plain_load(x, i, is_f32)};
        if ((v.u & 0x7fffffff) > most) most = v.u & 0x7fffffff;
    }
    const float fine = row_fine(most);
    if (!(fine > 0.0f)) return round_to_nothing(fine, kp, low);
    int64_t squares = 0;
    for (int64_t i = 0; i < k; ++i) {
        const int64_t v = lrintf(plain_load(x, i, is_f32) * fine);
        squares += v * v;
    }
    const float levels = row_levels(fine, squares, k);
    for (int64_t quad = 0; quad < kp / 4; ++quad) {
        int8_t high[4];
        int32_t four;
        for (int64_t j = 0; j < 4; ++j) {
            const int64_t i = quad * 4 + j;
            const int v = (i < k ? (int)lrintf(plain_load(x, i, is_f32) * levels) : 0) + 128;
            low[i] = (uint8_t)v;
            high[j] = (int8_t)(v >> 8);
        }
        memcpy(&four, high, 4);
        *quads = add_quad_of(*quads, row, quad, four);
    }
    return 1.0f / levels;
}

/* Code [channel of the group, k]. */
static int plain_code(const qgemm_weight *w, int64_t g, int64_t channel, int64_t k) {
    const int64_t half = channel / 16, lane = channel % 16;
    if (w->bits == 8) {
        const int8_t *step =
            (const int8_t *)w->w.data + g * w->w.kp * GEMM_GROUP + k / QGEMM_KSTEP * QGEMM_STEP_BYTES;
        return step[half * GEMM_TILE_BYTES + k % QGEMM_KSTEP / 4 * 64 + lane * 4 + k % 4];
    }
    const uint8_t *block = (const uint8_t *)w->w.data +
                           (g * (w->w.kp / QGEMM_BLOCK) + k / QGEMM_BLOCK) * QGEMM_BLOCK_BYTES;
    const int64_t quad = k % QGEMM_BLOCK / 4;
    const int both = block[half * 256 + quad % 4 * 64 + lane * 4 + k % 4];
    const int q = quad < 4 ? both & 15 : both >> 4;
    return (int8_t)((block[512 + channel] * q >> 4) + block[544 + channel]);
}

static void plain_weight_row(const qgemm_weight *w, int64_t row, void *out, int is_f32) {
    const int64_t g = row / GEMM_GROUP, channel = row % GEMM_GROUP;
    for (int64_t k = 0; k < w->w.k; ++k)
        plain_store(out, k, is_f32, w->scales[row] * (float)plain_code(w, g, channel, k));
}

static float plain_gate(float v, int64_t kind) {
    if (kind == GEMM_GATE_UP) return v / (1.0f + expf(-v));
    return v / (1.0f + expf(-1.5957691216f * v * (1.0f + 0.044715f * v * v)));
}

/* Epilogue of one row of a group, as gemm_store_row. */
static void plain_finish(const gemm_call *call, const float *acc, int64_t g, int64_t m) {
    const gemm_weight *w = call->w;
    const int gate_up = w->kind != GEMM_PLAIN, width = gate_up ? 16 : GEMM_GROUP;
    const int64_t col = g * width;
    const float *bias = w->bias ? w->bias + g * GEMM_GROUP : NULL;
    for (int64_t i = 0; i < width && col + i < w->n; ++i) {
        float v = acc[i] + (bias ? bias[i] : 0.0f);
        if (gate_up) v = plain_gate(v, w->kind) * (acc[i + 16] + (bias ? bias[i + 16] : 0.0f));
        if (call->residual)
            v += plain_load(call->residual, m * call->residual_stride + col + i,
                            call->flags & GEMM_RESIDUAL_F32);
        plain_store(call->y, m * call->y_stride + col + i, call->flags & GEMM_OUT_F32, v);
    }
}

/* Codes of a group in the layout of 8 bits. */
static const int8_t *plain_codes(const qgemm_weight *w, int64_t g, int8_t *buffer) {
    if (w->bits == 8) return (const int8_t *)w->w.data + g * w->w.kp * GEMM_GROUP;
    for (int64_t k = 0; k < w->w.kp; ++k)
        for (int64_t channel = 0; channel < GEMM_GROUP; ++channel)
            buffer[k / QGEMM_KSTEP * QGEMM_STEP_BYTES + channel / 16 * GEMM_TILE_BYTES +
                   k % QGEMM_KSTEP / 4 * 64 + channel % 16 * 4 + k % 4] =
                (int8_t)plain_code(w, g, channel, k);
    return buffer;
}

/* The codes of k: channel i's at [i / 16 * GEMM_TILE_BYTES + i % 16 * 4]. */
static const int8_t *plain_column(const int8_t *codes, int64_t k) {
    return codes + k / QGEMM_KSTEP * QGEMM_STEP_BYTES + k % QGEMM_KSTEP / 4 * 64 + k % 4;
}

static void plain_add(int32_t *sums, const int8_t *column, int x) {
    for (int i = 0; i < GEMM_GROUP; ++i)
        sums[i] += column[i / 16 * GEMM_TILE_BYTES + i % 16 * 4] * x;
}

static void plain_qgemm(const qgemm_call *call, qgemm_work *work, int64_t range, int8_t *buffer) {
    const qgemm_weight *w = call->w;
    const int64_t kp = w->w.kp;
    qgemm_piece p;
    while (qgemm_take(work, &range, &p)) {
        const int64_t g = p.g;
        const int8_t *codes = plain_codes(w, g, buffer);
        for (int64_t m = p.m0; m < p.m1; ++m) {
            const qgemm_row *row = call->rows + m;
            int32_t sums[GEMM_GROUP];
            for (int i = 0; i < GEMM_GROUP; ++i) sums[i] = -128 * w->sums[g * GEMM_GROUP + i];
            for (int64_t k = 0; k < kp; ++k)
                plain_add(sums, plain_column(codes, k), call->x[m * kp + k]);
            for (int32_t q = row->first; q < row->end; ++q) {
                int8_t high[4];
                memcpy(high, &call->quads[q].high, 4);
                const int64_t k = call->quads[q].quad * 4;
                for (int j = 0; j < 4; ++j)
                    plain_add(sums, plain_column(codes, k + j), 256 * high[j]);
            }
            float acc[GEMM_GROUP];
            for (int i = 0; i < GEMM_GROUP; ++i)
                acc[i] = (float)sums[i] * (w->scales[g * GEMM_GROUP + i] * row->step);
            plain_finish(&call->out, acc, g, m);
        }
    }
}

#endif
