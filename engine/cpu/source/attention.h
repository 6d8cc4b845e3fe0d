/* Attention over the paged KV pool. */

#ifndef KEDGE_ATTENTION_H
#define KEDGE_ATTENTION_H

#include <stddef.h>
#include <stdint.h>

#include "team.h"

/* Rows of a tile that are computed by keys; more are computed a lane each, where vectors are that wide. */
#define FEW_ROWS 8

static inline int32_t most(int32_t a, int32_t b) { return a > b ? a : b; }
static inline int32_t least(int32_t a, int32_t b) { return a < b ? a : b; }

/* The first key that a query at `position` sees. */
static inline int first_key(int window, int position) {
    return window > 0 && position >= window ? position - window + 1 : 0;
}

/* One request's share of a step: its last `queries` of `length` tokens are rows row .. row+queries-1. Token t lies in
   slot pages[t / page_size] * page_size + t % page_size; the tables' lengths are theirs, in pages. Structs of this file
   but Tile and Tiling are shared with engine/cpu/library.py. */
typedef struct {
    const int32_t *pages, *window_pages;
    int32_t row, queries, length, table_len, window_table_len;
} Item;

/* What became of a call: after all but DONE nothing was computed or written. */
typedef enum { DONE, NO_MEMORY, BAD_TABLE, BAD_POSITION } Outcome;

/* The items of a step. If `deterministic`, what is computed of a query depends on nothing but its own sequence: not on
   the items and queries beside it, nor on which pages its keys lie in, nor on the number of threads. */
typedef struct {
    const Item *items;
    int32_t count, rows, page_size, deterministic;
} Items;

/* One layer's keys and values: head h of slot s is at keys + h * head_stride + s * head_dim, and likewise values. Where
   `values` is `keys` a value is the first floats of its key, which is written alone. A query sees the last `window`
   tokens up to its own, all if that is 0. `num_pages` is the pool's. `sinks` has a score for each head, which takes part
   in the softmax without a value; or it is NULL. */
typedef struct {
    float *keys, *values;
    const float *sinks;
    int64_t head_stride;
    int32_t in_window_pool, window, num_pages;
} LayerKV;

/* A value has `value_dim` floats, at most head_dim. */
typedef struct {
    int32_t heads, kv_heads, head_dim, value_dim;
} Heads;

/* Head h of row first + r is at `at` + r * row_stride + h * head_stride. */
typedef struct {
    float *at;
    size_t row_stride, head_stride;
    int32_t first;
} HeadRows;

static inline float *head_of(HeadRows rows, int row, int head) {
    return rows.at + (size_t)(row - rows.first) * rows.row_stride + (size_t)head * rows.head_stride;
}

/* Rows of one key head that are computed together: row r is query r / group of the item, head r % group of the group.
   They see keys `first` .. `end`-1, some of them masked. If the keys are split among `parts` tiles, each leaves its sums,
   to be added up. */
typedef struct {
    int32_t item, kv_head, row, rows, first, end, part, parts;
    int64_t partial; /* where the first part leaves its sums, in floats */
} Tile;

/* How the items of a step are cut, for one window. */
typedef struct {
    int32_t window, in_window_pool;
    int64_t count, room, partial_floats;
    Tile *tiles;
} Tiling;

/* Cuts the items anew, but for those with more than `most_queries`; memory is kept from step to step. Tables are followed
   from then on without a look: all that the layer reads or writes is looked at here, of every item. */
Outcome tile_items(Tiling *tiling, const Items *items, Heads heads, const LayerKV *layer, int32_t most_queries,
                   int threads);

void tiling_free(Tiling *tiling);

/* Writes rows first .. end-1 of keys and values, [row][kv_heads][head_dim] at row_stride floats, to the pool. Without
   values in the pool `values` is not read. */
void write_kv(const Items *items, Heads heads, const LayerKV *layer, const float *keys, const float *values,
              size_t row_stride, int first, int end);

/* Called by every thread of a team that has met since the queries (already scaled) and the pool were written, and must
   meet before `out` is read. `partials` has room for the tiling's partial_floats. */
void attend(const Tiling *tiling, const Items *items, Heads heads, const LayerKV *layer, HeadRows q, HeadRows out,
            float *partials, Team *team);

#endif
