/* What a step needs, laid out one piece after another in one block of memory. */

#ifndef KEDGE_MEMORY_H
#define KEDGE_MEMORY_H

#include <stddef.h>

#define CACHE_LINE 64

/* Gives out `count` floats or other values of 32 bits, whole cache lines of them. With a base of NULL it only counts. */
static inline void *take(char *base, size_t *used, size_t count) {
    void *at = base == NULL ? NULL : base + *used;
    *used += (count * sizeof(float) + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
    return at;
}

#endif
