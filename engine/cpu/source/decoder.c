/* Whole steps of a decoder, by a team of threads that meets between the parts of a layer. */

#include "vectors.h"

#include "adapters.h"
#include "attention.h"
#include "experts.h"
#include "latent_prompts.h"
#include "latents.h"
#include "memory.h"
#include "product.h"
#include "row_ops.h"
#include "team.h"

#include <stdlib.h>

#define API __attribute__((visibility("default")))

/* Different windows of a model's layers: their items are cut once a step. */
#define MOST_WINDOWS 8

/* Shared with engine/cpu/library.py. `head_norm` has head_dim weights for each query and key head, or is NULL. A layer
   has `gate_up` and `down`, or `experts`, or both, whose results are added; what it has not is NULL. With `latents` qkv is
   the product before them. */
typedef struct {
    const float *attention_norm, *mlp_norm, *head_norm;
    const Matrix *qkv, *out, *gate_up, *down;
    const Experts *experts;
    const Latents *latents;
} Layer;

/* `rotations` has cosine and sine of each rotary pair of a head, for each of num_positions. */
typedef struct {
    const Layer *layers;
    const float *rotations, *final_norm;
    const Matrix *head;
    Heads heads;
    int32_t num_layers, hidden, num_positions;
    float eps, scale;
} Model;

typedef struct {
    void *at;
    size_t bytes;
} Memory;

typedef struct {
    Model model;
    Memory memory;
    Tiling tilings[MOST_WINDOWS];
    int num_tilings;
} Decoder;

