/* Attention of LANES rows at once, a lane each: vectors have a feature, a score or a sum of every row. */

#ifndef KEDGE_LANES_H
#define KEDGE_LANES_H

#include "places.h"
#include "vectors.h"

#define NOTHING -1e30f /* larger than any masked score, smaller than any other */

#if REGISTERS == 32
#define LANE_SUMS 16
#else
#define LANE_SUMS 8
#endif

/* Features of queries that are multiplied by all keys of a block while they are in the nearest cache. */
#define SCORED 128

/* `q` and `out` have a vector for each feature, `powers` for each of KEYS: first scores, then powers of them. Rows see
   keys first_keys .. last_keys. `highest` scores and `sum` of powers are those of the keys so far. */
typedef struct {
    float *q, *out, *powers;
    Ints first_keys, last_keys;
    Floats highest, sum;
} Lanes;

/* Features first .. first+count-1 of the queries with the first of the keys' at `keys`. */
INLINE void score_some(const Lanes *lanes, int first, int count, const float *keys, const Block *block, int key,
                       const int keys_at_once) {
    Floats sums[8];
    const float *from[8];
    UNROLL for (int k = 0; k < keys_at_once; k++) {
        sums[k] = first == 0 ? (Floats){0} : load(lanes->powers + (key + k) * LANES);
        from[k] = keys + block->at[key + k];
    }
    for (int d = 0; d < count; d++) {
        Floats part = load(lanes->q + (first + d) * LANES);
        UNROLL for (int k = 0; k < keys_at_once; k++) sums[k] += part * from[k][d];
    }
    UNROLL for (int k = 0; k < keys_at_once; k++) store(lanes->powers + (key + k) * LANES, sums[k]);
}

/* Adds to the scores of a block's keys what features first .. first+count-1 of the queries give, where `keys` are the
   keys' features for these; feature 0 begins the scores. A function of its own, or not all pointers to keys are held in
   registers. */
static __attribute__((noinline, unused)) void lane_scores(const Lanes *lanes, int first, int count, const float *keys,
                                                          const Block *block) {
    for (int done = 0; done < count; done += SCORED) {
        int now = least(count - done, SCORED), key = 0;
        for (; key + 8 <= block->count; key += 8)
            score_some(lanes, first + done, now, keys + done, block, key, 8);
        for (; key < block->count; key++) score_some(lanes, first + done, now, keys + done, block, key, 1);
    }
}

INLINE void lane_values(const Lanes *lanes, const float *values, const Block *block, Floats shrunk, int at,
                        const int wide) {
    Floats sums[LANE_SUMS];
    UNROLL for (int w = 0; w < wide; w++) sums[w] = rounded(load(lanes->out + (at + w) * LANES) * shrunk);
    for (int k = 0; k < block->count; k++) {
        Floats power = load(lanes->powers + k * LANES);
        const float *from = values + block->at[k] + at;
        UNROLL for (int w = 0; w < wide; w++) sums[w] += power * from[w];
    }
    UNROLL for (int w = 0; w < wide; w++) store(lanes->out + (at + w) * LANES, sums[w]);
}

/* Turns scores into powers, relative to `now`. Their sum is that of a few rows: those of every LANESth key first. */
INLINE Floats lane_powers(const Lanes *lanes, const Block *block, Floats now) {
    Floats sum = {0};
    for (int lane = 0; lane < LANES; lane++) {
        Floats part = {0};
        for (int k = (lane + KEYS - block->token % KEYS) % LANES; k < block->count; k += LANES) {
            Floats power = exponential(load(lanes->powers + k * LANES) - now);
            store(lanes->powers + k * LANES, power);
            part += power;
        }
        sum += part;
    }
    return sum;
}

/* Takes in a block of keys whose scores are there. `hides`: not every row sees all of them. */
INLINE void take_in(Lanes *lanes, const float *values, const Block *block, int value_dim, int hides) {
    for (int k = 0; k < block->count && hides; k++) {
        Ints hidden = (lanes->first_keys > block->token + k) | (lanes->last_keys < block->token + k);
        store(lanes->powers + k * LANES, choose(hidden, every(-INFINITY), load(lanes->powers + k * LANES)));
    }
    Floats now = lanes->highest;
    for (int k = 0; k < block->count; k++) now = larger(now, load(lanes->powers + k * LANES));
    Floats shrunk = exponential(lanes->highest - now);
    lanes->highest = now;
    lanes->sum = rounded(lanes->sum * shrunk) + lane_powers(lanes, block, now);
    int d = 0;
    for (; d + LANE_SUMS <= value_dim; d += LANE_SUMS) lane_values(lanes, values, block, shrunk, d, LANE_SUMS);
    for (; d < value_dim; d++) lane_values(lanes, values, block, shrunk, d, 1);
}

#endif
