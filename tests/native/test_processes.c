// Ranks that are processes: one that is killed is missed at once, reaped or not, and one that has yet to come is not.
#define _GNU_SOURCE
#include "check.h"
#include "messages.h"
#include "ranks.h"

#include <fcntl.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int control_fd; // of the group's control segment; a child inherits it
static int files[MOST_RANKS]; // a rank locks its own
static void *arenas[MOST_RANKS];
static struct {
    _Atomic int locked, ready; // ranks that have locked their file; that are where the test wants them
    _Atomic uint64_t killed_ns;
} *shared;

static void sleep_ms(long ms) { nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000}, NULL); }

static pid_t fork_rank(int size, int place, void (*body)(rank *)) {
    pid_t pid = fork();
    CHECK(pid >= 0, "fork");
    if (pid) return pid;
    world w = {.timeout_ns = 20000000000ull, .files = files};
    void *control = new_pages(pl_control_bytes(size), control_fd);
    CHECK(!pl_lock(files[place]), "a lock");
    shared->locked++;
    while (shared->locked < size) sleep_ms(1);
    if (place == size - 1) sleep_ms(100); // the others wait for it, and know that it has yet to come
    rank me = {.group = open_group(&w, control, size, place, arenas), .place = place, .size = size,
               .arena = arenas[place]};
    body(&me);
    pl_close(me.group);
    pl_free(me.group);
    _exit(0);
}

static void barrier(rank *me) {
    pl_call call = {.verb = PL_BARRIER, .dtype = PL_I32};
    int code = pl_run(me->group, &call);
    CHECK(code == PL_OK, "rank %d: %d", me->place, code);
}

static void check_gone(rank *me, int code, const char *what) {
    pl_failure failure;
    pl_failure_of(me->group, &failure);
    CHECK(code == PL_GONE && failure.peer == me->size - 1, "%s: %d of %d", what, code, failure.peer);
    uint64_t took_ns = pl_now_ns() - shared->killed_ns;
    CHECK(took_ns < 1000000000ull, "%s: %lu ms", what, (unsigned long)(took_ns / 1000000));
}

static void call_it(rank *me, int started) {
    static float whole[1 << 20];
    pl_call call = {PL_ALL_REDUCE, PL_F32, PL_SUM, 0, 1 << 20, whole, whole, 1.0, "a tensor"};
    int code = PL_OK;
    while (code == PL_OK) // the victim is in one of them
        code = started ? pl_wait(me->group, pl_start(me->group, &call), 60000000000ull) : pl_run(me->group, &call);
    check_gone(me, code, "a call");
}

static void in_a_call(rank *me) {
    barrier(me);
    shared->ready++;
    call_it(me, me->place == 0);
}

// The victim is in no call: it does something else.
static void before_a_call(rank *me) {
    barrier(me);
    shared->ready++;
    if (me->place == me->size - 1) pause();
    call_it(me, me->place == 0);
}

static void in_a_message(rank *me) {
    static uint8_t bytes[1 << 20];
    barrier(me);
    shared->ready++;
    if (me->place == me->size - 1) pause();
    pl_message *m = me->place ? pl_receive(me->group, me->size - 1, bytes, 1) // never comes
                              : pl_send(me->group, me->size - 1, bytes, sizeof bytes); // more than the channel holds
    check_gone(me, pl_message_wait(me->group, m, 60000000000ull, NULL), "a message");
    pl_message_free(me->group, m);
}

static void make_files(int size) {
    shared->ready = shared->locked = 0;
    for (int place = 0; place < size; place++) CHECK((files[place] = memfd_create("a rank", 0)) >= 0, "a file");
}

static void check_killed(int size, void (*body)(rank *), int reaped) {
    pid_t pids[MOST_RANKS];
    int status;
    control_fd = memfd_create("control", 0);
    CHECK(control_fd >= 0 && !ftruncate(control_fd, (off_t)pl_control_bytes(size)), "a file in memory");
    make_files(size);
    for (int place = 0; place < size; place++) pids[place] = fork_rank(size, place, body);
    while (shared->ready < size) sleep_ms(1);
    sleep_ms(100);
    shared->killed_ns = pl_now_ns();
    CHECK(!kill(pids[size - 1], SIGKILL), "kill");
    if (reaped) waitpid(pids[size - 1], &status, 0); // else it stays a zombie
    for (int place = 0; place < size - 1; place++) {
        waitpid(pids[place], &status, 0);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "rank %d: %x", place, (unsigned)status);
    }
    if (!reaped) waitpid(pids[size - 1], &status, 0);
    close(control_fd);
    for (int place = 0; place < size; place++) close(files[place]);
}

// A process that a rank forked ends, or closes what it inherited: the rank lives, and so do its calls.
static void forks(rank *me) {
    float x = 1;
    pl_call call = {PL_ALL_REDUCE, PL_F32, PL_SUM, 0, 1, &x, &x, 1.0, "a tensor"};
    barrier(me);
    uint64_t ticket = me->place == 0 ? pl_start(me->group, &call) : 0; // under way while it forks
    pid_t child = fork();
    if (!child) {
        close(files[me->place]);
        pl_close(me->group);
        _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "a child: %x", (unsigned)status);
    sleep_ms(60);
    int code = me->place == 0 ? pl_wait(me->group, ticket, 60000000000ull) : pl_run(me->group, &call);
    CHECK(code == PL_OK && x == (float)me->size, "rank %d: %d, %f", me->place, code, x);
}

static void check_forks(int size) {
    pid_t pids[MOST_RANKS];
    control_fd = memfd_create("control", 0);
    CHECK(control_fd >= 0 && !ftruncate(control_fd, (off_t)pl_control_bytes(size)), "a file in memory");
    make_files(size);
    for (int place = 0; place < size; place++) pids[place] = fork_rank(size, place, forks);
    for (int place = 0; place < size; place++) {
        int status;
        waitpid(pids[place], &status, 0);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "rank %d: %x", place, (unsigned)status);
    }
    close(control_fd);
    for (int place = 0; place < size; place++) close(files[place]);
}

void test_processes(void) {
    for (int place = 0; place < MOST_RANKS; place++) arenas[place] = new_pages(ARENA_BYTES, -1);
    shared = new_pages(sizeof *shared, -1);
    for (int reaped = 0; reaped < 2; reaped++) {
        check_killed(3, in_a_call, reaped);
        check_killed(3, before_a_call, reaped);
        check_killed(3, in_a_message, reaped);
    }
    check_forks(2);
    for (int place = 0; place < MOST_RANKS; place++) munmap(arenas[place], ARENA_BYTES);
    munmap(shared, sizeof *shared);
}
