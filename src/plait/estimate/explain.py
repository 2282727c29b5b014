"""Explain a plan before it runs: memory, traffic and bubble of each rank. No rank is started.

[Note: rank classes]
Ranks that differ only in `replicate` and `shard` see different data, but hold and send the same amounts
(except with a named all-reduce algorithm, in which every rank has its own role). So do columns and rows whose
shards have equal shapes. If ranks of one host share memory, or sums are taken inside hosts first, ranks whose
peers are distributed differently over hosts are in different classes: a host may end inside one group and not
inside another. One rank per class is examined, so that a plan for many thousands of ranks takes seconds.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from plait.api import check_device, check_update, find_blocks, training_spec
from plait.engine.build import StageBuilder, TrainingSpec
from plait.engine.loss import Loss
from plait.errors import ModelError
from plait.estimate.dry_run import Cluster, DryStage, dry_stages
from plait.models import Blocks, Chain
from plait.optim import states_per_element
from plait.parallel import DataGroups, ShardMap, estimated_bytes
from plait.parallel.zero.memory_stats import transport_facts
from plait.plan import CommCount, CommKey, Grid, Layout, MemoryUse, Plan
from plait.plan.estimate.traffic import RankFacts, TransportFacts, scratch_bytes, step_traffic
from plait.plan.schedule import Durations, peak_activation_bytes, simulate

TrafficByStrand = Mapping[str, Mapping[CommKey, CommCount]]  # communication of a step, by strand


@dataclass(frozen=True)
class RankClass:
    """Ranks that hold and communicate the same amounts; see [Note: rank classes].

    blocks      names of the first and the last block of each stage
    parameters  elements of the shards that a rank computes with
    boxes       number of boxes of full tensors in these shards
    owned       elements that a rank updates, gaps included
    traffic     of a step, by strand
    """

    ranks: tuple[int, ...]
    coord: Mapping[str, int]  # of the first rank
    stages: tuple[int, ...]
    blocks: tuple[tuple[str, str], ...]
    parameters: int
    boxes: int
    owned: int
    memory: MemoryUse
    traffic: TrafficByStrand


@dataclass(frozen=True)
class Explanation:
    """A model under a plan. `bubble`: idle fraction of all ranks' time, for equal stages and a backward that
    takes twice as long as a forward; `micro_shape`: of a micro-batch's first tensor."""

    plan: Plan
    grid: Grid
    transport: str
    model: str
    num_parameters: int
    num_stages: int
    micro_shape: tuple[int, ...]
    bubble: float
    rank_classes: tuple[RankClass, ...]

    def of_rank(self, rank: int) -> RankClass:
        return next(of_class for of_class in self.rank_classes if rank in of_class.ranks)


def explain(
    model: nn.Module | Sequence[nn.Module],
    plan: Plan | str,
    micro: Mapping[str, Tensor],
    *,
    cluster: Cluster | None = None,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    optimizer_args: Mapping[str, Any] | None = None,
    param_groups: Iterable[Any] | None = None,
    loss: Loss | None = None,
    blocks: Blocks | None = None,
    tensor_plan: Mapping[str, str] | None = None,
) -> Explanation:
    """Estimate the cost of `parallelize` with these arguments and of steps of such micro-batches.

    `micro`: a micro-batch of one data rank, on any device: only shapes and dtypes are used. `cluster`: the
    hypothetical ranks; None: one host, on its CPU. The model is not changed. Raises PlanError, ModelError or
    ConfigError where `parallelize` would, except that fp16 support of the device is not tried.
    """
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    model = model if isinstance(model, nn.Module) else Chain(model)
    cluster = cluster or Cluster("host", None, torch.device("cpu"))
    check_update(optimizer)
    check_device(plan, cluster.device)
    if not micro:
        raise ModelError("a micro-batch has no tensors", expected="the inputs of the model, by name")
    named_blocks = find_blocks(model, plan, blocks)
    spec = replace(
        training_spec(model, plan, named_blocks, param_groups=param_groups, tensor_plan=tensor_plan),
        loss=loss,
    )
    per_element = states_per_element(optimizer, dict(optimizer_args or {}))
    view = _PlanView(
        model, plan, spec, cluster, named_blocks, {k: v.to("meta") for k, v in micro.items()}, per_element
    )
    schedule = spec.schedule
    return Explanation(
        plan,
        view.grid,
        cluster.transport,
        type(model).__name__,
        view.shard_map.num_parameters,
        schedule.num_stages,
        tuple(next(iter(micro.values())).shape),
        simulate(schedule, Durations.uniform(schedule.num_stages)).bubble_fraction,
        tuple(view.rank_classes()),
    )


