/* Shared by qgemm.c (driver, plain C and VNNI kernels) and qgemm_amx.c.
 *
 * y = epilogue(x W^T) with W[n, k] = scale[n] * code[n, k], codes int8, and a row of x rounded to
 * x[k] = step * (256 * (high[k] - 128) + low[k]), both bytes: 16-bit fixed point, as 8 bits for a
 * whole row of activations cost 2 % of perplexity. The sums of code * high and code * low are exact
 * integers, so that every kernel gives the same bits, whatever it takes at a time.
 *
 * Codes are stored in 8 bits, or made from 4 bits q and two bytes for each 32 along k:
 *     code = (a * q >> 4) + c        a, c in 0..255, q in 0..15; the low 8 bits, signed
 *
 * Packed: groups of 32 channels, as in gemm.h, with kp = k rounded up to 64 and zero codes behind.
 *   8 bits: [kp / 64][2 halves][16 k-quads][16 channels][4] int8: an AMX tile of 1 KiB a half.
 *   4 bits: [kp / 32] of 576 bytes: [2 halves][4][16 channels][4], a byte holding of k-quad j the
 *           q in its low bits and of k-quad j + 4 in its high ones; then a[32], then c[32].
 */
#ifndef OCTAVO_QGEMM_H
#define OCTAVO_QGEMM_H

#include "gemm.h"

enum {
    QGEMM_KSTEP = 64,       /* k is padded to this */
    QGEMM_STEP_BYTES = 2048, /* QGEMM_KSTEP x GEMM_GROUP codes of 8 bits */
    QGEMM_BLOCK = 32,       /* along k with its own a and c */
    QGEMM_BLOCK_BYTES = 576, /* QGEMM_BLOCK x GEMM_GROUP codes of 4 bits */
    QGEMM_LEVELS = 32512,   /* of a row of x on each side of zero: 127 * 256 */
};
enum { QGEMM_X_F32 = 1 << 16, QGEMM_FLAGS = QGEMM_X_F32 }; /* beside those of gemm.h */

typedef struct {
    gemm_weight w;       /* data: the packed codes; kp as above */
    const float *scales; /* [num_groups * 32] */
    const int32_t *sums; /* [num_groups * 32], of a channel's codes */
    int64_t bits;        /* 8 or 4 */
} qgemm_weight;

/* Arguments as qgemm.py packs them. Strides are in elements, the last dimensions are dense. */
struct qgemm_args {
    qgemm_weight w;
    const void *x;        /* [m, k], bf16 or float32 */
    void *y;              /* [m, n], bf16 or float32 */
    const void *residual; /* [m, n], bf16 or float32, or NULL; may be y */
    int64_t x_stride, m, y_stride, residual_stride;
    int32_t flags, num_threads;
};

struct qgemm_rows_args {
    qgemm_weight w;
    const int64_t *ids; /* [count] */
    void *out;          /* [count, k], bf16 or float32 */
    int64_t count, out_stride;
    int32_t is_f32, num_threads;
};

/* One call, as the kernels see it. */
typedef struct {
    const qgemm_weight *w;
    const uint8_t *x;   /* [m][2][kp]: high and low bytes */
    const float *steps; /* [m] */
    gemm_call out;      /* what the epilogue reads */
} qgemm_call;

/* Memory of this thread that lasts until its next call with the same `which`, 0 or 1; 64-byte
 * aligned. NULL if there is none. */
void *octavo_scratch(int which, size_t bytes);

/* A group's codes of 8 bits: where they lie, or unpacked to `buffer` of kp * 32 bytes. */
const int8_t *octavo_qgemm_codes(const qgemm_weight *w, int64_t g, int8_t *buffer);

/* Epilogue of `rows` rows from row m of group g: high and low are the sums of code * high and of
 * code * low, both [rows][32], 64-byte aligned. */
void octavo_qgemm_store(const qgemm_call *call, const int32_t *high, const int32_t *low, int64_t g,
                        int64_t m, int rows);

/* Rows [m0, m1) of the groups [g0, g1). buffer: of kp * 32 bytes if w->bits is 4. */
void octavo_qgemm_vnni(const qgemm_call *call, int64_t g0, int64_t g1, int64_t m0, int64_t m1,
                       int8_t *buffer);
void octavo_qgemm_amx(const qgemm_call *call, int64_t g0, int64_t g1, int64_t m0, int64_t m1,
                      int8_t *buffer);

#endif
