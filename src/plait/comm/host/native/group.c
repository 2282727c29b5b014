#define _GNU_SOURCE
#include "group.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "helper.h"
#include "kernels.h"
#include "messages.h"

static uint64_t round_up(uint64_t n, uint64_t to) { return (n + to - 1) / to * to; }

static uint64_t desks_at(void) { return round_up(sizeof(pl_head), 4096); }
static uint64_t slots_at(int size) { return round_up(desks_at() + (uint64_t)size * sizeof(pl_desk), 4096); }
static uint64_t channels_at(int size) { return slots_at(size) + (uint64_t)size * 2 * PL_SLOTS * PL_CHUNK; }

uint64_t pl_control_bytes(int size) {
    return round_up(channels_at(size) + (uint64_t)size * (uint64_t)size * pl_channel_bytes(), 4096);
}

void *pl_map(int fd, uint64_t num_bytes) {
    void *address = mmap(NULL, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    return address == MAP_FAILED ? NULL : address;
}

int pl_unmap(void *address, uint64_t num_bytes) { return munmap(address, num_bytes); }

int pl_lock(int fd, int place) { return pl_lock_place(fd, place); }

pl_group *pl_open(void *control, int size, int place, void *const *arenas, uint64_t arena_bytes, int lock_fd,
                  uint64_t timeout_ns, uint64_t spin_ns, uint64_t helper_spin_ns) {
    pl_group *group = calloc(1, sizeof(*group));
    uint8_t **bases = calloc((size_t)size, sizeof(*bases));
    if (!group || !bases) {
        free(group);
        free(bases);
        return NULL;
    }
    for (int i = 0; i < size; i++) bases[i] = arenas[i];
    uint8_t *base = control;
    *group = (pl_group){
        .size = size, .place = place, .arenas = bases, .arena_bytes = arena_bytes,
        .head = (pl_head *)base, .desks = (pl_desk *)(base + desks_at()), .slots = base + slots_at(size),
        .channels = base + channels_at(size), .spin_ns = spin_ns, .helper_spin_ns = helper_spin_ns,
        .watch = {.failure = &((pl_head *)base)->failure, .lock_fd = lock_fd, .timeout_ns = timeout_ns},
    };
    pthread_mutex_init(&group->turn, NULL);
    group->helper = pl_helper_new(group);
    group->mail = pl_mail_new(group);
    if (!group->helper || !group->mail) {
        pl_close(group);
        return NULL;
    }
    return group;
}

void pl_close(pl_group *group) {
    if (group->helper) pl_helper_end(group->helper);
    if (group->mail) pl_mail_end(group->mail);
    pthread_mutex_destroy(&group->turn);
    free(group->arenas);
    free(group);
}

void pl_failure_of(pl_group *group, pl_failure *out) { *out = pl_failed(group->watch.failure); }

/* --- descriptions */

static pl_said *said_by(const pl_group *group, int place, uint32_t call) {
    return &group->desks[place].said[call % PL_CALLS];
}

void pl_last_said(pl_group *group, int place, pl_said *out) { *out = *said_by(group, place, group->calls); }

uint64_t pl_offset_of(const pl_group *group, const void *address) {
    const uint8_t *at = address, *arena = group->arenas[group->place];
    return at >= arena && at < arena + group->arena_bytes ? (uint64_t)(at - arena) : PL_FOREIGN;
}

static void describe(pl_group *group, const pl_call *call, uint32_t number) {
    pl_said *said = said_by(group, group->place, number);
    said->verb = call->verb;
    said->dtype = call->dtype;
    said->op = call->op | (call->scale != 1.0) << 8; /* a mean is no sum */
    said->root = call->root;
    said->count = call->count;
    said->source = call->source ? pl_offset_of(group, call->source) : PL_FOREIGN;
    said->out = call->out ? pl_offset_of(group, call->out) : PL_FOREIGN;
    memcpy(said->label, call->label, PL_LABEL);
}

static int await_all(pl_group *group, size_t counter, uint32_t target, uint64_t spin_ns) {
    for (int step = 1; step < group->size; step++) { /* the next one first: not all look at the same */
        int peer = (group->place + step) % group->size;
        pl_counter *wanted = (pl_counter *)((uint8_t *)&group->desks[peer] + counter);
        int code = pl_await(&group->watch, wanted, target, peer, spin_ns);
        if (code != PL_OK) return code;
    }
    return PL_OK;
}

#define AWAIT_ALL(group, counter, target, spin_ns) await_all(group, offsetof(pl_desk, counter), target, spin_ns)

/* Whether all ranks are in the same call. */
static int check_same(pl_group *group, uint32_t number) {
    const pl_said *mine = said_by(group, group->place, number);
    for (int peer = 0; peer < group->size; peer++) {
        const pl_said *other = said_by(group, peer, number);
        if (other->verb != mine->verb || other->dtype != mine->dtype || other->op != mine->op ||
            other->root != mine->root || other->count != mine->count)
            return pl_fail(group->watch.failure, PL_MISMATCH, peer);
    }
    return PL_OK;
}

/* --- a call, round by round: see the note in group.h */

typedef struct {
    pl_group *group;
    const pl_call *call;
    uint32_t number;   /* of the call */
    uint32_t base;     /* the first round's number */
    size_t item;       /* bytes */
    int spreads;       /* sources, or outs, are a range for every rank */
    uint64_t step;     /* elements of a piece per round */
    uint32_t rounds;
    int is_small;
    uint64_t spin_ns;
} run;

static int is_reduction(int verb) { return verb == PL_ALL_REDUCE || verb == PL_REDUCE; }

static int gives(const run *r, int place) {
    int verb = r->call->verb;
    return verb == PL_BROADCAST || verb == PL_SCATTER ? place == r->call->root : verb != PL_BARRIER;
}

static int gets(const run *r, int place) {
    int verb = r->call->verb;
    if (verb == PL_REDUCE || verb == PL_GATHER) return place == r->call->root;
    return verb == PL_BROADCAST ? place != r->call->root : verb != PL_BARRIER;
}

static int is_staged(const run *r, int place) {
    return r->is_small || said_by(r->group, place, r->number)->source == PL_FOREIGN;
}

static uint8_t *slot_of(const pl_group *group, int place, int kind, uint32_t round) {
    uint64_t number = ((uint64_t)place * 2 + (uint64_t)kind) * PL_SLOTS + round % PL_SLOTS;
    return group->slots + number * PL_CHUNK;
}

/* Where `range` of what `place` gives in this round is read. */
static const void *source_of(const run *r, int place, int range, uint32_t k) {
    if (is_staged(r, place))
        return slot_of(r->group, place, 0, r->base + k) + (r->spreads ? (uint64_t)range * r->step * r->item : 0);
    uint64_t at = (r->spreads ? (uint64_t)range * r->call->count : 0) + (uint64_t)k * r->step;
    const uint8_t *base = place == r->group->place
                              ? r->call->source
                              : r->group->arenas[place] + said_by(r->group, place, r->number)->source;
    return base + at * r->item;
}

static uint64_t length_of(const run *r, uint32_t k) {
    uint64_t start = (uint64_t)k * r->step, left = r->call->count > start ? r->call->count - start : 0;
    return left < r->step ? left : r->step;
}

static void fill(const run *r, uint32_t k) {
    const pl_group *group = r->group;
    uint64_t length = length_of(r, k);
    uint8_t *slot = slot_of(group, group->place, 0, r->base + k);
    const uint8_t *source = r->call->source;
    source += (uint64_t)k * r->step * r->item;
    for (int range = 0; range < (r->spreads ? group->size : 1); range++)
        pl_copy(slot + (uint64_t)range * r->step * r->item, source + (uint64_t)range * r->call->count * r->item,
                length * r->item);
}

/* The part of a round's chunk that a rank reduces: whole cache lines. */
static void share_of(const run *r, int place, uint64_t length, uint64_t *low, uint64_t *high) {
    uint64_t line = 64 / r->item, lines = (length + line - 1) / line, size = (uint64_t)r->group->size;
    *low = lines * (uint64_t)place / size * line;
    *high = lines * ((uint64_t)place + 1) / size * line;
    if (*low > length) *low = length;
    if (*high > length) *high = length;
}

static void sum_up(const run *r, int range, uint32_t k, uint64_t low, uint64_t n, void *const *outs, int num_outs) {
    int size = r->group->size;
    const void *ins[size];
    for (int place = 0; place < size; place++)
        ins[place] = (const uint8_t *)source_of(r, place, range, k) + low * r->item;
    pl_reduce(r->call->dtype, r->call->dtype, r->call->op, ins, size, outs, num_outs, n, r->call->scale, 0, NULL);
}

/* All-reduce and reduce: this rank's share of the chunk, to everybody who wants it. */
static int act_by_shares(const run *r, uint32_t k) {
    const pl_group *group = r->group;
    uint64_t at = (uint64_t)k * r->step, low, high;
    void *outs[group->size + 1];
    int num_outs = 0, others_take = 0;
    share_of(r, group->place, length_of(r, k), &low, &high);
    for (int place = 0; place < group->size; place++) {
        uint64_t out = said_by(group, place, r->number)->out;
        if (!gets(r, place)) continue;
        if (place == group->place)
            outs[num_outs++] = (uint8_t *)r->call->out + (at + low) * r->item;
        else if (out != PL_FOREIGN)
            outs[num_outs++] = group->arenas[place] + out + (at + low) * r->item;
        else
            others_take = 1;
    }
    if (others_take) {
        int code = AWAIT_ALL(r->group, taken, r->base + k + 1 - PL_SLOTS, r->spin_ns);
        if (code != PL_OK) return code;
        outs[num_outs++] = slot_of(group, group->place, 1, r->base + k);
    }
    if (high > low && num_outs) sum_up(r, 0, k, low, high - low, outs, num_outs);
    return PL_OK;
}

/* What everybody does for himself: reduces everything that he wants. */
static void act_alone(const run *r, uint32_t k) {
    uint64_t length = length_of(r, k);
    void *out = (uint8_t *)r->call->out + (uint64_t)k * r->step * r->item;
    if (length) sum_up(r, r->group->place, k, 0, length, &out, 1);
}

static void act_by_copies(const run *r, uint32_t k) {
    const pl_group *group = r->group;
    int verb = r->call->verb, many = verb == PL_ALL_GATHER || verb == PL_GATHER || verb == PL_ALL_TO_ALL;
    uint64_t at = (uint64_t)k * r->step, length = length_of(r, k);
    for (int step = 0; step < group->size; step++) {
        int from = (group->place + step) % group->size;
        if (!gives(r, from)) continue;
        uint64_t first = (many ? (uint64_t)from * r->call->count : 0) + at;
        uint8_t *out = (uint8_t *)r->call->out + first * r->item;
        if (from == group->place && !r->spreads && out == (const uint8_t *)r->call->source + at * r->item) continue;
        pl_copy(out, source_of(r, from, group->place, k), length * r->item);
    }
}

static int act(const run *r, uint32_t k) {
    if (is_reduction(r->call->verb) && !r->is_small) return act_by_shares(r, k);
    if (!gets(r, r->group->place)) return PL_OK;
    if (is_reduction(r->call->verb) || r->call->verb == PL_REDUCE_SCATTER)
        act_alone(r, k);
    else
        act_by_copies(r, k);
    return PL_OK;
}

static void take(const run *r, uint32_t k) {
    const pl_group *group = r->group;
    uint64_t at = (uint64_t)k * r->step, low, high;
    for (int step = 1; step < group->size; step++) {
        int from = (group->place + step) % group->size;
        share_of(r, from, length_of(r, k), &low, &high);
        pl_copy((uint8_t *)r->call->out + (at + low) * r->item, slot_of(group, from, 1, r->base + k),
                (high - low) * r->item);
    }
}

static int do_rounds(const run *r) {
    pl_group *group = r->group;
    pl_desk *mine = &group->desks[group->place];
    const pl_said *said = said_by(group, group->place, r->number);
    int fills = gives(r, group->place) && is_staged(r, group->place) && !r->is_small;
    int takes = is_reduction(r->call->verb) && !r->is_small && gets(r, group->place) && said->out == PL_FOREIGN;
    int code = PL_OK;
    for (uint32_t k = 0; k < r->rounds + 2; k++) { /* who fails posts nothing: what he owes would be believed */
        if (k < r->rounds && !r->is_small) {
            if (fills) code = AWAIT_ALL(group, reduced, r->base + k + 1 - PL_SLOTS, r->spin_ns);
            if (code != PL_OK) return code;
            if (fills) fill(r, k);
            pl_post(&mine->filled, r->base + k + 1);
        }
        if (k >= 1 && k <= r->rounds) {
            if (!r->is_small) code = AWAIT_ALL(group, filled, r->base + k, r->spin_ns);
            if (code == PL_OK) code = act(r, k - 1);
            if (code != PL_OK) return code;
            pl_post(&mine->reduced, r->base + k);
        }
        if (k >= 2) {
            if (takes) code = AWAIT_ALL(group, reduced, r->base + k - 1, r->spin_ns);
            if (code != PL_OK) return code;
            if (takes) take(r, k - 2);
            pl_post(&mine->taken, r->base + k - 1);
        }
    }
    return PL_OK;
}

/* Whether peers read or write a tensor of this rank where it lies. */
static int is_touched(const run *r) {
    const pl_said *said = said_by(r->group, r->group->place, r->number);
    if (r->is_small) return 0;
    return (gives(r, r->group->place) && said->source != PL_FOREIGN) ||
           (is_reduction(r->call->verb) && gets(r, r->group->place) && said->out != PL_FOREIGN);
}

static void size_up(run *r) {
    int verb = r->call->verb;
    uint64_t size = (uint64_t)r->group->size, ranges;
    r->item = pl_itemsize(r->call->dtype);
    r->spreads = verb == PL_REDUCE_SCATTER || verb == PL_SCATTER || verb == PL_ALL_TO_ALL;
    ranges = r->spreads ? size : 1;
    r->is_small = r->call->count * ranges * r->item <= PL_SMALL;
    r->step = r->call->count;
    r->rounds = 1;
    if (r->is_small) return;
    r->step = PL_CHUNK / ranges / r->item;
}

int pl_execute(pl_group *group, const pl_call *call, uint64_t spin_ns) {
    pl_desk *mine = &group->desks[group->place];
    run r = {.group = group, .call = call, .number = group->calls + 1, .base = group->rounds, .spin_ns = spin_ns};
    if (pl_failed(group->watch.failure).code != PL_OK) return pl_failed(group->watch.failure).code;
    size_up(&r);
    group->calls = r.number;
    describe(group, call, r.number);
    if (r.is_small && call->verb != PL_BARRIER) {
        int code = AWAIT_ALL(group, reduced, r.base + 1 - PL_SLOTS, spin_ns);
        if (code != PL_OK) return code;
        if (gives(&r, group->place)) fill(&r, 0);
    }
    pl_post(&mine->entered, r.number);
    int code = AWAIT_ALL(group, entered, r.number, spin_ns);
    if (code == PL_OK) code = check_same(group, r.number);
    if (code != PL_OK || call->verb == PL_BARRIER) return code;
    if (!r.is_small) {
        int staged = 0;
        for (int place = 0; place < group->size; place++) {
            staged |= gives(&r, place) && is_staged(&r, place);
            staged |= is_reduction(call->verb) && gets(&r, place) &&
                      said_by(group, place, r.number)->out == PL_FOREIGN;
        }
        if (staged)
            r.rounds = (uint32_t)((call->count + r.step - 1) / r.step);
        else
            r.step = call->count;
    }
    code = do_rounds(&r);
    group->rounds = r.base + r.rounds;
    if (r.is_small) atomic_store_explicit(&mine->filled.value, group->rounds, memory_order_release);
    if (code == PL_OK && is_touched(&r)) code = AWAIT_ALL(group, reduced, group->rounds, spin_ns);
    return code;
}

/* --- sums in two halves */

int pl_sum_start(pl_group *group, const pl_call *call, uint32_t *number) {
    pl_helper_drain(group->helper);
    pthread_mutex_lock(&group->turn);
    int code = pl_failed(group->watch.failure).code;
    if (code == PL_OK) /* descriptions that a slow peer may still read are not overwritten */
        code = AWAIT_ALL(group, entered, group->calls + 1 - PL_SUMS, group->spin_ns);
    if (code == PL_OK) {
        *number = ++group->calls;
        describe(group, call, *number);
        pl_post(&group->desks[group->place].entered, *number);
    }
    pthread_mutex_unlock(&group->turn);
    return code;
}

int pl_sum_is_ready(pl_group *group, uint32_t number) {
    for (int peer = 0; peer < group->size; peer++)
        if (!pl_reached(pl_read(&group->desks[peer].entered), number)) return 0;
    return 1;
}

int pl_sum_into(pl_group *group, uint32_t number, void *out, int out_dtype, uint64_t begin, uint64_t n, double scale,
                int add, double *squares) {
    int code = AWAIT_ALL(group, entered, number, group->spin_ns);
    if (code == PL_OK) code = check_same(group, number);
    if (code != PL_OK) return code;
    const pl_said *mine = said_by(group, group->place, number);
    const void *ins[group->size];
    for (int place = 0; place < group->size; place++)
        ins[place] = group->arenas[place] + said_by(group, place, number)->source + begin * pl_itemsize(mine->dtype);
    pl_reduce(mine->dtype, out_dtype, PL_SUM, ins, group->size, &out, 1, n, scale, add, squares);
    return PL_OK;
}

void pl_sum_done(pl_group *group, uint32_t number) { pl_post(&group->desks[group->place].summed, number); }

int pl_sum_is_released(pl_group *group, uint32_t number) {
    for (int peer = 0; peer < group->size; peer++)
        if (!pl_reached(pl_read(&group->desks[peer].summed), number)) return 0;
    return 1;
}

int pl_sum_release(pl_group *group, uint32_t number) { return AWAIT_ALL(group, summed, number, group->spin_ns); }
