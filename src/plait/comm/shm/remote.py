"""Memory of one process that others of its host read and write, without a group between them."""

import os

from torch import Tensor, dtype

from plait.comm.shm import native_lib
from plait.comm.shm.arena import Arena, Mapping, as_tensor
from plait.comm.shm.rendezvous import HostInfo, host_identity, open_peer_file, span_bytes
from plait.errors import CommError


def new_arena(num_processes: int) -> Arena | None:
    """Return an arena for tensors that up to `num_processes` processes map, or None without shared memory."""
    library = native_lib.load()
    if library is None:
        return None
    try:
        return Arena(library, span_bytes(num_processes))
    except (CommError, OSError):
        return None


def describe(arena: Arena | None) -> HostInfo:
    """Return the host and file by which another process maps it."""
    return HostInfo(host_identity(), os.getpid(), -1 if arena is None else arena.fd)


class RemoteMemory:
    """Another process's arena, mapped; it stays readable after that process has ended."""

    def __init__(self, info: HostInfo, num_processes: int) -> None:
        """Raises CommError or OSError if it cannot be mapped."""
        library = native_lib.load()
        if library is None or info.fd < 0 or info.host != host_identity():
            raise CommError("the processes share no memory", given=native_lib.unavailable_reason() or None)
        fd = open_peer_file(info.pid, info.fd)
        try:
            self._mapping = Mapping(library, fd, span_bytes(num_processes))
            self._num_bytes = os.fstat(fd).st_size
        finally:
            os.close(fd)

    def tensor(self, offset: int, numel: int, kind: dtype) -> Tensor:
        """The flat tensor at an offset of the arena. Raises CommError for one outside of it."""
        if offset < 0 or numel < 0 or offset + numel * kind.itemsize > self._num_bytes:
            raise CommError(
                "a tensor is outside of the memory that was shared",
                given=f"{numel} elements at byte {offset} of {self._num_bytes}",
            )
        return as_tensor(self._mapping.address + offset, numel, kind, self._mapping)
