#include "adapters.h"

static const Update *update_of(const Adapters *adapters, int span, int layer, int target) {
    size_t place = (size_t)adapters->whose[span] * (size_t)adapters->num_layers + (size_t)layer;
    return &adapters->updates[place * TARGETS + (size_t)target];
}

int is_updated(const Adapters *adapters, int layer, int target) {
    for (int span = 0; span < adapters->spans; span++)
        if (update_of(adapters, span, layer, target)->a.outputs > 0) return 1;
    return 0;
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
                needs.scratch = larger_of(needs.scratch, product_scratch(&update->b, rows, threads));
            }
    return needs;
}

void add_updates(const Adapters *adapters, int layer, int target, const float *x, int x_stride, float *y, int y_stride,
                 float *inner, int inner_stride, void *scratch, Team *team, int thread) {
    if (!is_updated(adapters, layer, target)) return;
    Matrix a[adapters->spans], b[adapters->spans];
    for (int span = 0; span < adapters->spans; span++) {
        const Update *update = update_of(adapters, span, layer, target);
        a[span] = update->a;
        b[span] = update->b;
    }
    grouped_product(a, adapters->spans, adapters->first, x, x_stride, inner, inner_stride, STORE, scratch, team, thread);
    team_meet(team);
    grouped_product(b, adapters->spans, adapters->first, inner, inner_stride, y, y_stride, ADD, scratch, team, thread);
    team_meet(team);
}
