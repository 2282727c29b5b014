"""Accesses to memory that nothing orders, found in a log; and what the host waited for.

[Note: vector clocks]
Two operations are ordered if they are on one stream, if an event recorded after the first was waited for
before the second, or if the host synchronized with the first before it issued the second. A stream's clock
maps every stream to the number of its operations that certainly precede the next one. Two accesses to the
same bytes, one of them a write, race if the later one's clock does not include the earlier. (Fidge 1988,
Mattern 1988; torch's own `torch.cuda._sanitizer` works the same way.) One run suffices: clocks depend on the
order in which the host issued operations, not on timing.

[Note: kept memory]
torch's caching allocator gives a freed block to the next allocation on the block's own stream, which queues
after all its users there. A block on which another stream was recorded (`Tensor.record_stream`) is given out
only when *the host* has seen that stream's event. A host far ahead of the device has seen nothing since its
last synchronization: these bytes are kept from the pool, as if the memory were leaked for the time.
"""

import bisect
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from support.virtual_cuda.log import SYNCS, Entry, Kind

Clock = dict[int, int]


@dataclass(frozen=True)
class Access:
    """An operation's access to a range of bytes; `count`: the operation's number on its stream."""

    begin: int
    end: int
    writes: bool
    stream: int
    count: int
    name: str
    where: str

    def __str__(self) -> str:
        return f"{self.name} at {self.where or '(autograd)'} on stream {self.stream}"


@dataclass
class _Block:
    """A block of memory, with the last accesses to its bytes."""

    num_bytes: int
    stream: int
    where: str
    accesses: list[Access] = field(default_factory=list)
    recorded: dict[int, str] = field(default_factory=dict)  # streams, and who recorded them


@dataclass
class Findings:
    """Result of `analyze`. Lines are plait's, as in the log; counts are of equal findings."""

    races: Counter[str] = field(default_factory=Counter)
    frees_in_use: Counter[str] = field(default_factory=Counter)
    syncs: Counter[str] = field(default_factory=Counter)  # the host blocks
    kept_bytes: Counter[str] = field(default_factory=Counter)  # by line of allocation and who recorded
    peak_bytes: int = 0  # of blocks
    num_operations: int = 0


def analyze(log: Iterable[Entry]) -> Findings:
    """Return the races, syncs and kept bytes of one rank's log."""
    return _Analysis().run(log)


class _Analysis:
    """The clocks and blocks at a point of the log."""

    def __init__(self) -> None:
        self.found = Findings()
        self._host: Clock = {}
        self._streams: dict[int, Clock] = {}
        self._events: dict[int, Clock] = {}
        self._blocks: dict[int, _Block] = {}
        self._starts: list[int] = []  # of blocks, sorted
        self._bytes = 0

    def run(self, log: Iterable[Entry]) -> Findings:
        handlers = {
            Kind.OP: self._operation,
            Kind.ALLOC: self._allocate,
            Kind.FREE: self._free,
            Kind.RECORD: self._record,
            Kind.WAIT: self._wait,
            Kind.RECORD_STREAM: self._record_stream,
            Kind.HOST_RACE: self._host_race,
        }
        for entry in log:
            handlers.get(Kind(entry.kind), self._synchronize)(entry)
        return self.found

    def _clock(self, stream: int) -> Clock:
        """Return a stream's clock, with all that the host has seen: it is about to issue an operation."""
        clock = self._streams.setdefault(stream, {})
        _join(clock, self._host)
        return clock

    def _block_at(self, address: int) -> _Block | None:
        """Return the block of the device that contains an address."""
        index = bisect.bisect_right(self._starts, address) - 1
        if index < 0:
            return None
        block = self._blocks[self._starts[index]]
        return block if address < self._starts[index] + block.num_bytes else None

    def _operation(self, entry: Entry) -> None:
        clock = self._clock(entry.stream)
        clock[entry.stream] = count = clock.get(entry.stream, 0) + 1
        self.found.num_operations += 1
        for begin, end, writes in entry.spans:
            block = self._block_at(begin)
            if block is None:  # the host's memory
                continue
            access = Access(begin, end, writes, entry.stream, count, entry.name, entry.where)
            kept = []
            for earlier in block.accesses:
                overlaps = earlier.begin < end and begin < earlier.end
                if overlaps and (writes or earlier.writes) and not _includes(clock, earlier):
                    self.found.races[f"{earlier}, then {access}"] += 1
                if not (overlaps and writes and begin <= earlier.begin and earlier.end <= end):
                    kept.append(earlier)
            block.accesses = [*kept, access]

    def _allocate(self, entry: Entry) -> None:
        bisect.insort(self._starts, entry.id)
        # Earlier users of the same memory are ordered with the block's stream only.
        count = self._streams.get(entry.stream, {}).get(entry.stream, 0)
        allocated = Access(
            entry.id, entry.id + entry.bytes, True, entry.stream, count, "allocated", entry.where
        )
        self._blocks[entry.id] = _Block(entry.bytes, entry.stream, entry.where, [allocated])
        self._bytes += entry.bytes
        self.found.peak_bytes = max(self.found.peak_bytes, self._bytes)

    def _free(self, entry: Entry) -> None:
        block = self._blocks.pop(entry.id, None)
        if block is None:
            return
        self._starts.remove(entry.id)
        self._bytes -= entry.bytes
        owner = self._clock(block.stream)
        for access in block.accesses:
            if access.stream not in block.recorded and not _includes(owner, access):
                self.found.frees_in_use[f"{access}, then freed (allocated at {block.where})"] += 1
        unseen = [
            name
            for stream, name in block.recorded.items()
            if self._host.get(stream, 0) < self._streams.get(stream, {}).get(stream, 0)
        ]
        if unseen:
            self.found.kept_bytes[f"{unseen[0]} of memory allocated at {block.where}"] += block.num_bytes

    def _record(self, entry: Entry) -> None:
        self._events[entry.id] = dict(self._clock(entry.stream))

    def _wait(self, entry: Entry) -> None:
        _join(self._clock(entry.stream), self._events.get(entry.id, {}))

    def _record_stream(self, entry: Entry) -> None:
        block = self._block_at(entry.id)
        if block is not None and entry.stream != block.stream:
            block.recorded[entry.stream] = entry.name

    def _host_race(self, entry: Entry) -> None:
        self.found.races[f"{entry.name} at {entry.where}, then a write by the host"] += 1

    def _synchronize(self, entry: Entry) -> None:
        kind = Kind(entry.kind)
        if kind is Kind.SYNC_DEVICE:
            clocks = list(self._streams.values())
        elif entry.id:  # of an event
            clocks = [self._events.get(entry.id, {})]
        else:
            clocks = [self._clock(entry.stream)]
        for clock in clocks:
            _join(self._host, clock)
        if kind in SYNCS:
            self.found.syncs[f"{entry.name} at {entry.where or '(autograd)'}"] += 1


def _join(into: Clock, other: Clock) -> None:
    for stream, count in other.items():
        if into.get(stream, 0) < count:
            into[stream] = count


def _includes(clock: Clock, access: Access) -> bool:
    return clock.get(access.stream, 0) >= access.count
