/* Experts: of many gated MLPs, a router chooses some for each row. */

#ifndef KEDGE_EXPERTS_H
#define KEDGE_EXPERTS_H

#include "product.h"

#include <stddef.h>

/* `gate_up`, paired, and `down` are by expert. A row has the `top_k` experts with the highest scores, and their weights
   are the softmax of the scores. With `sigmoid` they are the scores' sigmoids, and `correction`, one for each expert, is
   added for the choice alone. With `norm_topk` the weights of a row's experts sum to one. They are multiplied by
   `factor`. Of `groups`, experts one after another, the best `top_groups` are chosen from: a group is as good as its best
   expert, or with `sigmoid` its best two together. The struct is shared with engine/cpu/library.py. */
typedef struct {
    const Matrix *router, *gate_up, *down;
    const float *correction;
    int32_t count, top_k, norm_topk, sigmoid, groups, top_groups;
    float factor;
} Experts;

/* What add_experts() needs for so many rows beside its arguments, in bytes: for itself, and for its products. */
size_t experts_room(const Experts *experts, int rows, int width);
size_t experts_scratch(const Experts *experts, int rows, int threads);

/* Adds to each row of x what the experts make of that row of `normed`. Rows are `width` floats apart, the product_width
   of `down`. Called by every thread of the team, which must have met since `normed` was written, and has met at the
   end. */
void add_experts(const Experts *experts, int rows, const float *normed, float *x, int width, void *room, void *scratch,
                 Team *team, int thread);

#endif
