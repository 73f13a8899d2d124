/* y = epilogue(x W^T): bf16 x [m, k] and packed bf16 W (gemm.h), float32 sums.
 *
 * Epilogues, each rounded once: + bias, + residual, or act(gate) * up. The driver splits the work
 * into units for the pool; the two kernels (AVX512_BF16 here, AMX in gemm_amx.c) each sum a row in
 * an order that does not depend on m. */
#include "gemm.h"

#include <string.h>

#if OCTAVO_X86
#include <immintrin.h>

OCTAVO_TARGET_BEGIN(OCTAVO_FEATURES_AVX512_BF16)

#include "gemm_store.h"

void octavo_gemm_store(const gemm_call *call, const float *acc, int64_t g, int64_t m, int rows) {
    const gemm_store store = gemm_store_of(call, g);
    for (const int64_t end = m + rows; m < end; ++m, acc += GEMM_GROUP)
        gemm_store_row(&store, m, _mm512_load_ps(acc), _mm512_load_ps(acc + 16));
}

/* ---- AVX512_BF16 kernel -------------------------------------------------------------------- */

enum {
    BLOCK_ROWS = 12,   /* 12 x 2 sums and two columns of W fit the 32 registers */
    X_BYTES = 1 << 19, /* of the 1 MiB of L2 that these CPUs have at least */
};

