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

/* The step of a row whose largest magnitude has the bits `most`, and in *levels how many of them
 * there are in 1. A row with an infinity or NaN gives NaN, a row of zeros (or nearly) zeros. */
OCTAVO_INLINE float row_step(uint32_t most, float *levels) {
    union { uint32_t u; float f; } x = {most};
    *levels = 0.0f;
    if (most >= 0x7f800000) return __builtin_nanf("");
    if (x.f < 1e-30f) return 0.0f;
    *levels = QGEMM_LEVELS / x.f;
    return x.f / QGEMM_LEVELS;
}

/* to: [2][kp], high and low bytes. Returns the row's step. */
static float plain_round_row(const void *x, int is_f32, int64_t k, int64_t kp, uint8_t *to) {
    uint32_t most = 0;
    for (int64_t i = 0; i < k; ++i) {
        union { float f; uint32_t u; } v = {plain_load(x, i, is_f32)};
        if ((v.u & 0x7fffffff) > most) most = v.u & 0x7fffffff;
    }
    float levels;
    const float step = row_step(most, &levels);
    memset(to, 0, (size_t)kp * 2);
    for (int64_t i = 0; i < k; ++i) {
        const float v = levels == 0.0f ? 0.0f : plain_load(x, i, is_f32) * levels;
        const int q = (int)lrintf(v) + 32768;
        to[i] = (uint8_t)(q >> 8);
        to[kp + i] = (uint8_t)q;
    }
    return step;
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

static void plain_qgemm(const qgemm_call *call, int64_t g0, int64_t g1, int64_t m0, int64_t m1,
                        int8_t *buffer) {
    const qgemm_weight *w = call->w;
    const int64_t kp = w->w.kp;
    for (int64_t g = g0; g < g1; ++g) {
        const int8_t *codes = plain_codes(w, g, buffer);
        for (int64_t m = m0; m < m1; ++m) {
            const uint8_t *x = call->x + m * 2 * kp;
            int32_t high[GEMM_GROUP] = {0}, low[GEMM_GROUP] = {0};
            for (int64_t k = 0; k < kp; ++k) {
                const int8_t *row = codes + k / QGEMM_KSTEP * QGEMM_STEP_BYTES +
                                    k % QGEMM_KSTEP / 4 * 64 + k % 4;
                for (int i = 0; i < GEMM_GROUP; ++i) {
                    const int code = row[i / 16 * GEMM_TILE_BYTES + i % 16 * 4];
                    high[i] += code * x[k];
                    low[i] += code * x[kp + k];
                }
            }
            float acc[GEMM_GROUP];
            for (int i = 0; i < GEMM_GROUP; ++i) {
                const int32_t h = high[i] - 128 * w->sums[g * GEMM_GROUP + i];
                acc[i] = ((float)h * 256.0f + (float)low[i]) * w->scales[g * GEMM_GROUP + i] *
                         call->steps[m];
            }
            plain_finish(&call->out, acc, g, m);
        }
    }
}

#endif
