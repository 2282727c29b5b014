"""The replica of a server: a second `Server` of the same ranges, in the process of the next server.

[Note: chain of two]
With `server=replicated`, each server forwards to its replica what changes its ranges, or the clocks: sums of
gradients, updates, and changes of the clocks, in the order in which they happen here. A server waits for the
acknowledgement before the change has an effect or a reply is sent, so the replica has all that any worker has
seen. It executes the same requests in the same order, and has the same bits. Sums are forwarded instead of
pushes: 1 / w of the bytes (Li et al. 2014, section 4.3: replication after aggregation). On one host not even
these: the replica reads the gradients too, and acknowledges the update, before which workers write no others,
when it has added them up.

[Note: death of a server]
Workers are connected with replicas from the beginning. A worker that loses server i sends its pushes of the
step, and the request without a reply, to the replica, which answers when it has lost server i too, and
has executed all that was forwarded. The server may have died
- before it forwarded: no process has seen an effect, and the replica executes the request as a new one;
- after it forwarded, before it replied: the replica has the change, and a repeated request has no second
  effect: updates are applied once by clock and workers, commits and ends of steps count once for each clock;
- during a pull: all of the chunk is read again, at least as new as before;
- during a sum: the replica adds up the gradients again. In shared memory they are where they were; otherwise
  it waits for the pushes, which their workers send again. If such a worker has died too, the job ends.
A worker that has died too is known by its connection with the replica. When a replica's process dies, its
server goes on without one; a second death on the same ranges ends the job with an error.

[Note: one of two]
If only the connection between a server and its replica breaks, each takes the other for dead. The job's
store decides which one goes on (`ServerAddress.claim`), so that no range has two servers.
"""

import contextlib
import sys
import threading

from plait.comm.connection import Connection, Message, ServerAddress
from plait.errors import CommError
from plait.server.protocol import Verb


class Replica:
    """A server's connection with its replica."""

    def __init__(self, index: int, rank: int, connection: Connection, address: ServerAddress) -> None:
        """`index`, `address`: of the server. `rank`: of the replica's process."""
        self._index = index
        self.rank = rank
        self.connection = connection
        self._address = address
        self._is_lost = False
        self._lock = threading.Lock()

    def forward(self, message: Message) -> None:
        """Return when the replica has the message, or is lost. Raises CommError if it has replaced the
        server."""
        with self._lock:
            if self._is_lost:
                return
            try:
                self.connection.request(message)
            except CommError as error:
                self._lose(error)

    def check(self) -> None:
        """Notice if the replica is lost: workers that join wait for it until then."""
        with self._lock, contextlib.suppress(CommError):  # the next message raises it
            if not self._is_lost:
                try:
                    self.connection.check_is_open()
                except CommError as error:
                    self._lose(error)

    def leave(self) -> None:
        """End the replica with the server, which has ended as it should."""
        with contextlib.suppress(CommError):
            self.forward(Message(Verb.LEAVE))
        self.connection.close()

    def _lose(self, error: CommError) -> None:
        if not self._address.claim():
            raise CommError(
                f"server {self._index} has been replaced by its replica",
                given=error.given,
                hint="look for a network that was interrupted: the server is alive",
            ) from error
        self._is_lost = True
        report(f"server {self._index} has lost its replica, and goes on without")


def report(text: str) -> None:
    sys.stderr.write(f"plait: {text}\n")
    sys.stderr.flush()
