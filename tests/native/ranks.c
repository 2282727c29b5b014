#define _GNU_SOURCE
#include "ranks.h"

#include <string.h>
#include <sys/mman.h>

#include "check.h"
#include "messages.h"

enum { GUARD = 64 }; // bytes after an owned tensor that must not be written

const world plain_world = {.timeout_ns = 60000000000ull};

void *new_pages(uint64_t num_bytes, int fd) {
    int flags = MAP_SHARED | MAP_NORESERVE | (fd < 0 ? MAP_ANONYMOUS : 0);
    void *pages = mmap(NULL, num_bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
    CHECK(pages != MAP_FAILED, "%lu bytes", (unsigned long)num_bytes);
    return pages;
}

void start_counters(pl_group *group, uint32_t begin) {
    for (int place = 0; place < group->size; place++) {
        pl_desk *desk = &group->desks[place];
        pl_counter *all[] = {&desk->entered, &desk->filled, &desk->reduced, &desk->taken, &desk->summed, &desk->bell};
        for (size_t i = 0; i < sizeof all / sizeof *all; i++) atomic_store(&all[i]->value, begin);
    }
    for (int i = 0; i < group->size * group->size; i++) { // a channel begins with `sent` and `taken`
        pl_counter *channel = (pl_counter *)(group->channels + (uint64_t)i * pl_channel_bytes());
        atomic_store(&channel[0].value, begin);
        atomic_store(&channel[1].value, begin);
    }
}

pl_group *open_group(const world *w, void *control, int size, int place, void *const *arenas) {
    pl_group *group = pl_open(control, size, place, arenas, ARENA_BYTES, w->files, w->timeout_ns, 20000, 2000);
    CHECK(group, "no memory for a group");
    group->calls = group->rounds = w->begin;
    return group;
}

static void *run_rank(void *me) {
    ((rank *)me)->body(me);
    return NULL;
}

void run_ranks(int size, const world *w, void (*body)(void *rank), const void *with) {
    rank ranks[MOST_RANKS];
    void *arenas[MOST_RANKS], *control = new_pages(pl_control_bytes(size), -1);
    for (int place = 0; place < size; place++) arenas[place] = new_pages(ARENA_BYTES, -1);
    for (int place = 0; place < size; place++) {
        pl_group *group = open_group(w, control, size, place, arenas);
        ranks[place] = (rank){.group = group, .place = place, .size = size, .arena = arenas[place], .with = with,
                              .body = body};
    }
    start_counters(ranks[0].group, w->begin);
    for (int place = 0; place < size; place++) {
        int failed = pthread_create(&ranks[place].thread, NULL, run_rank, &ranks[place]);
        CHECK(!failed, "pthread_create: %d", failed);
    }
    for (int place = 0; place < size; place++) pthread_join(ranks[place].thread, NULL);
    for (int place = 0; place < size; place++) {
        pl_close(ranks[place].group);
        pl_free(ranks[place].group);
        munmap(arenas[place], ARENA_BYTES);
    }
    munmap(control, pl_control_bytes(size));
}

uint64_t next_random(uint64_t *state) { // Vigna's xorshift64*
    *state ^= *state >> 12;
    *state ^= *state << 25;
    *state ^= *state >> 27;
    return *state * 2685821657736338717u;
}

uint64_t below(uint64_t *state, uint64_t most) { return (next_random(state) >> 16) % most; }

int64_t value_of(uint32_t seed, int place, uint64_t i) {
    uint64_t bits = (uint64_t)seed * 1000003 + (uint64_t)place * 7919 + i * 31;
    return (int64_t)((bits ^ bits >> 7) % 50) - 20; // small: sums are exact in every dtype
}

int64_t read_item(const void *items, int dtype, uint64_t i) {
    switch (dtype) {
        case PL_F32: return (int64_t)((const float *)items)[i];
        case PL_I64: return ((const int64_t *)items)[i];
        case PL_I16: return ((const int16_t *)items)[i];
        default: return ((const int8_t *)items)[i];
    }
}

void write_item(void *items, int dtype, uint64_t i, int64_t value) {
    switch (dtype) {
        case PL_F32: ((float *)items)[i] = (float)value; break;
        case PL_I64: ((int64_t *)items)[i] = value; break;
        case PL_I16: ((int16_t *)items)[i] = (int16_t)value; break;
        default: ((int8_t *)items)[i] = (int8_t)value;
    }
}

plan random_plan(uint64_t *state, int size, uint64_t most_bytes) {
    static const int dtypes[] = {PL_F32, PL_I64, PL_I16, PL_I8};
    plan p = {.verb = (int)below(state, PL_BARRIER + 1), .dtype = dtypes[below(state, 4)],
              .op = (int)below(state, PL_PROD + 1),
              .root = (int)below(state, (uint64_t)size), .seed = (uint32_t)next_random(state),
              .owned_sources = (uint32_t)next_random(state), .owned_outs = (uint32_t)next_random(state),
              .in_place = (int)below(state, 2)};
    int many = p.verb != PL_ALL_REDUCE && p.verb != PL_BROADCAST && p.verb != PL_REDUCE;
    uint64_t piece_bytes = most_bytes / (many ? (uint64_t)size : 1);
    p.count = below(state, (below(state, 4) ? 200 : piece_bytes) / pl_itemsize(p.dtype) + 1);
    if (p.verb == PL_BARRIER) p.count = 0;
    return p;
}

static int has_source(const plan *p, int place) {
    int one = p->verb == PL_BROADCAST || p->verb == PL_SCATTER;
    return p->verb != PL_BARRIER && (!one || place == p->root);
}

static int has_out(const plan *p, int place) {
    int one = p->verb == PL_REDUCE || p->verb == PL_GATHER;
    return p->verb != PL_BARRIER && (!one || place == p->root) && !(p->verb == PL_BROADCAST && place == p->root);
}

static void *new_tensor(rank *me, int owns, uint64_t num_bytes) {
    void *found = malloc(num_bytes ? num_bytes : 1);
    if (owns) {
        free(found);
        if (me->used + num_bytes + 2 * GUARD > ARENA_BYTES) me->used = 0; // long free: few are in use at a time
        found = me->arena + me->used;
        me->used += (num_bytes + 2 * GUARD - 1) / GUARD * GUARD;
        memset((uint8_t *)found + num_bytes, 0x5a, GUARD);
    }
    CHECK(found, "out of memory");
    return found;
}

static void free_tensor(int owns, void *at, uint64_t num_bytes) {
    if (!at) return;
    for (int i = 0; owns && i < GUARD; i++) CHECK(((uint8_t *)at)[num_bytes + i] == 0x5a, "byte %d after a tensor", i);
    memset(at, 0x77, num_bytes);
    if (!owns) free(at);
}

tensors prepare(rank *me, const plan *p) {
    uint64_t size = (uint64_t)me->size, item = pl_itemsize(p->dtype);
    int many_given = p->verb == PL_REDUCE_SCATTER || p->verb == PL_SCATTER || p->verb == PL_ALL_TO_ALL;
    int many_taken = p->verb == PL_ALL_GATHER || p->verb == PL_GATHER || p->verb == PL_ALL_TO_ALL;
    uint64_t given = p->count * (many_given ? size : 1), taken = p->count * (many_taken ? size : 1);
    tensors t = {.p = *p, .source_bytes = given * item, .out_bytes = taken * item,
                 .owns_source = p->owned_sources >> me->place & 1, .owns_out = p->owned_outs >> me->place & 1};
    if (has_source(p, me->place)) {
        t.source = new_tensor(me, t.owns_source, t.source_bytes);
        for (uint64_t i = 0; i < given; i++) write_item(t.source, p->dtype, i, value_of(p->seed, me->place, i));
    }
    int is_one = t.source && p->in_place && (p->verb == PL_ALL_REDUCE || p->verb == PL_REDUCE);
    if (has_out(p, me->place)) t.out = is_one ? t.source : new_tensor(me, t.owns_out, t.out_bytes);
    if (t.out && !is_one) memset(t.out, 0x33, t.out_bytes);
    t.call = (pl_call){p->verb, p->dtype, p->op, p->root, p->count, t.source, t.out, 1.0, "a tensor"};
    return t;
}

static int64_t reduced(const plan *p, int size, uint64_t i) {
    int64_t result = value_of(p->seed, 0, i);
    for (int place = 1; place < size; place++) {
        int64_t value = value_of(p->seed, place, i);
        switch (p->op) {
            case PL_SUM: result += value; break;
            case PL_PROD: result *= value; break;
            case PL_MAX: result = value > result ? value : result; break;
            default: result = value < result ? value : result;
        }
    }
    switch (p->dtype) { /* products wrap around, or are rounded: once, from five factors on */
        case PL_F32: return (int64_t)(float)result;
        case PL_I16: return (int16_t)result;
        case PL_I8: return (int8_t)result;
        default: return result;
    }
}

static int64_t expected(const plan *p, int place, int size, uint64_t i) {
    uint64_t mine = (uint64_t)place * p->count + i;
    switch (p->verb) {
        case PL_ALL_REDUCE:
        case PL_REDUCE: return reduced(p, size, i);
        case PL_REDUCE_SCATTER: return reduced(p, size, mine);
        case PL_BROADCAST: return value_of(p->seed, p->root, i);
        case PL_SCATTER: return value_of(p->seed, p->root, mine);
        case PL_ALL_TO_ALL: return value_of(p->seed, (int)(i / p->count), (uint64_t)place * p->count + i % p->count);
        default: return value_of(p->seed, (int)(i / p->count), i % p->count);
    }
}

void check_and_free(rank *me, tensors *t) {
    const plan *p = &t->p;
    uint64_t taken = t->out ? t->out_bytes / pl_itemsize(p->dtype) : 0;
    for (uint64_t i = 0; i < taken; i++) {
        int64_t found = read_item(t->out, p->dtype, i), wanted = expected(p, me->place, me->size, i);
        CHECK(found == wanted, "verb %d dtype %d op %d count %lu sources %x outs %x: rank %d of %d, item %lu: %ld, not %ld",
              p->verb, p->dtype, p->op, (unsigned long)p->count, p->owned_sources, p->owned_outs, me->place, me->size,
              (unsigned long)i, (long)found, (long)wanted);
    }
    for (uint64_t i = 0; t->source && t->source != t->out && i < t->source_bytes / pl_itemsize(p->dtype); i++)
        CHECK(read_item(t->source, p->dtype, i) == value_of(p->seed, me->place, i), "a source was written to");
    if (t->out != t->source) free_tensor(t->owns_out, t->out, t->out_bytes);
    free_tensor(t->owns_source, t->source, t->source_bytes);
}

void run_checked(rank *me, const plan *p) {
    tensors t = prepare(me, p);
    int code = pl_run(me->group, &t.call);
    CHECK(code == PL_OK, "verb %d: %d", p->verb, code);
    check_and_free(me, &t);
}
