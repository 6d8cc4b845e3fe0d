#include "vectors.h"

#include "lanes.h"
#include "latent_prompts.h"
#include "memory.h"
#include "row_ops.h"

/* An item with so many queries has keys and values made. The arithmetic is less from some 170 on, in the sizes of
   DeepSeek's models. */
#define MANY 256

/* Queries that share what is made of a block of latents, up to MANY more. What they have found is held meanwhile. */
#define SHARING 512

#define TILES ((SHARING + MANY + LANES - 1) / LANES)

static int shares_of(const Item *item) { return (item->queries - MANY + SHARING) / SHARING; }

int32_t most_attending(const Items *items, Heads heads, int threads) {
    if (items->deterministic) return INT32_MAX;
    int each = (threads + heads.heads - 1) / heads.heads; /* shares of a head's queries that give every thread one */
    return MANY + SHARING * (each - 1) - 1;
}

/* What a thread holds: copies of latents, keys' plain features and values made of them, and tiles of queries. */
typedef struct {
    float *latents, *made, *powers, *tiles;
} Room;

static size_t tile_floats(const Latents *latents) {
    return (size_t)(latents->plain_dim + latents->rotary_dim + latents->value_ups->outputs) * LANES;
}

/* Floats of a row of what is made: a key's plain features, and from values_at() on its value. */
static int values_at(const Latents *latents) { return product_width(latents->plain_ups); }
static int made_width(const Latents *latents) { return values_at(latents) + product_width(latents->value_ups); }

static size_t lay_out(const Latents *latents, char *base, Room *room) {
    size_t used = 0;
    room->latents = take(base, &used, (size_t)KEYS * (size_t)PADDED(latents->rank));
    room->made = take(base, &used, (size_t)KEYS * (size_t)made_width(latents));
    room->powers = take(base, &used, (size_t)KEYS * LANES);
    room->tiles = take(base, &used, TILES * tile_floats(latents));
    return used;
}

size_t prompt_floats(const Latents *latents) {
    Room room;
    return lay_out(latents, NULL, &room) / sizeof(float);
}

/* Some queries of an item, for one head. */
typedef struct {
    const Latents *latents;
    const Item *item;
    const LayerKV *kv;
    int page_size, head, query, queries;
    Room room;
    Lanes tiles[TILES];
} Share;

/* The last key that tile t sees. */
static int last_key(const Share *share, int t) {
    int query = least(share->query + t * LANES + LANES, share->query + share->queries) - 1;
    return share->item->length - share->item->queries + query;
}

/* Puts the queries into lanes, rotated and scaled. */
static void begin_tiles(Share *share, const Queries *queries) {
    const Latents *latents = share->latents;
    int plain = latents->plain_dim, rotary = latents->rotary_dim, dim = plain + rotary;
    int history = share->item->length - share->item->queries;
    for (int t = 0; t * LANES < share->queries; t++) {
        Lanes *lanes = &share->tiles[t];
        float *at = share->room.tiles + (size_t)t * tile_floats(latents);
        *lanes = (Lanes){.q = at, .out = at + dim * LANES, .powers = share->room.powers, .highest = every(NOTHING)};
        memset(lanes->out, 0, (size_t)(latents->value_ups->outputs * LANES) * sizeof(float));
        for (int r = 0; r < LANES; r++) {
            int query = share->query + least(t * LANES + r, share->queries - 1), row = share->item->row + query;
            const float *from = queries->rows + (size_t)row * (size_t)queries->width + (size_t)(share->head * dim);
            float turned[rotary];
            memcpy(turned, from + plain, (size_t)rotary * sizeof(float));
            const float *rotation = queries->rotations + (size_t)queries->positions[row] * (size_t)rotary;
            rotate(turned, rotation, rotary, latents->scale);
            for (int d = 0; d < plain; d++) lanes->q[d * LANES + r] = from[d] * latents->scale;
            for (int d = 0; d < rotary; d++) lanes->q[(plain + d) * LANES + r] = turned[d];
            lanes->last_keys[r] = history + query;
        }
    }
}

/* Takes in a block's keys and values, which are made of its latents. */
static void take_block(Share *share, const Block *block) {
    const Latents *latents = share->latents;
    int plain = latents->plain_dim, width = made_width(latents), stride = PADDED(latents->rank);
    float *keys = share->room.made, *values = keys + values_at(latents);
    Block made = {.token = block->token, .count = block->count};
    for (int k = 0; k < block->count; k++) {
        const float *latent = share->kv->keys + block->at[k];
        memcpy(share->room.latents + k * stride, latent, (size_t)latents->rank * sizeof(float));
        made.at[k] = (size_t)(k * width);
    }
    product_alone(&latents->plain_ups[share->head], block->count, share->room.latents, stride, keys, width);
    product_alone(&latents->value_ups[share->head], block->count, share->room.latents, stride, values, width);
    for (int t = 0; t * LANES < share->queries; t++) {
        Lanes *lanes = &share->tiles[t];
        if (block->token > last_key(share, t)) continue;
        lane_scores(lanes, 0, plain, keys, &made);
        lane_scores(lanes, plain, latents->rotary_dim, share->kv->keys + latents->rank, block);
        int hides = block->token + block->count > lanes->last_keys[0] + 1;
        take_in(lanes, values, &made, latents->value_ups->outputs, hides);
    }
}

static void finish_tiles(const Share *share, float *to, int to_width) {
    int value_dim = share->latents->value_ups->outputs;
    for (int t = 0; t * LANES < share->queries; t++) {
        const Lanes *lanes = &share->tiles[t];
        int row = share->item->row + share->query + t * LANES, rows = least(LANES, share->queries - t * LANES);
        float *first = to + (size_t)row * (size_t)to_width + (size_t)(share->head * value_dim);
        for (int d = 0; d < value_dim; d++) {
            Floats value = load(lanes->out + d * LANES) / lanes->sum;
            for (int r = 0; r < rows; r++) first[(size_t)r * (size_t)to_width + (size_t)d] = value[r];
        }
    }
}

static void attend_share(Share *share, const Queries *queries, float *to, int to_width) {
    const int32_t *pages = pages_of(share->item, share->kv);
    int end = share->item->length - share->item->queries + share->query + share->queries;
    int key_dim = share->latents->rank + share->latents->rotary_dim;
    begin_tiles(share, queries);
    Block block;
    for (int token = 0; token < end; token += block.count) {
        find_block(&block, pages, share->page_size, key_dim, token, end);
        take_block(share, &block);
    }
    finish_tiles(share, to, to_width);
}

void attend_prompts(const Latents *latents, const Items *items, int32_t few, Heads heads, const LayerKV *kv,
                    const Queries *queries, float *to, int to_width, float *room, Team *team, int thread) {
    int64_t next = team_next(team), before = 0;
    Share share = {.latents = latents, .kv = kv, .page_size = items->page_size};
    lay_out(latents, (char *)(room + (size_t)thread * prompt_floats(latents)), &share.room);
    for (int index = 0; index < items->count; index++) {
        share.item = &items->items[index];
        if (share.item->queries <= few) continue;
        int64_t shares = shares_of(share.item), queries_of = share.item->queries;
        for (; next < before + shares * heads.heads; next = team_next(team)) {
            /* Queries that see most keys come first: the others fill in at the end. */
            int64_t place = shares - 1 - (next - before) / heads.heads;
            share.head = (int)((next - before) % heads.heads);
            share.query = (int)(queries_of * place / shares);
            share.queries = (int)(queries_of * (place + 1) / shares) - share.query;
            attend_share(&share, queries, to, to_width);
        }
        before += shares * heads.heads;
    }
}
