/* Quantized linear on AMX tiles: up to 32 rows of x times 32 channels of 8-bit codes. A step of 64
 * along k is four products of tiles, each of two tiles of x with each of two of W. */
#include "qgemm.h"

#if OCTAVO_X86 && defined(__linux__)
#include <immintrin.h>
#include <string.h>

OCTAVO_TARGET_BEGIN(OCTAVO_FEATURES_AMX ",amx-int8")

#include "amx_tiles.h"
#include "qgemm_store.h"

/* A block of rows times a group. Finished, it waits for its epilogue, rows of which go between the
 * products of the next block: tiles and vectors are then busy at the same time. */
typedef struct {
    __attribute__((aligned(64))) int32_t low[BLOCK_ROWS * GEMM_GROUP];
    __attribute__((aligned(64))) int32_t high[BLOCK_ROWS * GEMM_GROUP];
    qgemm_store store;
    int64_t m;
    int row, rows; /* rows [row, rows), which are y's from m + row, wait */
    int has_high;
} block;

/* What goes on meanwhile: the epilogue of the block before, and fetching the next group into L2,
 * some lines after each product, so that the stream of weights never rests. */
typedef struct {
    const qgemm_call *call;
    block *waiting;
    const char *at, *end;
    int64_t lines;
} meanwhile;

static __attribute__((noinline)) void finish_row(const qgemm_call *call, block *b) {
    const int32_t *low = b->low + b->row * GEMM_GROUP, *high = b->high + b->row * GEMM_GROUP;
    __m512i sums0 = _mm512_load_si512(low), sums1 = _mm512_load_si512(low + 16);
    if (b->has_high) {
        sums0 = _mm512_add_epi32(sums0, _mm512_slli_epi32(_mm512_load_si512(high), 8));
        sums1 = _mm512_add_epi32(sums1, _mm512_slli_epi32(_mm512_load_si512(high + 16), 8));
    }
    qgemm_store_row(&b->store, call, b->m + b->row, sums0, sums1);
    ++b->row;
}

static void finish_block(const qgemm_call *call, block *b) {
    while (b->row < b->rows) finish_row(call, b);
}

/* Fetches group g (-1: nothing) in equal shares for `products` products of tiles. */
static void fetch_group(meanwhile *also, int64_t g, int64_t products) {
    const qgemm_weight *w = also->call->w;
    const int64_t kp = w->w.kp;
    const int64_t bytes = w->bits == 8 ? kp * GEMM_GROUP : kp * QGEMM_BLOCK_BYTES / QGEMM_BLOCK;
    also->at = (const char *)w->w.data + g * bytes;
    also->end = g < 0 ? also->at : also->at + bytes;
    also->lines = (bytes / 64 + products - 1) / products;
}

/* What goes between two products. */
OCTAVO_INLINE void go_on(meanwhile *also) {
    if (also->at < also->end)
        for (int64_t i = 0; i < also->lines; ++i, also->at += 64)
            __builtin_prefetch(also->at, 0, 2);
    if (also->waiting->row < also->waiting->rows) finish_row(also->call, also->waiting);
}

/* Fetches `lines` of codes to L1. */
OCTAVO_INLINE void fetch_codes(const char *codes, const int lines) {
#pragma GCC unroll 16
    for (int i = 0; i < lines; ++i) __builtin_prefetch(codes + i * 64, 0, 3);
}

OCTAVO_INLINE void zero_tiles(const int two) {
    _tile_zero(0);
    _tile_zero(1);
    if (two) {
        _tile_zero(2);
        _tile_zero(3);
    }
}

OCTAVO_INLINE void store_tiles(int32_t *sums, const int two) {
    _tile_stored(0, sums, PITCH_SUM);
    _tile_stored(1, sums + 16, PITCH_SUM);
    if (two) {
        _tile_stored(2, sums + 16 * GEMM_GROUP, PITCH_SUM);
        _tile_stored(3, sums + 16 * GEMM_GROUP + 16, PITCH_SUM);
    }
}

/* `two`: more than 16 rows. All loads of a step come first, the rest lies between the products:
 * loads and products that follow each other closely do not overlap. */
OCTAVO_INLINE void multiply_low(const uint8_t *x, int64_t kp, const int8_t *codes, meanwhile *also,
                                int32_t *sums, const int two) {
    const int8_t *end = codes + kp * GEMM_GROUP;
    const uint8_t *x1 = x + 16 * kp;
    zero_tiles(two);
    for (; codes < end; codes += QGEMM_STEP_BYTES, x += QGEMM_KSTEP, x1 += QGEMM_KSTEP) {
        const int lines = QGEMM_STEP_BYTES / 64 / (two ? 4 : 2);
        const char *next = (const char *)codes + QGEMM_STEP_BYTES;
        _tile_loadd(6, codes, PITCH_W);
        _tile_loadd(7, codes + GEMM_TILE_BYTES, PITCH_W);
        _tile_loadd(4, x, kp);
        if (two) _tile_loadd(5, x1, kp);
        _tile_dpbusd(0, 4, 6);
        fetch_codes(next, lines);
        go_on(also);
        _tile_dpbusd(1, 4, 7);
        fetch_codes(next + lines * 64, lines);
        go_on(also);
        if (two) {
            _tile_dpbusd(2, 5, 6);
            fetch_codes(next + lines * 128, lines);
            go_on(also);
            _tile_dpbusd(3, 5, 7);
            fetch_codes(next + lines * 192, lines);
            go_on(also);
        }
    }
    store_tiles(sums, two);
}

