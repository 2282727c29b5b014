"""A plan explained before it runs: what each rank will hold, say and wait for. No rank is started.

[Note: ranks that are alike]
Ranks that differ in `replicate` and `shard` alone see other data, and hold and say as much (but where a named
algorithm adds up gradients, in which everyone has a role). So do columns and rows whose pieces have the same
shapes. One of each kind is looked at, so that a plan for many thousands of ranks takes seconds.
"""

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from plait.assembly import training_of
from plait.dry import DryStage, Job, dry_stages
from plait.models import Blocks, Chain, Loss, blocks_of
from plait.optim import states_per_element
from plait.parallel import DataGroups, Holdings, foretold_bytes, terms_of
from plait.parts import Making, Training
from plait.plan import Grid, Layout, Line, MemoryUse, Plan, Tally
from plait.plan.foretold import RankFacts, Terms, scratch_bytes, step_traffic
from plait.plan.schedule import Durations, most_kept, simulate

Strands = Mapping[str, Mapping[Line, Tally]]  # what is said in a step, by what it is of


@dataclass(frozen=True)
class Alike:
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
    traffic: Strands


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
    alike: tuple[Alike, ...]

    def of_rank(self, rank: int) -> Alike:
        return next(found for found in self.alike if rank in found.ranks)


def explain(
    model: nn.Module | Sequence[nn.Module],
    plan: Plan | str,
    micro: Mapping[str, Tensor],
    *,
    job: Job | None = None,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    optimizer_args: Mapping[str, Any] | None = None,
    param_groups: Iterable[Any] | None = None,
    loss: Loss | None = None,
    blocks: Blocks | None = None,
    tensor_plan: Mapping[str, str] | None = None,
) -> Explanation:
    """What `parallelize` with these arguments, and steps of such micro-batches, will come to.

    `micro`: a micro-batch of one data rank, on meta or not: its shapes and dtypes count. `job`: the ranks
    that there would be; None: of one host, computing on its CPU. The model is not changed. Raises PlanError,
    ModelError or ConfigError where `parallelize` would.
    """
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    model = model if isinstance(model, nn.Module) else Chain(model)
    job = job or Job("host", None, torch.device("cpu"))
    found = blocks_of(model, blocks)
    how = replace(
        training_of(model, plan, found, param_groups=param_groups, tensor_plan=tensor_plan), loss=loss
    )
    per_element = states_per_element(optimizer, dict(optimizer_args or {}))
    view = _View(model, plan, how, job, found, {k: v.to("meta") for k, v in micro.items()}, per_element)
    schedule = how.schedule
    return Explanation(
        plan,
        view.grid,
        job.transport,
        type(model).__name__,
        view.holdings.num_parameters,
        schedule.num_stages,
        tuple(next(iter(micro.values())).shape),
        simulate(schedule, Durations.uniform(schedule.num_stages)).bubble_fraction,
        tuple(view.alike()),
    )


class _View:
    """A model under a plan, seen from all ranks."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        how: Training,
        job: Job,
        blocks: list[tuple[str, nn.Module]],
        micro: Mapping[str, Tensor],
        per_element: int,
    ) -> None:
        self.grid = Grid.of(plan)
        self._model, self._plan, self._how, self._job = model, plan, how, job
        self._blocks, self._micro, self._per_element = blocks, micro, per_element
        self.holdings: Holdings = Making(model, plan, how, job.mesh(self.grid, 0), blocks).holdings()

    def alike(self) -> Iterator[Alike]:
        places: dict[Hashable, list[tuple[int, int]]] = defaultdict(list)
        for place in product(range(self._plan.rows), range(self._plan.cols)):
            places[_shapes(self._layouts(place))].append(place)
        parts = [(found, *self._seen(found[0])) for found in places.values()]
        for pp in range(self._plan.pp):
            for found, stages, groups, terms in parts:
                yield from self._of(pp, found, stages, groups, terms)

    def _layouts(self, place: tuple[int, int]) -> dict[int, Layout]:
        """Of every stage, at a place of the grid."""
        places = self._plan.rows * self._plan.cols
        at = place[0] * self._plan.cols + place[1]
        return {
            stage: self.holdings.layouts[rank * places + at][stage]
            for stage, rank in sorted(self._how.schedule.rank_of.items())
        }

    def _seen(self, place: tuple[int, int]) -> tuple[list[DryStage], DataGroups, Terms]:
        mesh = self._job.mesh(self.grid, self.grid.rank({"row": place[0], "col": place[1]}))
        groups, layouts = DataGroups.of(mesh, self._plan), self._layouts(place)
        device = self._job.device
        dry = dry_stages(self._model, self._plan, self._how, self._blocks, layouts, mesh, self._micro, device)
        host_size = self._job.host_size or self.grid.num_ranks
        return dry, groups, terms_of(self._plan, groups, host_size)

    def _of(
        self,
        pp: int,
        places: list[tuple[int, int]],
        stages: list[DryStage],
        groups: DataGroups,
        terms: Terms,
    ) -> Iterator[Alike]:
        for ranks in self._ranks(pp, places):
            facts = RankFacts(
                self._plan,
                self.grid,
                ranks[0],
                self._how.schedule,
                [stage.facts for stage in stages],
                self._how.stages.shared_units,
                terms,
            )
            yield self._row(facts, ranks, stages, groups)

    def _ranks(self, pp: int, places: list[tuple[int, int]]) -> list[tuple[int, ...]]:
        """Of these places, those that are alike."""
        data = product(range(self.grid.degree("replicate")), range(self.grid.degree("shard")))
        found = [
            [
                self.grid.rank({"pp": pp, "replicate": replicate, "shard": shard, "row": row, "col": col})
                for row, col in places
            ]
            for replicate, shard in data
        ]
        if self._plan.algorithm != "auto":
            return [tuple(sorted(ranks)) for ranks in found]
        return [tuple(sorted(rank for ranks in found for rank in ranks))]

    def _row(
        self, facts: RankFacts, ranks: tuple[int, ...], stages: list[DryStage], groups: DataGroups
    ) -> Alike:
        own = self._how.schedule.stages_of(facts.place)
        units = [unit for stage in own for unit in stages[stage].facts.layout.units]
        kept = {stage: stages[stage].kept for stage in own}
        memory = foretold_bytes(
            Layout(tuple(units)),
            self._plan,
            groups,
            states_per_element=self._per_element,
            scratch_bytes=scratch_bytes(facts),
            activation_bytes=most_kept(self._how.schedule, facts.place, kept),
        )
        return Alike(
            ranks,
            self.grid.coord(ranks[0]),
            own,
            tuple(self._names(stage) for stage in own),
            sum(piece.boxes.numel for unit in units for piece in unit.pieces),
            sum(sum(1 for _ in piece.boxes) for unit in units for piece in unit.pieces),
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
            tuple((piece.name, piece.boxes.shape) for piece in unit.pieces),
        )
        for layout in layouts.values()
        for unit in layout.units
    )
