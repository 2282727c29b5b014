#define _GNU_SOURCE
#include "group.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

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

int pl_lock(int fd) { return pl_lock_file(fd); }

pl_group *pl_open(void *control, int size, int place, void *const *arenas, uint64_t arena_bytes,
                  const int *files, uint64_t timeout_ns, uint64_t spin_ns, uint64_t helper_spin_ns) {
    assert(0 <= place && place < size && size <= PL_RANKS && "a rank's place in its group");
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
        .process = getpid(), .size = size, .place = place, .arenas = bases, .arena_bytes = arena_bytes,
        .head = (pl_head *)base, .desks = (pl_desk *)(base + desks_at()), .slots = base + slots_at(size),
        .channels = base + channels_at(size), .spin_ns = spin_ns, .helper_spin_ns = helper_spin_ns,
        .watch = {.failure = &((pl_head *)base)->failure, .files = files, .timeout_ns = timeout_ns},
    };
    pthread_mutex_init(&group->turn, NULL);
    pthread_mutex_init(&group->sums, NULL);
    group->helper = pl_helper_new(group);
    group->mail = pl_mail_new(group);
    if (!group->helper || !group->mail) {
        pl_close(group);
        pl_free(group);
        return NULL;
    }
    return group;
}

void pl_close(pl_group *group) {
    if (getpid() != group->process) return; /* a fork: it has no threads, and its failure would be the rank's */
    const struct timespec pause = {.tv_nsec = 1000000};
    atomic_store(&group->closed, 1);
    if (atomic_load(&group->callers)) nanosleep(&pause, NULL); /* most do not wait */
    if (atomic_load(&group->callers)) pl_fail(group->watch.failure, PL_GONE, group->place);
    while (atomic_load(&group->callers)) nanosleep(&pause, NULL);
    if (group->helper) pl_helper_end(group->helper);
    if (group->mail) pl_mail_end(group->mail);
    pthread_mutex_destroy(&group->turn);
    pthread_mutex_destroy(&group->sums);
}

void pl_free(pl_group *group) {
    if (!atomic_load(&group->closed)) return;
    free(group->arenas);
    free(group);
}

void pl_failure_of(pl_group *group, pl_failure *out) {
    *out = (pl_failure){PL_GONE, group->place};
    if (!pl_enter(group)) return;
    *out = pl_failed(group->watch.failure);
    pl_leave(group, PL_OK);
}

/* --- descriptions */

pl_said *pl_said_by(const pl_group *group, int place, uint32_t call) {
    return &group->desks[place].said[call % PL_CALLS];
}

void pl_last_said(pl_group *group, int place, pl_said *out) {
    *out = (pl_said){.verb = PL_BARRIER};
    if (!pl_enter(group)) return;
    uint32_t different = atomic_load(&group->head->different);
    *out = *pl_said_by(group, place, different ? different : group->calls);
    pl_leave(group, PL_OK);
}

uint64_t pl_offset_of(const pl_group *group, const void *address) {
    const uint8_t *at = address, *arena = group->arenas[group->place];
    return at >= arena && at < arena + group->arena_bytes ? (uint64_t)(at - arena) : PL_FOREIGN;
}

void pl_describe(pl_group *group, const pl_call *call, uint32_t number) {
    pl_said *info = pl_said_by(group, group->place, number);
    info->verb = call->verb;
    info->dtype = call->dtype;
    info->op = call->op | (call->scale != 1.0) << 8; /* marks a mean */
    info->root = call->root;
    info->count = call->count;
    info->source = call->source ? pl_offset_of(group, call->source) : PL_FOREIGN;
    info->out = call->out ? pl_offset_of(group, call->out) : PL_FOREIGN;
    memcpy(info->label, call->label, PL_LABEL);
}

int pl_await_all(pl_group *group, size_t counter, uint32_t target, uint64_t spin_ns) {
    for (int step = 1; step < group->size; step++) { /* the next one first, so that not all read the same */
        int peer = (group->place + step) % group->size;
        pl_counter *wanted = (pl_counter *)((uint8_t *)&group->desks[peer] + counter);
        int code = pl_await(&group->watch, wanted, target, peer, spin_ns);
        if (code != PL_OK) return code;
    }
    return PL_OK;
}

static int differ(pl_group *group, uint32_t number, int peer) {
    uint32_t none = 0;
    atomic_compare_exchange_strong(&group->head->different, &none, number);
    return pl_fail(group->watch.failure, PL_MISMATCH, peer);
}

int pl_is_inside(const pl_group *group, uint64_t offset, uint64_t num_bytes) {
    return offset == PL_FOREIGN || (offset <= group->arena_bytes && num_bytes <= group->arena_bytes - offset);
}

