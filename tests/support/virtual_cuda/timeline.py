"""A clock for the recordings of all ranks: how long a step would take on GPUs, and what it would wait for.

[Note: replay]
Each entry of the logs becomes a node of one graph, with a duration by `Hardware`: an operation follows the
previous one of its stream and its launch by the host; launches follow each other; a wait joins an event's
node into a stream, a synchronization joins streams into the host. A collective begins when it has come up in
the streams of all its ranks, and ends on all of them at once; a message begins when both sides are there. The
graph is evaluated in topological order. Nodes that are left over wait for each other in a circle, or for a
rank that never comes: a deadlock, such as a receive in front of a send on one stream on both ranks.

[Note: late host]
The host has a clock of its own. It issues operations one after the other, at a cost each, and a kernel cannot
begin before it has been issued. A synchronization joins the clocks: the host goes on when the device is done,
and the device then has nothing queued, so it idles until the host has issued the next kernel. While kernels
are longer than their launches, the host gets ahead again; in small models, and after each synchronization, it
does not, and the device waits for it (`idle_s`). Python between operations costs nothing here: the idle time
is a lower bound. `benchmarks/gpu` measures the launch and the read on a GPU.

[Note: resident kernels]
A kernel of NCCL occupies its thread blocks' multiprocessors (CTAs) from the time at which its stream gets to
it, also while it waits for its peer. A receive that was posted early takes them from the products of this
rank until its message comes, and kernels of several communicators that do not fit at once can deadlock. So
the plan limits the CTAs of messages, and tests set a budget for those that are resident while the rank
computes. NCCL takes fewer for small messages: the numbers are upper bounds.

[Note: model of costs]
A kernel takes its bytes by memory bandwidth, or its FLOPs by the peak, whichever is longer, and a minimum. A
collective takes the bytes that a ring moves per rank, by the slowest link between neighbours. Two kernels at
the same time do not slow each other down, and those of the log are eager PyTorch's, not fused. So the numbers
compare plans and changes of the code; they do not predict a GPU to better than a fifth.
"""

import itertools
import math
import operator
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from support.virtual_cuda.log import Entry, Kind
from support.virtual_cuda.recording import Recording

Interval = tuple[float, float]


