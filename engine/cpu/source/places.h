/* Where the keys of an item's tokens lie in a pool. */

#ifndef KEDGE_PLACES_H
#define KEDGE_PLACES_H

#include "attention.h"

/* Keys whose scores are held at once. A block begins at a multiple of these. */
#define KEYS 64

/* Keys token .. token+count-1 of a block, and where each begins in a head, in floats. */
typedef struct {
    int token, count;
    size_t at[KEYS];
} Block;

static inline const int32_t *pages_of(const Item *item, const LayerKV *layer) {
    return layer->in_window_pool ? item->window_pages : item->pages;
}

/* Where token t's vectors begin in a head, in floats. */
static inline size_t place(const int32_t *pages, int page_size, int head_dim, int token) {
    return ((size_t)pages[token / page_size] * (size_t)page_size + (size_t)(token % page_size)) * (size_t)head_dim;
}

/* The keys from `token` to the end of its block, or to `end`; none if that is reached. */
static inline void find_block(Block *block, const int32_t *pages, int page_size, int head_dim, int token, int end) {
    end = least(end, (token / KEYS + 1) * KEYS);
    block->token = token;
    block->count = most(end - token, 0);
    for (int k = 0; k < block->count;) {
        size_t at = place(pages, page_size, head_dim, token + k);
        int page_end = least(block->count, k + page_size - (token + k) % page_size);
        for (; k < page_end; k++, at += (size_t)head_dim) block->at[k] = at;
    }
}

#endif
