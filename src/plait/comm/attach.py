"""The group behind a process group that the program has made with torch.distributed.

[Note: a link beside the process group]
On one host ranks talk faster through memory that they share than through Gloo. So CPU ranks of one host
open a link of their own beside the process group; it lives as long as the process group does, and is the
same for all that ask. The program's communications and ours then go by different ways, each in its own
order.
"""

import importlib
import sys
import weakref
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from plait.comm.collectives import Group
from plait.comm.comm_thread import CommThread
from plait.comm.shm import Mailbox, meet, open_group
from plait.comm.torch_backend import PlaitGroup
from plait.comm.torch_transport import TorchTransport
from plait.comm.transport import Transport
from plait.errors import CommError, nearest

BEHIND = ("auto", "host", "group")  # what may carry it: the best, shared memory, the process group itself

_world = dist.distributed_c10d._world
_links: "weakref.WeakKeyDictionary[dist.ProcessGroup, _ShmLink]" = weakref.WeakKeyDictionary()
_backgrounds: "weakref.WeakKeyDictionary[dist.ProcessGroup, CommThread]" = weakref.WeakKeyDictionary()


class _ShmLink:
    """What was opened beside a process group; None: its ranks do not share a host."""

    def __init__(self, link: Transport | None, why_not: str = "") -> None:
        self.link = link
        self.why_not = why_not


def check_attachable(transport: str) -> None:
    """Raises CommError if there is no such way."""
    if transport not in BEHIND:
        raise CommError(
            "there is no such transport for gradients",
            given=f"transport={transport!r}",
            expected=" or ".join(BEHIND),
            hint=nearest(str(transport), BEHIND),
        )


class AttachedGroup:
    """The ranks of a process group, in its order, and what carries their sums."""

    def __init__(self, handle: dist.ProcessGroup, device: torch.device, transport: str = "auto") -> None:
        """`transport`: "host": shared memory, for CPU tensors on one host; "group": the process group itself;
        "auto": the first where it can be. See [Note: a link beside the process group]."""
        check_attachable(transport)
        self.handle = handle
        self._device = device
        self._transport = transport
        self._group: Group | None = None

    @property
    def rank(self) -> int:
        return self.handle.rank()

    @property
    def size(self) -> int:
        return self.handle.size()

    @property
    def group(self) -> Group:
        """All ranks ask for it together when they first communicate, or `open` before. Raises CommError where
        the transport cannot be had."""
        if self._group is None:
            self._group = _group_of(self.handle, self._device, self._transport)
        return self._group

    @property
    def group_with_background(self) -> Group:
        """For sums of several messages. All that ask share one background for each process group, so that two
        models' sums keep one order."""
        if self.group.link is not None and self.group.background is None:
            if self.handle not in _backgrounds:
                background = _backgrounds[self.handle] = CommThread(self._device)
                weakref.finalize(self.handle, background.close)
            self._group = replace(self.group, background=_backgrounds[self.handle])
        return self.group

    def open(self) -> None:
        """All ranks together."""
        self.group  # noqa: B018

    def move(self, handle: dist.ProcessGroup) -> None:
        """From now on it is another process group."""
        self.handle = handle
        self._group = None

    @property
    def backend(self) -> str:
        return str(dist.get_backend(self.handle))

    @property
    def num_threads(self) -> int | None:
        """Of Gloo, if it is the backend of the device."""
        gloo = _gloo_of(self.handle) if self._device.type == "cpu" else None
        return None if gloo is None else int(getattr(gloo.options, "_threads", 2))

    def future_sum(self, tensor: Tensor) -> "torch.futures.Future[list[Tensor]]":
        """Sums the tensor in place over the process group itself, as torch's communication hooks do."""
        return self.handle.allreduce([tensor]).get_future()


