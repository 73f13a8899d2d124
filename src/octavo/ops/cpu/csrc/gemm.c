/* y = epilogue(x W^T): bf16 x [m, k] and packed bf16 W (gemm.h), float32 sums.
 *
 * Epilogues, each rounded once: + bias, + residual, or silu(gate) * up. Optionally the rows of x
 * are RMS-normalised first. The driver splits the work over OpenMP threads; the two kernels
 * (AVX512_BF16 here, AMX in gemm_amx.c) each sum a row in an order that does not depend on m. */
#include "gemm.h"

#include <math.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#if OCTAVO_X86
#include <immintrin.h>

OCTAVO_TARGET_BEGIN(OCTAVO_FEATURES_AVX512_BF16)

/* ---- epilogue ------------------------------------------------------------------------------ */

OCTAVO_INLINE __m512 load_bf16(const uint16_t *p, __mmask16 mask) {
    const __m256i half = _mm256_maskz_loadu_epi16(mask, p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

OCTAVO_INLINE void store_bf16(uint16_t *p, __mmask16 mask, __m512 v) {
    _mm256_mask_storeu_epi16(p, mask, (__m256i)_mm512_cvtneps_pbh(v));
}

OCTAVO_INLINE __mmask16 first_lanes(int64_t count) {
    return count >= 16 ? 0xffff : count > 0 ? (__mmask16)((1u << count) - 1) : 0;
}

/* exp(x) to about 1 ulp: 2^n * p(r), |r| <= ln(2) / 2; scalef overflows and underflows right. */
OCTAVO_INLINE __m512 exp_ps(__m512 x) {
    /* Beyond +-200 the result is inf or 0 anyway, and n stays exact. NaN passes: it comes last. */
    x = _mm512_min_ps(_mm512_set1_ps(200.0f), _mm512_max_ps(_mm512_set1_ps(-200.0f), x));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(_mm512_mul_ps(r, r), p, _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(p, n);
}

OCTAVO_INLINE __m512 silu_ps(__m512 x) {
    const __m512 e = exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), x));
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
}

/* Adds the residual to 16 columns from `col` of row m, and writes them where mask says. */
OCTAVO_INLINE void finish(const gemm_call *call, __m512 v, int64_t m, int64_t col,
                          __mmask16 mask) {
    if (call->residual) {
        const int64_t at = m * call->residual_stride + col;
        if (call->flags & GEMM_RESIDUAL_F32)
            v = _mm512_add_ps(v, _mm512_maskz_loadu_ps(mask, (const float *)call->residual + at));
        else
            v = _mm512_add_ps(v, load_bf16((const uint16_t *)call->residual + at, mask));
    }
    const int64_t at = m * call->y_stride + col;
    if (call->flags & GEMM_OUT_F32)
        _mm512_mask_storeu_ps((float *)call->y + at, mask, v);
    else
        store_bf16((uint16_t *)call->y + at, mask, v);
}

void octavo_gemm_store(const gemm_call *call, const float *acc, int64_t g, int64_t m, int rows) {
    const gemm_weight *w = call->w;
    const int gate_up = w->kind == GEMM_GATE_UP;
    const int64_t col = g * (gate_up ? 16 : GEMM_GROUP);
    const __mmask16 mask0 = first_lanes(w->n - col), mask1 = first_lanes(w->n - col - 16);
    __m512 bias0 = _mm512_setzero_ps(), bias1 = bias0;
    if (w->bias) {
        bias0 = _mm512_loadu_ps(w->bias + g * GEMM_GROUP);
        bias1 = _mm512_loadu_ps(w->bias + g * GEMM_GROUP + 16);
    }
    const int simple = !gate_up && !call->residual && !call->flags && mask1 == 0xffff;
    for (const int64_t end = m + rows; m < end; ++m, acc += GEMM_GROUP) {
        const __m512 v0 = _mm512_add_ps(_mm512_load_ps(acc), bias0);
        const __m512 v1 = _mm512_add_ps(_mm512_load_ps(acc + 16), bias1);
        if (simple) {
            uint16_t *y = (uint16_t *)call->y + m * call->y_stride + col;
            _mm512_storeu_si512(y, (__m512i)_mm512_cvtne2ps_pbh(v1, v0));
        } else if (gate_up) {
            finish(call, _mm512_mul_ps(silu_ps(v0), v1), m, col, mask0);
        } else {
            finish(call, v0, m, col, mask0);
            if (mask1) finish(call, v1, m, col + 16, mask1);
        }
    }
}

/* ---- AVX512_BF16 kernel -------------------------------------------------------------------- */

enum {
    BLOCK_ROWS = 12, /* 12 x 2 sums and two columns of W fit the 32 registers */
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

/* ---- preparing x --------------------------------------------------------------------------- */

/* One row to kp elements, zeros behind k; with norm_weight: bf16(bf16(x / rms(x)) norm_weight),
 * rms(x) = sqrt(mean(x^2) + eps), as in elementwise.c. */
static void prepare_row(const uint16_t *x, uint16_t *out, int64_t k, int64_t kp,
                        const uint16_t *norm_weight, float eps) {
    if (!norm_weight) {
        memcpy(out, x, (size_t)k * 2);
        memset(out + k, 0, (size_t)(kp - k) * 2);
        return;
    }
    __m512 sum0 = _mm512_setzero_ps(), sum1 = sum0;
    for (int64_t i = 0; i < k; i += 32) {
        const __m512 v0 = load_bf16(x + i, first_lanes(k - i));
        const __m512 v1 = load_bf16(x + i + 16, first_lanes(k - i - 16));
        sum0 = _mm512_fmadd_ps(v0, v0, sum0);
        sum1 = _mm512_fmadd_ps(v1, v1, sum1);
    }
    const float mean = _mm512_reduce_add_ps(_mm512_add_ps(sum0, sum1)) / (float)k;
    const __m512 inverse = _mm512_set1_ps(1.0f / sqrtf(mean + eps));
    for (int64_t i = 0; i < kp; i += 16) {
        const __mmask16 mask = first_lanes(k - i);
        const __m512 v = _mm512_mul_ps(load_bf16(x + i, mask), inverse);
        const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(v);
        const __m512 back = _mm512_castsi512_ps(
            _mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16));
        store_bf16(out + i, 0xffff, _mm512_mul_ps(back, load_bf16(norm_weight + i, mask)));
    }
}

