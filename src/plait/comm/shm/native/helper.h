/* A thread that executes a group's calls in order, beside the program. */
#ifndef PLAIT_HELPER_H
#define PLAIT_HELPER_H

#include "group.h"

pl_helper *pl_helper_new(pl_group *group);
/* Fails the calls that wait, and ends the thread when its call is over. */
void pl_helper_end(pl_helper *helper);
/* Returns when nothing is left to do. */
void pl_helper_drain(pl_helper *helper);

/* Hands a call over and returns its ticket at once. */
PL_API uint64_t pl_start(pl_group *group, const pl_call *call);
/* PL_OK when that call is over, PL_PENDING after `most_ns`, or the group's failure. */
PL_API int pl_wait(pl_group *group, uint64_t ticket, uint64_t most_ns);

#endif
