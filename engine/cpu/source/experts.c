/* A layer's experts. Rows are put in the order of their experts, so that all rows of an expert are multiplied together. */

#include "vectors.h"

#include "experts.h"
#include "memory.h"

/* Rows of experts, top_k for each row of x, that are in memory at a time. */
#define MOST_AT_A_TIME 8192

/* Legend: M = rows * top_k. */
typedef struct {
    float *scores;   /* [rows][width of the router], of which the first `count` count */
    float *choice;   /* like scores: what experts are chosen by */
    float *weights;  /* [M] */
    int32_t *chosen; /* [M]: experts, by row */
    int32_t *place;  /* [M]: where that row stands in the order of experts */
    int32_t *first;  /* [count + 1]: where each expert's rows begin */
    float *gathered; /* [M][width]: rows in the order of experts, and then their results */
    float *inner;    /* [M][width of gate_up] */
} Room;

static int rows_at_a_time(const Experts *experts, int rows) {
    int most = MOST_AT_A_TIME / experts->top_k;
    most = most < 1 ? 1 : most;
    return rows < most ? rows : most;
}

static size_t lay_out(const Experts *experts, int rows, int width, char *base, Room *room) {
    size_t used = 0, many = (size_t)rows * (size_t)experts->top_k;
    room->scores = take(base, &used, (size_t)rows * (size_t)product_width(experts->router));
    room->choice = take(base, &used, (size_t)rows * (size_t)product_width(experts->router));
    room->weights = take(base, &used, many);
    room->chosen = take(base, &used, many);
    room->place = take(base, &used, many);
    room->first = take(base, &used, (size_t)experts->count + 1);
    room->gathered = take(base, &used, many * (size_t)width);
    room->inner = take(base, &used, many * (size_t)product_width(experts->gate_up));
    return used;
}

size_t experts_room(const Experts *experts, int rows, int width) {
    Room room;
    return lay_out(experts, rows_at_a_time(experts, rows), width, NULL, &room);
}

size_t experts_scratch(const Experts *experts, int rows, int threads) {
    int taken = rows_at_a_time(experts, rows), many = taken * experts->top_k;
    size_t sizes[] = {product_scratch(experts->router, taken, threads),
                      grouped_scratch(experts->gate_up, experts->count, many, threads),
                      grouped_scratch(experts->down, experts->count, many, threads)};
    size_t most = sizes[0];
    for (int index = 1; index < 3; index++) most = sizes[index] > most ? sizes[index] : most;
    return most;
}

/* The sum of e^(score - highest), in the same order whatever else the step computes. */
static float sum_of_powers(const float *scores, int count, float highest) {
    Floats sums = {0};
    for (int i = 0; i < count; i += LANES) {
        Floats part = every(-INFINITY);
        memcpy(&part, scores + i, (size_t)(count - i < LANES ? count - i : LANES) * sizeof(float));
        sums += exponential(part - highest);
    }
    return total(sums);
}

/* Where the highest of `count` values is; of equal ones the first. `taken` are not looked at, `many` of them, fewer than
   `count`. */
static int highest_of(const float *values, int count, const int32_t *taken, int many) {
    int best = -1;
    for (int i = 0; i < count; i++) {
        if (best >= 0 && !(values[i] > values[best])) continue;
        int is_taken = 0;
        for (int before = 0; before < many; before++) is_taken |= taken[before] == i;
        if (!is_taken) best = i;
    }
    return best;
}

/* Gives experts of all but the best groups the lowest choice. */
static void close_groups(const Experts *experts, float *choice) {
    int size = experts->count / experts->groups;
    float goodness[experts->groups];
    int32_t open[experts->top_groups], first;
    for (int group = 0; group < experts->groups; group++) {
        const float *of_group = choice + group * size;
        first = highest_of(of_group, size, NULL, 0);
        goodness[group] = of_group[first];
        if (experts->sigmoid) goodness[group] += of_group[highest_of(of_group, size, &first, 1)];
    }
    for (int k = 0; k < experts->top_groups; k++) open[k] = highest_of(goodness, experts->groups, open, k);
    for (int group = 0; group < experts->groups; group++) {
        int is_open = 0;
        for (int k = 0; k < experts->top_groups; k++) is_open |= open[k] == group;
        if (!is_open)
            for (int i = 0; i < size; i++) choice[group * size + i] = -INFINITY;
    }
}

