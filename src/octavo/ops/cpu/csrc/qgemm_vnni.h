/* Part of qgemm.c, compiled for AVX512_VNNI: rounding of x, unpacking, the kernel for few rows. */

OCTAVO_INLINE __mmask16 lanes(int64_t count) {
    return count >= 16 ? 0xffff : count > 0 ? (__mmask16)((1u << count) - 1) : 0;
}

OCTAVO_INLINE __m512i rounded(__m512 x, float levels) {
    return _mm512_cvtps_epi32(_mm512_mul_ps(x, _mm512_set1_ps(levels)));
}

/* Adds the squares of 32 numbers of 16 bits, two by two in 32 unsigned ones: the first of each pair
 * in the low half of `even`, the second in that of `odd`. */
OCTAVO_INLINE __m512i add_squares(__m512i sums, __m512i even, __m512i odd) {
    const __m512i words = _mm512_mask_blend_epi16(0xaaaaaaaa, even, _mm512_slli_epi32(odd, 16));
    const __m512i squares = _mm512_madd_epi16(words, words);
    sums = _mm512_add_epi64(sums, _mm512_srli_epi64(squares, 32));
    return _mm512_add_epi64(sums, _mm512_and_si512(squares, _mm512_set1_epi64(0xffffffff)));
}

/* Appends the quads of 16 values from `quad` on that have a high byte; v: the values + 128. */
static qgemm_quad *add_quads(qgemm_quad *end, int64_t row, int64_t quad, __m512i v) {
    const __m128i high = _mm512_cvtepi32_epi8(_mm512_srai_epi32(v, 8));
    int32_t four[4];
    _mm_storeu_si128((void *)four, high);
    for (unsigned left = _mm_test_epi32_mask(high, high); left; left &= left - 1) {
        const int j = __builtin_ctz(left);
        end = add_quad_of(end, row, quad + j, four[j]);
    }
    return end;
}

/* As plain_round_row, to the same bits. */
static float round_f32_row(const float *x, int64_t k, int64_t kp, int64_t row, uint8_t *low,
                           qgemm_quad **quads) {
    __m512i most = _mm512_setzero_si512(), squares = most;
    for (int64_t i = 0; i < k; i += 16) {
        const __m512i bits = _mm512_maskz_loadu_epi32(lanes(k - i), x + i);
        most = _mm512_max_epu32(most, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
    }
    const float fine = row_fine(_mm512_reduce_max_epu32(most));
    if (!(fine > 0.0f)) return round_to_nothing(fine, kp, low);
    for (int64_t i = 0; i < k; i += 16) {
        const __m512i v = rounded(_mm512_maskz_loadu_ps(lanes(k - i), x + i), fine);
        squares = add_squares(squares, v, _mm512_setzero_si512());
    }
    const float levels = row_levels(fine, _mm512_reduce_add_epi64(squares), k);
    const __m512i offset = _mm512_set1_epi32(128), high = _mm512_set1_epi32(~255);
    for (int64_t i = 0; i < kp; i += 16) {
        const __m512 values = _mm512_maskz_loadu_ps(lanes(k - i), x + i);
        const __m512i v = _mm512_add_epi32(rounded(values, levels), offset);
        _mm_storeu_si128((void *)(low + i), _mm512_cvtepi32_epi8(v));
        if (_mm512_test_epi32_mask(v, high)) *quads = add_quads(*quads, row, i / 4, v);
    }
    return 1.0f / levels;
}

/* 32 bf16 numbers from i on, zeros from k on: those at even places, and those at odd ones. */
OCTAVO_INLINE __m512i load_pairs(const uint16_t *x, int64_t i, int64_t k) {
    const __mmask32 mask = i + 32 <= k ? 0xffffffff : i < k ? (1u << (k - i)) - 1 : 0;
    return _mm512_maskz_loadu_epi16(mask, x + i);
}

OCTAVO_INLINE __m512 even(__m512i pairs) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
}

OCTAVO_INLINE __m512 odd(__m512i pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000)));
}

