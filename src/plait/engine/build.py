"""Build the parts of an engine: the stages of this rank, their units, optimizer and pipeline."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plait.comm import Mesh
from plait.engine.loss import Loss
from plait.engine.stage import StageRunner
from plait.errors import ModelError
from plait.models import (
    StageModule,
    copy_to_meta,
    foreign_modules,
    split_stage,
    unit_facts,
)
from plait.models.init_weights import parameter_only_modules
from plait.parallel import (
    DataGroups,
    FlatParam,
    InFlightReductions,
    MasterWeights,
    Precision,
    ReplicaCheck,
    ReplicatedGradReduce,
    ShardedModel,
    ShardedOptimizer,
    ShardedStage,
    ShardedState,
    ShardMap,
    TiedGradReduce,
    bind_flat_params,
    compile_blocks,
    estimated_bytes,
    flat_param_config,
    init_flat_params,
    recompute_blocks,
    release_unused,
)
from plait.parallel.pipeline import BackwardSplitter, Pipeline, split_linears
from plait.parallel.tensor import TensorGroups, apply_tp_plan
from plait.parallel.tensor.rng import install_rng_streams
from plait.parallel.zero.flat_param import FlatParamConfig
from plait.plan import Layout, MemoryUse, Plan, StageAssignment, TPCoord, TPPlan
from plait.plan.loss_scaling import LossScaling
from plait.plan.schedule import Schedule


@dataclass(frozen=True)
class TrainingSpec:
    """How a model is sharded and its weights are updated: the arguments of `parallelize`."""

    groups: Sequence[Mapping[str, Any]]  # options of each optimizer group
    group_of: Mapping[str, int] | None  # by parameter name; None: grouped by whether weight decay applies
    tensor: TPPlan
    stages: StageAssignment
    schedule: Schedule
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW
    arguments: Mapping[str, Any] = field(default_factory=dict)
    clip_norm: float | None = None
    clip_value: float | None = None
    loss: Loss | None = None
    loss_scaling: LossScaling | None = None
    seed: int = 0
    draws: bool = True  # initialize weights; False: only those that `weights` will not replace
    offload_dir: Path | None = None


@dataclass(frozen=True)
class StageBuilder:
    """Builds the stages of this rank from an unsharded model."""

    model: nn.Module
    plan: Plan
    spec: TrainingSpec
    mesh: Mesh
    blocks: Sequence[tuple[str, nn.Module]]

    def shard_map(self) -> ShardMap:
        """Return which rank holds which shards. Raises ModelError for a model without trainable
        parameters."""
        spec, plan = self.spec, self.plan
        facts = unit_facts(self.model, self.blocks, spec.group_of)
        coords, rank_of = TPCoord.all_coords(spec.tensor), spec.schedule.rank_of
        shard_map = ShardMap.from_plan(self.model, facts, spec.stages, rank_of, self.mesh.grid, coords, plan)
        if not shard_map.num_parameters:
            raise ModelError(
                "the model has no trainable parameters", given="no parameter requires a gradient"
            )
        return shard_map

    def stages(
        self,
        units: Mapping[int, Sequence[FlatParam]],
        standalone: Mapping[str, nn.Parameter],
        groups: DataGroups,
        partial: ReplicatedGradReduce,
        config: FlatParamConfig,
        splitter: BackwardSplitter,
    ) -> dict[int, StageRunner]:
        """Build the stages of these units, whose weights are initialized. `standalone`: parameters outside
        units."""
        model, plan, stages = self.model, self.plan, self.spec.stages
        in_flight = InFlightReductions()
        # Keeps all parameters alive, so that ids stay unique until the last stage is bound.
        parameters = dict(model.named_parameters())
        names = {id(parameter): name for name, parameter in parameters.items()}
        dtype = Precision.from_plan(plan).compute
        parts = [split_stage(model, self.blocks, stages, s, device=config.device, dtype=dtype) for s in units]
        runners = {}
        for stage, part in zip(units, parts, strict=True):
            of_stage = (part.blocks, units[stage], standalone)
            zero = bind_flat_params(part.module, names, *of_stage, plan, groups, partial, in_flight, config)
            runners[stage] = self._stage_runner(part, zero, splitter, is_last=stage == stages.num_stages - 1)
        return runners

    def _stage_runner(
        self, part: StageModule, zero: ShardedStage, splitter: BackwardSplitter, *, is_last: bool
    ) -> StageRunner:
        """Apply the plan to the forwards of the stage and its blocks."""
        blocks, plan, mesh = [block for _, block in part.blocks], self.plan, self.mesh
        grid = TensorGroups(mesh.group("row"), mesh.group("col"))
        tensor = part.tp_plan(self.spec.tensor)
        part.shard_placeholders(self.spec.tensor, grid.row.rank, grid.col.rank)
        layers = apply_tp_plan(part.module, tensor, grid, part.blocks, sequence=plan.sp)
        install_rng_streams(
            part.module,
            blocks,
            tensor,
            sequence=plan.sp,
            device=mesh.world.device,
            row=grid.row.rank,
            col=grid.col.rank,
        )
        if self.spec.schedule.split:
            split_linears(blocks, splitter)
        recompute_blocks(blocks, plan.recompute)
        if plan.compile:
            compile_blocks(blocks, mesh.world.device)
        return StageRunner(part, zero, layers, tensor, grid.col, self.spec.loss, is_last=is_last)


@dataclass(frozen=True)
class EngineParts:
    """The parts of an engine on one rank."""

    groups: DataGroups
    shard_map: ShardMap
    layout: Layout  # of everything that this rank holds
    stages: Mapping[int, StageRunner]
    sharded: ShardedModel
    optimizer: ShardedOptimizer
    state: ShardedState
    replicas: ReplicaCheck
    pipeline: Pipeline
    meta_model: nn.Module | None  # the full model on meta, if it is split into stages

    @classmethod
    def build(
        cls, model: nn.Module, plan: Plan, spec: TrainingSpec, mesh: Mesh, blocks: list[tuple[str, nn.Module]]
    ) -> "EngineParts":
        """Build the parts and materialize the model, in place with one stage. All ranks call it."""
        groups, device = DataGroups.build(mesh, plan), mesh.world.device
        builder = StageBuilder(model, plan, spec, mesh, blocks)
        shard_map = builder.shard_map()
        layouts = shard_map.layouts[groups.model.rank]
        layout = Layout(tuple(unit for of_stage in layouts.values() for unit in of_stage.units))
        masters = MasterWeights(plan, layout, device, spec.offload_dir)
        config = flat_param_config(plan, groups, device, masters)
        units = {
            stage: [FlatParam(unit, config) for unit in of_stage.units] for stage, of_stage in layouts.items()
        }
        meta_model = copy_to_meta(model).to(config.compute_dtype) if spec.stages.num_stages > 1 else None
        foreign = [foreign_modules(model, blocks, spec.stages, stage) for stage in layouts]
        elsewhere = set.intersection(*foreign) | (set() if spec.draws else parameter_only_modules(model))
        standalone = init_flat_params(model, units, groups, plan, device, spec.seed, elsewhere)
        splitter = BackwardSplitter()
        stages = builder.stages(
            units, standalone, groups, ReplicatedGradReduce(mesh, layout), config, splitter
        )
        if spec.stages.num_stages > 1:
            placed = {id(p) for of in units.values() for unit in of for p in unit.parameters.values()}
            release_unused(model, placed | {id(parameter) for parameter in standalone.values()})
            model.register_forward_pre_hook(_refuse_forward)
        sharded = ShardedModel(
            {stage: forward.zero for stage, forward in stages.items()},
            groups,
            TiedGradReduce(spec.stages.shared_units, spec.schedule.rank_of, mesh),
        )
        optimizer = ShardedOptimizer(
            sharded.trained, plan, spec.optimizer, spec.arguments, spec.groups, masters, spec.offload_dir
        )
        state = ShardedState(
            {stage: forward.part.module for stage, forward in stages.items()},
            units,
            optimizer,
            config,
            groups.all_gather,
            groups.model,
            groups.replicate,
            shard_map,
        )
        replicas = ReplicaCheck(sharded.units, config, shard_map, groups, mesh)
        pipeline = Pipeline(spec.schedule.rank_of, mesh, splitter)
        return cls(
            groups, shard_map, layout, stages, sharded, optimizer, state, replicas, pipeline, meta_model
        )

    def estimated_bytes(self, plan: Plan, activation_bytes: int | None) -> MemoryUse:
        """Estimate the bytes of this rank."""
        return estimated_bytes(
            self.layout,
            plan,
            self.groups,
            states_per_element=self.optimizer.states_per_element,
            scratch_bytes=self.sharded.scratch_bytes,
            activation_bytes=activation_bytes,
        )


def _refuse_forward(*_: object) -> None:
    raise ModelError(
        "the model is split into stages: no rank can run all of it",
        given="a call of the model",
        expected="engine.step, engine.evaluate, or engine.outputs for what the model returns",
    )
