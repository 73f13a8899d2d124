/* y = epilogue(x W^T) with quantized W (qgemm.h): driver, and the AVX512_VNNI kernel.
 *
 * Rows of x are rounded first, then pieces of y are handed to the pool. Few rows are multiplied as
 * their weights stream by, codes of 4 bits unpacked in registers; for more, a group is unpacked
 * once into a buffer and multiplied in AMX tiles (qgemm_amx.c) or registers. */
#include "qgemm.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "qgemm_plain.h"
#if OCTAVO_X86
#include <cpuid.h>
#include <immintrin.h>

OCTAVO_TARGET_BEGIN(OCTAVO_FEATURES_AVX512_BF16 ",avx512vnni")
#include "gemm_store.h"
#include "qgemm_vnni.h"
OCTAVO_TARGET_END
#endif

/* ---- scratch memory ------------------------------------------------------------------------ */

struct scratch {
    void *memory[2];
    size_t bytes[2];
};

static pthread_key_t scratch_key;
static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;

static void free_scratch(void *scratch) {
    struct scratch *s = scratch;
    free(s->memory[0]);
    free(s->memory[1]);
    free(s);
}

static void make_scratch_key(void) { pthread_key_create(&scratch_key, free_scratch); }

void *octavo_scratch(int which, size_t bytes) {
    pthread_once(&scratch_once, make_scratch_key);
    struct scratch *s = pthread_getspecific(scratch_key);
    if (!s) {
        s = calloc(1, sizeof *s);
        if (!s) return NULL;
        pthread_setspecific(scratch_key, s);
    }
    if (s->bytes[which] < bytes) {
        free(s->memory[which]);
        s->bytes[which] = 0;
        s->memory[which] = NULL;
        if (posix_memalign(&s->memory[which], 64, bytes)) return s->memory[which] = NULL;
        s->bytes[which] = bytes;
    }
    return s->memory[which];
}

/* ---- which kernel -------------------------------------------------------------------------- */

enum { PLAIN, VNNI, AMX };

/* Every CPU so far with AVX512_BF16 has VNNI, and with AMX its int8; ask all the same. */
static int detect_kernel(void) {
#if OCTAVO_X86
    unsigned a, b, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(c & (1u << 11))) return PLAIN;
    return d & (1u << 25) ? AMX : VNNI;
#else
    return PLAIN;
#endif
}

static int kernel_in_use(void) {
    static atomic_int best = -1;
    int kernel = atomic_load_explicit(&best, memory_order_relaxed);
    if (kernel < 0) {
        kernel = detect_kernel();
        atomic_store_explicit(&best, kernel, memory_order_relaxed);
    }
    const int isa = octavo_isa();
    if (isa < OCTAVO_ISA_AVX512_BF16) return PLAIN;
    return isa < OCTAVO_ISA_AMX && kernel == AMX ? VNNI : kernel;
}

/* ---- driver -------------------------------------------------------------------------------- */

enum {
    UNITS_PER_THREAD = 2,    /* fewer than in gemm.c: each begins with codes nobody has fetched */
    MIN_ROWS = 2 * 32,       /* as in gemm.c */
    PASS_BYTES = 4 << 20,    /* of rounded x at a time */
    AMX_ROWS = 5,            /* from which unpacking to tiles costs less than it saves */
};

struct qgemm_job {
    qgemm_call call;
    const void *x;
    uint8_t *low;
    qgemm_row *rows;
    qgemm_quad *quads;
    int64_t x_stride, m, num_columns, num_rows;
    int x_is_f32, kernel, num_threads;
    atomic_int failed;
};

static void round_unit(void *arg, int64_t unit) {
    const struct qgemm_job *job = arg;
    const qgemm_weight *w = job->call.w;
    const int64_t k = w->w.k, kp = w->w.kp, first = unit * QGEMM_ROUND_ROWS;
    const char *x = job->x;
    qgemm_quad *quads = job->quads + first * (kp / QGEMM_FEW);
    for (int64_t i = first; i < job->m && i < first + QGEMM_ROUND_ROWS; ++i) {
        const void *from = x + i * job->x_stride * (job->x_is_f32 ? 4 : 2);
        uint8_t *low = job->low + i * kp;
        qgemm_row *row = job->rows + i;
        row->first = (int32_t)(quads - job->quads);
#if OCTAVO_X86
        if (job->kernel != PLAIN)
            row->step = round_row(from, job->x_is_f32, k, kp, i, low, &quads);
        else
#endif
            row->step = plain_round_row(from, job->x_is_f32, k, kp, i, low, &quads);
        row->end = (int32_t)(quads - job->quads);
    }
}