OCTAVO_TARGET_END

/* ---- driver -------------------------------------------------------------------------------- */

/* Threads along m, so that the busiest thread has least to do; ties go to fewer, because every
 * part along m streams its groups of W again. Must divide `threads`. */
static int64_t row_parts(int64_t m, int64_t num_groups, int64_t threads) {
    int64_t best = 1, best_load = INT64_MAX;
    for (int64_t parts = 1; parts <= threads && (parts - 1) * 32 < m; ++parts) {
        if (threads % parts) continue;
        const int64_t columns = threads / parts;
        const int64_t load =
            (num_groups + columns - 1) / columns * ((m + parts - 1) / parts + 31) / 32;
        if (load < best_load) best = parts, best_load = load;
    }
    return best;
}

/* Thread t of `count` prepares its rows. */
static void prepare_share(const struct gemm_args *a, int64_t t, int64_t count) {
    const gemm_weight *w = &a->w;
    for (int64_t i = a->m * t / count; i < a->m * (t + 1) / count; ++i)
        prepare_row(a->x + i * a->x_stride, a->scratch + i * w->kp, w->k, w->kp, a->norm_weight,
                    a->eps);
}

/* Thread t of `count` multiplies its rows by its groups: always the same groups, so that what
 * fits a core's cache stays there from one step to the next. */
static void multiply_share(const struct gemm_args *a, int64_t t, int64_t count) {
    const gemm_call call = {
        &a->w, a->scratch ? a->scratch : a->x, a->scratch ? a->w.kp : a->x_stride,
        a->y, a->y_stride, a->residual, a->residual_stride, a->flags,
    };
    const int64_t groups = a->w.num_groups, m = a->m;
    const int64_t parts = row_parts(m, groups, count), columns = count / parts;
    const int64_t row = t / columns, column = t % columns;
    const int64_t m0 = m * row / parts, m1 = m * (row + 1) / parts;
    const int64_t g0 = groups * column / columns, g1 = groups * (column + 1) / columns;
    if (m0 >= m1 || g0 >= g1) return;
    if (octavo_isa() >= OCTAVO_ISA_AMX)
        octavo_gemm_amx(&call, g0, g1, m0, m1);
    else
        octavo_gemm_avx512(&call, g0, g1, m0, m1);
}

/* y [m, n] = epilogue(prepare(x) W^T); shapes and formulas in gemm.py, which checks them.
 * Returns 0, or 1 if this CPU cannot run it. */
OCTAVO_EXPORT int octavo_gemm(const struct gemm_args *a) {
    if (octavo_isa() < OCTAVO_ISA_AVX512_BF16) return 1;
#ifdef _OPENMP
    const int64_t shares = a->w.num_groups * ((a->m + 31) / 32);
    const int threads = shares < a->num_threads ? (int)shares : a->num_threads;
    if (threads > 1) {
#pragma omp parallel num_threads(threads)
        {
            const int t = omp_get_thread_num(), count = omp_get_num_threads();
            if (a->scratch) {
                prepare_share(a, t, count);
#pragma omp barrier
            }
            multiply_share(a, t, count);
        }
        return 0;
    }
#endif
    if (a->scratch) prepare_share(a, 0, 1);
    multiply_share(a, 0, 1);
    return 0;
}

#else

OCTAVO_EXPORT int octavo_gemm(const struct gemm_args *a) {
    (void)a;
    return 1;
}

#endif

/* ---- rows of W ----------------------------------------------------------------------------- */

/* out[i, :] = row ids[i] of a plain packed weight, i < count. Returns -1, or the first i whose id
 * is out of range; out is untouched then. */
OCTAVO_EXPORT int64_t octavo_gemm_embedding(const struct embedding_args *a) {
    const gemm_weight *w = &a->w;
    for (int64_t i = 0; i < a->count; ++i)
        if (a->ids[i] < 0 || a->ids[i] >= w->n) return i;
#ifdef _OPENMP
#pragma omp parallel for num_threads(a->num_threads) schedule(static) if (a->count > 8)
#endif
    for (int64_t i = 0; i < a->count; ++i) {
        const int64_t group = a->ids[i] / GEMM_GROUP, channel = a->ids[i] % GEMM_GROUP;
        const char *pairs = (const char *)w->data + group * w->kp * 64 +
                            channel / 16 * GEMM_TILE_BYTES + channel % 16 * 4;
        char *row = (char *)(a->out + i * a->out_stride);
        for (int64_t p = 0; p < w->k / 2; ++p)
            memcpy(row + p * 4, pairs + p / 16 * GEMM_STEP_BYTES + p % 16 * 64, 4);
    }
    return -1;
}