/* The same for bf16: whole lines at a time, in pairs, which saves most of the shuffles. */
static float round_bf16_row(const uint16_t *x, int64_t k, int64_t kp, int64_t row, uint8_t *low,
                            qgemm_quad **quads) {
    __m512i most = _mm512_setzero_si512(), squares = most;
    for (int64_t i = 0; i < k; i += 32)
        most = _mm512_max_epu16(
            most, _mm512_and_si512(load_pairs(x, i, k), _mm512_set1_epi16(0x7fff)));
    most = _mm512_max_epu16(most, _mm512_srli_epi32(most, 16));
    const float fine = row_fine(_mm512_reduce_max_epu32(_mm512_slli_epi32(most, 16)));
    if (!(fine > 0.0f)) return round_to_nothing(fine, kp, low);
    for (int64_t i = 0; i < k; i += 32) {
        const __m512i pairs = load_pairs(x, i, k);
        squares = add_squares(squares, rounded(even(pairs), fine), rounded(odd(pairs), fine));
    }
    const float levels = row_levels(fine, _mm512_reduce_add_epi64(squares), k);
    const __m512i offset = _mm512_set1_epi32(128), high = _mm512_set1_epi32(~255);
    for (int64_t i = 0; i < kp; i += 32) {
        const __m512i pairs = load_pairs(x, i, k);
        const __m512i v0 = _mm512_add_epi32(rounded(even(pairs), levels), offset);
        const __m512i v1 = _mm512_add_epi32(rounded(odd(pairs), levels), offset);
        const __m512i both =
            _mm512_mask_blend_epi8(0x2222222222222222, v0, _mm512_slli_epi32(v1, 8));
        _mm256_storeu_si256((void *)(low + i), _mm512_cvtepi32_epi16(both));
        if (!_mm512_test_epi32_mask(_mm512_or_si512(v0, v1), high)) continue;
        for (int64_t j = i; j < i + 32; j += 16) {
            const __m512 values = load_bf16(x + j, lanes(k - j));
            *quads = add_quads(*quads, row, j / 4,
                               _mm512_add_epi32(rounded(values, levels), offset));
        }
    }
    return 1.0f / levels;
}

