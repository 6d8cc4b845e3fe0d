/* Weights of a quantized matrix as floats: (number - zero) * scale, where a group of inputs has a zero and a scale. */

#ifndef KEDGE_QUANTIZED_H
#define KEDGE_QUANTIZED_H

#include "packed.h"

typedef struct {
    Floats scale, zero;
} Group;

/* 2^23 as a float: the last bits of such a float count in ones. */
#define ONES 0x4b000000u

/* A float8 (e4m3) whose bits stand in a float16 is 2^8 times too small. */
#define FLOAT8_IN_FLOAT16 256.0f

/* LANES bytes. Compilers make many instructions of this if they are not told which one it is. */
INLINE Words words_at(const uint8_t *from) {
#if defined(__AVX512F__)
    return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif defined(__AVX2__)
    return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
#else
    Bytes bytes;
    memcpy(&bytes, from, sizeof bytes);
    return __builtin_convertvector(bytes, Words);
#endif
}

/* The same as numbers of 16 bits with a sign. */
INLINE Shorts shorts_of_bytes(const uint8_t *from) {
#if defined(__AVX512F__)
    return (Shorts)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)from));
#elif defined(__AVX2__)
    return (Shorts)_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)from));
#else
    int8_t bytes __attribute__((vector_size(LANES)));
    memcpy(&bytes, from, sizeof bytes);
    return (Shorts)__builtin_convertvector(bytes, int16_t __attribute__((vector_size(2 * LANES))));
#endif
}

/* Float8, smaller by FLOAT8_IN_FLOAT16. Seven places up its sign is where float16 has it, and once more behind. NaN
   becomes another number. */
INLINE Floats float8_at(const uint8_t *from) { return widened(shorts_of_bytes(from) << 7 & 0xbfff); }

/* The float4 in the last four bits of each word. */
INLINE Floats float4_of(Words words) {
#if defined(__AVX512F__)
    const __m512 floats = _mm512_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, -0.0f, -0.5f, -1.0f, -1.5f, -2.0f,
                                         -3.0f, -4.0f, -6.0f);
    return (Floats)_mm512_permutexvar_ps((__m512i)words, floats);
#else
    Words sign = (words & 8) << 28;
#if defined(__AVX2__)
    const __m256 floats = _mm256_setr_ps(0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f);
    return (Floats)((Words)_mm256_permutevar8x32_ps(floats, (__m256i)words) | sign);
#else
    Ints size = (Ints)(words & 7); /* two bits of exponent, one of mantissa */
    Floats small = __builtin_convertvector(size, Floats) * 0.5f;
    return (Floats)((Words)choose(size < 2, small, (Floats)(size + 252 << 22)) | sign);
#endif
#endif
}

INLINE Group group_at(const uint8_t *head, const int format) {
    if (format == FLOAT4) return (Group){.scale = (Floats)(words_at(head) << 23)};
    Group group = {.scale = load((const float *)head)};
    if (format == FLOAT8)
        group.scale *= FLOAT8_IN_FLOAT16;
    else
        group.zero = (Floats)(words_at(head + LANES * sizeof(float)) | ONES);
    return group;
}

INLINE Floats weight_of(Words integers, Group group) { return ((Floats)(integers | ONES) - group.zero) * group.scale; }

/* The weights of two inputs. Gives where the next ones are. */
INLINE const uint8_t *two_weights(const uint8_t *at, Group group, const int format, Floats *first, Floats *second) {
    if (format == INT4) {
        Words both = words_at(at);
        *first = weight_of(both & 15, group);
        *second = weight_of(both >> 4, group);
        return at + LANES;
    }
    if (format == FLOAT4) {
        Words both = words_at(at);
        *first = float4_of(both) * group.scale;
        *second = float4_of(both >> 4) * group.scale;
        return at + LANES;
    }
    if (format == INT8) {
        *first = weight_of(words_at(at), group);
        *second = weight_of(words_at(at + LANES), group);
    } else {
        *first = float8_at(at) * group.scale;
        *second = float8_at(at + LANES) * group.scale;
    }
    return at + 2 * LANES;
}

INLINE Words rounded_bits(Floats weights) {
    Words bits = (Words)weights;
    return bits + 0x7fff + ((bits >> 16) & 1);
}

/* A block's weights as a matrix of BFLOAT16 has them (`rounds`), or one of FLOAT32. */
INLINE void unpack_block(const Matrix *matrix, const uint8_t *block, const int format, const int rounds, float *to) {
    for (int from = 0; from < matrix->inputs; from += matrix->group) {
        int count = matrix->inputs - from < matrix->group ? matrix->inputs - from : matrix->group;
        Group group = group_at(block, format);
        const uint8_t *at = block + head_bytes(format);
        for (int i = 0; i < count; i += 2) {
            Floats first, second;
            at = two_weights(at, group, format, &first, &second);
            if (rounds) {
                store(to, (Floats)(rounded_bits(first) >> 16 | (rounded_bits(second) & 0xffff0000u)));
                to += LANES;
            } else {
                store(to, first);
                store(to + LANES, second);
                to += 2 * LANES;
            }
        }
        block = at;
    }
}

#endif
