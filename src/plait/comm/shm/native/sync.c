#define _GNU_SOURCE
#include "sync.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define WATCH_NS 20000000ull /* interval of a sleeper's liveness checks: 20 ms */

uint64_t pl_now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

void pl_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield");
#endif
}

static long futex(_Atomic uint32_t *word, int what, uint32_t value, const struct timespec *most) {
    return syscall(SYS_futex, word, what, value, most, NULL, 0);
}

void pl_post(pl_counter *counter, uint32_t value) {
    atomic_store_explicit(&counter->value, value, memory_order_seq_cst);
    pl_wake(counter);
}

void pl_wake(pl_counter *counter) {
    if (atomic_load_explicit(&counter->sleepers, memory_order_seq_cst))
        futex(&counter->value, FUTEX_WAKE, INT_MAX, NULL);
}

void pl_sleep(pl_counter *counter, uint32_t seen, uint64_t most_ns) {
    struct timespec most = {(time_t)(most_ns / 1000000000ull), (long)(most_ns % 1000000000ull)};
    atomic_fetch_add_explicit(&counter->sleepers, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&counter->value, memory_order_seq_cst) == seen)
        futex(&counter->value, FUTEX_WAIT, seen, &most);
    atomic_fetch_sub_explicit(&counter->sleepers, 1, memory_order_seq_cst);
}

static int spin(pl_counter *counter, uint32_t target, uint64_t spin_ns) {
    if (pl_reached(pl_read(counter), target)) return 1;
    uint64_t until = pl_now_ns() + spin_ns;
    do {
        for (int i = 0; i < 32; i++) {
            if (pl_reached(pl_read(counter), target)) return 1;
            pl_relax();
        }
    } while (pl_now_ns() < until);
    return 0;
}

int pl_await(pl_watch *watch, pl_counter *counter, uint32_t target, int peer, uint64_t spin_ns) {
    if (spin(counter, target, spin_ns)) return PL_OK;
    uint64_t begin = pl_now_ns(), checked_ns = begin;
    for (;;) {
        uint32_t seen = pl_read(counter);
        if (pl_reached(seen, target)) return PL_OK;
        uint64_t now = pl_now_ns();
        int code = pl_failed(watch->failure).code;
        if (code != PL_OK) return code;
        if (now - checked_ns >= WATCH_NS) {
            checked_ns = now;
            /* It may have posted and ended since the last check. */
            if (!pl_is_alive(watch, peer) && !pl_reached(pl_read(counter), target))
                return pl_fail(watch->failure, PL_GONE, peer);
        }
        if (now - begin >= watch->timeout_ns) return pl_fail(watch->failure, PL_LATE, peer);
        pl_sleep(counter, seen, WATCH_NS);
    }
}

int pl_lock_file(int fd) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 1};
    return fcntl(fd, F_SETLK, &lock);
}

int pl_is_locked(int fd) {
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = 0, .l_len = 1};
    return fcntl(fd, F_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

int pl_is_alive(const pl_watch *watch, int place) { return !watch->files || pl_is_locked(watch->files[place]); }

int pl_fail(_Atomic uint64_t *failure, int code, int peer) {
    uint64_t none = 0, packed = (uint64_t)(uint32_t)code | (uint64_t)(uint32_t)peer << 32;
    atomic_compare_exchange_strong(failure, &none, packed);
    return pl_failed(failure).code;
}

pl_failure pl_failed(_Atomic uint64_t *failure) {
    uint64_t packed = atomic_load_explicit(failure, memory_order_acquire);
    pl_failure result = {(int32_t)(uint32_t)packed, (int32_t)(uint32_t)(packed >> 32)};
    return result;
}
