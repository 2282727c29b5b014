// Messages: both ways at once, in order, of all sizes, owned and foreign, waited for in any order.
#include "messages.h"

#include <string.h>

#include "check.h"
#include "ranks.h"

enum { UNDER_WAY = 6, MOST_BYTES = 700 << 10, MOST_OWNED = 200 << 10 }; // a channel holds 256 KiB

typedef struct {
    pl_message *message;
    uint8_t *at;
    uint64_t num_bytes;
    uint32_t seed;
    int sends, peer, owns;
} parcel;

// The k-th message of a pair; both of its ranks can compute it.
static void describe(parcel *p, int from, int to, uint32_t k) {
    uint64_t state = 1 + (uint64_t)from * 1000003 + (uint64_t)to * 7919 + (uint64_t)k * 104729;
    static const uint64_t sizes[] = {0, 1, 65535, 65536, 65537, 262144, 262145};
    for (int i = 0; i < 8; i++) next_random(&state);
    uint64_t kind = below(&state, 12);
    p->num_bytes = kind < 7 ? sizes[kind] : kind < 11 ? below(&state, 3000) : below(&state, MOST_BYTES);
    p->seed = (uint32_t)next_random(&state);
}

static void post(rank *me, parcel *p, uint64_t *own) {
    p->owns = p->num_bytes <= MOST_OWNED && below(own, 2);
    p->at = malloc(p->num_bytes ? p->num_bytes : 1);
    CHECK(p->at, "out of memory");
    if (p->owns) {
        free(p->at);
        if (me->used + MOST_OWNED > ARENA_BYTES) me->used = 0;
        p->at = me->arena + me->used;
        me->used += (p->num_bytes + 63) / 64 * 64;
    }
    for (uint64_t i = 0; i < p->num_bytes; i++) p->at[i] = p->sends ? (uint8_t)(p->seed + i * 7) : 0x33;
    p->message = p->sends ? pl_send(me->group, p->peer, p->at, p->num_bytes)
                          : pl_receive(me->group, p->peer, p->at, p->num_bytes);
    CHECK(p->message, "out of memory");
}

static void finish(rank *me, parcel *p) {
    int code = PL_PENDING;
    while (code == PL_PENDING) code = pl_message_wait(me->group, p->message, 1000000, NULL);
    CHECK(code == PL_OK, "%d", code);
    for (uint64_t i = 0; i < p->num_bytes; i++)
        CHECK(p->at[i] == (uint8_t)(p->seed + i * 7), "byte %lu of %lu from rank %d", (unsigned long)i,
              (unsigned long)p->num_bytes, p->peer);
    memset(p->at, 0x77, p->num_bytes); // peers have what they want of it
    if (!p->owns) free(p->at);
    pl_message_free(me->group, p->message);
    p->message = NULL;
}

// Rank by rank the same number of messages each way; their order among peers, and of waits, is everyone's own.
static void exchange(void *me_) {
    rank *me = me_;
    int rounds = *(const int *)me->with;
    uint64_t own = (uint64_t)me->place + 5;
    parcel under_way[UNDER_WAY * MOST_RANKS] = {0};
    uint32_t sent[MOST_RANKS] = {0}, received[MOST_RANKS] = {0};
    for (int round = 0; round < rounds; round++) { // all peers, both ways, each way first for half of them
        for (int step = 1; step < me->size; step++) {
            int peer = (me->place + step) % me->size, first = (int)below(&own, 2);
            for (int i = 0; i < 2; i++) {
                parcel *p = &under_way[(round % (UNDER_WAY / 2) * 2 + i) * MOST_RANKS + peer];
                if (p->message) finish(me, p);
                p->sends = i ^ first;
                p->peer = peer;
                if (p->sends) describe(p, me->place, peer, sent[peer]++);
                else describe(p, peer, me->place, received[peer]++);
                post(me, p, &own);
            }
        }
        parcel *any = &under_way[below(&own, UNDER_WAY * MOST_RANKS)];
        if (any->message) finish(me, any);
    }
    for (int i = 0; i < UNDER_WAY * MOST_RANKS; i++)
        if (under_way[i].message) finish(me, &under_way[i]);
}

