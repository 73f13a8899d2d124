/* Vectors of VW floats for one instruction set; included once per set, without include guard.
 *
 * Before: define VW (16, 8 or 4) and SUFFIX, inside an OCTAVO_TARGET_BEGIN region of that width.
 * After the last use: include "vec_end.h". Code between the two writes plain C arithmetic on `vf`
 * (float) and `vi` (int32) and names its own functions FN(name), so that sets do not collide.
 */
#define FN_CAT2(name, suffix) name##_##suffix
#define FN_CAT(name, suffix) FN_CAT2(name, suffix)
#define FN(name) FN_CAT(name, SUFFIX)

#define vf FN(vf_t)
#define vi FN(vi_t)
#define vu FN(vu_t)
#define vf_mem FN(vf_mem_t)
#define vh FN(vh_t)
#define vh_mem FN(vh_mem_t)
typedef float vf __attribute__((vector_size(4 * VW)));
typedef int32_t vi __attribute__((vector_size(4 * VW)));
typedef uint32_t vu __attribute__((vector_size(4 * VW)));
typedef uint16_t vh __attribute__((vector_size(2 * VW)));
typedef float vf_mem __attribute__((vector_size(4 * VW), aligned(4), may_alias));
typedef uint16_t vh_mem __attribute__((vector_size(2 * VW), aligned(2), may_alias));

OCTAVO_INLINE vf FN(load)(const float *p) { return (vf) * (const vf_mem *)p; }
OCTAVO_INLINE void FN(store)(float *p, vf x) { *(vf_mem *)p = (vf_mem)x; }
OCTAVO_INLINE vi FN(load_int)(const int32_t *p) { return (vi) * (const vf_mem *)p; }
OCTAVO_INLINE vf FN(set1)(float x) { return x - (vf){0}; }

/* bfloat16 is the upper half of a float: widening shifts, narrowing rounds to nearest even.
 * A NaN's mantissa may overflow when rounded, so NaNs take a fixed quiet pattern. */
OCTAVO_INLINE float FN(bf16_to_float)(uint16_t h) {
    union { uint32_t u; float f; } x = {(uint32_t)h << 16};
    return x.f;
}

OCTAVO_INLINE uint16_t FN(float_to_bf16)(float f) {
    union { float f; uint32_t u; } x = {f};
    if (f != f) return 0x7fc0;
    return (uint16_t)((x.u + 0x7fff + ((x.u >> 16) & 1)) >> 16);
}

OCTAVO_INLINE vf FN(load_bf16)(const uint16_t *p) {
    return (vf)(__builtin_convertvector((vh) * (const vh_mem *)p, vu) << 16);
}

OCTAVO_INLINE void FN(store_bf16)(uint16_t *p, vf x) {
    vu bits = (vu)x;
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    vu ordered = (vu)(x == x);
    rounded = (rounded & ordered) | (0x7fc0 & ~ordered);
    *(vh_mem *)p = (vh_mem)__builtin_convertvector(rounded, vh);
}

/* The sum and the maximum of a vector's elements, always added in the same order; vmax of two
 * vectors, which takes b where either is NaN. */
#if VW == 16
OCTAVO_INLINE float FN(sum)(vf x) { return _mm512_reduce_add_ps((__m512)x); }
OCTAVO_INLINE float FN(max)(vf x) { return _mm512_reduce_max_ps((__m512)x); }
OCTAVO_INLINE vf FN(vmax)(vf a, vf b) { return (vf)_mm512_max_ps((__m512)a, (__m512)b); }
/* Division is slow at this width: 14 bits and one Newton step give a float's 24. */
OCTAVO_INLINE vf FN(reciprocal)(vf x) {
    const vf y = (vf)_mm512_rcp14_ps((__m512)x);
    return y * (2.0f - x * y);
}
#elif VW == 8
OCTAVO_INLINE float FN(sum)(vf x) {
    __m128 a = _mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
}
OCTAVO_INLINE float FN(max)(vf x) {
    __m128 a = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
    a = _mm_max_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)));
}
OCTAVO_INLINE vf FN(vmax)(vf a, vf b) { return (vf)_mm256_max_ps((__m256)a, (__m256)b); }
OCTAVO_INLINE vf FN(reciprocal)(vf x) { return 1.0f / x; }
#else
OCTAVO_INLINE float FN(sum)(vf x) { return (x[0] + x[2]) + (x[1] + x[3]); }
OCTAVO_INLINE float FN(max)(vf x) {
    float a = x[0] > x[2] ? x[0] : x[2], b = x[1] > x[3] ? x[1] : x[3];
    return a > b ? a : b;
}
OCTAVO_INLINE vf FN(vmax)(vf a, vf b) {
    vi greater = a > b;
    return (vf)(((vi)a & greater) | ((vi)b & ~greater));
}
OCTAVO_INLINE vf FN(reciprocal)(vf x) { return 1.0f / x; }
#endif

/* 2^x for x <= 127, relative error 2e-7, exactly 1 at 0 and exactly 0 below -126 (and for
 * NaN): x = n + f with f in [-1/2, 1/2], a polynomial for 2^f, and n added to the exponent. */
OCTAVO_INLINE vf FN(exp2)(vf x) {
    const float round = 0x1.8p23f; /* adding it leaves the nearest integer in the low bits */
    vi normal = x > -126.0f;
    vf shifted = x + round;
    vf f = x - (shifted - round);
    vf p = 1.326472731e-03f * f + 9.671512991e-03f;
    p = p * f + 5.550733581e-02f;
    p = p * f + 2.402224243e-01f;
    p = p * f + 6.931470037e-01f;
    p = p * f + 1.0f;
    return (vf)(((vu)p + ((vu)shifted << 23)) & (vu)normal);
}
