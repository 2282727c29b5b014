"""The optimizer over this rank's shards: ranges of the units' master weights, by optimizer group."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from plait.comm import all_reduce
from plait.errors import ConfigError
from plait.optim.disk_tensors import MappedFile, mapped_bytes
from plait.optim.flat_optimizer import FlatSlice, join_groups
from plait.optim.stepper import ChunkedOptimizer
from plait.optim.update_kinds import GroupOptimizer, UpdateScope, not_elementwise
from plait.parallel.zero.flat_param import FlatParam
from plait.parallel.zero.full_tensors import FullTensorUpdate, parameter_states
from plait.parallel.zero.rank_context import Precision, RankContext
from plait.parallel.zero.shard_map import ShardMap
from plait.plan import Layout, Plan
from plait.plan.axes import Roles
from plait.plan.layout import ParamShard
from plait.plan.memory import CHUNK


@dataclass(frozen=True)
class OptimizerSlice:
    """Elements [start, stop) of the range that this rank owns of a unit."""

    group: int
    start: int
    stop: int
    leaf: Tensor  # the optimizer's parameter


class MasterWeights:
    """Allocates master weights: on the plan's device, in host memory, or in a file."""

    def __init__(self, plan: Plan, layout: Layout, device: torch.device, folder: Path | None) -> None:
        """Raises ConfigError if the plan offloads to a folder that is missing or unusable."""
        self._dtype = Precision.from_plan(plan).master
        self._device = torch.device("cpu") if plan.offload != "none" else device
        self._pins = plan.offload != "none" and device.type == "cuda"
        self.file: MappedFile | None = None
        if (plan.offload == "disk") != (folder is not None):
            raise ConfigError(
                "offload=disk and a folder to offload to belong together",
                given=f"offload={plan.offload}, folder {folder or 'not given'}",
                expected="both or neither",
                hint="parallelize(..., offload_dir=...), in a recipe run.offload_dir",
            )
        if folder is not None and Precision.from_plan(plan).compute != self._dtype:
            ranges = [unit.range_numel for unit in layout.units if unit.trains]
            self.file = MappedFile(folder, sum(mapped_bytes(numel, self._dtype) for numel in ranges))

    def allocate(self, numel: int) -> Tensor:
        """Return zeros for the master weights of a range."""
        if self.file is not None:
            return self.file.allocate(numel, self._dtype)
        return torch.zeros(numel, dtype=self._dtype, device=self._device, pin_memory=self._pins)

    @property
    def are_in_file(self) -> bool:
        return self.file is not None

    def evict(self, master: Tensor) -> None:
        """Drop a range's pages from memory if they are in a file."""
        if self.file is not None and master.numel():
            self.file.evict(master)