int pl_check_call(pl_group *group, uint32_t number) {
    const pl_said *own = pl_said_by(group, group->place, number);
    for (int peer = 0; peer < group->size; peer++) {
        const pl_said *other = pl_said_by(group, peer, number);
        if (other->verb != own->verb || other->dtype != own->dtype || other->op != own->op ||
            other->root != own->root || other->count != own->count)
            return differ(group, number, peer);
    }
    uint64_t size = (uint64_t)group->size, shard = own->count * pl_itemsize(own->dtype);
    for (int peer = 0; peer < group->size; peer++) {
        const pl_said *other = pl_said_by(group, peer, number);
        if ((own->verb == PL_HALVES && own->count && other->source == PL_FOREIGN) ||
            !pl_is_inside(group, other->source, pl_scatters(own->verb) ? size * shard : shard) ||
            !pl_is_inside(group, other->out, pl_gathers(own->verb) ? size * shard : shard))
            return pl_fail(group->watch.failure, PL_DAMAGED, peer);
    }
    return PL_OK;
}

/* --- split-phase sums */

static void note_start(pl_group *group, uint32_t number) {
    pthread_mutex_lock(&group->sums);
    if (!group->open_sums++) { /* other calls do not advance it: reset it for this sum */
        group->ended = number - 1;
        pl_post(&group->desks[group->place].summed, group->ended);
    }
    group->last_sum = number;
    group->is_open[number % PL_CALLS] = 1;
    assert(number - group->ended <= PL_CALLS - PL_SUMS && "few sums are under way at a time");
    pthread_mutex_unlock(&group->sums);
}

void pl_sum_done(pl_group *group, uint32_t number) {
    if (!pl_enter(group)) return;
    pthread_mutex_lock(&group->sums);
    if (group->is_open[number % PL_CALLS]) {
        group->is_open[number % PL_CALLS] = 0;
        group->open_sums--;
        while (group->ended != group->last_sum && !group->is_open[(group->ended + 1) % PL_CALLS]) group->ended++;
        pl_post(&group->desks[group->place].summed, group->ended);
    }
    pthread_mutex_unlock(&group->sums);
    pl_leave(group, PL_OK);
}

int pl_sum_start(pl_group *group, const pl_call *call, uint32_t *number) {
    if (!pl_enter(group)) return PL_GONE;
    pl_helper_drain(group->helper);
    pthread_mutex_lock(&group->turn);
    int code = pl_failed(group->watch.failure).code;
    if (code == PL_OK) /* do not overwrite descriptions that a slow peer may still read */
        code = AWAIT_ALL(group, entered, group->calls + 1 - PL_SUMS, group->spin_ns);
    if (code == PL_OK) {
        *number = ++group->calls;
        note_start(group, *number);
        pl_describe(group, call, *number);
        pl_post(&group->desks[group->place].entered, *number);
    }
    pthread_mutex_unlock(&group->turn);
    return pl_leave(group, code);
}

int pl_sum_is_ready(pl_group *group, uint32_t number) {
    if (!pl_enter(group)) return 1; /* what follows does not wait: it fails */
    int ready = 1;
    for (int peer = 0; ready && peer < group->size; peer++)
        ready = pl_reached(pl_read(&group->desks[peer].entered), number);
    return pl_leave(group, ready);
}

int pl_sum_into(pl_group *group, uint32_t number, void *out, int out_dtype, uint64_t begin, uint64_t n, double scale,
                int add, double *squares) {
    if (!pl_enter(group)) return PL_GONE;
    int code = AWAIT_ALL(group, entered, number, group->spin_ns);
    if (code == PL_OK) code = pl_check_call(group, number);
    if (code != PL_OK || !n) return pl_leave(group, code); /* empty tensors are foreign */
    const pl_said *own = pl_said_by(group, group->place, number);
    assert(begin <= own->count && n <= own->count - begin && "elements of the sum");
    const void *ins[group->size];
    size_t item = pl_itemsize(own->dtype);
    for (int place = 0; place < group->size; place++)
        ins[place] = group->arenas[place] + pl_said_by(group, place, number)->source + begin * item;
    pl_reduce(own->dtype, out_dtype, PL_SUM, ins, group->size, &out, 1, n, scale, add, squares);
    return pl_leave(group, PL_OK);
}

int pl_sum_is_released(pl_group *group, uint32_t number) {
    if (!pl_enter(group)) return 1;
    int released = 1;
    for (int peer = 0; released && peer < group->size; peer++)
        released = pl_reached(pl_read(&group->desks[peer].entered), number) &&
                   pl_reached(pl_read(&group->desks[peer].summed), number);
    return pl_leave(group, released);
}

int pl_sum_release(pl_group *group, uint32_t number) {
    if (!pl_enter(group)) return PL_GONE;
    int code = AWAIT_ALL(group, entered, number, group->spin_ns);
    if (code == PL_OK) code = AWAIT_ALL(group, summed, number, group->spin_ns);
    return pl_leave(group, code);
}