static void multiply_unit(void *arg, int64_t unit) {
    struct qgemm_job *job = arg;
    const qgemm_weight *w = job->call.w;
    const int64_t column = unit % job->num_columns, row = unit / job->num_columns;
    const int64_t groups = w->w.num_groups, m = job->m;
    const int64_t g0 = groups * column / job->num_columns;
    const int64_t g1 = groups * (column + 1) / job->num_columns;
    const int64_t m0 = m * row / job->num_rows, m1 = m * (row + 1) / job->num_rows;
    const int64_t then = unit + job->num_threads; /* if threads go on in turns */
    const int is_last = then >= job->num_columns * job->num_rows;
    const int64_t then_g = is_last ? -1 : groups * (then % job->num_columns) / job->num_columns;
    int8_t *buffer = NULL;
    if (w->bits == 4 && !(buffer = octavo_scratch(1, (size_t)w->w.kp * 2 * GEMM_GROUP))) {
        atomic_store(&job->failed, 1);
        return;
    }
#if OCTAVO_X86
    if (job->kernel == AMX && m1 - m0 >= AMX_ROWS)
        octavo_qgemm_amx(&job->call, g0, g1, then_g, m0, m1, buffer);
    else if (job->kernel != PLAIN)
        octavo_qgemm_vnni(&job->call, g0, g1, m0, m1, buffer);
    else
#endif
        plain_qgemm(&job->call, g0, g1, m0, m1, buffer);
}

static void split(struct qgemm_job *job, int64_t threads) {
    const int64_t groups = job->call.w->w.num_groups, wanted = threads * UNITS_PER_THREAD;
    job->num_columns = job->num_rows = 1;
    if (threads <= 1) return;
    job->num_columns = groups < wanted ? groups : wanted;
    if (job->num_columns < threads) { /* few groups: cut along m too */
        const int64_t most = (job->m + MIN_ROWS - 1) / MIN_ROWS;
        const int64_t rows = (wanted + groups - 1) / groups;
        job->num_rows = rows < most ? rows : most;
    }
}

static void *advance(void *p, int64_t elements, int is_f32) {
    return p ? (char *)p + elements * (is_f32 ? 4 : 2) : NULL;
}

/* Rows [m0, m0 + m) of y. */
static int64_t run_pass(const struct qgemm_args *a, int64_t m0, int64_t m) {
    const int64_t kp = a->w.w.kp;
    const size_t low_bytes = (size_t)(m * kp);
    const size_t quad_bytes = low_bytes / QGEMM_FEW * sizeof(qgemm_quad);
    uint8_t *low = octavo_scratch(0, low_bytes + quad_bytes + (size_t)m * sizeof(qgemm_row));
    if (!low) return 2;
    qgemm_quad *quads = (qgemm_quad *)(void *)(low + low_bytes);
    qgemm_row *rows = (qgemm_row *)(void *)(low + low_bytes + quad_bytes);
    const int x_is_f32 = (a->flags & QGEMM_X_F32) != 0;
    void *y = advance(a->y, m0 * a->y_stride, a->flags & GEMM_OUT_F32);
    const void *residual = advance((void *)a->residual, m0 * a->residual_stride,
                                   a->flags & GEMM_RESIDUAL_F32);
    struct qgemm_job job = {
        .call = {&a->w, low, rows, quads,
                 {&a->w.w, NULL, 0, y, a->y_stride, residual, a->residual_stride,
                  a->flags & ~QGEMM_FLAGS}},
        .x = advance((void *)a->x, m0 * a->x_stride, x_is_f32),
        .low = low,
        .rows = rows,
        .quads = quads,
        .x_stride = a->x_stride,
        .m = m,
        .x_is_f32 = x_is_f32,
        .kernel = kernel_in_use(),
        .num_threads = a->num_threads,
    };
    const int64_t round_units = (m + QGEMM_ROUND_ROWS - 1) / QGEMM_ROUND_ROWS;
    octavo_parallel(round_unit, &job, round_units, a->num_threads);
    split(&job, a->num_threads);
    octavo_parallel(multiply_unit, &job, job.num_columns * job.num_rows, a->num_threads);
    return atomic_load(&job.failed) ? 2 : 0;
}

/* y [m, n] = epilogue(x W^T); shapes and formulas in qgemm.py, which checks them.
 * Returns 0, or 2 where memory ran out. */
OCTAVO_EXPORT int64_t octavo_qgemm(const struct qgemm_args *a) {
    const int64_t fit = PASS_BYTES / a->w.w.kp, most = fit < MIN_ROWS ? MIN_ROWS : fit;
    for (int64_t m0 = 0; m0 < a->m; m0 += most) {
        const int64_t status = run_pass(a, m0, a->m - m0 < most ? a->m - m0 : most);
        if (status) return status;
    }
    return 0;
}

/* ---- rows of W ----------------------------------------------------------------------------- */

enum { ROWS_A_UNIT = 16 };

static void rows_unit(void *arg, int64_t unit) {
    const struct qgemm_rows_args *a = arg;
    const int64_t last = (unit + 1) * ROWS_A_UNIT;
    for (int64_t i = unit * ROWS_A_UNIT; i < a->count && i < last; ++i)
        plain_weight_row(&a->w, a->ids[i], advance(a->out, i * a->out_stride, a->is_f32),
                         a->is_f32);
}

/* out[i, :] = row ids[i] of W, i < count. Returns 0, or 1 + the first i whose id is out of range;
 * out is untouched then. */
OCTAVO_EXPORT int64_t octavo_qgemm_rows(const struct qgemm_rows_args *a) {
    for (int64_t i = 0; i < a->count; ++i)
        if (a->ids[i] < 0 || a->ids[i] >= a->w.w.n) return 1 + i;
    octavo_parallel(rows_unit, (void *)a, (a->count + ROWS_A_UNIT - 1) / ROWS_A_UNIT,
                    a->num_threads);
    return 0;
}
