/* bf16 linear on AMX tiles, for any number of rows. One row takes the same instructions as many
 * (and still runs at the speed of memory), so the bits of a row of y do not depend on the batch:
 * TDPBF16PS adds 32 products at a time to each sum, in a fixed order. */
#include "gemm.h"

#if OCTAVO_X86 && defined(__linux__)
#include <immintrin.h>
#include <string.h>

OCTAVO_TARGET_BEGIN(OCTAVO_FEATURES_AMX)

#include "amx_tiles.h"

/* Two blocks of sums: while one is multiplied, the other, finished, waits for its epilogue (read
 * back at once, the tile stores would stall it). */
typedef struct {
    __attribute__((aligned(64))) float sums[2][BLOCK_ROWS * GEMM_GROUP];
    int current;
    int64_t g, m;
    int row, rows; /* rows [row, rows) of sums[current], which are y's from m + row, wait */
} pending;

OCTAVO_INLINE void finish_pending(const gemm_call *call, const pending *p) {
    const float *sums = p->sums[p->current] + p->row * GEMM_GROUP;
    octavo_gemm_store(call, sums, p->g, p->m + p->row, p->rows - p->row);
}

/* sums [32, 32] = x group^T for the rows that the tiles are shaped for; `two`: more than 16. */
OCTAVO_INLINE void multiply(const uint16_t *x, int64_t x_stride, const char *group, int64_t kp,
                            gemm_prefetch *pf, float *sums, int two) {
    const int64_t pitch_x = x_stride * 2;
    const char *x0 = (const char *)x, *x1 = x0 + 16 * pitch_x, *end = group + kp * 64;
    _tile_zero(0);
    _tile_zero(1);
    if (two) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (; group < end; group += GEMM_STEP_BYTES, x0 += 64, x1 += 64) {
        _tile_loadd(6, group, PITCH_W);
        _tile_loadd(4, x0, pitch_x);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, group + GEMM_TILE_BYTES, PITCH_W);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
            _tile_loadd(5, x1, pitch_x);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
        gemm_prefetch_step(pf);
    }
    _tile_stored(0, sums, PITCH_SUM);
    _tile_stored(1, sums + 16, PITCH_SUM);
    if (two) {
        _tile_stored(2, sums + 16 * GEMM_GROUP, PITCH_SUM);
        _tile_stored(3, sums + 16 * GEMM_GROUP + 16, PITCH_SUM);
    }
}

/* One group times the rows [m0, m0 + m) in blocks of `rows`. One shape of the tiles serves all
 * blocks: the last may begin inside its predecessor, whose rows it computes again, to the same
 * bits, and does not store. */
OCTAVO_INLINE void group_times_rows(const gemm_call *call, int64_t g, int64_t m0, int64_t m,
                                    int rows, pending *p, int two) {
    const int64_t kp = call->w->kp, blocks = (m + rows - 1) / rows;
    const char *group = (const char *)call->w->data + g * kp * 64;
    gemm_prefetch pf = gemm_prefetch_start(group, kp, blocks);
    for (int64_t done = 0; done < m; done += rows) {
        const int64_t start = done + rows > m ? m - rows : done;
        const uint16_t *x = call->x + (m0 + start) * call->x_stride;
        multiply(x, call->x_stride, group, kp, &pf, p->sums[!p->current], two);
        finish_pending(call, p);
        p->current = !p->current;
        p->g = g, p->m = m0 + start, p->row = (int)(done - start), p->rows = rows;
    }
}

void octavo_gemm_amx(const gemm_call *call, int64_t g0, int64_t g1, int64_t m0, int64_t m1) {
    const int64_t chunk = gemm_chunk_rows(m1 - m0, call->w->kp, X_BYTES);
    pending p;
    p.current = p.row = p.rows = 0;
    p.g = g0, p.m = m0;
    for (int64_t c0 = m0; c0 < m1; c0 += chunk) {
        const int64_t m = c0 + chunk < m1 ? chunk : m1 - c0;
        const int64_t blocks = (m + BLOCK_ROWS - 1) / BLOCK_ROWS;
        const int rows = (int)((m + blocks - 1) / blocks);
        configure(rows);
        for (int64_t g = g0; g < g1; ++g) {
            if (rows > 16)
                group_times_rows(call, g, c0, m, rows, &p, 1);
            else
                group_times_rows(call, g, c0, m, rows, &p, 0);
        }
    }
    finish_pending(call, &p);
    _tile_release();
}

OCTAVO_TARGET_END
#else

void octavo_gemm_amx(const gemm_call *call, int64_t g0, int64_t g1, int64_t m0, int64_t m1) {
    (void)call, (void)g0, (void)g1, (void)m0, (void)m1;
}

#endif
