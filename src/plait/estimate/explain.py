"""Explain a plan before it runs: memory, traffic and bubble of each rank. No rank is started.

[Note: rank classes]
Ranks that differ only in `replicate` and `shard` see different data, but hold and send the same amounts
(except with a named all-reduce algorithm, in which every rank has its own role). So do columns and rows whose
shards have equal shapes. If ranks of one host share memory, or sums are taken inside hosts first, ranks whose
peers are distributed differently over hosts are in different classes: a host may end inside one group and not
inside another. One rank per class is examined, so that a plan for many thousands of ranks takes seconds.
"""

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from torch import Tensor, nn

from plait.engine.build import build_shard_map
from plait.engine.spec import Arguments, TrainingSpec, validate
from plait.errors import ModelError
from plait.estimate.dry_run import META, DryStage, HypotheticalRanks, NullMasters, dry_stages
from plait.models import active_parameters
from plait.optim.update_kinds import UpdateScope
from plait.parallel.float8 import Float8Layers
from plait.parallel.zero.full_tensors import full_tensor_bytes, full_tensors
from plait.parallel.zero.memory_stats import estimated_bytes, transport_facts
from plait.parallel.zero.rank_context import RankContext, RankGroups
from plait.parallel.zero.shard_map import ShardMap
from plait.parallel.zero.sharded_optim import check_groups, coded_groups, states_per_element
from plait.plan import CommCount, CommKey, Grid, Layout, MemoryUse, Plan, TPPlan, UnitLayout
from plait.plan.axes import EXPERTS, REPLICAS, STAGE_PARTS, STAGES, TOKENS, Axes, Roles, UnitKind
from plait.plan.communicators import num_communicators
from plait.plan.context import MethodChoice
from plait.plan.devices import Device
from plait.plan.events import (
    RankFacts,
    ServerTraffic,
    exchange_traffic,
    scratch_bytes,
    server_traffic,
    step_traffic,
)
from plait.plan.memory import MASTER_BYTES, server_memory, worker_memory
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
    exchange    of an exchange between islands, which local steps make instead of a reduction in every step
    uneven_bytes  of activations, more than in `memory`, if its experts receive all tokens of the ranks of ep
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
    exchange: Mapping[CommKey, CommCount]
    uneven_bytes: int = 0


@dataclass(frozen=True)
class Explanation:
    """A model under a plan. `bubble`: idle fraction of all ranks' time, for equal stages and a backward that
    takes twice as long as a forward; `micro_shape`: of a micro-batch's first tensor; `float8`: layers of the
    blocks that multiply in float8, and those that do not; `shard_map`: boxes of every tensor; `servers`:
    bytes per step of a plan with parameter servers, whose grid is that of one worker; `hardware`: the ranks'
    device, if it was given; `active_parameters`: those that a token uses, of experts some."""

    plan: Plan
    grid: Grid
    transport: str
    model: str
    num_parameters: int
    num_stages: int
    micro_shape: tuple[int, ...]
    bubble: float
    rank_classes: tuple[RankClass, ...]
    float8: Float8Layers
    shard_map: ShardMap
    tensor: TPPlan
    cp_choice: MethodChoice | None = None
    active_parameters: int = 0
    servers: ServerTraffic | None = None
    hardware: Device | None = None

    def of_rank(self, rank: int) -> RankClass:
        return next(of_class for of_class in self.rank_classes if rank in of_class.ranks)

    def fullest(self) -> RankClass:
        """The class of ranks with the most bytes on their devices."""
        return max(self.rank_classes, key=lambda of_class: of_class.memory.total)


