/* Attention of many queries of an item. With so many it takes less arithmetic to make each head's keys and values of the
   latents, once for all of them, than to attend to latents. */

#ifndef KEDGE_LATENT_PROMPTS_H
#define KEDGE_LATENT_PROMPTS_H

#include "latents.h"

/* The most queries of an item that attends to latents: of any, if results must not depend on the queries beside them. */
int32_t most_attending(const Items *items, Heads heads, int threads);

/* Floats for each thread. */
size_t prompt_floats(const Latents *latents);

/* Attends with the queries of items that have more than `few`, and writes values to their rows of `to`. The layer has
   neither a window nor sinks. Called by every thread of a team that has met since the keys were written, and must meet
   before `to` is read. `room` has each thread's floats. */
void attend_prompts(const Latents *latents, const Items *items, int32_t few, Heads heads, const LayerKV *kv,
                    const Queries *queries, float *to, int to_width, float *room, Team *team, int thread);

#endif
