#include "vectors.h"

#include "attention.h"

#include <stdlib.h>

/* Rows of a tile that are computed by keys; more are computed a lane each. */
#define FEW_ROWS 8

/* Keys whose scores are held at once. */
#define KEYS 64

/* A few rows' keys are split into parts of so many for threads to share. */
#define PART_KEYS 256

#define LARGEST_HEAD 512
#define NOTHING -1e30f /* larger than any masked score, smaller than any other */

#if REGISTERS == 32
#define WIDE 4 /* vectors of a value that are summed at once, for four rows */
#define LANE_SUMS 16
#else
#define WIDE 2
#define LANE_SUMS 8
#endif

static int first_key(int window, int position) { return window > 0 && position >= window ? position - window + 1 : 0; }

static int32_t most(int32_t a, int32_t b) { return a > b ? a : b; }
static int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }

void tiling_free(Tiling *tiling) {
    free(tiling->tiles);
    *tiling = (Tiling){0};
}

static Tile *one_more(Tiling *tiling) {
    if (tiling->count == tiling->room) {
        int64_t room = tiling->room ? 2 * tiling->room : 64;
        Tile *tiles = realloc(tiling->tiles, (size_t)room * sizeof(Tile));
        if (tiles == NULL) return NULL;
        tiling->tiles = tiles;
        tiling->room = room;
    }
    return &tiling->tiles[tiling->count++];
}

static int parts_of(const Items *items, int rows, int first, int end, int threads) {
    if (threads == 1 || rows > FEW_ROWS || items->deterministic) return 1;
    return most(1, (end - first) / PART_KEYS);
}

static const int32_t *pages_of(const Item *item, const LayerKV *layer) {
    return layer->in_window_pool ? item->window_pages : item->pages;
}

/* Whether rows come one item after another, and pages of what the layer reads or writes are in the table and the pool. */
static int is_sound(const Items *items, int index, int row, const LayerKV *layer) {
    const Item *item = &items->items[index];
    const int32_t *pages = pages_of(item, layer);
    int table_len = layer->in_window_pool ? item->window_table_len : item->table_len;
    if (item->row != row || item->queries < 1 || item->length < item->queries || item->queries > items->rows - row) return 0;
    if (pages == NULL || (item->length - 1) / items->page_size >= table_len) return 0;
    int page = first_key(layer->window, item->length - item->queries) / items->page_size;
    for (; page <= (item->length - 1) / items->page_size; page++)
        if (pages[page] < 0 || pages[page] >= layer->num_pages) return 0;
    return 1;
}

Outcome tile_items(Tiling *tiling, const Items *items, Heads heads, const LayerKV *layer, int threads) {
    int group = heads.heads / heads.kv_heads;
    tiling->window = layer->window;
    tiling->in_window_pool = layer->in_window_pool;
    tiling->count = tiling->partial_floats = 0;
    int next_row = 0;
    for (int index = 0; index < items->count; next_row += items->items[index++].queries)
        if (!is_sound(items, index, next_row, layer)) return BAD_TABLE;
    if (next_row != items->rows) return BAD_TABLE;
    for (int index = 0; index < items->count; index++) {
        const Item *item = &items->items[index];
        int rows = item->queries * group, history = item->length - item->queries;
        int height = rows <= FEW_ROWS ? rows : items->deterministic ? FEW_ROWS : LANES;
        for (int kv_head = 0; kv_head < heads.kv_heads; kv_head++)
            for (int row = 0; row < rows; row += height) {
                int count = least(height, rows - row);
                int first = first_key(layer->window, history + row / group);
                int end = history + (row + count - 1) / group + 1;
                int parts = parts_of(items, rows, first, end, threads);
                for (int part = 0; part < parts; part++) {
                    Tile *tile = one_more(tiling);
                    if (tile == NULL) return NO_MEMORY;
                    *tile = (Tile){.item = index, .kv_head = kv_head, .row = row, .rows = count, .part = part,
                                   .parts = parts, .partial = tiling->partial_floats};
                    tile->first = first + (int)((int64_t)(end - first) * part / parts);
                    tile->end = first + (int)((int64_t)(end - first) * (part + 1) / parts);
                }
                if (parts > 1) tiling->partial_floats += (int64_t)parts * count * (PADDED(heads.head_dim) + 2);
            }
    }
    return DONE;
}

