"""The order in which a pass gathers units, and which weights a model reads outside their modules.

[Note: one order of gathers]
As with reductions, ranks must start gathers in one order, though a branch may skip a unit on some of
them. A pass (forward or backward) walks a fixed list of uses. A use further down the list walks over all
before it, gathering and freeing what this rank skipped; the end of the pass walks to the end. Which uses
need a gather follows from the list alone, not from what happens to be whole on a rank. The list is the
layout's order at first. The first step records the uses that really happen; all ranks then take the first
rank's record, with the units that only others used put in at their place in the layout. A use that is not
in the list is gathered on demand: then every rank has to do it, and a digest tells at the step's end
whether all did.
"""

from collections.abc import Callable, Collection, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from plait.comm import Group, all_reduce, broadcast
from plait.parallel.zero.flat_param import FlatParam

# A block's parameters that train and its frozen ones: gathered together, freed each when it can be.
ParamGroup = tuple[FlatParam, ...]


def agreed_order(mine: Sequence[ParamGroup], layout: Sequence[ParamGroup], group: Group) -> list[ParamGroup]:
    """The first rank's order of uses, completed by what others used. See [Note: one order of gathers]."""
    device = layout[0][0].cut.device
    used = any_rank([bundle in mine for bundle in layout], group, device)
    length = torch.tensor([len(mine)], device=device)
    broadcast(length, group)
    numbers = torch.zeros(int(length.item()), dtype=torch.long, device=device)
    if group.rank == 0:
        numbers.copy_(torch.tensor([layout.index(bundle) for bundle in mine], dtype=torch.long))
    broadcast(numbers, group)
    order: list[int] = numbers.tolist()
    for number, was_used in enumerate(used):
        if was_used and number not in order:
            place = next((i for i, other in enumerate(order) if other > number), len(order))
            order.insert(place, number)
    return [layout[number] for number in order]


def any_rank(flags: Sequence[bool], group: Group, device: torch.device) -> list[bool]:
    """True where it is true on any rank of the group."""
    votes = torch.tensor([float(flag) for flag in flags], device=device)
    all_reduce(votes, group, "max")
    return [bool(vote) for vote in votes.tolist()]


class ForwardWatch(TorchFunctionMode):
    """Calls `found` with the bundle of every parameter that a torch function is given."""

    def __init__(self, bundles: Collection[ParamGroup], found: Callable[[ParamGroup], None]) -> None:
        super().__init__()
        self._of = {id(p): b for b in bundles for unit in b for p in unit.parameters.values()}
        self._found = found

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
                    if isinstance(item, nn.Parameter) and id(item) in self._of:
                        self._found(self._of[id(item)])
        return func(*args, **(kwargs or {}))


_READ_NO_VALUES = {
    *("__get__", "__set__", "size", "dim", "numel", "stride", "is_floating_point", "element_size", "__len__"),
    *("untyped_storage", "data_ptr", "register_hook", "requires_grad_", "__hash__", "__format__", "__repr__"),
}


def encloses(module: nn.Module, root: nn.Module, owners: Set[nn.Module]) -> bool:
    """Whether it is the root, or other owners work while it does."""
    return module is root or any(m in owners for m in module.modules() if m is not module)


def reads_no_weight_in_backward(module: nn.Module) -> bool:
    """Whether the gradient of the module's weight needs no weight."""
    return type(module) is nn.Embedding


def tensors_in(output: Any) -> tuple[list[Tensor], bool]:
    """The tensors with a gradient in what a module returned, and whether there can be no others: an object of
    an unknown class may hide some."""
    leaves = [output] if isinstance(output, Tensor) else torch.utils._pytree.tree_leaves(output)
    known = (Tensor, str, bytes, int, float, bool, type(None))
    found = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    return found, all(isinstance(leaf, known) for leaf in leaves)
