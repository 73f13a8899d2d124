/* Part of qgemm.c, compiled for AVX512_VNNI: rounding of x, unpacking, the kernel for few rows. */

OCTAVO_INLINE __m512 load_x(const void *x, int64_t i, __mmask16 mask, int is_f32) {
    if (is_f32) return _mm512_maskz_loadu_ps(mask, (const float *)x + i);
    const __m256i half = _mm256_maskz_loadu_epi16(mask, (const uint16_t *)x + i);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

OCTAVO_INLINE __mmask16 lanes(int64_t count) {
    return count >= 16 ? 0xffff : count > 0 ? (__mmask16)((1u << count) - 1) : 0;
}

/* As plain_round_row, to the same bits. */
OCTAVO_INLINE float round_row_of(const void *x, int64_t k, int64_t kp, uint8_t *to,
                                 const int is_f32) {
    __m512i most = _mm512_setzero_si512();
    for (int64_t i = 0; i < k; i += 16) {
        const __m512i bits = _mm512_castps_si512(load_x(x, i, lanes(k - i), is_f32));
        most = _mm512_max_epu32(most, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
    }
    float levels;
    const float step = row_step(_mm512_reduce_max_epu32(most), &levels);
    if (levels == 0.0f) {
        memset(to, 128, (size_t)kp);
        memset(to + kp, 0, (size_t)kp);
        return step;
    }
    const __m512 scale = _mm512_set1_ps(levels);
    for (int64_t i = 0; i < kp; i += 16) {
        const __m512 v = _mm512_mul_ps(load_x(x, i, lanes(k - i), is_f32), scale);
        const __m512i q = _mm512_add_epi32(_mm512_cvtps_epi32(v), _mm512_set1_epi32(32768));
        _mm_storeu_si128((void *)(to + i), _mm512_cvtepi32_epi8(_mm512_srli_epi32(q, 8)));
        _mm_storeu_si128((void *)(to + kp + i), _mm512_cvtepi32_epi8(q));
    }
    return step;
}

static float round_row(const void *x, int is_f32, int64_t k, int64_t kp, uint8_t *to) {
    return is_f32 ? round_row_of(x, k, kp, to, 1) : round_row_of(x, k, kp, to, 0);
}

/* ---- unpacking ----------------------------------------------------------------------------- */

/* a << 8 in both words, and c in all bytes, of each of 16 channels' lanes. */
typedef struct {
    __m512i a, c;
} affine;

OCTAVO_INLINE affine load_affine(const char *block, int half) {
    const __m512i lane = _mm512_set4_epi32(0x0c0c0c0c, 0x08080808, 0x04040404, 0);
    const __m128i *at = (const __m128i *)(const void *)(block + 512 + half * 16);
    const __m512i a = _mm512_cvtepu8_epi32(_mm_loadu_si128(at));
    const __m512i c = _mm512_cvtepu8_epi32(_mm_loadu_si128(at + 2));
    affine f;
    f.a = _mm512_or_si512(_mm512_slli_epi32(a, 8), _mm512_slli_epi32(a, 24));
    f.c = _mm512_shuffle_epi8(c, lane);
    return f;
}

/* Codes of the k-quads j and j + 4 of a half from its j-th 64 bytes. mulhi takes q at the top of
 * its byte: (q << 4) * (a << 8) >> 16 is a * q >> 4, and with q << 12 the same, one byte up. */
OCTAVO_INLINE void unpack(const char *packed, affine f, __m512i *first, __m512i *second) {
    const __m512i even = _mm512_set1_epi16(0x00f0), odd = _mm512_set1_epi16((short)0xf000);
    const __m512i upper = _mm512_set1_epi16((short)0xff00);
    const __m512i high = _mm512_loadu_si512(packed), low = _mm512_slli_epi16(high, 4);
    const __m512i e0 = _mm512_mulhi_epu16(_mm512_and_si512(low, even), f.a);
    const __m512i o0 = _mm512_mulhi_epu16(_mm512_and_si512(low, odd), f.a);
    const __m512i e1 = _mm512_mulhi_epu16(_mm512_and_si512(high, even), f.a);
    const __m512i o1 = _mm512_mulhi_epu16(_mm512_and_si512(high, odd), f.a);
    *first = _mm512_add_epi8(_mm512_ternarylogic_epi32(e0, o0, upper, 0xf8), f.c);
    *second = _mm512_add_epi8(_mm512_ternarylogic_epi32(e1, o1, upper, 0xf8), f.c);
}

const int8_t *octavo_qgemm_codes(const qgemm_weight *w, int64_t g, int8_t *buffer) {
    const int64_t kp = w->w.kp;
    if (w->bits == 8) return (const int8_t *)w->w.data + g * kp * GEMM_GROUP;
    const char *block = (const char *)w->w.data + g * (kp / QGEMM_BLOCK) * QGEMM_BLOCK_BYTES;
    int8_t *to = buffer;
    for (int64_t b = 0; b < kp / QGEMM_BLOCK; ++b, block += QGEMM_BLOCK_BYTES) {
        for (int half = 0; half < 2; ++half) {
            const affine f = load_affine(block, half);
            int8_t *quads = to + half * GEMM_TILE_BYTES;
            for (int j = 0; j < 4; ++j) {
                __m512i first, second;
                unpack(block + half * 256 + j * 64, f, &first, &second);
                _mm512_storeu_si512(quads + j * 64, first);
                _mm512_storeu_si512(quads + j * 64 + 256, second);
            }
        }
        to += b % 2 ? QGEMM_STEP_BYTES - 512 : 512;
    }
    return buffer;
}

/* ---- sums ---------------------------------------------------------------------------------- */

OCTAVO_INLINE __m512 scaled(__m512i high, __m512i low, __m512i offset, __m512 scale, float step) {
    const __m512 h = _mm512_cvtepi32_ps(_mm512_sub_epi32(high, offset));
    const __m512 v = _mm512_fmadd_ps(h, _mm512_set1_ps(256.0f), _mm512_cvtepi32_ps(low));
    return _mm512_mul_ps(_mm512_mul_ps(v, scale), _mm512_set1_ps(step));
}

void octavo_qgemm_store(const qgemm_call *call, const int32_t *high, const int32_t *low, int64_t g,
                        int64_t m, int rows) {
    const gemm_store store = gemm_store_of(&call->out, g);
    const int32_t *sums = call->w->sums + g * GEMM_GROUP;
    const float *scales = call->w->scales + g * GEMM_GROUP;
    const __m512i offset0 = _mm512_slli_epi32(_mm512_loadu_si512(sums), 7);
    const __m512i offset1 = _mm512_slli_epi32(_mm512_loadu_si512(sums + 16), 7);
    const __m512 scale0 = _mm512_loadu_ps(scales), scale1 = _mm512_loadu_ps(scales + 16);
    for (const int64_t end = m + rows; m < end; ++m, high += GEMM_GROUP, low += GEMM_GROUP) {
        const float step = call->steps[m];
        gemm_store_row(&store, m,
                       scaled(_mm512_load_si512(high), _mm512_load_si512(low), offset0, scale0, step),
                       scaled(_mm512_load_si512(high + 16), _mm512_load_si512(low + 16), offset1,
                              scale1, step));
    }
}

enum {
    FEW_ROWS = 4,   /* multiplied as 4-bit codes are unpacked: 16 sums and what that needs */
    BLOCK_ROWS = 6, /* of 8-bit codes: 24 sums, 4 columns of W and x */
    AHEAD_BYTES = 4096,
};

/* Sums of a block of rows: [half][row], of the high and low bytes. */
typedef struct {
    __m512i high[2][BLOCK_ROWS], low[2][BLOCK_ROWS];
} block_sums;

OCTAVO_INLINE void add_quad(block_sums *s, const uint8_t *x, int64_t kp, __m512i codes, int half,
                            const int rows) {
#pragma GCC unroll 6
    for (int r = 0; r < rows; ++r) {
        int high, low;
        memcpy(&high, x + r * 2 * kp, 4);
        memcpy(&low, x + r * 2 * kp + kp, 4);
        s->high[half][r] = _mm512_dpbusd_epi32(s->high[half][r], _mm512_set1_epi32(high), codes);
        s->low[half][r] = _mm512_dpbusd_epi32(s->low[half][r], _mm512_set1_epi32(low), codes);
    }
}

OCTAVO_INLINE void prefetch_lines(const char *p, int lines) {
    for (int i = 0; i < lines; ++i) __builtin_prefetch(p + AHEAD_BYTES + i * 64, 0, 3);
}

OCTAVO_INLINE void add_codes(block_sums *s, const uint8_t *x, int64_t kp, const int8_t *codes,
                             const int rows) {
    for (int64_t k = 0; k < kp; k += QGEMM_KSTEP, codes += QGEMM_STEP_BYTES) {
        prefetch_lines((const char *)codes, QGEMM_STEP_BYTES / 64);
        for (int q = 0; q < QGEMM_KSTEP / 4; ++q) {
            const __m512i c0 = _mm512_loadu_si512(codes + q * 64);
            const __m512i c1 = _mm512_loadu_si512(codes + GEMM_TILE_BYTES + q * 64);
            add_quad(s, x + k + q * 4, kp, c0, 0, rows);
            add_quad(s, x + k + q * 4, kp, c1, 1, rows);
        }
    }
}

OCTAVO_INLINE void add_packed(block_sums *s, const uint8_t *x, int64_t kp, const char *block,
                              const int rows) {
    for (int64_t k = 0; k < kp; k += QGEMM_BLOCK, block += QGEMM_BLOCK_BYTES) {
        prefetch_lines(block, QGEMM_BLOCK_BYTES / 64);
#pragma GCC unroll 2
        for (int half = 0; half < 2; ++half) {
            const affine f = load_affine(block, half);
#pragma GCC unroll 4
            for (int j = 0; j < 4; ++j) {
                __m512i first, second;
                unpack(block + half * 256 + j * 64, f, &first, &second);
                add_quad(s, x + k + j * 4, kp, first, half, rows);
                add_quad(s, x + k + j * 4 + 16, kp, second, half, rows);
            }
        }
    }
}

/* Rows [m, m + rows) of one group; rows is a constant after inlining. codes: of 8 bits, or NULL
 * to unpack those of 4. */
OCTAVO_INLINE void group_block(const qgemm_call *call, int64_t g, int64_t m, const int8_t *codes,
                               const int rows, const int packed) {
    const int64_t kp = call->w->w.kp;
    const uint8_t *x = call->x + m * 2 * kp;
    block_sums s;
#pragma GCC unroll 6
    for (int r = 0; r < rows; ++r)
        s.high[0][r] = s.high[1][r] = s.low[0][r] = s.low[1][r] = _mm512_setzero_si512();
    if (packed)
        add_packed(&s, x, kp,
                   (const char *)call->w->w.data + g * (kp / QGEMM_BLOCK) * QGEMM_BLOCK_BYTES, rows);
    else
        add_codes(&s, x, kp, codes, rows);
    __attribute__((aligned(64))) int32_t high[BLOCK_ROWS * GEMM_GROUP];
    __attribute__((aligned(64))) int32_t low[BLOCK_ROWS * GEMM_GROUP];
#pragma GCC unroll 6
    for (int r = 0; r < rows; ++r)
        for (int half = 0; half < 2; ++half) {
            _mm512_store_si512(high + r * GEMM_GROUP + half * 16, s.high[half][r]);
            _mm512_store_si512(low + r * GEMM_GROUP + half * 16, s.low[half][r]);
        }
    octavo_qgemm_store(call, high, low, g, m, rows);
}

static void group_rows(const qgemm_call *call, int64_t g, int64_t m, const int8_t *codes,
                       int rows) {
#define CASE(R) \
    case R: group_block(call, g, m, codes, R, 0); break;
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
#undef CASE
}

static void packed_rows(const qgemm_call *call, int64_t g, int64_t m, int rows) {
#define CASE(R) \
    case R: group_block(call, g, m, NULL, R, 1); break;
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) }
#undef CASE
}

void octavo_qgemm_vnni(const qgemm_call *call, int64_t g0, int64_t g1, int64_t m0, int64_t m1,
                       int8_t *buffer) {
    const int64_t rows = m1 - m0, blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
    for (int64_t g = g0; g < g1; ++g) {
        if (call->w->bits == 4 && rows <= FEW_ROWS) {
            packed_rows(call, g, m0, (int)rows);
            continue;
        }
        const int8_t *codes = octavo_qgemm_codes(call->w, g, buffer);
        for (int64_t b = 0; b < blocks; ++b) {
            const int64_t r0 = m0 + rows * b / blocks, r1 = m0 + rows * (b + 1) / blocks;
            group_rows(call, g, r0, codes, (int)(r1 - r0));
        }
    }
}
