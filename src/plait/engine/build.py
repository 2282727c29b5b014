"""What an engine is made of: a model's stages on this rank, their units, their optimizer, their executor."""

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
from plait.models import StageModule, copy_to_meta, foreign_modules, split_stage, unit_facts, weights_alone
from plait.optim import LossScaling
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
from plait.parallel.tensor import TensorGroups, apply_tp_plan, zone_randomness
from plait.parallel.zero.flat_param import FlatParamConfig
from plait.plan import Layout, MemoryUse, Plan, StageAssignment, TPCoord, TPPlan
from plait.plan.schedule import Schedule


@dataclass(frozen=True)
class TrainingSpec:
    """How a model is cut and its weights are updated: what `parallelize` was asked for."""

    groups: Sequence[Mapping[str, Any]]  # options of each optimizer group
    group_of: Mapping[str, int] | None  # by a parameter's name; None: whether weight decay applies to it
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
    draws: bool = True  # first weights, as far as they can be done without: others will come
    offload_dir: Path | None = None


@dataclass(frozen=True)
class StageBuilder:
    """A model that is to be cut, with all that says how."""

    model: nn.Module
    plan: Plan
    how: TrainingSpec
    mesh: Mesh
    blocks: Sequence[tuple[str, nn.Module]]

    def shard_map(self) -> ShardMap:
        """Raises ModelError for a model without a parameter that trains."""
        how, plan = self.how, self.plan
        facts = unit_facts(self.model, self.blocks, how.group_of)
        places, rank_of = TPCoord.all_coords(how.tensor), how.schedule.rank_of
        found = ShardMap.of(self.model, facts, how.stages, rank_of, self.mesh.grid, places, plan)
        if not found.num_parameters:
            raise ModelError("the model has nothing to train", given="no parameter that requires a gradient")
        return found

    def stages(
        self,
        units: Mapping[int, Sequence[FlatParam]],
        loose: Mapping[str, nn.Parameter],
        groups: DataGroups,
        partial: ReplicatedGradReduce,
        cut: FlatParamConfig,
        halves: BackwardSplitter,
    ) -> dict[int, StageRunner]:
        """The stages of these units, which have their first weights. `loose`: what lies in none."""
        model, plan, stages = self.model, self.plan, self.how.stages
        under_way = InFlightReductions()
        # All alive, and so with identities of their own, until the last stage is bound.
        whole = dict(model.named_parameters())
        names = {id(parameter): name for name, parameter in whole.items()}
        dtype = Precision.of(plan).compute
        parts = [split_stage(model, self.blocks, stages, s, device=cut.device, dtype=dtype) for s in units]
        found = {}
        for stage, part in zip(units, parts, strict=True):
            of_stage = (part.blocks, units[stage], loose)
            zero = bind_flat_params(part.module, names, *of_stage, plan, groups, partial, under_way, cut)
            found[stage] = self._forward_of(part, zero, halves, is_last=stage == stages.num_stages - 1)
        return found

    def _forward_of(
        self, part: StageModule, zero: ShardedStage, halves: BackwardSplitter, *, is_last: bool
    ) -> StageRunner:
        """Gives the stage's blocks the forwards that the plan asks for."""
        found, plan, mesh = [block for _, block in part.blocks], self.plan, self.mesh
        grid = TensorGroups(mesh.group("row"), mesh.group("col"))
        tensor = part.tensor_plan(self.how.tensor)
        part.shard_placeholders(self.how.tensor, grid.row.rank, grid.col.rank)
        cut = apply_tp_plan(part.module, tensor, grid, part.blocks, sequence=plan.sp)
        zone_randomness(
            part.module,
            found,
            tensor,
            sequence=plan.sp,
            device=mesh.world.device,
            row=grid.row.rank,
            col=grid.col.rank,
        )
        if self.how.schedule.split:
            split_linears(found, halves)
        recompute_blocks(found, plan.recompute)
        if plan.compile:
            compile_blocks(found, mesh.world.device)
        return StageRunner(part, zero, cut, tensor, grid.col, self.how.loss, is_last=is_last)


@dataclass(frozen=True)
class EngineParts:
    """Of one rank."""

    groups: DataGroups
    shard_map: ShardMap
    layout: Layout  # of all that this rank holds
    stages: Mapping[int, StageRunner]
    held: ShardedModel
    owned: ShardedOptimizer
    state: ShardedState
    replicas: ReplicaCheck
    pipeline: Pipeline
    twin: nn.Module | None  # on meta, of the whole model, where it is in stages

    @classmethod
    def build(
        cls, model: nn.Module, plan: Plan, how: TrainingSpec, mesh: Mesh, blocks: list[tuple[str, nn.Module]]
    ) -> "EngineParts":
        """Brings the model to life, in place where it is one stage. All ranks call it."""
        groups, device = DataGroups.of(mesh, plan), mesh.world.device
        making = StageBuilder(model, plan, how, mesh, blocks)
        shard_map = making.shard_map()
        layouts = shard_map.layouts[groups.model.rank]
        layout = Layout(tuple(unit for of_stage in layouts.values() for unit in of_stage.units))
        masters = MasterWeights(plan, layout, device, how.offload_dir)
        cut = flat_param_config(plan, groups, device, masters)
        units = {stage: [FlatParam(unit, cut) for unit in found.units] for stage, found in layouts.items()}
        twin = copy_to_meta(model).to(cut.compute) if how.stages.num_stages > 1 else None
        foreign = [foreign_modules(model, blocks, how.stages, stage) for stage in layouts]
        elsewhere = set.intersection(*foreign) | (set() if how.draws else weights_alone(model))
        loose = init_flat_params(model, units, groups, plan, device, how.seed, elsewhere)
        halves = BackwardSplitter()
        stages = making.stages(units, loose, groups, ReplicatedGradReduce(mesh, layout), cut, halves)
        if how.stages.num_stages > 1:
            placed = {id(p) for of in units.values() for unit in of for p in unit.parameters.values()}
            release_unused(model, placed | {id(parameter) for parameter in loose.values()})
            model.register_forward_pre_hook(_refuse_to_run)
        held = ShardedModel(
            {stage: forward.zero for stage, forward in stages.items()},
            groups,
            TiedGradReduce(how.stages.shared_units, how.schedule.rank_of, mesh),
        )
        owned = ShardedOptimizer(
            held.trained, plan, how.optimizer, how.arguments, how.groups, masters, how.offload_dir
        )
        state = ShardedState(
            {stage: forward.part.module for stage, forward in stages.items()},
            units,
            owned,
            cut,
            groups.gathers,
            groups.model,
            groups.replicate,
            shard_map,
        )
        replicas = ReplicaCheck(held.units, cut, shard_map, groups, mesh)
        pipeline = Pipeline(how.schedule.rank_of, mesh, halves)
        return cls(groups, shard_map, layout, stages, held, owned, state, replicas, pipeline, twin)

    def estimated_bytes(self, plan: Plan, activation_bytes: int | None) -> MemoryUse:
        """What this rank will hold."""
        return estimated_bytes(
            self.layout,
            plan,
            self.groups,
            states_per_element=self.owned.states_per_element,
            scratch_bytes=self.held.scratch_bytes,
            activation_bytes=activation_bytes,
        )


def _refuse_to_run(*_: object) -> None:
    raise ModelError(
        "the model is in stages, of which no rank has all",
        given="a call of the model",
        expected="engine.step, engine.evaluate, or engine.outputs for what the model returns",
    )
