#define _GNU_SOURCE
#include "messages.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "kernels.h"

enum { BLOCKS = 4 };
#define BLOCK ((uint64_t)64 << 10)

typedef struct {
    uint64_t total;  /* bytes of the full message */
    uint64_t source; /* offset in the sender's arena, or PL_FOREIGN: the bytes are in the block */
} label;

typedef struct {
    pl_counter sent, taken; /* blocks */
    label labels[BLOCKS];
    _Alignas(64) uint8_t blocks[BLOCKS][BLOCK];
} channel;

struct pl_message {
    int sends, peer, code;
    uint8_t *at;
    uint64_t num_bytes, moved, found; /* found: size of the sender's message */
    uint32_t last;                    /* of an owned send: `taken` at its completion */
    int posted, over;
    uint64_t since_ns; /* when it last moved */
    pl_message *next;  /* of the same channel */
};

typedef struct {
    pl_message *first, *last;
} line;

struct pl_mail {
    pl_group *group;
    pthread_mutex_t lock;
    pthread_t thread;
    int runs;
    _Atomic int ends;
    line *lines; /* per peer: sends, receives */
    int num_open;
};

uint64_t pl_channel_bytes(void) { return sizeof(channel); }

static channel *channel_of(const pl_group *group, int from, int to) {
    return (channel *)(group->channels + ((uint64_t)from * (uint64_t)group->size + (uint64_t)to) * sizeof(channel));
}

static void ring(const pl_group *group, int place) {
    pl_counter *bell = &group->desks[place].bell;
    atomic_fetch_add_explicit(&bell->value, 1, memory_order_seq_cst);
    pl_wake(bell);
}

static int move_out(pl_group *group, pl_message *m) {
    channel *c = channel_of(group, group->place, m->peer);
    uint32_t sent = atomic_load_explicit(&c->sent.value, memory_order_relaxed);
    uint64_t source = pl_offset_of(group, m->at);
    int moved = 0;
    if (m->posted) return m->over = source == PL_FOREIGN || pl_reached(pl_read(&c->taken), m->last);
    while (!m->posted && sent - pl_read(&c->taken) < BLOCKS) {
        uint64_t left = m->num_bytes - m->moved, n = left < BLOCK ? left : BLOCK;
        label *l = &c->labels[sent % BLOCKS];
        *l = (label){.total = m->num_bytes, .source = source};
        if (source == PL_FOREIGN)
            pl_copy(c->blocks[sent % BLOCKS], m->at + m->moved, n);
        else
            n = left;
        m->moved += n;
        m->posted = m->moved == m->num_bytes;
        m->last = ++sent;
        atomic_store_explicit(&c->sent.value, sent, memory_order_release);
        moved = 1;
    }
    if (moved) ring(group, m->peer);
    m->over = m->posted && source == PL_FOREIGN;
    return moved;
}

static int move_in(pl_group *group, pl_message *m) {
    channel *c = channel_of(group, m->peer, group->place);
    uint32_t taken = atomic_load_explicit(&c->taken.value, memory_order_relaxed);
    int moved = 0;
    while (!m->over && !pl_reached(taken, pl_read(&c->sent))) {
        label l = c->labels[taken % BLOCKS];
        uint64_t left = m->num_bytes - m->moved, n = left < BLOCK ? left : BLOCK;
        m->found = l.total;
        if (l.total != m->num_bytes) {
            m->code = pl_fail(group->watch.failure, PL_OTHER_SIZE, m->peer);
            return m->over = 1;
        }
        if (l.source != PL_FOREIGN) n = left;
        if (!pl_is_inside(group, l.source, m->num_bytes)) {
            m->code = pl_fail(group->watch.failure, PL_DAMAGED, m->peer);
            return m->over = 1;
        }
        pl_copy(m->at + m->moved,
                l.source == PL_FOREIGN ? c->blocks[taken % BLOCKS] : group->arenas[m->peer] + l.source, n);
        m->moved += n;
        m->over = m->moved == m->num_bytes;
        atomic_store_explicit(&c->taken.value, ++taken, memory_order_release);
        moved = 1;
    }
    if (moved) ring(group, m->peer);
    return moved;
}

static void check_peer(pl_group *group, pl_message *m, uint64_t now) {
    if (now - m->since_ns >= group->watch.timeout_ns)
        pl_fail(group->watch.failure, PL_LATE, m->peer);
    else if (!pl_is_alive(&group->watch, m->peer)) {
        int moved = m->sends ? move_out(group, m) : move_in(group, m); /* a last attempt after a failure */
        if (!moved && !m->over) pl_fail(group->watch.failure, PL_GONE, m->peer);
    }
}

/* Advances all messages that can be; the caller holds the lock. True if any advanced. */
static int move_all(pl_mail *mail, int check) {
    int moved = 0;
    uint64_t now = pl_now_ns();
    for (int i = 0; i < 2 * mail->group->size; i++) {
        line *l = &mail->lines[i];
        while (l->first) {
            pl_message *m = l->first;
            int step = m->sends ? move_out(mail->group, m) : move_in(mail->group, m);
            if (step) m->since_ns = now;
            moved |= step;
            if (check && !step && !m->over) check_peer(mail->group, m, now);
            int code = pl_failed(mail->group->watch.failure).code;
            if (!m->over && code == PL_OK) break;
            if (!m->over) m->code = code, m->over = 1;
            l->first = m->next;
            mail->num_open--;
            if (l->first) l->first->since_ns = now;
            moved = 1;
        }
        if (!l->first) l->last = NULL;
    }
    return moved;
}

