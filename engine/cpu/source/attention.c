#include "vectors.h"

#include "attention.h"
#include "key_scores.h"
#include "lanes.h"
#include "places.h"

#define LARGEST_HEAD 576

#if REGISTERS == 32
#define WIDE 4 /* vectors of a value that are summed at once, for four rows */
#else
#define WIDE 2
#endif

void write_kv(const Items *items, Heads heads, const LayerKV *layer, const float *keys, const float *values,
              size_t row_stride, int first, int end) {
    size_t head_bytes = (size_t)heads.head_dim * sizeof(float);
    for (int index = 0; index < items->count; index++) {
        const Item *item = &items->items[index];
        for (int row = most(first, item->row); row < least(end, item->row + item->queries); row++) {
            int token = item->length - item->queries + row - item->row;
            size_t at = place(pages_of(item, layer), items->page_size, heads.head_dim, token);
            for (int head = 0; head < heads.kv_heads; head++) {
                size_t from = (size_t)row * row_stride + (size_t)(head * heads.head_dim);
                size_t to = (size_t)head * (size_t)layer->head_stride + at;
                memcpy(layer->keys + to, keys + from, head_bytes);
                if (layer->values != layer->keys) memcpy(layer->values + to, values + from, head_bytes);
            }
        }
    }
}

/* What a tile of few rows has found so far: for each row the largest score, the sum of the powers, and the weighted
   values. `keys` and `values` are those of its head. Scores of a block stand in lane token % LANES. */
typedef struct {
    const Tile *tile;
    const Item *item;
    const float *keys, *values;
    int head_dim, value_dim, group, window, one_order;
    float most[FEW_ROWS], sum[FEW_ROWS];
    const float *q[FEW_ROWS];
    float *out[FEW_ROWS];
    float scores[FEW_ROWS][KEYS];
} Few;

/* Has `floats` of memory brought to the cache. A page of the pool is too short for the processor to see what comes. */
INLINE void fetch(const float *from, size_t floats) {
    for (size_t at = 0; at < floats; at += 16) __builtin_prefetch(from + at, 0, 3);
}

/* The scores of LANES keys of a block by all rows, from lane `from` of the block on; meanwhile their values are
   fetched. */
static void score_lanes(Few *few, const Block *block, int from) {
    int lead = block->token % KEYS, head_dim = few->head_dim;
    int fetched = few->values == few->keys ? 0 : few->value_dim;
    const float *keys[LANES];
    for (int lane = 0; lane < LANES; lane++) {
        int key = least(most(from + lane - lead, 0), block->count - 1);
        keys[lane] = few->keys + block->at[key];
        fetch(few->values + block->at[key], (size_t)fetched);
    }
    if (!few->one_order) {
        for (int r = 0; r < few->tile->rows; r++) store(few->scores[r] + from, score_keys(few->q[r], keys, head_dim));
        return;
    }
    Floats scores[FEW_ROWS];
    score_in_order(few->q, few->tile->rows, keys, head_dim, scores);
    for (int r = 0; r < few->tile->rows; r++) store(few->scores[r] + from, scores[r]);
}

/* Takes in a block's keys. */
static void few_scores(Few *few, const Block *block) {
    int lead = block->token % KEYS, first_lane = lead / LANES * LANES, end_lane = PADDED(lead + block->count);
    int history = few->item->length - few->item->queries;
    for (int from = first_lane; from < end_lane; from += LANES) score_lanes(few, block, from);
    for (int r = 0; r < few->tile->rows; r++) {
        float *scores = few->scores[r];
        int position = history + (few->tile->row + r) / few->group;
        int first = most(first_key(few->window, position) - block->token, 0) + lead;
        int end = least(block->count, position + 1 - block->token) + lead;
        for (int lane = first_lane; lane < least(first, end_lane); lane++) scores[lane] = -INFINITY;
        for (int lane = most(end, first_lane); lane < end_lane; lane++) scores[lane] = -INFINITY;
        Floats highest = load(scores + first_lane);
        for (int lane = first_lane; lane < end_lane; lane += LANES) highest = larger(highest, load(scores + lane));
        float before = few->most[r], now = largest(highest);
        now = now > before ? now : before;
        Floats sum = {0};
        for (int lane = first_lane; lane < end_lane; lane += LANES) {
            Floats powers = exponential(load(scores + lane) - now);
            store(scores + lane, powers);
            sum += powers;
        }
        Floats shrunk = exponential(every(before - now));
        few->most[r] = now;
        few->sum[r] = rounded(few->sum[r] * shrunk)[0] + total(sum);
        if (shrunk[0] != 1.0f)
            for (int d = 0; d < few->value_dim; d += LANES) store(few->out[r] + d, rounded(load(few->out[r] + d) * shrunk));
    }
}

