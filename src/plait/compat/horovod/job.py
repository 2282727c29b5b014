"""The ranks of a Horovod program, and ranks that have joined: `init`, `rank`, `size`, `join` and the like.

[Note: announcements]
Horovod's background thread negotiates every operation by its name, so a rank that has called `join` learns
what the others still reduce. Here each operation starts with a small all-reduce (the maximum) that describes
it. Ranks with data do not wait for its result; joined ranks read it and contribute zeros. So all ranks must
make the same calls in the same order, which Horovod does not require. Gradients have a group of their own:
their reductions may overlap with other calls in any order.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plait.comm import Group, Work, World, all_reduce, connect, ranks_by_host, start_all_reduce
from plait.errors import CompatError

OPERATIONS = (
    "",
    "an optimizer's step",
    "allreduce",
    "allgather",
    "broadcast",
    "alltoall",
    "reducescatter",
    "barrier",
    "broadcast of an object",
    "allgather of objects",
)
DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


@dataclass
class Job:
    """This process as a rank of the program."""

    world: World
    hosts: tuple[tuple[int, ...], ...]  # the ranks of each
    zero_steps: list[Callable[[], None]] = field(default_factory=list)  # of each optimizer, for joined ranks
    last: Work = field(default_factory=Work)  # the last announcement

    @property
    def group(self) -> Group:
        return self.world.group

    @property
    def host(self) -> int:
        """Index of this rank's host."""
        return next(i for i, ranks in enumerate(self.hosts) if self.world.rank in ranks)

    def announce(self, operation: str, *details: int) -> None:
        """Describe an operation to the ranks that have joined. See [Note: announcements]."""
        if self.group.size > 1:
            words = [OPERATIONS.index(operation), *details, 0, 0, 0, 0][:5]
            self.last.wait()
            message = torch.tensor(words, device=self.world.device)
            self.last = start_all_reduce(message, self.group, "max", label=f"announcement of {operation}")


_job: Job | None = None


def init(comm: object = None, process_sets: object = None) -> None:
    """Join the ranks of torchrun, `mpirun` or `srun`; without a launcher, run alone. Raises CommError."""
    global _job
    if comm is not None or process_sets is not None:
        raise CompatError(
            "init() for a part of the ranks is not supported",
            given="comm" if comm is not None else "process_sets",
            expected="all ranks of the job",
            hint="hvd.init()",
        )
    if _job is None or not _job.world.is_alive():
        world = connect()
        _job = Job(world, ranks_by_host(world.group, world.device))


def shutdown() -> None:
    """Leave the job. `init` may be called again."""
    global _job
    if _job is not None:
        _job.last.wait()
        _job.world.close()
        _job = None


def is_initialized() -> bool:
    return _job is not None and _job.world.is_alive()


def job() -> Job:
    """Return this process's job. Raises CompatError before `init`."""
    if _job is None or not _job.world.is_alive():
        raise CompatError(
            "Horovod has not been initialized",
            given="no hvd.init(), or one that hvd.shutdown() has ended",
            expected="a job of all ranks",
            hint="hvd.init()",
        )
    return _job


def rank() -> int:
    return job().world.rank


def size() -> int:
    return job().world.size


def local_rank() -> int:
    """Index of this rank on its host, and of its GPU."""
    return job().world.local_rank


def local_size() -> int:
    """Number of ranks of this host."""
    return len(job().hosts[job().host])


def cross_rank() -> int:
    """Index of this rank's host."""
    return job().host


def cross_size() -> int:
    """Number of hosts."""
    return len(job().hosts)


def is_homogeneous() -> bool:
    """Return whether all hosts have as many ranks."""
    return len({len(ranks) for ranks in job().hosts}) == 1


def join(device: int = -1) -> int:  # noqa: ARG001  # Horovod's argument: the device is the rank's
    """Contribute zeros to what other ranks reduce until all have joined. Return the last rank that joined.

    Means stay divided by the number of all ranks. Raises CompatError if another rank calls anything but
    `allreduce` or an optimizer's step meanwhile.
    """
    own, last = job(), -1
    if own.group.size == 1:
        return 0
    own.last.wait()
    newly = own.world.rank + 1
    while True:
        words = torch.tensor([0, 0, 0, 0, newly], device=own.world.device)
        all_reduce(words, own.group, "max", label="announcement of join")
        operation, *details, joined = words.tolist()
        last, newly = joined - 1 if joined else last, 0
        if operation == 0:
            return int(last)
        _contribute(own, OPERATIONS[operation], details)


def _contribute(own: Job, operation: str, details: list[int]) -> None:
    if operation == OPERATIONS[1]:
        own.zero_steps[details[0]]()
    elif operation == "allreduce":
        numel, dtype, op = details
        zeros = torch.zeros(numel, dtype=DTYPES[dtype], device=own.world.device)
        all_reduce(zeros, own.group, ("sum", "max", "min", "prod")[op], label="allreduce")
    else:
        raise CompatError(
            f"a rank that has joined cannot take part in {operation}",
            given=f"rank {own.world.rank} in join(), another one in {operation}",
            expected="allreduce and optimizer steps only, until all ranks have joined",
            hint=f"{operation} before or after join()",
        )


def staged(tensor: Tensor) -> Tensor:
    """Return a contiguous copy of a tensor on the device of the ranks."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=job().world.device).copy_(tensor.detach())
