// Calls that were started: many under way, waited for in any order, in several groups at once; and groups that close.
#define _GNU_SOURCE
#include "check.h"
#include "messages.h"
#include "ranks.h"

#include <stdatomic.h>
#include <sys/mman.h>
#include <time.h>

enum { UNDER_WAY = 8, GROUPS = 3 };

static const uint64_t forever_ns = 60000000000ull;

static void await_call(rank *me, pl_group *group, tensors *t) {
    int code = pl_wait(group, t->ticket, forever_ns);
    CHECK(code == PL_OK, "verb %d: %d", t->p.verb, code);
    check_and_free(me, t);
    t->ticket = 0;
}

// All ranks take the same calls from `shared`; when each waits for which, is its own affair.
static void start_calls(rank *me, pl_group **groups, int num_groups, int num_calls) {
    uint64_t shared = 77, own = (uint64_t)me->place + 5;
    tensors under_way[UNDER_WAY] = {0};
    pl_group *group_of[UNDER_WAY];
    for (int i = 0; i < num_calls; i++) {
        plan p = random_plan(&shared, me->size, PL_CHUNK + 5000);
        pl_group *group = groups[below(&shared, (uint64_t)num_groups)];
        if (below(&shared, 10) == 0) { // after all that were started in its group, on this thread
            tensors t = prepare(me, &p);
            CHECK(pl_run(group, &t.call) == PL_OK, "a call");
            check_and_free(me, &t);
            continue;
        }
        uint64_t k = below(&own, UNDER_WAY);
        if (under_way[k].ticket) await_call(me, group_of[k], &under_way[k]);
        under_way[k] = prepare(me, &p);
        under_way[k].ticket = pl_start(group, &under_way[k].call);
        group_of[k] = group;
    }
    for (int k = 0; k < UNDER_WAY; k++)
        if (under_way[k].ticket) await_call(me, group_of[k], &under_way[k]);
}

static void in_one_group(void *me_) {
    rank *me = me_;
    start_calls(me, &me->group, 1, 400);
}

static void in_many_groups(void *me_) {
    rank *me = me_;
    void *const *controls = me->with;
    pl_group *groups[GROUPS];
    for (int i = 0; i < GROUPS; i++)
        groups[i] = open_group(&plain_world, controls[i], me->size, me->place, (void *const *)me->group->arenas);
    start_calls(me, groups, GROUPS, 400);
    for (int i = 0; i < GROUPS; i++) pl_close(groups[i]), pl_free(groups[i]);
}

// More than the queue holds.
static void many_at_once(void *me_) {
    rank *me = me_;
    int32_t mine[700];
    uint64_t last = 0;
    for (int i = 0; i < 700; i++) {
        mine[i] = i + me->place;
        pl_call call = {PL_ALL_REDUCE, PL_I32, PL_SUM, 0, 1, &mine[i], &mine[i], 1.0, ""};
        last = pl_start(me->group, &call);
    }
    CHECK(pl_wait(me->group, last, forever_ns) == PL_OK, "the last of many calls");
    for (int i = 0; i < 700; i++) CHECK(mine[i] == 2 * i + 1, "call %d: %d", i, mine[i]);
}

static void *wait_for_one(void *group) {
    return (void *)(intptr_t)pl_wait(group, 1, forever_ns); // the first call's ticket
}

static void *run_one(void *group) {
    pl_call call = {.verb = PL_BARRIER, .dtype = PL_I32};
    return (void *)(intptr_t)pl_run(group, &call);
}

// Every function of a closed group returns, and touches nothing of what it shared.
static void check_closed(pl_group *group) {
    uint32_t number = 0;
    pl_failure failure;
    pl_said said;
    pl_call call = {.verb = PL_HALVES, .dtype = PL_I32};
    CHECK(run_one(group) == (void *)(intptr_t)PL_GONE, "a call");
    CHECK(pl_wait(group, pl_start(group, &call), forever_ns) == PL_GONE, "a started call");
    CHECK(pl_sum_start(group, &call, &number) == PL_GONE, "a sum");
    CHECK(pl_sum_into(group, 0, NULL, PL_I32, 0, 0, 1.0, 0, NULL) == PL_GONE, "a sum's result");
    CHECK(pl_sum_release(group, 0) == PL_GONE && pl_sum_is_ready(group, 0) && pl_sum_is_released(group, 0), "a sum");
    pl_sum_done(group, 0);
    CHECK(!pl_send(group, 1, NULL, 0) && !pl_receive(group, 1, NULL, 0), "a message");
    pl_failure_of(group, &failure);
    pl_last_said(group, 0, &said);
    CHECK(failure.code == PL_GONE && failure.peer == 0, "%d of %d", failure.code, failure.peer);
}

// A thread waits for a call whose peers never come, and another closes the group.
static void check_closing(void *(*wait)(void *)) {
    void *control = new_pages(pl_control_bytes(2), -1), *result, *arenas[2] = {control, control};
    pl_group *group = open_group(&plain_world, control, 2, 0, arenas);
    pthread_t thread;
    pl_call call = {.verb = PL_BARRIER, .dtype = PL_I32};
    if (wait == wait_for_one) pl_start(group, &call);
    CHECK(!pthread_create(&thread, NULL, wait, group), "pthread_create");
    while (!pl_read(&group->desks[0].entered) || !atomic_load(&group->callers))
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    pl_close(group);
    pthread_join(thread, &result);
    CHECK((intptr_t)result == PL_GONE, "%d", (int)(intptr_t)result);
    munmap(control, pl_control_bytes(2)); // as the transport does: a closed group must not touch it
    check_closed(group);
    pl_free(group);
}

// A thread is anywhere in its calls, of a group of one, when another closes it and unmaps its memory.
static void *call_until_closed(void *group_) {
    pl_group *group = group_;
    pl_call call = {.verb = PL_BARRIER, .dtype = PL_I32};
    int code = PL_OK;
    for (int i = 0; code == PL_OK; i++) code = i % 2 ? pl_run(group, &call) : pl_wait(group, pl_start(group, &call), forever_ns);
    return (void *)(intptr_t)code;
}

static void check_closing_between_calls(void) {
    for (long i = 0; i < 30; i++) {
        void *control = new_pages(pl_control_bytes(1), -1), *result, *arenas[1] = {control};
        pl_group *group = open_group(&plain_world, control, 1, 0, arenas);
        pthread_t thread;
        CHECK(!pthread_create(&thread, NULL, call_until_closed, group), "pthread_create");
        nanosleep(&(struct timespec){.tv_nsec = i % 10 * 100000}, NULL);
        pl_close(group);
        munmap(control, pl_control_bytes(1));
        pthread_join(thread, &result);
        CHECK((intptr_t)result == PL_GONE, "%d", (int)(intptr_t)result);
        pl_free(group);
    }
}

void test_helper(void) {
    for (int size = 1; size <= MOST_RANKS; size += 2) run_ranks(size, &plain_world, in_one_group, NULL);
    run_ranks(2, &plain_world, many_at_once, NULL);
    void *controls[GROUPS];
    for (int i = 0; i < GROUPS; i++) controls[i] = new_pages(pl_control_bytes(3), -1);
    run_ranks(3, &plain_world, in_many_groups, controls);
    for (int i = 0; i < GROUPS; i++) munmap(controls[i], pl_control_bytes(3));
    check_closing(wait_for_one);
    check_closing(run_one);
    check_closing_between_calls();
}
