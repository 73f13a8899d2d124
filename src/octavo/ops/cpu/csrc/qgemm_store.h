/* The epilogue of qgemm.c and qgemm_amx.c: include it inside a target region of AVX512_BF16, after
 * qgemm.h and immintrin.h. */
#ifndef OCTAVO_QGEMM_STORE_H
#define OCTAVO_QGEMM_STORE_H

#include "gemm_store.h"

/* What it needs of a group. */
typedef struct {
    gemm_store store;
    __m512i offset0, offset1; /* what sums are too large by, since low bytes are 128 too large */
    __m512 scale0, scale1;
} qgemm_store;

OCTAVO_INLINE qgemm_store qgemm_store_of(const qgemm_call *call, int64_t g) {
    const int32_t *offsets = call->w->sums + g * GEMM_GROUP;
    const float *scales = call->w->scales + g * GEMM_GROUP;
    qgemm_store s;
    s.store = gemm_store_of(&call->out, g);
    s.offset0 = _mm512_slli_epi32(_mm512_loadu_si512(offsets), 7);
    s.offset1 = _mm512_slli_epi32(_mm512_loadu_si512(offsets + 16), 7);
    s.scale0 = _mm512_loadu_ps(scales);
    s.scale1 = _mm512_loadu_ps(scales + 16);
    return s;
}

OCTAVO_INLINE __m512 scaled(__m512i sums, __m512i offset, __m512 scale, __m512 step) {
    return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(sums, offset)),
                         _mm512_mul_ps(scale, step));
}

/* Row m of y from the sums of code * (256 * high + low). */
OCTAVO_INLINE void qgemm_store_row(const qgemm_store *s, const qgemm_call *call, int64_t m,
                                   __m512i sums0, __m512i sums1) {
    const __m512 step = _mm512_set1_ps(call->rows[m].step);
    gemm_store_row(&s->store, m, scaled(sums0, s->offset0, s->scale0, step),
                   scaled(sums1, s->offset1, s->scale1, step));
}

#endif
