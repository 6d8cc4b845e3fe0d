/* How a step's attention is cut into tiles. */

#include "vectors.h"

#include "attention.h"
#include "places.h"

#include <stdlib.h>

/* A few rows' keys are split into parts of so many for threads to share. More rows are split into as many parts as
   leave each thread some tiles. */
#define PART_KEYS 256
#define TILES_EACH 4

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

static int parts_of(const Items *items, int rows, int tiles, int keys, int threads) {
    if (threads == 1 || items->deterministic) return 1;
    int parts = most(1, keys / PART_KEYS);
    return rows <= FEW_ROWS ? parts : least(parts, most(1, TILES_EACH * threads / tiles));
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

Outcome tile_items(Tiling *tiling, const Items *items, Heads heads, const LayerKV *layer, int32_t most_queries,
                   int threads) {
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
        if (item->queries > most_queries) continue;
        int rows = item->queries * group, history = item->length - item->queries;
        int height = rows <= FEW_ROWS ? rows : LANES, tiles = heads.kv_heads * ((rows + height - 1) / height);
        for (int kv_head = 0; kv_head < heads.kv_heads; kv_head++)
            for (int row = 0; row < rows; row += height) {
                int count = least(height, rows - row);
                int first = first_key(layer->window, history + row / group);
                int end = history + (row + count - 1) / group + 1;
                int parts = parts_of(items, rows, tiles, end - first, threads);
                for (int part = 0; part < parts; part++) {
                    Tile *tile = one_more(tiling);
                    if (tile == NULL) return NO_MEMORY;
                    *tile = (Tile){.item = index, .kv_head = kv_head, .row = row, .rows = count, .part = part,
                                   .parts = parts, .partial = tiling->partial_floats};
                    tile->first = first + (int)((int64_t)(end - first) * part / parts);
                    tile->end = first + (int)((int64_t)(end - first) * (part + 1) / parts);
                }
                if (parts > 1) tiling->partial_floats += (int64_t)parts * count * (PADDED(heads.value_dim) + 2);
            }
    }
    return DONE;
}
