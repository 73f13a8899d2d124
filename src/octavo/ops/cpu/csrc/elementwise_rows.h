/* Row kernels of elementwise.c for one vector width; included between vec.h and vec_end.h.
 *
 * `bf16` is a constant wherever these are called, so the branches on it disappear. Arithmetic is
 * float32; a row's end that fills no vector is done element by element.
 */

OCTAVO_INLINE float FN(get)(const void *p, int64_t i, const int bf16) {
    return bf16 ? FN(bf16_to_float)(((const uint16_t *)p)[i]) : ((const float *)p)[i];
}

OCTAVO_INLINE void FN(put)(void *p, int64_t i, float x, const int bf16) {
    if (bf16)
        ((uint16_t *)p)[i] = FN(float_to_bf16)(x);
    else
        ((float *)p)[i] = x;
}

OCTAVO_INLINE vf FN(get_vector)(const void *p, int64_t i, const int bf16) {
    return bf16 ? FN(load_bf16)((const uint16_t *)p + i) : FN(load)((const float *)p + i);
}

OCTAVO_INLINE void FN(put_vector)(void *p, int64_t i, vf x, const int bf16) {
    if (bf16)
        FN(store_bf16)((uint16_t *)p + i, x);
    else
        FN(store)((float *)p + i, x);
}