def explain(
    given: Arguments, micro: Mapping[str, Tensor], cluster: HypotheticalRanks | None = None
) -> Explanation:
    """Estimate the cost of `parallelize` with these arguments and of steps of such micro-batches.

    `micro`: a micro-batch of one data rank, on any device: only shapes and dtypes are used. `cluster`: the
    hypothetical ranks; None: one host, on its CPU. The model is not changed. Raises PlanError, ModelError or
    ConfigError where `parallelize` would; whether a GPU can train in fp16 is tried where there is one.
    """
    plan = given.plan
    cluster = (cluster or HypotheticalRanks("host", None, torch.device("cpu"))).checked(plan.precision)
    if not micro:
        raise _no_tensors()
    spec = validate(replace(given, example_batch=micro), device=cluster.device, host_size=cluster.host_size)
    check_groups(spec.optimizers, plan)
    view = _PlanView(given.model, spec, cluster, {k: v.to("meta") for k, v in micro.items()})
    servers, num_stages = None, spec.schedule.num_stages
    num_parameters, classes = view.shard_map.num_parameters, tuple(view.rank_classes())
    if plan.num_servers:
        servers = server_traffic(plan, num_parameters)
        states = max(states_per_element(spec.optimizers))
        classes = _with_servers(plan, classes[0], num_parameters, states)
    return Explanation(
        plan,
        view.grid,
        cluster.transport,
        type(given.model).__name__,
        num_parameters,
        num_stages,
        tuple(next(iter(micro.values())).shape),
        simulate(spec.schedule, Durations.uniform(num_stages)).bubble_fraction,
        classes,
        spec.float8,
        view.shard_map,
        spec.tensor,
        spec.cp_choice,
        active_parameters(given.model),
        servers,
        cluster.hardware,
    )


def _no_tensors() -> ModelError:
    return ModelError(
        "a micro-batch has no tensors",
        given="micro={}",
        expected="the inputs of the model, by name",
        hint="{'input_ids': torch.zeros(1, 2048, dtype=torch.long)}",
    )


