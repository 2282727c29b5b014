"""Build the parts of an engine: the stages of this rank, their units, optimizer and pipeline."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from plait.comm import Mesh
from plait.engine.inputs import Inputs, own_tokens
from plait.engine.loss import Loss
from plait.engine.preferences import ROWS, PairLoss
from plait.engine.routers import StageRouters
from plait.engine.spec import TrainingSpec
from plait.engine.stage import StageRunner
from plait.engine.usage_checks import refuse_shards_in_files
from plait.errors import ModelError
from plait.models import DataflowCheck, StageModule, copy_to_meta, foreign_modules, split_stage, unit_facts
from plait.models.adapters import with_adapters_inside
from plait.models.attention import dispatch_attention
from plait.models.init_weights import parameter_only_modules
from plait.models.reward import LastTokenScore, text_config
from plait.models.routing import take_choices
from plait.models.stages.shell import StageModules
from plait.parallel.activation_checkpoint import recompute_blocks
from plait.parallel.all_samples import sync_batch_norms
from plait.parallel.compile import compile_blocks
from plait.parallel.context.dropout import DropoutStream
from plait.parallel.experts.dispatch import distribute_experts
from plait.parallel.float8 import LayerProducts
from plait.parallel.local_steps import IslandState, OuterOptimizer
from plait.parallel.parameter_adapters import adapt_parameters
from plait.parallel.pipeline.executor import Pipeline
from plait.parallel.pipeline.split_backward import BackwardSplitter, split_linears
from plait.parallel.tensor.apply import apply_tp_plan
from plait.parallel.tensor.linear import HeadOutput
from plait.parallel.tensor.rng import install_rng_streams
from plait.parallel.tensor.sequence import SequenceShard
from plait.parallel.tensor.shards import TensorGroups
from plait.parallel.zero.flat_param import FlatParam
from plait.parallel.zero.grad_reduce import ColumnGradReduce, InFlightReductions
from plait.parallel.zero.materialize import bind_flat_params, init_flat_params, release_unused
from plait.parallel.zero.memory_stats import allocated_bytes, estimated_bytes
from plait.parallel.zero.parameter import has_hooks
from plait.parallel.zero.rank_context import RankContext, RankGroups
from plait.parallel.zero.replica_check import ReplicaCheck
from plait.parallel.zero.shard_map import ShardMap
from plait.parallel.zero.sharded_model import ShardedModel, ShardedStage, TiedGradReduce
from plait.parallel.zero.sharded_optim import MasterWeights, ShardedOptimizer
from plait.parallel.zero.state_dict import ShardedState
from plait.plan import Grid, Layout, MemoryUse, TPCoord
from plait.plan.axes import FEATURES, HIDDEN, Roles
from plait.plan.communicators import num_communicators
from plait.plan.context import first_heads


@dataclass(frozen=True)
class EngineParts:
    """The parts of an engine on one rank."""

    context: RankContext
    shard_map: ShardMap
    layout: Layout  # of everything that this rank holds
    stages: Mapping[int, StageRunner]
    sharded: ShardedModel
    optimizer: ShardedOptimizer
    islands: IslandState
    state: ShardedState
    replicas: ReplicaCheck
    pipeline: Pipeline
    inputs: Inputs
    dataflow: DataflowCheck | None  # if the model is split into stages
    loss: Loss | None  # the user's

    def memory(self, activation_bytes: int | None) -> MemoryUse:
        """Return the bytes that this rank holds."""
        loss_bytes = max(stage.loss_buffers.peak_bytes for stage in self.stages.values())
        others = (activation_bytes, loss_bytes, self.islands.outer.num_bytes)
        return allocated_bytes(self.sharded, self.optimizer, self.context, *others)

    def estimated_memory(self, spec: TrainingSpec, activation_bytes: int | None) -> MemoryUse:
        """Estimate the bytes of this rank."""
        is_cuda = self.context.device.type == "cuda"
        return estimated_bytes(
            self.layout,
            self.context,
            spec.plan,
            **self.optimizer.memory_facts,
            scratch_bytes=sum(s.reduction.scratch_bytes for s in self.sharded.stages.values()),
            activation_bytes=activation_bytes,
            num_communicators=num_communicators(spec.job, spec.schedule.rank_of) if is_cuda else None,
            loss_bytes=max(stage.estimated_loss_bytes for stage in self.stages.values()),
        )


def build_engine_parts(model: nn.Module, spec: TrainingSpec, mesh: Mesh) -> EngineParts:
    """Build the parts and materialize the model, in place with one stage. All ranks call it."""
    shard_map = build_shard_map(model, spec, mesh.grid)
    _check_hooks(model, shard_map)
    groups, device = RankGroups.build(mesh, spec.plan), mesh.world.device
    layouts = shard_map.layouts[groups.parts.rank]
    layout = Layout(tuple(unit for of_stage in layouts.values() for unit in of_stage.units))
    masters = MasterWeights(spec.plan, layout, device, spec.given.offload_dir)
    context = RankContext(spec.plan.placed_on(device.type), mesh, device, groups, masters)
    dropout = DropoutStream(first_heads(spec.heads, spec.plan.cols, mesh.coord[FEATURES]))
    of_rows = 1 if spec.given.preference is None else ROWS
    inputs = Inputs(model, spec.given.loss, context, spec.job.micro, spec.numbering, dropout, of_rows)
    units = {
        stage: [FlatParam(unit, context) for unit in of_stage.units] for stage, of_stage in layouts.items()
    }
    is_split = spec.stages.num_stages > 1
    dataflow = _dataflow_check(model, spec, context) if is_split else None
    foreign = [foreign_modules(model, spec.blocks, spec.stages, stage) for stage in layouts]
    on_other_stages = set.intersection(*foreign)
    if spec.given.weights is not None:  # which replace them
        on_other_stages |= parameter_only_modules(model) - with_adapters_inside(model)
    standalone = init_flat_params(model, units, context, spec.given.seed, on_other_stages)
    splitter = BackwardSplitter(sending_first(spec, context))
    stages = build_stages(model, spec, context, units, standalone, splitter)
    if spec.plan.cp > 1:
        dropout.install(block for stage in stages.values() for _, block in stage.module_part.blocks)
    if is_split:
        placed = {id(p) for of in units.values() for unit in of for p in unit.parameters.values()}
        release_unused(model, placed | {id(parameter) for parameter in standalone.values()})
        model.register_forward_pre_hook(_refuse_forward)
        StageModules.publish(
            [stage.module_part.modules for stage in stages.values() if stage.module_part.modules]
        )
    if is_split or max(context.groups.tp.size, context.groups.experts.size) > 1:
        refuse_shards_in_files(model)
    tied_reduce = TiedGradReduce(spec.stages.shared_units, spec.schedule.rank_of, mesh)
    sharded = ShardedModel({s: stage.sharded for s, stage in stages.items()}, groups, tied_reduce)
    optimizer = ShardedOptimizer(
        units, context, shard_map, spec.plan, spec.optimizers, masters, spec.given.offload_dir
    )
    modules = {s: stage.module_part.module for s, stage in stages.items()}
    outer = OuterOptimizer([*sharded.stages.values()], context, spec.job)
    return EngineParts(
        context,
        shard_map,
        layout,
        stages,
        sharded,
        optimizer,
        IslandState(outer),
        ShardedState(context, modules, units, optimizer, shard_map),
        ReplicaCheck(sharded.units, context, shard_map, outer.common),
        Pipeline(spec.schedule.rank_of, mesh, splitter),
        inputs,
        dataflow,
        spec.given.loss,
    )


def build_shard_map(model: nn.Module, spec: TrainingSpec, grid: Grid) -> ShardMap:
    """Return which rank holds which shards."""
    facts = unit_facts(model, spec.blocks, spec.group_of, spec.parts, spec.formats)
    coords, rank_of = TPCoord.all_coords(spec.tensor, spec.plan.ep), spec.schedule.rank_of
    return ShardMap.from_plan(model, facts, spec.stages, rank_of, grid, coords, spec.plan)


def _check_hooks(model: nn.Module, shard_map: ShardMap) -> None:
    """Raise ModelError for a hook of a parameter whose full gradient no rank computes."""
    hooked = {name for name, parameter in model.named_parameters() if has_hooks(parameter)}
    stages: dict[str, int] = {}
    for stage, _, by_rank in shard_map.units() if hooked else ():
        for shard in (shard for unit in by_rank.values() for shard in unit.params if shard.name in hooked):
            is_sharded = shard.boxes.shape != shard.full_shape
            if is_sharded or stages.setdefault(shard.name, stage) != stage:
                raise ModelError(
                    "a hook needs the full gradient of its parameter, which no rank has",
                    given=f"a hook on {shard.name}, "
                    + ("a shard on each rank" if is_sharded else "on two stages"),
                    expected="hooks on parameters that tp and ep do not divide, and that one stage uses",
                    hint="a plan without tp, ep or pp, or a module with the hook's effect in forward",
                )


def _dataflow_check(model: nn.Module, spec: TrainingSpec, context: RankContext) -> DataflowCheck:
    meta_model = copy_to_meta(model).to(context.precision.compute)
    if spec.given.is_reward:
        text_config(meta_model).pad_token_id = 0  # any, see models/reward.py
    return DataflowCheck(meta_model, spec.blocks, spec.stages, spec.given.example)


def build_stages(
    model: nn.Module,
    spec: TrainingSpec,
    context: RankContext,
    units: Mapping[int, Sequence[FlatParam]],
    standalone: Mapping[str, nn.Parameter],
    splitter: BackwardSplitter,
) -> dict[int, StageRunner]:
    """Build the stages of these units, whose weights are initialized. `standalone`: parameters outside
    units."""
    layouts = [unit.layout for of_stage in units.values() for unit in of_stage]
    column_reduce, in_flight = ColumnGradReduce(context.mesh, Layout(tuple(layouts))), InFlightReductions()
    # Keeps all parameters alive, so that ids stay unique until the last stage is bound.
    parameters = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in parameters.items()}
    device, dtype = context.device, context.precision.compute
    if spec.plan.cp > 1:
        dispatch_attention(model)
    last = spec.stages.num_stages - 1
    with_loss = last if last in units else min(units)  # shares the model's state: the loss may read it
    split = partial(split_stage, model, spec.blocks, spec.stages, device=device, dtype=dtype)
    parts = [split(stage, shares_state=stage == with_loss) for stage in units]
    runners = {}
    for stage, part in zip(units, parts, strict=True):
        owners = bind_flat_params(part.module, names, part.blocks, units[stage], standalone)
        head = HeadOutput()
        if stage == last and spec.given.is_reward:
            LastTokenScore().watch(part.module)
        head.watch(part.module)  # before ZeRO's hooks, which may free the weights
        sharded = ShardedStage(part.module, owners, context, column_reduce, in_flight)
        runners[stage] = _build_stage(part, spec, context, sharded, head, splitter, stage)
    return runners


def _build_stage(
    part: StageModule,
    spec: TrainingSpec,
    context: RankContext,
    sharded: ShardedStage,
    head: HeadOutput,
    splitter: BackwardSplitter,
    stage: int,
) -> StageRunner:
    """Apply the plan to the forwards of the stage and its blocks."""
    is_last = stage == spec.stages.num_stages - 1
    blocks, plan, mesh = [block for _, block in part.blocks], spec.plan, context.mesh
    grid = TensorGroups(mesh.group(HIDDEN), mesh.group(FEATURES))
    tensor = part.tp_plan(spec.tensor)
    part.shard_placeholders(spec.tensor, grid.row.rank, grid.col.rank)
    is_first, selective = mesh.world.rank == 0, plan.recompute == "selective"
    compiler = partial(compile_blocks, blocks, mesh.world.device, selective=selective, warns=is_first)
    later = plan.compile == "auto"
    options: dict[str, Any] = {"compile_blocks": partial(compiler, later=later)} if plan.compile else {}
    adapt_parameters(part.module)
    distribute_experts(part.module, spec.experts, tensor, mesh, plan.capacity)
    products = LayerProducts.build(plan, spec.float8)
    products.convert(part.module, tensor)
    tokens = None
    if plan.sp:
        tokens = SequenceShard(
            grid.col,
            tuple(part.earlier.values()),
            is_sent=not is_last,
            has_blocks=bool(blocks),
            begins_with_input=part.begins_with_input,
        )
    options |= {"sequence_shard": tokens, "products": products, "head": head}
    apply_tp_plan(part.module, tensor, grid, part.blocks, **options)
    install_rng_streams(part.module, blocks, tensor, mesh.coord, sequence=plan.sp, device=mesh.world.device)
    if plan.sync_batchnorm:
        summed = Roles.from_plan(plan).gradient_sum()
        sync_batch_norms(part.module, mesh.group(*summed, channel="statistics"))
    adds_products = mesh.world.device.type == "cpu" and context.precision.compute == context.grad_buffer_dtype
    is_split = spec.schedule.split or stage in splitter.sends_first
    if is_split or (spec.stages.num_stages > 1 and adds_products):
        split_linears(blocks, splitter)
    if not (plan.compile and selective):  # which recomputes inside of compiled code
        recompute_blocks(blocks, plan.recompute)
    columns, groups = tensor.logit_columns, context.groups
    divide = partial(own_tokens, sequence=groups.sequence, method=plan.cp_method, numbering=spec.numbering)
    data_ranks, counts = groups.dense.gradient_sum, not (spec.job.compile and selective)
    routers = StageRouters(part.module, spec.routers, data_ranks, mesh.world.device, counts=counts)
    if not spec.job.compile:  # in whose code there are no modes
        take_choices(part.module, spec.routers.layers)
    terms: dict[str, Any] = {**spec.given.loss_terms}
    if spec.given.preference is not None:
        terms["pairs"] = PairLoss(spec.given.preference, groups, mesh.world.device)
    of_loss = (columns, grid.col, groups.tp, spec.given.loss, terms)
    return StageRunner(part, sharded, head, *of_loss, tokens, divide, routers, is_last=is_last)


def sending_first(spec: TrainingSpec, context: RankContext) -> Set[int]:
    """The stages of [Note: gradients that are sent first] in pipeline/executor.py: on a CPU, as on GPUs the
    layers' Python is not measured."""
    plan, rank_of = spec.plan, spec.schedule.rank_of
    if plan.recompute != "none" or plan.compile or context.mesh.world.device.type != "cpu":
        return frozenset()
    return {stage for stage, rank in rank_of.items() if stage and rank_of[stage - 1] != rank}


def _refuse_forward(*_: object) -> None:
    raise ModelError(
        "the model is split into stages: no rank can run all of it",
        given="a call of the model",
        expected="a call that all ranks make, each with its stages",
        hint="engine.step, engine.evaluate, or engine.outputs for what the model returns",
    )
