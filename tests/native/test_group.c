// Groups: every verb on owned and foreign tensors of all sizes that matter; ranks that do not come, or mean another call.
#include "check.h"
#include "ranks.h"

#include <stdatomic.h>
#include <string.h>

static void try_size(rank *me, int verb, int dtype, uint64_t count, uint32_t seed) {
    static const uint32_t owners[] = {0, ~0u, 1, ~1u};
    for (int i = 0; i < 4; i++) {
        plan p = {.verb = verb, .dtype = dtype, .op = (int)(seed + (uint32_t)i) % (PL_PROD + 1), .root = (int)seed % me->size,
                  .count = count, .seed = seed + (uint32_t)i, .owned_sources = owners[i],
                  .owned_outs = owners[(uint32_t)i ^ seed % 4], .in_place = (int)seed % 3 == 0};
        run_checked(me, &p);
    }
}

// Sizes of whole tensors, in bytes, where something changes.
static void every_verb(void *me_) {
    rank *me = me_;
    static const uint64_t sizes[] = {0, 1, 3, 64, 100, PL_SMALL, PL_SMALL + 1, PL_CHUNK, PL_CHUNK + 1, 5 * PL_CHUNK / 2};
    uint32_t seed = 0;
    for (int verb = 0; verb <= PL_BARRIER; verb++)
        for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++, seed += 7) {
            static const int dtypes[] = {PL_F32, PL_I8, PL_I64, PL_I16};
            int dtype = dtypes[(i + (size_t)verb) % 4], spreads = verb == PL_REDUCE_SCATTER || verb >= PL_SCATTER;
            uint64_t item = pl_itemsize(dtype), whole = (sizes[i] + item - 1) / item;
            uint64_t count = verb == PL_BARRIER ? 0 : spreads ? (whole + (uint64_t)me->size - 1) / (uint64_t)me->size : whole;
            try_size(me, verb, dtype, count, seed);
        }
}

static void random_calls(void *me_) {
    rank *me = me_;
    uint64_t state = 11;
    for (int i = 0; i < 400; i++) {
        plan p = random_plan(&state, me->size, PL_CHUNK * 2);
        run_checked(me, &p);
    }
}

// Small and large tensors of a mean.
static void scaled(void *me_) {
    rank *me = me_;
    for (uint64_t n = 10; n < 300000; n = n * 30) {
        float *mine = (float *)me->arena;
        for (uint64_t i = 0; i < n; i++) mine[i] = (float)(me->place + 1) * (float)(i % 10);
        pl_call call = {PL_ALL_REDUCE, PL_F32, PL_SUM, 0, n, mine, mine, 1.0 / me->size, "a mean"};
        CHECK(pl_run(me->group, &call) == PL_OK, "a mean");
        for (uint64_t i = 0; i < n; i++) CHECK(mine[i] == (float)(me->size + 1) / 2 * (float)(i % 10), "item %d", (int)i);
    }
}

static pl_call barrier(void) { return (pl_call){.verb = PL_BARRIER, .dtype = PL_I32, .scale = 1.0, .label = "wait"}; }

static int fails_with(pl_group *group, int code, int peer) {
    pl_failure found;
    pl_failure_of(group, &found);
    return found.code == code && found.peer == peer;
}

// The last rank stays away: the others learn its name, in a call of their own and in one that was started.
static void late(void *me_) {
    rank *me = me_;
    pl_call call = barrier();
    CHECK(pl_run(me->group, &call) == PL_OK, "all came");
    if (me->place == me->size - 1) return;
    int code = me->place ? pl_run(me->group, &call) : pl_wait(me->group, pl_start(me->group, &call), 60000000000ull);
    CHECK(code == PL_LATE && fails_with(me->group, PL_LATE, me->size - 1), "%d", code);
    CHECK(pl_run(me->group, &call) == PL_LATE, "a group that failed once runs calls");
    CHECK(pl_wait(me->group, pl_start(me->group, &call), 60000000000ull) == PL_LATE, "and those that are started");
}

