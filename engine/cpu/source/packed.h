/* How a packed matrix lies in memory (product.h says in what order). */

#ifndef KEDGE_PACKED_H
#define KEDGE_PACKED_H

#include "product.h"
#include "vectors.h"

INLINE int blocks_of(const Matrix *matrix) { return PADDED(matrix->outputs) / LANES; }

INLINE int half_blocks(const Matrix *matrix) { return PADDED(matrix->outputs / 2) / LANES; }

/* Blocks as they are packed, always an even number: a paired matrix pads both its halves, another is padded itself. */
INLINE int packed_blocks(const Matrix *matrix) {
    return matrix->paired ? 2 * half_blocks(matrix) : (blocks_of(matrix) + 1) / 2 * 2;
}

INLINE int is_quantized(const Matrix *matrix) { return matrix->group > 0; }

/* A group begins with its scales and zeros. */
INLINE size_t head_bytes(const int format) { return format == FLOAT4 ? LANES : LANES * sizeof(float) + LANES; }

INLINE int is_halves(const int format) { return format == INT4 || format == FLOAT4; }

/* A block's numbers of so many inputs, in bytes. */
INLINE size_t number_bytes(const int format, int inputs) {
    return LANES * (size_t)(is_halves(format) ? inputs / 2 : inputs);
}

INLINE size_t block_bytes(const Matrix *matrix) {
    size_t inputs = (size_t)matrix->inputs;
    if (is_quantized(matrix)) {
        size_t groups = (inputs + (size_t)matrix->group - 1) / (size_t)matrix->group;
        return groups * head_bytes(matrix->format) + number_bytes(matrix->format, matrix->inputs);
    }
    if (matrix->format == BFLOAT16) inputs = (inputs + 1) / 2 * 2;
    return LANES * inputs * (matrix->format == FLOAT32 ? 4 : 2);
}

#endif
