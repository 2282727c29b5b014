"""A model's stages in a world of nobody: what one micro-batch says to the grid, uses, hands on and keeps.

[Note: one truth]
Which layers read the same tensor, what a norm tells its row, when a recomputed block communicates again: the
modules that communicate decide it, and the model's own code. A formula beside them would be a second truth,
right for the blocks that it was made for. So the very same stages, cut by the very same code, run a
micro-batch on meta: forward and backward, with links that have nobody at their other end. It costs no memory,
and the time that torch needs to work out shapes, whatever the number of ranks.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from plait.comm import Mesh, World
from plait.engine.build import StageBuilder, TrainingSpec
from plait.engine.stage import StageRunner
from plait.errors import ModelError, PlaitError
from plait.models import AsOnDevice, BlockOutputs, copy_to_meta, running_on_meta
from plait.parallel import (
    DataGroups,
    FlatParam,
    Precision,
    RecomputedForward,
    ReplicatedGradReduce,
    flat_param_config,
    move_buffers,
    persistent_buffers,
)
from plait.parallel.pipeline import BackwardSplitter, PackedOutput, StageInput, pack, unpack
from plait.parallel.zero.sharded_model import Root
from plait.plan import Grid, Layout, Plan, subtract_traffic, sum_traffic
from plait.plan.comm_log import Traffic
from plait.plan.estimate.traffic import StageFacts

_META = torch.device("meta")


@dataclass(frozen=True)
class Cluster:
    """The ranks that there would be: `transport` (host, gloo or nccl), how many to a host (None: all), and
    what they compute on."""

    transport: str
    host_size: int | None
    device: torch.device

    def mesh(self, grid: Grid, rank: int) -> Mesh:
        """A rank's place, in groups of nobody."""
        return Mesh(World.dry(rank, grid.num_ranks, self.transport, self.host_size), grid)


@dataclass(frozen=True)
class DryStage:
    """`kept`: bytes of one micro-batch from its forward to its backward, and from there to the backward's
    other half; None where that cannot be told."""

    facts: StageFacts
    kept: tuple[int, int] | None


class _NullMasters:
    """Master weights that nobody updates."""

    def new(self, numel: int) -> Tensor:
        return torch.empty(numel, device=_META)

    def forget(self, master: Tensor) -> None:
        """They are nowhere."""


def dry_stages(
    model: nn.Module,
    plan: Plan,
    how: TrainingSpec,
    blocks: Sequence[tuple[str, nn.Module]],
    layouts: Mapping[int, Layout],
    mesh: Mesh,
    micro: Mapping[str, Tensor],
    device: torch.device,
) -> list[DryStage]:
    """All stages of the model, as they are at this place of the grid. `layouts`: of each. `micro`: the shapes
    of a micro-batch. `device`: what ranks compute on. Raises ModelError for a model that cannot run without
    values."""
    plan = _without_allocations(plan)
    twin = copy_to_meta(model)
    move_buffers(twin, plan, _META)
    groups, halves = DataGroups.of(mesh, plan), BackwardSplitter()
    making = StageBuilder(twin, plan, how, mesh, [(name, twin.get_submodule(name)) for name, _ in blocks])
    cut = replace(flat_param_config(plan, groups, _META, _NullMasters()), home=_META)
    units = {stage: [FlatParam(unit, cut) for unit in found.units] for stage, found in layouts.items()}
    partial = ReplicatedGradReduce(
        mesh, Layout(tuple(unit for found in layouts.values() for unit in found.units))
    )
    whole = BlockOutputs(copy_to_meta(model).to(Precision.of(plan).compute), device)
    stages = making.stages(units, _standalone(twin), groups, partial, cut, halves)
    batch_shape = _batch_shape(micro)
    kept = [
        None if batch_shape is None else stage.estimated_bytes(batch_shape, device, whole)
        for stage in stages.values()
    ]
    _recompute_as_on(device, stages.values())
    run = _MicrobatchRun(mesh, stages, micro, halves, {stage for stage, _ in how.schedule.split})
    with running_on_meta(device), _model_errors():
        run.forward()
        run.backward()
    gathers = not cut.whole_parameters
    facts = [_stage_facts(run, stage, found, gathers=gathers) for stage, found in layouts.items()]
    return [DryStage(of_stage, found) for of_stage, found in zip(facts, kept, strict=True)]


