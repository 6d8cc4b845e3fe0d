/* Which builds this processor runs. Compiled for the oldest of its architecture, and asked before a build is opened. */

#define _DEFAULT_SOURCE /* syscall() */

#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

static int has_half_floats(void) { /* F16C */
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}

static int has_bfloat16(void) { /* AVX512_BF16; whether the system keeps such registers is asked with AVX-512 */
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 5 & 1);
}

/* Intel's vectors multiply pairs of bfloat16 no faster than floats (benchmarks/measured/cpu-models.md). */
static int gains_by_bfloat16(void) {
    unsigned a, b, c, d;
    return __get_cpuid(0, &a, &b, &c, &d) && b != signature_INTEL_ebx;
}

static int has_avx2(void) {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_half_floats();
}

/* AMX_BF16, AMX_TILE, and the system's leave to use the registers in this process (Linux, arch_prctl(2)). */
static int has_amx(void) {
#if defined(__linux__) && defined(SYS_arch_prctl)
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d >> 22 & 5) != 5) return 0;
    return syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return 0;
#endif
}

static int has_avx512(void) {
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

/* `variant` is a name of setup.py: whether that build, if it runs, is faster than the next one. */
__attribute__((visibility("default"))) int kedge_processor_gains(const char *variant) {
#if defined(__x86_64__)
    if (strcmp(variant, "avx512bf16") == 0) return gains_by_bfloat16();
#endif
    (void)variant;
    return 1;
}

/* Whether this processor runs it. */
__attribute__((visibility("default"))) int kedge_processor_runs(const char *variant) {
#if defined(__x86_64__)
    if (strcmp(variant, "avx2") == 0) return has_avx2();
    if (strcmp(variant, "avx512") == 0) return has_avx512();
    if (strcmp(variant, "avx512bf16") == 0) return has_avx512() && has_bfloat16();
    if (strcmp(variant, "amx") == 0) return has_avx512() && has_bfloat16() && has_amx();
#elif defined(__aarch64__)
    if (strcmp(variant, "neon") == 0) return 1;
#endif
    return 0;
}
