"""Run the stages on meta tensors with a null transport; record traffic, parameter order and saved
activations.

[Note: dry run instead of formulas]
Which layers share an input, what a norm sends along its row, when a recomputed block communicates again:
that follows from the modules that communicate and from the model's own code. A formula would be a second
source of truth, right only for the blocks it was written for. So the same stages, sharded by the same code,
run a micro-batch on meta, forward and backward, with a transport that has no peers. It takes no memory, and
only the time of torch's shape computations, for any number of ranks.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn

from plait.comm import Mesh, World
from plait.engine.build import build_stages, sending_first
from plait.engine.inputs import own_tokens, prepared
from plait.engine.routers import Pass
from plait.engine.spec import TrainingSpec
from plait.engine.stage import StageRunner
from plait.errors import ModelError, PlaitError
from plait.models import BlockOutputs, copy_to_meta, device_kernels, running_on_meta
from plait.parallel.activation_checkpoint import RecomputedForward
from plait.parallel.experts.dispatch import all_rows
from plait.parallel.pipeline.executor import StageInput
from plait.parallel.pipeline.serialize import PackedOutput, pack
from plait.parallel.pipeline.split_backward import BackwardSplitter
from plait.parallel.zero.flat_param import FlatParam
from plait.parallel.zero.materialize import move_buffers
from plait.parallel.zero.rank_context import RankContext, RankGroups
from plait.parallel.zero.shard_map import persistent_buffers
from plait.parallel.zero.sharded_model import Root
from plait.plan import Grid, Layout, subtract_traffic, sum_traffic
from plait.plan.axes import LAYERS, TOKENS
from plait.plan.comm_log import Traffic
from plait.plan.devices import Device
from plait.plan.events import StageFacts

META = torch.device("meta")


@dataclass(frozen=True)
class HypotheticalRanks:
    """The hypothetical ranks: `transport` (host, gloo or nccl), ranks per host (None: all on one), the
    device they compute on, and its entry in the table of devices, if that is given."""

    transport: str
    host_size: int | None
    device: torch.device
    hardware: Device | None = None

    @staticmethod
    def of_hardware(hardware: Device, host_size: int | None) -> "HypotheticalRanks":
        """Ranks on such devices, whatever this machine has."""
        transport = "nccl" if hardware.kind == "cuda" else "host"
        return HypotheticalRanks(transport, host_size, torch.device(hardware.kind), hardware)

    def checked(self, precision: str) -> "HypotheticalRanks":
        """Return this cluster. Raises PlanError if the given device cannot compute in this precision."""
        if self.hardware is not None:
            self.hardware.check_precision(precision)
        return self

    def mesh(self, grid: Grid, rank: int) -> Mesh:
        """The mesh of a rank, with groups that have no peers."""
        return Mesh(World.dry_run(rank, grid.num_ranks, self.transport, self.host_size), grid)


@dataclass(frozen=True)
class DryStage:
    """Result of a stage. `activation_bytes`: bytes of one micro-batch from its forward to its backward, and
    from there to the weight-gradient part; None if unknown."""

    facts: StageFacts
    activation_bytes: tuple[int, int] | None
    loss_bytes: int  # see `MemoryUse.loss`
    uneven_bytes: tuple[int, int] | None = None  # the same if the rank's experts receive all tokens


class NullMasters:
    """Master weights that are never updated."""

    are_in_file = False

    def allocate(self, numel: int) -> Tensor:
        return torch.empty(numel, device=META)

    def evict(self, master: Tensor) -> None:
        """Nothing to free."""


def dry_stages(
    model: nn.Module,
    spec: TrainingSpec,
    layouts: Mapping[int, Layout],
    mesh: Mesh,
    micro: Mapping[str, Tensor],
    device: torch.device,
) -> list[DryStage]:
    """Run all stages of the model at one coordinate of the tp grid. `layouts`: of each stage. `micro`: the
    shapes of a micro-batch. `device`: what ranks compute on. Raises ModelError for a model that cannot run on
    meta."""
    meta_model = copy_to_meta(model)
    meta_blocks = [(name, meta_model.get_submodule(name)) for name, _ in spec.blocks]
    # Without options that do not affect the result and need memory, files or a compiler.
    placed = spec.plan.placed_on(device.type)
    offload = "none" if placed.offload == "disk" else placed.offload
    plan = replace(placed, algorithm="auto", reduce="fp32", compile=False, offload=offload)
    spec = replace(spec, plan=plan, blocks=meta_blocks)
    move_buffers(meta_model, plan, META)
    context = RankContext(plan, mesh, META, RankGroups.build(mesh, plan), NullMasters())
    units = {stage: [FlatParam(unit, context) for unit in layout.units] for stage, layout in layouts.items()}
    block_outputs = BlockOutputs(copy_to_meta(model).to(context.precision.compute), device)
    splitter = BackwardSplitter(sending_first(spec, context))
    standalone = {name: p for name, p in meta_model.named_parameters() if not p.is_floating_point()}
    stages = build_stages(meta_model, spec, context, units, standalone, splitter)
    ids = micro.get("input_ids")
    batch_shape = None if ids is None or ids.dim() != 2 else (ids.shape[0], ids.shape[1])
    activation_bytes = [
        None if batch_shape is None else stage.estimated_bytes(batch_shape, device, block_outputs)
        for stage in stages.values()
    ]
    uneven_bytes = activation_bytes
    if plan.ep > 1 and plan.capacity == "none" and batch_shape is not None:
        with all_rows():
            uneven_bytes = [s.estimated_bytes(batch_shape, device, block_outputs) for s in stages.values()]
    for _, block in chain.from_iterable(stage.module_part.blocks for stage in stages.values()):
        # Recomputed in backward in the same mode as in forward; torch does not enter function modes there.
        if isinstance(block.forward, RecomputedForward):
            block.forward.add_context(partial(device_kernels, device))
    rows = prepared(micro, meta_model, spec.given.loss)
    micro = own_tokens(rows, meta_model, context.groups.sequence, plan.cp_method, spec.numbering)
    kind, split = Pass(is_first=plan.counts_first), {stage for stage, _ in spec.schedule.split}
    run = _MicrobatchRun(mesh, stages, micro, splitter, split, kind)
    with running_on_meta(device), _model_errors():
        run.forward()
        if any(p.requires_grad for p in meta_model.parameters()):
            run.backward()
    gathers = not context.keeps_params_unsharded
    facts = [_stage_facts(run, stage, layout, gathers=gathers) for stage, layout in layouts.items()]
    loss_bytes = [stage.estimated_loss_bytes for stage in stages.values()]
    return [DryStage(*each) for each in zip(facts, activation_bytes, loss_bytes, uneven_bytes, strict=True)]


@contextmanager
def _model_errors() -> Iterator[None]:
    """Raise whatever a user's model raises on meta as a ModelError."""
    try:
        yield
    except PlaitError:
        raise
    except Exception as error:
        raise ModelError(
            "the model cannot run on meta tensors, so its traffic is unknown",
            given=f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else 'no text'}",
            expected="a forward whose control flow does not depend on tensor values",
            hint="torch.where in place of if",
        ) from error


