"""What an engine is made of: a model's stages on this rank, their units, their optimizer, their executor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from plait.comm import Mesh
from plait.errors import ModelError
from plait.forward import Forward
from plait.models import Loss, StageModule, cut_stage, foreign_modules, meta_twin, unit_facts
from plait.optim import LossScaling
from plait.parallel import (
    DataGroups,
    EngineState,
    Held,
    Holdings,
    Masters,
    Owned,
    PartialSums,
    Precision,
    Replicas,
    SharedSums,
    UnderWay,
    Unit,
    Zero,
    bring_to_life,
    compile_blocks,
    cut_of,
    first_weights,
    let_go,
    recompute_blocks,
)
from plait.parallel.pipeline import Halves, Pipeline, split_linears
from plait.parallel.tensor import TensorGroups, cut_layers, zone_randomness
from plait.plan import Layout, Place, Plan, StageCut, TensorPlan
from plait.plan.schedule import Schedule


@dataclass(frozen=True)
class Training:
    """How a model is cut and its weights are updated: what `parallelize` was asked for."""

    optimizer: type[torch.optim.Optimizer]
    arguments: Mapping[str, Any]
    groups: Sequence[Mapping[str, Any]]  # options of each optimizer group
    group_of: Mapping[str, int] | None  # by a parameter's name; None: whether weight decay applies to it
    clip_norm: float | None
    clip_value: float | None
    loss: Loss | None
    loss_scaling: LossScaling | None
    seed: int
    offload_dir: Path | None
    tensor: TensorPlan
    stages: StageCut
    schedule: Schedule


@dataclass(frozen=True)
class Parts:
    """Of one rank."""

    groups: DataGroups
    holdings: Holdings
    layout: Layout  # of all that this rank holds
    stages: Mapping[int, Forward]
    held: Held
    owned: Owned
    state: EngineState
    replicas: Replicas
    pipeline: Pipeline
    twin: nn.Module | None  # on meta, of the whole model, where it is in stages

    @classmethod
    def of(
        cls, model: nn.Module, plan: Plan, how: Training, mesh: Mesh, blocks: list[tuple[str, nn.Module]]
    ) -> "Parts":
        """Brings the model to life, in place where it is one stage. All ranks call it."""
        groups, device = DataGroups.of(mesh, plan), mesh.world.device
        facts = unit_facts(model, blocks, how.group_of)
        rank_of = how.schedule.rank_of
        holdings = Holdings.of(model, facts, how.stages, rank_of, mesh.grid, Place.all_of(how.tensor), plan)
        if not holdings.num_parameters:
            raise ModelError("the model has nothing to train", given="no parameter that requires a gradient")
        layouts = holdings.layouts[groups.model.rank]
        layout = Layout(tuple(unit for of_stage in layouts.values() for unit in of_stage.units))
        masters = Masters(plan, layout, device, how.offload_dir)
        cut = cut_of(plan, groups, device, masters)
        units = {stage: [Unit(unit, cut) for unit in found.units] for stage, found in layouts.items()}
        twin = meta_twin(model).to(cut.compute) if how.stages.num_stages > 1 else None
        foreign = [foreign_modules(model, blocks, how.stages, stage) for stage in layouts]
        elsewhere = set.intersection(*foreign)
        loose = first_weights(model, units, groups, plan, device, how.seed, elsewhere)
        partial, under_way = PartialSums(mesh, layout), UnderWay()
        stages, halves = {}, Halves()
        # All alive, and so with identities of their own, until the last stage is bound.
        whole = dict(model.named_parameters())
        names = {id(parameter): name for name, parameter in whole.items()}
        dtype = Precision.of(plan).compute
        parts = [cut_stage(model, blocks, how.stages, s, device=device, dtype=dtype) for s in layouts]
        for stage, part in zip(layouts, parts, strict=True):
            of_stage = (part.blocks, units[stage], loose)
            zero = bring_to_life(part.module, names, *of_stage, plan, groups, partial, under_way, cut)
            is_last = stage == how.stages.num_stages - 1
            stages[stage] = _forward_of(part, zero, plan, how, mesh, halves, is_last=is_last)
        if how.stages.num_stages > 1:
            placed = {id(p) for of in units.values() for unit in of for p in unit.parameters.values()}
            let_go(model, placed | {id(parameter) for parameter in loose.values()})
            model.register_forward_pre_hook(_refuse_to_run)
        held = Held(
            {stage: forward.zero for stage, forward in stages.items()},
            groups,
            SharedSums(how.stages.shared_units, rank_of, mesh),
        )
        owned = Owned(held.trained, plan, how.optimizer, how.arguments, how.groups, masters, how.offload_dir)
        state = EngineState(
            {stage: forward.part.module for stage, forward in stages.items()},
            units,
            owned,
            cut,
            groups.gathers,
            groups.model,
            holdings,
        )
        replicas = Replicas(held.units, cut, holdings, groups, mesh)
        pipeline = Pipeline(rank_of, mesh, halves)
        return cls(groups, holdings, layout, stages, held, owned, state, replicas, pipeline, twin)


def _refuse_to_run(*_: object) -> None:
    raise ModelError(
        "the model is in stages, of which no rank has all",
        given="a call of the model",
        expected="engine.step, engine.evaluate, or engine.outputs for what the model returns",
    )


def _forward_of(
    part: StageModule, zero: Zero, plan: Plan, how: Training, mesh: Mesh, halves: Halves, *, is_last: bool
) -> Forward:
    """Gives the stage's blocks the forwards that the plan asks for."""
    found = [block for _, block in part.blocks]
    grid = TensorGroups(mesh.group("row"), mesh.group("col"))
    tensor = part.tensor_plan(how.tensor, grid.row.rank, grid.col.rank)
    cut = cut_layers(part.module, tensor, grid, part.blocks, sequence=plan.sp)
    zone_randomness(
        part.module,
        found,
        tensor,
        sequence=plan.sp,
        device=mesh.world.device,
        row=grid.row.rank,
        col=grid.col.rank,
    )
    if how.schedule.split:
        split_linears(found, halves)
    recompute_blocks(found, plan.recompute)
    if plan.compile:
        compile_blocks(found, mesh.world.device)
    return Forward(part, zero, cut, tensor, grid.col, how.loss, is_last=is_last)
