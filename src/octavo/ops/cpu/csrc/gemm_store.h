/* The epilogues of gemm.c and qgemm.c, for 16 lanes at a time: include it inside a target region of
 * AVX512_BF16, after gemm.h and immintrin.h. */
#ifndef OCTAVO_GEMM_STORE_H
#define OCTAVO_GEMM_STORE_H

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

/* 1 / (1 + 2^t) to some 3 ulp, 0 from 2^-126 on. 2^t is p(t - floor(t)) * 2^floor(t). Every latency
 * counts here: rows are so long that only a few of them are in the processor's window at a time. */
OCTAVO_INLINE __m512 gate_ps(__m512 t) {
    const __m512 one = _mm512_set1_ps(1.0f), f = _mm512_reduce_ps(t, 9), f2 = _mm512_mul_ps(f, f);
    const __m512 low = _mm512_fmadd_ps(f, _mm512_set1_ps(6.931470633e-01f), one);
    const __m512 middle = _mm512_fmadd_ps(f, _mm512_set1_ps(5.548528209e-02f),
                                          _mm512_set1_ps(2.402293086e-01f));
    __m512 high = _mm512_fmadd_ps(f, _mm512_set1_ps(1.246784464e-03f),
                                  _mm512_set1_ps(9.675451554e-03f));
    high = _mm512_fmadd_ps(f2, _mm512_set1_ps(2.161292359e-04f), high);
    const __m512 p = _mm512_fmadd_ps(_mm512_mul_ps(f2, f2), high, _mm512_fmadd_ps(f2, middle, low));
    const __m512 d = _mm512_add_ps(_mm512_scalef_ps(p, t), one), r = _mm512_rcp14_ps(d);
    const __mmask16 finite = _mm512_cmp_ps_mask(t, _mm512_set1_ps(126.0f), _CMP_LT_OQ);
    return _mm512_maskz_fmadd_ps(finite, _mm512_fnmadd_ps(d, r, one), r, r);
}

OCTAVO_INLINE __m512 silu_ps(__m512 x) {
    return _mm512_mul_ps(x, gate_ps(_mm512_mul_ps(x, _mm512_set1_ps(-1.44269504f))));
}

/* gelu by tanh's approximation: x (1 + tanh(u)) / 2 = x / (1 + e^-2u). */
OCTAVO_INLINE __m512 gelu_tanh_ps(__m512 x) {
    const __m512 cubic = _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.044715f),
                                         _mm512_set1_ps(1.0f));
    const __m512 t = _mm512_mul_ps(x, _mm512_set1_ps(-1.5957691216f * 1.44269504f));
    return _mm512_mul_ps(x, gate_ps(_mm512_mul_ps(t, cubic)));
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

/* Where a group's columns go, and what is done to them before. */
typedef struct {
    const gemm_call *call;
    int64_t col;
    __m512 bias0, bias1;
    __mmask16 mask0, mask1;
    int dense; /* whole lines without residual: as bf16 (1) or float32 (2) */
} gemm_store;

OCTAVO_INLINE gemm_store gemm_store_of(const gemm_call *call, int64_t g) {
    const gemm_weight *w = call->w;
    const int gate_up = w->kind != GEMM_PLAIN;
    gemm_store s;
    s.call = call;
    s.col = g * (gate_up ? 16 : GEMM_GROUP);
    s.mask0 = first_lanes(w->n - s.col);
    s.mask1 = first_lanes(w->n - s.col - 16);
    s.bias0 = s.bias1 = _mm512_setzero_ps();
    if (w->bias) {
        s.bias0 = _mm512_loadu_ps(w->bias + g * GEMM_GROUP);
        s.bias1 = _mm512_loadu_ps(w->bias + g * GEMM_GROUP + 16);
    }
    const int whole = !gate_up && !call->residual && s.mask1 == 0xffff;
    s.dense = whole && !call->flags ? 1 : whole && call->flags == GEMM_OUT_F32 ? 2 : 0;
    return s;
}

/* Row m of y from the group's sums, v0 and v1. */
OCTAVO_INLINE void gemm_store_row(const gemm_store *s, int64_t m, __m512 v0, __m512 v1) {
    const gemm_call *call = s->call;
    const int64_t at = m * call->y_stride + s->col;
    v0 = _mm512_add_ps(v0, s->bias0);
    v1 = _mm512_add_ps(v1, s->bias1);
    if (s->dense == 1) {
        _mm512_storeu_si512((uint16_t *)call->y + at, (__m512i)_mm512_cvtne2ps_pbh(v1, v0));
    } else if (s->dense == 2) {
        _mm512_storeu_ps((float *)call->y + at, v0);
        _mm512_storeu_ps((float *)call->y + at + 16, v1);
    } else if (call->w->kind != GEMM_PLAIN) {
        const __m512 gate = call->w->kind == GEMM_GATE_UP ? silu_ps(v0) : gelu_tanh_ps(v0);
        finish(call, _mm512_mul_ps(gate, v1), m, s->col, s->mask0);
    } else {
        finish(call, v0, m, s->col, s->mask0);
        if (s->mask1) finish(call, v1, m, s->col + 16, s->mask1);
    }
}

#endif
