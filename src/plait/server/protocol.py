"""The division of the parameters into chunks, on which workers and servers agree, and their requests.

[Note: chunks]
Servers hold ranges of the units' flat storages. The runs of elements with the same optimizer options, over
all trained units in the order of forward, form one flat sequence. It is divided into chunks of at most
MAX_NUMEL elements, and server i holds the i-th part of the sequence, so that servers are balanced to one
chunk (Li et al. 2014, with equal ranges for hashing).

[Note: requests]
Each request of a worker has one reply, with the same verb, or ERROR or OVER. Server 0 keeps the clocks; the
others hold chunks only. `clock` is the worker's. One step of a worker:

  PUSH      a chunk's gradient, to its server; not if the server reads the worker's memory itself
  COMMIT    totals of the step, to server 0, when everything is pushed. The reply is the decision, and the
            norm if there is one server
  SUM       under policies that sum, to all of several servers: add up these workers' gradients. The reply
            is the norm
  APPLY     to all servers: step the optimizer. Of several equal requests one has an effect. Under the other
            policies to server 0 first
  ADVANCE   to server 0, when all servers have applied it. Replied to when the worker may read, after a PULL
            of `count` chunks
  PULL      chunks' weights, which the server writes into the worker's memory or sends

A server forwards SUM (with the sum, unless the replica can read the gradients), APPLY, WRITE, READY and
CLOCKS to its replica: see `replica.py`.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from plait.comm.connection import Message, as_bytes
from plait.comm.objects import decode_error, decode_text, encode_error, encode_text
from plait.errors import PlaitError
from plait.plan import UnitLayout
from plait.plan.layout import RANGE_ALIGNMENT

MAX_NUMEL = 2**20  # 4 MiB of float32
_CHUNKS_PER_SERVER = 4  # of small models, at least


@dataclass(frozen=True)
class Chunk:
    """Elements [start, stop) of a trained unit's storage, of one optimizer group."""

    unit: int
    group: int
    start: int
    stop: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class ChunkTable:
    """The chunks of each server, in the order of forward; and a digest that two processes compare."""

    of_server: tuple[tuple[Chunk, ...], ...]
    digest: str

    @classmethod
    def build(cls, layouts: Sequence[UnitLayout], num_servers: int) -> "ChunkTable":
        """`layouts`: of the trained units, unsharded."""
        runs = [(unit, *run) for unit, layout in enumerate(layouts) for run in layout.owned_groups(0)]
        total = sum(stop - start for *_, start, stop in runs)
        wanted = -(-total // (_CHUNKS_PER_SERVER * num_servers))
        length = min(MAX_NUMEL, -(-wanted // RANGE_ALIGNMENT) * RANGE_ALIGNMENT)
        parts: list[list[Chunk]] = [[] for _ in range(num_servers)]
        before = 0
        for unit, group, low, high in runs:
            for start in range(low, high, length):
                chunk = Chunk(unit, group, start, min(start + length, high))
                parts[before * num_servers // total].append(chunk)
                before += chunk.numel
        names = [(layout.name, [(p.name, p.start, p.stop) for p in layout.params]) for layout in layouts]
        digest = hashlib.sha256(repr((names, parts)).encode()).hexdigest()[:16]
        return cls(tuple(map(tuple, parts)), digest)


class Verb(IntEnum):
    HELLO = 1  # JSON: digest, memory, offsets. To server 0 last: the worker joins
    PUSH = 2
    COMMIT = 3
    SUM = 4
    APPLY = 5
    ADVANCE = 6
    PULL = 7
    READ = 8  # a chunk's weights and optimizer states
    WRITE = 9
    READY = 10  # what was written is complete: `clock` of the next step, `value` the number of the writing
    WAIT_READY = 11
    HOLD = 12  # no decisions, replied to when all have been applied; `value` 0 ends it
    FINISH = 13  # an update whose worker died has been applied everywhere
    UNFINISHED = 14  # of a worker that is to join, before HELLO; replied to when it may join
    COUNTS = 15
    LEAVE = 16  # `value` 1: the job is over
    OVER = 17  # reply: the job is over
    ERROR = 18  # reply, JSON: a PlaitError
    CLOCKS = 19  # to a replica, JSON: the name of a change of the clocks, and its arguments


def error_message(error: PlaitError) -> Message:
    return Message(Verb.ERROR, payload=encode_text(encode_error(error)))


def raised(message: Message) -> PlaitError:
    """The error in an ERROR reply."""
    return decode_error(decode_text(message.payload))


def mask_of(workers: tuple[int, ...]) -> int:
    """Workers as the bits of an integer."""
    return sum(1 << worker for worker in workers)


def members(mask: int) -> tuple[int, ...]:
    """The workers of `mask_of`."""
    return tuple(worker for worker in range(mask.bit_length()) if mask >> worker & 1)


def pack(tensors: list[Tensor]) -> Tensor:
    """The bytes of flat tensors, one after the other."""
    return torch.cat([as_bytes(tensor) for tensor in tensors])


def unpack(payload: Tensor, kinds: Sequence[str], numel: int, dtype: torch.dtype) -> list[Tensor]:
    """The tensors of a chunk's state: weights, then those of `kinds`, if the optimizer has states."""
    tensors = [payload[: numel * dtype.itemsize].clone().view(dtype)]
    at = numel * dtype.itemsize
    for kind in kinds if payload.numel() > at else ():
        kind_dtype, length = (torch.float64, 1) if "." in kind else (dtype, numel)
        stop = at + length * kind_dtype.itemsize
        tensors.append(payload[at:stop].clone().view(kind_dtype))
        at = stop
    return tensors
