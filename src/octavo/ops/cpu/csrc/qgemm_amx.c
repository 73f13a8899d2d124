/* Quantized linear on AMX tiles: up to 32 rows of x times 32 channels of 8-bit codes. A step of 64
 * along k is four TDPBUSDs, each of two tiles of x with each of two of W. */
#include "qgemm.h"

#if OCTAVO_X86 && defined(__linux__)
#include <immintrin.h>
#include <string.h>

OCTAVO_TARGET_BEGIN(OCTAVO_FEATURES_AMX ",amx-int8")

#include "amx_tiles.h"

/* As in gemm_amx.c: a finished block waits for its epilogue while the next is multiplied. */
typedef struct {
    __attribute__((aligned(64))) int32_t sums[2][BLOCK_ROWS * GEMM_GROUP];
    int current;
    const int8_t *codes;
    int64_t g, m;
    int row, rows;
} pending;

static void finish_pending(const qgemm_call *call, pending *p, qgemm_prefetch *prefetch) {
    octavo_qgemm_store(call, p->codes, p->sums[p->current] + p->row * GEMM_GROUP, p->g,
                       p->m + p->row, p->rows - p->row, prefetch);
}

/* Group g (-1: nothing), in equal shares for products of tiles and rows, which are as long. */
static qgemm_prefetch prefetch_of(const qgemm_weight *w, int64_t g, int64_t products,
                                  int64_t rows) {
    const int64_t kp = w->w.kp;
    const int64_t bytes = w->bits == 8 ? kp * GEMM_GROUP : kp * QGEMM_BLOCK_BYTES / QGEMM_BLOCK;
    qgemm_prefetch p;
    p.at = (const char *)w->w.data + g * bytes;
    p.end = g < 0 ? p.at : p.at + bytes;
    p.row_lines = bytes / 64 / (products + rows);
    p.product_lines = (bytes / 64 - p.row_lines * rows + products - 1) / products;
    return p;
}

/* What goes between two products: `lines` of codes to L1, and some of the next group to L2. */
OCTAVO_INLINE void fetch_between(const char *codes, const int lines, qgemm_prefetch *prefetch) {
#pragma GCC unroll 16
    for (int i = 0; i < lines; ++i) __builtin_prefetch(codes + i * 64, 0, 3);
    qgemm_fetch(prefetch, prefetch->product_lines);
}

/* `two`: more than 16 rows. All loads of a step come first, fetches lie between the products: loads
 * and products that follow each other closely do not overlap. */
OCTAVO_INLINE void multiply(const uint8_t *x, int64_t kp, const int8_t *codes,
                            qgemm_prefetch *prefetch, int32_t *sums, const int two) {
    const int8_t *end = codes + kp * GEMM_GROUP;
    const uint8_t *x1 = x + 16 * kp;
    _tile_zero(0);
    _tile_zero(1);
    if (two) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (; codes < end; codes += QGEMM_STEP_BYTES, x += QGEMM_KSTEP, x1 += QGEMM_KSTEP) {
        const int lines = QGEMM_STEP_BYTES / 64 / (two ? 4 : 2);
        const char *next = (const char *)codes + QGEMM_STEP_BYTES;
        _tile_loadd(6, codes, PITCH_W);
        _tile_loadd(7, codes + GEMM_TILE_BYTES, PITCH_W);
        _tile_loadd(4, x, kp);
        if (two) _tile_loadd(5, x1, kp);
        _tile_dpbusd(0, 4, 6);
        fetch_between(next, lines, prefetch);
        _tile_dpbusd(1, 4, 7);
        fetch_between(next + lines * 64, lines, prefetch);
        if (two) {
            _tile_dpbusd(2, 5, 6);
            fetch_between(next + lines * 128, lines, prefetch);
            _tile_dpbusd(3, 5, 7);
            fetch_between(next + lines * 192, lines, prefetch);
        }
    }
    _tile_stored(0, sums, PITCH_SUM);
    _tile_stored(1, sums + 16, PITCH_SUM);
    if (two) {
        _tile_stored(2, sums + 16 * GEMM_GROUP, PITCH_SUM);
        _tile_stored(3, sums + 16 * GEMM_GROUP + 16, PITCH_SUM);
    }
}

/* One group times the rows [m0, m0 + m) in blocks of `rows`, the last of which may begin inside its
 * predecessor. Meanwhile the group `then_g` is fetched. */
OCTAVO_INLINE void group_times_rows(const qgemm_call *call, int64_t g, int64_t then_g, int64_t m0,
                                    int64_t m, int rows, int8_t *buffer, pending *p,
                                    const int two) {
    const int64_t kp = call->w->w.kp, blocks = (m + rows - 1) / rows;
    const int64_t products = blocks * (kp / QGEMM_KSTEP) * (two ? 4 : 2);
    qgemm_prefetch prefetch = prefetch_of(call->w, then_g, products, m);
    const int8_t *codes = octavo_qgemm_codes(call->w, g, buffer);
    for (int64_t done = 0; done < m; done += rows) {
        const int64_t start = done + rows > m ? m - rows : done;
        multiply(call->x + (m0 + start) * kp, kp, codes, &prefetch, p->sums[!p->current], two);
        finish_pending(call, p, &prefetch);
        p->current = !p->current;
        p->codes = codes;
        p->g = g, p->m = m0 + start, p->row = (int)(done - start), p->rows = rows;
    }
}

void octavo_qgemm_amx(const qgemm_call *call, int64_t g0, int64_t g1, int64_t then_g, int64_t m0,
                      int64_t m1, int8_t *buffer) {
    const int64_t kp = call->w->w.kp, chunk = gemm_chunk_rows(m1 - m0, kp, X_BYTES);
    pending p;
    p.current = p.row = p.rows = 0;
    p.codes = NULL;
    p.g = g0, p.m = m0;
    for (int64_t c0 = m0; c0 < m1; c0 += chunk) {
        const int64_t m = c0 + chunk < m1 ? chunk : m1 - c0;
        const int64_t blocks = (m + BLOCK_ROWS - 1) / BLOCK_ROWS;
        const int rows = (int)((m + blocks - 1) / blocks);
        configure(rows);
        for (int64_t g = g0; g < g1; ++g) {
            const int64_t then = g + 1 < g1 ? g + 1 : c0 + chunk < m1 ? g0 : then_g;
            /* unpacked in turns: the block that waits still needs the codes of its group */
            int8_t *to = buffer && p.codes == buffer ? buffer + kp * GEMM_GROUP : buffer;
            if (rows > 16)
                group_times_rows(call, g, then, c0, m, rows, to, &p, 1);
            else
                group_times_rows(call, g, then, c0, m, rows, to, &p, 0);
        }
    }
    qgemm_prefetch none = {NULL, NULL, 0, 0};
    finish_pending(call, &p, &none);
    _tile_release();
}

OCTAVO_TARGET_END
#else

void octavo_qgemm_amx(const qgemm_call *call, int64_t g0, int64_t g1, int64_t then_g, int64_t m0,
                      int64_t m1, int8_t *buffer) {
    (void)call, (void)g0, (void)g1, (void)then_g, (void)m0, (void)m1, (void)buffer;
}

#endif
