"""What a rank owns and updates: ranges of the units' master weights, by the optimizer's groups."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.errors import ConfigError
from plait.optim import CHUNK, ChunkedOptimizer, FlatSlice, MappedFile, make_optimizer, room_for, state_kinds
from plait.parallel.zero.flat_param import FlatParam
from plait.parallel.zero.groups import Precision
from plait.plan import Layout, Plan


@dataclass(frozen=True)
class OptimizerSlice:
    """Elements [start, stop) of the range that this rank owns of a unit."""

    group: int
    start: int
    stop: int
    leaf: Tensor  # the optimizer's parameter


class MasterWeights:
    """Gives out the memory of master weights: on the plan's device, in host memory, or in a file."""

    def __init__(self, plan: Plan, layout: Layout, device: torch.device, folder: Path | None) -> None:
        """Raises ConfigError when the plan offloads to a folder that there is not, or cannot be used."""
        self._dtype = Precision.of(plan).master
        self._home = torch.device("cpu") if plan.offload != "none" else device
        self.file: MappedFile | None = None
        if (plan.offload == "disk") != (folder is not None):
            raise ConfigError(
                "offload=disk and a folder to offload to belong together",
                given=f"offload={plan.offload}, folder {folder or 'not given'}",
                hint="parallelize(..., offload_dir=...), in a recipe run.offload_dir",
            )
        if folder is not None and Precision.of(plan).compute != self._dtype:
            ranges = [unit.range_numel for unit in layout.units if unit.trains]
            self.file = MappedFile(folder, sum(room_for(numel, self._dtype) for numel in ranges))

    def new(self, numel: int) -> Tensor:
        """Zeros for the master weights of a range."""
        if self.file is not None:
            return self.file.take(numel, self._dtype)
        pin = self._home.type == "cpu" and torch.cuda.is_available()
        return torch.zeros(numel, dtype=self._dtype, device=self._home, pin_memory=pin)

    def forget(self, master: Tensor) -> None:
        """Takes a range's weights out of memory, if they are in a file."""
        if self.file is not None and master.numel():
            self.file.forget(master)


class ShardedOptimizer:
    """The ranges that this rank updates, their optimizer and its states."""

    def __init__(
        self,
        units: Sequence[FlatParam],
        plan: Plan,
        kind: type[torch.optim.Optimizer],
        arguments: Mapping[str, Any],
        groups: Sequence[Mapping[str, Any]],
        masters: MasterWeights,
        folder: Path | None,
    ) -> None:
        visits = plan.optim_dtype == "bf16" or folder is not None
        self.slices = {unit: _slices(unit, _longest(unit) if visits else None) for unit in units}
        self.kinds = state_kinds(kind, arguments)
        flat = [(unit, part) for unit, parts in self.slices.items() for part in parts]
        self.optimizer = make_optimizer(
            kind, arguments, [FlatSlice(part.group, part.leaf) for _, part in flat], groups
        )
        self._masters = masters
        self.has_states = False  # the same on all ranks, also where one owns padding only, or nothing trains
        self.stepper = ChunkedOptimizer(
            self.optimizer,
            self.kinds,
            states="bf16" if plan.optim_dtype == "bf16" else "fp32",
            folder=folder,
            masters=masters.file,
            positions={part.leaf: unit.start + part.start for unit, part in flat},
        )

    @property
    def states_per_element(self) -> int:
        return sum("." not in kind for kind in self.kinds)

    @property
    def disk_bytes(self) -> int:
        """Of states and master weights in files."""
        return self.stepper.disk_bytes + (self._masters.file.num_bytes if self._masters.file else 0)

    def step(self, unit: FlatParam, factor: float, number: int) -> None:
        """The optimizer's step number `number` of this unit, gradients multiplied by `factor`."""
        self.stepper.step([part.leaf for part in self.slices[unit]], factor, number)


def _longest(unit: FlatParam) -> int:
    """Elements of a slice whose states visit: on a CPU they stay in cache, a GPU pays for every launch."""
    return CHUNK * 64 if unit.master.is_cuda else CHUNK


def _slices(unit: FlatParam, longest: int | None) -> list[OptimizerSlice]:
    """The unit's owned groups, each in pieces of at most `longest` elements."""
    found = []
    for group, low, high in unit.layout.owned_groups(unit.cut.rank):
        for start in range(low, high, longest or high - low):
            stop = min(high, start + (longest or high - low))
            flat = FlatSlice.of(group, unit.master[start:stop], unit.gradient[start:stop])
            found.append(OptimizerSlice(group, start, stop, flat.leaf))
    return found
