#include "team.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/types.h>
#include <unistd.h>

#if defined(__x86_64__)
#include <immintrin.h>
#define PAUSE() _mm_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE()
#endif

#define API __attribute__((visibility("default")))

/* Pauses before a thread that waits lets others have the core: some tens of microseconds. */
#define SPINS 4000

typedef struct {
    Team *team;
    pthread_t thread;
    int index;
} Member;

struct Team {
    int size;
    int started;
    pid_t process; /* whose threads they are: a fork leaves them behind */
    Member *members;
    pthread_mutex_t lock;
    pthread_cond_t called;
    uint64_t runs; /* under the lock */
    int ends;      /* under the lock */
    Work work;
    void *job;
    /* Apart from each other, so that who waits does not slow down who counts. */
    _Alignas(64) _Atomic int arrived;
    _Alignas(64) _Atomic uint32_t meetings;
    _Alignas(64) _Atomic int64_t next;
};

static void *serve(void *argument) {
    Member *member = argument;
    Team *team = member->team;
    uint64_t done = 0;
    for (;;) {
        pthread_mutex_lock(&team->lock);
        while (team->runs == done && !team->ends) pthread_cond_wait(&team->called, &team->lock);
        int ends = team->ends;
        done = team->runs;
        pthread_mutex_unlock(&team->lock);
        if (ends) return NULL;
        team->work(team->job, team, member->index);
        team_meet(team);
    }
}

/* Threads of this process, as many as it gives. None has been asked for anything yet. */
static void start(Team *team) {
    team->process = getpid();
    team->started = team->ends = 0;
    team->runs = 0;
    pthread_mutex_init(&team->lock, NULL);
    pthread_cond_init(&team->called, NULL);
    atomic_store(&team->arrived, 0);
    for (int index = 0; index < team->size - 1; index++) {
        Member *member = &team->members[index];
        *member = (Member){.team = team, .index = index + 1};
        if (pthread_create(&member->thread, NULL, serve, member) != 0) return;
        team->started++;
    }
}

static void stop(Team *team) {
    pthread_mutex_lock(&team->lock);
    team->ends = 1;
    pthread_cond_broadcast(&team->called);
    pthread_mutex_unlock(&team->lock);
    for (int index = 0; index < team->started; index++) pthread_join(team->members[index].thread, NULL);
    pthread_cond_destroy(&team->called);
    pthread_mutex_destroy(&team->lock);
}

API void kedge_team_free(Team *team) {
    if (team->process == getpid()) stop(team);
    free(team->members);
    free(team);
}

/* NULL where the system gives no threads. */
API Team *kedge_team_new(int size) {
    Team *team = aligned_alloc(64, (sizeof(Team) + 63) / 64 * 64);
    if (team == NULL) return NULL;
    *team = (Team){.size = size, .members = calloc((size_t)size, sizeof(Member))};
    if (team->members == NULL) {
        free(team);
        return NULL;
    }
    start(team);
    if (team->started < size - 1) {
        kedge_team_free(team);
        return NULL;
    }
    return team;
}

/* In the child of a fork. If it is given too few threads the caller's own does everything, and they sleep. */
static void start_again(Team *team) {
    start(team);
    if (team->started < team->size - 1) team->size = 1;
}

int team_size(const Team *team) { return team->size; }

void team_run(Team *team, Work work, void *job) {
    atomic_store_explicit(&team->next, 0, memory_order_relaxed);
    if (team->size > 1 && team->process != getpid()) start_again(team);
    if (team->size == 1) {
        work(job, team, 0);
        return;
    }
    pthread_mutex_lock(&team->lock);
    team->work = work;
    team->job = job;
    team->runs++;
    pthread_cond_broadcast(&team->called);
    pthread_mutex_unlock(&team->lock);
    work(job, team, 0);
    team_meet(team);
}

void team_meet(Team *team) {
    if (team->size == 1) {
        atomic_store_explicit(&team->next, 0, memory_order_relaxed);
        return;
    }
    uint32_t meeting = atomic_load_explicit(&team->meetings, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&team->arrived, 1, memory_order_acq_rel) == team->size - 1) {
        atomic_store_explicit(&team->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&team->next, 0, memory_order_relaxed);
        atomic_store_explicit(&team->meetings, meeting + 1, memory_order_release);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&team->meetings, memory_order_acquire) == meeting; spins++) {
        if (spins < SPINS)
            PAUSE();
        else
            sched_yield();
    }
}

int64_t team_next(Team *team) {
    return atomic_fetch_add_explicit(&team->next, 1, memory_order_relaxed);
}

void team_share(const Team *team, int thread, int count, int *first, int *end) {
    *first = (int)((int64_t)count * thread / team->size);
    *end = (int)((int64_t)count * (thread + 1) / team->size);
}
