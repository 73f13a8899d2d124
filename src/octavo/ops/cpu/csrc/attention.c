/* Paged attention over a flat batch of sequences: checks, work list, threads, merging.
 * attention.h has the formula; attention_tile.h and attention_bf16.h the kernels. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "attention.h"
#if OCTAVO_X86
#include <immintrin.h>
#endif

#define VW 4
#define SUFFIX plain
#include "vec.h"
#include "attention_tile.h"
#include "vec_end.h"

#if OCTAVO_X86
OCTAVO_TARGET_BEGIN(OCTAVO_FEATURES_AVX2)
#define VW 8
#define SUFFIX avx2
#include "vec.h"
#include "attention_tile.h"
#include "vec_end.h"
OCTAVO_TARGET_END

OCTAVO_TARGET_BEGIN(OCTAVO_FEATURES_AVX512)
#define VW 16
#define SUFFIX avx512
#include "vec.h"
#include "attention_tile.h"
#include "vec_end.h"
OCTAVO_TARGET_END

#if OCTAVO_BUILDS_AVX512_BF16
OCTAVO_TARGET_BEGIN(OCTAVO_FEATURES_AVX512_BF16)
#define VW 16
#define SUFFIX avx512_bf16
#include "vec.h"
#include "attention_bf16.h"
#include "vec_end.h"
OCTAVO_TARGET_END
#endif

#if OCTAVO_BUILDS_AMX
OCTAVO_TARGET_BEGIN(OCTAVO_FEATURES_AMX)
#define VW 16
#define SUFFIX amx
#include "vec.h"
#include "attention_amx.h"
#include "vec_end.h"
OCTAVO_TARGET_END
#endif
#endif

static const struct attn_kernel *pick_kernel(const struct attn_args *a) {
#if OCTAVO_X86
    const int isa = octavo_isa();
#if OCTAVO_BUILDS_AMX
    if (isa >= OCTAVO_ISA_AMX && a->dtype == OCTAVO_BF16 && a->head_dim % 32 == 0)
        return &amx_kernel;
#endif
#if OCTAVO_BUILDS_AVX512_BF16
    if (isa >= OCTAVO_ISA_AVX512_BF16 && a->dtype == OCTAVO_BF16 && a->head_dim % 8 == 0)
        return &bf16_kernel;
#endif
    if (isa >= OCTAVO_ISA_AVX512) return &attn_kernel_avx512;
    if (isa >= OCTAVO_ISA_AVX2) return &attn_kernel_avx2;
#endif
    (void)a;
    return &attn_kernel_plain;
}

/* One entry is worked on once per kv head: a tile of query tokens over a range of chunks. */
struct entry {
    int32_t seq, first_token, num_tokens; /* tokens of the flat batch */
    int32_t first_pos;
    int32_t first_chunk, end_chunk;
    int64_t cost;
};

struct job {
    const struct attn_args *args;
    const struct attn_kernel *kernel;
    struct entry *entries;
    int64_t num_entries, num_tiles;
    int32_t tile_tokens, max_rows, padded_dim;
    int split;       /* every entry is one chunk, its state is kept in partials */
    float *partials; /* [entry][kv head][max_rows (padded_dim + 2)] */
    int64_t *tiles;  /* [num_tiles + 1] first entry of each tile, when split */
    int64_t next;    /* atomic: the next unit of work, an (entry, kv head) */
    int64_t grain;   /* units that a thread takes at once */
    int failed;      /* atomic: a thread had no memory */
};

static int ceil_div(int a, int b) { return (a + b - 1) / b; }

/* The positions that the rows of an entry's tile attend to, together. */
static void tile_range(const struct attn_args *a, const struct entry *e, int *lo, int *hi) {
    *hi = e->first_pos + e->num_tokens;
    *lo = a->sliding_window > 0 && e->first_pos + 1 > a->sliding_window
              ? e->first_pos + 1 - a->sliding_window
              : 0;
}

enum { OK = 0, BAD_QUERY_START = 1, BAD_SEQ_LEN = 2, BAD_BLOCK = 3, NO_MEMORY = 4 };

