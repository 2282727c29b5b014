// Sums in two halves: several under way, ended in any order, and what they read is free when all have read it.
#define _GNU_SOURCE
#include "check.h"
#include "ranks.h"

#include <stdatomic.h>
#include <string.h>

enum { SUMS = 8, ITEMS = 3000 };

typedef struct {
    uint32_t number, seed;
    uint64_t n;
    int16_t *given; // NULL: none
    int has_begun, is_over;
} sum;

static void start_sum(rank *me, sum *s, uint64_t *shared) {
    s->seed = (uint32_t)next_random(shared);
    s->n = below(shared, ITEMS) + 1;
    s->has_begun = 1, s->is_over = 0;
    for (uint64_t i = 0; i < s->n; i++) s->given[i] = (int16_t)value_of(s->seed, me->place, i);
    pl_call call = {PL_HALVES, PL_I16, PL_SUM, 0, s->n, s->given, NULL, 1.0, "a sum"};
    CHECK(pl_sum_start(me->group, &call, &s->number) == PL_OK, "a sum");
}

// Adds up a part of it, in two pieces, to what was there.
static void end_sum(rank *me, sum *s, uint64_t begin, uint64_t n) {
    int16_t out[ITEMS];
    for (uint64_t i = 0; i < n; i++) out[i] = (int16_t)i;
    uint64_t first = n / 3;
    CHECK(pl_sum_into(me->group, s->number, out, PL_I16, begin, first, 1.0, 1, NULL) == PL_OK, "a sum");
    CHECK(pl_sum_is_ready(me->group, s->number), "no rank waits again for ranks that have arrived");
    CHECK(pl_sum_into(me->group, s->number, out + first, PL_I16, begin + first, n - first, 1.0, 1, NULL) == PL_OK, "a sum");
    for (uint64_t i = 0; i < n; i++) {
        int64_t wanted = (int64_t)i;
        for (int place = 0; place < me->size; place++) wanted += value_of(s->seed, place, begin + i);
        CHECK(out[i] == wanted, "item %lu: %d, not %ld", (unsigned long)i, out[i], (long)wanted);
    }
    pl_sum_done(me->group, s->number);
    s->is_over = 1;
}

static void reuse(rank *me, sum *s) {
    CHECK(s->is_over, "a sum that is under way");
    if (s->has_begun && !pl_sum_is_released(me->group, s->number))
        CHECK(pl_sum_release(me->group, s->number) == PL_OK, "a sum's end");
    memset(s->given, 0x77, ITEMS * sizeof(int16_t)); // what a peer would read now is wrong
}

// `order`: whether sums end in the order in which they began. Other calls run when none is under way.
static void many_sums(rank *me, int rounds, int in_order) {
    uint64_t shared = 3, own = (uint64_t)me->place + 9;
    sum sums[SUMS];
    for (int i = 0; i < SUMS; i++) sums[i] = (sum){.given = (int16_t *)me->arena + i * ITEMS, .is_over = 1};
    me->used = SUMS * ITEMS * sizeof(int16_t);
    for (int round = 0; round < rounds; round++) {
        int n = (int)below(&shared, SUMS) + 1;
        for (int i = 0; i < n; i++) {
            reuse(me, &sums[i]);
            start_sum(me, &sums[i], &shared);
        }
        int turn = (int)below(&own, (uint64_t)n);
        for (int i = 0; i < n; i++) {
            sum *s = &sums[in_order ? i : (i + turn) % n];
            uint64_t begin = s->n * (uint64_t)me->place / (uint64_t)me->size;
            end_sum(me, s, begin, s->n - begin);
        }
        plan p = random_plan(&shared, me->size, 5000);
        if (below(&shared, 20) == 0) run_checked(me, &p);
    }
}

static void in_order(void *me) { many_sums(me, 400, 1); }
static void in_any_order(void *me) { many_sums(me, 400, 0); }

static pthread_barrier_t meeting; // of two ranks, outside their group

// Both ranks have read the second sum and not the first: neither may overwrite what it gave to the first.
static void second_first(void *me_) {
    rank *me = me_;
    sum sums[2] = {{.given = (int16_t *)me->arena}, {.given = (int16_t *)me->arena + ITEMS}};
    uint64_t shared = 3;
    for (int i = 0; i < 2; i++) start_sum(me, &sums[i], &shared);
    end_sum(me, &sums[1], 0, sums[1].n);
    pthread_barrier_wait(&meeting);
    CHECK(!pl_sum_is_released(me->group, sums[0].number), "a peer has yet to read the first sum");
    pthread_barrier_wait(&meeting);
    end_sum(me, &sums[0], 0, sums[0].n);
    pthread_barrier_wait(&meeting);
    for (int i = 0; i < 2; i++) CHECK(pl_sum_is_released(me->group, sums[i].number), "sum %d is over", i);
}

// The first sum after 2^31 calls of other kinds.
static void late_in_life(void *me_) {
    rank *me = me_;
    sum s = {.given = (int16_t *)me->arena};
    uint64_t shared = 3;
    atomic_store(&me->group->desks[me->place].summed.value, 0);
    pthread_barrier_wait(&meeting);
    if (me->place == 0) {
        start_sum(me, &s, &shared);
        CHECK(!pl_sum_is_released(me->group, s.number), "the peer has not begun");
    }
    pthread_barrier_wait(&meeting);
    if (me->place == 1) start_sum(me, &s, &shared);
    end_sum(me, &s, 0, s.n);
    CHECK(pl_sum_release(me->group, s.number) == PL_OK, "its end");
}

void test_sums(void) {
    world ends = plain_world, halves = plain_world;
    ends.begin = (uint32_t)-1000;
    halves.begin = (uint32_t)INT32_MAX + 5;
    for (int size = 1; size <= MOST_RANKS; size += 2) run_ranks(size, size == 3 ? &ends : &plain_world, in_order, NULL);
    run_ranks(3, &plain_world, in_any_order, NULL);
    pthread_barrier_init(&meeting, NULL, 2);
    run_ranks(2, &plain_world, second_first, NULL);
    run_ranks(2, &halves, late_in_life, NULL);
    pthread_barrier_destroy(&meeting);
}
