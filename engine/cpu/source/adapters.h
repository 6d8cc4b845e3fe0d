/* Adapters: low-rank updates of a layer's matrices, y += b(a(x)) for the rows of each adapter (LoRA, Hu et al. 2021). */

#ifndef KEDGE_ADAPTERS_H
#define KEDGE_ADAPTERS_H

#include "product.h"

#include <stddef.h>

/* The matrices of a layer that can be updated. */
enum { QKV, OUT, GATE_UP, DOWN, TARGETS };

/* `b` has the outputs of the matrix that is updated, and is paired if that is; `a` has its inputs. Both have no outputs
   where an adapter leaves the matrix as it is. `b` is neither rounded nor quantized. Shared with engine/cpu/library.py. */
typedef struct {
    Matrix a, b;
} Update;

/* Which adapters a step's rows have. Rows first[i] .. first[i + 1] - 1 have adapter whose[i]; adapter 0 is none. The
   rows of an adapter stand together: there are no more spans than adapters, and one.
   `updates` is by adapter, layer and target. Shared with engine/cpu/library.py. */
typedef struct {
    const Update *updates;
    const int32_t *first, *whose;
    int32_t spans, num_layers;
} Adapters;

/* Where the results of `a` are, `width` floats for each row, and added_room() of the products. */
typedef struct {
    int width;
    float *inner, *room;
} UpdateRoom;

/* The most of any target: floats of a row between `a` and `b`, and bytes of scratch. */
typedef struct {
    size_t width, scratch;
} UpdateNeeds;

UpdateNeeds update_needs(const Adapters *adapters, int threads);

/* product() of a layer's matrix with the rows' updates of it. */
void updated_product(const Adapters *adapters, int layer, int target, const Matrix *matrix, const float *x, int x_stride,
                     float *y, int y_stride, int how, const UpdateRoom *room, void *scratch, Team *team, int thread);

#endif
