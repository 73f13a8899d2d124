/* Which instruction set this process may use, and what this library was built from. */
#if defined(__linux__)
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "octavo_cpu.h"

#ifndef OCTAVO_SOURCE_HASH
#define OCTAVO_SOURCE_HASH "unknown"
#endif

#if OCTAVO_X86
#include <cpuid.h>

/* AMX state is off until the process asks the kernel for it, once for all its threads. */
static int permit_amx(void) {
#if defined(__linux__)
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return 0;
#endif
}

static int has_amx(void) {
    unsigned a, b, c, d, xcr0, high;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    if (!(d & (1u << 22)) || !(d & (1u << 24))) return 0;
    __asm__ volatile("xgetbv" : "=a"(xcr0), "=d"(high) : "c"(0));
    return (xcr0 & (3u << 17)) == (3u << 17) && permit_amx();
}

/* Compilers differ in the name that __builtin_cpu_supports takes for it, so ask cpuid. */
static int has_avx512_bf16(void) {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 5));
}

static int detect(void) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma"))
        return OCTAVO_ISA_PLAIN;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return OCTAVO_ISA_AVX2;
    if (!OCTAVO_BUILDS_AVX512_BF16 || !has_avx512_bf16()) return OCTAVO_ISA_AVX512;
    return OCTAVO_BUILDS_AMX && has_amx() ? OCTAVO_ISA_AMX : OCTAVO_ISA_AVX512_BF16;
}
#else
static int detect(void) { return OCTAVO_ISA_PLAIN; }
#endif

static int best = -1;
static int current = -1;

static int best_isa(void) {
    if (best < 0) best = detect();
    return best;
}

int octavo_isa(void) {
    if (current < 0) current = best_isa();
    return current;
}

OCTAVO_EXPORT int octavo_get_isa(void) { return octavo_isa(); }

/* Lowers the level (for tests and comparisons); never above what the machine has. */
OCTAVO_EXPORT int octavo_set_isa(int level) {
    int top = best_isa();
    current = level < 0 || level > top ? top : level;
    return current;
}

OCTAVO_EXPORT const char *octavo_source_hash(void) { return OCTAVO_SOURCE_HASH; }