// While messages travel, calls run in the same group.
static void mixed_with_calls(void *me_) {
    rank *me = me_;
    uint64_t shared = 4, own = (uint64_t)me->place + 5;
    for (uint32_t i = 0; i < 60; i++) {
        int next = (me->place + 1) % me->size, before = (me->place + me->size - 1) % me->size;
        parcel there = {.sends = 1, .peer = next}, here = {.peer = before};
        describe(&there, me->place, next, i);
        describe(&here, before, me->place, i);
        post(me, &there, &own);
        plan p = random_plan(&shared, me->size, 50000);
        run_checked(me, &p);
        post(me, &here, &own);
        finish(me, &there);
        finish(me, &here);
    }
}

static void of_another_size(void *me_) {
    rank *me = me_;
    uint8_t bytes[100] = {0};
    uint64_t found = 0;
    pl_message *m = me->place ? pl_receive(me->group, 0, bytes, 100) : pl_send(me->group, 1, bytes, 60);
    int code = pl_message_wait(me->group, m, 60000000000ull, &found);
    if (me->place) CHECK(code == PL_OTHER_SIZE && found == 60, "%d, %lu bytes", code, (unsigned long)found);
    else CHECK(code == PL_OK || code == PL_OTHER_SIZE, "%d", code);
    pl_message_free(me->group, m);
}

// An owned message of which the last byte is said to be outside of the arena.
static void outside(void *me_) {
    rank *me = me_;
    uint8_t bytes[100];
    pl_message *m = me->place ? pl_receive(me->group, 0, bytes, 100)
                              : pl_send(me->group, 1, me->arena + ARENA_BYTES - 99, 100);
    int code = pl_message_wait(me->group, m, 60000000000ull, NULL);
    CHECK(code == PL_DAMAGED, "%d", code);
    pl_message_free(me->group, m);
}

// Rank 1 sends nothing; what the others began is given up when they free it.
static void late(void *me_) {
    rank *me = me_;
    uint8_t *bytes = calloc(3, MOST_BYTES);
    pl_message *m[3];
    pl_failure failure;
    if (me->place == 0) {
        for (int i = 0; i < 3; i++) m[i] = pl_receive(me->group, 1, bytes + i * MOST_BYTES, MOST_BYTES);
        int code = pl_message_wait(me->group, m[1], 60000000000ull, NULL);
        pl_failure_of(me->group, &failure);
        CHECK(code == PL_LATE && failure.peer == 1, "%d of %d", code, failure.peer);
        for (int i = 0; i < 3; i++) pl_message_free(me->group, m[i]);
    }
    free(bytes);
}

// Messages that will never be over are freed while a thread moves others.
static void given_up(void *me_) {
    rank *me = me_;
    uint8_t *bytes = calloc(1, MOST_BYTES);
    int other = 1 - me->place;
    pl_message *first = pl_send(me->group, other, bytes, MOST_BYTES), *second = pl_send(me->group, other, bytes, 1);
    CHECK(pl_message_wait(me->group, second, 30000000, NULL) != PL_OK, "the first does not fit in a channel");
    pl_message_free(me->group, first);
    pl_message_free(me->group, second);
    free(bytes);
    uint8_t more;
    pl_message *third = pl_receive(me->group, other, &more, 1);
    CHECK(pl_message_wait(me->group, third, 30000000, NULL) == PL_OTHER_SIZE, "a message was given up");
    pl_message_free(me->group, third);
}

void test_messages(void) {
    static const world soon_late = {.timeout_ns = 100000000};
    world ends = plain_world;
    int rounds = 150, few = 50;
    ends.begin = (uint32_t)-100;
    run_ranks(2, &ends, exchange, &rounds);
    run_ranks(4, &plain_world, exchange, &few);
    run_ranks(3, &plain_world, mixed_with_calls, NULL);
    run_ranks(2, &plain_world, of_another_size, NULL);
    run_ranks(2, &plain_world, outside, NULL);
    run_ranks(2, &soon_late, late, NULL);
    run_ranks(2, &plain_world, given_up, NULL);
}
