"""The device of a rank: which one, whether it is the only rank on it, and the processors near it.

[Note: processors of a GPU]
Copies between a GPU and pinned memory of another NUMA node run at about half the speed, and memory is
allocated on the node of the thread that first writes it. So a rank that trains on a GPU runs on those of its
processors that belong to the GPU's node, as with torchrun's --numa-binding=node. Ranks that may use the same
processors compute with equal numbers of threads; the kernel distributes these.
"""

import contextlib
import os
import socket
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from plait.comm.shm.arena import available_bytes
from plait.comm.store import JobStore
from plait.comm.torch_transport import backend_of
from plait.errors import CommError

_SYS = Path("/sys")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NCCL_DEFAULTS = {
    # Kernels of several communicators start in the order of the program, which is the same on all ranks.
    # See [Note: two channels] in `parallel/zero/sharded_model.py`. AMD's library does not support it.
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",
    "TORCH_FR_BUFFER_SIZE": "2000",  # collectives in torch's flight recorder, for `pending_collectives`
}


def select_device(
    requested: str | None, local_rank: int, process_group: dist.ProcessGroup | None = None
) -> torch.device:
    """Return this rank's device, and make a GPU the current one. `process_group`: the program's own; a GPU is
    used by default only if that communicates GPU tensors by another backend than Gloo. Raises CommError."""
    if process_group is not None and requested is None:
        has_backend = backend_of(process_group, torch.device("cuda")) not in (None, "gloo")
        requested = None if has_backend else "cpu"
    if requested == "cpu" or (requested is None and not torch.cuda.is_available()):
        return torch.device("cpu")
    bound_device = None if process_group is None else process_group.bound_device_id
    if bound_device is not None and bound_device.type == "cuda":
        device = bound_device
    else:
        device = torch.device("cuda", _device_index(local_rank))
    torch.cuda.set_device(device)
    return device


def check_backend(process_group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise CommError unless the program's process group communicates tensors of this device."""
    if backend_of(process_group, device) is None:
        raise CommError(
            f"the program's process group does not communicate tensors of {device.type}",
            given=f"backend {dist.get_backend(process_group)!r}, device={device.type!r}",
            expected="a backend for the device of the ranks",
            hint='init_process_group("cpu:gloo,cuda:nccl"), or another device',
        )


def _device_index(local_rank: int) -> int:
    """Return the index of a rank's GPU among the visible ones: the only one, if each rank sees its own."""
    num_devices = torch.cuda.device_count()
    if num_devices == 1:
        return 0
    if local_rank >= num_devices:
        raise CommError(
            "a rank has no GPU",
            given=f"local rank {local_rank}, {num_devices} GPUs",
            expected="one GPU per rank",
            hint="fewer ranks per host" if num_devices else "device=cpu",
        )
    return local_rank


def free_bytes(device: torch.device) -> int:
    """Return the memory that tensors of this rank can still take: its share of the host's, or the GPU's."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + unused
    return available_bytes() // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))


def claim_device(device: torch.device, store: JobStore, rank: int) -> None:
    """Raise CommError if another rank of the job uses the same GPU: NCCL would hang or fail later.

    A GPU is identified by its host's boot (the same in all containers of a host), PCI address and UUID. Parts
    of a GPU (MIG) have one address; on some drivers, and in virtual machines, GPUs have one UUID.
    """
    properties: Any = torch.cuda.get_device_properties(device)
    boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else socket.gethostname()
    gpu = f"{_pci_address(properties)} {getattr(properties, 'uuid', '')}"
    key = f"GPU {boot} {gpu}"
    if not store.claim(key, str(rank)):
        raise CommError(
            "two ranks use the same GPU",
            given=f"ranks {store.get(key)} and {rank}: {device}, {gpu}",
            expected="one GPU per rank",
            hint="fewer ranks per host, or another CUDA_VISIBLE_DEVICES for each rank",
        )


def _pci_address(properties: Any) -> str:
    """Return the address in the form of /sys; "" if torch does not have it."""
    try:
        bus, slot = properties.pci_bus_id, properties.pci_device_id
        return f"{properties.pci_domain_id:04x}:{bus:02x}:{slot:02x}.0"
    except AttributeError:
        return ""


def set_nccl_defaults() -> None:
    """Set NCCL's environment, where the user has not. To be called before the first communicator."""
    if torch.version.hip is None:
        for name, value in _NCCL_DEFAULTS.items():
            os.environ.setdefault(name, value)


def allowed_processors() -> set[int]:
    """Return the processors on which this thread may run."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return os.sched_getaffinity(0) if has_affinity else {*range(os.cpu_count() or 1)}


def use_processors(num_processors: int) -> None:
    """Compute with these many threads where torchrun has chosen one: it does so for every rank."""
    if "TORCHELASTIC_RUN_ID" in os.environ and torch.get_num_threads() == 1:
        torch.set_num_threads(num_processors)


class NodeBinding:
    """Restricts this process's threads to the processors of a NUMA node, until `release`.

    All threads, because those of OpenMP, which run the optimizer of offloaded states, may exist already;
    threads that are started later inherit the restriction.
    """

    def __init__(self, processors: set[int]) -> None:
        """Leaves out what a thread may not use; does nothing for a thread that would have none left."""
        self._allowed = allowed_processors()
        self._previous: dict[int, set[int]] = {}
        for thread in _threads():
            with contextlib.suppress(OSError):  # it has ended
                previous = os.sched_getaffinity(thread)
                if near := previous & processors:
                    os.sched_setaffinity(thread, near)
                    self._previous[thread] = previous

    @classmethod
    def near(cls, device: torch.device, sys_folder: Path = _SYS) -> "NodeBinding":
        """Bind to the node of a GPU. See [Note: processors of a GPU]."""
        properties: Any = torch.cuda.get_device_properties(device)
        processors: set[int] = set()
        with contextlib.suppress(OSError, ValueError):  # unknown
            processors = processors_near(_pci_address(properties), sys_folder)
        return cls(processors)

    def release(self) -> None:
        """Give every thread back what it might use before; to one started since, what the binding thread
        might."""
        for thread in _threads() if self._previous else ():
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread, self._previous.get(thread, self._allowed))
        self._previous.clear()


def _threads() -> list[int]:
    folder = Path("/proc/self/task")
    return [int(thread.name) for thread in folder.iterdir()] if folder.exists() else []


def processors_near(pci_address: str, sys_folder: Path = _SYS) -> set[int]:
    """Return the processors of the NUMA node of a PCI device; none if it has no node. Raises OSError,
    ValueError."""
    node = int((sys_folder / "bus/pci/devices" / pci_address / "numa_node").read_text())
    if node < 0:
        return set()
    processors: set[int] = set()
    for part in (sys_folder / f"devices/system/node/node{node}/cpulist").read_text().strip().split(","):
        first, _, last = part.partition("-")
        processors |= set(range(int(first), int(last or first) + 1))
    return processors
