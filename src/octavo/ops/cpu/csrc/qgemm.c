/* y = epilogue(x W^T) with quantized W (qgemm.h): driver, and the AVX512_VNNI kernel.
 *
 * Rows of x are rounded first, then pieces of y are handed to the pool. Few rows are multiplied as
 * their weights stream by, codes of 4 bits unpacked in registers; for more, a group is unpacked
 * once into a buffer and multiplied in AMX tiles (qgemm_amx.c) or registers. */
#include "qgemm.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "qgemm_plain.h"
#if OCTAVO_X86
#include <cpuid.h>
#include <immintrin.h>

OCTAVO_TARGET_BEGIN(OCTAVO_FEATURES_AVX512_BF16 ",avx512vnni")
#include "qgemm_store.h"
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
    PART_BYTES = 1 << 20,  /* of rounded x in a piece, of the 2 MiB of L2 that CPUs with AMX have */
    PIECES_PER_THREAD = 4, /* at least, if there are rows for that */
    MIN_ROWS = 2 * 32,     /* as in gemm.c */
    PASS_BYTES = 4 << 20,  /* of rounded x at a time */
    AMX_ROWS = 5,          /* from which unpacking to tiles costs less than it saves */
};

OCTAVO_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct qgemm_job {
    qgemm_call call;
    const void *x;
    uint8_t *low;
    qgemm_row *rows;
    qgemm_quad *quads;
    qgemm_high *blocks; /* NULL where AMX is not used */
    int64_t x_stride, m;
    int x_is_f32, kernel;
    atomic_int failed;
    qgemm_work *work;
};

/* Where a quad's codes lie in a group of 8 bits. */
OCTAVO_INLINE int32_t quad_offset(int32_t quad) {
    return quad / 16 * QGEMM_STEP_BYTES + quad % 16 * 64;
}

/* Fills in a block of QGEMM_ROWS rows once all of them are rounded. */
static void join_high(const struct qgemm_job *job, int64_t index) {
    const int64_t kp = job->call.w->w.kp, first = index * QGEMM_ROWS;
    qgemm_high *block = job->blocks + index;
    uint16_t places[QGEMM_MAX_K / 4]; /* 1 + a quad's */
    memset(places, 0, (size_t)(kp / 4) * sizeof *places);
    block->count = 0;
    for (int64_t r = first; r < job->m && r < first + QGEMM_ROWS; ++r) {
        for (int32_t i = job->rows[r].first; i < job->rows[r].end; ++i) {
            const qgemm_quad *q = job->quads + i;
            if (!places[q->quad]) {
                block->columns[block->count] = quad_offset(q->quad);
                places[q->quad] = (uint16_t)++block->count;
                if (block->count % 16 == 1)
                    memset(block->high + block->count / 16 * QGEMM_STEP_BYTES, 0,
                           QGEMM_STEP_BYTES);
            }
            const int place = places[q->quad] - 1;
            memcpy(block->high + place / 16 * QGEMM_STEP_BYTES + (r - first) * QGEMM_KSTEP +
                       place % 16 * 4,
                   &q->high, 4);
        }
    }
}

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
    if (!job->blocks) return;
    const int64_t block = first / QGEMM_ROWS;
    if (atomic_fetch_sub(&job->blocks[block].units, 1) == 1) join_high(job, block);
}

static void multiply_unit(void *arg, int64_t unit) {
    struct qgemm_job *job = arg;
    const int64_t range = unit % job->work->num_ranges;
    int8_t *buffer = octavo_scratch(1, (size_t)job->call.w->w.kp * 2 * GEMM_GROUP);
    if (!buffer) {
        atomic_store(&job->failed, 1);
        return;
    }
#if OCTAVO_X86
    if (job->blocks)
        octavo_qgemm_amx(&job->call, job->work, range, buffer);
    else if (job->kernel != PLAIN)
        octavo_qgemm_vnni(&job->call, job->work, range, buffer);
    else
#endif
        plain_qgemm(&job->call, job->work, range, buffer);
}