/* `next` has keys to be fetched meanwhile. */
INLINE void add_values(Few *few, const Block *block, const Block *next, int row, const int rows, int at,
                       const int wide) {
    Floats sums[4][WIDE];
    int lead = block->token % KEYS, head_dim = few->head_dim;
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int w = 0; w < wide; w++)
        sums[r][w] = load(few->out[row + r] + at + w * LANES);
    for (int k = 0; k < block->count; k++) {
        Floats value[WIDE];
        const float *from = few->values + block->at[k] + at;
        if (next != NULL && k < next->count) fetch(few->keys + next->at[k], (size_t)head_dim);
        UNROLL for (int w = 0; w < wide; w++) value[w] = load(from + w * LANES);
        UNROLL for (int r = 0; r < rows; r++) {
            float weight = few->scores[row + r][lead + k];
            UNROLL for (int w = 0; w < wide; w++) sums[r][w] += value[w] * weight;
        }
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int w = 0; w < wide; w++)
        store(few->out[row + r] + at + w * LANES, sums[r][w]);
}

static void few_values(Few *few, const Block *block, const Block *next) {
    int rows = few->tile->rows, value_dim = few->value_dim, lead = block->token % KEYS, at = 0;
    for (; at + LANES <= value_dim; ) {
        int wide = at + WIDE * LANES <= value_dim ? WIDE : 1;
        for (int row = 0; row < rows;) {
            int left = rows - row;
            const Block *fetched = at == 0 && row == 0 ? next : NULL;
            if (wide == WIDE && left >= 4) add_values(few, block, fetched, row, 4, at, WIDE), row += 4;
            else if (wide == WIDE && left >= 2) add_values(few, block, fetched, row, 2, at, WIDE), row += 2;
            else if (wide == WIDE) add_values(few, block, fetched, row, 1, at, WIDE), row += 1;
            else add_values(few, block, fetched, row, 1, at, 1), row += 1;
        }
        at += wide * LANES;
    }
    if (at < value_dim)
        for (int row = 0; row < rows; row++) {
            Floats sum = load(few->out[row] + at);
            for (int k = 0; k < block->count; k++)
                sum += load_some(few->values + block->at[k] + at, value_dim - at) * few->scores[row][lead + k];
            store(few->out[row] + at, sum);
        }
}

/* Where a part of a tile leaves what it found for a row: largest score, sum of powers, weighted values. */
static float *part_of_row(const Tile *tile, Heads heads, float *partials, int row) {
    return partials + tile->partial + (size_t)(tile->part * tile->rows + row) * ((size_t)PADDED(heads.value_dim) + 2);
}

/* Adds up what the parts of a tile have left. */
static void join_parts(const Tile *tile, const Items *items, Heads heads, const float *partials, HeadRows out) {
    const Item *item = &items->items[tile->item];
    int value_dim = heads.value_dim, group = heads.heads / heads.kv_heads;
    size_t row_floats = (size_t)PADDED(value_dim) + 2;
    for (int r = 0; r < tile->rows; r++) {
        const float *first = partials + tile->partial + (size_t)r * row_floats;
        size_t part_floats = (size_t)tile->rows * row_floats;
        float highest = NOTHING, sum = 0;
        for (int part = 0; part < tile->parts; part++)
            highest = fmaxf(highest, first[(size_t)part * part_floats]);
        int row = item->row + (tile->row + r) / group;
        float *to = head_of(out, row, tile->kv_head * group + (tile->row + r) % group);
        float joined[PADDED(LARGEST_HEAD)] = {0};
        for (int part = 0; part < tile->parts; part++) {
            const float *from = first + (size_t)part * part_floats;
            float weight = expf(from[0] - highest);
            sum += from[1] * weight;
            for (int d = 0; d < value_dim; d += LANES) store(joined + d, load(joined + d) + load(from + 2 + d) * weight);
        }
        for (int d = 0; d < value_dim; d += LANES) store_some(to + d, load(joined + d) / sum, value_dim - d);
    }
}