static float round_row(const void *x, int is_f32, int64_t k, int64_t kp, int64_t row, uint8_t *low,
                       qgemm_quad **quads) {
    return is_f32 ? round_f32_row(x, k, kp, row, low, quads)
                  : round_bf16_row(x, k, kp, row, low, quads);
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

/* The codes of a quad of a group, of which `codes` are unpacked or NULL. */
OCTAVO_INLINE void quad_codes(const qgemm_weight *w, const int8_t *codes, int64_t g, int quad,
                              __m512i out[2]) {
    if (codes) {
        codes += quad / 16 * QGEMM_STEP_BYTES + quad % 16 * 64;
        out[0] = _mm512_loadu_si512(codes);
        out[1] = _mm512_loadu_si512(codes + GEMM_TILE_BYTES);
        return;
    }
    const char *block = (const char *)w->w.data +
                        (g * (w->w.kp / QGEMM_BLOCK) + quad / 8) * QGEMM_BLOCK_BYTES;
    for (int half = 0; half < 2; ++half) {
        __m512i first, second;
        unpack(block + half * 256 + quad % 4 * 64, load_affine(block, half), &first, &second);
        out[half] = quad % 8 < 4 ? first : second;
    }
}

/* Adds the sums of code * 256 * high, a quad at a time: as (code + 128) * high, since one of the
 * two must be unsigned. One loop for many rows: the ends of short ones would be mispredicted. */
OCTAVO_INLINE void add_high(const qgemm_call *call, const int8_t *codes, int32_t *sums, int64_t g,
                            int64_t m, int rows) {
    const __m512i flip = _mm512_set1_epi8(-128);
    int64_t next;
    for (int64_t r = m; r < m + rows; r = next) {
        next = r / QGEMM_ROUND_ROWS * QGEMM_ROUND_ROWS + QGEMM_ROUND_ROWS;
        next = next < m + rows ? next : m + rows;
        const qgemm_quad *end = call->quads + call->rows[next - 1].end;
        for (const qgemm_quad *q = call->quads + call->rows[r].first; q < end; ++q) {
            int32_t *at = sums + (q->row - m) * GEMM_GROUP;
            __m512i c[2];
            quad_codes(call->w, codes, g, q->quad, c);
            for (int half = 0; half < 2; ++half, at += 16) {
                const __m512i v = _mm512_dpbusd_epi32(_mm512_set1_epi32(q->offset),
                                                      _mm512_xor_si512(c[half], flip),
                                                      _mm512_set1_epi32(q->high));
                _mm512_store_si512(
                    at, _mm512_add_epi32(_mm512_load_si512(at), _mm512_slli_epi32(v, 8)));
            }
        }
    }
}

enum {
    FEW_ROWS = 6,    /* multiplied as 4-bit codes are unpacked: 12 sums and what that needs */
    BLOCK_ROWS = 12, /* of 8-bit codes: 24 sums, 2 columns of W and x */
    AHEAD_BYTES = 4096,
};

/* Sums of a block of rows: [half][row]. */
typedef struct {
    __m512i low[2][BLOCK_ROWS];
} block_sums;

OCTAVO_INLINE void add_quad(block_sums *s, const uint8_t *x, int64_t kp, __m512i codes, int half,
                            const int rows) {
#pragma GCC unroll 12
    for (int r = 0; r < rows; ++r) {
        int low;
        memcpy(&low, x + r * kp, 4);
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
    const uint8_t *x = call->x + m * kp;
    block_sums s;
#pragma GCC unroll 12
    for (int r = 0; r < rows; ++r) s.low[0][r] = s.low[1][r] = _mm512_setzero_si512();
    if (packed)
        add_packed(&s, x, kp,
                   (const char *)call->w->w.data + g * (kp / QGEMM_BLOCK) * QGEMM_BLOCK_BYTES, rows);
    else
        add_codes(&s, x, kp, codes, rows);
    __attribute__((aligned(64))) int32_t low[BLOCK_ROWS * GEMM_GROUP];
#pragma GCC unroll 12
    for (int r = 0; r < rows; ++r)
        for (int half = 0; half < 2; ++half)
            _mm512_store_si512(low + r * GEMM_GROUP + half * 16, s.low[half][r]);
    add_high(call, packed ? NULL : codes, low, g, m, rows);
    const qgemm_store store = qgemm_store_of(call, g);
    const int32_t *sums = low;
    for (const int64_t end = m + rows; m < end; ++m, sums += GEMM_GROUP)
        qgemm_store_row(&store, call, m, _mm512_load_si512(sums), _mm512_load_si512(sums + 16));
}

static void group_rows(const qgemm_call *call, int64_t g, int64_t m, const int8_t *codes,
                       int rows) {
#define CASE(R) \
    case R: group_block(call, g, m, codes, R, 0); break;
    switch (rows) {
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
        CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(12)
    }
#undef CASE
}

static void packed_rows(const qgemm_call *call, int64_t g, int64_t m, int rows) {
#define CASE(R) \
    case R: group_block(call, g, m, NULL, R, 1); break;
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
#undef CASE
}

void octavo_qgemm_vnni(const qgemm_call *call, qgemm_work *work, int64_t range, int8_t *buffer) {
    qgemm_piece p;
    while (qgemm_take(work, &range, &p)) {
        const int64_t rows = p.m1 - p.m0, blocks = (rows + BLOCK_ROWS - 1) / BLOCK_ROWS;
        if (call->w->bits == 4 && rows <= FEW_ROWS) {
            packed_rows(call, p.g, p.m0, (int)rows);
            continue;
        }
        const int8_t *codes = octavo_qgemm_codes(call->w, p.g, buffer);
        for (int64_t b = 0; b < blocks; ++b) {
            const int64_t r0 = p.m0 + rows * b / blocks, r1 = p.m0 + rows * (b + 1) / blocks;
            group_rows(call, p.g, r0, codes, (int)(r1 - r0));
        }
    }
}
