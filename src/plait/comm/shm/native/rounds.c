/* The rounds of a call: see [Note: rounds of a call] in group.h. */
#include "group.h"
#include "kernels.h"

typedef struct {
    pl_group *group;
    const pl_call *call;
    uint32_t number;   /* of the call */
    uint32_t base;     /* the first round's number */
    size_t item;       /* bytes */
    int spreads;       /* sources, or outs, have a range per rank */
    uint64_t step;     /* elements of a shard per round */
    uint32_t rounds;
    int is_small;
    uint64_t spin_ns;
} run;

static int is_reduction(int verb) { return verb == PL_ALL_REDUCE || verb == PL_REDUCE; }

static int has_input(const run *r, int place) {
    int verb = r->call->verb;
    return verb == PL_BROADCAST || verb == PL_SCATTER ? place == r->call->root : verb != PL_BARRIER;
}

static int has_output(const run *r, int place) {
    int verb = r->call->verb;
    if (verb == PL_REDUCE || verb == PL_GATHER) return place == r->call->root;
    return verb == PL_BROADCAST ? place != r->call->root : verb != PL_BARRIER;
}

static int is_staged(const run *r, int place) {
    return r->is_small || pl_said_by(r->group, place, r->number)->source == PL_FOREIGN;
}

static uint8_t *slot_of(const pl_group *group, int place, int kind, uint32_t round) {
    uint64_t number = ((uint64_t)place * 2 + (uint64_t)kind) * PL_SLOTS + round % PL_SLOTS;
    return group->slots + number * PL_CHUNK;
}

/* Address of `range` of the source of `place` in this round. */
static const void *source_of(const run *r, int place, int range, uint32_t k) {
    if (is_staged(r, place) && (r->is_small || place != r->group->place))
        return slot_of(r->group, place, 0, r->base + k) + (r->spreads ? (uint64_t)range * r->step * r->item : 0);
    uint64_t at = (r->spreads ? (uint64_t)range * r->call->count : 0) + (uint64_t)k * r->step;
    const uint8_t *base = place == r->group->place
                              ? r->call->source
                              : r->group->arenas[place] + pl_said_by(r->group, place, r->number)->source;
    return base + at * r->item;
}

static uint64_t length_of(const run *r, uint32_t k) {
    uint64_t start = (uint64_t)k * r->step, left = r->call->count > start ? r->call->count - start : 0;
    return left < r->step ? left : r->step;
}

/* The part of a round's chunk that a rank reduces: complete cache lines. */
static void share_of(const run *r, int place, uint64_t length, uint64_t *low, uint64_t *high) {
    uint64_t line = 64 / r->item, lines = (length + line - 1) / line, size = (uint64_t)r->group->size;
    *low = lines * (uint64_t)place / size * line;
    *high = lines * ((uint64_t)place + 1) / size * line;
    if (*low > length) *low = length;
    if (*high > length) *high = length;
}

/* Copies the data that peers read: all but this rank's own share or range, unless every rank reads everything. */
static void fill(const run *r, uint32_t k) {
    const pl_group *group = r->group;
    uint64_t length = length_of(r, k), low = 0, high = 0;
    uint8_t *slot = slot_of(group, group->place, 0, r->base + k);
    const uint8_t *source = r->call->source;
    source += (uint64_t)k * r->step * r->item;
    if (is_reduction(r->call->verb) && !r->is_small) share_of(r, group->place, length, &low, &high);
    for (int range = 0; range < (r->spreads ? group->size : 1); range++) {
        if (r->spreads && !r->is_small && range == group->place) continue;
        uint8_t *to = slot + (uint64_t)range * r->step * r->item;
        const uint8_t *from = source + (uint64_t)range * r->call->count * r->item;
        pl_copy(to, from, low * r->item);
        pl_copy(to + high * r->item, from + high * r->item, (length - high) * r->item);
    }
}

static void sum_up(const run *r, int range, uint32_t k, uint64_t low, uint64_t n, void *const *outs, int num_outs) {
    int size = r->group->size;
    const void *ins[size];
    for (int place = 0; place < size; place++)
        ins[place] = (const uint8_t *)source_of(r, place, range, k) + low * r->item;
    pl_reduce(r->call->dtype, r->call->dtype, r->call->op, ins, size, outs, num_outs, n, r->call->scale, 0, NULL);
}