static void attend_few(const Tile *tile, const Items *items, Heads heads, const LayerKV *layer, HeadRows q, HeadRows out,
                       float *partials) {
    const Item *item = &items->items[tile->item];
    const int32_t *pages = pages_of(item, layer);
    int group = heads.heads / heads.kv_heads, head_dim = heads.head_dim, value_dim = heads.value_dim;
    int page_size = items->page_size;
    float found[FEW_ROWS][PADDED(LARGEST_HEAD)];
    size_t head_at = (size_t)tile->kv_head * (size_t)layer->head_stride;
    Few few = {.tile = tile, .item = item, .keys = layer->keys + head_at, .values = layer->values + head_at,
               .head_dim = head_dim, .value_dim = value_dim, .group = group, .window = layer->window, .one_order = items->deterministic};
    for (int r = 0; r < tile->rows; r++) {
        int row = item->row + (tile->row + r) / group, head = tile->kv_head * group + (tile->row + r) % group;
        few.q[r] = head_of(q, row, head);
        few.out[r] = found[r];
        few.most[r] = NOTHING;
        if (layer->sinks != NULL && tile->part == 0) few.most[r] = fmaxf(layer->sinks[head], NOTHING), few.sum[r] = 1;
        memset(found[r], 0, (size_t)PADDED(value_dim) * sizeof(float));
    }
    Block blocks[2], *block = &blocks[0], *next = &blocks[1];
    find_block(block, pages, page_size, head_dim, tile->first, tile->end);
    while (block->count > 0) {
        find_block(next, pages, page_size, head_dim, block->token + block->count, tile->end);
        few_scores(&few, block);
        few_values(&few, block, next);
        Block *done = block;
        block = next, next = done;
    }
    if (tile->parts == 1) {
        for (int r = 0; r < tile->rows; r++) {
            int row = item->row + (tile->row + r) / group, head = tile->kv_head * group + (tile->row + r) % group;
            float *to = head_of(out, row, head);
            for (int d = 0; d < value_dim; d += LANES)
                store_some(to + d, load(found[r] + d) / few.sum[r], value_dim - d);
        }
        return;
    }
    for (int r = 0; r < tile->rows; r++) {
        float *to = part_of_row(tile, heads, partials, r);
        to[0] = few.most[r];
        to[1] = few.sum[r];
        memcpy(to + 2, found[r], (size_t)PADDED(value_dim) * sizeof(float));
    }
}

#if LANES > FEW_ROWS

static void attend_lanes(const Tile *tile, const Items *items, Heads heads, const LayerKV *layer, HeadRows q,
                         HeadRows out, float *partials) {
    const Item *item = &items->items[tile->item];
    const int32_t *pages = pages_of(item, layer);
    int group = heads.heads / heads.kv_heads, head_dim = heads.head_dim, value_dim = heads.value_dim;
    int history = item->length - item->queries, has_sinks = layer->sinks != NULL && tile->part == 0;
    float *rows_out[LANES], queries[LARGEST_HEAD * LANES], found[LARGEST_HEAD * LANES], powers[KEYS * LANES];
    Lanes lanes = {.q = queries, .out = found, .powers = powers, .highest = every(NOTHING), .sum = every(has_sinks)};
    for (int r = 0; r < LANES; r++) {
        int at = tile->row + least(r, tile->rows - 1), head = tile->kv_head * group + at % group;
        int row = item->row + at / group, position = history + at / group;
        const float *from = head_of(q, row, head);
        for (int d = 0; d < head_dim; d++) queries[d * LANES + r] = from[d];
        if (has_sinks) lanes.highest[r] = fmaxf(layer->sinks[head], NOTHING);
        rows_out[r] = head_of(out, row, head);
        lanes.first_keys[r] = first_key(layer->window, position);
        lanes.last_keys[r] = position;
    }
    memset(found, 0, (size_t)value_dim * LANES * sizeof(float));
    Block block;
    size_t head_at = (size_t)tile->kv_head * (size_t)layer->head_stride;
    const float *keys = layer->keys + head_at, *values = layer->values + head_at;
    int seen_by_all = history + tile->row / group + 1; /* keys before this one, but for the window */
    for (int token = tile->first; token < tile->end; token += block.count) {
        find_block(&block, pages, items->page_size, head_dim, token, tile->end);
        if (values != keys)
            for (int k = 0; k < block.count; k++) fetch(values + block.at[k], (size_t)value_dim);
        lane_scores(&lanes, 0, head_dim, keys, &block);
        take_in(&lanes, values, &block, value_dim, layer->window > 0 || token + block.count > seen_by_all);
    }
    if (tile->parts == 1) {
        for (int d = 0; d < value_dim; d++) {
            Floats value = load(found + d * LANES) / lanes.sum;
            for (int r = 0; r < tile->rows; r++) rows_out[r][d] = value[r];
        }
        return;
    }
    for (int r = 0; r < tile->rows; r++) {
        float *to = part_of_row(tile, heads, partials, r);
        to[0] = lanes.highest[r];
        to[1] = lanes.sum[r];
        for (int d = 0; d < value_dim; d++) to[2 + d] = found[d * LANES + r];
        for (int d = value_dim; d < PADDED(value_dim); d++) to[2 + d] = 0;
    }
}

#endif

void attend(const Tiling *tiling, const Items *items, Heads heads, const LayerKV *layer, HeadRows q, HeadRows out,
            float *partials, Team *team) {
    for (int64_t next = team_next(team); next < tiling->count; next = team_next(team)) {
        const Tile *tile = &tiling->tiles[next];
#if LANES > FEW_ROWS
        if (tile->rows > FEW_ROWS) {
            attend_lanes(tile, items, heads, layer, q, out, partials);
            continue;
        }
#endif
        attend_few(tile, items, heads, layer, q, out, partials);
    }
    if (tiling->partial_floats == 0) return;
    team_meet(team);
    for (int64_t next = team_next(team); next < tiling->count; next = team_next(team)) {
        const Tile *tile = &tiling->tiles[next];
        if (tile->parts > 1 && tile->part == 0) join_parts(tile, items, heads, partials, out);
    }
}