static void *run_messages(void *argument) {
    pl_mail *mail = argument;
    pl_counter *bell = &mail->group->desks[mail->group->place].bell;
    uint64_t checked_ns = pl_now_ns();
    while (!atomic_load(&mail->ends)) {
        uint32_t seen = pl_read(bell);
        uint64_t now = pl_now_ns();
        int check = now - checked_ns > 20000000ull;
        if (check) checked_ns = now;
        pthread_mutex_lock(&mail->lock);
        int moved = move_all(mail, check), open = mail->num_open;
        pthread_mutex_unlock(&mail->lock);
        if (moved) ring(mail->group, mail->group->place); /* wakes threads that wait for a completed message */
        if (!moved) pl_sleep(bell, seen, open ? 20000000ull : 1000000000ull);
    }
    return NULL;
}

pl_mail *pl_mail_new(pl_group *group) {
    pl_mail *mail = calloc(1, sizeof(*mail));
    if (!mail) return NULL;
    mail->group = group;
    mail->lines = calloc((size_t)group->size * 2, sizeof(line));
    pthread_mutex_init(&mail->lock, NULL);
    if (mail->lines) return mail;
    free(mail);
    return NULL;
}

static void begin(pl_mail *mail) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    mail->runs = !pthread_create(&mail->thread, NULL, run_messages, mail); /* else only waiting threads advance messages */
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static pl_message *start(pl_group *group, int sends, int peer, void *at, uint64_t num_bytes) {
    if (!pl_enter(group)) return NULL;
    pl_mail *mail = group->mail;
    pl_message *m = calloc(1, sizeof(*m));
    if (!m) {
        pl_leave(group, PL_OK);
        return NULL;
    }
    *m = (pl_message){.sends = sends, .peer = peer, .at = at, .num_bytes = num_bytes, .since_ns = pl_now_ns()};
    line *l = &mail->lines[2 * peer + sends];
    pthread_mutex_lock(&mail->lock);
    if (l->last) l->last->next = m;
    else l->first = m;
    l->last = m;
    mail->num_open++;
    move_all(mail, 0);
    if (!m->over && !mail->runs) begin(mail);
    int runs = mail->runs && !m->over;
    pthread_mutex_unlock(&mail->lock);
    if (runs) ring(group, group->place);
    pl_leave(group, PL_OK);
    return m;
}

pl_message *pl_send(pl_group *group, int to, const void *source, uint64_t num_bytes) {
    return start(group, 1, to, (void *)source, num_bytes);
}

pl_message *pl_receive(pl_group *group, int from, void *out, uint64_t num_bytes) {
    return start(group, 0, from, out, num_bytes);
}

int pl_message_wait(pl_group *group, pl_message *message, uint64_t most_ns, uint64_t *bytes_sent) {
    if (!pl_enter(group)) return PL_GONE;
    pl_mail *mail = group->mail;
    pl_counter *bell = &group->desks[group->place].bell;
    uint64_t begin_ns = pl_now_ns(), checked_ns = begin_ns;
    for (;;) {
        uint32_t seen = pl_read(bell);
        uint64_t now = pl_now_ns();
        int check = now - checked_ns > 20000000ull;
        if (check) checked_ns = now;
        pthread_mutex_lock(&mail->lock);
        int moved = message->over ? 0 : move_all(mail, check), over = message->over, code = message->code;
        int others = moved && mail->runs;
        pthread_mutex_unlock(&mail->lock);
        if (others) ring(group, group->place);
        if (over) {
            if (bytes_sent) *bytes_sent = message->found;
            return pl_leave(group, code);
        }
        if (now - begin_ns >= most_ns) return pl_leave(group, PL_PENDING);
        if (moved) continue;
        if (now - begin_ns > group->spin_ns) pl_sleep(bell, seen, 20000000ull);
        else pl_relax();
    }
}

void pl_message_free(pl_group *group, pl_message *message) {
    if (getpid() != group->process) return; /* in a fork, a thread that is gone may hold the lock */
    if (!pl_enter(group)) return;
    line *l = &group->mail->lines[2 * message->peer + message->sends];
    pthread_mutex_lock(&group->mail->lock);
    for (pl_message **at = &l->first, *before = NULL; *at && !message->over; before = *at, at = &before->next) {
        if (*at != message) continue;
        *at = message->next; /* abandoned */
        if (l->last == message) l->last = before;
        group->mail->num_open--;
        break;
    }
    pthread_mutex_unlock(&group->mail->lock);
    free(message);
    pl_leave(group, PL_OK);
}

void pl_mail_end(pl_mail *mail) {
    if (mail->runs) {
        atomic_store(&mail->ends, 1);
        ring(mail->group, mail->group->place);
        pthread_join(mail->thread, NULL);
    }
    for (int i = 0; i < 2 * mail->group->size; i++)
        for (pl_message *m = mail->lines[i].first, *next; m; m = next) next = m->next, free(m);
    pthread_mutex_destroy(&mail->lock);
    free(mail->lines);
    free(mail);
}
