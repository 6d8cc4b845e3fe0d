/* Scores of LANES keys at once, by few queries. */

#ifndef KEDGE_KEY_SCORES_H
#define KEDGE_KEY_SCORES_H

#include "vectors.h"

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

/* Each key's features are multiplied LANES at a time, and added up at the end. */
INLINE Floats score_keys(const float *q, const float *const keys[LANES], int head_dim) {
    Floats sums[LANES];
    UNROLL for (int k = 0; k < LANES; k++) sums[k] = (Floats){0};
    int at = 0;
    for (; at + LANES <= head_dim; at += LANES) {
        Floats part = load(q + at);
        UNROLL for (int k = 0; k < LANES; k++) sums[k] += part * load(keys[k] + at);
    }
    if (at < head_dim) {
        Floats part = load_some(q + at, head_dim - at);
        UNROLL for (int k = 0; k < LANES; k++) sums[k] += part * load_some(keys[k] + at, head_dim - at);
    }
    return totals(sums);
}

/* Lane j of the upper of two rows that are `step` apart, after they have exchanged halves of every 2 * step lanes. */
#define UPPER(j, step) ((j) & (step) ? LANES + (j) - (step) : (j))
#define LOWER(j, step) (UPPER(j, step) + (step))
#define FOUR(half, j, step) half(j, step), half(j + 1, step), half(j + 2, step), half(j + 3, step)
#if LANES == 16
#define ALL(half, step) FOUR(half, 0, step), FOUR(half, 4, step), FOUR(half, 8, step), FOUR(half, 12, step)
#elif LANES == 8
#define ALL(half, step) FOUR(half, 0, step), FOUR(half, 4, step)
#else
#define ALL(half, step) FOUR(half, 0, step)
#endif

#define EXCHANGE(step)                                              \
    UNROLL for (int i = 0; i < LANES; i++)                          \
        if ((i & (step)) == 0) {                                    \
            Floats a = rows[i], b = rows[i + (step)];               \
            rows[i] = SHUFFLE(a, b, ALL(UPPER, step));              \
            rows[i + (step)] = SHUFFLE(a, b, ALL(LOWER, step));     \
        }

/* Lane j of row i becomes lane i of row j. */
INLINE void transpose(Floats rows[LANES]) {
#if LANES == 16
    EXCHANGE(8)
#endif
#if LANES >= 8
    EXCHANGE(4)
#endif
    EXCHANGE(2)
    EXCHANGE(1)
}

INLINE void add_features(const float *const *q, const int queries, int at, int count, const Floats features[LANES],
                         Floats *scores) {
    for (int d = 0; d < count; d++) UNROLL for (int r = 0; r < queries; r++) scores[r] += q[r][at + d] * features[d];
}

/* Each key has a lane, and its features are added up from the first to the last. */
INLINE void score_in_order(const float *const *q, int queries, const float *const keys[LANES], int head_dim,
                           Floats *scores) {
    for (int r = 0; r < queries; r++) scores[r] = (Floats){0};
    for (int at = 0; at < head_dim; at += LANES) {
        Floats features[LANES];
        UNROLL for (int k = 0; k < LANES; k++) features[k] = load_some(keys[k] + at, head_dim - at);
        transpose(features);
        int count = head_dim - at < LANES ? head_dim - at : LANES, r = 0;
        for (; r + 4 <= queries; r += 4) add_features(q + r, 4, at, count, features, scores + r);
        for (; r < queries; r++) add_features(q + r, 1, at, count, features, scores + r);
    }
}

#endif