class ShardedOptimizer:
    """The shards that this rank updates, their optimizer and its states."""

    def __init__(
        self,
        units: Mapping[int, Sequence[FlatParam]],
        context: RankContext,
        shard_map: ShardMap,
        plan: Plan,
        groups: Sequence[GroupOptimizer],
        masters: MasterWeights,
        folder: Path | None,
    ) -> None:
        """`units`: by stage; `folder`: of the states' files; None: in memory. Raises ConfigError for an
        optimizer that cannot train under the plan, or not all parameters of its group."""
        self.is_on_disk = folder is not None
        state_dtype: Literal["fp32", "bf16"] = "bf16" if plan.optim_dtype == "bf16" else "fp32"
        streams = state_dtype == "bf16" or folder is not None
        check_groups(groups, plan)
        self._groups = groups
        self._check_parameters(shard_map)
        own = [unit for of_stage in units.values() for unit in of_stage if unit.trains]
        self.slices = {unit: _slices(unit, groups, streams=streams) for unit in own}
        self.full = FullTensorUpdate(units, context, shard_map, groups)
        flat = [(unit, part) for unit, parts in self.slices.items() for part in parts]
        leaves = [FlatSlice(part.group, part.leaf) for _, part in flat]
        leaves += [
            FlatSlice(each.group, leaf) for each, leaf in zip(self.full.owned, self.full.leaves, strict=True)
        ]
        self.optimizer = join_groups(groups, leaves)
        self._communicates = any(group.scope is UpdateScope.NORMS for group in groups)
        if self._communicates:
            sums = SumsOverShards(self.slices, context)
            for optimizer in getattr(self.optimizer, "by_name", {"": self.optimizer}).values():
                if hasattr(optimizer, "sum_over_shards"):
                    optimizer.sum_over_shards = sums.reduce
        self.kinds = {
            kind
            for group in groups
            if group.scope is not UpdateScope.TENSORS
            for kind in group.state_shapes((1,))
        }
        self._masters = masters
        self.has_states = False  # equal on all ranks, also if one owns padding only, or nothing trains
        self.chunked = ChunkedOptimizer(
            self.optimizer,
            self.kinds,
            states=state_dtype,
            folder=folder,
            masters=masters.file,
            positions={part.leaf: unit.start + part.start for unit, part in flat}
            | dict.fromkeys(self.full.leaves, 0),
            targets={part.leaf: unit.shard[part.start : part.stop] for unit, part in flat}
            if masters.are_in_file
            else None,
        )

    def _check_parameters(self, shard_map: ShardMap) -> None:
        """Raise ConfigError for a parameter that the optimizer of its group cannot train."""
        for shard, group in shard_map.params():
            if group is None:
                continue
            try:
                self.parameter_states(shard, group)
            except ConfigError as error:
                raise ConfigError(
                    f"{self._groups[group].name} cannot train a parameter of its group",
                    given=f"{shard.name} of shape {shard.full_shape}: {error.given}",
                    expected="parameters that the class supports",
                    hint="another optimizer for the others: param_groups=[{'params': matrices, 'optimizer': "
                    "torch.optim.Muon}, {'params': others}]",
                ) from error

    def state_shapes(self, shape: tuple[int, ...], group: int) -> dict[str, tuple[int, ...]]:
        """Shapes of a parameter's states, by kind; () for counters."""
        return self._groups[group].state_shapes(shape)

    def parameter_states(self, shard: ParamShard, group: int) -> dict[str, tuple[int, ...]]:
        """Shapes of a full parameter's states, as they are saved."""
        return parameter_states(self._groups[group], shard.name, shard.full_shape)

    @property
    def memory_facts(self) -> dict[str, Any]:
        """Arguments of `estimated_bytes`."""
        return {
            "states_per_element": states_per_element(self._groups),
            "coded_groups": coded_groups(self._groups),
            "full_tensor_bytes": self.full.bytes,
        }

    @property
    def disk_bytes(self) -> int:
        """Bytes of states and master weights in files."""
        return self.chunked.disk_bytes + (self._masters.file.num_bytes if self._masters.file else 0)

    def step(self, units: Iterable[FlatParam], factor: float, number: int) -> None:
        """Run the optimizer's step `number` on these units, with gradients multiplied by `factor`; `finish`
        ends it. If master weights are in a file, updated ones are rounded into the units' shards."""
        leaves = [part.leaf for unit in units for part in self.slices[unit]]
        if leaves or self._communicates:  # a class that counts its calls counts no empty ones
            self.chunked.step(leaves, factor, number, finish=False)

    def step_full(self, factor: float, number: int) -> None:
        """Run the step on full tensors, of all units. Collective over the ranks of the stage."""
        self.full.step(factor, lambda leaves: self.chunked.step(leaves, 1.0, number))

    def finish(self) -> None:
        """Wait until the step's results are in their files. Raises RunError."""
        self.chunked.finish()


class SumsOverShards:
    """Adds up numbers of a parameter over its shards on the ranks that hold a copy of the stage."""

    def __init__(self, slices: Mapping[FlatParam, Sequence[OptimizerSlice]], context: RankContext) -> None:
        self._group = context.mesh.group(*Roles.from_plan(context.plan).stage_copy, channel="norms")
        self._device = context.device
        self._index_of: dict[Tensor, int] = {}  # by leaf, of its parameter
        self._copies: dict[Tensor, float] = {}  # ranks that hold the same elements; inf: another one counts
        self._num_parameters = 0
        for unit, parts in slices.items():
            # Not in the order of the storage, which depends on how many ranks hold a shard.
            names = sorted(shard.name for shard in unit.layout.params)
            for part in parts:
                overlaps = unit.overlaps(part.start, part.stop)
                if len(overlaps) == 1:
                    shard = overlaps[0].shard
                    self._index_of[part.leaf] = self._num_parameters + names.index(shard.name)
                    self._copies[part.leaf] = shard.copies if unit.groups.counts else math.inf
            self._num_parameters += len(names)

    def reduce(self, shards: Sequence[Tensor], sums: Tensor) -> Tensor:
        """See `LAMB.sum_over_shards`. Ranks that hold a copy of a shard contribute equal parts."""
        totals = torch.zeros(self._num_parameters, sums.shape[1], dtype=sums.dtype, device=self._device)
        indices = totals.new_tensor([self._index_of[shard] for shard in shards], dtype=torch.long)
        copies = totals.new_tensor([self._copies[shard] for shard in shards])
        totals.index_add_(0, indices, sums.to(self._device) / copies[:, None])
        all_reduce(totals, self._group, label="norms of parameters")
        return totals[indices].to(sums.device)


