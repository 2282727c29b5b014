"""Parameters, optimizer states and plain objects, broadcast to all ranks or gathered from them.

Horovod pickles objects. Here they are those of compat/values.py.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from plait import comm
from plait.compat.horovod.job import job, staged
from plait.compat.horovod.verbs import broadcast_async_, check_process_set
from plait.compat.values import decode, encode, tensor_layouts
from plait.errors import CompatError


def broadcast_value(value: Any, root: int) -> Any:
    """Return the root's value on all ranks. Collective."""
    own, tensors = job(), list[Tensor]()
    is_root = own.group.rank == root
    text = json.dumps(encode(value, tensors)) if is_root else ""
    encoded = json.loads(comm.broadcast_text(root, text, own.group, own.world.device))
    if not is_root:
        tensors = [torch.empty(shape, dtype=dtype) for dtype, shape in tensor_layouts(encoded)]
    for tensor in tensors:
        buffer = staged(tensor)
        comm.broadcast(buffer, own.group, root, label="an object")
        if not is_root:
            tensor.copy_(buffer)
    return value if is_root else decode(encoded, tensors)


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,  # noqa: ARG001
    process_set: Any = None,
) -> Any:
    """Return the root's object: plain values and tensors, which arrive on the CPU."""
    check_process_set(process_set)
    job().announce("broadcast of an object")
    return broadcast_value(obj, root_rank)


def allgather_object(obj: Any, name: str | None = None, process_set: Any = None) -> list[Any]:  # noqa: ARG001
    """Return the objects of all ranks, in order of rank."""
    check_process_set(process_set)
    job().announce("allgather of objects")
    return [broadcast_value(obj, root) for root in range(job().group.size)]


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Overwrite all ranks' tensors with the root's. `params`: a state dict, or (named) parameters."""
    if isinstance(params, Mapping):
        tensors = [params[name] for name in sorted(params)]
    elif isinstance(params, Iterable) and not isinstance(params, Tensor):
        tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in params]
    else:
        raise CompatError(
            "broadcast_parameters of an unknown type",
            given=type(params).__name__,
            expected="a dict or a list of tensors",
            hint="model.state_dict()",
        )
    for handle in [broadcast_async_(tensor, root_rank) for tensor in tensors if isinstance(tensor, Tensor)]:
        handle.wait()


def broadcast_optimizer_state(optimizer: torch.optim.Optimizer, root_rank: int) -> None:
    """Load the root's optimizer state on all ranks."""
    state = broadcast_object(optimizer.state_dict(), root_rank)
    if job().group.rank != root_rank:
        optimizer.load_state_dict(state)
