/* A thread that executes a group's calls in order, concurrently with the program. */
#ifndef PLAIT_HELPER_H
#define PLAIT_HELPER_H

#include "group.h"

pl_helper *pl_helper_new(pl_group *group);
/* Fails the queued calls, and ends the thread after its current call. */
void pl_helper_end(pl_helper *helper);
/* Waits until the queue is empty. */
void pl_helper_drain(pl_helper *helper);

/* Queues a call and returns its ticket at once: 0 in a closed group. */
PL_API uint64_t pl_start(pl_group *group, const pl_call *call);
/* PL_OK when that call has completed, PL_PENDING after `most_ns`, or the group's failure. */
PL_API int pl_wait(pl_group *group, uint64_t ticket, uint64_t most_ns);

#endif