/* acc[rows][32] = x[rows, k] * group; rows is a constant after inlining. */
OCTAVO_INLINE void block(const uint16_t *x, int64_t x_stride, const char *group, int64_t k,
                         gemm_prefetch *pf, float *acc, const int rows) {
    __m512 sum0[BLOCK_ROWS], sum1[BLOCK_ROWS];
#pragma GCC unroll 12
    for (int r = 0; r < rows; ++r) sum0[r] = sum1[r] = _mm512_setzero_ps();
    for (int64_t k0 = 0; k0 < k; k0 += GEMM_KSTEP) {
        gemm_prefetch_step(pf);
        const int64_t k1 = k0 + GEMM_KSTEP < k ? k0 + GEMM_KSTEP : k;
        const char *w = group + k0 * 64;
        for (int64_t i = k0; i < k1; i += 2, w += 64) {
            const __m512bh w0 = (__m512bh)_mm512_loadu_si512(w);
            const __m512bh w1 = (__m512bh)_mm512_loadu_si512(w + GEMM_TILE_BYTES);
#pragma GCC unroll 12
            for (int r = 0; r < rows; ++r) {
                int pair;
                memcpy(&pair, x + r * x_stride + i, sizeof pair);
                const __m512bh xr = (__m512bh)_mm512_set1_epi32(pair);
                sum0[r] = _mm512_dpbf16_ps(sum0[r], xr, w0);
                sum1[r] = _mm512_dpbf16_ps(sum1[r], xr, w1);
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < rows; ++r) {
        _mm512_store_ps(acc + r * GEMM_GROUP, sum0[r]);
        _mm512_store_ps(acc + r * GEMM_GROUP + 16, sum1[r]);
    }
}

static void block_rows(const uint16_t *x, int64_t x_stride, const char *group, int64_t k,
                       gemm_prefetch *pf, float *acc, int rows) {
#define CASE(R) \
    case R: block(x, x_stride, group, k, pf, acc, R); break;
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
    }
#undef CASE
}

void octavo_gemm_avx512(const gemm_call *call, int64_t g0, int64_t g1, int64_t m0, int64_t m1) {
    const gemm_weight *w = call->w;
    const int64_t chunk = gemm_chunk_rows(m1 - m0, w->kp, X_BYTES);
    __attribute__((aligned(64))) float acc[BLOCK_ROWS * GEMM_GROUP];
    for (int64_t c0 = m0; c0 < m1; c0 += chunk) {
        const int64_t m = c0 + chunk < m1 ? chunk : m1 - c0;
        const int64_t blocks = (m + BLOCK_ROWS - 1) / BLOCK_ROWS;
        for (int64_t g = g0; g < g1; ++g) {
            const char *group = (const char *)w->data + g * w->kp * 64;
            gemm_prefetch pf = gemm_prefetch_start(group, w->kp, blocks);
            for (int64_t b = 0; b < blocks; ++b) {
                const int64_t r0 = c0 + m * b / blocks, rows = c0 + m * (b + 1) / blocks - r0;
                const uint16_t *x = call->x + r0 * call->x_stride;
                block_rows(x, call->x_stride, group, w->k, &pf, acc, (int)rows);
                octavo_gemm_store(call, acc, g, r0, (int)rows);
            }
        }
    }
}

OCTAVO_TARGET_END

/* ---- driver -------------------------------------------------------------------------------- */

/* A job of octavo_parallel: units are num_columns x num_rows pieces of y. */
struct gemm_job {
    const struct gemm_args *args;
    gemm_call call;
    int64_t num_columns; /* pieces along n, of whole groups */
    int64_t num_rows;    /* pieces along m */
};

enum {
    UNITS_PER_THREAD = 4,   /* enough for a fast thread to take over from a slow one */
    PAD_ROWS = 64,          /* rows in a unit of padding x */
    MIN_ROWS = 2 * 32,      /* rows under which a piece along m streams W again for too little */
};

/* Rows of x to kp elements, zeros behind k. */
static void pad_unit(void *arg, int64_t unit) {
    const struct gemm_args *a = arg;
    const gemm_weight *w = &a->w;
    const int64_t first = unit * PAD_ROWS;
    const int64_t end = first + PAD_ROWS < a->m ? first + PAD_ROWS : a->m;
    for (int64_t i = first; i < end; ++i) {
        uint16_t *row = a->scratch + i * w->kp;
        memcpy(row, a->x + i * a->x_stride, (size_t)w->k * 2);
        memset(row + w->k, 0, (size_t)(w->kp - w->k) * 2);
    }
}

static void multiply_unit(void *arg, int64_t unit) {
    const struct gemm_job *job = arg;
    const int64_t column = unit % job->num_columns, row = unit / job->num_columns;
    const int64_t groups = job->args->w.num_groups, m = job->args->m;
    const int64_t g0 = groups * column / job->num_columns;
    const int64_t g1 = groups * (column + 1) / job->num_columns;
    const int64_t m0 = m * row / job->num_rows, m1 = m * (row + 1) / job->num_rows;
    if (octavo_isa() >= OCTAVO_ISA_AMX)
        octavo_gemm_amx(&job->call, g0, g1, m0, m1);
    else
        octavo_gemm_avx512(&job->call, g0, g1, m0, m1);
}

/* y [m, n] = epilogue(x W^T); shapes and formulas in gemm.py, which checks them.
 * Returns 0, or 1 if this CPU cannot run it. */
OCTAVO_EXPORT int64_t octavo_gemm(const struct gemm_args *a) {
    if (octavo_isa() < OCTAVO_ISA_AVX512_BF16) return 1;
    const int64_t threads = a->num_threads, groups = a->w.num_groups;
    if (a->scratch)
        octavo_parallel(pad_unit, (void *)a, (a->m + PAD_ROWS - 1) / PAD_ROWS, a->num_threads);
    struct gemm_job job = {
        .args = a,
        .call = {&a->w, a->scratch ? a->scratch : a->x, a->scratch ? a->w.kp : a->x_stride, a->y,
                 a->y_stride, a->residual, a->residual_stride, a->flags},
        .num_columns = 1,
        .num_rows = 1,
    };
    if (threads > 1) {
        const int64_t wanted = threads * UNITS_PER_THREAD;
        job.num_columns = groups < wanted ? groups : wanted;
        if (job.num_columns < threads) { /* few groups: cut along m too */
            const int64_t most = (a->m + MIN_ROWS - 1) / MIN_ROWS;
            const int64_t rows = (wanted + groups - 1) / groups;
            job.num_rows = rows < most ? rows : most;
        }
    }
    octavo_parallel(multiply_unit, &job, job.num_columns * job.num_rows, a->num_threads);
    return 0;
}

#else

OCTAVO_EXPORT int64_t octavo_gemm(const struct gemm_args *a) {
    (void)a;
    return 1;
}

#endif

/* ---- rows of W ----------------------------------------------------------------------------- */

static void embedding_rows(const struct embedding_args *a, int64_t first, int64_t end) {
    const gemm_weight *w = &a->w;
    for (int64_t i = first; i < end; ++i) {
        const int64_t group = a->ids[i] / GEMM_GROUP, channel = a->ids[i] % GEMM_GROUP;
        const char *pairs = (const char *)w->data + group * w->kp * 64 +
                            channel / 16 * GEMM_TILE_BYTES + channel % 16 * 4;
        char *row = (char *)(a->out + i * a->out_stride);
        for (int64_t p = 0; p < w->k / 2; ++p)
            memcpy(row + p * 4, pairs + p / 16 * GEMM_STEP_BYTES + p % 16 * 64, 4);
    }
}

enum { EMBEDDING_ROWS = 16 };

static void embedding_unit(void *arg, int64_t unit) {
    const struct embedding_args *a = arg;
    const int64_t end = (unit + 1) * EMBEDDING_ROWS;
    embedding_rows(a, unit * EMBEDDING_ROWS, end < a->count ? end : a->count);
}

/* out[i, :] = row ids[i] of a plain packed weight, i < count. Returns 0, or 1 + the first i whose
 * id is out of range; out is untouched then. */
OCTAVO_EXPORT int64_t octavo_gemm_embedding(const struct embedding_args *a) {
    for (int64_t i = 0; i < a->count; ++i)
        if (a->ids[i] < 0 || a->ids[i] >= a->w.n) return 1 + i;
    octavo_parallel(embedding_unit, (void *)a, (a->count + EMBEDDING_ROWS - 1) / EMBEDDING_ROWS,
                    a->num_threads);
    return 0;
}