@dataclass
class _MicrobatchRun:
    """One micro-batch, forward and backward, over all stages.

    split     stages with split backwards
    kind      `is_first`, if others have counted before it
    traffic   by stage
    """

    mesh: Mesh
    stages: dict[int, StageRunner]
    micro: Mapping[str, Tensor]
    splitter: BackwardSplitter
    split: set[int]
    kind: Pass
    traffic: dict[int, list[Traffic]] = field(default_factory=lambda: defaultdict(list))
    outputs: dict[int, PackedOutput] = field(default_factory=dict)
    _inputs: dict[int, StageInput] = field(default_factory=dict)
    _roots: dict[int, list[Root]] = field(default_factory=dict)

    def forward(self) -> None:
        tensors: list[Tensor] = []
        for number, stage in self.stages.items():
            received = None
            if number:
                self._inputs[number] = StageInput(self.outputs[number - 1], tensors)
                received = self._inputs[number].unpack()
            with self._recording(number):
                if stage.is_last:
                    self._roots[number] = [stage.summed_loss(self.micro, received, self.kind)[0]]
                    return
                output = stage.outputs(self.micro, received, self.kind)
            packed, tensors = pack(output, source=f"stage {number}")
            self.outputs[number] = packed
            roots = packed.tensors_with_grad(tensors)
            self._roots[number] = [torch.autograd.graph.get_gradient_edge(t) for t in roots]
            tensors = [tensor.detach() for tensor in tensors]

    def backward(self) -> None:
        gradients: Sequence[Tensor | None] = [None]
        for number in reversed(self.stages):
            sharded, splits = self.stages[number].sharded, number in self.split
            with self._recording(number):
                with self.splitter.deferring() if splits else nullcontext() as deferred:
                    sharded.backward(self._roots.pop(number), gradients, last=True, deferred=deferred)
                if deferred is not None:
                    sharded.backward_weight(deferred, last=True)
            if number:
                gradients = self._inputs.pop(number).take_gradients()

    @contextmanager
    def _recording(self, stage: int) -> Iterator[None]:
        """Record the communication inside layers as the stage's, and that of a loss of routers. Gradients
        have channels of their own."""
        axes = {*LAYERS, *(TOKENS if self.stages[stage].routers.adds else ())}
        comm_log = self.mesh.world.comm_log
        before = comm_log.read()
        yield
        since = subtract_traffic(before, comm_log.read())
        own = {key: count for key, count in since.items() if key.axes and not key.channel}
        self.traffic[stage].append({key: count for key, count in own.items() if {*key.axes} <= axes})


def _stage_facts(run: _MicrobatchRun, number: int, layout: Layout, *, gathers: bool) -> StageFacts:
    stage, packed = run.stages[number], run.outputs.get(number)
    facts = StageFacts(
        layout,
        traffic=sum_traffic(run.traffic[number]),
        output=() if packed is None else tuple(spec.nbytes for spec in packed.specs),
        gradient=() if packed is None else tuple(spec.nbytes for spec in packed.grad_specs),
        buffers=tuple(buffer.nbytes for buffer in persistent_buffers(stage.module_part.module).values()),
        totals=stage.routers.totals.numel(),
        counting=run.traffic[number][0] if run.kind.is_first else {},
        counted=stage.routers.counted_bytes,
    )
    return replace(facts, exec_order=stage.sharded.unsharder.recorded_order) if gathers else facts
