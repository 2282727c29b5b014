/* Messages between two ranks of a group.

[Note: channels]
Each ordered pair of ranks has a channel: a ring of BLOCKS blocks with two counters, `sent` and `taken`. A foreign
tensor is copied through the blocks; for an owned one a single block contains its address, and the receiver copies it
from there. Messages of a channel are matched in order. A send of a foreign tensor completes when it is all in the
channel, of an owned one when the receiver has copied it.

[Note: progress of messages]
A thread that waits for a message advances all of this rank's messages, so that two ranks that both send first and
receive afterwards do not deadlock. A background thread, started when a message cannot complete at once, does the
same while no other waits. Every rank has a bell, a counter that peers increment when they have changed one of its
channels. */
#ifndef PLAIT_MESSAGES_H
#define PLAIT_MESSAGES_H

#include "group.h"

typedef struct pl_message pl_message;

uint64_t pl_channel_bytes(void);
pl_mail *pl_mail_new(pl_group *group);
void pl_mail_end(pl_mail *mail);

/* NULL: no memory, or a closed group. The tensor is in use until the message has completed. */
PL_API pl_message *pl_send(pl_group *group, int to, const void *source, uint64_t num_bytes);
PL_API pl_message *pl_receive(pl_group *group, int from, void *out, uint64_t num_bytes);
/* PL_OK when it has completed, PL_PENDING after `most_ns`, or the group's failure. `bytes_sent`, if not NULL: for a
 * receive, the size of the sender's message if it is not the expected one (PL_OTHER_SIZE). */
PL_API int pl_message_wait(pl_group *group, pl_message *message, uint64_t most_ns, uint64_t *bytes_sent);
/* An incomplete message is abandoned, and with it the channel: the group must have failed, or close. Messages left
 * when a group closes are freed with it. */
PL_API void pl_message_free(pl_group *group, pl_message *message);

#endif
