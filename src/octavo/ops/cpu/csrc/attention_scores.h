/* What is done to scores besides the scale, for one vector width; included between vec.h and
 * vec_end.h. */

/* float16 numbers that are positive and normal, inf or NaN. */
OCTAVO_INLINE vf FN(load_scales)(const uint16_t *p) {
    const vu half = __builtin_convertvector((vh) * (const vh_mem *)p, vu);
    const vu number = (vu)(half < 0x7c00);
    return (vf)((half << 13) + ((0x38000000u & number) | (0x70000000u & ~number)));
}

/* s->key_scales and value_scales of the tile; of tokens outside [lo, hi) any numbers. */
static void FN(tile_scales)(const struct attn_task *t, struct attn_scratch *s, int start, int lo,
                            int hi) {
    uint16_t keys[ATTN_TILE], values[ATTN_TILE];
    attn_gather_scales(t, start, lo, hi, keys, values);
    attn_prefetch_scales(t, start);
    for (int i = 0; i < ATTN_TILE; i += VW) {
        FN(store)(s->key_scales + i, FN(load_scales)(keys + i));
        FN(store)(s->value_scales + i, FN(load_scales)(values + i));
    }
}

/* Scores x of one row in log2 units, after soft cap and ALiBi. head: of the task's query heads;
 * from: the first lane's position less the row's. A NaN stays one. */
static vf FN(adjusted)(const struct attn_task *t, int head, int from, vf x) {
    const float cap = t->args->soft_cap * ATTN_LOG2E;
    if (cap > 0) {
        /* tanh(y) = 1 - 2 / (1 + e^2y); beyond 2^126 it is 1 to all digits */
        const vf power = 0.0f - FN(vmax)(0.0f - x * (2.0f / t->args->soft_cap), FN(set1)(-126.0f));
        const vf capped = cap - 2.0f * cap / (1.0f + FN(exp2)(power));
        const vi number = x == x;
        x = (vf)(((vi)capped & number) | ((vi)x & ~number));
    }
    if (t->slopes) {
        const vi distance = FN(load_int)(attn_iota) + from;
        x += t->slopes[head] * ATTN_LOG2E * __builtin_convertvector(distance, vf);
    }
    return x;
}
