/* Shared by qgemm.c (driver, plain C and VNNI kernels) and qgemm_amx.c.
 *
 * y = epilogue(x W^T) with W[n, k] = scale[n] * code[n, k], codes int8. A row of x is rounded to
 *     x[k] = step * (256 * high[k] + low[k] - 128)        high int8, low uint8
 * with a step so that all but a few values, at most one in QGEMM_SPREAD^2, have high = 0: 8 bits
 * for the many and 16 for the few that would otherwise leave the others too few steps (8 bits for
 * all cost 2 % of perplexity). The low bytes are multiplied as a matrix. So are, on AMX, the high
 * ones of 32 rows, but only those quads of k that some of the rows need: mostly the same few in
 * all of them. Otherwise they are multiplied quad by quad.
 * All sums are exact integers, so that every kernel gives the same bits, whatever it takes at a
 * time; as the root mean square of a row with high bytes is 21 steps, they stay below 2^30.
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

#include <stdatomic.h>

#include "gemm.h"

enum {
    QGEMM_KSTEP = 64,       /* k is padded to this */
    QGEMM_STEP_BYTES = 2048, /* QGEMM_KSTEP x GEMM_GROUP codes of 8 bits */
    QGEMM_BLOCK = 32,       /* along k with its own a and c */
    QGEMM_BLOCK_BYTES = 576, /* QGEMM_BLOCK x GEMM_GROUP codes of 4 bits */
    QGEMM_SPREAD = 6,       /* 127 steps are so many times the root mean square of a row of x */
    QGEMM_FINE = 32512,     /* steps in a row's largest magnitude where its mean square is taken */
    QGEMM_FEW = 16,         /* a row of kp has at most kp / QGEMM_FEW quads with high bytes */
    QGEMM_ROUND_ROWS = 8,   /* rows of x rounded at a time; fewer are not worth handing out */
    QGEMM_MAX_K = 1 << 16,  /* 255 * 128 * k, the largest sum of low bytes, must fit 31 bits */
    QGEMM_ROWS = 32,        /* rows of x multiplied at a time by AMX */
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

/* Four values of x with high bytes other than 0. */
typedef struct {
    int32_t row, quad; /* x[row][4 * quad] and so on */
    int32_t high;      /* four bytes, as they lie in memory */
    int32_t offset;    /* -128 times their sum: what codes + 128 would add too much */
} qgemm_quad;

/* What a row of x has beside its low bytes. Quads of a whole unit of QGEMM_ROUND_ROWS rows lie one
 * behind the other. */
typedef struct {
    float step;
    int32_t first, end; /* its quads in qgemm_call.quads */
} qgemm_row;

/* The high bytes of QGEMM_ROWS rows as a matrix, for AMX: of `count` quads, in any order. */
typedef struct {
    int8_t *high;     /* [count / 16, rounded up][QGEMM_ROWS][16][4] */
    int32_t *columns; /* [count]: where a quad's codes lie in a group of 8 bits */
    int32_t count;
    atomic_int units; /* of rounding that are yet to be done before the rest is filled in */
} qgemm_high;

/* One call, as the kernels see it. */
typedef struct {
    const qgemm_weight *w;
    const uint8_t *x; /* [m, kp]: low bytes; readable up to a multiple of QGEMM_ROWS rows */
    const qgemm_row *rows;
    const qgemm_quad *quads;
    const qgemm_high *blocks; /* [m / QGEMM_ROWS, rounded up]; AMX only */
    gemm_call out;            /* what the epilogue reads */
} qgemm_call;

/* Memory of this thread that lasts until its next call with the same `which`, 0 or 1; 64-byte
 * aligned. NULL if there is none. */
void *octavo_scratch(int which, size_t bytes);

/* A group's codes of 8 bits: where they lie, or unpacked to `buffer` of kp * 32 bytes. */
const int8_t *octavo_qgemm_codes(const qgemm_weight *w, int64_t g, int8_t *buffer);

/* The pieces of y that are to be made: a group of some rows each, those of the same rows one behind
 * the other. They are cut into ranges; a thread takes those of its own one by one, so that it can
 * fetch the next, then helps others with theirs. */
typedef struct {
    /* on cache lines of its own, of which processors fetch two at a time */
    __attribute__((aligned(128))) atomic_int_fast64_t next;
    int64_t end;
} qgemm_range;

enum { QGEMM_MAX_RANGES = 64 };

typedef struct {
    int64_t m, num_groups, part_rows, num_ranges; /* part_rows: a multiple of QGEMM_ROWS */
    qgemm_range ranges[QGEMM_MAX_RANGES];
} qgemm_work;

typedef struct {
    int64_t g, m0, m1;
    int64_t then_g; /* the group that this thread is likely to take next, -1 if none */
} qgemm_piece;

/* Takes the next piece; *range is where to look first. Returns 0 if there is none. */
OCTAVO_INLINE int qgemm_take(qgemm_work *work, int64_t *range, qgemm_piece *piece) {
    for (int64_t looks = 0; looks < work->num_ranges; ++looks) {
        qgemm_range *r = &work->ranges[*range];
        const int64_t index = atomic_fetch_add(&r->next, 1);
        if (index < r->end) {
            piece->g = index % work->num_groups;
            piece->m0 = index / work->num_groups * work->part_rows;
            const int64_t end = piece->m0 + work->part_rows;
            piece->m1 = end < work->m ? end : work->m;
            piece->then_g = index + 1 < r->end ? (index + 1) % work->num_groups : -1;
            return 1;
        }
        *range = (*range + 1) % work->num_ranges;
    }
    return 0;
}

/* Makes pieces until there are none. buffer: kp * 32 bytes for AMX, and as many for codes of 4
 * bits. */
void octavo_qgemm_vnni(const qgemm_call *call, qgemm_work *work, int64_t range, int8_t *buffer);
void octavo_qgemm_amx(const qgemm_call *call, qgemm_work *work, int64_t range, int8_t *buffer);

#endif
