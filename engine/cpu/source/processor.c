/* Which processors this build is for. Called before anything else of it. */

#define API __attribute__((visibility("default")))

#ifndef KEDGE_SOURCES
#define KEDGE_SOURCES ""
#endif

API int kedge_runs_here(void) {
#if defined(__AVX512BF16__)
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#elif defined(__AVX512F__)
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#elif defined(__x86_64__)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return 1;
#endif
}

/* A digest of the files that this was built from. */
API const char *kedge_sources(void) { return KEDGE_SOURCES; }