def _group_of(handle: dist.ProcessGroup, device: torch.device, transport: str) -> Group:
    size, rank = handle.size(), handle.rank()
    ranks = tuple(dist.get_process_group_ranks(handle))
    if size == 1:
        return Group(ranks, 0, None)
    if transport != "group":
        beside = _beside(handle, device)
        if beside.link is not None:
            return Group(ranks, rank, beside.link)
        if transport == "host":
            raise CommError(
                "gradients cannot travel through shared memory",
                given=beside.why_not,
                expected="tensors on the CPU, and all ranks on one host",
                hint="transport='auto', which takes the process group where memory is not shared",
            )
    return Group(ranks, rank, TorchTransport(handle, ranks, rank))


def _beside(handle: dist.ProcessGroup, device: torch.device) -> _ShmLink:
    if device.type != "cpu":
        return _ShmLink(None, f"tensors on {device.type}")
    if handle not in _links:
        _links[handle] = _opened(handle)
    return _links[handle]


def _opened(handle: dist.ProcessGroup) -> _ShmLink:
    name, store = _world.pg_map.get(handle, ("", None))
    if store is None or not (isinstance(handle, PlaitGroup) or _gloo_of(handle) is not None):
        return _ShmLink(None, f"a process group over {name or 'a backend of its own'}")
    size, rank = handle.size(), handle.rank()
    over = TorchTransport(handle, tuple(dist.get_process_group_ranks(handle)), rank)
    neighbours, hosts, why_not = meet(rank, size, over, wanted=True)
    if neighbours is None or len(set(hosts)) > 1:
        if neighbours is not None:
            neighbours.close()
        return _ShmLink(None, why_not or f"{len(set(hosts))} hosts")
    board = Mailbox.of(dist.PrefixStore("plait/beside", store))
    link = open_group(
        neighbours, tuple(range(size)), rank, board, neighbours.key, _timeout(handle), is_own=True
    )
    # Also where the program ends without destroying the process group: peers learn that this rank has left.
    weakref.finalize(handle, link.cut)
    return _ShmLink(link)


def _gloo_of(handle: dist.ProcessGroup) -> Any:
    """Gloo, if it is what the process group has for CPU tensors, under whatever name."""
    try:
        backend = handle._get_backend(torch.device("cpu"))
    except RuntimeError:  # none for the CPU, or the process group is one by itself
        return None
    return backend if isinstance(backend, dist.ProcessGroupGloo) else None


def _timeout(handle: dist.ProcessGroup) -> timedelta:
    gloo = _gloo_of(handle)
    found: timedelta = getattr(getattr(gloo, "options", None), "_timeout", dist.default_pg_timeout)
    return found


def take_optimizers_over(parameters: Iterable[nn.Parameter]) -> None:
    """torch's hooks no longer run the optimizers of `apply_optimizer_in_backward`: the caller will."""
    handles: Any = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    if handles is None:
        return  # parameters that have come from another process: nothing is hooked here
    for parameter in parameters:
        for handle in handles.param_to_optim_hook_handle_map.get(parameter, ()):
            handle.remove()


def shapes_of(error: RuntimeError) -> int | None:
    """Which parameter torch's check of shapes has found to differ; None if the error is another one."""
    text = str(error)
    if "appears not to match" not in text or "params[" not in text:
        return None
    return int(text.partition("params[")[2].partition("]")[0])


def names_are_told() -> bool:
    """Whether TORCH_DISTRIBUTED_DEBUG asks for the names of parameters in messages."""
    level: Any = dist.get_debug_level()
    return bool(level != dist.DebugLevel.OFF)


def builtin_hook(kind: object) -> Any:
    """torch's own hook of a `dist.BuiltinCommHookType`, in Python."""
    hooks = importlib.import_module("torch.distributed.algorithms.ddp_comm_hooks.default_hooks")
    is_plain = kind == dist.BuiltinCommHookType.ALLREDUCE
    return hooks.allreduce_hook if is_plain else hooks.fp16_compress_hook


def first_bucket_bytes() -> int:
    """torch's own, which programs change."""
    found: int = dist._DEFAULT_FIRST_BUCKET_BYTES
    return found