/* The weights of the chosen experts, of which they have the scores. */
static void weigh(const Experts *experts, const float *scores, float *weights) {
    float sum = 1;
    if (experts->sigmoid) {
        if (experts->norm_topk) sum = 1e-20f;
        for (int k = 0; k < experts->top_k && experts->norm_topk; k++) sum += weights[k];
    } else {
        float highest = weights[0]; /* of all scores: the first chosen is the best of the best group */
        sum = experts->norm_topk ? sum_of_powers(weights, experts->top_k, highest)
                                 : sum_of_powers(scores, experts->count, highest);
        for (int k = 0; k < experts->top_k; k++) weights[k] = exponential(every(weights[k] - highest))[0];
    }
    for (int k = 0; k < experts->top_k; k++) weights[k] = weights[k] / sum * experts->factor;
}

/* Leaves the scores as they are, or their sigmoids in place of them. */
static void choose_experts(const Experts *experts, float *scores, float *choice, int32_t *chosen, float *weights) {
    for (int i = 0; i < experts->count; i += LANES) {
        int left = experts->count - i;
        Floats score = load_some(scores + i, left);
        if (experts->sigmoid) store_some(scores + i, score = 1.0f / (1.0f + exponential(-score)), left);
        store_some(choice + i, experts->correction == NULL ? score : score + load_some(experts->correction + i, left), left);
    }
    if (experts->groups > 1) close_groups(experts, choice);
    for (int k = 0; k < experts->top_k; k++) {
        chosen[k] = highest_of(choice, experts->count, chosen, k);
        weights[k] = scores[chosen[k]];
    }
    weigh(experts, scores, weights);
}

/* Counts each expert's rows, and gives every row a place among them. */
static void order(const Experts *experts, int rows, const Room *room) {
    int many = rows * experts->top_k;
    int32_t *first = room->first;
    memset(first, 0, (size_t)(experts->count + 1) * sizeof(int32_t));
    for (int m = 0; m < many; m++) room->place[m] = first[room->chosen[m] + 1]++;
    for (int expert = 0; expert < experts->count; expert++) first[expert + 1] += first[expert];
    for (int m = 0; m < many; m++) room->place[m] += first[room->chosen[m]];
}

static void gather(const Experts *experts, int rows, const float *normed, int width, const Room *room, Team *team,
                   int thread) {
    int begin, end, inputs = experts->gate_up->inputs;
    team_share(team, thread, rows * experts->top_k, &begin, &end);
    for (int m = begin; m < end; m++)
        memcpy(room->gathered + (size_t)room->place[m] * (size_t)width,
               normed + (size_t)(m / experts->top_k) * (size_t)width, (size_t)inputs * sizeof(float));
    team_meet(team);
}

static void add_weighted(const Experts *experts, int rows, float *x, int width, const Room *room, Team *team, int thread) {
    int begin, end;
    team_share(team, thread, rows, &begin, &end);
    for (int row = begin; row < end; row++) {
        float *to = x + (size_t)row * (size_t)width;
        for (int i = 0; i < width; i += LANES) {
            Floats sum = {0};
            for (int m = row * experts->top_k; m < (row + 1) * experts->top_k; m++)
                sum += load(room->gathered + (size_t)room->place[m] * (size_t)width + i) * room->weights[m];
            store(to + i, load(to + i) + sum);
        }
    }
    team_meet(team);
}

static void add_some(const Experts *experts, int rows, const float *normed, float *x, int width, const Room *room,
                     void *scratch, Team *team, int thread) {
    int begin, end, scores_width = product_width(experts->router), inner_width = product_width(experts->gate_up);
    product(experts->router, rows, normed, width, room->scores, scores_width, STORE, scratch, team, thread);
    team_meet(team);
    team_share(team, thread, rows, &begin, &end);
    for (int row = begin; row < end; row++)
        choose_experts(experts, room->scores + (size_t)row * (size_t)scores_width,
                       room->choice + (size_t)row * (size_t)scores_width, room->chosen + row * experts->top_k,
                       room->weights + row * experts->top_k);
    team_meet(team);
    if (thread == 0) order(experts, rows, room);
    team_meet(team);
    gather(experts, rows, normed, width, room, team, thread);
    grouped_product(experts->gate_up, experts->count, room->first, room->gathered, width, room->inner, inner_width,
                    GATED, scratch, team, thread);
    team_meet(team);
    grouped_product(experts->down, experts->count, room->first, room->inner, inner_width, room->gathered, width, STORE,
                    scratch, team, thread);
    team_meet(team);
    add_weighted(experts, rows, x, width, room, team, thread);
}

void add_experts(const Experts *experts, int rows, const float *normed, float *x, int width, void *room, void *scratch,
                 Team *team, int thread) {
    int most = rows_at_a_time(experts, rows);
    Room laid_out;
    lay_out(experts, most, width, room, &laid_out);
    for (int row = 0; row < rows; row += most) {
        int taken = rows - row < most ? rows - row : most;
        size_t skipped = (size_t)row * (size_t)width;
        add_some(experts, taken, normed + skipped, x + skipped, width, &laid_out, scratch, team, thread);
    }
}
