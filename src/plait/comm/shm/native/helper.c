#define _GNU_SOURCE
#include "helper.h"

#include <signal.h>
#include <stdlib.h>
#include <time.h>

enum { QUEUE = 256 };

struct pl_helper {
    pl_group *group;
    pthread_t thread;
    int runs, ends;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    uint64_t started, finished; /* calls; a call's ticket is `started` after it */
    int code;                   /* of the first that failed */
    uint64_t failed;            /* its ticket */
    pl_call queue[QUEUE];
};

pl_helper *pl_helper_new(pl_group *group) {
    pl_helper *helper = calloc(1, sizeof(*helper));
    if (!helper) return NULL;
    helper->group = group;
    pthread_mutex_init(&helper->lock, NULL);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&helper->changed, &monotonic);
    pthread_condattr_destroy(&monotonic);
    return helper;
}

static void *work(void *argument) {
    pl_helper *helper = argument;
    pthread_mutex_lock(&helper->lock);
    for (;;) {
        while (helper->finished == helper->started && !helper->ends)
            pthread_cond_wait(&helper->changed, &helper->lock);
        if (helper->ends) break;
        const pl_call *call = &helper->queue[helper->finished % QUEUE];
        int code = helper->code;
        pthread_mutex_unlock(&helper->lock);
        if (code == PL_OK) {
            pthread_mutex_lock(&helper->group->turn);
            code = pl_execute(helper->group, call, helper->group->helper_spin_ns);
            pthread_mutex_unlock(&helper->group->turn);
        }
        pthread_mutex_lock(&helper->lock);
        helper->finished++;
        if (code != PL_OK && helper->code == PL_OK) {
            helper->code = code;
            helper->failed = helper->finished;
        }
        pthread_cond_broadcast(&helper->changed);
    }
    pthread_mutex_unlock(&helper->lock);
    return NULL;
}

/* The program's own threads handle signals. */
static int begin(pl_helper *helper) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int failed = pthread_create(&helper->thread, NULL, work, helper);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    helper->runs = !failed;
    return failed;
}

uint64_t pl_start(pl_group *group, const pl_call *call) {
    if (!pl_enter(group)) return 0;
    pl_helper *helper = group->helper;
    pthread_mutex_lock(&helper->lock);
    if (!helper->runs && begin(helper)) { /* no thread available: run before returning, in the same order */
        pthread_mutex_lock(&group->turn);
        int code = pl_execute(group, call, group->spin_ns);
        pthread_mutex_unlock(&group->turn);
        helper->finished = ++helper->started;
        if (code != PL_OK && helper->code == PL_OK) helper->code = code, helper->failed = helper->started;
    } else {
        while (helper->started - helper->finished == QUEUE) pthread_cond_wait(&helper->changed, &helper->lock);
        helper->queue[helper->started++ % QUEUE] = *call;
        pthread_cond_broadcast(&helper->changed);
    }
    uint64_t ticket = helper->started;
    pthread_mutex_unlock(&helper->lock);
    pl_leave(group, PL_OK);
    return ticket;
}

int pl_wait(pl_group *group, uint64_t ticket, uint64_t most_ns) {
    if (!pl_enter(group)) return PL_GONE;
    pl_helper *helper = group->helper;
    uint64_t until = pl_now_ns() + most_ns;
    struct timespec at = {(time_t)(until / 1000000000ull), (long)(until % 1000000000ull)};
    int late = 0;
    pthread_mutex_lock(&helper->lock);
    while (helper->finished < ticket && !late)
        late = pthread_cond_timedwait(&helper->changed, &helper->lock, &at) != 0;
    int code = helper->finished < ticket ? PL_PENDING : PL_OK;
    if (code == PL_OK && helper->code != PL_OK && helper->failed <= ticket) code = helper->code;
    pthread_mutex_unlock(&helper->lock);
    return pl_leave(group, code);
}

void pl_helper_drain(pl_helper *helper) {
    pthread_mutex_lock(&helper->lock);
    while (helper->finished < helper->started) pthread_cond_wait(&helper->changed, &helper->lock);
    pthread_mutex_unlock(&helper->lock);
}

int pl_run(pl_group *group, const pl_call *call) {
    if (!pl_enter(group)) return PL_GONE;
    pl_helper_drain(group->helper);
    pthread_mutex_lock(&group->turn);
    int code = pl_execute(group, call, group->spin_ns);
    pthread_mutex_unlock(&group->turn);
    return pl_leave(group, code);
}

void pl_helper_end(pl_helper *helper) {
    pthread_mutex_lock(&helper->lock);
    if (helper->finished < helper->started) /* a call in progress would deadlock with peers */
        pl_fail(helper->group->watch.failure, PL_GONE, helper->group->place);
    helper->ends = 1;
    pthread_cond_broadcast(&helper->changed);
    pthread_mutex_unlock(&helper->lock);
    if (helper->runs) pthread_join(helper->thread, NULL);
    pthread_cond_destroy(&helper->changed);
    pthread_mutex_destroy(&helper->lock);
    free(helper);
}
