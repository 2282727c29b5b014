"""The optimizer over this rank's shards: ranges of the units' master weights, by optimizer group."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from plait.errors import ConfigError
from plait.optim.flat import FlatSlice, make_optimizer, state_kinds
from plait.optim.mapped import MappedFile, mapped_bytes
from plait.optim.stepper import ChunkedOptimizer
from plait.parallel.zero.flat_param import FlatParam
from plait.parallel.zero.rank_context import Precision
from plait.plan import Layout, Plan
from plait.plan.estimate.memory import CHUNK


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
        units: Sequence[FlatParam],
        plan: Plan,
        optimizer_class: type[torch.optim.Optimizer],
        arguments: Mapping[str, Any],
        groups: Sequence[Mapping[str, Any]],
        masters: MasterWeights,
        folder: Path | None,
    ) -> None:
        """`folder`: of the states' files; None: in memory."""
        self.is_on_disk = folder is not None
        state_dtype: Literal["fp32", "bf16"] = "bf16" if plan.optim_dtype == "bf16" else "fp32"
        streams = state_dtype == "bf16" or folder is not None
        self.slices = {unit: _slices(unit, streams=streams) for unit in units}
        self.kinds = state_kinds(optimizer_class, arguments)
        flat = [(unit, part) for unit, parts in self.slices.items() for part in parts]
        self.optimizer = make_optimizer(
            optimizer_class, arguments, [FlatSlice(part.group, part.leaf) for _, part in flat], groups
        )
        self._masters = masters
        self.has_states = False  # equal on all ranks, also if one owns padding only, or nothing trains
        self.chunked = ChunkedOptimizer(
            self.optimizer,
            self.kinds,
            states=state_dtype,
            folder=folder,
            masters=masters.file,
            positions={part.leaf: unit.start + part.start for unit, part in flat},
            targets={part.leaf: unit.shard[part.start : part.stop] for unit, part in flat}
            if masters.are_in_file
            else None,
        )

    @property
    def states_per_element(self) -> int:
        return sum("." not in kind for kind in self.kinds)

    @property
    def disk_bytes(self) -> int:
        """Bytes of states and master weights in files."""
        return self.chunked.disk_bytes + (self._masters.file.num_bytes if self._masters.file else 0)

    def step(self, units: Iterable[FlatParam], factor: float, number: int) -> None:
        """Run the optimizer's step `number` on these units, with gradients multiplied by `factor`; `finish`
        ends it. If master weights are in a file, updated ones are rounded into the units' shards."""
        leaves = [part.leaf for unit in units for part in self.slices[unit]]
        self.chunked.step(leaves, factor, number, finish=False)

    def finish(self) -> None:
        """Wait until the step's results are in their files. Raises RunError."""
        self.chunked.finish()


def _slices(unit: FlatParam, *, streams: bool) -> list[OptimizerSlice]:
    """This rank's ranges of the unit's optimizer groups. Streamed states are in slices: on a CPU they stay in
    cache, a GPU pays for each launch. Slices end at multiples of a size of whole pages, so that blocks of a
    file share none."""
    max_numel = (CHUNK * 64 if unit.master.is_cuda else CHUNK) if streams else None
    slices = []
    for group, low, high in unit.layout.owned_groups(unit.context.groups.all_gather.rank):
        ends = range((low // max_numel + 1) * max_numel, high, max_numel) if max_numel else ()
        for start, stop in pairwise([low, *ends, high]):
            flat = FlatSlice.from_views(group, unit.master[start:stop], unit.grad_shard[start:stop])
            slices.append(OptimizerSlice(group, start, stop, flat.leaf))
    return slices
