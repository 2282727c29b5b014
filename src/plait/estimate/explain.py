"""A plan explained before it runs: what each rank will hold, say and wait for. No rank is started.

[Note: ranks that are alike]
Ranks that differ in `replicate` and `shard` alone see other data, and hold and say as much (but where a named
algorithm adds up gradients, in which everyone has a role). So do columns and rows whose pieces have the same
shapes. Where ranks of one host share memory, or sums are taken inside of hosts first, ranks whose peers lie
otherwise on hosts are apart: a host may end inside of one group and not of another. One of each kind is
looked at, so that a plan for many thousands of ranks takes seconds.
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
from plait.parallel import DataGroups, ShardMap, estimated_bytes, terms_of
from plait.plan import CommCount, CommKey, Grid, Layout, MemoryUse, Plan
from plait.plan.estimate.traffic import RankFacts, TransportFacts, scratch_bytes, step_traffic
from plait.plan.schedule import Durations, peak_activation_bytes, simulate

TrafficByStrand = Mapping[str, Mapping[CommKey, CommCount]]  # what is said in a step, by what it is of


@dataclass(frozen=True)
class RankClass:
    """Ranks that hold and say as much as each other; see [Note: ranks that are alike].

    blocks      names of the first and the last block of each stage
    parameters  elements of the pieces that a rank computes with
    boxes       of whole tensors that these pieces are
    owned       elements that a rank updates, gaps included
    traffic     of a step, by strand
    """

    ranks: tuple[int, ...]
    coord: Mapping[str, int]  # of the first
    stages: tuple[int, ...]
    blocks: tuple[tuple[str, str], ...]
    parameters: int
    boxes: int
    owned: int
    memory: MemoryUse
    traffic: TrafficByStrand


@dataclass(frozen=True)
class Explanation:
    """Of a model under a plan. `bubble`: of all ranks' time, what they wait, where stages are alike and a
    backward takes twice as long as a forward; `micro_shape`: of a micro-batch's first tensor."""

    plan: Plan
    grid: Grid
    transport: str
    model: str
    num_parameters: int
    num_stages: int
    micro_shape: tuple[int, ...]
    bubble: float
    alike: tuple[RankClass, ...]

    def of_rank(self, rank: int) -> RankClass:
        return next(found for found in self.alike if rank in found.ranks)


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
    """What `parallelize` with these arguments, and steps of such micro-batches, will come to.

    `micro`: a micro-batch of one data rank, on meta or not: its shapes and dtypes count. `cluster`: what
    the ranks would be; None: of one host, computing on its CPU. The model is not changed. Raises PlanError,
    ModelError or ConfigError where `parallelize` would; only whether a device computes in fp16 is not tried.
    """
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    model = model if isinstance(model, nn.Module) else Chain(model)
    cluster = cluster or Cluster("host", None, torch.device("cpu"))
    check_update(optimizer)
    check_device(plan, cluster.device)
    if not micro:
        raise ModelError("a micro-batch has no tensors", expected="what the model is given, by name")
    found = find_blocks(model, plan, blocks)
    how = replace(
        training_spec(model, plan, found, param_groups=param_groups, tensor_plan=tensor_plan), loss=loss
    )
    per_element = states_per_element(optimizer, dict(optimizer_args or {}))
    view = _PlanView(
        model, plan, how, cluster, found, {k: v.to("meta") for k, v in micro.items()}, per_element
    )
    schedule = how.schedule
    return Explanation(
        plan,
        view.grid,
        cluster.transport,
        type(model).__name__,
        view.shard_map.num_parameters,
        schedule.num_stages,
        tuple(next(iter(micro.values())).shape),
        simulate(schedule, Durations.uniform(schedule.num_stages)).bubble_fraction,
        tuple(view.alike()),
    )


