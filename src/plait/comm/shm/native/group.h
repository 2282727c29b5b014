/* A group of ranks of one host: its control segment, and the collective calls that it executes.

[Note: arenas]
Every rank has an arena, a file in memory from which the tensors that plait owns are allocated; every rank of the
host maps all of them. A tensor in its rank's arena is *owned*: peers read and write it in place. All others are
*foreign*: they are copied through the rank's slots in the control segment, chunk by chunk, each small enough to
stay in a core's cache.

[Note: rounds of a call]
A rank enters a call: it publishes a description (operation, size, addresses of its tensors) and waits for the
descriptions of all ranks. So each rank can tell which tensors are owned and which foreign, and whether all make the same
call. Then come rounds, one when no tensor is foreign, else one per chunk, of three parts each:

  fill   a rank whose source is foreign copies the chunk into its slot               posts `filled`
  act    when all have filled: reduces its share of the chunk, in rank order, and writes the result to its
         destinations; or copies its output from the other ranks                     posts `reduced`
  take   when all have acted: copies results that could not be written in place      posts `taken`

The parts of three rounds are interleaved, so that ranks seldom wait for each other. A slot is filled again when all
have acted on its content, SLOTS rounds before. Round numbers continue from call to call.
Small calls are filled before they are entered, and every rank reduces for itself: one wait in all. A rank that has
finished a call knows that all have entered it, hence finished the call before: descriptions and slots of two calls
ago are free.

[Note: split-phase sums]
A sum is entered by `pl_sum_start`, which does not wait. Each rank adds up its results with `pl_sum_into`, directly
from the peers' arenas, when they have entered too; `pl_sum_done` signals to the peers that their memory is no longer
read. Sums may end in any order; peers see the end when all that began before have ended, and at most
PL_CALLS - PL_SUMS may be open. Between the start of a sum and its end, no call but other sums may be made in the group.

[Note: trust in descriptions]
Ranks are processes of one user and have no secrets from each other, but a program that writes beyond the end of a
tensor may overwrite the descriptions that its peers read. A description that points outside the arena of its rank is
an error, PL_DAMAGED, before anything is read or written there.

[Note: closing a group]
A group may be closed while other threads are about to call its functions, or wait in them. So `pl_close` leaves the
pl_group itself, in which every function first counts itself among the callers and then looks whether the group is
closed; `pl_free` is for when no thread can call any more. */
#ifndef PLAIT_GROUP_H
#define PLAIT_GROUP_H

#include <pthread.h>
#include <stddef.h>
#include <sys/types.h>

#include "sync.h"

#define PL_API __attribute__((visibility("default")))

enum { PL_LABEL = 48, PL_CALLS = 1024, PL_SUMS = 256, PL_SLOTS = 4, PL_RANKS = 1024 };
#define PL_CHUNK ((size_t)256 << 10) /* of a slot; L2 is 1 to 2 MiB today */
#define PL_SMALL ((size_t)32 << 10)  /* tensors up to this size go through slots and are reduced by every rank */
#define PL_FOREIGN UINT64_MAX

typedef enum {
    PL_ALL_REDUCE,
    PL_REDUCE_SCATTER,
    PL_ALL_GATHER,
    PL_BROADCAST,
    PL_REDUCE,
    PL_SCATTER,
    PL_GATHER,
    PL_ALL_TO_ALL,
    PL_BARRIER,
    PL_HALVES, /* a split-phase sum */
} pl_verb;

/* A rank's description of its part of a call. */
typedef struct {
    int32_t verb, dtype, op, root;
    uint64_t count;       /* elements of a shard; for all-reduce, broadcast, reduce and sum: of the tensor */
    uint64_t source, out; /* offsets in its arena, or PL_FOREIGN */
    char label[PL_LABEL];
} pl_said;

typedef struct {
    int32_t verb, dtype, op, root;
    uint64_t count;
    const void *source;
    void *out;
    double scale;
    char label[PL_LABEL];
} pl_call;

/* Written by one rank and read by the others. */
typedef struct {
    pl_counter entered; /* calls */
    pl_counter filled;  /* rounds */
    pl_counter reduced;
    pl_counter taken;
    pl_counter summed; /* this rank has ended all sums up to this call number */
    pl_counter bell;   /* incremented by peers that have a message, or buffer space, for this rank */
    pl_said said[PL_CALLS];
} pl_desk;

typedef struct {
    _Alignas(64) _Atomic uint64_t failure;
    _Atomic uint32_t different; /* the mismatched call, once detected */
} pl_head;

typedef struct pl_helper pl_helper;
typedef struct pl_mail pl_mail;