class _PlanView:
    """A model under a plan, examined rank by rank."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        spec: TrainingSpec,
        cluster: Cluster,
        blocks: list[tuple[str, nn.Module]],
        micro: Mapping[str, Tensor],
        per_element: int,
    ) -> None:
        self.grid = Grid.from_plan(plan)
        self._model, self._plan, self._spec, self._cluster = model, plan, spec, cluster
        self._blocks, self._micro, self._per_element = blocks, micro, per_element
        self._host_size = cluster.host_size or self.grid.num_ranks
        self.shard_map: ShardMap = StageBuilder(
            model, plan, spec, cluster.mesh(self.grid, 0), blocks
        ).shard_map()

    def rank_classes(self) -> Iterator[RankClass]:
        """The classes, in the order of their first ranks."""
        shapes: dict[Hashable, int] = {}
        coords = product(range(self._plan.rows), range(self._plan.cols))
        shape_of = {coord: shapes.setdefault(_shapes(self._layouts(coord)), len(shapes)) for coord in coords}
        classes: dict[tuple[int, Hashable, Hashable], list[int]] = defaultdict(list)
        examined: dict[Hashable, tuple[list[DryStage], DataGroups, TransportFacts]] = {}
        for rank in range(self.grid.num_ranks):
            coord = self.grid.coord(rank)
            view = (shape_of[coord["row"], coord["col"]], self._hosts(rank))
            role = () if self._plan.algorithm == "auto" else (coord["replicate"], coord["shard"])
            classes[coord["pp"], role, view].append(rank)
            if view not in examined:
                examined[view] = self._examine(rank)
        for (_, _, key), ranks in classes.items():
            yield self._rank_class(tuple(ranks), *examined[key])

    def _hosts(self, rank: int) -> Hashable:
        """How the rank's data-parallel groups are distributed over hosts, as far as it matters."""
        by_host = self._plan.algorithm == "two-level"
        if not (by_host or self._cluster.transport == "host"):
            return ()
        distribution = []
        for axis in ("shard", "replicate"):
            hosts = [other // self._host_size for other in self.grid.group(rank, axis)]
            indices = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
            distribution.append(tuple(indices[host] for host in hosts) if by_host else len(indices) == 1)
        return tuple(distribution)

    def _layouts(self, coord: tuple[int, int]) -> dict[int, Layout]:
        """The layouts of every stage, at a tp coordinate."""
        num_coords = self._plan.rows * self._plan.cols
        index = coord[0] * self._plan.cols + coord[1]
        return {
            stage: self.shard_map.layouts[rank * num_coords + index][stage]
            for stage, rank in sorted(self._spec.schedule.rank_of.items())
        }

    def _examine(self, rank: int) -> tuple[list[DryStage], DataGroups, TransportFacts]:
        """Run all stages at the rank's tp coordinate."""
        mesh = self._cluster.mesh(self.grid, rank)
        coord = (mesh.coord["row"], mesh.coord["col"])
        groups, layouts = DataGroups.build(mesh, self._plan), self._layouts(coord)
        device = self._cluster.device
        dry = dry_stages(
            self._model, self._plan, self._spec, self._blocks, layouts, mesh, self._micro, device
        )
        return dry, groups, transport_facts(self._plan, groups, self._host_size)

    def _rank_class(
        self, ranks: tuple[int, ...], stages: list[DryStage], groups: DataGroups, transport: TransportFacts
    ) -> RankClass:
        facts = RankFacts(
            self._plan,
            self.grid,
            ranks[0],
            self._spec.schedule,
            [stage.facts for stage in stages],
            self._spec.stages.shared_units,
            transport,
        )
        own = self._spec.schedule.stages_of(facts.pp_coord)
        units = [unit for stage in own for unit in stages[stage].facts.layout.units]
        activation_bytes = {stage: stages[stage].activation_bytes for stage in own}
        memory = estimated_bytes(
            Layout(tuple(units)),
            self._plan,
            groups,
            states_per_element=self._per_element,
            scratch_bytes=scratch_bytes(facts),
            activation_bytes=peak_activation_bytes(self._spec.schedule, facts.pp_coord, activation_bytes),
        )
        return RankClass(
            ranks,
            self.grid.coord(ranks[0]),
            own,
            tuple(self._names(stage) for stage in own),
            sum(shard.boxes.numel for unit in units for shard in unit.params),
            sum(sum(1 for _ in shard.boxes) for unit in units for shard in unit.params),
            sum(unit.range_numel for unit in units if unit.trains),
            memory,
            step_traffic(facts),
        )

    def _names(self, stage: int) -> tuple[str, str]:
        start, stop = self._spec.stages.blocks[stage]
        names = [name for name, _ in self._blocks[start:stop]] or [""]
        return names[0], names[-1]


def _shapes(layouts: Mapping[int, Layout]) -> Hashable:
    """Equal for ranks that hold and communicate the same amounts."""
    return tuple(
        (
            unit.numel,
            tuple((len(sharers), start, stop) for sharers, start, stop in unit.partial),
            tuple((shard.name, shard.boxes.shape) for shard in unit.params),
        )
        for layout in layouts.values()
        for unit in layout.units
    )
