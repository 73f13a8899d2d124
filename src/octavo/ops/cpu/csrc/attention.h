/* Paged attention: what the driver (attention.c) hands to an instruction set's kernel.
 *
 * The cache is [num_blocks, num_layers, planes, num_kv_heads, block_size, head_dim], the planes
 * being keys and values, or one whose numbers from value_offset on are values; a task is one
 * (sequence, tile of query tokens, kv head). Its rows are query tokens x the query heads that
 * share the kv head: row r is token r / group, head r % group. For row q at position t over the
 * positions j of its window,
 *
 *     s_j = scale q.k_j,   out = sum_j exp(s_j - m) v_j / sum_j exp(s_j - m),   m = max_j s_j
 *
 * where a soft cap c makes s_j = c tanh(scale q.k_j / c) and ALiBi adds slope (j - t); computed
 * online over tiles of ATTN_TILE tokens. Positions are cut at multiples of ATTN_CHUNK;
 * every chunk starts from an empty state and chunks are merged in order. So a row's result does
 * not depend on which threads computed its chunks nor on what else was in the batch.
 *
 * An int8 cache holds codes, and a float16 scale for each token's key and value of each head.
 * Codes are widened while a tile is staged (to bf16 where that is what is multiplied: it holds
 * them exactly); a key's scale multiplies its scores, a value's scale its probabilities.
 */
#ifndef OCTAVO_ATTENTION_H
#define OCTAVO_ATTENTION_H

#include "octavo_cpu.h"

enum {
    ATTN_TILE = 32,   /* tokens whose keys and values are staged at once */
    ATTN_CHUNK = 256, /* tokens between merges; a multiple of ATTN_TILE */
    ATTN_AHEAD = 32,  /* tokens between a tile and what is fetched meanwhile */
    ATTN_ROWS = 64,   /* rows a task aims at */
    ATTN_MAX_DIM = 1024,
};

/* An empty state's maximum: finite, so that differences of two are not NaN. */
#define ATTN_EMPTY (-1e30f)
#define ATTN_LOG2E 1.4426950408889634f

/* Arguments of octavo_paged_attention, in elements and C order; mirrored in attention.py. */
struct attn_args {
    void *out;
    const void *query;
    const void *kv_cache;
    const int32_t *block_tables;
    const int32_t *seq_lens;
    const int32_t *query_start_loc;
    const float *alibi;        /* [num_heads] slopes, or null */
    const uint16_t *kv_scales; /* float16 [num_blocks, ... block_size] of an int8 cache, or null */
    int64_t out_stride, query_stride; /* between tokens */
    int64_t table_stride;             /* between sequences */
    int64_t num_blocks, block_stride; /* block_stride: between blocks of the cache */
    int64_t key_offset, value_offset; /* of the layer's first key and value in a block */
    int64_t scale_stride, key_scale_offset, value_scale_offset; /* the same of kv_scales */
    int32_t num_tokens, num_seqs, max_blocks;
    int32_t num_heads, num_kv_heads, head_dim, value_dim, block_size;
    int32_t sliding_window, dtype, kv_dtype, num_threads; /* kv_dtype: dtype or OCTAVO_I8 */
    float scale, soft_cap;
};

struct attn_task {
    const struct attn_args *args;
    const int32_t *table;       /* the sequence's block ids */
    const char *key, *value;    /* of this layer and head in block 0 */
    const uint16_t *key_scale, *value_scale; /* likewise, of an int8 cache */
    const float *slopes;        /* of this head's query heads, or null */
    const char *query;          /* of the first row */
    char *out;
    int64_t block_bytes, row_bytes, query_token_bytes, out_token_bytes;
    int32_t num_rows, group;
    int32_t first_pos;          /* position of the first query token */
    int32_t padded_dim;         /* floats of one accumulator row */
    int32_t window;             /* INT32_MAX: none */
    int32_t adjusts;            /* whether there are a soft cap or slopes */
    int32_t special;            /* whether there are those, or scales */
    int32_t lo, hi;             /* positions that the rows attend to, together */
    const struct attn_task *next; /* what this thread does afterwards, or null */
};

/* Scratch of one thread, carved from one allocation of make_scratch(). */
struct attn_scratch {
    const char *key_rows[ATTN_TILE], *value_rows[ATTN_TILE]; /* of this tile */
    /* of this tile of an int8 cache */
    float key_scales[ATTN_TILE] __attribute__((aligned(64)));
    float value_scales[ATTN_TILE] __attribute__((aligned(64)));
    float *query;        /* [rows][head_dim], in the type the kernel multiplies */
    float *keys;         /* staged tile, transposed: [head_dim][ATTN_TILE], or pairs of bf16 */
    float *values;       /* staged tile: [ATTN_TILE][padded_dim], or pairs of bf16 */
    float *wide;         /* [ATTN_TILE][head_dim, padded] keys as float before transposing; or
                            keys of an int8 cache as bf16 */
    float *scores;       /* [rows][ATTN_TILE] */
    float *probs;        /* [rows][ATTN_TILE] bf16 kernel only; else written over scores */
    float *lane_sums;    /* [rows][16] */
    float *factors;      /* [rows] what the maximum's growth leaves of older sums */
};

/* State of the rows over some of the positions: maximum (in log2 units), sum, weighted values. */
struct attn_state {
    float *max, *sum, *acc; /* [rows], [rows], [rows][padded_dim] */
};

