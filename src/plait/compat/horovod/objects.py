"""Parameters, optimizer states and plain objects, broadcast to all ranks or gathered from them.

Horovod pickles objects. Here they are JSON and tensors: None, bools, numbers, strings, lists, tuples, sets,
dicts and tensors, in any nesting. So no message can run code.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from plait import comm
from plait.compat.horovod.job import job, staged
from plait.compat.horovod.verbs import broadcast_async_, check_process_set
from plait.errors import CompatError

_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set}


def encode(value: Any, tensors: list[Tensor]) -> Any:
    """Return a JSON value; its tensors are copied to the CPU and appended to `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(value.detach().to("cpu", copy=True).contiguous())
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return {name: [encode(item, tensors) for item in value]}
    if isinstance(value, Mapping):
        return {"dict": [[encode(key, tensors), encode(item, tensors)] for key, item in value.items()]}
    if callable(getattr(value, "item", None)) and getattr(value, "ndim", None) == 0:
        return encode(value.item(), tensors)  # a number of NumPy's
    raise CompatError(
        "an object of this type cannot be sent to other ranks: nothing is unpickled",
        given=f"a {type(value).__module__}.{type(value).__qualname__}",
        expected="None, numbers, strings, lists, tuples, sets, dicts and tensors",
        hint="its state_dict() or vars()",
    )


def decode(value: Any, tensors: Iterable[Tensor]) -> Any:
    """Return what `encode` encoded; `tensors` in the same order."""
    if not isinstance(value, dict):
        return value
    remaining = iter(tensors)
    [(kind, content)] = value.items()
    if kind == "tensor":
        return next(remaining)
    if kind == "dict":
        return {decode(key, remaining): decode(item, remaining) for key, item in content}
    return _SEQUENCES[kind](decode(item, remaining) for item in content)


def tensor_layouts(value: Any) -> list[tuple[torch.dtype, list[int]]]:
    """Return dtype and shape of each tensor of an encoded value, in order."""
    if isinstance(value, list):
        return [layout for item in value for layout in tensor_layouts(item)]
    if not isinstance(value, dict):
        return []
    [(kind, content)] = value.items()
    return [(getattr(torch, content[0]), content[1])] if kind == "tensor" else tensor_layouts(content)


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