def _with_servers(
    plan: Plan, worker: RankClass, num_parameters: int, states_per_element: int
) -> tuple[RankClass, ...]:
    """The classes of a plan with servers. `worker`: a process that trains alone."""
    memory = worker_memory(plan, worker.memory, num_parameters, states_per_element)
    owned = -(-num_parameters // plan.num_servers)
    updated = worker.owned if plan.local_steps else 0  # by a worker itself
    workers = replace(worker, ranks=tuple(range(plan.dp)), memory=memory, owned=updated)
    if not plan.servers:
        return (replace(workers, owned=updated + owned),)
    memory = server_memory(plan, num_parameters, states_per_element)
    ranks = tuple(range(plan.dp, plan.num_ranks))
    return workers, RankClass(ranks, {}, (), (), 0, 0, owned, memory, {}, {})


@dataclass(frozen=True)
class _PlanView:
    """A model under a plan, examined rank by rank."""

    model: nn.Module
    spec: TrainingSpec
    cluster: HypotheticalRanks
    micro: Mapping[str, Tensor]
    distributions: dict[tuple[Axes, int], Hashable] = field(default_factory=dict, init=False)

    @property
    def plan(self) -> Plan:
        return self.spec.plan

    @cached_property
    def grid(self) -> Grid:
        return Grid.from_plan(self.plan)

    @cached_property
    def shard_map(self) -> ShardMap:
        return build_shard_map(self.model, self.spec, self.grid)

    @property
    def host_size(self) -> int:
        return self.cluster.host_size or self.grid.num_ranks

    def rank_classes(self) -> Iterator[RankClass]:
        """The classes, in the order of their first ranks."""
        shapes: dict[Hashable, int] = {}
        coords = range(self.grid.degree(*STAGE_PARTS))
        shape_of = [shapes.setdefault(_shapes(self._layouts(coord)), len(shapes)) for coord in coords]
        classes: dict[tuple[int, int, Hashable], list[int]] = defaultdict(list)
        examined: dict[Hashable, tuple[list[DryStage], RankContext]] = {}
        for rank in range(self.grid.num_ranks):
            view = (shape_of[self.grid.index(rank, *STAGE_PARTS)], self._hosts(rank))
            role = 0 if self.plan.algorithm == "auto" else self.grid.index(rank, *TOKENS)
            classes[self.grid.index(rank, STAGES), role, view].append(rank)
            if view not in examined:
                examined[view] = self._examine(rank)
        for (_, _, key), ranks in classes.items():
            yield self._rank_class(tuple(ranks), *examined[key])

    def _hosts(self, rank: int) -> Hashable:
        """The distribution over hosts of the data-parallel groups of a rank, as far as it matters."""
        if not (self.plan.algorithm == "two-level" or self.cluster.transport == "host"):
            return ()
        roles = Roles.from_plan(self.plan)
        of_kinds = (axes for kind in UnitKind for axes in (roles.states(kind), roles.replicas(kind)))
        groups = dict.fromkeys((*of_kinds, REPLICAS))
        return tuple(self._distribution(axes, self.grid.first(rank, *axes)) for axes in groups)

    def _distribution(self, axes: Axes, first: int) -> Hashable:
        """Over hosts, of the ranks along axes. Computed once for all of them, as they may be thousands."""
        if (axes, first) not in self.distributions:
            hosts = [rank // self.host_size for rank in self.grid.group(first, *axes)]
            indices = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
            by_host = tuple(indices[host] for host in hosts)
            self.distributions[axes, first] = (
                by_host if self.plan.algorithm == "two-level" else len(indices) == 1
            )
        return self.distributions[axes, first]

    def _layouts(self, coord: int) -> dict[int, Layout]:
        """The layouts of every stage, on one of the ranks with parts of the same layers."""
        num_coords = self.grid.degree(*STAGE_PARTS)
        return {
            stage: self.shard_map.layouts[rank * num_coords + coord][stage]
            for stage, rank in sorted(self.spec.schedule.rank_of.items())
        }

    def _examine(self, rank: int) -> tuple[list[DryStage], RankContext]:
        """Run all stages at the rank's coordinates along STAGE_PARTS."""
        mesh = self.cluster.mesh(self.grid, rank)
        plan = self.plan.placed_on(self.cluster.device.type)
        context = RankContext(plan, mesh, META, RankGroups.build(mesh, plan), NullMasters())
        layouts = self._layouts(self.grid.index(rank, *STAGE_PARTS))
        return dry_stages(self.model, self.spec, layouts, mesh, self.micro, self.cluster.device), context

    def _rank_class(self, ranks: tuple[int, ...], stages: list[DryStage], context: RankContext) -> RankClass:
        facts = RankFacts(
            self.plan,
            self.grid,
            ranks[0],
            self.spec.schedule,
            [stage.facts for stage in stages],
            self.spec.stages.shared_units,
            transport_facts(context, self.host_size),
        )
        own = self.spec.schedule.stages_of(facts.pp_coord)
        units = [unit for stage in own for unit in stages[stage].facts.layout.units]
        activation_bytes = {stage: stages[stage].activation_bytes for stage in own}
        uneven_bytes = {stage: stages[stage].uneven_bytes for stage in own}
        peak_of = partial(peak_activation_bytes, self.spec.schedule, facts.pp_coord)
        memory = estimated_bytes(
            Layout(tuple(units)),
            context,
            self.plan,
            states_per_element=states_per_element(self.spec.optimizers),
            coded_groups=coded_groups(self.spec.optimizers),
            full_tensor_bytes=self._full_tensor_bytes(ranks, facts.pp_coord, units),
            scratch_bytes=scratch_bytes(facts),
            activation_bytes=peak_of(activation_bytes),
            num_communicators=self._num_communicators(),
            loss_bytes=max(stages[stage].loss_bytes for stage in own),
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
            exchange_traffic(facts),
            (peak_of(uneven_bytes) or 0) - (memory.activations or 0),
        )

    def _full_tensor_bytes(
        self, ranks: Sequence[int], pp_rank: int, units: Sequence[UnitLayout]
    ) -> tuple[int, int]:
        """Bytes of states and buffers of full tensors, on the rank with most of them."""
        optimizers = self.spec.optimizers
        if all(group.scope is not UpdateScope.TENSORS for group in optimizers):
            return 0, 0
        roles = Roles.from_plan(self.plan)
        holders = self.grid.group(ranks[0], *roles.stage_copy)
        owners = [self.grid.index(rank, *EXPERTS) for rank in holders]
        tensors = full_tensors(self.shard_map, pp_rank, owners, optimizers)
        owned: Counter[int] = Counter()
        for tensor in tensors:
            owned[tensor.owner] += tensor.numel
        owner = {rank: self.grid.index(rank, *roles.stage_copy) for rank in ranks}
        largest = max(ranks, key=lambda rank: owned[owner[rank]])
        ranges = [(unit, self.grid.index(largest, *roles.states(unit.kind))) for unit in units]
        itemsize = MASTER_BYTES[self.plan.dtype]
        return full_tensor_bytes(optimizers, tensors, ranges, owner[largest], len(owners), itemsize)

    def _num_communicators(self) -> int | None:
        if self.cluster.device.type != "cuda":
            return None
        return num_communicators(self.plan, self.spec.schedule.rank_of)

    def _names(self, stage: int) -> tuple[str, str]:
        start, stop = self.spec.stages.blocks[stage]
        end = ("head" if stage else "embedding") if self.spec.stages.num_stages > 1 else ""
        names = [name for name, _ in self.spec.blocks[start:stop]] or [end]
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