static void divide(const struct qgemm_job *job, int64_t threads) {
    qgemm_work *work = job->work;
    const int64_t groups = job->call.w->w.num_groups, m = job->m;
    int64_t parts = ceil_div(m * job->call.w->w.kp, PART_BYTES);
    if (threads > 1 && groups * parts < threads * PIECES_PER_THREAD) {
        const int64_t wanted = ceil_div(threads * PIECES_PER_THREAD, groups);
        parts = wanted < ceil_div(m, MIN_ROWS) ? wanted : ceil_div(m, MIN_ROWS);
    }
    work->m = m;
    work->num_groups = groups;
    work->part_rows = ceil_div(ceil_div(m, parts), QGEMM_ROWS) * QGEMM_ROWS;
    work->num_ranges = threads < 1 ? 1 : threads < QGEMM_MAX_RANGES ? threads : QGEMM_MAX_RANGES;
    const int64_t pieces = ceil_div(m, work->part_rows) * groups;
    for (int64_t r = 0; r < work->num_ranges; ++r) {
        atomic_init(&work->ranges[r].next, pieces * r / work->num_ranges);
        work->ranges[r].end = pieces * (r + 1) / work->num_ranges;
    }
}

static void *advance(void *p, int64_t elements, int is_f32) {
    return p ? (char *)p + elements * (is_f32 ? 4 : 2) : NULL;
}

/* Lays out what a pass needs beside x and y. Returns 0 without memory. */
static int make_room(struct qgemm_job *job) {
    const int64_t kp = job->call.w->w.kp, blocks = ceil_div(job->m, QGEMM_ROWS);
    const int joins = job->kernel == AMX && job->m >= AMX_ROWS;
    const size_t num_rows = (size_t)(blocks * QGEMM_ROWS), low = num_rows * (size_t)kp;
    const size_t quads = low / QGEMM_FEW * sizeof(qgemm_quad), rows = num_rows * sizeof(qgemm_row);
    const size_t columns = (size_t)(blocks * kp); /* kp / 4 of 4 bytes each */
    const size_t joined = joins ? low + columns + (size_t)blocks * sizeof(qgemm_high) : 0;
    uint8_t *at = octavo_scratch(0, low + quads + rows + joined);
    if (!at) return 0;
    job->call.x = job->low = at;
    job->call.quads = job->quads = (qgemm_quad *)(void *)(at += low);
    job->call.rows = job->rows = (qgemm_row *)(void *)(at += quads);
    if (!joins) return 1;
    int8_t *high = (int8_t *)(at += rows);
    int32_t *offsets = (int32_t *)(void *)(at += low);
    job->call.blocks = job->blocks = (qgemm_high *)(void *)(at += columns);
    for (int64_t b = 0; b < blocks; ++b) {
        const int64_t left = job->m - b * QGEMM_ROWS, units = ceil_div(left, QGEMM_ROUND_ROWS);
        job->blocks[b].high = high + b * QGEMM_ROWS * kp;
        job->blocks[b].columns = offsets + b * (kp / 4);
        atomic_init(&job->blocks[b].units,
                    (int)(left < QGEMM_ROWS ? units : QGEMM_ROWS / QGEMM_ROUND_ROWS));
    }
    return 1;
}

/* Rows [m0, m0 + m) of y. */
static int64_t run_pass(const struct qgemm_args *a, int64_t m0, int64_t m) {
    const int x_is_f32 = (a->flags & QGEMM_X_F32) != 0;
    void *y = advance(a->y, m0 * a->y_stride, a->flags & GEMM_OUT_F32);
    const void *residual = advance((void *)a->residual, m0 * a->residual_stride,
                                   a->flags & GEMM_RESIDUAL_F32);
    qgemm_work work;
    struct qgemm_job job = {
        .work = &work,
        .call = {.w = &a->w,
                 .out = {&a->w.w, NULL, 0, y, a->y_stride, residual, a->residual_stride,
                         a->flags & ~QGEMM_FLAGS}},
        .x = advance((void *)a->x, m0 * a->x_stride, x_is_f32),
        .x_stride = a->x_stride,
        .m = m,
        .x_is_f32 = x_is_f32,
        .kernel = kernel_in_use(),
    };
    if (!make_room(&job)) return 2;
    octavo_parallel(round_unit, &job, ceil_div(m, QGEMM_ROUND_ROWS), a->num_threads);
    divide(&job, a->num_threads);
    octavo_parallel(multiply_unit, &job, a->num_threads < 1 ? 1 : a->num_threads, a->num_threads);
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
