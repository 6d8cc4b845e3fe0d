/* Multi-head latent attention (DeepSeek-V2, 2024): what comes before and after attention to latents. A token's key in the
   pool is its latent and then its rotary features; the value is the latent. */

#ifndef KEDGE_LATENTS_H
#define KEDGE_LATENTS_H

#include "attention.h"
#include "product.h"

/* A query has `plain_dim` features and then `rotary_dim`, a key in the pool `rank` and then `rotary_dim`. `query_up` makes
   queries of latents of `query_rank`, which `query_norm` has the weights for; without these latents it is NULL. `key_ups`,
   `value_ups` and `plain_ups` are by head: plain features of a query to a query for latents, latents to values, and latents
   to plain features of keys. The struct is shared with engine/cpu/library.py. */
typedef struct {
    const Matrix *query_up, *key_ups, *value_ups, *plain_ups;
    const float *query_norm, *latent_norm;
    int32_t query_rank, rank, plain_dim, rotary_dim;
    float eps, scale;
} Latents;

/* Rows first .. first+count-1 of a step. */
typedef struct {
    int32_t first, count;
} RowRange;

/* What a step needs for it. Legend: M rows that attend to latents. */
typedef struct {
    float *query;   /* [rows][width of query_up] */
    float *plain;   /* [heads][M][width of a plain query, or of a value] */
    float *queries; /* [heads][M][padded key] */
    float *found;   /* [heads][M][padded latent] */
    int32_t *first; /* [heads + 1]: where each head's rows begin */
} LatentRoom;

/* Rows of queries, neither rotated nor scaled, and the rotations of their positions. */
typedef struct {
    const float *rows;
    int width;
    const int64_t *positions;
    const float *rotations;
} Queries;

/* Where what is in `base` lies, and how many bytes that takes, if of a step's `rows` there are `attending` that attend to
   latents. With a base of NULL it only counts. */
size_t latents_lay_out(const Latents *latents, int heads, int rows, int attending, char *base, LatentRoom *room);

/* For the products, in bytes. */
size_t latents_scratch(const Latents *latents, int heads, int rows, int threads);

/* Of rows of `down`, [queries or their latents, key], writes the keys to the pool and gives the queries. Every thread of
   the team calls this and the two functions that make something, and has met at the end of each. */
Queries write_latents(const Latents *latents, const Items *items, Heads heads, const LayerKV *kv, float *down,
                     int down_width, const int64_t *positions, const float *rotations, const LatentRoom *room,
                     void *scratch, Team *team, int thread);

/* Makes queries for latents, already scaled, of some rows. */
void make_latent_queries(const Latents *latents, int heads, RowRange rows, const Queries *queries, const LatentRoom *room,
                         void *scratch, Team *team, int thread);

/* Where attention reads the queries and leaves what it finds. */
HeadRows latent_queries(const Latents *latents, RowRange rows, const LatentRoom *room);
HeadRows latents_found(const Latents *latents, RowRange rows, const LatentRoom *room);

/* Writes the heads' values, one after another, to these rows of `to`. */
void make_latent_values(const Latents *latents, int heads, RowRange rows, const LatentRoom *room, float *to, int to_width,
                        void *scratch, Team *team, int thread);

#endif
