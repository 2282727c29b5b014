"""The simulated device's log, as Python has it.

[Note: streams in the log]
A stream is a number; 0 is the default stream. A block of memory belongs to the stream that was current when
it was allocated. Only the entries of one process are in a log, in the order in which the host issued them.
"""

import enum
from typing import NamedTuple


class Kind(enum.IntEnum):
    """Kinds of entries: the list of native/log.h."""

    OP = 0  # a kernel, a copy or a collective
    ALLOC = 1
    FREE = 2
    RECORD = 3  # of an event on a stream
    WAIT = 4  # of a stream for an event
    SYNC_STREAM = 5  # the host blocks until a stream is done
    SYNC_EVENT = 6
    SYNC_DEVICE = 7
    QUERY = 8  # the host asks an event or a stream, and it is done
    RECORD_STREAM = 9
    HOST_RACE = 10  # the host wrote to pinned memory that a copy had not yet read


SYNCS = frozenset({Kind.SYNC_STREAM, Kind.SYNC_EVENT, Kind.SYNC_DEVICE})


class Entry(NamedTuple):
    """One event of the log. Unused fields are 0 or empty."""

    kind: Kind
    stream: int
    id: int  # of the event, of the communicator, or the address of the block
    bytes: int  # of the block or the copy; of a collective: its number on the communicator
    name: str
    where: str  # lines of plait, innermost first: "comm/world.py:10 < engine/engine.py:99"
    spans: list[tuple[int, int, bool]]  # of an operation: first byte, end, whether it writes
    flops: float
    itemsize: int
    peer: int  # of a message: the other rank's index in the communicator; else -1
