"""Full gradients and weights for optimizers that need them (Muon, Adafactor), a parameter on one rank each.

[Note: full tensors]
ZeRO's ranges ignore the borders of matrices, and tensor parallelism shards matrices along their dims. An
optimizer that needs a full matrix gets it on one rank, its owner, among the ranks that together hold one copy
of the stage (shard x ep x cp x row x col). Only the owner keeps the states of the matrix. An update is

  1. all-to-all    every rank sends what it holds of gradients and weights to the owners
  2. step          each owner steps torch's optimizer with its matrices as parameters
  3. all-to-all    every owner sends each rank its part of the new weights, to be written into `master`

The rest of the step is that of any optimizer: masters are rounded, and all-gathered by stages 1 and 2. So
storages, reductions, norms, clipping and checkpoints of weights do not depend on owners. A matrix that one
rank holds alone (zero=0 without tp) is stepped in place.

[Note: bytes of full tensors]
Gradients of P parameters have been reduce-scattered over N ranks when the update begins, so a rank sends only
its range: twice (N-1)/N of P/N elements, and as an owner half as many back. A step of stage 1 or 2 sends
2 P (N-1)/N elements; this adds 1.5/N of that: 37 % for 4 ranks, 2 % for 64. Rejected alternatives:

  ranges that follow matrices   no bytes more, but ranges of a unit are equal, so that collectives need no
                                copies: a block of seven matrices would be padded to N times its largest one
  all-gathered gradients        N times the bytes, and every rank computes every update
  masters on owners only        a third less, but all that reads masters would have two cases

[Note: matrices of experts]
A class that takes no stacks of matrices (torch's Muon) gets each expert's matrix as a parameter of its own.
States are saved as one tensor, each matrix by its owner. Under ep an owner is one of the ranks that have the
expert. A fused gate and up projection is one matrix, as the model has it.

[Note: balance of owners]
Owners are assigned once, for all stages of a rank: in order of decreasing cost, each tensor to the rank with
the least cost so far. The cost is that of the product of a matrix and its transpose, for Muon.

[Note: equal copies]
Replicas, and stages that share a tied parameter, each update their own copy: from the same gradient, by the
same operations on tensors of the same shape, so that their bits stay equal.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm import all_to_all_list
from plait.errors import ConfigError
from plait.optim.update_kinds import GroupOptimizer, UpdateScope
from plait.parallel.zero.flat_param import FlatParam
from plait.parallel.zero.rank_context import RankContext
from plait.parallel.zero.shard_map import ShardMap
from plait.parallel.zero.state_io import boxes_of, view_of
from plait.plan import Box, Boxes, UnitLayout
from plait.plan.axes import EXPERTS, PARTS, STAGES, Roles, UnitKind
from plait.plan.layout import ParamShard


@dataclass(frozen=True)
class FullTensor:
    """A parameter of an optimizer group that needs full tensors, or a matrix of it.

    shape     of what the optimizer steps
    expert    (index in dim 0, size of dim 0) of a matrix: see [Note: matrices of experts]
    unit      (stage, index) of its unit
    owner     index of its owner among the ranks that hold the stage
    counted   whether this stage's copy is saved
    """

    name: str
    shape: tuple[int, ...]
    group: int
    unit: tuple[int, int]
    owner: int
    counted: bool
    expert: tuple[int, int] | None = None

    def state(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], Boxes]:
        """The shape of a saved state, and the boxes of it that the owner has, in `shape`."""
        if self.expert is None:
            return shape, Boxes.full(shape)
        index, number = self.expert
        return (number, *shape), Boxes((((index, index + 1),), *Boxes.full(shape).ranges))

    def place(self, shard: ParamShard) -> tuple[Boxes, int] | None:
        """The boxes of a shard that are of this tensor, as boxes of it, and their start in the storage."""
        if self.expert is None:
            return shard.boxes, shard.start
        first, inner = shard.boxes.ranges[0], Boxes(shard.boxes.ranges[1:])
        held = [index for low, high in first for index in range(low, high)]
        if self.expert[0] not in held:
            return None
        return inner, shard.start + held.index(self.expert[0]) * inner.numel

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class _HeldPart:
    """Elements [start, stop) of boxes of a full tensor, at offset `at` of a rank's range of the unit."""

    boxes: Boxes
    start: int
    stop: int
    at: int
    is_first: bool  # whether no rank before this one holds the same boxes

    @property
    def numel(self) -> int:
        return self.stop - self.start

    def slice_of(self, flat: Tensor) -> Tensor:
        return flat[self.at : self.at + self.numel]


