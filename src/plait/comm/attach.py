"""A plait group on top of a process group that the program has created with torch.distributed.

[Note: shared-memory transport alongside a process group]
On one host, shared memory is faster than Gloo. So CPU ranks of one host open a shared-memory transport
alongside the process group; it lives as long as the process group and is shared by all AttachedGroups on it.
The program's communications and ours then use separate transports, each with its own order.
"""

import importlib
import sys
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.utils as torch_utils
from torch import Tensor, nn

from plait.comm.algorithms import BulkBroadcast
from plait.comm.collectives import Group, empty
from plait.comm.comm_thread import CommThread
from plait.comm.shm.transport import open_host_group
from plait.comm.torch_backend import PlaitGroup
from plait.comm.torch_transport import TorchTransport
from plait.comm.transport import Transport
from plait.errors import CommError, unknown_key_hint

ATTACH_TRANSPORTS = ("auto", "host", "group")  # best available, shared memory, the process group itself

_world = dist.distributed_c10d._world
_ShmLink = tuple[Transport | None, str]  # shared-memory transport; if its ranks share no memory, the reason
_shm_links: "weakref.WeakKeyDictionary[dist.ProcessGroup, _ShmLink]" = weakref.WeakKeyDictionary()
_comm_threads: "weakref.WeakKeyDictionary[dist.ProcessGroup, CommThread]" = weakref.WeakKeyDictionary()


def check_attachable(transport: str) -> None:
    """Raise CommError if `transport` is unknown."""
    if transport not in ATTACH_TRANSPORTS:
        raise CommError(
            "unknown transport for gradients",
            given=f"transport={transport!r}",
            expected=" or ".join(ATTACH_TRANSPORTS),
            hint=unknown_key_hint(str(transport), ATTACH_TRANSPORTS),
        )


