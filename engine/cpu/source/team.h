/* Threads that work through a step together. */

#ifndef KEDGE_TEAM_H
#define KEDGE_TEAM_H

#include <stdint.h>

typedef struct Team Team;

/* Called by every thread of a team, the caller's among them as thread 0. */
typedef void (*Work)(void *job, Team *team, int thread);

int team_size(const Team *team);

/* Returns when all threads have done the work. One caller at a time. */
void team_run(Team *team, Work work, void *job);

/* A barrier, and the numbers of team_next begin anew behind it. */
void team_meet(Team *team);

/* Numbers from 0, each to one thread: who is quicker takes more. */
int64_t team_next(Team *team);

/* This thread's equal share of 0 .. count-1. */
void team_share(const Team *team, int thread, int count, int *first, int *end);

#endif