/* All-reduce and reduce: this rank's share of the chunk, to all ranks that need it. */
static int act_by_shares(const run *r, uint32_t k) {
    const pl_group *group = r->group;
    uint64_t at = (uint64_t)k * r->step, low, high;
    void *outs[group->size + 1];
    int num_outs = 0, others_take = 0;
    share_of(r, group->place, length_of(r, k), &low, &high);
    for (int place = 0; place < group->size; place++) {
        uint64_t out = pl_said_by(group, place, r->number)->out;
        if (!has_output(r, place)) continue;
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

/* Small calls: every rank reduces all of its own output. */
static void act_alone(const run *r, uint32_t k) {
    uint64_t length = length_of(r, k);
    void *out = (uint8_t *)r->call->out + (uint64_t)k * r->step * r->item;
    if (length) sum_up(r, r->group->place, k, 0, length, &out, 1);
}

static void act_by_copies(const run *r, uint32_t k) {
    const pl_group *group = r->group;
    int many = pl_gathers(r->call->verb);
    uint64_t at = (uint64_t)k * r->step, length = length_of(r, k);
    for (int step = 0; step < group->size; step++) {
        int from = (group->place + step) % group->size;
        if (!has_input(r, from)) continue;
        uint64_t first = (many ? (uint64_t)from * r->call->count : 0) + at;
        uint8_t *out = (uint8_t *)r->call->out + first * r->item;
        if (from == group->place && !r->spreads && out == (const uint8_t *)r->call->source + at * r->item) continue;
        pl_copy(out, source_of(r, from, group->place, k), length * r->item);
    }
}

static int act(const run *r, uint32_t k) {
    if (is_reduction(r->call->verb) && !r->is_small) return act_by_shares(r, k);
    if (!has_output(r, r->group->place)) return PL_OK;
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
    pl_desk *desk = &group->desks[group->place];
    const pl_said *said = pl_said_by(group, group->place, r->number);
    int fills = has_input(r, group->place) && is_staged(r, group->place) && !r->is_small;
    int takes = is_reduction(r->call->verb) && !r->is_small && has_output(r, group->place) && said->out == PL_FOREIGN;
    int code = PL_OK;
    for (uint32_t k = 0; k < r->rounds + 2; k++) { /* after a failure nothing is posted: peers would read invalid data */
        if (k < r->rounds && !r->is_small) {
            if (fills) code = AWAIT_ALL(group, reduced, r->base + k + 1 - PL_SLOTS, r->spin_ns);
            if (code != PL_OK) return code;
            if (fills) fill(r, k);
            pl_post(&desk->filled, r->base + k + 1);
        }
        if (k >= 1 && k <= r->rounds) {
            if (!r->is_small) code = AWAIT_ALL(group, filled, r->base + k, r->spin_ns);
            if (code == PL_OK) code = act(r, k - 1);
            if (code != PL_OK) return code;
            pl_post(&desk->reduced, r->base + k);
        }
        if (k >= 2) {
            if (takes) code = AWAIT_ALL(group, reduced, r->base + k - 1, r->spin_ns);
            if (code != PL_OK) return code;
            if (takes) take(r, k - 2);
            pl_post(&desk->taken, r->base + k - 1);
        }
    }
    return PL_OK;
}

/* Whether peers read or write a tensor of this rank in place. */
static int is_touched(const run *r) {
    const pl_said *said = pl_said_by(r->group, r->group->place, r->number);
    if (r->is_small) return 0;
    return (has_input(r, r->group->place) && said->source != PL_FOREIGN) ||
           (is_reduction(r->call->verb) && has_output(r, r->group->place) && said->out != PL_FOREIGN);
}

static void size_up(run *r) {
    uint64_t size = (uint64_t)r->group->size, ranges;
    r->item = pl_itemsize(r->call->dtype);
    r->spreads = pl_scatters(r->call->verb);
    ranges = r->spreads ? size : 1;
    r->is_small = r->call->count * ranges * r->item <= PL_SMALL;
    r->step = r->call->count;
    r->rounds = 1;
    if (r->is_small) return;
    r->step = PL_CHUNK / ranges / r->item;
}

int pl_execute(pl_group *group, const pl_call *call, uint64_t spin_ns) {
    pl_desk *desk = &group->desks[group->place];
    run r = {.group = group, .call = call, .number = group->calls + 1, .base = group->rounds, .spin_ns = spin_ns};
    if (pl_failed(group->watch.failure).code != PL_OK) return pl_failed(group->watch.failure).code;
    size_up(&r);
    group->calls = r.number;
    pl_describe(group, call, r.number);
    if (r.is_small && call->verb != PL_BARRIER) {
        int code = AWAIT_ALL(group, reduced, r.base + 1 - PL_SLOTS, spin_ns);
        if (code != PL_OK) return code;
        if (has_input(&r, group->place)) fill(&r, 0);
    }
    pl_post(&desk->entered, r.number);
    int code = AWAIT_ALL(group, entered, r.number, spin_ns);
    if (code == PL_OK) code = pl_check_call(group, r.number);
    if (code != PL_OK || call->verb == PL_BARRIER) return code;
    if (!r.is_small) {
        int staged = 0;
        for (int place = 0; place < group->size; place++) {
            staged |= has_input(&r, place) && is_staged(&r, place);
            staged |= is_reduction(call->verb) && has_output(&r, place) &&
                      pl_said_by(group, place, r.number)->out == PL_FOREIGN;
        }
        if (staged)
            r.rounds = (uint32_t)((call->count + r.step - 1) / r.step);
        else
            r.step = call->count;
    }
    code = do_rounds(&r);
    group->rounds = r.base + r.rounds;
    if (r.is_small) atomic_store_explicit(&desk->filled.value, group->rounds, memory_order_release);
    if (code == PL_OK && is_touched(&r)) code = AWAIT_ALL(group, reduced, group->rounds, spin_ns);
    return code;
}