/* OK, or what is wrong with *seq. */
static int check(const struct attn_args *a, int *seq) {
    const int window = a->sliding_window;
    if (a->query_start_loc[0] != 0) return BAD_QUERY_START;
    for (int s = 0; s < a->num_seqs; s++) {
        const int num_query = a->query_start_loc[s + 1] - a->query_start_loc[s];
        const int len = a->seq_lens[s], first = len - num_query + 1;
        *seq = s;
        if (num_query < 0 || a->query_start_loc[s + 1] > a->num_tokens) return BAD_QUERY_START;
        if (len < num_query || len > (int64_t)a->max_blocks * a->block_size) return BAD_SEQ_LEN;
        if (num_query == 0) continue;
        const int lo = window > 0 && first > window ? first - window : 0;
        const int32_t *table = a->block_tables + s * a->table_stride;
        for (int b = lo / a->block_size; b < ceil_div(len, a->block_size); b++)
            if (table[b] < 0 || table[b] >= a->num_blocks) return BAD_BLOCK;
    }
    return OK;
}

static int by_cost(const void *x, const void *y) {
    const int64_t a = ((const struct entry *)x)->cost, b = ((const struct entry *)y)->cost;
    return (a < b) - (a > b); /* longest first */
}

/* Fills job->entries. Returns 0 without memory. */
static int plan(struct job *job) {
    const struct attn_args *a = job->args;
    const int group = a->num_heads / a->num_kv_heads;
    const int tokens = job->tile_tokens = ATTN_ROWS / group > 0 ? ATTN_ROWS / group : 1;
    int64_t num_tiles = 0, num_chunks = 0;
    int widest = 1;
    for (int s = 0; s < a->num_seqs; s++) {
        const int n = a->query_start_loc[s + 1] - a->query_start_loc[s];
        if (n > widest) widest = n;
        num_tiles += ceil_div(n, tokens);
        num_chunks += (int64_t)ceil_div(n, tokens) * ceil_div(a->seq_lens[s], ATTN_CHUNK);
    }
    /* a multiple of 16 keeps the pieces of a state on cache lines */
    job->max_rows = ceil_div((widest < tokens ? widest : tokens) * group, 16) * 16;
    /* Few tiles and long contexts: share a tile's chunks among the threads, reduce afterwards. */
    job->split = a->num_threads > 1 && num_tiles * a->num_kv_heads < 2 * a->num_threads &&
                 num_chunks > num_tiles;
    job->entries = malloc((size_t)(job->split ? num_chunks : num_tiles + 1) * sizeof(struct entry));
    job->tiles = job->split ? malloc((size_t)(num_tiles + 1) * sizeof(int64_t)) : NULL;
    if (!job->entries || (job->split && !job->tiles)) return 0;

    int64_t n = 0, tile = 0;
    for (int s = 0; s < a->num_seqs; s++) {
        const int first = a->query_start_loc[s], end = a->query_start_loc[s + 1];
        for (int token = first; token < end; token += tokens) {
            struct entry e = {.seq = s, .first_token = token};
            e.num_tokens = end - token < tokens ? end - token : tokens;
            e.first_pos = a->seq_lens[s] - (end - token);
            int lo, hi;
            tile_range(a, &e, &lo, &hi);
            e.cost = (int64_t)(hi - lo) * (e.num_tokens * group + 4);
            e.first_chunk = lo / ATTN_CHUNK;
            e.end_chunk = ceil_div(hi, ATTN_CHUNK);
            if (job->split) {
                job->tiles[tile++] = n;
                for (int c = e.first_chunk, last = e.end_chunk; c < last; c++) {
                    e.first_chunk = c;
                    e.end_chunk = c + 1;
                    job->entries[n++] = e;
                }
            } else {
                job->entries[n++] = e;
            }
        }
    }
    if (job->split) job->tiles[tile] = n;
    job->num_entries = n;
    job->num_tiles = tile;
    if (a->num_threads > 1 && !job->split)
        qsort(job->entries, (size_t)n, sizeof(struct entry), by_cost);
    return 1;
}