/* x as it reads back after being stored. */
OCTAVO_INLINE vf FN(rounded)(vf x, const int bf16) {
    if (!bf16) return x;
    const vu bits = (vu)x;
    return (vf)((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u);
}

OCTAVO_INLINE float FN(rounded1)(float x, const int bf16) {
    return bf16 ? FN(bf16_to_float)(FN(float_to_bf16)(x)) : x;
}

/* x = x + add, stored in x's type (add may be null); returns the sum of the stored squares. */
OCTAVO_INLINE float FN(add_squares)(void *x, const void *add, int64_t n, const int bf16) {
    vf sum[2] = {{0}, {0}};
    float rest = 0;
    int64_t i = 0;
    for (; i + 2 * VW <= n; i += 2 * VW)
#pragma GCC unroll 2
        for (int j = 0; j < 2; j++) {
            const int64_t at = i + j * VW;
            vf v = FN(get_vector)(x, at, bf16);
            if (add) {
                v = FN(rounded)(v + FN(get_vector)(add, at, bf16), bf16);
                FN(put_vector)(x, at, v, bf16);
            }
            sum[j] += v * v;
        }
    for (; i < n; i++) {
        float v = FN(get)(x, i, bf16);
        if (add) {
            v = FN(rounded1)(v + FN(get)(add, i, bf16), bf16);
            FN(put)(x, i, v, bf16);
        }
        rest += v * v;
    }
    return FN(sum)(sum[0] + sum[1]) + rest;
}

/* out = rounded(x / rms(x)) weight, rms from `squares` = the sum of x's squares. A float32 weight
 * of bf16 rows (`wide`) is multiplied without rounding before. */
OCTAVO_INLINE void FN(scale_row_by)(void *out, const void *x, const void *weight, float squares,
                                    float eps, int64_t n, const int bf16, const int wide) {
    const float inverse = 1.0f / sqrtf(squares / (float)n + eps);
    const int narrow = bf16 && !wide;
    int64_t i = 0;
    for (; i + VW <= n; i += VW) {
        const vf v = FN(rounded)(FN(get_vector)(x, i, bf16) * inverse, narrow);
        FN(put_vector)(out, i, v * FN(get_vector)(weight, i, narrow), bf16);
    }
    for (; i < n; i++) {
        const float v = FN(rounded1)(FN(get)(x, i, bf16) * inverse, narrow);
        FN(put)(out, i, v * FN(get)(weight, i, narrow), bf16);
    }
}

OCTAVO_INLINE void FN(scale_row)(void *out, const void *x, const void *weight, float squares,
                                 float eps, int64_t n, const int bf16, int wide) {
    if (wide)
        FN(scale_row_by)(out, x, weight, squares, eps, n, bf16, 1);
    else
        FN(scale_row_by)(out, x, weight, squares, eps, n, bf16, 0);
}

/* x sigmoid(x) y. Below -87 e^-x would overflow and the result is 0 to 36 digits; the order of
 * vmax's operands lets a NaN through. */
OCTAVO_INLINE vf FN(silu_mul)(vf x, vf y) {
    x = FN(vmax)(FN(set1)(-87.0f), x);
    return x * FN(reciprocal)(FN(exp2)(x * -1.4426950408889634f) + 1.0f) * y;
}

OCTAVO_INLINE void FN(silu_row)(void *out, const void *gate_up, int64_t n, const int bf16) {
    int64_t i = 0;
    for (; i + VW <= n; i += VW)
        FN(put_vector)(out, i,
                       FN(silu_mul)(FN(get_vector)(gate_up, i, bf16),
                                    FN(get_vector)(gate_up, n + i, bf16)),
                       bf16);
    for (; i < n; i++) {
        const vf x = FN(set1)(FN(get)(gate_up, i, bf16));
        const vf y = FN(set1)(FN(get)(gate_up, n + i, bf16));
        FN(put)(out, i, FN(silu_mul)(x, y)[0], bf16);
    }
}

/* Pairs (x_2i, x_2i+1) -> (x_2i c_i - x_2i+1 s_i, x_2i+1 c_i + x_2i s_i), one by one: the few
 * elements that models rotate so are not worth a shuffle for each instruction set. */
static void FN(rope_pairs)(void *x, const float *cos, const float *sin, int half,
                           const int bf16) {
    for (int i = 0; i < half; i++) {
        const float a = FN(get)(x, 2 * i, bf16), b = FN(get)(x, 2 * i + 1, bf16);
        FN(put)(x, 2 * i, a * cos[i] - b * sin[i], bf16);
        FN(put)(x, 2 * i + 1, b * cos[i] + a * sin[i], bf16);
    }
}

/* One head in place: RMS norm (if weight), then rotation of its first rotary_dim elements:
 * (x_i, x_{half+i}) -> (x_i c_i - x_{half+i} s_i, x_{half+i} c_i + x_i s_i), or pairs. */
OCTAVO_INLINE void FN(rope_head)(const struct rope_args *args, void *x, const void *weight,
                                 const float *cos_sin, const int bf16) {
    const int half = args->rotary_dim / 2, head_dim = args->head_dim;
    if (weight)
        FN(scale_row)(x, x, weight, FN(add_squares)(x, 0, head_dim, bf16), args->eps, head_dim,
                      bf16, args->wide_weights);
    const float *cos = cos_sin, *sin = cos_sin + half;
    if (args->interleaved) {
        FN(rope_pairs)(x, cos, sin, half, bf16);
        return;
    }
    int i = 0;
    for (; i + VW <= half; i += VW) {
        const vf a = FN(get_vector)(x, i, bf16), b = FN(get_vector)(x, half + i, bf16);
        const vf c = FN(load)(cos + i), s = FN(load)(sin + i);
        FN(put_vector)(x, i, a * c - b * s, bf16);
        FN(put_vector)(x, half + i, b * c + a * s, bf16);
    }
    for (; i < half; i++) {
        const float a = FN(get)(x, i, bf16), b = FN(get)(x, half + i, bf16);
        FN(put)(x, i, a * cos[i] - b * sin[i], bf16);
        FN(put)(x, half + i, b * cos[i] + a * sin[i], bf16);
    }
}

OCTAVO_INLINE void FN(norm_rows_of)(const struct norm_args *a, int64_t from, int64_t to,
                                    const int bf16) {
    const int64_t bytes = bf16 ? 2 : 4;
    for (int64_t t = from; t < to; t++) {
        const char *x = (const char *)a->x + t * a->x_stride * bytes;
        char *out = (char *)a->out + t * a->out_stride * bytes;
        char *row = a->residual ? (char *)a->residual + t * a->residual_stride * bytes : (char *)x;
        const float squares = FN(add_squares)(row, a->residual ? x : 0, a->width, bf16);
        FN(scale_row)(out, row, a->weight, squares, a->eps, a->width, bf16, a->wide_weight);
    }
}

static void FN(norm_rows)(const void *args, int64_t from, int64_t to) {
    const struct norm_args *a = args;
    if (a->dtype == OCTAVO_BF16)
        FN(norm_rows_of)(a, from, to, 1);
    else
        FN(norm_rows_of)(a, from, to, 0);
}

static void FN(silu_rows)(const void *args, int64_t from, int64_t to) {
    const struct silu_args *a = args;
    const int64_t bytes = a->dtype == OCTAVO_BF16 ? 2 : 4;
    for (int64_t t = from; t < to; t++) {
        const char *x = (const char *)a->gate_up + t * a->x_stride * bytes;
        char *out = (char *)a->out + t * a->out_stride * bytes;
        if (a->dtype == OCTAVO_BF16)
            FN(silu_row)(out, x, a->width, 1);
        else
            FN(silu_row)(out, x, a->width, 0);
    }
}

/* x = x_scale x + y_scale y, or without the second term. */
OCTAVO_INLINE void FN(add_rows_of)(const struct add_args *a, int64_t from, int64_t to,
                                   const int bf16) {
    const int64_t bytes = bf16 ? 2 : 4;
    for (int64_t t = from; t < to; t++) {
        char *x = (char *)a->x + t * a->x_stride * bytes;
        const char *y = a->y ? (const char *)a->y + t * a->y_stride * bytes : 0;
        int64_t i = 0;
        for (; i + VW <= a->width; i += VW) {
            vf v = FN(get_vector)(x, i, bf16) * a->x_scale;
            if (y) v += FN(get_vector)(y, i, bf16) * a->y_scale;
            FN(put_vector)(x, i, v, bf16);
        }
        for (; i < a->width; i++) {
            float v = FN(get)(x, i, bf16) * a->x_scale;
            if (y) v += FN(get)(y, i, bf16) * a->y_scale;
            FN(put)(x, i, v, bf16);
        }
    }
}

static void FN(add_rows)(const void *args, int64_t from, int64_t to) {
    const struct add_args *a = args;
    if (a->dtype == OCTAVO_BF16)
        FN(add_rows_of)(a, from, to, 1);
    else
        FN(add_rows_of)(a, from, to, 0);
}

typedef int8_t FN(codes) __attribute__((vector_size(VW), aligned(1), may_alias));

/* A head as codes, x being about code scale: the scale is the largest |x| / 127 rounded up to a
 * normal float16; 1 for zeros, and no number where x is none or the scale no float16. */
OCTAVO_INLINE uint16_t FN(code_row)(int8_t *out, const void *x, int n, const int bf16) {
    /* As integers, NaNs are larger than what is a number. */
    vi top = {0};
    int32_t most = 0;
    int i = 0;
    for (; i + VW <= n; i += VW) {
        const vi bits = (vi)FN(get_vector)(x, i, bf16) & 0x7fffffff, above = bits > top;
        top = (bits & above) | (top & ~above);
    }
    for (int j = 0; j < VW; j++)
        if (top[j] > most) most = top[j];
    for (; i < n; i++) {
        union { float f; int32_t i; } one = {FN(get)(x, i, bf16)};
        if ((one.i & 0x7fffffff) > most) most = one.i & 0x7fffffff;
    }
    union { int32_t i; float f; } amax = {most}, exact, scale;
    uint32_t half;
    exact.f = amax.f / 127.0f;
    if (!most)
        half = 0x3c00;
    else if (most > 0x7f800000)
        half = 0x7e00;
    else if (exact.f <= 0x1p-14f)
        half = 0x0400;
    else
        half = ((uint32_t)exact.i - 0x38000000u + 0x1fffu) >> 13;
    if (half > 0x7c00 && most <= 0x7f800000) half = 0x7c00;
    scale.i = (int32_t)((half << 13) + 0x38000000u);
    const float divisor = half < 0x7c00 ? scale.f : 1.0f;
    const float round = 0x1.8p23f; /* adding it leaves the nearest integer in the low bits */
    for (i = 0; i + VW <= n; i += VW) {
        vf v = FN(vmax)(FN(get_vector)(x, i, bf16) / divisor, FN(set1)(-127.0f));
        v = 0.0f - FN(vmax)(0.0f - v, FN(set1)(-127.0f));
        *(FN(codes) *)(out + i) = (FN(codes))__builtin_convertvector((vi)(v + round), FN(codes));
    }
    for (; i < n; i++) {
        const float v = FN(get)(x, i, bf16) / divisor;
        union { float f; int32_t i; } sum = {(v > 127.0f ? 127.0f : v > -127.0f ? v : -127.0f) +
                                            round};
        out[i] = (int8_t)sum.i;
    }
    return (uint16_t)half;
}

/* Key or value of one token, all heads, to its slot of the cache. */
OCTAVO_INLINE void FN(cache_heads)(const struct rope_args *a, const char *x, int64_t slot,
                                   int64_t offset, int64_t scale_offset, const int bf16) {
    const int64_t bytes = bf16 ? 2 : 4, dim = a->head_dim;
    const int64_t block = slot / a->block_size, within = slot % a->block_size;
    const int64_t at = block * a->block_stride + offset + within * dim;
    const int64_t scale_at = block * a->scale_stride + scale_offset + within;
    for (int h = 0; h < a->num_kv_heads; h++) {
        const int64_t to = at + h * a->block_size * dim;
        const char *from = x + h * dim * bytes;
        if (a->kv_scales)
            a->kv_scales[scale_at + h * a->block_size] =
                FN(code_row)((int8_t *)a->kv_cache + to, from, (int)dim, bf16);
        else
            __builtin_memcpy((char *)a->kv_cache + to * bytes, from, (size_t)(dim * bytes));
    }
}

OCTAVO_INLINE void FN(rope_rows_of)(const struct rope_args *a, int64_t from, int64_t to,
                                    const int bf16) {
    const int64_t bytes = bf16 ? 2 : 4, head_bytes = a->head_dim * bytes;
    for (int64_t t = from; t < to; t++) {
        const float *cos_sin = a->cos_sin;
        if (cos_sin) cos_sin += rope_position(a, t) * a->rotary_dim;
        char *query = (char *)a->query + t * a->query_stride * bytes;
        for (int h = 0; h < a->num_heads; h++)
            FN(rope_head)(a, query + h * head_bytes, a->q_weight, cos_sin, bf16);
        char *key = (char *)a->key + t * a->key_stride * bytes;
        for (int h = 0; h < a->num_kv_heads; h++)
            FN(rope_head)(a, key + h * head_bytes, a->k_weight, cos_sin, bf16);
        const int64_t slot = a->slot_mapping[t];
        if (slot < 0) continue;
        FN(cache_heads)(a, key, slot, a->key_offset, a->key_scale_offset, bf16);
        if (a->value)
            FN(cache_heads)(a, (const char *)a->value + t * a->value_stride * bytes, slot,
                            a->value_offset, a->value_scale_offset, bf16);
    }
}

static void FN(rope_rows)(const void *args, int64_t from, int64_t to) {
    const struct rope_args *a = args;
    if (a->dtype == OCTAVO_BF16)
        FN(rope_rows_of)(a, from, to, 1);
    else
        FN(rope_rows_of)(a, from, to, 0);
}
