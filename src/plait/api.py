"""`parallelize`: from a model and a plan to an engine. Everything is checked before the first weight is
created."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from plait.checkpoint import HuggingFaceFiles, Reader
from plait.comm import Mesh, World, connect, raise_on_all
from plait.engine.engine import Engine
from plait.engine.loss import Loss
from plait.engine.self_check import SelfCheck
from plait.engine.spec import TrainingSpec, check_arguments, validate
from plait.errors import CheckpointError, ModelError
from plait.models import Blocks, Chain
from plait.plan import Grid, Plan
from plait.plan.loss_scaling import LossScaling


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
    example_batch: Mapping[str, Tensor] | None = None,
    seed: int = 0,
    weights: str | Path | None = None,
    world: World | None = None,
) -> Engine:
    """Return an engine that trains `model` under `plan` on the ranks of this job (one rank if started alone).

    model           a Hugging Face causal LM or any nn.Module, unmodified, or a list of modules (see `Chain`).
                    With weights (rank 0's are used), or on the meta device to be initialized from `seed` and
                    parameter names, identically under every plan. Its parameters are replaced by new objects
    plan            a `Plan`, or its text: "dp=2 tp=2 zero=3"
    optimizer       an element-wise class of torch.optim (fused if possible); `optimizer_args`: its arguments
    param_groups    as in torch: parameters, or dicts of them. None: no weight decay for norms and biases
    clip_norm       maximum global 2-norm of the gradient; `clip_value`: of an element's absolute value
    loss            (outputs, micro-batch) -> (summed loss, number of targets); the model receives the
                    micro-batch's entries by name, without `labels`. None: next-token cross entropy
    loss_scaling    dynamic loss scaling of precision=fp16; `offload_dir`: folder of offload=disk
    blocks          the repeated modules, or their classes. None: those of the largest ModuleList
    tensor_plan     how `tp` shards layers, {"blocks.*.fc1": "colwise"}. None: the model's own plan
    probe           compare gradients with the full model's on rank 0, for random tokens (True) or a batch
    example_batch   under pp, for models without input_ids: a batch of these names, shapes and dtypes shows
                    where parameters outside the blocks are used. None: first registered, first used
    seed            of initial weights and dropout
    weights         a Hugging Face checkpoint folder; each rank reads only its part. Needs a model on meta
    world           the ranks to use. None: `connect()`

    A parameter that a step does not use has a zero gradient: its moments and weight decay are still updated.
    Buffers that forward changes are broadcast from the first data rank. Raises PlaitError.
    """
    model = model if isinstance(model, nn.Module) else Chain(model)
    plan = check_arguments(plan, optimizer, clip_norm, clip_value)  # before ranks wait for each other
    world = connect() if world is None else world
    spec = validate(
        model,
        plan,
        world.size,
        world.device,
        optimizer=optimizer,
        param_groups=param_groups,
        clip_norm=clip_norm,
        clip_value=clip_value,
        loss_scaling=loss_scaling,
        blocks=blocks,
        tensor_plan=tensor_plan,
        loss=loss,
        example_batch=probe if example_batch is None and isinstance(probe, Mapping) else example_batch,
    )
    spec = replace(spec, arguments=optimizer_args or {}, seed=seed, draws=weights is None)
    spec = replace(spec, offload_dir=None if offload_dir is None else Path(offload_dir))
    return _start(model, spec, world, probe, None if weights is None else Path(weights))


def _start(
    model: nn.Module,
    spec: TrainingSpec,
    world: World,
    probe: bool | Mapping[str, Tensor],
    weights: Path | None,
) -> Engine:
    """Build the engine, load the initial weights, if given, and run the self-check."""
    reader = None if weights is None else _weights_reader(model, weights, world)
    self_check = SelfCheck.build(model, probe, spec.plan, spec.seed)  # before the model is sharded
    if not model.training:  # otherwise parts of it may be in evaluation mode on purpose
        model.train()
    engine = Engine(model, spec, Mesh(world, Grid.from_plan(spec.plan)))
    if reader is not None:
        with reader:
            engine.load_from(reader, weights_only=True)
    return engine if self_check is None else self_check.run(engine, spec.loss)


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
