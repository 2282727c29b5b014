/* Messages between two ranks of a group.

[Note: a channel]
Each ordered pair of ranks has a channel: a ring of BLOCKS blocks with two counters, `sent` and `taken`. A foreign
tensor goes through the blocks; of an owned one a single block says where it lies, and the receiver copies it from there.
Messages of a channel are matched in order. A send of a foreign tensor is over when it is all in the channel, of an owned one when the
receiver has taken it.

[Note: who moves messages]
Whoever waits for a message moves all of this rank's messages, so that two ranks that send to each other first and
receive afterwards do not wait in a circle. A thread, begun when a message cannot be finished at once, does the
same while nobody waits. Every rank has a bell that peers ring when they have changed a channel of its. */
#ifndef PLAIT_MESSAGES_H
#define PLAIT_MESSAGES_H

#include "group.h"

typedef struct pl_message pl_message;

uint64_t pl_channel_bytes(void);
pl_mail *pl_mail_new(pl_group *group);
void pl_mail_end(pl_mail *mail);

/* NULL: no memory. The tensor is in use until the message is over. */
PL_API pl_message *pl_send(pl_group *group, int to, const void *source, uint64_t num_bytes);
PL_API pl_message *pl_receive(pl_group *group, int from, void *out, uint64_t num_bytes);
/* PL_OK when it is over, PL_PENDING after `most_ns`, or the group's failure. `bytes_sent`, if not NULL: of a receive, what the
 * sender's message had, where that is not what was expected (PL_OTHER_SIZE). */
PL_API int pl_message_wait(pl_group *group, pl_message *message, uint64_t most_ns, uint64_t *bytes_sent);
/* One that is not over is given up, and with it the channel: the group must have failed, or close. What is
 * left when a group closes is freed with it. */
PL_API void pl_message_free(pl_group *group, pl_message *message);

#endif
