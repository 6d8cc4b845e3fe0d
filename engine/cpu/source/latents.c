#include "vectors.h"

#include "latents.h"
#include "memory.h"
#include "row_ops.h"

static int key_width(const Latents *latents) { return PADDED(latents->rank + latents->rotary_dim); }

static int plain_width(const Latents *latents) {
    return most(PADDED(latents->plain_dim), product_width(latents->value_ups));
}

size_t latents_lay_out(const Latents *latents, int heads, int rows, char *base, LatentRoom *room) {
    size_t used = 0, many = (size_t)heads * (size_t)rows;
    int query_width = latents->query_up == NULL ? 0 : product_width(latents->query_up);
    room->query = take(base, &used, (size_t)rows * (size_t)query_width);
    room->plain = take(base, &used, many * (size_t)plain_width(latents));
    room->queries = take(base, &used, many * (size_t)key_width(latents));
    room->found = take(base, &used, many * (size_t)PADDED(latents->rank));
    room->first = take(base, &used, (size_t)heads + 1);
    return used;
}

size_t latents_scratch(const Latents *latents, int heads, int rows, int threads) {
    size_t sizes[] = {latents->query_up == NULL ? 0 : product_scratch(latents->query_up, rows, threads),
                      grouped_scratch(latents->key_ups, heads, heads * rows, threads),
                      grouped_scratch(latents->value_ups, heads, heads * rows, threads)};
    size_t most_bytes = sizes[0];
    for (int index = 1; index < 3; index++) most_bytes = sizes[index] > most_bytes ? sizes[index] : most_bytes;
    return most_bytes;
}

/* The queries in `down`, or those made of the latents that are there. Gives how far apart their rows are. */
static int find_queries(const Latents *latents, int rows, float *down, int down_width, const LatentRoom *room, void *scratch,
                        Team *team, int thread, const float **queries) {
    *queries = down;
    if (latents->query_up == NULL) return down_width;
    int first, end, width = product_width(latents->query_up);
    team_share(team, thread, rows, &first, &end);
    for (int row = first; row < end; row++) {
        float *latent = down + (size_t)row * (size_t)down_width;
        normalise(latent, latents->query_norm, latents->query_rank, latents->eps, latent);
    }
    team_meet(team);
    product(latents->query_up, rows, down, down_width, room->query, width, STORE, scratch, team, thread);
    team_meet(team);
    *queries = room->query;
    return width;
}

/* Rotates the scaled copy of a query's rotary features that is behind its query for latents. */
static void rotate_queries(const Latents *latents, int heads, int rows, const float *queries, int queries_width,
                           const int64_t *positions, const float *rotations, const LatentRoom *room, int first, int end) {
    size_t width = (size_t)key_width(latents), rotary = (size_t)latents->rotary_dim, plain = (size_t)latents->plain_dim;
    for (int head = 0; head < heads; head++)
        for (int row = first; row < end; row++) {
            const float *from = queries + (size_t)row * (size_t)queries_width + (size_t)head * (plain + rotary) + plain;
            float *to = room->queries + ((size_t)head * (size_t)rows + (size_t)row) * width + latents->rank;
            memcpy(to, from, rotary * sizeof(float));
            rotate(to, rotations + (size_t)positions[row] * rotary, latents->rotary_dim, latents->scale);
        }
}

void make_latent_queries(const Latents *latents, const Items *items, Heads heads, const LayerKV *kv, float *down,
                         int down_width, const int64_t *positions, const float *rotations, const LatentRoom *room,
                         void *scratch, Team *team, int thread) {
    const float *queries;
    int rows = items->rows, plain = latents->plain_dim, rotary = latents->rotary_dim, first, end;
    int queries_width = find_queries(latents, rows, down, down_width, room, scratch, team, thread, &queries);
    int key_at = latents->query_up == NULL ? heads.heads * (plain + rotary) : latents->query_rank;
    team_share(team, thread, rows, &first, &end);
    for (int row = first; row < end; row++) {
        float *key = down + (size_t)row * (size_t)down_width + key_at;
        normalise(key, latents->latent_norm, latents->rank, latents->eps, key);
        rotate(key + latents->rank, rotations + (size_t)positions[row] * (size_t)rotary, rotary, 1.0f);
        const float *query = queries + (size_t)row * (size_t)queries_width;
        for (int head = 0; head < heads.heads; head++, query += plain + rotary) {
            float *to = room->plain + ((size_t)head * (size_t)rows + (size_t)row) * (size_t)plain_width(latents);
            for (int i = 0; i < plain; i++) to[i] = query[i] * latents->scale;
        }
    }
    write_kv(items, heads, kv, down + key_at, NULL, (size_t)down_width, first, end);
    if (thread == 0)
        for (int head = 0; head <= heads.heads; head++) room->first[head] = head * rows;
    team_meet(team);
    grouped_product(latents->key_ups, heads.heads, room->first, room->plain, plain_width(latents), room->queries,
                    key_width(latents), STORE, scratch, team, thread);
    team_meet(team);
    rotate_queries(latents, heads.heads, rows, queries, queries_width, positions, rotations, room, first, end);
    team_meet(team);
}

HeadRows latent_queries(const Latents *latents, int rows, const LatentRoom *room) {
    size_t width = (size_t)key_width(latents);
    return (HeadRows){room->queries, width, (size_t)rows * width};
}

HeadRows latents_found(const Latents *latents, int rows, const LatentRoom *room) {
    size_t width = (size_t)PADDED(latents->rank);
    return (HeadRows){room->found, width, (size_t)rows * width};
}

void make_latent_values(const Latents *latents, int heads, int rows, const LatentRoom *room, float *to, int to_width,
                        void *scratch, Team *team, int thread) {
    int first, end, width = plain_width(latents), value_dim = latents->value_ups->outputs;
    grouped_product(latents->value_ups, heads, room->first, room->found, PADDED(latents->rank), room->plain, width, STORE,
                    scratch, team, thread);
    team_meet(team);
    team_share(team, thread, rows, &first, &end);
    for (int row = first; row < end; row++)
        for (int head = 0; head < heads; head++)
            memcpy(to + (size_t)row * (size_t)to_width + head * value_dim,
                   room->plain + ((size_t)head * (size_t)rows + (size_t)row) * (size_t)width,
                   (size_t)value_dim * sizeof(float));
    team_meet(team);
}
