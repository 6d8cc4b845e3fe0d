/* Vectors of LANES floats, as GCC and Clang lower them to what the processor has. */

#ifndef KEDGE_VECTORS_H
#define KEDGE_VECTORS_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif

/* Vector registers: how much of a product a loop can hold. */
#if defined(__AVX512F__) || defined(__aarch64__)
#define REGISTERS 32
#else
#define REGISTERS 16
#endif

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("GCC unroll 16")
#define PADDED(count) (((count) + LANES - 1) / LANES * LANES)

typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Shorts __attribute__((vector_size(2 * LANES)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Ints){__VA_ARGS__})
#endif

INLINE Floats load(const float *from) {
    Floats value;
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE void store(float *to, Floats value) { memcpy(to, &value, sizeof value); }

/* The first `count` lanes; the others are zero. */
INLINE Floats load_some(const float *from, int count) {
    if (count >= LANES) return load(from);
    Floats value = {0};
    memcpy(&value, from, (size_t)count * sizeof(float));
    return value;
}

INLINE void store_some(float *to, Floats value, int count) {
    memcpy(to, &value, (size_t)(count < LANES ? count : LANES) * sizeof(float));
}

INLINE Shorts shorts_at(const uint16_t *from) {
    Shorts value;
    memcpy(&value, from, sizeof value);
    return value;
}

/* Numbers of float16. */
INLINE Floats widened(Shorts halves) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps((__m256i)halves);
#elif defined(__F16C__)
    return (Floats)_mm256_cvtph_ps((__m128i)halves);
#elif defined(__aarch64__)
    typedef __fp16 Halves __attribute__((vector_size(2 * LANES)));
    return __builtin_convertvector((Halves)halves, Floats);
#else
#error "no float16 here"
#endif
}

INLINE Floats every(float value) { return value - (Floats){0}; }

/* A product that is rounded: what is added to it is not fused with it, wherever the compiler moves the sum. */
INLINE Floats rounded(Floats product) {
#if defined(__x86_64__)
    __asm__("" : "+v"(product));
#elif defined(__aarch64__)
    __asm__("" : "+w"(product));
#endif
    return product;
}

INLINE Floats choose(Ints mask, Floats yes, Floats no) {
    return (Floats)((mask & (Ints)yes) | (~mask & (Ints)no));
}

INLINE Floats larger(Floats a, Floats b) { return choose(a > b, a, b); }

INLINE Floats smaller(Floats a, Floats b) { return choose(a < b, a, b); }

INLINE float total(Floats value) {
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += value[lane];
    return sum;
}

INLINE float largest(Floats value) {
    float most = value[0];
    for (int lane = 1; lane < LANES; lane++) most = value[lane] > most ? value[lane] : most;
    return most;
}

/* e^x to within two units in the last place; 0 below the smallest normal number, -INFINITY included. Cody and Waite's
   reduction and the polynomial of Moshier's Cephes library. */
INLINE Floats exponential(Floats x) {
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    Ints vanishes = x < -87.3365f;
    x = choose(vanishes, every(0), choose(x > 88.3762f, every(88.3762f), x));
    Floats shifted = x * 1.44269504f + shift;
    Floats power = shifted - shift;
    Floats rest = x - power * 0.693359375f;
    rest = rest - power * -2.12194440e-4f;
    Floats sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1.0f;
    Floats scale = (Floats)(((Ints)shifted - (Ints)every(shift) + 127) << 23);
    return choose(vanishes, every(0), sum * scale);
}

/* silu(gate) * up */
INLINE Floats silu_mul(Floats gate, Floats up) { return gate / (1.0f + exponential(-gate)) * up; }

/* To bfloat16, to the nearest, ties to even. Not for NaN. */
INLINE uint16_t round_to_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

#endif
