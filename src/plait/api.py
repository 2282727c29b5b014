"""From what a user asks for to an engine: everything is checked before the first weight is made."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait import models
from plait.checkpoint import HuggingFaceFiles, Reader
from plait.comm import Mesh, World, connect, raise_on_all
from plait.engine.build import TrainingSpec
from plait.engine.engine import Engine
from plait.engine.loss import Loss
from plait.engine.self_check import SelfCheck
from plait.errors import CheckpointError, ConfigError, ModelError, PlanError, ScheduleError
from plait.models import Blocks, Chain, blocks_of, plan_stages
from plait.optim import DEFAULT_GROUPS, LossScaling
from plait.plan import Grid, Plan, StageAssignment, TPPlan, compile_conflict, single_stage
from plait.plan.schedule import Schedule, check
from plait.plan.schedule.load import load_schedule


def parallelize(
    model: nn.Module | Sequence[nn.Module],
    plan: Plan | str,
    *,
    optimizer: type[torch.optim.Optimizer] = torch.optim.AdamW,
    optimizer_args: Mapping[str, Any] | None = None,
    param_groups: Iterable[Any] | None = None,
    clip_norm: float | None = None,
    clip_value: float | None = None,
    loss: Loss | None = None,
    loss_scaling: LossScaling | None = None,
    blocks: Blocks | None = None,
    offload_dir: str | Path | None = None,
    tensor_plan: Mapping[str, str] | None = None,
    probe: bool | Mapping[str, Tensor] = False,
    seed: int = 0,
    weights: str | Path | None = None,
    world: World | None = None,
) -> Engine:
    """Makes `model` train under `plan` on the ranks of this job (one, when started alone).

    model           a Hugging Face causal LM or any nn.Module, unmodified: with weights (rank 0's are taken)
                    or on meta, to get initial ones that follow from `seed` and names alone, under every
                    plan. Its parameters become new objects. Or a list of modules: see `Chain`
    optimizer       an element-wise class of torch.optim; fused where it can be
    param_groups    as torch takes them: parameters, or dicts of them. None: norms and biases do not decay
    clip_norm       of the gradient's global 2-norm; clip_value: of each of its elements
    loss            (outputs, micro-batch) -> (summed loss, number of targets); None: the next token's cross
                    entropy. The model is given the micro-batch's entries by name, without `labels`
    loss_scaling    how the loss scale of precision=fp16 moves; offload_dir: the folder of offload=disk
    blocks          modules, or their classes. None: children of the largest ModuleList or Sequential
    tensor_plan     how `tp` cuts layers, as {"blocks.*.fc1": "colwise"}; None: what is known of the model
    weights         a Hugging Face directory, of which each rank reads its part; for a model on meta
    probe           compare gradients with the whole model's on rank 0, of random tokens or of a batch

    A parameter that a step does not use counts as one with a zero gradient: its moments and weight decay go
    on. Buffers that forward changes follow rank 0's. Raises a PlaitError.
    """
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    model = model if isinstance(model, nn.Module) else Chain(model)
    check_update(optimizer, clip_norm, clip_value)
    world = connect() if world is None else world
    plan = _resolve(world, plan, loss_scaling)
    found = find_blocks(model, plan, blocks)
    first = None if weights is None else _weights_reader(model, Path(weights), world)
    to_probe = SelfCheck.build(model, probe, plan, seed)  # before the model is cut
    how = replace(
        training_spec(model, plan, found, param_groups=param_groups, tensor_plan=tensor_plan),
        optimizer=optimizer,
        arguments=optimizer_args or {},
        clip_norm=clip_norm,
        clip_value=clip_value,
        loss=loss,
        loss_scaling=_loss_scaling(plan, loss_scaling),
        seed=seed,
        draws=first is None,
        offload_dir=None if offload_dir is None else Path(offload_dir),
    )
    engine = Engine(
        model if model.training else model.train(), plan, how, Mesh(world, Grid.from_plan(plan)), found
    )
    return _initialize(engine, first, to_probe, loss)


def _initialize(
    engine: Engine, first: Reader | None, to_probe: SelfCheck | None, loss: Loss | None
) -> Engine:
    """With the weights that it begins with, and probed."""
    if first is not None:
        with first:
            engine.load_from(first, weights_only=True)
    return engine if to_probe is None else to_probe.run(engine, loss)


def _weights_reader(model: nn.Module, folder: Path, world: World) -> Reader:
    """What reads the first weights. Raises ModelError for a model that has some, CheckpointError on all ranks
    for files that one of them cannot read."""
    if not all(parameter.is_meta for parameter in model.parameters()):
        raise ModelError("the model has weights of its own", given=f"weights={folder}", expected="it on meta")
    found: Reader | None = None
    problem = None
    try:
        found = HuggingFaceFiles.open(folder).reader(model)
    except CheckpointError as error:
        problem = error
    raise_on_all(problem, world.group, world.device)
    assert found is not None, "a reader, or a reason that there is none"
    return found


def training_spec(
    model: nn.Module,
    plan: Plan,
    blocks: list[tuple[str, nn.Module]],
    *,
    param_groups: Iterable[Any] | None = None,
    tensor_plan: Mapping[str, str] | None = None,
) -> TrainingSpec:
    """How the model is cut; of its update, which groups there are. Needs no rank. Raises PlanError,
    ModelError or ConfigError."""
    schedule, groups = _schedule(plan), _groups(param_groups)
    return TrainingSpec(
        groups=_options(groups),
        group_of=_group_of(model, groups),
        tensor=_tensor_plan(model, plan, blocks, tensor_plan),
        stages=_stages(model, plan, blocks, schedule),
        schedule=schedule,
    )


def _loss_scaling(plan: Plan, given: LossScaling | None) -> LossScaling | None:
    return (given or LossScaling()) if plan.precision == "fp16" else None


def check_update(optimizer: object, norm: float | None = None, value: float | None = None) -> None:
    """Raises ConfigError for an optimizer that is no class, and for limits of the gradient that are none."""
    if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
        raise ConfigError(
            "the optimizer is given by its class, which is built over the ranges that each rank owns",
            given=f"{optimizer if isinstance(optimizer, type) else type(optimizer).__name__}",
            hint="optimizer=torch.optim.AdamW, optimizer_args={'lr': 1e-3}",
        )
    for name, limit in (("clip_norm", norm), ("clip_value", value)):
        if limit is not None and not (isinstance(limit, int | float) and limit > 0):
            raise ConfigError(f"{name} is not a limit", given=f"{name}={limit}", expected="above 0, or None")
    if norm is not None and value is not None:
        raise ConfigError(
            "gradients are clipped by their norm or by value",
            given=f"clip_norm={norm} and clip_value={value}",
            expected="one of the two",
        )


def _resolve(world: World, plan: Plan, scaling: LossScaling | None) -> Plan:
    """The plan that runs on the world's ranks, if it fits them and their devices."""
    plan = plan.resolved(world.size)
    plan.check_ranks(world.size)
    _check_fp16(plan, scaling, world.device)
    check_device(plan, world.device)
    return plan


def _check_fp16(plan: Plan, scaling: LossScaling | None, device: torch.device) -> None:
    """Raises ConfigError for a loss scale without fp16, PlanError where the device cannot train in it."""
    if plan.precision != "fp16":
        if scaling is not None:
            raise ConfigError(
                "a loss scale is for fp16, whose gradients underflow", given=f"precision={plan.precision}"
            )
        return
    try:
        x = torch.ones(2, 1, 8, 8, dtype=torch.float16, device=device, requires_grad=True)
        nn.functional.scaled_dot_product_attention(x @ x, x, x, is_causal=True).sum().backward()
    except RuntimeError as error:
        raise PlanError(
            "this device does not compute in fp16",
            given=f"precision=fp16 on {device}: {str(error).splitlines()[0]}",
            hint="precision=bf16",
        ) from error


def check_shardable(
    model: nn.Module, plan: Plan, given: Mapping[str, str] | None = None, *, blocks: Blocks | None = None
) -> None:
    """Raises PlanError or ModelError unless the model can be cut into the plan's stages, and its layers on
    the plan's grid; needs no rank."""
    training_spec(model, plan, find_blocks(model, plan, blocks), tensor_plan=given)


def find_blocks(model: nn.Module, plan: Plan, given: Blocks | None) -> list[tuple[str, nn.Module]]:
    """The model's blocks. Raises PlanError where the plan asks for something of each, and there is none."""
    blocks = blocks_of(model, given)
    asks = {f"recompute={plan.recompute}": plan.recompute != "none", "compile=true": plan.compile}
    for words, is_asked in asks.items():
        if is_asked and not blocks:
            raise PlanError(
                f"{words} needs the model's repeated blocks, and none were found",
                expected="an nn.ModuleList or nn.Sequential of blocks",
                hint=f"no {words.partition('=')[0]}",
            )
    return blocks


def _schedule(plan: Plan) -> Schedule:
    """The plan's schedule, proved to run. Raises ScheduleError."""
    schedule = load_schedule(plan.schedule, plan.pp, plan.micro, plan.chunks)
    check(schedule)
    if not schedule.trains:
        raise ScheduleError("a schedule of forwards alone trains nothing", given=f"schedule={plan.schedule}")
    if schedule.split and plan.compile:  # of a file, which the plan does not know
        raise compile_conflict(f"schedule={plan.schedule}")
    return schedule


def _stages(
    model: nn.Module, plan: Plan, blocks: list[tuple[str, nn.Module]], schedule: Schedule
) -> StageAssignment:
    if schedule.num_stages == 1 and plan.blocks_per_stage is None:
        tensors = (*model.named_parameters(), *model.named_buffers(remove_duplicate=False))
        return single_stage((name for name, _ in tensors), len(blocks))
    ranks = [schedule.rank_of[stage] for stage in range(schedule.num_stages)]
    return plan_stages(model, blocks, schedule.num_stages, given=plan.blocks_per_stage, ranks=ranks)


def _tensor_plan(
    model: nn.Module, plan: Plan, blocks: list[tuple[str, nn.Module]], given: Mapping[str, str] | None
) -> TPPlan:
    """A lone rank cuts nothing, so any model will do; what a user says of it is checked all the same."""
    if plan.rows == plan.cols == 1 and given is None:
        return TPPlan(1, 1)
    return models.tensor_plan(model, plan.rows, plan.cols, sequence=plan.sp, blocks=blocks, given=given)


def check_device(plan: Plan, device: torch.device) -> None:
    """Raises PlanError for what ranks on such a device cannot do, or have no use for."""
    if plan.algorithm != "auto" and device.type != "cpu":
        raise PlanError(
            "algorithms by name are for CPU ranks: NCCL has its own, and chooses",
            given=f"algorithm={plan.algorithm} on {device}",
            hint="algorithm=auto; NCCL_ALGO=Ring or NCCL_ALGO=Tree in the environment",
        )
    if plan.offload == "disk" and device.type != "cpu":  # no optimizer steps gradients that are elsewhere
        raise PlanError(
            "offload=disk is for ranks that compute on the CPU",
            given=f"{plan} on {device}",
            hint="offload=cpu, optim_dtype=bf16, or a higher zero over more ranks",
        )


def _groups(given: Iterable[Any] | None) -> list[Mapping[str, Any]] | None:
    """As dicts: parameters without one are a group that has no options of its own."""
    found = None if given is None else list(given)
    if found is None or all(isinstance(entry, Mapping) for entry in found):
        return found
    if any(isinstance(entry, Mapping) for entry in found):
        raise ConfigError(
            "param_groups are parameters or dicts of them, not both",
            given=", ".join(sorted({type(entry).__name__ for entry in found})),
            expected="model.parameters(), or [{'params': some}, {'params': others, 'weight_decay': 0.0}]",
        )
    return [{"params": found}]


def _options(groups: Sequence[Mapping[str, Any]] | None) -> Sequence[Mapping[str, Any]]:
    if groups is None:
        return DEFAULT_GROUPS
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def _group_of(model: nn.Module, groups: Sequence[Mapping[str, Any]] | None) -> dict[str, int] | None:
    """The index of each trainable parameter's group. Raises ConfigError unless each is in exactly one."""
    if groups is None:
        return None
    places: dict[int, int] = {}
    for index, group in enumerate(groups):
        params = group.get("params", ())
        for entry in [params] if isinstance(params, Tensor) else params:
            parameter = entry[1] if isinstance(entry, tuple) else entry  # torch takes (name, parameter) too
            if places.setdefault(id(parameter), index) != index:
                raise ConfigError(
                    "a parameter is in two of param_groups", given=f"{places[id(parameter)]}, {index}"
                )
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    strange = places.keys() - {id(p) for p in model.parameters()}
    missing = [name for name, p in named.items() if id(p) not in places]
    if strange or missing:
        raise ConfigError(
            "param_groups do not hold the model's trainable parameters",
            given=f"none of them holds {missing[0]}"
            if missing
            else f"{len(strange)} that are not the model's",
            expected="every parameter that requires a gradient, in one group: model.parameters()",
        )
    return {name: places[id(p)] for name, p in named.items()}