static struct attn_task make_task(const struct job *job, const struct entry *e, int head) {
    const struct attn_args *a = job->args;
    const int bytes = a->dtype == OCTAVO_F32 ? 4 : 2;
    const int kv_bytes = a->kv_dtype == OCTAVO_I8 ? 1 : bytes;
    const int group = a->num_heads / a->num_kv_heads;
    const int64_t head_elements = (int64_t)a->block_size * a->head_dim * head;
    const int64_t first = (int64_t)head * group; /* query head */
    const int64_t head_scales = (int64_t)a->block_size * head;
    int lo, hi;
    tile_range(a, e, &lo, &hi);
    if (job->split) { /* this entry's chunk only */
        lo = lo > e->first_chunk * ATTN_CHUNK ? lo : e->first_chunk * ATTN_CHUNK;
        hi = hi < e->end_chunk * ATTN_CHUNK ? hi : e->end_chunk * ATTN_CHUNK;
    }
    return (struct attn_task){
        .lo = lo,
        .hi = hi,
        .args = a,
        .table = a->block_tables + e->seq * a->table_stride,
        .key = (const char *)a->kv_cache + (a->key_offset + head_elements) * kv_bytes,
        .value = (const char *)a->kv_cache + (a->value_offset + head_elements) * kv_bytes,
        .key_scale = a->kv_scales ? a->kv_scales + a->key_scale_offset + head_scales : NULL,
        .value_scale = a->kv_scales ? a->kv_scales + a->value_scale_offset + head_scales : NULL,
        .slopes = a->alibi ? a->alibi + first : NULL,
        .adjusts = a->alibi || a->soft_cap > 0,
        .special = a->alibi || a->soft_cap > 0 || a->kv_scales,
        .query = (const char *)a->query +
                 (e->first_token * a->query_stride + first * a->head_dim) * bytes,
        .out = (char *)a->out + (e->first_token * a->out_stride + first * a->value_dim) * bytes,
        .block_bytes = a->block_stride * kv_bytes,
        .row_bytes = (int64_t)a->head_dim * kv_bytes,
        .query_token_bytes = a->query_stride * bytes,
        .out_token_bytes = a->out_stride * bytes,
        .num_rows = e->num_tokens * group,
        .group = group,
        .first_pos = e->first_pos,
        .padded_dim = job->padded_dim,
        .window = a->sliding_window > 0 ? a->sliding_window : INT32_MAX,
    };
}

static int64_t state_floats(const struct job *job) {
    return (int64_t)job->max_rows * (job->padded_dim + 2);
}

static struct attn_state state_at(const struct job *job, float *base) {
    return (struct attn_state){base, base + job->max_rows, base + 2 * job->max_rows};
}

/* One thread's memory: two states and the scratch. All pieces are multiples of 64 bytes. */
static char *make_scratch(const struct job *job, struct attn_scratch *s, float **states) {
    const size_t rows = (size_t)job->max_rows, dim = (size_t)job->args->head_dim;
    const size_t padded = (size_t)job->padded_dim, wide = (dim + 31) / 32 * 32;
    float **pieces[] = {&states[0],  &states[1], &s->query,     &s->keys,   &s->values, &s->wide,
                        &s->scores, &s->probs,  &s->lane_sums, &s->factors};
    const size_t floats[] = {rows * (padded + 2), rows * (padded + 2), rows * dim,
                             dim * ATTN_TILE,     padded * ATTN_TILE,  wide * ATTN_TILE,
                             rows * ATTN_TILE,    rows * ATTN_TILE,    rows * 16,
                             rows};
    size_t total = 64, offsets[sizeof(floats) / sizeof(*floats)];
    for (size_t i = 0; i < sizeof(floats) / sizeof(*floats); i++) {
        offsets[i] = total;
        total += (floats[i] * 4 + 63) / 64 * 64;
    }
    char *memory = malloc(total);
    if (!memory) return NULL;
    char *aligned = memory + (64 - (uintptr_t)memory % 64) % 64;
    for (size_t i = 0; i < sizeof(floats) / sizeof(*floats); i++)
        *pieces[i] = (float *)(aligned + offsets[i] - 64);
    return memory;
}

/* A thread's share of the units that it has not begun. */
struct share {
    int64_t at, end;
};

/* Takes the next unit of work: its number, or -1 when there is none left. */
static int64_t take(struct job *job, struct share *share, struct attn_task *task) {
    const int heads = job->args->num_kv_heads;
    if (share->at == share->end) {
        share->at = __atomic_fetch_add(&job->next, job->grain, __ATOMIC_RELAXED);
        share->end = share->at + job->grain;
    }
    const int64_t unit = share->at++;
    if (unit >= job->num_entries * heads) return -1;
    *task = make_task(job, &job->entries[unit / heads], (int)(unit % heads));
    return unit;
}

