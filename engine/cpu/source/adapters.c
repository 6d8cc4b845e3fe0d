#include "adapters.h"

static const Update *update_of(const Adapters *adapters, int span, int layer, int target) {
    size_t place = (size_t)adapters->whose[span] * (size_t)adapters->num_layers + (size_t)layer;
    return &adapters->updates[place * TARGETS + (size_t)target];
}

static size_t larger_of(size_t one, size_t other) { return one > other ? one : other; }

UpdateNeeds update_needs(const Adapters *adapters, int threads) {
    UpdateNeeds needs = {0};
    int rows = adapters->first[adapters->spans];
    for (int span = 0; span < adapters->spans; span++)
        for (int layer = 0; layer < adapters->num_layers; layer++)
            for (int target = 0; target < TARGETS; target++) {
                const Update *update = update_of(adapters, span, layer, target);
                needs.width = larger_of(needs.width, (size_t)product_width(&update->a));
                needs.scratch = larger_of(needs.scratch, product_scratch(&update->a, rows, threads));
            }
    return needs;
}

void updated_product(const Adapters *adapters, int layer, int target, const Matrix *matrix, const float *x, int x_stride,
                     float *y, int y_stride, int how, const UpdateRoom *room, void *scratch, Team *team, int thread) {
    const int32_t *first = adapters->first;
    Matrix a[adapters->spans], b[adapters->spans];
    int updated = 0;
    for (int span = 0; span < adapters->spans; span++) {
        const Update *update = update_of(adapters, span, layer, target);
        a[span] = update->a;
        b[span] = update->b;
        updated |= update->a.outputs > 0;
    }
    if (!updated) {
        product(matrix, first[adapters->spans], x, x_stride, y, y_stride, how, scratch, team, thread);
        return;
    }
    grouped_product(a, adapters->spans, first, x, x_stride, room->inner, room->width, STORE, scratch, team, thread);
    team_meet(team);
    Added added = {b, first, adapters->spans, room->width, room->inner, room->room};
    product_with(matrix, &added, x, x_stride, y, y_stride, how, scratch, team, thread);
}