def _recompute_as_on(device: torch.device, stages: Iterable[StageRunner]) -> None:
    """Has blocks that run again in backward, where torch lets no mode for functions in, run as in forward."""
    for stage in stages:
        for _, block in stage.part.blocks:
            if isinstance(block.forward, RecomputedForward):
                block.forward.run_within(partial(AsOnDevice, device))


def _without_allocations(plan: Plan) -> Plan:
    """What does not change what is asked here, and would take memory, files or a compiler."""
    offload = "none" if plan.offload == "disk" else plan.offload
    return replace(plan, algorithm="auto", reduce="fp32", compile=False, offload=offload)


def _standalone(twin: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in twin.named_parameters() if not p.is_floating_point()}


def _batch_shape(micro: Mapping[str, Tensor]) -> tuple[int, int] | None:
    ids = micro.get("input_ids")
    return None if ids is None or ids.dim() != 2 else (ids.shape[0], ids.shape[1])


@contextmanager
def _model_errors() -> Iterator[None]:
    """Whatever a user's model raises without values becomes a letter."""
    try:
        yield
    except PlaitError:
        raise
    except Exception as error:
        raise ModelError(
            "the model cannot be run without values, so what its layers say is not known",
            given=f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else 'no words'}",
            expected="a forward whose course does not depend on the numbers in it",
        ) from error


@dataclass
class _MicrobatchRun:
    """One micro-batch, forward and backward, over all stages.

    split     stages whose backwards are in halves
    said      by stage
    """

    mesh: Mesh
    stages: dict[int, StageRunner]
    micro: Mapping[str, Tensor]
    halves: BackwardSplitter
    split: set[int]
    said: dict[int, list[Traffic]] = field(default_factory=lambda: defaultdict(list))
    parcels: dict[int, PackedOutput] = field(default_factory=dict)
    _arrivals: dict[int, StageInput] = field(default_factory=dict)
    _roots: dict[int, list[Root]] = field(default_factory=dict)

    def forward(self) -> None:
        tensors: list[Tensor] = []
        for number, stage in self.stages.items():
            received = None
            if number:
                arrival = StageInput(self.parcels[number - 1], tensors)
                received, self._arrivals[number] = unpack(self.parcels[number - 1], arrival.tensors), arrival
                arrival.let_go()
            with self._listening(number):
                if stage.is_last:
                    self._roots[number] = [stage.summed_loss(self.micro, received)[0]]
                    return
                output = stage.outputs(self.micro, received)
            parcel, tensors = pack(output, of=f"stage {number}")
            self.parcels[number] = parcel
            roots = parcel.with_grad(tensors)
            self._roots[number] = [torch.autograd.graph.get_gradient_edge(t) for t in roots]
            tensors = [tensor.detach() for tensor in tensors]

    def backward(self) -> None:
        gradients: Sequence[Tensor | None] = [None]
        for number in reversed(self.stages):
            zero, half = self.stages[number].zero, number in self.split
            with self._listening(number):
                with self.halves.collecting() if half else nullcontext() as queued:
                    zero.backward(self._roots.pop(number), gradients, last=True, rest=queued)
                if queued is not None:
                    zero.backward_weight(queued, last=True)
            if number:
                gradients = self._arrivals.pop(number).take_gradients()

    @contextmanager
    def _listening(self, stage: int) -> Iterator[None]:
        """What is said inside is the stage's: of that, what goes along the axes that cut layers. Gradients
        have lanes of their own."""
        ledger = self.mesh.world.ledger
        before = ledger.read()
        yield
        said = subtract_traffic(before, ledger.read())
        own = {line: tally for line, tally in said.items() if line.axes and not line.channel}
        self.said[stage].append({line: t for line, t in own.items() if {*line.axes} <= {"row", "col"}})


def _stage_facts(run: _MicrobatchRun, number: int, layout: Layout, *, gathers: bool) -> StageFacts:
    stage, parcel = run.stages[number], run.parcels.get(number)
    facts = StageFacts(
        layout,
        said=sum_traffic(run.said[number]),
        output=() if parcel is None else tuple(spec.nbytes for spec in parcel.specs),
        gradient=() if parcel is None else tuple(spec.nbytes for spec in parcel.grad_specs),
        buffers=tuple(buffer.nbytes for buffer in persistent_buffers(stage.part.module).values()),
    )
    return replace(facts, uses=stage.zero.recorded) if gathers else facts