static void run_entries(void *argument) {
    struct job *job = argument;
    const struct attn_args *a = job->args;
    struct attn_scratch scratch;
    float *states[2];
    char *memory = make_scratch(job, &scratch, states);
    if (!memory) {
        __atomic_store_n(&job->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    const struct attn_state run = state_at(job, states[0]), part = state_at(job, states[1]);
    /* While much is left, take units one ahead, so that a task can fetch the next one's first
     * tile; towards the end a unit taken early would wait while other threads are idle. */
    const int64_t eager = job->num_entries * a->num_kv_heads - 2 * a->num_threads;
    struct share share = {0, 0};
    int64_t unit, following;
    struct attn_task tasks[2];
    int side = 0;
    for (unit = take(job, &share, &tasks[side]); unit >= 0; unit = following, side ^= 1) {
        const struct entry *e = &job->entries[unit / a->num_kv_heads];
        struct attn_task *task = &tasks[side];
        following = unit < eager ? take(job, &share, &tasks[!side]) : -1;
        task->next = following >= 0 ? &tasks[!side] : NULL;
        job->kernel->begin(task, &scratch);
        for (int c = e->first_chunk; c < e->end_chunk; c++) {
            const int from = c * ATTN_CHUNK > task->lo ? c * ATTN_CHUNK : task->lo;
            const int to = (c + 1) * ATTN_CHUNK < task->hi ? (c + 1) * ATTN_CHUNK : task->hi;
            struct attn_state state = c == e->first_chunk ? run : part;
            if (job->split) state = state_at(job, job->partials + unit * state_floats(job));
            job->kernel->chunk(task, &scratch, from, to, state);
            if (c != e->first_chunk) job->kernel->merge(task, run, part);
        }
        if (!job->split) job->kernel->finish(task, run);
        if (following < 0) following = take(job, &share, &tasks[!side]);
    }
    if (job->kernel->leave) job->kernel->leave();
    free(memory);
}

/* Merges the chunks of split tiles in order, exactly as run_entries does for whole tiles. */
static void reduce_tiles(void *argument) {
    struct job *job = argument;
    const int64_t heads = job->args->num_kv_heads, units = job->num_tiles * heads;
    int64_t unit;
    while ((unit = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED)) < units) {
        const int64_t tile = unit / heads, head = unit % heads, first = job->tiles[tile];
        const struct attn_task task = make_task(job, &job->entries[first], (int)head);
        const struct attn_state into =
            state_at(job, job->partials + (first * heads + head) * state_floats(job));
        for (int64_t e = first + 1; e < job->tiles[tile + 1]; e++)
            job->kernel->merge(
                &task, into,
                state_at(job, job->partials + (e * heads + head) * state_floats(job)));
        job->kernel->finish(&task, into);
    }
}

/* Returns 0, or what is wrong (the enum of check) + 8 x the sequence it is wrong about. */
OCTAVO_EXPORT int64_t octavo_paged_attention(const struct attn_args *args) {
    int bad_seq = 0;
    const int bad = check(args, &bad_seq);
    if (bad) return bad + 8 * (int64_t)bad_seq;
    struct job job = {.args = args, .kernel = pick_kernel(args)};
    const int multiple = job.kernel->dim_multiple;
    job.padded_dim = ceil_div(args->value_dim, multiple) * multiple;
    int ok = plan(&job);
    if (ok && job.split) {
        const size_t states = (size_t)(job.num_entries * args->num_kv_heads);
        job.partials = malloc(states * (size_t)state_floats(&job) * sizeof(float));
        ok = job.partials != NULL;
    }
    if (ok) {
        const int64_t units = job.num_entries * args->num_kv_heads;
        const int threads = args->num_threads;
        /* Where there is enough for all, one thread takes all heads of an entry: they lie side by
         * side in each block, so that what the processor fetched ahead is used, and the pages of
         * an entry are looked up once. */
        job.grain = job.num_entries >= 4 * threads ? args->num_kv_heads : 1;
        octavo_team(run_entries, &job, units < threads ? (int)units : threads);
        job.next = 0;
        if (job.split) octavo_team(reduce_tiles, &job, job.num_entries < 64 ? 1 : threads);
    }
    free(job.partials);
    free(job.tiles);
    free(job.entries);
    return ok && !job.failed ? OK : NO_MEMORY;
}
