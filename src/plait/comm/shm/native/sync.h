/* Counters that ranks of one host wait on, and the detection of dead peers during a wait.

[Note: counters instead of locks]
A rank that is killed while it holds a lock in shared memory would block all others. So there are no such locks: every
counter has one writer, only grows, and is written (release) after the data that it announces; readers load it
(acquire) before they access the data. Counters wrap around: they are compared by the sign of the difference.

[Note: liveness]
Every rank holds a POSIX record lock on its arena's file, which its peers have open, from before they learn of it. The
kernel releases it when the process ends, however it ends and before it is reaped; no other process inherits it. Peers
query it with F_GETLK. A rank that sleeps on a counter wakes up every few milliseconds to do so.

[Note: spinning]
A wait spins for `spin_ns` and then sleeps on a futex. A waker makes the system call only when the counter has
sleepers: it stores the value and then reads `sleepers`, the sleeper adds itself and then reads the value again,
all sequentially consistent, so that one of the two sees the other. */
#ifndef PLAIT_SYNC_H
#define PLAIT_SYNC_H

#include <stdatomic.h>
#include <stdint.h>

typedef struct {
    _Alignas(64) _Atomic uint32_t value;
    _Atomic uint32_t sleepers;
} pl_counter;

enum { PL_OK = 0, PL_PENDING = 1, PL_GONE = -1, PL_LATE = -2, PL_MISMATCH = -3, PL_OTHER_SIZE = -4, PL_DAMAGED = -5 };

/* The first failure of a group: sticky, and the same for all ranks. */
typedef struct {
    int32_t code; /* PL_GONE, PL_LATE, PL_MISMATCH, PL_OTHER_SIZE (of a message), PL_DAMAGED (shared memory) */
    int32_t peer; /* the place of the missing rank, or of the one whose call is not the expected one */
} pl_failure;

/* A group's state that waiting threads need. */
typedef struct {
    _Atomic uint64_t *failure; /* shared: see pl_fail */
    const int *files;          /* by place: the file it has locked. NULL: no liveness checks */
    uint64_t timeout_ns;
} pl_watch;

static inline int pl_reached(uint32_t value, uint32_t target) { return (int32_t)(value - target) >= 0; }

static inline uint32_t pl_read(pl_counter *counter) {
    return atomic_load_explicit(&counter->value, memory_order_acquire);
}

uint64_t pl_now_ns(void);
void pl_relax(void);

/* Sets the counter and wakes its sleepers. */
void pl_post(pl_counter *counter, uint32_t value);
/* Wakes the sleepers of a counter that has changed (sequentially consistent). */
void pl_wake(pl_counter *counter);
/* Sleeps for at most `most_ns` while the counter equals `seen`. */
void pl_sleep(pl_counter *counter, uint32_t seen, uint64_t most_ns);
/* Waits until the counter reaches `target`: PL_OK, or the group's failure. `peer` is its writer's place. */
int pl_await(pl_watch *watch, pl_counter *counter, uint32_t target, int peer, uint64_t spin_ns);

/* Takes the lock that marks this process as alive. */
int pl_lock_file(int fd);
/* Whether another process has locked it. Exported, like the functions of group.h. */
__attribute__((visibility("default"))) int pl_is_locked(int fd);
int pl_is_alive(const pl_watch *watch, int place);

/* Records a failure unless there is one already; returns the code of the recorded one. */
int pl_fail(_Atomic uint64_t *failure, int code, int peer);
pl_failure pl_failed(_Atomic uint64_t *failure);

#endif