typedef struct {
    int size, place;
    pl_head *head;
    pl_desk *desks;
    uint8_t *slots;    /* per rank: SLOTS that it fills, SLOTS that it reduces into */
    uint8_t *channels; /* see messages.h */
    uint8_t **arenas;
    uint64_t arena_bytes;
    pl_watch watch;
    uint64_t spin_ns, helper_spin_ns;
    pid_t process;        /* a fork of it must not use the group */
    _Atomic int callers, closed; /* see [Note: closing a group] */
    pthread_mutex_t turn; /* one thread at a time executes calls */
    uint32_t calls, rounds; /* entered, used */
    pthread_mutex_t sums;   /* protects the fields below */
    uint32_t last_sum, ended; /* number of the last one; all sums up to this have ended here */
    uint32_t open_sums;
    uint8_t is_open[PL_CALLS]; /* by number */
    pl_helper *helper;
    pl_mail *mail;
} pl_group;

PL_API uint64_t pl_control_bytes(int size);
PL_API void *pl_map(int fd, uint64_t num_bytes);
PL_API int pl_unmap(void *address, uint64_t num_bytes);
/* `control` has pl_control_bytes, zeroed; `files`, by place, are locked by their ranks (NULL: no liveness checks) and
 * belong to the caller, as `arenas` do. Returns NULL without memory. */
PL_API pl_group *pl_open(void *control, int size, int place, void *const *arenas, uint64_t arena_bytes,
                         const int *files, uint64_t timeout_ns, uint64_t spin_ns, uint64_t helper_spin_ns);
/* Ends the group's threads. Calls in progress fail, also those that other threads wait for, and so do later ones, with
 * PL_GONE. Does nothing in a fork of the rank's process. */
PL_API void pl_close(pl_group *group);
/* After it, if it was closed; else it stays allocated. */
PL_API void pl_free(pl_group *group);
PL_API int pl_lock(int fd);

/* Runs a call to completion: PL_OK or the group's failure. */
PL_API int pl_run(pl_group *group, const pl_call *call);
PL_API void pl_failure_of(pl_group *group, pl_failure *out);
/* The description that the rank at `place` gave of the mismatched call, else of this rank's last one. */
PL_API void pl_last_said(pl_group *group, int place, pl_said *out);

PL_API int pl_sum_start(pl_group *group, const pl_call *call, uint32_t *number);
PL_API int pl_sum_is_ready(pl_group *group, uint32_t number);
/* out[i] (+)= scale * the ranks' sum of element begin + i, for n elements; adds to *squares if that is not NULL. */
PL_API int pl_sum_into(pl_group *group, uint32_t number, void *out, int out_dtype, uint64_t begin, uint64_t n,
                       double scale, int add, double *squares);
PL_API void pl_sum_done(pl_group *group, uint32_t number);
PL_API int pl_sum_is_released(pl_group *group, uint32_t number);
PL_API int pl_sum_release(pl_group *group, uint32_t number);

/* --- internal to the group */

/* Around every function: the group is not closed meanwhile. Whether it is open: if not, there is nothing to leave. */
static inline int pl_leave(pl_group *group, int code) {
    atomic_fetch_sub(&group->callers, 1);
    return code;
}
static inline int pl_enter(pl_group *group) {
    atomic_fetch_add(&group->callers, 1);
    return !atomic_load(&group->closed) || pl_leave(group, 0);
}

/* Whether the source, or the out, of a call has a range for each rank. */
static inline int pl_scatters(int verb) {
    return verb == PL_REDUCE_SCATTER || verb == PL_SCATTER || verb == PL_ALL_TO_ALL;
}
static inline int pl_gathers(int verb) { return verb == PL_ALL_GATHER || verb == PL_GATHER || verb == PL_ALL_TO_ALL; }

/* For the helper: executes a call; the caller holds `turn`. */
int pl_execute(pl_group *group, const pl_call *call, uint64_t spin_ns);
/* Offset in this rank's arena, or PL_FOREIGN. */
uint64_t pl_offset_of(const pl_group *group, const void *address);
/* A rank's description of a call. */
pl_said *pl_said_by(const pl_group *group, int place, uint32_t call);
/* Publishes this rank's description of its next call. */
void pl_describe(pl_group *group, const pl_call *call, uint32_t number);
/* Whether these bytes are in an arena, or foreign. */
int pl_is_inside(const pl_group *group, uint64_t offset, uint64_t num_bytes);
/* Whether all ranks, which have entered this call, describe the same one and tensors in their arenas. */
int pl_check_call(pl_group *group, uint32_t number);
/* Waits until the counter at this offset of every peer's desk has reached `target`. */
int pl_await_all(pl_group *group, size_t counter, uint32_t target, uint64_t spin_ns);
#define AWAIT_ALL(group, counter, target, spin_ns) pl_await_all(group, offsetof(pl_desk, counter), target, spin_ns)

#endif