class AttachedGroup:
    """The ranks of a process group, in its order, and the transport of their reductions."""

    def __init__(
        self, process_group: dist.ProcessGroup, device: torch.device, transport: str = "auto"
    ) -> None:
        """`transport`: "host": shared memory, for CPU tensors on one host; "group": the process group itself;
        "auto": the first if possible. See [Note: shared-memory transport alongside a process group]."""
        self.process_group = process_group
        self._device = device
        self._transport = transport
        self._group: Group | None = None

    @property
    def rank(self) -> int:
        return self.process_group.rank()

    @property
    def size(self) -> int:
        return self.process_group.size()

    @property
    def group(self) -> Group:
        """The group. Collective on first use, by `open` or by the first communication. Raises CommError if
        the transport is unavailable."""
        if self._group is None:
            self._group = _group_of(self.process_group, self._device, self._transport)
        return self._group

    @property
    def group_with_comm_thread(self) -> Group:
        """The group, with a comm thread for reductions of several messages. There is one thread per process
        group, so that two models' reductions keep one order."""
        if self.group.transport_or_none is not None and self.group.comm_thread is None:
            if self.process_group not in _comm_threads:
                comm_thread = _comm_threads[self.process_group] = CommThread(self._device)
                weakref.finalize(self.process_group, comm_thread.close)
            self._group = replace(self.group, comm_thread=_comm_threads[self.process_group])
        return self.group

    def empty(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return an uninitialized flat tensor for the group's collectives."""
        return empty(numel, dtype, device, self.group)

    def open(self) -> None:
        """Create the group. Collective."""
        self.group  # noqa: B018

    def set_process_group(self, process_group: dist.ProcessGroup) -> None:
        """Switch to another process group."""
        self.process_group = process_group
        self._group = None

    @property
    def backend(self) -> str:
        return str(dist.get_backend(self.process_group))

    @property
    def num_threads(self) -> int | None:
        """Number of Gloo threads, if Gloo is the backend of the device."""
        gloo = _gloo_of(self.process_group) if self._device.type == "cpu" else None
        return None if gloo is None else int(getattr(gloo.options, "_threads", 2))


def sync_module_states(
    attached: AttachedGroup,
    module: nn.Module,
    parameters: Sequence[Tensor],
    ignored: Container[str],
    *,
    with_buffers: bool,
    bucket_bytes: int,
) -> None:
    """Overwrite all ranks' parameters, and `with_buffers` buffers, with those of the first rank. Collective.

    Between hosts by a chain, in messages of `bucket_bytes`: see [Note: broadcasts between hosts] in
    `algorithms.py`. Otherwise as torch does. Raises torch's RuntimeError if `parameters` differ in shape.
    """
    bulk = BulkBroadcast(attached.group)  # before the check, which does not fail on the first rank
    torch_utils._verify_param_shape_across_processes(attached.process_group, [*parameters])
    if not bulk.chains:
        torch_utils._sync_module_states(
            module, attached.process_group, bucket_bytes, 0, ignored, broadcast_buffers=with_buffers
        )
        return
    named: Iterable[tuple[str, Tensor]] = module.named_parameters()
    states = [*named, *(module.named_buffers() if with_buffers else ())]
    bucket: list[Tensor] = []
    is_source = attached.group.rank == 0
    for tensor in (tensor.detach() for name, tensor in states if name not in ignored):
        if bucket and sum(other.nbytes for other in bucket) + tensor.nbytes > bucket_bytes:
            broadcast_as_bytes(bucket, bulk.run, is_source=is_source)
            bucket = []
        bucket.append(tensor)
    broadcast_as_bytes(bucket, bulk.run, is_source=is_source)


def broadcast_as_bytes(tensors: Sequence[Tensor], run: Callable[[Tensor], None], *, is_source: bool) -> None:
    """Overwrite tensors of any dtypes with those of the source, in one message, which `run` broadcasts."""
    if not tensors:
        return
    message = torch.cat([tensor.detach().reshape(-1).view(torch.uint8) for tensor in tensors])
    run(message)
    if not is_source:
        chunks = message.split([tensor.nbytes for tensor in tensors])
        for tensor, chunk in zip(tensors, chunks, strict=True):
            tensor.copy_(chunk.clone().view(tensor.dtype).view(tensor.shape))


def _group_of(process_group: dist.ProcessGroup, device: torch.device, transport: str) -> Group:
    size, rank = process_group.size(), process_group.rank()
    ranks = tuple(dist.get_process_group_ranks(process_group))
    if size == 1:
        return Group(ranks, 0, None)
    if transport != "group":
        shm_transport, reason = _shm_link(process_group, device)
        if shm_transport is not None:
            return Group(ranks, rank, shm_transport)
        if transport == "host":
            raise CommError(
                "cannot reduce gradients through shared memory",
                given=reason,
                expected="tensors on the CPU, and all ranks on one host",
                hint="transport='auto', which uses the process group if memory is not shared",
            )
    return Group(ranks, rank, TorchTransport(process_group, ranks, rank, device=device))


def _shm_link(process_group: dist.ProcessGroup, device: torch.device) -> _ShmLink:
    if device.type != "cpu":
        return None, f"tensors on {device.type}"
    if process_group not in _shm_links:
        _shm_links[process_group] = _open_shm_link(process_group)
    return _shm_links[process_group]


def _open_shm_link(process_group: dist.ProcessGroup) -> _ShmLink:
    name, store = _world.pg_map.get(process_group, ("", None))
    if store is None or not (isinstance(process_group, PlaitGroup) or _gloo_of(process_group) is not None):
        return None, f"a process group over {name or 'an unknown backend'}"
    size, rank = process_group.size(), process_group.rank()
    base = TorchTransport(process_group, tuple(dist.get_process_group_ranks(process_group)), rank)
    prefix_store = dist.PrefixStore("plait/shm", store)
    transport, reason = open_host_group(base, rank, size, prefix_store, _timeout(process_group))
    # Also if the program ends without destroying the process group: peers then raise instead of waiting.
    if transport is not None:
        weakref.finalize(process_group, transport.close)
    return transport, reason


def _gloo_of(process_group: dist.ProcessGroup) -> Any:
    """Return the Gloo backend of the process group for CPU tensors, if it is Gloo."""
    try:
        backend = process_group._get_backend(torch.device("cpu"))
    except RuntimeError:  # no backend for the CPU, or a process group without backends
        return None
    return backend if isinstance(backend, dist.ProcessGroupGloo) else None


def _timeout(process_group: dist.ProcessGroup) -> timedelta:
    gloo = _gloo_of(process_group)
    found: timedelta = getattr(getattr(gloo, "options", None), "_timeout", dist.default_pg_timeout)
    return found


def remove_optimizer_hooks(parameters: Iterable[nn.Parameter]) -> None:
    """Remove the hooks of torch's `apply_optimizer_in_backward`: the caller runs the optimizers."""
    hook_handles: Any = sys.modules.get("torch.distributed.optim.apply_optimizer_in_backward")
    if hook_handles is None:
        return  # parameters unpickled from another process have no hooks here
    for parameter in parameters:
        for handle in hook_handles.param_to_optim_hook_handle_map.get(parameter, ()):
            handle.remove()


def mismatched_param_index(error: RuntimeError) -> int | None:
    """Return the index of the parameter that failed torch's shape check; None for any other error."""
    text = str(error)
    if "appears not to match" not in text or "params[" not in text:
        return None
    return int(text.partition("params[")[2].partition("]")[0])


def debug_names_enabled() -> bool:
    """Return whether TORCH_DISTRIBUTED_DEBUG asks for parameter names in messages."""
    level: Any = dist.get_debug_level()
    return bool(level != dist.DebugLevel.OFF)


def builtin_hook(kind: object) -> Any:
    """Return torch's Python hook for a `dist.BuiltinCommHookType`."""
    hooks = importlib.import_module("torch.distributed.algorithms.ddp_comm_hooks.default_hooks")
    is_plain = kind == dist.BuiltinCommHookType.ALLREDUCE
    return hooks.allreduce_hook if is_plain else hooks.fp16_compress_hook


def first_bucket_bytes() -> int:
    """Return torch's limit of the first bucket, which programs can change."""
    found: int = dist._DEFAULT_FIRST_BUCKET_BYTES
    return found
