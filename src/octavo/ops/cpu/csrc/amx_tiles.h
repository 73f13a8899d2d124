/* What the products of blocks on AMX tiles, bf16 and quantized, have in common: 32 x 32 sums.
 * Included after <string.h> and OCTAVO_TARGET_BEGIN. Tiles: 0-3 sums (row half * 2 + column half), 4-5 rows of x,
 * 6-7 columns of W. */
#pragma once

enum {
    BLOCK_ROWS = 32,
    X_BYTES = 1 << 20, /* of the 2 MiB of L2 that CPUs with AMX have */
    PITCH_W = 64,      /* bytes from row to row of a tile of W */
    PITCH_SUM = 128,   /* and of a block of sums */
};

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t colsb[16];
    uint8_t rows[16];
} __attribute__((aligned(64))) tile_config;

/* Shapes the tiles for blocks of `rows` rows, 1 to 32. */
static void configure(int rows) {
    tile_config cfg;
    memset(&cfg, 0, sizeof cfg);
    cfg.palette = 1;
    const int first = rows < 16 ? rows : 16, second = rows > 16 ? rows - 16 : 1;
    for (int t = 0; t < 8; ++t) cfg.colsb[t] = 64;
    cfg.rows[0] = cfg.rows[1] = cfg.rows[4] = (uint8_t)first;
    cfg.rows[2] = cfg.rows[3] = cfg.rows[5] = (uint8_t)second;
    cfg.rows[6] = cfg.rows[7] = 16;
    __asm__ volatile("ldtilecfg %0" ::"m"(cfg)); /* _tile_loadconfig names 8 of the 64 bytes */
}
