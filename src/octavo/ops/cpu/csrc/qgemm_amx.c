/* Quantized linear on AMX tiles: 16 rows of x, each as its high and its low bytes, times 32 channels
 * of 8-bit codes. A step of 64 along k is four TDPBUSDs for two tiles of x and two of W. */
#include "qgemm.h"

#if OCTAVO_X86 && defined(__linux__)
#include <immintrin.h>
#include <string.h>

OCTAVO_TARGET_BEGIN(OCTAVO_FEATURES_AMX ",amx-int8")

/* Tiles: 0-1 sums of the high bytes (by column half), 2-3 of the low ones, 4-5 x, 6-7 W. */
enum {
    BLOCK_ROWS = 16,
    X_BYTES = 1 << 20, /* of L2, as in gemm_amx.c */
    PITCH_W = 64,
    PITCH_SUM = 128,
};

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t colsb[16];
    uint8_t rows[16];
} __attribute__((aligned(64))) tile_config;

static void configure(int rows) {
    tile_config cfg;
    memset(&cfg, 0, sizeof cfg);
    cfg.palette = 1;
    for (int t = 0; t < 8; ++t) {
        cfg.colsb[t] = 64;
        cfg.rows[t] = t < 6 ? (uint8_t)rows : 16;
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(cfg)); /* _tile_loadconfig names 8 of the 64 bytes */
}

/* As in gemm_amx.c: a finished block waits for its epilogue while the next is multiplied. */
typedef struct {
    __attribute__((aligned(64))) int32_t high[2][BLOCK_ROWS * GEMM_GROUP];
    __attribute__((aligned(64))) int32_t low[2][BLOCK_ROWS * GEMM_GROUP];
    int current;
    int64_t g, m;
    int row, rows;
} pending;

static void finish_pending(const qgemm_call *call, const pending *p) {
    const int at = p->row * GEMM_GROUP, rows = p->rows - p->row;
    octavo_qgemm_store(call, p->high[p->current] + at, p->low[p->current] + at, p->g,
                       p->m + p->row, rows);
}

/* lines: cache lines to fetch in each step, from `next` on. */
OCTAVO_INLINE void multiply(const uint8_t *x, int64_t kp, const int8_t *codes, const char *next,
                            int lines, int32_t *high, int32_t *low) {
    const int8_t *end = codes + kp * GEMM_GROUP;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (; codes < end; codes += QGEMM_STEP_BYTES, x += QGEMM_KSTEP) {
        _tile_loadd(6, codes, PITCH_W);
        _tile_loadd(4, x, kp * 2);
        _tile_dpbusd(0, 4, 6);
        _tile_loadd(7, codes + GEMM_TILE_BYTES, PITCH_W);
        _tile_dpbusd(1, 4, 7);
        _tile_loadd(5, x + kp, kp * 2);
        _tile_dpbusd(2, 5, 6);
        _tile_dpbusd(3, 5, 7);
        for (int i = 0; i < lines; ++i, next += 64) __builtin_prefetch(next, 0, 2);
    }
    _tile_stored(0, high, PITCH_SUM);
    _tile_stored(1, high + 16, PITCH_SUM);
    _tile_stored(2, low, PITCH_SUM);
    _tile_stored(3, low + 16, PITCH_SUM);
}

/* One group times the rows [m0, m0 + m) in blocks of `rows`, the last of which may begin inside its
 * predecessor. Each block fetches its part of the next group. */
static void group_times_rows(const qgemm_call *call, int64_t g, int64_t m0, int64_t m, int rows,
                             int8_t *buffer, pending *p) {
    const int64_t kp = call->w->w.kp, blocks = (m + rows - 1) / rows;
    const int64_t bytes = call->w->bits == 8 ? kp * GEMM_GROUP : kp * QGEMM_BLOCK_BYTES / QGEMM_BLOCK;
    const char *next = (const char *)call->w->w.data + (g + 1) * bytes;
    const int64_t steps = blocks * (kp / QGEMM_KSTEP);
    const int lines = (int)((bytes / 64 + steps - 1) / steps);
    const int8_t *codes = octavo_qgemm_codes(call->w, g, buffer);
    for (int64_t done = 0; done < m; done += rows) {
        const int64_t start = done + rows > m ? m - rows : done;
        const uint8_t *x = call->x + (m0 + start) * 2 * kp;
        multiply(x, kp, codes, next, lines, p->high[!p->current], p->low[!p->current]);
        next += lines * (kp / QGEMM_KSTEP) * 64;
        finish_pending(call, p);
        p->current = !p->current;
        p->g = g, p->m = m0 + start, p->row = (int)(done - start), p->rows = rows;
    }
}

void octavo_qgemm_amx(const qgemm_call *call, int64_t g0, int64_t g1, int64_t m0, int64_t m1,
                      int8_t *buffer) {
    const int64_t chunk = gemm_chunk_rows(m1 - m0, call->w->w.kp, X_BYTES);
    pending p;
    p.current = p.row = p.rows = 0;
    p.g = g0, p.m = m0;
    for (int64_t c0 = m0; c0 < m1; c0 += chunk) {
        const int64_t m = c0 + chunk < m1 ? chunk : m1 - c0;
        const int64_t blocks = (m + BLOCK_ROWS - 1) / BLOCK_ROWS;
        const int rows = (int)((m + blocks - 1) / blocks);
        configure(rows);
        for (int64_t g = g0; g < g1; ++g) group_times_rows(call, g, c0, m, rows, buffer, &p);
    }
    finish_pending(call, &p);
    _tile_release();
}

OCTAVO_TARGET_END
#else

void octavo_qgemm_amx(const qgemm_call *call, int64_t g0, int64_t g1, int64_t m0, int64_t m1,
                      int8_t *buffer) {
    (void)call, (void)g0, (void)g1, (void)m0, (void)m1, (void)buffer;
}

#endif
