/* Shared by gemm.c (driver, epilogue, AVX512_BF16 kernel) and gemm_amx.c (AMX kernel).
 *
 * Packed weight: groups of 32 output channels, each a linear stream of kp * 64 bytes, with kp = K
 * rounded up to 32 and zero filled: [kp / 32][2 halves][16 k-pairs][16 channels][2] bf16. Sixteen
 * k-pairs of a half are one AMX tile of 1 KiB; one k-pair of a half is one zmm for vdpbf16ps.
 * A gate-up weight holds 16 gate channels and the 16 up channels that go with them in a group.
 */
#ifndef OCTAVO_GEMM_H
#define OCTAVO_GEMM_H

#include "octavo_cpu.h"

enum {
    GEMM_GROUP = 32,        /* channels in a packed group */
    GEMM_KSTEP = 32,        /* k is padded to this */
    GEMM_TILE_BYTES = 1024, /* GEMM_KSTEP x 16 channels */
    GEMM_STEP_BYTES = 2048, /* GEMM_KSTEP x GEMM_GROUP */
    GEMM_AHEAD_BYTES = 16384,
};
enum { GEMM_PLAIN = 0, GEMM_GATE_UP = 1, GEMM_GATE_UP_GELU_TANH = 2 };
enum { GEMM_OUT_F32 = 1, GEMM_RESIDUAL_F32 = 2 };

typedef struct {
    const uint16_t *data; /* packed bf16 */
    const float *bias;    /* [num_groups * 32] in packed channel order, or NULL */
    int64_t n;            /* columns of y */
    int64_t k;            /* columns of x, even */
    int64_t kp;           /* k rounded up to GEMM_KSTEP */
    int64_t num_groups;
    int64_t kind; /* GEMM_PLAIN or how gate and up are joined */
} gemm_weight;

/* Arguments as gemm.py packs them. Strides are in elements, the last dimensions are dense. */
struct gemm_args {
    gemm_weight w;
    const uint16_t *x;    /* [m, k] */
    void *y;              /* [m, n], bf16 or float32 */
    const void *residual; /* [m, n], bf16 or float32, or NULL; may be y */
    uint16_t *scratch;    /* [m, kp] where k < kp, else NULL */
    int64_t x_stride, m, y_stride, residual_stride;
    int32_t flags, num_threads;
};

struct embedding_args {
    gemm_weight w;
    const int64_t *ids; /* [count] */
    uint16_t *out;      /* [count, k] */
    int64_t count, out_stride;
    int32_t num_threads;
};

/* One call, as the kernels see it. Strides are in elements. */
typedef struct {
    const gemm_weight *w;
    const uint16_t *x; /* rows readable up to k (AVX512) or kp (AMX) elements */
    int64_t x_stride;
    void *y;
    int64_t y_stride;
    const void *residual; /* or NULL; may be y */
    int64_t residual_stride;
    int flags;
} gemm_call;

/* Epilogue of `rows` rows from row m of group g: acc is [rows][32] float32, 64-byte aligned. */
void octavo_gemm_store(const gemm_call *call, const float *acc, int64_t g, int64_t m, int rows);

/* Rows [m0, m1) of the groups [g0, g1). */
void octavo_gemm_avx512(const gemm_call *call, int64_t g0, int64_t g1, int64_t m0, int64_t m1);
void octavo_gemm_amx(const gemm_call *call, int64_t g0, int64_t g1, int64_t m0, int64_t m1);

/* What of W to fetch into L2 while a group is multiplied. A single pass over a group runs a fixed
 * distance ahead of itself; of several passes each fetches its part of the next group, so that
 * the memory stream overlaps all of the arithmetic. */
typedef struct {
    const char *at, *end;
    int64_t lines; /* cache lines per GEMM_KSTEP of one pass */
} gemm_prefetch;

OCTAVO_INLINE gemm_prefetch gemm_prefetch_start(const char *group, int64_t kp, int64_t passes) {
    const char *next = group + kp * 64;
    gemm_prefetch pf;
    pf.at = passes == 1 ? group + GEMM_AHEAD_BYTES : next;
    pf.end = (passes == 1 ? pf.at : next) + kp * 64;
    pf.lines = (GEMM_STEP_BYTES / 64 + passes - 1) / passes;
    return pf;
}

OCTAVO_INLINE void gemm_prefetch_step(gemm_prefetch *pf) {
    if (pf->at >= pf->end) return;
    for (int64_t i = 0; i < pf->lines; ++i, pf->at += 64) __builtin_prefetch(pf->at, 0, 2);
}

/* Rows of a chunk whose x fits `budget` bytes of L2; m splits into chunks of nearly equal size. */
OCTAVO_INLINE int64_t gemm_chunk_rows(int64_t m, int64_t kp, int64_t budget) {
    const int64_t most = budget / (kp * 2) < 64 ? 64 : budget / (kp * 2);
    const int64_t chunks = (m + most - 1) / most;
    return (m + chunks - 1) / chunks;
}

#endif