/* One instruction set's kernel. begin prepares the query once; chunk computes the state over
 * [lo, hi), which lies within one chunk; merge adds a later chunk's state to that of the earlier
 * ones; finish writes acc / sum to the output rows. */
struct attn_kernel {
    void (*begin)(const struct attn_task *, struct attn_scratch *);
    void (*chunk)(const struct attn_task *, struct attn_scratch *, int lo, int hi,
                  struct attn_state);
    void (*merge)(const struct attn_task *, struct attn_state into, struct attn_state other);
    void (*finish)(const struct attn_task *, struct attn_state);
    void (*leave)(void); /* or null: called once by a thread after its last task */
    int dim_multiple;    /* of padded_dim */
};

static const int32_t attn_iota[ATTN_TILE] __attribute__((aligned(64), unused)) = {
    0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15,
    16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31};

/* Addresses of the keys and values of tokens [start, start + ATTN_TILE). Those outside [lo, hi)
 * may be unwritten or in blocks that were given back, so they read zeros instead. */
static void attn_gather(const struct attn_task *task, int start, int lo, int hi,
                        const char **keys, const char **values) {
    static const char zeros[ATTN_MAX_DIM * 4] __attribute__((aligned(64)));
    const int block_size = task->args->block_size;
    int i = 0;
    for (; start + i < lo; i++) keys[i] = values[i] = zeros;
    int block = (start + i) / block_size, slot = (start + i) % block_size;
    while (i < ATTN_TILE && start + i < hi) {
        const int64_t base = task->table[block] * task->block_bytes;
        for (; slot < block_size && i < ATTN_TILE && start + i < hi; slot++, i++) {
            keys[i] = task->key + base + slot * task->row_bytes;
            values[i] = task->value + base + slot * task->row_bytes;
        }
        block++;
        slot = 0;
    }
    for (; i < ATTN_TILE; i++) keys[i] = values[i] = zeros;
}

/* The scales of the same tokens of an int8 cache; 0 outside [lo, hi). */
static void attn_gather_scales(const struct attn_task *task, int start, int lo, int hi,
                               uint16_t *keys, uint16_t *values) {
    const int block_size = task->args->block_size;
    int at = start > lo ? start : lo;
    const int end = start + ATTN_TILE < hi ? start + ATTN_TILE : hi;
    if (end - at < ATTN_TILE) {
        __builtin_memset(keys, 0, 2 * ATTN_TILE);
        __builtin_memset(values, 0, 2 * ATTN_TILE);
    }
    while (at < end) {
        const int slot = at % block_size;
        const int count = block_size - slot < end - at ? block_size - slot : end - at;
        const int64_t base = task->table[at / block_size] * task->args->scale_stride + slot;
        __builtin_memcpy(keys + at - start, task->key_scale + base, (size_t)count * 2);
        __builtin_memcpy(values + at - start, task->value_scale + base, (size_t)count * 2);
        at += count;
    }
}

/* Fetches those of the task's next tile. */
static void attn_prefetch_scales(const struct attn_task *task, int start) {
    const int block_size = task->args->block_size;
    const int end = start + 2 * ATTN_TILE < task->hi ? start + 2 * ATTN_TILE : task->hi;
    for (int at = start + ATTN_TILE; at < end; at += block_size - at % block_size) {
        const int64_t base = task->table[at / block_size] * task->args->scale_stride;
        __builtin_prefetch(task->key_scale + base + at % block_size);
        __builtin_prefetch(task->value_scale + base + at % block_size);
    }
}

/* Fetches the keys and values of half a tile, `ahead` tokens after token start of the task, or
 * from the beginning of the next task if this one ends before. Misses dominate decoding, and the
 * hardware cannot guess the next block. Two calls a tile, because a core tracks few misses. */
static void attn_prefetch(const struct attn_task *task, int start, int ahead, int half) {
    start += ahead;
    if (start >= task->hi) {
        start -= (task->hi + ATTN_TILE - 1) / ATTN_TILE * ATTN_TILE;
        task = task->next;
        if (!task) return;
        start += task->lo / ATTN_TILE * ATTN_TILE;
    }
    start += half * (ATTN_TILE / 2);
    const int block_size = task->args->block_size;
    int end = start + ATTN_TILE / 2;
    if (end > task->hi) end = task->hi;
    if (start < task->lo) start = task->lo;
    while (start < end) {
        const int slot = start % block_size;
        int count = block_size - slot;
        if (count > end - start) count = end - start;
        const int64_t offset = task->table[start / block_size] * task->block_bytes +
                               slot * task->row_bytes;
        for (int64_t line = 0; line < count * task->row_bytes; line += 64) {
            __builtin_prefetch(task->key + offset + line);
            __builtin_prefetch(task->value + offset + line);
        }
        start += count;
    }
}

/* Row pointer r of the task's query or output. */
OCTAVO_INLINE const char *attn_query_row(const struct attn_task *t, int r, int element_bytes) {
    return t->query + r / t->group * t->query_token_bytes +
           (int64_t)(r % t->group) * t->args->head_dim * element_bytes;
}

OCTAVO_INLINE char *attn_out_row(const struct attn_task *t, int r, int element_bytes) {
    return t->out + r / t->group * t->out_token_bytes +
           (int64_t)(r % t->group) * t->args->value_dim * element_bytes;
}

/* The positions row r attends to: [*lo, *hi). */
OCTAVO_INLINE void attn_row_range(const struct attn_task *t, int r, int *lo, int *hi) {
    *hi = t->first_pos + r / t->group + 1;
    *lo = *hi > t->window ? *hi - t->window : 0;
}

#endif
