"""`parallelize`: from a model and a plan to an engine. Everything is checked before the first weight is
created."""

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
from plait.optim import DEFAULT_GROUPS
from plait.plan import Grid, Plan, StageAssignment, TPPlan, compile_conflict, single_stage
from plait.plan.loss_scaling import LossScaling
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
    """Return an engine that trains `model` under `plan` on the ranks of this job (one rank if started alone).

    model           a Hugging Face causal LM or any nn.Module, unmodified, or a list of modules (see `Chain`).
                    With weights (rank 0's are used), or on the meta device to be initialized from `seed` and
                    parameter names, identically under every plan. Its parameters are replaced by new objects
    plan            a `Plan`, or its text: "dp=2 tp=2 zero=3"
    optimizer       an element-wise optimizer class of torch.optim; its fused version is used if there is one
    optimizer_args  its keyword arguments
    param_groups    as in torch: parameters, or dicts of them. None: no weight decay for norms and biases
    clip_norm       maximum global 2-norm of the gradient
    clip_value      maximum absolute value of each gradient element
    loss            (outputs, micro-batch) -> (summed loss, number of targets); the model receives the
                    micro-batch's entries by name, without `labels`. None: next-token cross entropy
    loss_scaling    dynamic loss scaling of precision=fp16
    blocks          the repeated modules, or their classes. None: those of the largest ModuleList
    offload_dir     folder of offload=disk
    tensor_plan     how `tp` shards layers, {"blocks.*.fc1": "colwise"}. None: the model's own plan
    probe           compare gradients with the full model's on rank 0, for random tokens (True) or a batch
    seed            of initial weights and dropout
    weights         a Hugging Face checkpoint folder; each rank reads only its part. Needs a model on meta
    world           the ranks to use. None: `connect()`

    A parameter that a step does not use has a zero gradient: its moments and weight decay are still updated.
    Buffers that forward changes are broadcast from the first data rank. Raises PlaitError.
    """
    plan = Plan.parse(plan) if isinstance(plan, str) else plan
    model = model if isinstance(model, nn.Module) else Chain(model)
    check_update(optimizer, clip_norm, clip_value)
    world = connect() if world is None else world
    plan = _resolve(world, plan, loss_scaling)
    named_blocks = find_blocks(model, plan, blocks)
    reader = None if weights is None else _weights_reader(model, Path(weights), world)
    self_check = SelfCheck.build(model, probe, plan, seed)  # before the model is sharded
    spec = training_spec(model, plan, named_blocks, param_groups=param_groups, tensor_plan=tensor_plan)
    spec = replace(spec, optimizer=optimizer, arguments=optimizer_args or {}, loss=loss, seed=seed)
    spec = replace(spec, clip_norm=clip_norm, clip_value=clip_value, draws=reader is None)
    spec = replace(spec, loss_scaling=_loss_scaling(plan, loss_scaling))
    spec = replace(spec, offload_dir=None if offload_dir is None else Path(offload_dir))
    mesh = Mesh(world, Grid.from_plan(plan))
    engine = Engine(_in_training(model), plan, spec, mesh, named_blocks)
    return _initialize(engine, reader, self_check, loss)


def _in_training(model: nn.Module) -> nn.Module:
    """Put the model in training mode, unless it is: parts of it may be in evaluation mode on purpose."""
    return model if model.training else model.train()


def _initialize(
    engine: Engine, reader: Reader | None, self_check: SelfCheck | None, loss: Loss | None
) -> Engine:
    """Load the initial weights, if given, and run the self-check."""
    if reader is not None:
        with reader:
            engine.load_from(reader, weights_only=True)
    return engine if self_check is None else self_check.run(engine, loss)


def _weights_reader(model: nn.Module, folder: Path, world: World) -> Reader:
    """Open a reader of the initial weights. Raises ModelError for a model that already has weights,
    CheckpointError on all ranks for files that one of them cannot read."""
    if not all(parameter.is_meta for parameter in model.parameters()):
        raise ModelError(
            "the model already has weights", given=f"weights={folder}", expected="a model on meta"
        )
    reader: Reader | None = None
    problem = None
    try:
        reader = HuggingFaceFiles.open(folder).reader(model)
    except CheckpointError as error:
        problem = error
    raise_on_all(problem, world.group, world.device)
    assert reader is not None, "neither a reader nor an error"
    return reader


def training_spec(
    model: nn.Module,
    plan: Plan,
    blocks: list[tuple[str, nn.Module]],
    *,
    param_groups: Iterable[Any] | None = None,
    tensor_plan: Mapping[str, str] | None = None,
) -> TrainingSpec:
    """How the model is sharded and which parameter groups its optimizer has. Needs no other ranks. Raises
    PlanError, ModelError or ConfigError."""
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
    """Raise ConfigError if `optimizer` is not a class, or for invalid clipping limits."""
    if not (isinstance(optimizer, type) and issubclass(optimizer, torch.optim.Optimizer)):
        raise ConfigError(
            "optimizer must be a class: it is built over the shards that each rank owns",
            given=f"{optimizer if isinstance(optimizer, type) else type(optimizer).__name__}",
            hint="optimizer=torch.optim.AdamW, optimizer_args={'lr': 1e-3}",
        )
    for name, limit in (("clip_norm", norm), ("clip_value", value)):
        if limit is not None and not (isinstance(limit, int | float) and limit > 0):
            raise ConfigError(
                f"{name} is not a valid limit", given=f"{name}={limit}", expected="above 0, or None"
            )
    if norm is not None and value is not None:
        raise ConfigError(
            "clip_norm and clip_value cannot be combined",
            given=f"clip_norm={norm} and clip_value={value}",
            expected="one of the two",
        )