// Rank 1 means something else, a different thing each time.
static void mismatched(void *me_) {
    rank *me = me_;
    int which = *(const int *)me->with, differs = me->place == 1;
    char given[800], taken[800 * MOST_RANKS];
    memset(given, 0, sizeof given);
    pl_call call = {PL_ALL_GATHER, PL_I8, PL_SUM, 0, 100, given, taken, 1.0, "a tensor"};
    if (differs && which == 0) call.verb = PL_BROADCAST;
    if (differs && which == 1) call.dtype = PL_I64;
    if (differs && which == 2) call.op = PL_MAX;
    if (differs && which == 3) call.root = 1;
    if (differs && which == 4) call.count = 99;
    CHECK(pl_run(me->group, &call) == PL_MISMATCH, "part %d", which);
    for (int place = 0; place < me->size; place++) {
        pl_said said;
        pl_last_said(me->group, place, &said);
        int other = place == 1;
        CHECK(said.verb == (other && which == 0 ? PL_BROADCAST : PL_ALL_GATHER) &&
                  said.count == (other && which == 4 ? 99 : 100) && !strcmp(said.label, "a tensor"),
              "rank %d says that rank %d said %d, %d", me->place, place, said.verb, (int)said.count);
    }
}

// Rank 1's tensor is said to be where its arena ends.
static void outside(void *me_) {
    rank *me = me_;
    int which = *(const int *)me->with;
    uint64_t num_bytes = 90000, size = (uint64_t)me->size;
    int8_t *edge = (int8_t *)me->arena + ARENA_BYTES - num_bytes, *far = edge + 1;
    int8_t *source = me->place == 1 && which != 3 ? far : edge, *out = me->place == 1 ? far : edge;
    pl_call calls[] = {
        {PL_ALL_REDUCE, PL_I8, PL_SUM, 0, num_bytes, source, source, 1.0, ""},
        {PL_REDUCE_SCATTER, PL_I8, PL_SUM, 0, num_bytes / size, source, me->arena, 1.0, ""},
        {PL_BROADCAST, PL_I8, PL_SUM, 1, num_bytes, source, source, 1.0, ""},
        {PL_ALL_GATHER, PL_I8, PL_SUM, 0, num_bytes / size, me->arena, out, 1.0, ""},
        {PL_HALVES, PL_I8, PL_SUM, 0, num_bytes, source, NULL, 1.0, ""},
        {PL_HALVES, PL_I8, PL_SUM, 0, 1, me->place == 1 ? (int8_t *)calls : edge, NULL, 1.0, ""}, // foreign
    };
    int code;
    if (which < 4) {
        code = pl_run(me->group, &calls[which]);
    } else {
        uint32_t number;
        CHECK(pl_sum_start(me->group, &calls[which], &number) == PL_OK, "a sum");
        code = pl_sum_into(me->group, number, me->arena, PL_I8, 0, 1, 1.0, 0, NULL);
    }
    CHECK(code == PL_DAMAGED && fails_with(me->group, PL_DAMAGED, 1), "call %d: %d", which, code);
}

static const world soon_late = {.timeout_ns = 200000000};

void test_group(void) {
    for (int size = 1; size <= MOST_RANKS; size++) run_ranks(size, &plain_world, every_verb, NULL);
    run_ranks(3, &plain_world, scaled, NULL);
    // All counters pass the end of their range, and of half of it.
    world ends = plain_world, halves = plain_world;
    ends.begin = (uint32_t)-200;
    halves.begin = (uint32_t)INT32_MAX - 200;
    run_ranks(3, &ends, random_calls, NULL);
    run_ranks(2, &halves, random_calls, NULL);
    run_ranks(4, &plain_world, random_calls, NULL);
    run_ranks(3, &soon_late, late, NULL);
    for (int which = 0; which < 5; which++) run_ranks(3, &plain_world, mismatched, &which);
    for (int which = 0; which < 6; which++) run_ranks(3, &plain_world, outside, &which);
}
