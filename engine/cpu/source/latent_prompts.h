/* Attention of many queries of an item. With so many it takes less arithmetic to make each head's keys and values of the
   latents, once for all of them, than to attend to latents. */

#ifndef KEDGE_LATENT_PROMPTS_H
#define KEDGE_LATENT_PROMPTS_H

#include "latents.h"

/* Items with more queries have it. None have if a query's results must not depend on the queries beside it. */
int32_t most_latent_queries(const Items *items, Heads heads, int threads);

/* Floats for each thread. */
size_t prompt_floats(const Latents *latents);

/* Attends with those items' rows of `queries`, neither rotated nor scaled, and writes values to rows of `to`. Called by
   every thread of a team that has met since the keys were written. `room` has each thread's floats. */
void attend_prompts(const Latents *latents, const Items *items, Heads heads, const LayerKV *kv, const Queries *queries,
                    float *to, int to_width, float *room, Team *team, int thread);

#endif
