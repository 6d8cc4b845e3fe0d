#include "vectors.h"

#include "latents.h"
#include "memory.h"
#include "row_ops.h"

static int key_width(const Latents *latents) {
    return most(PADDED(latents->rank + latents->rotary_dim), product_width(latents->key_ups));
}

static int plain_width(const Latents *latents) {
    return most(PADDED(latents->plain_dim), product_width(latents->value_ups));
}

size_t latents_lay_out(const Latents *latents, int heads, int rows, int attending, char *base, LatentRoom *room) {
    size_t used = 0, many = (size_t)heads * (size_t)attending;
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

Queries write_latents(const Latents *latents, const Items *items, Heads heads, const LayerKV *kv, float *down,
                     int down_width, const int64_t *positions, const float *rotations, const LatentRoom *room,
                     void *scratch, Team *team, int thread) {
    Queries queries = {.positions = positions, .rotations = rotations};
    int rotary = latents->rotary_dim, first, end;
    queries.width = find_queries(latents, items->rows, down, down_width, room, scratch, team, thread, &queries.rows);
    int key_at = latents->query_up == NULL ? heads.heads * (latents->plain_dim + rotary) : latents->query_rank;
    team_share(team, thread, items->rows, &first, &end);
    for (int row = first; row < end; row++) {
        float *key = down + (size_t)row * (size_t)down_width + key_at;
        normalise(key, latents->latent_norm, latents->rank, latents->eps, key);
        rotate(key + latents->rank, rotations + (size_t)positions[row] * (size_t)rotary, rotary, 1.0f);
    }
    write_kv(items, heads, kv, down + key_at, NULL, (size_t)down_width, first, end);
    team_meet(team);
    return queries;
}

void make_latent_queries(const Latents *latents, int heads, RowRange rows, const Queries *queries, const LatentRoom *room,
                         void *scratch, Team *team, int thread) {
    int plain = latents->plain_dim, rotary = latents->rotary_dim, width = key_width(latents), first, end;
    team_share(team, thread, rows.count, &first, &end);
    for (int r = first; r < end; r++) {
        const float *query = queries->rows + (size_t)(rows.first + r) * (size_t)queries->width;
        for (int head = 0; head < heads; head++, query += plain + rotary) {
            float *to = room->plain + (size_t)(head * rows.count + r) * (size_t)plain_width(latents);
            for (int i = 0; i < plain; i++) to[i] = query[i] * latents->scale;
        }
    }
    if (thread == 0)
        for (int head = 0; head <= heads; head++) room->first[head] = head * rows.count;
    team_meet(team);
    grouped_product(latents->key_ups, heads, room->first, room->plain, plain_width(latents), room->queries, width, STORE,
                    scratch, team, thread);
    team_meet(team);
    for (int r = first; r < end; r++) {
        const float *query = queries->rows + (size_t)(rows.first + r) * (size_t)queries->width + plain;
        const float *rotation = queries->rotations + (size_t)queries->positions[rows.first + r] * (size_t)rotary;
        for (int head = 0; head < heads; head++, query += plain + rotary) {
            float *to = room->queries + (size_t)(head * rows.count + r) * (size_t)width + latents->rank;
            memcpy(to, query, (size_t)rotary * sizeof(float));
            rotate(to, rotation, rotary, latents->scale);
        }
    }
    team_meet(team);
}

HeadRows latent_queries(const Latents *latents, RowRange rows, const LatentRoom *room) {
    size_t width = (size_t)key_width(latents);
    return (HeadRows){room->queries, width, (size_t)rows.count * width, rows.first};
}

HeadRows latents_found(const Latents *latents, RowRange rows, const LatentRoom *room) {
    size_t width = (size_t)PADDED(latents->rank);
    return (HeadRows){room->found, width, (size_t)rows.count * width, rows.first};
}

void make_latent_values(const Latents *latents, int heads, RowRange rows, const LatentRoom *room, float *to, int to_width,
                        void *scratch, Team *team, int thread) {
    int first, end, width = plain_width(latents), value_dim = latents->value_ups->outputs;
    grouped_product(latents->value_ups, heads, room->first, room->found, PADDED(latents->rank), room->plain, width, STORE,
                    scratch, team, thread);
    team_meet(team);
    team_share(team, thread, rows.count, &first, &end);
    for (int r = first; r < end; r++)
        for (int head = 0; head < heads; head++)
            memcpy(to + (size_t)(rows.first + r) * (size_t)to_width + head * value_dim,
                   room->plain + (size_t)(head * rows.count + r) * (size_t)width, (size_t)value_dim * sizeof(float));
    team_meet(team);
}
