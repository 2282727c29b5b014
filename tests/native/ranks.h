// Ranks that are threads of this program, and tensors whose values they all know.
#ifndef PLAIT_RANKS_H
#define PLAIT_RANKS_H

#include <pthread.h>
#include <stdint.h>

#include "group.h"
#include "helper.h"
#include "kernels.h"

enum { MOST_RANKS = 5, ARENA_BYTES = 64 << 20 };

typedef struct {
    pl_group *group;
    int place, size;
    uint8_t *arena;
    uint64_t used;    // bytes of the arena
    const void *with; // what run_ranks was given
    pthread_t thread;
    void (*body)(void *rank);
} rank;

typedef struct {
    uint32_t begin; // where all counters start
    uint64_t timeout_ns;
    const int *files; // per place: locked by the rank; or NULL
} world;

extern const world plain_world; // begins at 0, waits for a minute

// Runs `body` on every rank, each with a group of all, which is closed after it.
void run_ranks(int size, const world *w, void (*body)(void *rank), const void *with);

// Memory for a group, and for what it shares; pages of zeros.
void *new_pages(uint64_t num_bytes, int fd);
pl_group *open_group(const world *w, void *control, int size, int place, void *const *arenas);
// All of a group's counters, before its first call: it must behave alike wherever they start.
void start_counters(pl_group *group, uint32_t begin);

uint64_t next_random(uint64_t *state);
uint64_t below(uint64_t *state, uint64_t most);

// A call whose sources all ranks can compute: element i of rank r's source is value_of(seed, r, i).
typedef struct {
    int verb, dtype, op, root;
    uint64_t count;
    uint32_t seed, owned_sources, owned_outs; // by rank, a bit each
    int in_place;
} plan;

typedef struct {
    plan p;
    pl_call call;
    void *source, *out;
    uint64_t source_bytes, out_bytes;
    int owns_source, owns_out;
    uint64_t ticket;
} tensors;

plan random_plan(uint64_t *state, int size, uint64_t most_bytes);
// Tensors for this rank's part of a call. Foreign ones are of the heap, exactly as large as they have to be.
tensors prepare(rank *me, const plan *p);
// Checks the results, then overwrites all sources and results: no other rank accesses them any more.
void check_and_free(rank *me, tensors *t);
void run_checked(rank *me, const plan *p);
int64_t value_of(uint32_t seed, int place, uint64_t i);
int64_t read_item(const void *items, int dtype, uint64_t i);
void write_item(void *items, int dtype, uint64_t i, int64_t value);

#endif