def states_per_element(groups: Sequence[GroupOptimizer]) -> list[int]:
    """By group, the number of states as large as a rank's range of parameters; 0 for full tensors."""
    return [
        0 if group.scope is UpdateScope.TENSORS else sum("." not in kind for kind in group.state_shapes((1,)))
        for group in groups
    ]


def coded_groups(groups: Sequence[GroupOptimizer]) -> frozenset[int]:
    """The groups whose states are stored in 8-bit codes."""
    return frozenset(index for index, group in enumerate(groups) if group.scope is UpdateScope.BLOCKS)


def check_groups(groups: Sequence[GroupOptimizer], plan: Plan) -> None:
    """Raise ConfigError for optimizers that do not work with an option of the plan."""
    for group in groups:
        needs_sums = group.scope in (UpdateScope.NORMS, UpdateScope.TENSORS)
        needs_tensors = group.scope is UpdateScope.TENSORS
        if (plan.offload == "disk" and needs_sums) or (plan.offload == "cpu" and needs_tensors):
            raise not_elementwise(group, f"offload={plan.offload}")
        if plan.optim_dtype == "bf16" and group.scope is not UpdateScope.ELEMENTS:
            raise not_elementwise(group, "optim_dtype=bf16")
    scopes = {group.scope: group.name for group in groups}
    if {UpdateScope.BLOCKS, UpdateScope.NORMS} <= scopes.keys():
        raise ConfigError(
            f"{scopes[UpdateScope.BLOCKS]} does not work with {scopes[UpdateScope.NORMS]} in one engine",
            given="groups of both: one steps range by range, the other adds up norms once per step",
            expected="one of them in all groups, or each with element-wise optimizers",
            hint="AdamW in place of one of them",
        )
    if plan.offload == "disk" and len({group.optimizer_class for group in groups}) > 1:
        raise ConfigError(
            "offload=disk works with one optimizer",
            given=", ".join(dict.fromkeys(group.name for group in groups)),
            expected="groups that differ in options only",
            hint="offload=cpu",
        )


def _slices(unit: FlatParam, groups: Sequence[GroupOptimizer], *, streams: bool) -> list[OptimizerSlice]:
    """This rank's ranges of the unit's optimizer groups, except those that need full tensors. Streamed states
    are in slices: on a CPU they stay in cache, a GPU pays for each launch (and for codes it needs temporary
    memory of 10 bytes per element). Slices end at multiples of a size of complete pages, so that blocks of a
    file share none."""
    slices = []
    for group, low, high in _ranges(unit, groups):
        is_coded = groups[group].scope is UpdateScope.BLOCKS
        on_gpu = CHUNK * (16 if is_coded else 64)
        max_numel = (on_gpu if unit.master.is_cuda else CHUNK) if streams or is_coded else None
        ends = range((low // max_numel + 1) * max_numel, high, max_numel) if max_numel else ()
        for start, stop in pairwise([low, *ends, high]):
            flat = FlatSlice.from_views(group, unit.master[start:stop], unit.grad_shard[start:stop])
            slices.append(OptimizerSlice(group, start, stop, flat.leaf))
    return slices


def _ranges(unit: FlatParam, groups: Sequence[GroupOptimizer]) -> Iterator[tuple[int, int, int]]:
    """(group, start, stop) of the ranges that this rank owns; of one parameter each, if norms are needed."""
    for group, start, stop in unit.layout.owned_groups(unit.groups.all_gather.rank):
        if groups[group].scope in (UpdateScope.ELEMENTS, UpdateScope.BLOCKS):
            yield group, start, stop
        elif groups[group].scope is UpdateScope.NORMS:
            for overlap in unit.overlaps(start, stop):
                yield group, start + overlap.place.start, start + overlap.place.stop
