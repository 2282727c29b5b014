"""`parallelize`: from a model and a plan to an engine. Everything is checked before the first weight is
created."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait.checkpoint import HuggingFaceFiles, Reader
from plait.comm import JobProcess, Mesh, World, connect, raise_on_all
from plait.engine.engine import Engine
from plait.engine.loss import Loss
from plait.engine.numerics import set_numerics, set_product_precision
from plait.engine.self_check import SelfCheck
from plait.engine.spec import TrainingSpec, check_arguments, validate
from plait.engine.usage_checks import check_types
from plait.errors import CheckpointError, ConfigError, ModelError
from plait.models import Blocks, with_layout
from plait.optim.update_kinds import DECLARATION, GroupOptimizer, state_kinds
from plait.parallel.batch_norm import batch_norms
from plait.plan import Grid, Plan, format_bytes
from plait.plan.communicators import communicators
from plait.plan.loss_scaling import LossScaling
from plait.server.job import is_server, join_job, process_world, serve, served_spec, start_worker
from plait.tables import counted


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
    layout: str | None = None,
    probe: bool | Mapping[str, Tensor] = False,
    example_batch: Mapping[str, Tensor] | None = None,
    seed: int = 0,
    weights: str | Path | None = None,
    world: World | None = None,
) -> Engine:
    """Return an engine that trains `model` under `plan` on the ranks of this job (one rank if started alone).

    model           any nn.Module, unmodified, or a list (see `Chain`). Values: rank 0's; on meta, from `seed`
    plan            a `Plan`, or its text: "dp=2 tp=2 zero=3"
    optimizer       a class of torch.optim (fused if possible), or another; `optimizer_args`: its arguments
    param_groups    as in torch, or with an `optimizer` of their own. None: no decay for norms and biases
    clip_norm       maximum global 2-norm of the gradient; `clip_value`: of an element
    loss            (outputs, micro-batch) -> (summed loss, number of targets). None: by the model's task
    loss_scaling    of precision=fp16; None: `LossScaling()`, dynamic. `offload_dir`: folder of offload=disk
    blocks          the repeated modules, or their classes. None: of the largest ModuleList
    tensor_plan     {"*.fc1": "colwise"}; with layout="ffn:col", {"*.fc1": "ffn hidden"}. None: model's own
    probe           compare gradients with the full model's on rank 0, for random tokens (True) or a batch
    example_batch   under pp and tp, for inputs other than input_ids: shows where parameters are used
    seed            of initial weights and dropout; `world`: the ranks to use. None: `connect()`
    weights         a Hugging Face checkpoint folder, of which each rank reads its part. For a model on meta

    Unlike the default groups, torch's AdamW(model.parameters()) decays norms and biases. Unused parameters
    get a zero gradient and are updated. Raises PlaitError; SystemExit(0) on a server.
    """
    model = check_types(model, locals())  # before ranks wait for each other
    world, process = _connect(plan := check_arguments(plan, optimizer, clip_norm, clip_value), world)
    spec = validate(
        model,
        plan,
        (process or world).size,
        world.device,
        optimizer=optimizer,
        param_groups=param_groups,
        clip_norm=clip_norm,
        clip_value=clip_value,
        loss_scaling=loss_scaling,
        blocks=blocks,
        tensor_plan=with_layout(tensor_plan, layout),
        loss=loss,
        example_batch=example_batch or (probe if isinstance(probe, Mapping) else None),
    )
    folder = None if offload_dir is None else Path(offload_dir)
    spec = replace(spec, arguments=optimizer_args or {}, seed=seed, draws=not weights, offload_dir=folder)
    return _start(model, spec, world, probe, weights, process)


def _connect(plan: Plan, world: World | None) -> tuple[World, JobProcess | None]:
    """Connect the ranks; with parameter servers, only join the job's processes."""
    set_numerics(plan)  # first: NCCL reads its settings when it connects
    if not plan.num_servers:
        return world or connect(), None
    if world is not None and world.size > 1:
        raise ConfigError(
            "workers and servers are no ranks of one world",
            given=f"world= of {world.size} ranks, {plan}",
            expected="no world: parallelize connects each process to the servers",
            hint="parallelize(...) without world=",
        )
    process = join_job(plan)
    return world or process_world(process), process


