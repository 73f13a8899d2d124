/* Paged attention for bf16 caches on AMX; included once after attention_bf16.h, whose staging of
 * values, softmax and finish it uses, between vec.h (VW 16) and vec_end.h.
 *
 * Scores are computed transposed, K Q^T: then 16 keys that lie together in a block are a left
 * operand as they are, and the query is put into pairs once per task. 16 x 16 products of tokens
 * x rows come back; four rows at a time are transposed on their way into the softmax. The output
 * is P V with the values interleaved in pairs. Rows are handled in groups of 16.
 */

/* Tile registers; macros, because gcc pastes their digits into register names. */
#define TILE_SCORES_LOW 0
#define TILE_SCORES_HIGH 1
#define TILE_KEYS_LOW 2
#define TILE_KEYS_HIGH 3
#define TILE_QUERY 4
#define TILE_ACC 5
#define TILE_PROBS 6
#define TILE_VALUES 7

static void amx_configure(int rows) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config __attribute__((aligned(64))) = {.palette = 1};
    const int width = rows < 16 ? rows : 16;
    for (int i = 0; i < 8; i++) {
        config.rows[i] = 16;
        config.bytes[i] = 64;
    }
    config.bytes[TILE_SCORES_LOW] = config.bytes[TILE_SCORES_HIGH] = (uint16_t)(4 * width);
    config.bytes[TILE_QUERY] = (uint16_t)(4 * width);
    config.rows[TILE_ACC] = config.rows[TILE_PROBS] = (uint8_t)width;
    _tile_loadconfig(&config);
}

static void amx_leave(void) { _tile_release(); }

/* query[group][pair of dimensions][16 rows]; rows past the last are zero. */
static void amx_begin(const struct attn_task *t, struct attn_scratch *s) {
    const int pairs = t->args->head_dim / 2, groups = (t->num_rows + 15) / 16;
    uint32_t *query = (uint32_t *)s->query;
    amx_configure(t->num_rows);
    if (t->num_rows % 16) __builtin_memset(query, 0, (size_t)(groups * pairs * 16) * 4);
    for (int r = 0; r < t->num_rows; r++) {
        const uint32_t *row = (const uint32_t *)attn_query_row(t, r, 2);
        uint32_t *out = query + r / 16 * pairs * 16 + r % 16;
        for (int d = 0; d < pairs; d++) out[d * 16] = row[d];
    }
    __builtin_memset(s->probs, 0, (size_t)(groups * 16 * ATTN_TILE) * 2);
}

/* scores[group][ATTN_TILE tokens][16 rows] of keys given as two halves of 16 rows. */
static void amx_scores(const struct attn_task *t, struct attn_scratch *s, const char *low,
                       const char *high) {
    const int pairs = t->args->head_dim / 2, groups = (t->num_rows + 15) / 16;
    const size_t stride = (size_t)t->args->head_dim * 2;
    const uint32_t *query = (const uint32_t *)s->query;
    for (int g = 0; g < groups; g++) {
        _tile_zero(TILE_SCORES_LOW);
        _tile_zero(TILE_SCORES_HIGH);
        for (int d = 0; d < pairs; d += 16, query += 16 * 16) {
            _tile_loadd(TILE_QUERY, query, 64);
            _tile_loadd(TILE_KEYS_LOW, low + d * 4, stride);
            _tile_dpbf16ps(TILE_SCORES_LOW, TILE_KEYS_LOW, TILE_QUERY);
            _tile_loadd(TILE_KEYS_HIGH, high + d * 4, stride);
            _tile_dpbf16ps(TILE_SCORES_HIGH, TILE_KEYS_HIGH, TILE_QUERY);
        }
        _tile_stored(TILE_SCORES_LOW, s->scores + g * 16 * ATTN_TILE, 64);
        _tile_stored(TILE_SCORES_HIGH, s->scores + g * 16 * ATTN_TILE + 16 * 16, 64);
    }
}

/* out[r] = column r of four columns of 16 rows, 64 bytes apart: see bf16_transpose. */
OCTAVO_INLINE void amx_columns(const float *in, vf out[4]) {
    __m512 a[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; r++) {
        __m512 x = _mm512_castps128_ps512(_mm_load_ps(in + r * 16));
        x = _mm512_mask_broadcast_f32x4(x, 0x00f0, _mm_load_ps(in + (4 + r) * 16));
        x = _mm512_mask_broadcast_f32x4(x, 0x0f00, _mm_load_ps(in + (8 + r) * 16));
        a[r] = _mm512_mask_broadcast_f32x4(x, 0xf000, _mm_load_ps(in + (12 + r) * 16));
    }
    const __m512d b0 = _mm512_castps_pd(_mm512_unpacklo_ps(a[0], a[1]));
    const __m512d b1 = _mm512_castps_pd(_mm512_unpackhi_ps(a[0], a[1]));
    const __m512d b2 = _mm512_castps_pd(_mm512_unpacklo_ps(a[2], a[3]));
    const __m512d b3 = _mm512_castps_pd(_mm512_unpackhi_ps(a[2], a[3]));
    out[0] = (vf)_mm512_unpacklo_pd(b0, b2);
    out[1] = (vf)_mm512_unpackhi_pd(b0, b2);
    out[2] = (vf)_mm512_unpacklo_pd(b1, b3);
    out[3] = (vf)_mm512_unpackhi_pd(b1, b3);
}

