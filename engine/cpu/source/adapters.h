/* Adapters: low-rank updates of a layer's matrices, y += b(a(x)) for the rows of each adapter (LoRA, Hu et al. 2021). */

#ifndef KEDGE_ADAPTERS_H
#define KEDGE_ADAPTERS_H

#include "product.h"

#include <stddef.h>

/* The matrices of a layer that can be updated. */
enum { QKV, OUT, GATE_UP, DOWN, TARGETS };

/* `b` has the outputs of the matrix that is updated, and is paired if that is; `a` has its inputs. Both have no outputs
   where an adapter leaves the matrix as it is. All updates of a target have the same inputs of `a` and of `b`. Shared
   with engine/cpu/library.py. */
typedef struct {
    Matrix a, b;
} Update;

/* Which adapters a step's rows have. Rows first[i] .. first[i + 1] - 1 have adapter whose[i]; adapter 0 is none.
   `updates` is by adapter, layer and target. Shared with engine/cpu/library.py. */
typedef struct {
    const Update *updates;
    const int32_t *first, *whose;
    int32_t spans, num_layers;
} Adapters;

/* Whether any row's adapter updates that matrix. */
int is_updated(const Adapters *adapters, int layer, int target);

/* What add_updates() needs, the most of any target: floats of a row between `a` and `b`, and bytes of scratch. */
typedef struct {
    size_t width, scratch;
} UpdateNeeds;

UpdateNeeds update_needs(const Adapters *adapters, int threads);

/* Adds the updates to rows of y, by which the threads must have met since x and y were written. `inner` has room for the
   rows between a and b. Begins and ends with the threads together. */
void add_updates(const Adapters *adapters, int layer, int target, const float *x, int x_stride, float *y, int y_stride,
                 float *inner, int inner_stride, void *scratch, Team *team, int thread);

#endif