def _start(
    model: nn.Module,
    spec: TrainingSpec,
    world: World,
    probe: bool | Mapping[str, Tensor],
    weights: str | Path | None,
    process: JobProcess | None,
) -> Engine:
    """Build the engine, load the initial weights, if given, and run the self-check. On a server, serve."""
    if probe:
        spec.plan.check_no_servers("probe")
    if process is not None:
        served = served_spec(spec)
        state_kinds(served.optimizer, served.arguments, served.groups)  # refuses others, on all processes
        if is_server(spec.plan, process):
            serve(model, served, process)
            raise SystemExit(0)
    set_product_precision(spec.plan)
    if world.rank == 0:
        _warn_of_batch_statistics(model, spec.plan)
        _warn_if_widened(model, spec.plan)
        _warn_of_full_tensors(spec)
        _warn_of_sparse_gradients(model)
        if spec.plan.is_float8 and world.device.type == "cpu":
            warnings.warn(
                f"precision={spec.plan.precision}: CPUs have no float8 products. They are emulated in "
                "float32, to check numbers: this is slower than precision=bf16",
                stacklevel=3,
            )
    if spec.plan.offload != "none":  # the optimizer runs on the CPU
        world.use_processors()
    reader = None if weights is None else _weights_reader(model, Path(weights), world)
    self_check = SelfCheck.build(model, probe, spec.plan, spec.seed)  # before the model is sharded
    if not model.training:  # otherwise parts of it may be in evaluation mode on purpose
        model.train()
    if process is not None:
        engine = start_worker(model, spec, process, world)
    else:
        world.renew_connections()
        mesh = Mesh(world, Grid.from_plan(spec.plan), communicators(spec.plan, spec.schedule.rank_of))
        engine = Engine(model, spec, mesh)
    if reader is not None:
        with reader:
            engine.load_from(reader, weights_only=True)
    return engine if self_check is None else self_check.run(engine, spec.loss, spec.float8)


def _warn_of_batch_statistics(model: nn.Module, plan: Plan) -> None:
    """Warn if BatchNorm would compute with the statistics of a part of the batch."""
    names = [name for name, _ in batch_norms(model)]
    parts = plan.micro * (1 if plan.sync_batchnorm else plan.dp)
    if names and parts > 1:
        others = f" and {counted(len(names) - 1, 'other module')}" if len(names) > 1 else ""
        way = "" if plan.dp == 1 or plan.sync_batchnorm else "sync_batchnorm=true, "
        way += "micro=1" if plan.micro > 1 else ""
        warnings.warn(
            f"{names[0]}{others}: BatchNorm computes with the statistics of one of {parts} parts of the "
            f"batch, so results differ from one process ({plan}). Try {way.rstrip(', ')}, or GroupNorm",
            stacklevel=4,
        )


def _warn_if_widened(model: nn.Module, plan: Plan) -> None:
    """Warn of weights that the plan's default precision makes wider: transformers loads models in the dtype
    of their files, which is bfloat16 for most."""
    narrow = [p for p in model.parameters() if p.dtype in (torch.bfloat16, torch.float16)]
    if not narrow or plan.precision != "fp32":
        return
    before = sum(parameter.nbytes for parameter in narrow)
    dtype = str(narrow[0].dtype).removeprefix("torch.")
    option = "bf16" if dtype == "bfloat16" else "fp16"
    warnings.warn(
        f"the model's weights are {dtype}, and a plan without precision= computes in float32: "
        f"{format_bytes(before)} become {format_bytes(2 * before)}. precision={option} computes in {dtype}, "
        "with float32 master weights; model.float() before parallelize keeps float32 without this warning",
        stacklevel=4,
    )


def _warn_of_full_tensors(spec: TrainingSpec) -> None:
    """Warn of optimizers that declare nothing."""
    groups = GroupOptimizer.of_groups(spec.optimizer, spec.arguments, spec.groups)
    for name in dict.fromkeys(group.name for group in groups if not group.is_known):
        warnings.warn(
            f"{name} is not known to be element-wise, so ranks update full tensors: right, but slower. "
            f"Try {DECLARATION}; is_elementwise = False ends this warning",
            stacklevel=4,
        )


def _warn_of_sparse_gradients(model: nn.Module) -> None:
    """Warn of embeddings whose gradients are made dense."""
    tables = (nn.Embedding, nn.EmbeddingBag)
    names = [name for name, module in model.named_modules() if isinstance(module, tables) and module.sparse]
    if names:
        warnings.warn(
            f"{', '.join(names)}: sparse=True saves nothing here: gradients are made dense to be added up",
            stacklevel=4,
        )


def _weights_reader(model: nn.Module, folder: Path, world: World) -> Reader:
    """Open a reader of the initial weights. Raises ModelError for a model that already has weights,
    CheckpointError on all ranks for files that one of them cannot read."""
    if not all(parameter.is_meta for parameter in model.parameters()):
        raise ModelError(
            "the model already has weights",
            given=f"weights={folder}",
            expected="a model on the meta device",
            hint="with torch.device('meta') around the construction, or no weights",
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
