"""`parallelize`: from a model and a plan to an engine. Everything is checked before the first weight is
created."""

import importlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from plait.checkpoint import HuggingFaceFiles
from plait.checkpoint.magnitudes import MagnitudeReader
from plait.comm import Mesh, World, connect, raise_on_all
from plait.engine.engine import Engine
from plait.engine.loss import Loss
from plait.engine.numerics import set_numerics, set_product_precision
from plait.engine.reference import SelfCheck
from plait.engine.spec import Arguments, TrainingSpec, validate
from plait.engine.usage_checks import check_types
from plait.errors import CheckpointError, ModelError
from plait.models import Blocks
from plait.models.routers import OF_BATCHES
from plait.optim.update_kinds import DECLARATION
from plait.parallel.all_samples import batch_norms
from plait.parallel.zero.rank_context import Precision
from plait.plan import Grid, Plan, format_bytes
from plait.plan.communicators import communicators
from plait.plan.distillation import Distillation
from plait.plan.loss_scaling import LossScaling
from plait.plan.preference import Preference
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
    router_bias_update: float | None = None,
    router_z_loss: float | None = None,
    loss: Loss | Preference | Distillation | None = None,
    keep_zeros: bool = False,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
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
    Unused parameters get a zero gradient and are updated. Raises PlaitError; SystemExit(0) on a server.

    model           any nn.Module, unmodified, or a list (see `Chain`). Values: rank 0's; on meta, from `seed`
    plan            a `Plan`, or its text: "dp=2 tp=2 zero=3"; `world`: the ranks. None: `connect()`
    optimizer       a class of torch.optim (fused if possible), or another; `optimizer_args`: its arguments
    param_groups    as in torch, or with an `optimizer` of their own. None: norms and biases do not decay
    clip_norm       maximum global 2-norm of the gradient; `clip_value`: of an element
    router_bias_update  rate of routers' biases (DeepSeek-V3: 0.001); `router_z_loss`: weight (ST-MoE: 0.001)
    loss            (outputs, micro-batch) -> (summed loss, number of targets); or Preference, Distillation
    label_smoothing fraction of targets for all tokens; `z_loss`: weight of a squared log-sum-exp. In training
    loss_scaling    of precision=fp16; None: `LossScaling()`, dynamic. `offload_dir`: folder of offload=disk
    blocks          the repeated modules, or their classes. None: of the largest ModuleList
    tensor_plan     {"*.fc1": "colwise"}; with layout="ffn:col", {"*.fc1": "ffn hidden"}. None: model's own
    probe           compare gradients with the full model's on rank 0, for random tokens (True) or a batch
    example_batch   under pp and tp, for inputs other than input_ids: shows where parameters are used
    seed            of initial weights and dropout; `keep_zeros`: zeros in linear weights stay zero
    weights         a Hugging Face checkpoint folder, of which each rank reads its part. For a model on meta
    """
    model = check_types(model, locals())  # before ranks wait for each other
    given = Arguments(**locals())
    job = _connect(given.plan, world)
    spec = validate(given, job.size, job.world.device, job.world.host_size() if given.plan.cp > 1 else None)
    job.serve(spec)  # a parameter server, which then exits
    _set_up(spec, job.world)
    reader = None if weights is None else _open_weights(spec, Path(weights), job.world)
    self_check = SelfCheck.build(spec)  # of the model before it is sharded
    if not model.training:  # otherwise parts of it may be in evaluation mode on purpose
        model.train()
    engine = job.build(spec)
    if reader is not None:
        with reader:
            engine.load_from(reader, weights_only=True)
    return engine if self_check is None else self_check.run(engine)


class Job(Protocol):
    """The processes that train together, as this one sees them. Implemented by `_Ranks`, and by `ServerJob`
    in `server/job.py`.

    world  the ranks that this process computes with
    size   number of the job's processes
    """

    world: World
    size: int

    def serve(self, spec: TrainingSpec) -> None:
        """Do the work of a process that has no engine, and raise SystemExit(0); return on others."""

    def build(self, spec: TrainingSpec) -> Engine:
        """Build the engine. All processes that have one call it."""


class _Ranks:
    """A job whose processes are the ranks of one world."""

    def __init__(self, _plan: Plan, world: World | None) -> None:
        self.world = world or connect()
        self.size = self.world.size

    def serve(self, spec: TrainingSpec) -> None:
        """Every rank has an engine."""

    def build(self, spec: TrainingSpec) -> Engine:
        self.world.renew_connections()
        mesh = Mesh(self.world, Grid.from_plan(spec.plan), communicators(spec.plan, spec.schedule.rank_of))
        return Engine(spec.given.model, spec, mesh)


# The jobs of optional products, by key of a plan. A product imports the packages that it builds on, and none
# of those imports it, so it is named in a string: import-linter cannot see it, `tools/structure.py` does.
_JOBS = {"servers": "plait.server.job:ServerJob"}


def _connect(plan: Plan, world: World | None) -> Job:
    """Join the job of the plan."""
    set_numerics(plan)  # first: NCCL reads its settings when it connects
    job: Callable[[Plan, World | None], Job] = _load_job("servers") if plan.num_servers else _Ranks
    return job(plan, world)


def _load_job(key: str) -> Any:
    module, _, name = _JOBS[key].partition(":")
    return getattr(importlib.import_module(module), name)


def _set_up(spec: TrainingSpec, world: World) -> None:
    """Prepare this process for training, and warn of what is slower than it could be, or easily mistaken."""
    set_product_precision(spec.plan)
    for text in _warnings(spec, world.device) if world.rank == 0 else ():
        warnings.warn(text, stacklevel=3)
    if spec.plan.offload != "none":  # the optimizer runs on the CPU
        world.use_processors()


def _warnings(spec: TrainingSpec, device: torch.device) -> Iterator[str]:
    model, plan = spec.given.model, spec.job
    names = [name for name, _ in batch_norms(model)]
    parts = plan.micro * (1 if plan.sync_batchnorm else plan.dp)
    if names and parts > 1:
        others = f" and {counted(len(names) - 1, 'other module')}" if len(names) > 1 else ""
        way = "" if plan.dp == 1 or plan.sync_batchnorm else "sync_batchnorm=true, "
        way += "micro=1" if plan.micro > 1 else ""
        yield (
            f"{names[0]}{others}: BatchNorm computes with the statistics of one of {parts} parts of the "
            f"batch, so results differ from one process ({plan}). Try {way.rstrip(', ')}, or GroupNorm"
        )
    names = [name for name, module in model.named_modules() if type(module).__name__ in OF_BATCHES]
    if names and (parts := plan.dp * plan.micro) > 1:
        yield (
            f"{names[0]}: the capacity of its experts follows from the tokens of one of {parts} parts of the "
            f"batch, so results differ from one process ({plan}). Try another model, or dp=1 micro=1"
        )
    narrow = [p for p in model.parameters() if p.dtype in (torch.bfloat16, torch.float16)]
    if narrow and plan.precision == "fp32":  # transformers loads models in the dtype of their files
        before = sum(parameter.nbytes for parameter in narrow)
        dtype = str(narrow[0].dtype).removeprefix("torch.")
        option = "bf16" if dtype == "bfloat16" else "fp16"
        yield (
            f"the model's weights are {dtype}, and a plan without precision= computes in float32: "
            f"{format_bytes(before)} become {format_bytes(2 * before)}. precision={option} computes in "
            f"{dtype}, with float32 master weights; model.float() before parallelize keeps float32 without "
            "this warning"
        )
    for name in dict.fromkeys(group.name for group in spec.optimizers if not group.is_known):
        yield (
            f"{name} is not known to be element-wise, so ranks update full tensors: right, but slower. "
            f"Try {DECLARATION}; is_elementwise = False ends this warning"
        )
    tables = (nn.Embedding, nn.EmbeddingBag)
    names = [name for name, module in model.named_modules() if isinstance(module, tables) and module.sparse]
    if names:
        yield f"{', '.join(names)}: sparse=True saves nothing here: gradients are made dense to be added up"
    if plan.is_float8 and device.type == "cpu":
        yield (
            f"precision={plan.precision}: CPUs have no float8 products. They are emulated in float32, to "
            "check numbers: this is slower than precision=bf16"
        )


def _open_weights(spec: TrainingSpec, folder: Path, world: World) -> MagnitudeReader:
    """Open a reader of the initial weights. Raises CheckpointError on all ranks for files that one of them
    cannot read."""
    reader, problem = None, None
    try:
        reader = HuggingFaceFiles.open(folder).reader(spec.given.model)
    except (CheckpointError, ModelError) as error:
        problem = error
    raise_on_all(problem, world.group, world.device)
    assert reader is not None, "neither a reader nor an error"
    return MagnitudeReader(reader, spec.given.model, spec.formats, Precision.from_plan(spec.plan).compute)