class _PlanView:
    """A model under a plan, seen from all ranks."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        how: TrainingSpec,
        cluster: Cluster,
        blocks: list[tuple[str, nn.Module]],
        micro: Mapping[str, Tensor],
        per_element: int,
    ) -> None:
        self.grid = Grid.from_plan(plan)
        self._model, self._plan, self._how, self._cluster = model, plan, how, cluster
        self._blocks, self._micro, self._per_element = blocks, micro, per_element
        self._host_size = cluster.host_size or self.grid.num_ranks
        self.shard_map: ShardMap = StageBuilder(
            model, plan, how, cluster.mesh(self.grid, 0), blocks
        ).shard_map()

    def alike(self) -> Iterator[RankClass]:
        """In the order of their first ranks."""
        shapes: dict[Hashable, int] = {}
        places = product(range(self._plan.rows), range(self._plan.cols))
        kind_of = {place: shapes.setdefault(_shapes(self._layouts(place)), len(shapes)) for place in places}
        alike: dict[tuple[int, Hashable, Hashable], list[int]] = defaultdict(list)
        seen: dict[Hashable, tuple[list[DryStage], DataGroups, TransportFacts]] = {}
        for rank in range(self.grid.num_ranks):
            at = self.grid.coord(rank)
            look = (kind_of[at["row"], at["col"]], self._hosts(rank))
            role = () if self._plan.algorithm == "auto" else (at["replicate"], at["shard"])
            alike[at["pp"], role, look].append(rank)
            if look not in seen:
                seen[look] = self._seen(rank)
        for (_, _, kind), ranks in alike.items():
            yield self._row(tuple(ranks), *seen[kind])

    def _hosts(self, rank: int) -> Hashable:
        """How the rank's groups of data parallelism lie on hosts, as far as anything hangs on it."""
        by_host = self._plan.algorithm == "two-level"
        if not (by_host or self._cluster.transport == "host"):
            return ()
        found = []
        for axis in ("shard", "replicate"):
            hosts = [other // self._host_size for other in self.grid.group(rank, axis)]
            numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
            found.append(tuple(numbers[host] for host in hosts) if by_host else len(numbers) == 1)
        return tuple(found)

    def _layouts(self, place: tuple[int, int]) -> dict[int, Layout]:
        """Of every stage, at a place of the grid."""
        places = self._plan.rows * self._plan.cols
        at = place[0] * self._plan.cols + place[1]
        return {
            stage: self.shard_map.layouts[rank * places + at][stage]
            for stage, rank in sorted(self._how.schedule.rank_of.items())
        }

    def _seen(self, rank: int) -> tuple[list[DryStage], DataGroups, TransportFacts]:
        """What the rank sees of all stages at its place of the grid."""
        mesh = self._cluster.mesh(self.grid, rank)
        place = (mesh.coord["row"], mesh.coord["col"])
        groups, layouts = DataGroups.of(mesh, self._plan), self._layouts(place)
        device = self._cluster.device
        dry = dry_stages(self._model, self._plan, self._how, self._blocks, layouts, mesh, self._micro, device)
        return dry, groups, terms_of(self._plan, groups, self._host_size)

    def _row(
        self, ranks: tuple[int, ...], stages: list[DryStage], groups: DataGroups, terms: TransportFacts
    ) -> RankClass:
        facts = RankFacts(
            self._plan,
            self.grid,
            ranks[0],
            self._how.schedule,
            [stage.facts for stage in stages],
            self._how.stages.shared_units,
            terms,
        )
        own = self._how.schedule.stages_of(facts.place)
        units = [unit for stage in own for unit in stages[stage].facts.layout.units]
        kept = {stage: stages[stage].kept for stage in own}
        memory = estimated_bytes(
            Layout(tuple(units)),
            self._plan,
            groups,
            states_per_element=self._per_element,
            scratch_bytes=scratch_bytes(facts),
            activation_bytes=peak_activation_bytes(self._how.schedule, facts.place, kept),
        )
        return RankClass(
            ranks,
            self.grid.coord(ranks[0]),
            own,
            tuple(self._names(stage) for stage in own),
            sum(piece.boxes.numel for unit in units for piece in unit.params),
            sum(sum(1 for _ in piece.boxes) for unit in units for piece in unit.params),
            sum(unit.range_numel for unit in units if unit.trains),
            memory,
            step_traffic(facts),
        )

    def _names(self, stage: int) -> tuple[str, str]:
        start, stop = self._how.stages.blocks[stage]
        names = [name for name, _ in self._blocks[start:stop]] or [""]
        return names[0], names[-1]


def _shapes(layouts: Mapping[int, Layout]) -> Hashable:
    """Equal where as much is held and said."""
    return tuple(
        (
            unit.numel,
            tuple((len(sharers), start, stop) for sharers, start, stop in unit.partial),
            tuple((piece.name, piece.boxes.shape) for piece in unit.params),
        )
        for layout in layouts.values()
        for unit in layout.units
    )