/* Where token t's vectors begin in a head, in floats. */
static size_t place(const int32_t *pages, int page_size, int head_dim, int token) {
    return ((size_t)pages[token / page_size] * (size_t)page_size + (size_t)(token % page_size)) * (size_t)head_dim;
}

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
                memcpy(layer->values + to, values + from, head_bytes);
            }
        }
    }
}

/* What a tile has found so far: for each row the largest score, the sum of the powers, and the weighted values. */
typedef struct {
    const Tile *tile;
    const Item *item;
    int head_dim, group, window;
    float most[FEW_ROWS], sum[FEW_ROWS];
    const float *q[FEW_ROWS];
    float *out[FEW_ROWS];
    float scores[FEW_ROWS][KEYS + LANES];
} Few;

/* Lane i of the result is the total of sums[i]. Halves are folded onto each other, two vectors into one, so that the
   order of the lanes is that of reversed bits. */
INLINE Floats totals(Floats sums[LANES]) {
#if LANES == 16
    static const int reversed[16] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};
    Floats a[8], b[4], c[2];
    UNROLL for (int i = 0; i < 8; i++) {
        Floats x = sums[reversed[2 * i]], y = sums[reversed[2 * i + 1]];
        a[i] = SHUFFLE(x, y, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               SHUFFLE(x, y, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
    UNROLL for (int i = 0; i < 4; i++)
        b[i] = SHUFFLE(a[2 * i], a[2 * i + 1], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
               SHUFFLE(a[2 * i], a[2 * i + 1], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    UNROLL for (int i = 0; i < 2; i++)
        c[i] = SHUFFLE(b[2 * i], b[2 * i + 1], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               SHUFFLE(b[2 * i], b[2 * i + 1], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    return SHUFFLE(c[0], c[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
           SHUFFLE(c[0], c[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
#elif LANES == 8
    static const int reversed[8] = {0, 4, 2, 6, 1, 5, 3, 7};
    Floats a[4], b[2];
    UNROLL for (int i = 0; i < 4; i++) {
        Floats x = sums[reversed[2 * i]], y = sums[reversed[2 * i + 1]];
        a[i] = SHUFFLE(x, y, 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(x, y, 4, 5, 6, 7, 12, 13, 14, 15);
    }
    UNROLL for (int i = 0; i < 2; i++)
        b[i] = SHUFFLE(a[2 * i], a[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
               SHUFFLE(a[2 * i], a[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
    return SHUFFLE(b[0], b[1], 0, 8, 2, 10, 4, 12, 6, 14) + SHUFFLE(b[0], b[1], 1, 9, 3, 11, 5, 13, 7, 15);
#else
    Floats a = SHUFFLE(sums[0], sums[2], 0, 1, 4, 5) + SHUFFLE(sums[0], sums[2], 2, 3, 6, 7);
    Floats b = SHUFFLE(sums[1], sums[3], 0, 1, 4, 5) + SHUFFLE(sums[1], sums[3], 2, 3, 6, 7);
    return SHUFFLE(a, b, 0, 4, 2, 6) + SHUFFLE(a, b, 1, 5, 3, 7);
#endif
}

/* Scores of LANES keys from `from`; past the `count`th they are of the last one. */
INLINE Floats score_keys(const float *q, const float *keys, int count, int head_dim) {
    Floats sums[LANES];
    const float *key[LANES];
    UNROLL for (int k = 0; k < LANES; k++) {
        sums[k] = (Floats){0};
        key[k] = keys + (size_t)(k < count ? k : count - 1) * (size_t)head_dim;
    }
    int at = 0;
    for (; at + LANES <= head_dim; at += LANES) {
        Floats part = load(q + at);
        UNROLL for (int k = 0; k < LANES; k++) sums[k] += part * load(key[k] + at);
    }
    if (at < head_dim) {
        Floats part = load_some(q + at, head_dim - at);
        UNROLL for (int k = 0; k < LANES; k++) sums[k] += part * load_some(key[k] + at, head_dim - at);
    }
    return totals(sums);
}

/* Has `floats` of memory brought to the cache. A page of the pool is too short for the processor to see what comes. */
INLINE void fetch(const float *from, size_t floats) {
    for (size_t at = 0; at < floats; at += 16) __builtin_prefetch(from + at, 0, 3);
}

/* Takes in keys token .. token+count-1, which lie one after another; meanwhile their values are fetched. Their scores
   begin at lane `lead`. */
static void few_scores(Few *few, const float *keys, const float *values, int token, int count, int lead) {
    int padded = PADDED(lead + count);
    int history = few->item->length - few->item->queries;
    for (int r = 0; r < few->tile->rows; r++) {
        float *all = few->scores[r], *scores = all + lead;
        for (int k = 0; k < count; k += LANES) {
            if (r == 0)
                fetch(values + (size_t)k * (size_t)few->head_dim, (size_t)(least(LANES, count - k) * few->head_dim));
            store(scores + k, score_keys(few->q[r], keys + (size_t)k * (size_t)few->head_dim, count - k, few->head_dim));
        }
        int position = history + (few->tile->row + r) / few->group;
        int first = first_key(few->window, position) - token, end = least(count, position + 1 - token);
        for (int k = 0; k < least(first, count); k++) scores[k] = -INFINITY;
        for (int k = most(end, 0); k < padded - lead; k++) scores[k] = -INFINITY;
        for (int k = 0; k < lead; k++) all[k] = -INFINITY;
        Floats highest = load(all);
        for (int k = LANES; k < padded; k += LANES) highest = larger(highest, load(all + k));
        float before = few->most[r], now = largest(highest);
        now = now > before ? now : before;
        Floats sum = {0};
        for (int k = 0; k < padded; k += LANES) {
            Floats powers = exponential(load(all + k) - now);
            store(all + k, powers);
            sum += powers;
        }
        float shrunk = expf(before - now);
        few->most[r] = now;
        few->sum[r] = few->sum[r] * shrunk + total(sum);
        if (shrunk != 1.0f)
            for (int d = 0; d < few->head_dim; d += LANES) store(few->out[r] + d, load(few->out[r] + d) * shrunk);
    }
}

/* `next` has keys to be fetched meanwhile, as many as there are values, or is NULL. */
INLINE void add_values(Few *few, const float *values, const float *next, int count, int lead, int row, const int rows,
                       int at, const int wide) {
    Floats sums[4][WIDE];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int w = 0; w < wide; w++)
        sums[r][w] = load(few->out[row + r] + at + w * LANES);
    for (int k = 0; k < count; k++) {
        Floats value[WIDE];
        if (next != NULL) fetch(next + (size_t)k * (size_t)few->head_dim, (size_t)few->head_dim);
        UNROLL for (int w = 0; w < wide; w++) value[w] = load(values + (size_t)k * (size_t)few->head_dim + at + w * LANES);
        UNROLL for (int r = 0; r < rows; r++) {
            float weight = few->scores[row + r][lead + k];
            UNROLL for (int w = 0; w < wide; w++) sums[r][w] += value[w] * weight;
        }
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int w = 0; w < wide; w++)
        store(few->out[row + r] + at + w * LANES, sums[r][w]);
}

static void few_values(Few *few, const float *values, const float *next, int count, int lead) {
    int rows = few->tile->rows, head_dim = few->head_dim, at = 0;
    for (; at + LANES <= head_dim; ) {
        int wide = at + WIDE * LANES <= head_dim ? WIDE : 1;
        for (int row = 0; row < rows;) {
            int left = rows - row;
            const float *fetched = at == 0 && row == 0 ? next : NULL;
            if (wide == WIDE && left >= 4) add_values(few, values, fetched, count, lead, row, 4, at, WIDE), row += 4;
            else if (wide == WIDE && left >= 2) add_values(few, values, fetched, count, lead, row, 2, at, WIDE), row += 2;
            else if (wide == WIDE) add_values(few, values, fetched, count, lead, row, 1, at, WIDE), row += 1;
            else add_values(few, values, fetched, count, lead, row, 1, at, 1), row += 1;
        }
        at += wide * LANES;
    }
    if (at < head_dim)
        for (int row = 0; row < rows; row++) {
            Floats sum = load(few->out[row] + at);
            for (int k = 0; k < count; k++)
                sum += load_some(values + (size_t)k * (size_t)head_dim + at, head_dim - at) * few->scores[row][lead + k];
            store(few->out[row] + at, sum);
        }
}

/* Tokens from `token` that lie one after another in the pool: at most `limit`. */
static int run_length(const int32_t *pages, int page_size, int token, int limit) {
    int count = page_size - token % page_size;
    for (int page = token / page_size; count < limit && pages[page + 1] == pages[page] + 1; page++) count += page_size;
    return least(count, limit);
}

/* Tokens from `token`, at most `limit`, that are taken in at once by all queries that see them, whichever pages they lie
   in. `lead` is where among the lanes the first of them stands. */
static int block_length(int page_size, int token, int limit, int *lead) {
    int page = token / page_size * page_size, block = most(page, token / KEYS * KEYS);
    *lead = (token - block) % LANES;
    return least(least(page + page_size, (token / KEYS + 1) * KEYS) - token, limit);
}

/* Adds up what the parts of a tile have left. */
static void join_parts(const Tile *tile, const Items *items, Heads heads, const float *partials, float *out,
                       size_t out_stride) {
    const Item *item = &items->items[tile->item];
    int head_dim = heads.head_dim, group = heads.heads / heads.kv_heads;
    size_t row_floats = (size_t)PADDED(head_dim) + 2;
    for (int r = 0; r < tile->rows; r++) {
        const float *first = partials + tile->partial + (size_t)r * row_floats;
        size_t part_floats = (size_t)tile->rows * row_floats;
        float highest = NOTHING, sum = 0;
        for (int part = 0; part < tile->parts; part++)
            highest = fmaxf(highest, first[(size_t)part * part_floats]);
        int row = item->row + (tile->row + r) / group;
        float *to = out + (size_t)row * out_stride + (size_t)((tile->kv_head * group + (tile->row + r) % group) * head_dim);
        float joined[PADDED(LARGEST_HEAD)] = {0};
        for (int part = 0; part < tile->parts; part++) {
            const float *from = first + (size_t)part * part_floats;
            float weight = expf(from[0] - highest);
            sum += from[1] * weight;
            for (int d = 0; d < head_dim; d += LANES) store(joined + d, load(joined + d) + load(from + 2 + d) * weight);
        }
        for (int d = 0; d < head_dim; d += LANES) store_some(to + d, load(joined + d) / sum, head_dim - d);
    }
}

static void attend_few(const Tile *tile, const Items *items, Heads heads, const LayerKV *layer, const float *q,
                       size_t q_stride, float *out, size_t out_stride, float *partials) {
    const Item *item = &items->items[tile->item];
    const int32_t *pages = pages_of(item, layer);
    int group = heads.heads / heads.kv_heads, head_dim = heads.head_dim;
    float found[FEW_ROWS][PADDED(LARGEST_HEAD)];
    Few few = {.tile = tile, .item = item, .head_dim = head_dim, .group = group, .window = layer->window};
    for (int r = 0; r < tile->rows; r++) {
        int row = item->row + (tile->row + r) / group, head = tile->kv_head * group + (tile->row + r) % group;
        few.q[r] = q + (size_t)row * q_stride + (size_t)(head * head_dim);
        few.out[r] = found[r];
        few.most[r] = NOTHING;
        memset(found[r], 0, (size_t)PADDED(head_dim) * sizeof(float));
    }
    size_t head_at = (size_t)tile->kv_head * (size_t)layer->head_stride;
    for (int token = tile->first; token < tile->end;) {
        int left = tile->end - token, lead = 0;
        int count = items->deterministic ? block_length(items->page_size, token, left, &lead)
                                         : run_length(pages, items->page_size, token, least(KEYS, left));
        size_t at = head_at + place(pages, items->page_size, head_dim, token);
        const float *next = NULL;
        if (token + count < tile->end)
            next = layer->keys + head_at + place(pages, items->page_size, head_dim, token + count);
        few_scores(&few, layer->keys + at, layer->values + at, token, count, lead);
        few_values(&few, layer->values + at, next, count, lead);
        token += count;
    }
    if (tile->parts == 1) {
        for (int r = 0; r < tile->rows; r++) {
            int row = item->row + (tile->row + r) / group, head = tile->kv_head * group + (tile->row + r) % group;
            float *to = out + (size_t)row * out_stride + (size_t)(head * head_dim);
            for (int d = 0; d < head_dim; d += LANES)
                store_some(to + d, load(found[r] + d) / few.sum[r], head_dim - d);
        }
        return;
    }
    size_t row_floats = (size_t)PADDED(head_dim) + 2;
    float *mine = partials + tile->partial + (size_t)(tile->part * tile->rows) * row_floats;
    for (int r = 0; r < tile->rows; r++) {
        float *to = mine + (size_t)r * row_floats;
        to[0] = few.most[r];
        to[1] = few.sum[r];
        memcpy(to + 2, found[r], (size_t)PADDED(head_dim) * sizeof(float));
    }
}

/* Rows are lanes: q_DR has lane r of each feature, and so have scores and sums. */
typedef struct {
    float q[LARGEST_HEAD * LANES], out[LARGEST_HEAD * LANES], powers[KEYS * LANES];
} Lanes;

INLINE void lane_scores(Lanes *lanes, const float *keys, int head_dim, int key, const int keys_at_once) {
    Floats sums[8];
    UNROLL for (int k = 0; k < keys_at_once; k++) sums[k] = (Floats){0};
    const float *from = keys + (size_t)key * (size_t)head_dim;
    for (int d = 0; d < head_dim; d++) {
        Floats part = load(lanes->q + d * LANES);
        UNROLL for (int k = 0; k < keys_at_once; k++) sums[k] += part * from[(size_t)k * (size_t)head_dim + d];
    }
    UNROLL for (int k = 0; k < keys_at_once; k++) store(lanes->powers + (key + k) * LANES, sums[k]);
}

INLINE void lane_values(Lanes *lanes, const float *values, int head_dim, int count, Floats shrunk, int at, const int wide) {
    Floats sums[LANE_SUMS];
    UNROLL for (int w = 0; w < wide; w++) sums[w] = load(lanes->out + (at + w) * LANES) * shrunk;
    for (int k = 0; k < count; k++) {
        Floats power = load(lanes->powers + k * LANES);
        const float *from = values + (size_t)k * (size_t)head_dim + at;
        UNROLL for (int w = 0; w < wide; w++) sums[w] += power * from[w];
    }
    UNROLL for (int w = 0; w < wide; w++) store(lanes->out + (at + w) * LANES, sums[w]);
}

static void attend_lanes(const Tile *tile, const Items *items, Heads heads, const LayerKV *layer, const float *q,
                         size_t q_stride, float *out, size_t out_stride, Lanes *lanes) {
    const Item *item = &items->items[tile->item];
    const int32_t *pages = pages_of(item, layer);
    int group = heads.heads / heads.kv_heads, head_dim = heads.head_dim, history = item->length - item->queries;
    float *rows_out[LANES];
    Ints first_keys, last_keys;
    for (int r = 0; r < LANES; r++) {
        int at = tile->row + least(r, tile->rows - 1), head = tile->kv_head * group + at % group;
        int row = item->row + at / group, position = history + at / group;
        const float *from = q + (size_t)row * q_stride + (size_t)(head * head_dim);
        for (int d = 0; d < head_dim; d++) lanes->q[d * LANES + r] = from[d];
        rows_out[r] = out + (size_t)row * out_stride + (size_t)(head * head_dim);
        first_keys[r] = first_key(layer->window, position);
        last_keys[r] = position;
    }
    memset(lanes->out, 0, (size_t)head_dim * LANES * sizeof(float));
    Floats highest = every(NOTHING), sum = {0};
    size_t head_at = (size_t)tile->kv_head * (size_t)layer->head_stride;
    int seen_by_all = history + tile->row / group + 1; /* keys before this one, but for the window */
    for (int token = tile->first; token < tile->end;) {
        int count = run_length(pages, items->page_size, token, least(KEYS, tile->end - token)), key = 0;
        size_t at = head_at + place(pages, items->page_size, head_dim, token);
        const float *keys = layer->keys + at, *values = layer->values + at;
        for (; key + 8 <= count; key += 8) lane_scores(lanes, keys, head_dim, key, 8);
        for (; key < count; key++) lane_scores(lanes, keys, head_dim, key, 1);
        if (layer->window > 0 || token + count > seen_by_all)
            for (int k = 0; k < count; k++) {
                Ints hidden = (first_keys > token + k) | (last_keys < token + k);
                store(lanes->powers + k * LANES, choose(hidden, every(-INFINITY), load(lanes->powers + k * LANES)));
            }
        Floats now = highest;
        for (int k = 0; k < count; k++) now = larger(now, load(lanes->powers + k * LANES));
        Floats shrunk = exponential(highest - now);
        highest = now;
        sum *= shrunk;
        for (int k = 0; k < count; k++) {
            Floats power = exponential(load(lanes->powers + k * LANES) - now);
            store(lanes->powers + k * LANES, power);
            sum += power;
        }
        int d = 0;
        for (; d + LANE_SUMS <= head_dim; d += LANE_SUMS) lane_values(lanes, values, head_dim, count, shrunk, d, LANE_SUMS);
        for (; d < head_dim; d++) lane_values(lanes, values, head_dim, count, shrunk, d, 1);
        token += count;
    }
    for (int d = 0; d < head_dim; d++) {
        Floats value = load(lanes->out + d * LANES) / sum;
        for (int r = 0; r < tile->rows; r++) rows_out[r][d] = value[r];
    }
}

void attend(const Tiling *tiling, const Items *items, Heads heads, const LayerKV *layer, const float *q, size_t q_stride,
            float *out, size_t out_stride, float *partials, Team *team) {
    Lanes lanes;
    for (int64_t next = team_next(team); next < tiling->count; next = team_next(team)) {
        const Tile *tile = &tiling->tiles[next];
        if (tile->rows <= FEW_ROWS)
            attend_few(tile, items, heads, layer, q, q_stride, out, out_stride, partials);
        else
            attend_lanes(tile, items, heads, layer, q, q_stride, out, out_stride, &lanes);
    }
    if (tiling->partial_floats == 0) return;
    team_meet(team);
    for (int64_t next = team_next(team); next < tiling->count; next = team_next(team)) {
        const Tile *tile = &tiling->tiles[next];
        if (tile->parts > 1 && tile->part == 0) join_parts(tile, items, heads, partials, out, out_stride);
    }
}
