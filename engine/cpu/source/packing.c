#include "packed.h"

#define API __attribute__((visibility("default")))

API size_t kedge_packed_bytes(const Matrix *matrix) { return (size_t)packed_blocks(matrix) * block_bytes(matrix); }

/* Which output stands in a lane of a block; -1 for padding. */
static int output_at(const Matrix *matrix, int block, int lane) {
    if (!matrix->paired) {
        int output = block * LANES + lane;
        return output < matrix->outputs ? output : -1;
    }
    int half = matrix->outputs / 2, output = block / 2 * LANES + lane;
    return output < half ? block % 2 * half + output : -1;
}

/* `weights` has a row of inputs for each output, in the matrix's format. */
API void kedge_pack(const Matrix *matrix, const void *weights, void *packed) {
    int inputs = matrix->inputs, blocks = packed_blocks(matrix);
    int step = matrix->format == BFLOAT16 ? 2 : 1, groups = (inputs + step - 1) / step;
    for (int block = 0; block < blocks; block++)
        for (int lane = 0; lane < LANES; lane++) {
            int output = output_at(matrix, block, lane);
            for (int input = 0; input < groups * step; input++) {
                size_t to = (((size_t)block * groups + input / step) * LANES + lane) * step + input % step;
                size_t from = (size_t)(output < 0 ? 0 : output) * inputs + input;
                int empty = output < 0 || input >= inputs;
                if (matrix->format == FLOAT32)
                    ((uint32_t *)packed)[to] = empty ? 0 : ((const uint32_t *)weights)[from];
                else
                    ((uint16_t *)packed)[to] = empty ? 0 : ((const uint16_t *)weights)[from];
            }
        }
}

API void kedge_pack_bias(const Matrix *matrix, const float *bias, float *packed) {
    for (int block = 0; block < packed_blocks(matrix); block++)
        for (int lane = 0; lane < LANES; lane++) {
            int output = output_at(matrix, block, lane);
            packed[block * LANES + lane] = output < 0 ? 0 : bias[output];
        }
}

/* Of a power of two. */
static uint8_t exponent_of(float scale) {
    uint32_t bits;
    memcpy(&bits, &scale, sizeof bits);
    return (uint8_t)(bits >> 23);
}

/* One lane of a block, into memory of zeros. `numbers` has a byte for each input, but of FLOAT4 for two; `scales` and
   `zeros` have one of each for each group. */
static void pack_lane(const Matrix *matrix, const uint8_t *numbers, const float *scales, const uint8_t *zeros,
                      uint8_t *block, int lane) {
    for (int from = 0, group = 0; from < matrix->inputs; from += matrix->group, group++) {
        int count = matrix->inputs - from < matrix->group ? matrix->inputs - from : matrix->group;
        if (matrix->format == FLOAT4) {
            block[lane] = exponent_of(scales[group]);
        } else {
            memcpy(block + (size_t)lane * sizeof(float), scales + group, sizeof(float));
            block[LANES * sizeof(float) + (size_t)lane] = zeros[group];
        }
        uint8_t *to = block + head_bytes(matrix->format) + lane;
        for (int i = 0; matrix->format == FLOAT4 && i < count / 2; i++) to[(size_t)i * LANES] = numbers[from / 2 + i];
        for (int i = 0; matrix->format != FLOAT4 && i < count; i++) {
            uint8_t number = numbers[from + i];
            if (matrix->format == INT4)
                to[(size_t)(i / 2) * LANES] |= (uint8_t)(number << (i % 2 * 4));
            else
                to[(size_t)i * LANES] = number;
        }
        block += head_bytes(matrix->format) + number_bytes(matrix->format, count);
    }
}

/* The same for a quantized matrix: rows of numbers, a byte each, and of their groups' scales and zeros. `packed` is
   zeroed. */
API void kedge_pack_quantized(const Matrix *matrix, const uint8_t *numbers, const float *scales, const uint8_t *zeros,
                              uint8_t *packed) {
    size_t groups = (size_t)((matrix->inputs + matrix->group - 1) / matrix->group);
    size_t row = (size_t)(matrix->format == FLOAT4 ? matrix->inputs / 2 : matrix->inputs);
    for (int block = 0; block < packed_blocks(matrix); block++)
        for (int lane = 0; lane < LANES; lane++) {
            int output = output_at(matrix, block, lane);
            if (output < 0) continue;
            pack_lane(matrix, numbers + (size_t)output * row, scales + (size_t)output * groups,
                      zeros + (size_t)output * groups, packed + (size_t)block * block_bytes(matrix), lane);
        }
}
