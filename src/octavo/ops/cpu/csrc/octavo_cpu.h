/* Shared by the CPU kernels: instruction-set levels, target regions, thread teams.
 *
 * One library serves every machine of an architecture. Code for a higher level sits between
 * OCTAVO_TARGET_BEGIN(...) and OCTAVO_TARGET_END and runs only after octavo_isa() said so.
 */
#ifndef OCTAVO_CPU_H
#define OCTAVO_CPU_H

#include <stddef.h>
#include <stdint.h>

#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
#define OCTAVO_X86 1
#else
#define OCTAVO_X86 0
#endif

#if defined(_WIN32)
#define OCTAVO_EXPORT __declspec(dllexport)
#else
#define OCTAVO_EXPORT __attribute__((visibility("default")))
#endif

#define OCTAVO_INLINE static inline __attribute__((always_inline))

/* Levels are ordered: each includes those below it. */
enum octavo_isa_level {
    OCTAVO_ISA_PLAIN = 0,       /* what the compiler's baseline gives (SSE2, NEON) */
    OCTAVO_ISA_AVX2 = 1,        /* AVX2, FMA, F16C */
    OCTAVO_ISA_AVX512 = 2,      /* AVX512 F, BW, DQ, VL */
    OCTAVO_ISA_AVX512_BF16 = 3, /* + AVX512_BF16 */
    OCTAVO_ISA_AMX = 4,         /* + AMX_TILE and AMX_BF16, permitted by the kernel */
};

/* The level in use: the machine's best, or the lower one set by octavo_set_isa. */
int octavo_isa(void);

/* Region macros: every function defined inside is compiled for the listed features. */
#define OCTAVO_PRAGMA(x) _Pragma(#x)
#if defined(__clang__)
#define OCTAVO_TARGET_BEGIN(features) \
    OCTAVO_PRAGMA(clang attribute push(__attribute__((target(features))), apply_to = function))
#define OCTAVO_TARGET_END OCTAVO_PRAGMA(clang attribute pop)
#else
#define OCTAVO_TARGET_BEGIN(features) \
    OCTAVO_PRAGMA(GCC push_options) OCTAVO_PRAGMA(GCC target(features))
#define OCTAVO_TARGET_END OCTAVO_PRAGMA(GCC pop_options)
#endif
#define OCTAVO_FEATURES_AVX2 "avx2,fma,f16c"
#define OCTAVO_FEATURES_AVX512 "avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl"
#define OCTAVO_FEATURES_AVX512_BF16 OCTAVO_FEATURES_AVX512 ",avx512bf16"
#define OCTAVO_FEATURES_AMX OCTAVO_FEATURES_AVX512_BF16 ",amx-tile,amx-bf16"


/* What the compiler can build; octavo_isa() never goes above it. */
#if defined(__clang__)
#define OCTAVO_COMPILER(gcc, clang) (__clang_major__ >= (clang))
#else
#define OCTAVO_COMPILER(gcc, clang) (__GNUC__ >= (gcc))
#endif
#define OCTAVO_BUILDS_AVX512_BF16 (OCTAVO_X86 && OCTAVO_COMPILER(10, 9))
#define OCTAVO_BUILDS_AMX (OCTAVO_X86 && OCTAVO_COMPILER(11, 12))

/* Element types as the launchers pass them. */
enum octavo_dtype { OCTAVO_F32 = 0, OCTAVO_BF16 = 1, OCTAVO_I8 = 2 };

/* One unit of a job; see octavo_parallel. */
typedef void (*octavo_body)(void *arg, int64_t unit);

/* Calls body(arg, unit) for every unit in [0, num_units), on at most num_threads threads of which
 * the caller is one, and returns when all are done. Units are handed out in order, one at a time:
 * several for each thread let a fast one take over from a slow one. May be called from any thread;
 * a second job at the same time runs on its caller alone. */
void octavo_parallel(octavo_body body, void *arg, int64_t num_units, int num_threads);

/* Calls body(arg) num_threads times, on as many threads as are free. A body takes its work
 * from an atomic counter in arg, so that one call alone finishes it. */
void octavo_team(void (*body)(void *), void *arg, int num_threads);

#endif