/* The same of the high bytes; codes: those of their quads, gathered. */
OCTAVO_INLINE void multiply_high(const qgemm_high *high, const int8_t *codes, meanwhile *also,
                                 int32_t *sums, const int two) {
    const int8_t *x = high->high;
    zero_tiles(two);
    for (int32_t done = 0; done < high->count; done += QGEMM_KSTEP / 4) {
        _tile_loadd(6, codes, PITCH_W);
        _tile_loadd(7, codes + GEMM_TILE_BYTES, PITCH_W);
        _tile_loadd(4, x, QGEMM_KSTEP);
        if (two) _tile_loadd(5, x + 16 * QGEMM_KSTEP, QGEMM_KSTEP);
        _tile_dpbssd(0, 4, 6);
        go_on(also);
        _tile_dpbssd(1, 4, 7);
        go_on(also);
        if (two) {
            _tile_dpbssd(2, 5, 6);
            go_on(also);
            _tile_dpbssd(3, 5, 7);
            go_on(also);
        }
        codes += QGEMM_STEP_BYTES;
        x += BLOCK_ROWS * QGEMM_KSTEP;
    }
    store_tiles(sums, two);
}

/* The codes of the block's quads with high bytes, one behind the other. */
OCTAVO_INLINE void gather_codes(const qgemm_high *high, const int8_t *codes, int8_t *to) {
    for (int32_t i = 0; i < high->count; ++i) {
        const int8_t *from = codes + high->columns[i];
        int8_t *quad = to + i / 16 * QGEMM_STEP_BYTES + i % 16 * 64;
        _mm512_store_si512(quad, _mm512_loadu_si512(from));
        _mm512_store_si512(quad + GEMM_TILE_BYTES, _mm512_loadu_si512(from + GEMM_TILE_BYTES));
    }
}

OCTAVO_INLINE void multiply(const qgemm_call *call, const int8_t *codes, int8_t *gathered,
                            meanwhile *also, block *b, const int two) {
    const int64_t kp = call->w->w.kp;
    const qgemm_high *high = call->blocks + b->m / BLOCK_ROWS;
    b->has_high = high->count > 0;
    gather_codes(high, codes, gathered);
    multiply_low(call->x + b->m * kp, kp, codes, also, b->low, two);
    if (b->has_high) multiply_high(high, gathered, also, b->high, two);
}

void octavo_qgemm_amx(const qgemm_call *call, qgemm_work *work, int64_t range, int8_t *buffer) {
    const int64_t kp = call->w->w.kp;
    int8_t *gathered = buffer, *unpacked = buffer + kp * GEMM_GROUP;
    block blocks[2], *current = blocks, *waiting = blocks + 1;
    waiting->row = waiting->rows = 0;
    meanwhile also = {call, waiting, NULL, NULL, 0};
    configure(work->m < BLOCK_ROWS ? (int)work->m : BLOCK_ROWS);
    for (qgemm_piece p; qgemm_take(work, &range, &p);) {
        const int64_t num_blocks = (p.m1 - p.m0 + BLOCK_ROWS - 1) / BLOCK_ROWS;
        fetch_group(&also, p.then_g, num_blocks * (kp / QGEMM_KSTEP) * (p.m1 - p.m0 > 16 ? 4 : 2));
        const int8_t *codes = octavo_qgemm_codes(call->w, p.g, unpacked);
        const qgemm_store store = qgemm_store_of(call, p.g);
        for (int64_t m = p.m0; m < p.m1; m += BLOCK_ROWS) {
            current->m = m;
            current->store = store;
            also.waiting = waiting;
            if (p.m1 - m > 16)
                multiply(call, codes, gathered, &also, current, 1);
            else
                multiply(call, codes, gathered, &also, current, 0);
            finish_block(call, waiting);
            current->row = 0;
            current->rows = p.m1 - m < BLOCK_ROWS ? (int)(p.m1 - m) : BLOCK_ROWS;
            block *finished = current;
            current = waiting;
            waiting = finished;
        }
    }
    finish_block(call, waiting);
    _tile_release();
}

OCTAVO_TARGET_END
#else

void octavo_qgemm_amx(const qgemm_call *call, qgemm_work *work, int64_t range, int8_t *buffer) {
    (void)call, (void)work, (void)range, (void)buffer;
}

#endif
