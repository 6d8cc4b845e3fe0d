/* Products with fixed weights: rows of floats times a matrix that was packed for it. */

#ifndef KEDGE_PRODUCT_H
#define KEDGE_PRODUCT_H

#include <stddef.h>

#include "team.h"

/* Of the last four a matrix is quantized. FLOAT8 is e4m3 without infinities, FLOAT4 is e2m1. */
enum { FLOAT32, BFLOAT16, FLOAT16, INT8, INT4, FLOAT8, FLOAT4 };

/* What becomes of a product: it is stored, added to what is there, or the second of a paired matrix is gated by the
   first. */
enum { STORE, ADD, GATED };

/* `packed` holds blocks of LANES outputs, zeros behind the last. A block has its inputs one after another, LANES weights
   for each; of BFLOAT16 two inputs at a time, the two weights of an output side by side. Of a `paired` matrix, two of
   `outputs` / 2 each that are applied to the same rows, blocks alternate. With `rounds` many rows are rounded to bfloat16
   where the processor multiplies that faster.

   A quantized weight is (number - zero) * scale, without a zero for FLOAT8 and FLOAT4; `group` inputs share them, an even
   number, as is that of all inputs. A block has its groups one after another, the last of them may be shorter: LANES
   scales, which are floats, LANES zeros, which are bytes, and LANES bytes for each input, or of INT4 for two, the first
   in the lower half. FLOAT4 is like INT4, but its scales are powers of two, of which a byte has the float's exponent, and
   it has no zeros.

   A gate is silu(first) * second. With `limit` it is first * sigmoid(alpha * first) * (second + 1), where the first is at
   most `limit`, and the second neither above nor below it (GPT-OSS). The struct is shared with engine/cpu/library.py. */
typedef struct {
    const void *packed;
    const float *bias; /* of padded outputs, in the order of the blocks; or NULL */
    int32_t format, outputs, inputs, paired, rounds, group; /* `group` is 0 if it is not quantized */
    float alpha, limit;
} Matrix;

/* Floats of a row of results, padding included. */
int product_width(const Matrix *matrix);

/* What product() needs for so many rows beside its arguments, in bytes. */
size_t product_scratch(const Matrix *matrix, int rows, int threads);

/* The same for grouped_product(). */
size_t grouped_scratch(const Matrix *matrices, int count, int rows, int threads);

/* Called by every thread of the team, which must have met since x was written and must meet before y is read. Rows of x
   are x_stride floats apart, and of y y_stride. */
void product(const Matrix *matrix, int rows, const float *x, int x_stride, float *y, int y_stride, int how,
             void *scratch, Team *team, int thread);

/* All of a product by this thread alone. The matrix is not quantized; rows stay floats, even if it `rounds`. */
void product_alone(const Matrix *matrix, int rows, const float *x, int x_stride, float *y, int y_stride);

/* What is added to a product before it is used: rows first[i] .. first[i + 1] - 1 of x times matrix i. Each matrix has as
   many outputs as the product, or none, and is neither rounded nor quantized. `room` has added_room() floats, which only
   GATED needs. */
typedef struct {
    const Matrix *matrices;
    const int32_t *first;
    int count, x_stride;
    const float *x;
    float *room;
} Added;

size_t added_room(const Matrix *matrix, int rows, int x_stride, int threads);

/* product() of all rows of `added`. */
void product_with(const Matrix *matrix, const Added *added, const float *x, int x_stride, float *y, int y_stride, int how,
                  void *scratch, Team *team, int thread);

/* A product for each of `count` matrices with the same inputs and outputs. Rows first[i] .. first[i + 1] - 1 of x are
   multiplied by matrix i; first[0] is 0. The threads share the pieces of all of them. */
void grouped_product(const Matrix *matrices, int count, const int32_t *first, const float *x, int x_stride, float *y,
                     int y_stride, int how, void *scratch, Team *team, int thread);

#endif
