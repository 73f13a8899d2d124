/* Norms, activation, rotary embedding and cache writes. elementwise_rows.h has the kernels; the
 * argument structs are mirrored in elementwise.py (offsets and strides in elements). */
#include <math.h>

#include "octavo_cpu.h"
#if OCTAVO_X86
#include <immintrin.h>
#endif

struct norm_args {
    void *out;
    const void *x;
    void *residual; /* or null */
    const void *weight;
    int64_t out_stride, x_stride, residual_stride;
    int64_t num_tokens, width;
    int32_t dtype, num_threads, wide_weight; /* wide_weight: float32 whatever x is */
    float eps;
};

struct silu_args {
    void *out;
    const void *gate_up;
    int64_t out_stride, x_stride;
    int64_t num_tokens, width; /* width of out */
    int32_t dtype, num_threads;
};

struct add_args {
    void *x;
    const void *y; /* or null */
    int64_t x_stride, y_stride;
    int64_t num_tokens, width;
    int32_t dtype, num_threads;
    float x_scale, y_scale;
};

struct rope_args {
    void *query, *key;
    const void *value; /* or null: the cache has one plane */
    const void *positions;
    const float *cos_sin; /* or null: nothing is rotated */
    const int64_t *slot_mapping;
    void *kv_cache;
    uint16_t *kv_scales;             /* float16, of an int8 cache; or null */
    const void *q_weight, *k_weight; /* or null */
    int64_t query_stride, key_stride, value_stride;
    int64_t num_tokens, max_positions;
    int64_t num_blocks, block_stride, key_offset, value_offset;
    int64_t scale_stride, key_scale_offset, value_scale_offset; /* the same of kv_scales */
    int32_t num_heads, num_kv_heads, head_dim, rotary_dim, block_size;
    int32_t dtype, wide_positions, num_threads; /* wide_positions: int64, not int32 */
    int32_t interleaved, wide_weights;
    float eps;
};

OCTAVO_INLINE int64_t rope_position(const struct rope_args *a, int64_t t) {
    return a->wide_positions ? ((const int64_t *)a->positions)[t]
                             : ((const int32_t *)a->positions)[t];
}

#define VW 4
#define SUFFIX plain
#include "vec.h"
#include "elementwise_rows.h"
#include "vec_end.h"

#if OCTAVO_X86
OCTAVO_TARGET_BEGIN(OCTAVO_FEATURES_AVX2)
#define VW 8
#define SUFFIX avx2
#include "vec.h"
#include "elementwise_rows.h"
#include "vec_end.h"
OCTAVO_TARGET_END

OCTAVO_TARGET_BEGIN(OCTAVO_FEATURES_AVX512)
#define VW 16
#define SUFFIX avx512
#include "vec.h"
#include "elementwise_rows.h"
#include "vec_end.h"
OCTAVO_TARGET_END
#endif

typedef void (*row_kernel)(const void *args, int64_t from, int64_t to);

#if OCTAVO_X86
#define PICK(name) \
    (octavo_isa() >= OCTAVO_ISA_AVX512 ? name##_avx512 \
     : octavo_isa() >= OCTAVO_ISA_AVX2 ? name##_avx2 \
                                       : name##_plain)
#else
#define PICK(name) name##_plain
#endif

/* Below this many elements a thread, waking it costs more than it saves. */
enum { ELEMENTS_PER_THREAD = 32768 };

struct row_job {
    row_kernel kernel;
    const void *args;
    int64_t num_rows, rows_per_unit;
};

static void row_unit(void *argument, int64_t unit) {
    const struct row_job *job = argument;
    const int64_t from = unit * job->rows_per_unit, end = from + job->rows_per_unit;
    job->kernel(job->args, from, end < job->num_rows ? end : job->num_rows);
}

static void for_rows(row_kernel kernel, const void *args, int64_t num_rows, int64_t row_elements,
                     int num_threads) {
    const int64_t useful = num_rows * row_elements / ELEMENTS_PER_THREAD;
    if (num_threads > useful) num_threads = (int)useful;
    if (num_threads <= 1) {
        kernel(args, 0, num_rows);
        return;
    }
    struct row_job job = {kernel, args, num_rows, num_rows / (4 * num_threads) + 1};
    octavo_parallel(row_unit, &job, (num_rows + job.rows_per_unit - 1) / job.rows_per_unit,
                    num_threads);
}

enum { OK = 0, BAD_POSITION = 1, BAD_SLOT = 2 };

OCTAVO_EXPORT int64_t octavo_rms_norm(const struct norm_args *a) {
    for_rows(PICK(norm_rows), a, a->num_tokens, a->width, a->num_threads);
    return OK;
}

OCTAVO_EXPORT int64_t octavo_silu_and_mul(const struct silu_args *a) {
    for_rows(PICK(silu_rows), a, a->num_tokens, 2 * a->width, a->num_threads);
    return OK;
}

OCTAVO_EXPORT int64_t octavo_add_scaled(const struct add_args *a) {
    for_rows(PICK(add_rows), a, a->num_tokens, 2 * a->width, a->num_threads);
    return OK;
}

/* Returns 0, or what is wrong + 8 x the token it is wrong about; then nothing was written. */
OCTAVO_EXPORT int64_t octavo_rope_and_cache(const struct rope_args *a) {
    for (int64_t t = 0; t < a->num_tokens; t++) {
        const int64_t position = rope_position(a, t);
        if (a->cos_sin && (position < 0 || position >= a->max_positions))
            return BAD_POSITION + 8 * t;
        if (a->slot_mapping[t] >= a->num_blocks * a->block_size) return BAD_SLOT + 8 * t;
    }
    const int64_t elements = (int64_t)(a->num_heads + 2 * a->num_kv_heads) * a->head_dim;
    for_rows(PICK(rope_rows), a, a->num_tokens, elements, a->num_threads);
    return OK;
}