OCTAVO_INLINE void amx_softmax_rows(const struct attn_task *t, struct attn_scratch *s, int start,
                                    int masked, float *max, const int special) {
    for (int r = 0; r < t->num_rows; r += 4) {
        const float *in = s->scores + r / 16 * 16 * ATTN_TILE + r % 16;
        vf low[4], high[4];
        amx_columns(in, low);
        amx_columns(in + 16 * 16, high);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
            if (r + i < t->num_rows)
                bf16_softmax_row(t, s, r + i, start, masked, low[i], high[i], max, special);
    }
}

static void amx_softmax(const struct attn_task *t, struct attn_scratch *s, int start, int masked,
                        float *max) {
    if (t->special)
        amx_softmax_rows(t, s, start, masked, max, 1);
    else
        amx_softmax_rows(t, s, start, masked, max, 0);
}

/* acc = factors acc + probs values. */
static void amx_output(const struct attn_task *t, struct attn_scratch *s, float *acc) {
    const int padded = t->padded_dim;
    const size_t stride = (size_t)padded * 4;
    for (int r = 0; r < t->num_rows; r++) {
        const float factor = s->factors[r];
        float *row = acc + (int64_t)r * padded;
        if (factor != 1.0f)
            for (int d = 0; d < padded; d += 16) FN(store)(row + d, FN(load)(row + d) * factor);
    }
    for (int r = 0; r < t->num_rows; r += 16) {
        _tile_loadd(TILE_PROBS, s->probs + r * (ATTN_TILE / 2), 64);
        for (int d = 0; d < padded; d += 16) {
            float *out = acc + (int64_t)r * padded + d;
            _tile_loadd(TILE_ACC, out, stride);
            _tile_loadd(TILE_VALUES, (const uint32_t *)s->values + d, stride);
            _tile_dpbf16ps(TILE_ACC, TILE_PROBS, TILE_VALUES);
            _tile_stored(TILE_ACC, out, stride);
        }
    }
}

/* The 16 keys from token start: where they lie, or gathered into s->keys. */
static const char *amx_keys(const struct attn_task *t, struct attn_scratch *s, const char **rows,
                            int start, int lo, int hi, int half) {
    if (t->key_scale) return rows[0]; /* all rows were staged */
    if (t->args->block_size % 16 == 0 && start >= lo && start + 16 <= hi) return rows[0];
    char *out = (char *)s->keys + half * 16 * t->row_bytes;
    for (int i = 0; i < 16; i++)
        __builtin_memcpy(out + i * t->row_bytes, rows[i], (size_t)t->row_bytes);
    return out;
}

static void amx_chunk(const struct attn_task *t, struct attn_scratch *s, int lo, int hi,
                      struct attn_state state) {
    const int padded = t->padded_dim, rows = t->num_rows;
    for (int r = 0; r < rows; r++) state.max[r] = ATTN_EMPTY;
    __builtin_memset(s->lane_sums, 0, (size_t)rows * 64);
    __builtin_memset(state.acc, 0, (size_t)((rows + 15) / 16 * 16) * padded * 4);
    int first_lo, first_hi, last_lo, last_hi;
    attn_row_range(t, 0, &first_lo, &first_hi);
    attn_row_range(t, rows - 1, &last_lo, &last_hi);

    const int first = lo / ATTN_TILE * ATTN_TILE;
    for (int start = first; start < hi; start += ATTN_TILE) {
        bf16_gather(t, s, start, lo, hi);
        attn_prefetch(t, start, ATTN_AHEAD, 0);
        amx_scores(t, s, amx_keys(t, s, s->key_rows, start, lo, hi, 0),
                   amx_keys(t, s, s->key_rows + 16, start + 16, lo, hi, 1));
        attn_prefetch(t, start, ATTN_AHEAD, 1);
        bf16_values(t, s, (uint32_t *)s->values);
        amx_softmax(t, s, start, start < last_lo || start + ATTN_TILE > first_hi, state.max);
        amx_output(t, s, state.acc);
    }
    for (int r = 0; r < rows; r++) state.sum[r] = FN(sum)(FN(load)(s->lane_sums + r * 16));
}

static const struct attn_kernel amx_kernel = {amx_begin, amx_chunk, merge_avx512, bf16_finish,
                                              amx_leave, 32};
