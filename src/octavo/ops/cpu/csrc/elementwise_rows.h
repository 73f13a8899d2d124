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

/* out = rounded(x / rms(x)) weight, rms from `squares` = the sum of x's squares. */
OCTAVO_INLINE void FN(scale_row)(void *out, const void *x, const void *weight, float squares,
                                 float eps, int64_t n, const int bf16) {
    const float inverse = 1.0f / sqrtf(squares / (float)n + eps);
    int64_t i = 0;
    for (; i + VW <= n; i += VW) {
        const vf v = FN(rounded)(FN(get_vector)(x, i, bf16) * inverse, bf16);
        FN(put_vector)(out, i, v * FN(get_vector)(weight, i, bf16), bf16);
    }
    for (; i < n; i++) {
        const float v = FN(rounded1)(FN(get)(x, i, bf16) * inverse, bf16);
        FN(put)(out, i, v * FN(get)(weight, i, bf16), bf16);
    }
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

/* One head in place: RMS norm (if weight), then rotation of its first 2 half elements:
 * (x_i, x_{half+i}) -> (x_i c_i - x_{half+i} s_i, x_{half+i} c_i + x_i s_i). */
OCTAVO_INLINE void FN(rope_head)(void *x, const void *weight, float eps, const float *cos_sin,
                                 int half, int head_dim, const int bf16) {
    if (weight)
        FN(scale_row)(x, x, weight, FN(add_squares)(x, 0, head_dim, bf16), eps, head_dim, bf16);
    const float *cos = cos_sin, *sin = cos_sin + half;
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
        FN(scale_row)(out, row, a->weight, squares, a->eps, a->width, bf16);
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

OCTAVO_INLINE void FN(rope_rows_of)(const struct rope_args *a, int64_t from, int64_t to,
                                    const int bf16) {
    const int64_t bytes = bf16 ? 2 : 4;
    const int64_t head_bytes = a->head_dim * bytes, slots_bytes = a->block_size * head_bytes;
    for (int64_t t = from; t < to; t++) {
        const float *cos_sin = a->cos_sin + rope_position(a, t) * a->rotary_dim;
        const int half = a->rotary_dim / 2;
        char *query = (char *)a->query + t * a->query_stride * bytes;
        for (int h = 0; h < a->num_heads; h++, query += head_bytes)
            FN(rope_head)(query, a->q_weight, a->eps, cos_sin, half, a->head_dim, bf16);
        char *key = (char *)a->key + t * a->key_stride * bytes;
        const char *value = (const char *)a->value + t * a->value_stride * bytes;
        const int write = a->slot_mapping[t] >= 0;
        const int64_t slot = write ? a->slot_mapping[t] : 0;
        char *block = (char *)a->kv_cache + slot / a->block_size * a->block_stride * bytes;
        char *to_key = block + a->key_offset * bytes + slot % a->block_size * head_bytes;
        char *to_value = block + a->value_offset * bytes + slot % a->block_size * head_bytes;
        for (int h = 0; h < a->num_kv_heads; h++) {
            FN(rope_head)(key + h * head_bytes, a->k_weight, a->eps, cos_sin, half, a->head_dim,
                          bf16);
            if (!write) continue;
            __builtin_memcpy(to_key + h * slots_bytes, key + h * head_bytes, (size_t)head_bytes);
            __builtin_memcpy(to_value + h * slots_bytes, value + h * head_bytes,
                             (size_t)head_bytes);
        }
    }
}

static void FN(rope_rows)(const void *args, int64_t from, int64_t to) {
    const struct rope_args *a = args;
    if (a->dtype == OCTAVO_BF16)
        FN(rope_rows_of)(a, from, to, 1);
    else
        FN(rope_rows_of)(a, from, to, 0);
}