def _resolve(world: World, plan: Plan, scaling: LossScaling | None) -> Plan:
    """The plan for the ranks of the world, checked against them and their devices."""
    plan = plan.resolved(world.size)
    plan.check_ranks(world.size)
    _check_fp16(plan, scaling, world.device)
    check_device(plan, world.device)
    return plan


def _check_fp16(plan: Plan, scaling: LossScaling | None, device: torch.device) -> None:
    """Raise ConfigError for loss scaling without fp16, PlanError if the device cannot train in fp16."""
    if plan.precision != "fp16":
        if scaling is not None:
            raise ConfigError("loss_scaling needs precision=fp16", given=f"precision={plan.precision}")
        return
    try:
        x = torch.ones(2, 1, 8, 8, dtype=torch.float16, device=device, requires_grad=True)
        nn.functional.scaled_dot_product_attention(x @ x, x, x, is_causal=True).sum().backward()
    except RuntimeError as error:
        raise PlanError(
            "this device cannot train in fp16",
            given=f"precision=fp16 on {device}: {str(error).splitlines()[0]}",
            hint="precision=bf16",
        ) from error


def check_shardable(
    model: nn.Module, plan: Plan, given: Mapping[str, str] | None = None, *, blocks: Blocks | None = None
) -> None:
    """Raise PlanError or ModelError unless the model can be split into the plan's stages and its layers
    sharded on the plan's grid; needs no other ranks."""
    training_spec(model, plan, find_blocks(model, plan, blocks), tensor_plan=given)


def find_blocks(model: nn.Module, plan: Plan, given: Blocks | None) -> list[tuple[str, nn.Module]]:
    """The model's blocks. Raises PlanError if there are none and the plan has a per-block option."""
    blocks = blocks_of(model, given)
    options = {f"recompute={plan.recompute}": plan.recompute != "none", "compile=true": plan.compile}
    for option, is_used in options.items():
        if is_used and not blocks:
            raise PlanError(
                f"{option} needs repeated blocks, and the model has none",
                expected="an nn.ModuleList or nn.Sequential of blocks",
                hint=f"no {option.partition('=')[0]}",
            )
    return blocks


def _schedule(plan: Plan) -> Schedule:
    """The plan's schedule, validated. Raises ScheduleError."""
    schedule = load_schedule(plan.schedule, plan.pp, plan.micro, plan.chunks)
    check(schedule)
    if not schedule.trains:
        raise ScheduleError("the schedule has no backwards", given=f"schedule={plan.schedule}")
    if schedule.split and plan.compile:  # from a file, which the plan has not read
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
    """How layers are sharded. On a 1x1 grid any model will do, but a given tensor_plan is still checked."""
    if plan.rows == plan.cols == 1 and given is None:
        return TPPlan(1, 1)
    return models.build_tp_plan(model, plan.rows, plan.cols, sequence=plan.sp, blocks=blocks, given=given)


def check_device(plan: Plan, device: torch.device) -> None:
    """Raise PlanError for what is impossible or useless on this device."""
    if plan.algorithm != "auto" and device.type != "cpu":
        raise PlanError(
            "named all-reduce algorithms need CPU ranks: NCCL selects its own",
            given=f"algorithm={plan.algorithm} on {device}",
            hint="algorithm=auto; NCCL_ALGO=Ring or NCCL_ALGO=Tree in the environment",
        )
    if plan.offload == "disk" and device.type != "cpu":  # optimizers need gradients and states on one device
        raise PlanError(
            "offload=disk needs CPU ranks",
            given=f"{plan} on {device}",
            hint="offload=cpu, optim_dtype=bf16, or a higher zero over more ranks",
        )


def _groups(given: Iterable[Any] | None) -> list[Mapping[str, Any]] | None:
    """Parameter groups as dicts: plain parameters become one group without options."""
    groups = None if given is None else list(given)
    if groups is None or all(isinstance(entry, Mapping) for entry in groups):
        return groups
    if any(isinstance(entry, Mapping) for entry in groups):
        raise ConfigError(
            "param_groups mixes parameters and dicts",
            given=", ".join(sorted({type(entry).__name__ for entry in groups})),
            expected="model.parameters(), or [{'params': some}, {'params': others, 'weight_decay': 0.0}]",
        )
    return [{"params": groups}]


def _options(groups: Sequence[Mapping[str, Any]] | None) -> Sequence[Mapping[str, Any]]:
    if groups is None:
        return DEFAULT_GROUPS
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


def _group_of(model: nn.Module, groups: Sequence[Mapping[str, Any]] | None) -> dict[str, int] | None:
    """The index of each trainable parameter's group. Raises ConfigError unless each is in exactly one."""
    if groups is None:
        return None
    group_index: dict[int, int] = {}
    for index, group in enumerate(groups):
        params = group.get("params", ())
        for entry in [params] if isinstance(params, Tensor) else params:
            parameter = entry[1] if isinstance(entry, tuple) else entry  # torch takes (name, parameter) too
            if group_index.setdefault(id(parameter), index) != index:
                raise ConfigError(
                    "a parameter is in two param_groups", given=f"{group_index[id(parameter)]}, {index}"
                )
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    unknown = group_index.keys() - {id(p) for p in model.parameters()}
    missing = [name for name, p in named.items() if id(p) not in group_index]
    if unknown or missing:
        raise ConfigError(
            "param_groups do not match the model's trainable parameters",
            given=f"no group contains {missing[0]}"
            if missing
            else f"{len(unknown)} parameters that are not the model's",
            expected="every parameter that requires a gradient, in one group: model.parameters()",
        )
    return {name: group_index[id(p)] for name, p in named.items()}
