/* Attention of one layer by itself, for models whose layers run one by one. */

#include "vectors.h"

#include "attention.h"

#include <stdlib.h>

#define API __attribute__((visibility("default")))

typedef struct {
    Tiling tiling;
    float *partials;
    int64_t room;
} LayerAttention;

typedef struct {
    const LayerAttention *attention;
    const Items *items;
    Heads heads;
    const LayerKV *layer;
    const float *q, *kv;
    float *out;
} Job;

API LayerAttention *kedge_attention_new(void) { return calloc(1, sizeof(LayerAttention)); }

API void kedge_attention_free(LayerAttention *attention) {
    tiling_free(&attention->tiling);
    free(attention->partials);
    free(attention);
}

static void work(void *argument, Team *team, int thread) {
    const Job *job = argument;
    size_t kv_floats = (size_t)(job->heads.kv_heads * job->heads.head_dim), vectors = job->layer->values == job->layer->keys ? 1 : 2;
    size_t q_floats = (size_t)job->heads.head_dim, out_floats = (size_t)job->heads.value_dim, heads = (size_t)job->heads.heads;
    HeadRows q = {(float *)job->q, heads * q_floats, q_floats}, out = {job->out, heads * out_floats, out_floats};
    int first, end;
    team_share(team, thread, job->items->rows, &first, &end);
    write_kv(job->items, job->heads, job->layer, job->kv, job->kv + kv_floats, vectors * kv_floats, first, end);
    team_meet(team);
    attend(&job->attention->tiling, job->items, job->heads, job->layer, q, out, job->attention->partials, team);
}

/* Writes `kv` [rows][2][kv_heads][head_dim] to the pool and attends with `q` [rows][heads][head_dim], already scaled;
   `out` is [rows][heads][value_dim]. Of latents `kv` has one vector in place of two. */
API int kedge_attention_layer(LayerAttention *attention, Team *team, const Items *items, const Heads *heads,
                              const LayerKV *layer, const float *q, const float *kv, float *out) {
    Outcome outcome = tile_items(&attention->tiling, items, *heads, layer, INT32_MAX, team_size(team));
    if (outcome != DONE) return outcome;
    if (attention->tiling.partial_floats > attention->room) {
        free(attention->partials);
        attention->room = attention->tiling.partial_floats;
        attention->partials = malloc((size_t)attention->room * sizeof(float));
        if (attention->partials == NULL) {
            attention->room = 0;
            return NO_MEMORY;
        }
    }
    Job job = {attention, items, *heads, layer, q, kv, out};
    team_run(team, work, &job);
    return DONE;
}