@dataclass(frozen=True)
class Hardware:
    """An H200 SXM host of eight; hosts connected by 400 Gb/s per GPU. Bytes and FLOPs per second, as reached
    by large kernels."""

    matmul_flops: float = 0.7 * 989e12  # bf16
    wide_flops: float = 0.8 * 67e12  # float32, without TF32
    memory: float = 0.8 * 4.8e12
    nvlink: float = 400e9
    network: float = 50e9
    host_link: float = 50e9
    kernel_s: float = 3e-6  # shortest kernel
    collective_s: float = 15e-6  # latency
    ranks_per_host: int = 8
    # Of the host; estimates, see [Note: late host]. An operation in eager PyTorch costs 5 to 25 us from
    # Python to the driver, less in a backward pass; c10d adds two events, two waits and its bookkeeping to a
    # launch by NCCL; a host that waits for a result continues some 10 us after the kernel.
    launch_s: float = 5e-6
    collective_launch_s: float = 20e-6
    sync_s: float = 10e-6
    nccl_ctas: int = 32  # of a kernel whose communicator has no limit: NCCL's channels over NVLink

    def operation_s(self, entry: Entry) -> float:
        """Return the duration of a kernel, or of a copy between host and device."""
        num_bytes = sum(end - begin for begin, end, _ in entry.spans)
        if entry.name in ("copy to host", "copy to device"):
            return self.kernel_s + entry.bytes / self.host_link
        peak = self.matmul_flops if entry.itemsize == 2 else self.wide_flops
        return max(self.kernel_s, num_bytes / self.memory, entry.flops / peak)

    def collective_of(self, name: str, num_bytes: int, ranks: Sequence[int]) -> float:
        """Return the duration of a collective of the full tensor's bytes, or of a message."""
        one_host = len({rank // self.ranks_per_host for rank in ranks}) == 1
        link = self.nvlink if one_host else self.network
        if name in ("nccl:send", "nccl:recv"):
            return self.collective_s + num_bytes / link
        passes = 2 if name == "nccl:all_reduce" else 1
        return self.collective_s + passes * num_bytes * (len(ranks) - 1) / len(ranks) / link


@dataclass
class RankTime:
    """One rank's step, in seconds. Exposed communication: nothing else runs on the device meanwhile."""

    step_s: float = 0.0
    compute_s: float = 0.0
    communication_s: float = 0.0
    exposed_s: float = 0.0
    idle_s: float = 0.0  # neither: the device waits for the host
    launch_s: float = 0.0  # of the host
    resident: int = 0  # most communication kernels at once, waiting ones too
    message_ctas: int = 0  # most CTAs of sends and receives during computation: [Note: resident kernels]
    flops: float = 0.0
    kernels: Counter[str] = field(default_factory=Counter)  # seconds, by name and line


@dataclass
class Timeline:
    """Result of `replay`. `deadlock`: what is left over, in words; then there are no times."""

    ranks: list[RankTime] = field(default_factory=list)
    deadlock: list[str] = field(default_factory=list)

    @property
    def step_s(self) -> float:
        return max(rank.step_s for rank in self.ranks)


@dataclass
class _Node:
    """A point of time, or an operation's end, in the graph."""

    duration_s: float
    after: list[int]
    label: str = ""
    start_s: float = 0.0
    end_s: float = -1.0  # not evaluated yet


@dataclass
class _Meeting:
    """A collective or a message: the nodes at which its ranks are ready for it, and its own node."""

    node: int
    num_ranks: int
    ready: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class _Resident:
    """A kernel of NCCL: the nodes from which it occupies multiprocessors and at whose end it frees them."""

    ready: int
    end: int
    ctas: int
    is_message: bool


def replay(recordings: Sequence[Recording], hardware: Hardware = Hardware()) -> Timeline:
    """Return the times of a step from the recordings of all its ranks, made with `keep_log`."""
    graph = _Graph(hardware)
    for rank, recording in enumerate(recordings):
        graph.add_rank(rank, recording)
    left = graph.evaluate()
    if left:
        return Timeline(deadlock=left)
    return Timeline([graph.time_of(rank) for rank in range(len(recordings))])


class _Graph:
    """See [Note: replay]."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._nodes: list[_Node] = []
        self._meetings: dict[tuple[object, ...], _Meeting] = {}
        self._compute: dict[int, list[int]] = defaultdict(list)
        self._communication: dict[int, list[_Resident]] = defaultdict(list)
        self._last: dict[int, list[int]] = {}  # of the host and of all streams
        self._times: dict[int, RankTime] = defaultdict(RankTime)

    def _add(self, duration_s: float, after: Iterable[int], label: str = "") -> int:
        self._nodes.append(_Node(duration_s, [*after], label))
        return len(self._nodes) - 1

    def add_rank(self, rank: int, recording: Recording) -> None:
        host = self._add(0.0, [])
        streams: dict[int, int] = defaultdict(lambda: host)
        events: dict[int, int] = {}
        num_messages: dict[tuple[object, ...], int] = defaultdict(int)
        batches: dict[int, int] = {}  # the stream's node before the first message of a batch
        for entry in recording.log:
            kind = Kind(entry.kind)
            if kind is Kind.OP:
                is_nccl = entry.name.startswith("nccl:")
                launch_s = self._hardware.collective_launch_s if is_nccl else self._hardware.launch_s
                host = self._add(launch_s, [host])
                self._times[rank].launch_s += launch_s
                ready = [streams[entry.stream], host]
                if is_nccl and entry.peer >= 0 and entry.bytes:  # of a batch: none waits for another
                    ready[0] = batches.setdefault(entry.bytes, streams[entry.stream])
                    message = self._meet(rank, recording, entry, ready, num_messages)
                    streams[entry.stream] = self._add(0.0, [streams[entry.stream], message])
                elif is_nccl:
                    streams[entry.stream] = self._meet(rank, recording, entry, ready, num_messages)
                else:
                    duration_s = self._hardware.operation_s(entry)
                    streams[entry.stream] = node = self._add(duration_s, ready, entry.name)
                    self._compute[rank].append(node)
                    self._times[rank].flops += entry.flops
                    self._times[rank].kernels[f"{entry.name} at {entry.where.partition(' < ')[0]}"] += (
                        duration_s
                    )
            elif kind is Kind.RECORD:
                events[entry.id] = self._add(0.0, [streams[entry.stream], host])
            elif kind is Kind.WAIT and entry.id in events:
                streams[entry.stream] = self._add(0.0, [streams[entry.stream], events[entry.id]])
            elif kind is Kind.QUERY:
                events.pop(entry.id, None)  # the program asks again until it is done: nothing waits for it
            elif kind is Kind.SYNC_STREAM:
                host = self._add(self._hardware.sync_s, [host, streams[entry.stream]])
            elif kind is Kind.SYNC_DEVICE:
                host = self._add(self._hardware.sync_s, [host, *streams.values()])
            elif kind is Kind.SYNC_EVENT and entry.id in events:
                host = self._add(self._hardware.sync_s, [host, events[entry.id]])
        self._last[rank] = [host, *streams.values()]

    def _meet(
        self,
        rank: int,
        recording: Recording,
        entry: Entry,
        after: list[int],
        num_messages: dict[tuple[object, ...], int],
    ) -> int:
        name, ranks = recording.communicators[entry.id]
        num_bytes = max((end - begin for begin, end, _ in entry.spans), default=0)
        if entry.peer < 0:
            key: tuple[object, ...] = (name, entry.bytes)
            members: Sequence[int] = ranks
        else:  # the n-th message from one rank to the other
            peer = ranks[entry.peer]
            members = (rank, peer) if entry.name == "nccl:send" else (peer, rank)
            num_messages[name, members] += 1
            key = (name, members, num_messages[name, members])
        if key not in self._meetings:
            duration_s = self._hardware.collective_of(entry.name, num_bytes, members)
            label = f"{entry.name} of ranks {list(members)} on {name} at {entry.where}"
            self._meetings[key] = _Meeting(self._add(duration_s, [], label), len(members))
        meeting = self._meetings[key]
        meeting.ready[rank] = ready = self._add(0.0, after)
        self._nodes[meeting.node].after.append(ready)
        ctas = recording.max_ctas.get(entry.id, self._hardware.nccl_ctas)
        self._communication[rank].append(_Resident(ready, meeting.node, ctas, entry.peer >= 0))
        return meeting.node

    def evaluate(self) -> list[str]:
        """Compute the times of all nodes; return descriptions of those that never end."""
        following: dict[int, list[int]] = defaultdict(list)
        num_missing = [len(node.after) for node in self._nodes]
        for meeting in self._meetings.values():
            num_missing[meeting.node] += meeting.num_ranks - len(meeting.ready)  # a rank that never comes
        for index, node in enumerate(self._nodes):
            for earlier in node.after:
                following[earlier].append(index)
        ready = [index for index, number in enumerate(num_missing) if number == 0]
        while ready:
            node = self._nodes[index := ready.pop()]
            node.start_s = max((self._nodes[earlier].end_s for earlier in node.after), default=0.0)
            node.end_s = node.start_s + node.duration_s
            for later in following[index]:
                num_missing[later] -= 1
                if num_missing[later] == 0:
                    ready.append(later)
        return [node.label for node in self._nodes if node.end_s < 0 and node.label.startswith("nccl:")]

    def time_of(self, rank: int) -> RankTime:
        nodes, time = self._nodes, self._times[rank]
        compute = _union((nodes[index].start_s, nodes[index].end_s) for index in self._compute[rank])
        kernels = [(nodes[it.ready].end_s, nodes[it.end].end_s, it) for it in self._communication[rank]]
        communication = _union((begin_s, end_s) for begin_s, end_s, _ in kernels)
        both = _union([*compute, *communication])
        time.step_s = max(nodes[index].end_s for index in self._last[rank])
        time.compute_s, time.communication_s = _length(compute), _length(communication)
        time.exposed_s = _length(both) - time.compute_s
        time.idle_s = time.step_s - _length(both)
        time.resident = _most_at_once((begin_s, end_s, 1) for begin_s, end_s, _ in kernels)
        messages = ((begin_s, end_s, it.ctas) for begin_s, end_s, it in kernels if it.is_message)
        time.message_ctas = _most_at_once(messages, compute)
        return time


def _most_at_once(
    intervals: Iterable[tuple[float, float, int]], within: Sequence[Interval] = ((0.0, math.inf),)
) -> int:
    """Return the largest sum of the numbers of intervals that overlap, at any time of `within`."""
    points = [point for begin, end, n in intervals for point in ((begin, n, 0), (end, -n, 0)) if end > begin]
    points += [point for begin, end in within for point in ((begin, 0, 1), (end, 0, -1))]
    total = most = is_within = 0
    for _, same_time in itertools.groupby(sorted(points), key=operator.itemgetter(0)):
        for _, change, enters in same_time:
            total, is_within = total + change, is_within + enters
        most = max(most, total if is_within else 0)
    return most


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end - begin for begin, end in intervals)