static int reserve(Memory *memory, size_t bytes) {
    if (bytes <= memory->bytes) return 1;
    free(memory->at);
    bytes = (bytes + bytes / 4 + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
    memory->at = aligned_alloc(CACHE_LINE, bytes);
    memory->bytes = memory->at == NULL ? 0 : bytes;
    return memory->at != NULL;
}

typedef struct {
    const Model *model;
    const Items *items;
    const LayerKV *kv;
    const int64_t *positions;
    const Tiling **tilings; /* by layer */
    const Adapters *adapters; /* NULL if no row has one */
    int rows, x_width, qkv_width, heads_width, inner_width;
    int32_t most_queries; /* items with more are prompts that do not attend to latents */
    int has_prompts;
    RowRange others; /* from the first row of another item to the last */
    float *given, *x, *normed, *qkv, *attended, *inner, *partials, *prompts;
    void *scratch, *experts, *latents;
    UpdateRoom updates;
} Step;

static void norm_rows(const Step *step, const float *weights, Team *team, int thread) {
    int first, end, hidden = step->model->hidden;
    team_share(team, thread, step->rows, &first, &end);
    for (int row = first; row < end; row++)
        normalise(step->x + (size_t)row * (size_t)step->x_width, weights, hidden, step->model->eps,
                  step->normed + (size_t)row * (size_t)step->x_width);
    team_meet(team);
}

static void turn_heads(const Step *step, const Layer *layer, const LayerKV *kv, Team *team, int thread) {
    const Model *model = step->model;
    Heads heads = model->heads;
    int first, end, dim = heads.head_dim;
    team_share(team, thread, step->rows, &first, &end);
    for (int row = first; row < end; row++) {
        float *head = step->qkv + (size_t)row * (size_t)step->qkv_width;
        const float *rotation = model->rotations + (size_t)step->positions[row] * (size_t)dim;
        for (int h = 0; h < heads.heads + heads.kv_heads; h++, head += dim) {
            if (layer->head_norm != NULL)
                normalise(head, layer->head_norm + (size_t)(h * dim), dim, model->eps, head);
            rotate(head, rotation, dim, h < heads.heads ? model->scale : 1.0f);
        }
    }
    const float *keys = step->qkv + heads.heads * dim;
    write_kv(step->items, heads, kv, keys, keys + heads.kv_heads * dim, (size_t)step->qkv_width, first, end);
    team_meet(team);
}

/* product() of a layer's matrix, updated by the rows' adapters. */
static void multiply_updated(const Step *step, int layer, int target, const Matrix *matrix, const float *x, int x_stride,
                             float *y, int y_stride, int how, Team *team, int thread) {
    if (step->adapters == NULL)
        product(matrix, step->rows, x, x_stride, y, y_stride, how, step->scratch, team, thread);
    else
        updated_product(step->adapters, layer, target, matrix, x, x_stride, y, y_stride, how, &step->updates,
                        step->scratch, team, thread);
    team_meet(team);
}

static void run_mlp(const Step *step, int index, Team *team, int thread) {
    const Layer *layer = &step->model->layers[index];
    if (layer->experts != NULL)
        add_experts(layer->experts, step->rows, step->normed, step->x, step->x_width, step->experts, step->scratch, team,
                    thread);
    if (layer->gate_up == NULL) return;
    multiply_updated(step, index, GATE_UP, layer->gate_up, step->normed, step->x_width, step->inner, step->inner_width,
                     GATED, team, thread);
    multiply_updated(step, index, DOWN, layer->down, step->inner, step->inner_width, step->x, step->x_width, ADD, team,
                     thread);
}

static void attend_heads(const Step *step, int index, Team *team, int thread) {
    const Model *model = step->model;
    const LayerKV *kv = &step->kv[index];
    size_t dim = (size_t)model->heads.head_dim;
    HeadRows q = {step->qkv, (size_t)step->qkv_width, dim}, out = {step->attended, (size_t)step->heads_width, dim};
    turn_heads(step, &model->layers[index], kv, team, thread);
    attend(step->tilings[index], step->items, model->heads, kv, q, out, step->partials, team);
    team_meet(team);
}

static void attend_latents(const Step *step, int index, Team *team, int thread) {
    const Model *model = step->model;
    const Latents *latents = model->layers[index].latents;
    const LayerKV *kv = &step->kv[index];
    LatentRoom room;
    latents_lay_out(latents, model->heads.heads, step->rows, step->others.count, step->latents, &room);
    Queries queries = write_latents(latents, step->items, model->heads, kv, step->qkv, step->qkv_width, step->positions,
                                    model->rotations, &room, step->scratch, team, thread);
    if (step->others.count > 0) {
        make_latent_queries(latents, model->heads.heads, step->others, &queries, &room, step->scratch, team, thread);
        attend(step->tilings[index], step->items, model->heads, kv, latent_queries(latents, step->others, &room),
               latents_found(latents, step->others, &room), step->partials, team);
        team_meet(team);
        make_latent_values(latents, model->heads.heads, step->others, &room, step->attended, step->heads_width,
                           step->scratch, team, thread);
    }
    if (step->has_prompts) {
        attend_prompts(latents, step->items, step->most_queries, model->heads, kv, &queries, step->attended,
                       step->heads_width, step->prompts, team, thread);
        team_meet(team);
    }
}

static void run_layer(const Step *step, int index, Team *team, int thread) {
    const Layer *layer = &step->model->layers[index];
    norm_rows(step, layer->attention_norm, team, thread);
    multiply_updated(step, index, QKV, layer->qkv, step->normed, step->x_width, step->qkv, step->qkv_width, STORE, team,
                     thread);
    if (layer->latents != NULL) attend_latents(step, index, team, thread);
    else attend_heads(step, index, team, thread);
    multiply_updated(step, index, OUT, layer->out, step->attended, step->heads_width, step->x, step->x_width, ADD, team,
                     thread);
    norm_rows(step, layer->mlp_norm, team, thread);
    run_mlp(step, index, team, thread);
}

static void copy_rows(const Step *step, int out, Team *team, int thread) {
    int first, end, hidden = step->model->hidden;
    team_share(team, thread, step->rows, &first, &end);
    for (int row = first; row < end; row++) {
        float *given = step->given + (size_t)row * (size_t)hidden, *x = step->x + (size_t)row * (size_t)step->x_width;
        memcpy(out ? given : x, out ? x : given, (size_t)hidden * sizeof(float));
    }
    team_meet(team);
}

static void run_step(void *job, Team *team, int thread) {
    const Step *step = job;
    copy_rows(step, 0, team, thread);
    for (int index = 0; index < step->model->num_layers; index++) run_layer(step, index, team, thread);
    copy_rows(step, 1, team, thread);
}

static void run_head(void *job, Team *team, int thread) {
    const Step *step = job;
    copy_rows(step, 0, team, thread);
    norm_rows(step, step->model->final_norm, team, thread);
    const Matrix *head = step->model->head;
    product(head, step->rows, step->normed, step->x_width, step->qkv, product_width(head), STORE, step->scratch, team, thread);
}

API Decoder *kedge_decoder_new(const Model *model) {
    Decoder *decoder = calloc(1, sizeof(Decoder));
    if (decoder != NULL) decoder->model = *model;
    return decoder;
}

API void kedge_decoder_free(Decoder *decoder) {
    for (int index = 0; index < decoder->num_tilings; index++) tiling_free(&decoder->tilings[index]);
    free(decoder->memory.at);
    free(decoder);
}

/* The cut of the items for a layer's window: that of a layer before, or a new one. */
static Outcome tiling_for(Decoder *decoder, int *made, const Items *items, const LayerKV *layer, int32_t most_queries,
                          int threads, const Tiling **found) {
    for (int index = 0; index < *made; index++) {
        *found = &decoder->tilings[index];
        if ((*found)->window == layer->window && (*found)->in_window_pool == layer->in_window_pool) return DONE;
    }
    if (*made == MOST_WINDOWS) return NO_MEMORY;
    Tiling *tiling = &decoder->tilings[(*made)++];
    if (*made > decoder->num_tilings) decoder->num_tilings = *made;
    *found = tiling;
    return tile_items(tiling, items, decoder->model.heads, layer, most_queries, threads);
}

static size_t larger_of(size_t one, size_t other) { return one > other ? one : other; }

/* What the layers need beside what every layer has, in floats: the most of any. */
typedef struct {
    size_t scratch, inner_width, experts, latents, prompts, update_room;
} Needs;

static Needs needs_of(const Step *step, int threads) {
    const Model *model = step->model;
    int rows = step->rows, x_width = step->x_width;
    Needs needs = {0};
    for (int index = 0; index < model->num_layers; index++) {
        const Layer *layer = &model->layers[index];
        size_t scratch = larger_of(product_scratch(layer->qkv, rows, threads), product_scratch(layer->out, rows, threads));
        if (layer->experts != NULL) {
            scratch = larger_of(scratch, experts_scratch(layer->experts, rows, threads));
            needs.experts = larger_of(needs.experts, experts_room(layer->experts, rows, x_width) / sizeof(float));
        }
        if (layer->latents != NULL) {
            LatentRoom room;
            size_t bytes = latents_lay_out(layer->latents, model->heads.heads, rows, step->others.count, NULL, &room);
            scratch = larger_of(scratch, latents_scratch(layer->latents, model->heads.heads, rows, threads));
            needs.latents = larger_of(needs.latents, bytes / sizeof(float));
            if (step->has_prompts)
                needs.prompts = larger_of(needs.prompts, (size_t)threads * prompt_floats(layer->latents));
        }
        if (layer->gate_up != NULL) {
            scratch = larger_of(scratch, product_scratch(layer->gate_up, rows, threads));
            scratch = larger_of(scratch, product_scratch(layer->down, rows, threads));
            needs.inner_width = larger_of(needs.inner_width, (size_t)product_width(layer->gate_up));
        }
        needs.scratch = larger_of(needs.scratch, scratch / sizeof(float) + 1);
    }
    return needs;
}

/* Gate and up are updated before they are one. Other products are added to where they are. */
static size_t room_of_gates(const Step *step, int threads) {
    size_t most = 0;
    for (int index = 0; index < step->model->num_layers; index++) {
        const Matrix *gate_up = step->model->layers[index].gate_up;
        if (gate_up != NULL) most = larger_of(most, added_room(gate_up, step->rows, step->x_width, threads));
    }
    return most;
}

static size_t lay_out(Step *step, char *base, Needs needs, size_t partials) {
    size_t used = 0, rows = (size_t)step->rows;
    step->x = take(base, &used, rows * (size_t)step->x_width);
    step->normed = take(base, &used, rows * (size_t)step->x_width);
    step->qkv = take(base, &used, rows * (size_t)step->qkv_width);
    step->attended = take(base, &used, rows * (size_t)step->heads_width);
    step->inner = take(base, &used, rows * (size_t)step->inner_width);
    step->scratch = take(base, &used, needs.scratch);
    step->experts = take(base, &used, needs.experts);
    step->latents = take(base, &used, needs.latents);
    step->prompts = take(base, &used, needs.prompts);
    step->updates.inner = take(base, &used, rows * (size_t)step->updates.width);
    step->updates.room = take(base, &used, needs.update_room);
    step->partials = take(base, &used, partials);
    return used;
}

/* Whether an item is a prompt or one of the others. */
static void take_note(Step *step, const Item *item) {
    RowRange *others = &step->others;
    if (item->queries > step->most_queries) {
        step->has_prompts = 1;
        return;
    }
    if (others->count == 0) others->first = item->row;
    others->count = item->row + item->queries - others->first;
}

/* One step of `rows` tokens: `x` [rows][hidden] comes with their embeddings and leaves with the last layer's output.
   `kv` is by layer. `adapters` are those of the rows, or NULL. Gives an Outcome: after all but DONE x and the pool are
   as they were. */
API int kedge_decoder_step(Decoder *decoder, Team *team, const Items *items, const LayerKV *kv, const int64_t *positions,
                           const Adapters *adapters, float *x) {
    const Model *model = &decoder->model;
    const Layer *layer = model->layers;
    const Tiling *tilings[model->num_layers + 1];
    int made = 0;
    size_t partials = 0;
    int32_t most_queries = INT32_MAX;
    if (layer->latents != NULL) most_queries = most_attending(items, model->heads, team_size(team));
    for (int index = 0; index < model->num_layers; index++) {
        Outcome outcome = tiling_for(decoder, &made, items, &kv[index], most_queries, team_size(team), &tilings[index]);
        if (outcome != DONE) return outcome;
        if ((size_t)tilings[index]->partial_floats > partials) partials = (size_t)tilings[index]->partial_floats;
    }
    for (int row = 0; row < items->rows; row++)
        if (positions[row] < 0 || positions[row] >= model->num_positions) return BAD_POSITION;
    Step step = {.model = model, .items = items, .kv = kv, .positions = positions, .tilings = tilings,
                 .adapters = adapters, .most_queries = most_queries, .rows = items->rows, .x_width = product_width(layer->out),
                 .qkv_width = product_width(layer->qkv),
                 .heads_width = PADDED(layer->out->inputs), .given = x};
    for (int index = 0; index < items->count; index++)
        take_note(&step, &items->items[index]);
    Needs needs = needs_of(&step, team_size(team));
    step.inner_width = (int)needs.inner_width;
    if (adapters != NULL) {
        UpdateNeeds updates = update_needs(adapters, team_size(team));
        needs.scratch = larger_of(needs.scratch, updates.scratch / sizeof(float) + 1);
        needs.update_room = room_of_gates(&step, team_size(team));
        step.updates.width = (int)updates.width;
    }
    if (!reserve(&decoder->memory, lay_out(&step, NULL, needs, partials))) return NO_MEMORY;
    lay_out(&step, decoder->memory.at, needs, partials);
    team_run(team, run_step, &step);
    return DONE;
}

/* Scores of the next token, [rows][product_width of the head], after rows `x` [rows][hidden] of a step's output. Gives
   an Outcome. */
API int kedge_decoder_head(Decoder *decoder, Team *team, int rows, float *x, float *logits) {
    const Model *model = &decoder->model;
    Step step = {.model = model, .rows = rows, .x_width = PADDED(model->hidden), .given = x};
    Needs needs = {.scratch = product_scratch(model->head, rows, team_size(team)) / sizeof(float) + 1};
    if (!reserve(&decoder->memory, lay_out(&step, NULL, needs, 0))) return NO_MEMORY;
    lay_out(&step, decoder->memory.at, needs, 0);
    step.qkv = logits;
    team_run(team, run_head, &step);
    return DONE;
}