def assign_owners(
    costs: Sequence[float], num_ranks: int, allowed: Sequence[Sequence[int]] | None = None
) -> list[int]:
    """Return the rank of each cost: the largest first, each to the rank with the least so far, of those that
    are `allowed` for it."""
    loads, owners = [0.0] * num_ranks, [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        owners[index] = min(allowed[index] if allowed else range(num_ranks), key=loads.__getitem__)
        loads[owners[index]] += costs[index]
    return owners


def parameter_states(
    optimizer: GroupOptimizer, name: str, shape: tuple[int, ...]
) -> dict[str, tuple[int, ...]]:
    """The states of a parameter, by kind, as they are saved. Raises ConfigError if the class cannot train
    it."""
    if not is_by_matrix(optimizer, name, shape):
        return optimizer.state_shapes(shape)
    states = optimizer.state_shapes(shape[1:])
    return {kind: of if "." in kind else (shape[0], *of) for kind, of in states.items()}


def is_by_matrix(optimizer: GroupOptimizer, name: str, shape: tuple[int, ...]) -> bool:
    """Return whether the class gets the matrices of experts: see [Note: matrices of experts]."""
    if len(shape) != 3 or not name.rpartition(".")[0].endswith("experts"):
        return False
    try:
        optimizer.state_shapes(shape)
    except ConfigError:
        return True
    return False


def full_tensors(
    shard_map: ShardMap, pp_rank: int, owners: Sequence[int], groups: Sequence[GroupOptimizer]
) -> list[FullTensor]:
    """The parameters whose optimizers need full tensors, of a pipeline rank's stages. `owners`: of the ranks
    that hold a copy of these, the index along EXPERTS."""
    found: list[FullTensor] = []
    allowed: list[Sequence[int]] = []
    num_parts = shard_map.copies * shard_map.grid_size
    ranks = range(pp_rank * num_parts, (pp_rank + 1) * num_parts)
    for stage, index, by_rank in shard_map.units():
        units = [by_rank[rank] for rank in ranks if rank in by_rank]
        for name in [shard.name for shard in units[0].params] if units else ():
            copies = [(unit, shard) for unit in units for shard in unit.params if shard.name == name]
            unit, shard = max(copies, key=lambda each: each[1].boxes.numel)  # of a list, ranks have some
            group = unit.group_of(shard)
            if group is None or not _needs_tensor(groups, group):
                continue
            shape, counted = shard.full_shape, any(copy.counted for _, copy in copies)
            fields: dict[str, Any] = {
                "name": shard.name,
                "group": group,
                "unit": (stage, index),
                "counted": counted,
            }
            if not is_by_matrix(groups[group], shard.name, shape):
                found.append(FullTensor(shape=shape, owner=0, **fields))
                allowed.append(range(len(owners)))
                continue
            for number in range(shape[0]):
                tensor = FullTensor(shape=shape[1:], owner=0, expert=(number, shape[0]), **fields)
                has_it = number * shard_map.copies // shape[0] if units[0].kind is UnitKind.EXPERT else None
                found.append(tensor)
                allowed.append([rank for rank, at in enumerate(owners) if has_it in (None, at)])
    costs = [_cost(tensor.shape) for tensor in found]
    chosen = assign_owners(costs, len(owners), allowed)
    return [replace(tensor, owner=owner) for tensor, owner in zip(found, chosen, strict=True)]


def _cost(shape: tuple[int, ...]) -> float:
    """FLOPs of a matrix times its transpose, halved; of a vector, its length."""
    return float(math.prod(shape) * (min(shape[-2:]) if len(shape) > 1 else 1))


def full_tensor_bytes(
    groups: Sequence[GroupOptimizer],
    tensors: Iterable[FullTensor],
    ranges: Iterable[tuple[UnitLayout, int]],
    rank: int,
    num_owners: int,
    itemsize: int,
) -> tuple[int, int]:
    """Bytes of the states of the tensors that a rank owns, and of gradients, weights and messages while they
    are updated. `ranges`: of the rank's units, the layout and which range it owns; `itemsize`: of its master
    weights."""
    owned = [tensor for tensor in tensors if tensor.owner == rank]
    shapes = [groups[tensor.group].state_shapes(tensor.shape).items() for tensor in owned]
    states = sum(math.prod(dims) for of in shapes for kind, dims in of if "." not in kind)
    held = 0
    if num_owners == 1:  # stepped in place
        return itemsize * states, 0
    for layout, own in ranges:
        parts = layout.overlaps(*layout.owned_range(own))
        held += sum(p.stop - p.start for p in parts if _needs_tensor(groups, layout.group_of(p.shard)))
    return itemsize * states, itemsize * (held + 3 * sum(tensor.numel for tensor in owned))


def _needs_tensor(groups: Sequence[GroupOptimizer], group: int | None) -> bool:
    return group is not None and groups[group].scope is UpdateScope.TENSORS


class FullTensorUpdate:
    """The full tensors that this rank owns, and their update. See [Note: full tensors]."""

    def __init__(
        self,
        units: Mapping[int, Sequence[FlatParam]],
        context: RankContext,
        shard_map: ShardMap,
        groups: Sequence[GroupOptimizer],
    ) -> None:
        """`units`: by stage."""
        self._units, self._shard_map, self._context = units, shard_map, context
        mesh, self._roles = context.mesh, Roles.from_plan(context.plan)
        holders = mesh.grid.group(mesh.world.rank, *self._roles.stage_copy)
        owners = [mesh.grid.index(rank, *EXPERTS) for rank in holders]
        all_tensors = full_tensors(shard_map, mesh.coord[STAGES], owners, groups)
        self.owned: list[FullTensor] = []
        self.leaves: list[Tensor] = []  # the optimizer's parameters, of `owned`
        self.is_empty, self.bytes = not all_tensors, (0, 0)
        if self.is_empty:
            return
        self._group = mesh.group(*self._roles.stage_copy, channel="full tensors")
        own = self._group.rank
        of_rank = [unit for of_stage in units.values() for unit in of_stage]
        ranges = [(unit.layout, unit.groups.all_gather.rank) for unit in of_rank]
        itemsize = context.precision.master.itemsize
        self.bytes = full_tensor_bytes(groups, all_tensors, ranges, own, len(owners), itemsize)
        self.owned = [tensor for tensor in all_tensors if tensor.owner == own]
        dtype, device = context.precision.master, context.device
        nothing = torch.zeros((), dtype=dtype, device=device)
        # Between updates the optimizer's parameters have a shape, but no memory.
        self._placeholders = [nothing.expand(tensor.shape) for tensor in self.owned]
        self.leaves = [nn.Parameter(placeholder.detach()) for placeholder in self._placeholders]
        # A class may read attributes that a script has set on parameters.
        for leaf, tensor in zip(self.leaves, self.owned, strict=True):
            given = vars(self._unit(tensor).parameters[tensor.name])
            vars(leaf).update({key: value for key, value in given.items() if not key.startswith("_plait")})
        # Parts that this rank holds, by the owner; parts of what it owns (index in `owned`), by the holder.
        parts = [(tensor, self._parts(tensor)) for tensor in all_tensors]
        ranks = range(self._group.size)
        self._held = [
            [(self._unit(tensor), part) for tensor, by_rank in parts if tensor.owner == rank
             if (part := by_rank[own]) is not None]
            for rank in ranks
        ]  # fmt: skip
        of_owned = [by_rank for tensor, by_rank in parts if tensor.owner == own]
        self._received = [
            [(index, part) for index, by_rank in enumerate(of_owned) if (part := by_rank[rank]) is not None]
            for rank in ranks
        ]
        if self._group.size == 1:
            self._step_in_place()

    def _step_in_place(self) -> None:
        """Make the leaves views of masters and their gradients."""
        for leaf, tensor, (unit, part) in zip(self.leaves, self.owned, self._held[0], strict=True):
            leaf.data = part.slice_of(unit.master).view(tensor.shape)
            leaf.grad = part.slice_of(unit.grad_shard).view(tensor.shape)

    def _unit(self, tensor: FullTensor) -> FlatParam:
        stage, index = tensor.unit
        return self._units[stage][index]

    def _parts(self, tensor: FullTensor) -> list[_HeldPart | None]:
        """The part of a tensor that each rank of the group holds, if any."""
        stage, index = tensor.unit
        grid, kind = self._context.mesh.grid, self._unit(tensor).layout.kind
        states = self._roles.states(kind)
        copies = [axis for axis in self._roles.stage_copy if axis not in states]
        first_with: dict[Boxes, int] = {}
        held: list[tuple[Boxes, int, int, int, int] | None] = []
        for rank in self._group.ranks:
            layout = self._shard_map.layouts[grid.index(rank, *PARTS)][stage].units[index]
            shard = next(each for each in layout.params if each.name == tensor.name)
            if (place := tensor.place(shard)) is None:
                held.append(None)
                continue
            copy = grid.index(rank, *copies)
            first_with[place[0]] = min(copy, first_with.get(place[0], copy))
            held.append((*place, copy, *layout.owned_range(grid.index(rank, *states))))
        parts: list[_HeldPart | None] = []
        for each in held:
            part = None
            if each is not None:
                boxes, first, copy, low, high = each
                start, stop = max(first, low), min(first + boxes.numel, high)
                if start < stop:
                    is_first = copy == first_with[boxes]
                    part = _HeldPart(boxes, start - first, stop - first, start - low, is_first)
            parts.append(part)
        return parts

    def step(self, factor: float, update: Callable[[Sequence[Tensor]], object]) -> None:
        """Update the masters' full tensors. `update` steps the leaves. Gradients are multiplied by `factor`,
        in place."""
        if self.is_empty:
            return
        own_gradients = [part.slice_of(unit.grad_shard) for held in self._held for unit, part in held]
        if own_gradients and factor != 1.0:
            torch._foreach_mul_(own_gradients, factor)
        if self._group.size == 1:
            update(self.leaves)
            return
        self._context.tracker.add(self.bytes[1])
        try:
            gradients = self._gather(lambda unit: unit.grad_shard)
            weights = self._gather(lambda unit: unit.master)
            for leaf, weight, gradient in zip(self.leaves, weights, gradients, strict=True):
                leaf.data, leaf.grad = weight, gradient
            update(self.leaves)
            self._scatter(weights)
        finally:
            for leaf, placeholder in zip(self.leaves, self._placeholders, strict=True):
                leaf.grad, leaf.data = None, placeholder
            self._context.tracker.subtract(self.bytes[1])

    def _gather(self, flat_of: Callable[[FlatParam], Tensor]) -> list[Tensor]:
        """The owned tensors, from every rank's ranges."""
        dtype, device = self._context.precision.master, self._context.device
        sent = [
            _joined([part.slice_of(flat_of(unit)) for unit, part in held if part.is_first], dtype, device)
            for held in self._held
        ]
        used = [[(index, part) for index, part in parts if part.is_first] for parts in self._received]
        received = [
            torch.empty(sum(part.numel for _, part in parts), dtype=dtype, device=device) for parts in used
        ]
        all_to_all_list(received, sent, self._group, label="full tensors")
        full = [torch.empty(tensor.shape, dtype=dtype, device=device) for tensor in self.owned]
        for index, box, values in self._boxes(received, used):
            view_of(full[index], box).copy_(values)
        return full

    def _scatter(self, full: Sequence[Tensor]) -> None:
        """Write the owned tensors into the masters of every rank that holds a part."""
        dtype, device = self._context.precision.master, self._context.device
        sent = [
            torch.empty(sum(part.numel for _, part in parts), dtype=dtype, device=device)
            for parts in self._received
        ]
        for index, box, values in self._boxes(sent, self._received):
            values.copy_(view_of(full[index], box))
        received = [
            torch.empty(sum(part.numel for _, part in held), dtype=dtype, device=device)
            for held in self._held
        ]
        all_to_all_list(received, sent, self._group, label="updated full tensors")
        for flat, held in zip(received, self._held, strict=True):
            values = flat.split([part.numel for _, part in held])
            for (unit, part), new in zip(held, values, strict=True):
                part.slice_of(unit.master).copy_(new)

    @staticmethod
    def _boxes(
        flats: Sequence[Tensor], parts: Sequence[Sequence[tuple[int, _HeldPart]]]
    ) -> Iterator[tuple[int, Box, Tensor]]:
        """Yield the boxes of flat messages: the index of the owned tensor, the box, and the view of the
        message in its shape."""
        for flat, of_rank in zip(flats, parts, strict=True):
            values = flat.split([part.numel for _, part in of_rank])
            for (index, part), own in zip(of_rank, values, strict=True):
                for box, view in boxes_of(own, part.boxes, part.start):
                    yield index, box, view


def _joined(flats: list[Tensor], dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.cat(flats) if flats else torch.empty(0, dtype=dtype, device=device)
