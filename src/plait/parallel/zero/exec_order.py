"""Execution order of a pass, agreed between ranks, and detection of parameters used outside their modules.

[Note: all-gather order]
As with reductions, ranks must start all-gathers in one order, although a branch may skip a unit on some of
them. A pass (forward or backward) walks a fixed list of uses. A use further down the list walks over all uses
before it, unsharding and resharding those that this rank skipped; the end of the pass walks to the end of the
list. The list alone decides which uses need an all-gather, not what happens to be unsharded on a rank. At
first the list is the layout's order. The first step records the actual uses; then all ranks adopt the first
rank's record, with units that only other ranks used inserted at their position in the layout. A use that is
not in the list is unsharded on demand. Then every rank has to do so, which a digest checks at the end of the
step.
"""

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from plait.comm import Group, all_reduce, broadcast
from plait.parallel.zero.flat_param import FlatParam

# A block's trainable and its frozen unit: unsharded together, each resharded when its own uses are over.
UnitGroup = tuple[FlatParam, ...]


def agreed_order(recorded: Sequence[UnitGroup], layout: Sequence[UnitGroup], group: Group) -> list[UnitGroup]:
    """Rank 0's order of uses, with those that only other ranks recorded. See [Note: all-gather order]."""
    device = layout[0][0].context.device
    used = any_rank([unit_group in recorded for unit_group in layout], group, device)
    length = torch.tensor([len(recorded)], device=device)
    broadcast(length, group)
    indices = torch.zeros(int(length.item()), dtype=torch.long, device=device)
    if group.rank == 0:
        indices.copy_(torch.tensor([layout.index(each) for each in recorded], dtype=torch.long))
    broadcast(indices, group)
    order: list[int] = indices.tolist()
    for index, was_used in enumerate(used):
        if was_used and index not in order:
            position = next((i for i, other in enumerate(order) if other > index), len(order))
            order.insert(position, index)
    return [layout[index] for index in order]


def any_rank(flags: Sequence[bool], group: Group, device: torch.device) -> list[bool]:
    """Reduce flags with a logical or over the group."""
    votes = torch.tensor([float(flag) for flag in flags], device=device)
    all_reduce(votes, group, "max")
    return [bool(vote) for vote in votes.tolist()]


class ForwardWatch(TorchFunctionMode):
    """Calls `on_use` with the unit group of every parameter passed to a torch function."""

    def __init__(self, unit_groups: Collection[UnitGroup], on_use: Callable[[UnitGroup], None]) -> None:
        super().__init__()
        self._group_of = {id(p): g for g in unit_groups for unit in g for p in unit.parameters.values()}
        self._on_use = on_use

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "__name__", "") not in _READ_NO_VALUES:
            for value in (*args, *(kwargs or {}).values()):
                for item in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(item, nn.Parameter) and id(item) in self._group_of:
                        self._on_use(self._group_of[id(item)])
        return func(*args, **(kwargs or {}))


_READ_NO_VALUES = {
    *("__get__", "__set__", "size", "dim", "numel", "stride", "is_floating_point", "element_size", "__len__"),
    *("untyped_storage", "data_ptr", "register_hook", "requires_grad_", "__hash__", "__format__", "__repr__"),
}


def encloses(module: nn.Module, root: nn.Module, owners: Set[nn.Module]) -> bool:
    """True if the module is the root or contains other owners."""
    return module is root or any(m in owners for m in module.modules() if m is not module)


def reads_no_weight_in_backward(module: nn.Module) -> bool:
    """True if the gradient of the module's weight does not depend on the weight."""
    return module.__class__ is nn.Embedding


def tensors_in(output: Any) -> tuple[list[Tensor], bool]:
    """The tensors that require grad in a module's output, and whether these are all: an object of an unknown
    class may contain more."""
    leaves = [output] if isinstance(output, Tensor) else torch.utils._pytree.tree_leaves(output)
    known = (Tensor, str, bytes, int, float, bool, type(None))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    return tensors, all(isinstance(leaf, known) for leaf in leaves)
