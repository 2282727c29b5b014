"""Decide what a recipe means: check it, build its data and create its directory, before the first rank."""

import math
import secrets
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch.utils.data import DataLoader

from plait.api import parallelize
from plait.checkpoint import Checkpoint, steps
from plait.checkpoint.base import check_same_base
from plait.comm import World
from plait.data.build import build
from plait.data.config import INDEX, DataConfig
from plait.data.dataset import TokenStore, open_store
from plait.data.documents import check_documents
from plait.data.loader import Batch, Batches, Samples, loader
from plait.data.sampler import BatchRamp, BatchSizes, OneEpoch, Order
from plait.data.samples import SampleSource
from plait.data.show import show_documents
from plait.data.tokenizer import read_tokenizer
from plait.engine.engine import Engine
from plait.engine.spec import Arguments, validate
from plait.errors import ConfigError, DataError, RunError
from plait.fileio import check_output_paths
from plait.models import numbering_of
from plait.models.caches import check_generates
from plait.optim.disk_tensors import MappedFile
from plait.plan import Plan
from plait.train.boards import check_boards
from plait.train.callbacks import callback_classes
from plait.train.config import Recipe, check_batches, differences, read_recipe, with_steps
from plait.train.heartbeat import any_stacks
from plait.train.metrics import read_metrics
from plait.train.model import (
    adapter_facts,
    check_config,
    check_prompt,
    check_weights,
    complete_adapter,
    complete_config,
    generation_of,
    initial_model,
    model_on_meta,
    prompt_ids,
    with_adapter,
)
from plait.train.optimizer import check_optimizer_args, optimizer_class, param_groups
from plait.train.resume import find_newest, rewind
from plait.train.run_dir import RunDir, create_run_dir, lock_run, rewrite_recipe
from plait.train.sections import LossScaleConfig, RunConfig
from plait.train.tasks import Task, tasks_of_run

_MAX_LOCAL_RANKS = 1024  # each is a process


@dataclass(frozen=True)
class ResolvedRun:
    """A recipe with everything decided; the ranks only act on it.

    recipe  as saved in the run directory: complete, with absolute paths
    plan    with its number of ranks
    """

    recipe: Recipe
    plan: Plan
    dir: RunDir
    store: TokenStore

    @classmethod
    def open(cls, recipe: Recipe, ranks: int) -> "ResolvedRun":
        """Return the run of a saved recipe, whose data `prepare` has checked. Raises a PlaitError."""
        store = open_store(recipe.data, verify=False)
        return cls(recipe, Plan.parse(recipe.plan).resolved(ranks), RunDir(recipe.run.dir), store)

    def build_engine(self, world: World, *, loads: bool = False) -> Engine:
        """Build the engine. `loads`: a checkpoint is loaded next, so there are no initial weights to read."""
        recipe, optimizer = self.recipe, self.recipe.optimizer
        model: torch.nn.Module
        if loads and "base" not in self.adapter_facts:  # the checkpoint has all weights
            model, weights = with_adapter(model_on_meta(recipe.model), recipe.adapter), None
        else:
            model, weights = initial_model(recipe.model, recipe.adapter)
        engine = parallelize(
            model,
            self.plan,
            optimizer=optimizer_class(optimizer),
            optimizer_args=optimizer.torch_args(),
            param_groups=param_groups(optimizer, model),
            clip_norm=optimizer.clip_norm,
            clip_value=optimizer.clip_value,
            router_bias_update=optimizer.router_bias_update,
            label_smoothing=optimizer.label_smoothing,
            z_loss=optimizer.z_loss,
            router_z_loss=optimizer.router_z_loss,
            loss=recipe.loss_options(),
            loss_scaling=recipe.loss_scale.scaling() if self.plan.precision == "fp16" else None,
            offload_dir=recipe.run.offload_dir if self.plan.offload == "disk" else None,
            tensor_plan=recipe.model.tensor_plan,
            keep_zeros=recipe.model.keep_zeros,
            probe=recipe.run.probe,
            seed=recipe.run.seed,
            weights=weights,
            world=world,
        )
        if recipe.adapter is not None and recipe.adapter.path is not None and not loads:
            engine.load_adapter(recipe.adapter.path)
        return engine

    @cached_property
    def adapter_facts(self) -> dict[str, Any]:
        """Facts about the adapter and its base; {} without one. Raises ModelError, CheckpointError."""
        return adapter_facts(self.recipe.model, self.recipe.adapter, self.recipe.run.seed, self.plan)

    def facts(self) -> dict[str, object]:
        """Return the facts that a checkpoint must share with the run to be loaded by it."""
        recipe = self.recipe
        return {
            "model": {"config": recipe.model.config},
            **self.adapter_facts,
            "data": self.store.digest,
            "optimizer": recipe.optimizer.name,
            # the order of samples: if it changed, a resumed run would see some twice and others never
            "samples": {
                "batch": recipe.run.batch,
                "sequence": recipe.data.sequence,
                "order": recipe.data.order,
                "seed": recipe.run.seed,
                **({} if recipe.batch_ramp is None else {"ramp": recipe.batch_ramp.model_dump()}),
                **_document_facts(recipe.data),
            },
        }

    def batch_sizes(self) -> BatchSizes:
        """Return the sizes of the training batches."""
        ramp, sequence = self.recipe.batch_ramp, self.recipe.data.sequence
        return BatchSizes(
            self.recipe.run.batch, None if ramp is None else BatchRamp(**ramp.model_dump(), sequence=sequence)
        )

    def train_batches(
        self, numbers: range, data_rank: int, data_ranks: int, *, pin_memory: bool = False
    ) -> "DataLoader[Batch | list[Batch]]":
        """Load a data rank's share of the training batches with these numbers."""
        batches = self.train_shares(data_rank, data_ranks)
        return loader(batches, numbers, workers=self.recipe.data.workers, pin_memory=pin_memory)

    def train_shares(self, data_rank: int, data_ranks: int) -> Batches:
        """A data rank's share of each training batch."""
        # Documents are padded to the longest of a micro-batch; equal samples are for the engine to split.
        micro = self.plan.micro if self.recipe.data.samples == "documents" else None
        sizes = self.batch_sizes()
        return Batches(*self.train_samples, sizes, data_rank=data_rank, data_ranks=data_ranks, micro=micro)

    def validation_batches(
        self, data_rank: int, data_ranks: int, *, pin_memory: bool = False
    ) -> "DataLoader[Batch | list[Batch]]":
        """Load a data rank's share of the batches of an evaluation, the same ones each time."""
        return loader(*self.validation_shares(data_rank, data_ranks), pin_memory=pin_memory)

    def validation_shares(self, data_rank: int, data_ranks: int) -> tuple[Batches, range]:
        """A data rank's share of each batch of an evaluation, and the numbers of these."""
        batch, (samples, order) = self.recipe.run.batch, self.validation_samples
        number = self.recipe.run.evaluate_batches
        if isinstance(order, OneEpoch):
            number = min(number, -(-len(samples) // batch))
        micro = batch // data_ranks if self.recipe.data.tokens_per_micro_batch else None
        ranks = {"data_rank": data_rank, "data_ranks": data_ranks}
        return Batches(samples, order, BatchSizes(batch), **ranks, micro=micro), range(number)

    @cached_property
    def train_samples(self) -> tuple[Samples, Order]:
        """The training samples and their order. Raises DataError if there are too few."""
        return self._source.training()

    @cached_property
    def validation_samples(self) -> tuple[Samples, Order]:
        """The validation samples and their order. Raises DataError if there are too few."""
        return self._source.validation()

    @property
    def _source(self) -> SampleSource:
        data, run, first = self.recipe.data, self.recipe.run, 0
        if data.samples in ("packed", "bins"):
            first = numbering_of(model_on_meta(self.recipe.model)).first
        return SampleSource(data, self.store, batch=run.batch, seed=run.seed, first_position=first)

    def data_facts(self) -> dict[str, str]:
        """Return facts about the data for people; those that are "" do not apply."""
        samples, order = self.train_samples
        epochs = order.epochs(self.batch_sizes().span(self.recipe.run.steps)[0])
        of = [f" of {name}" for name in self.recipe.data.sources] if len(epochs) > 1 else [""]
        return {
            "epochs": ", ".join(f"{number:.2f}{name}" for number, name in zip(epochs, of, strict=True)),
            "documents": samples.facts,
            "left out of the data": self.store.index.skipped,
        }

    def check_samples(self) -> None:
        """Raise DataError unless there are samples for every batch."""
        if self.recipe.data.samples != "windows":
            check_documents(self.store)
        _ = self.train_samples, self.validation_samples if self.recipe.run.evaluate_every else None

    def check_checkpoint(self, saved: Checkpoint) -> None:
        """Raise CheckpointError unless the checkpoint has this run's model, data, optimizer and samples."""
        for fact, value in self.facts().items():
            if fact == "base":
                check_same_base(saved, self.adapter_facts[fact])
            else:
                saved.check_same(fact, value)


def _document_facts(data: DataConfig) -> dict[str, object]:
    """Facts about samples; without those that older runs did not have."""
    facts: dict[str, object] = {}
    if data.samples != "windows":
        facts = {"kind": data.samples, "group_by_length": data.group_by_length}
    for key in ("weights", "long_documents", "tokens_per_micro_batch"):
        if getattr(data, key) != DataConfig.model_fields[key].default:
            facts[key] = getattr(data, key)
    return facts


def prepare(
    source: Path,
    *,
    sets: Sequence[str] = (),
    plan: str | None = None,
    resume: bool = False,
    start: Path | None = None,
    ranks: int | None = None,
    local: bool = True,
    lock: ExitStack | None = None,
) -> ResolvedRun:
    """Check a run as far as possible without ranks, build its data and create its directory.

    source  a recipe; with `resume` also a run directory
    start   a checkpoint: a new run starts from it, a resumed run rewinds to it
    ranks   the number of ranks, if it is fixed
    local   whether all ranks run on this host
    lock    holds the run's lock when this returns

    Raises a PlaitError, and then has created no directory.
    """
    recipe, is_saved = _read(source, sets, plan, resume), source.is_dir()
    if not is_saved:
        recipe = recipe.model_copy(update={"adapter": complete_adapter(recipe.adapter)})
    run_dir = RunDir(recipe.run.dir)
    resolved = _check(recipe, ranks, local, is_saved=is_saved)
    if resume:
        saved = run_dir.read_recipe(sets, plan)
        run_dir.checked_tokenizer()
        if recipe.adapter is not None or (start is None and not steps(run_dir.checkpoints)):
            check_weights(recipe.model)
        lock_run(run_dir, lock)
        newest = find_newest(run_dir.checkpoints) if start is None else None
    else:
        _check_new(run_dir)
    store = _open_data(recipe, is_saved=is_saved)
    complete = _complete(recipe, store, resolved, is_saved=is_saved)
    run = _with_steps(ResolvedRun(complete, resolved, run_dir, store))
    if not resume:
        if recipe.data.kind != "text":
            show_documents(store, Console(stderr=True, soft_wrap=True))
        create_run_dir(run_dir, run.recipe, store, start, run.check_checkpoint)
        lock_run(run_dir, lock)
        return run
    changed = differences(run.recipe, saved)
    if changed:
        raise RunError(
            "the recipe has changed since the run started",
            given=f"{', '.join(changed[:5])} differ from {run_dir.recipe}",
            expected="the recipe that the run started with",
            hint=f"plait train {run_dir.path} --resume, with --set for each change",
        )
    if start is not None:
        rewind(run_dir.checkpoints, start, run.check_checkpoint)
    elif newest is not None:
        run.check_checkpoint(newest)
    rewrite_recipe(run_dir, run.recipe, store)
    return run


def _check_new(run_dir: RunDir) -> None:
    if run_dir.path.exists() and (not run_dir.path.is_dir() or any(run_dir.path.iterdir())):
        raise RunError(
            "the run directory already exists",
            given=f"run.dir = {run_dir.path}",
            expected="a directory that is missing or empty",
            hint=f"--resume to continue the run, or --set run.dir={run_dir.path}-2",
        )


def _with_steps(run: ResolvedRun) -> ResolvedRun:
    """Check the samples, and return the run with a number of steps for its epochs. Raises DataError and
    ConfigError."""
    run.check_samples()
    epochs = run.recipe.run.epochs
    if epochs is None:
        return run
    samples = math.ceil(epochs * len(run.train_samples[0]))
    found = replace(run, recipe=with_steps(run.recipe, run.batch_sizes().batches_of(samples)))
    try:
        _check_local_steps(found.recipe.run, found.plan)
    except ConfigError as error:
        error.hint = f"--set run.epochs= {error.hint}"
        raise
    return found


def discard_unused(run: RunDir, start: Path | None = None) -> Path | None:
    """Delete the directory of a run that ended before its first step, so that the same command can start it
    again. `start`: the checkpoint it began with. If it has stacks, to which errors refer, rename it instead,
    and return the new path."""
    begun = [] if start is None else [start.resolve().name]
    if any(path.name not in begun for path in steps(run.checkpoints)):
        return None
    if run.metrics.exists() and any("loss" in record for record in read_metrics(run.metrics)):
        return None
    if not any_stacks(run.stacks):
        shutil.rmtree(run.path, ignore_errors=True)
        return None
    aside = run.path.with_name(f"{run.path.name}.unused-{secrets.token_hex(4)}")
    run.path.rename(aside)
    return aside


def _read(source: Path, sets: Sequence[str], plan: str | None, resume: bool) -> Recipe:
    if resume and not source.exists() and not source.suffix:
        raise RunError(
            "the run does not exist",
            given=source,
            expected="a run's directory",
            hint="plait train RECIPE starts a run",
        )
    if not source.is_dir():
        return read_recipe(source, sets, plan)
    if not resume:
        raise RunError(
            "a directory is not a recipe",
            given=source,
            expected="a TOML file",
            hint=f"plait train {source} --resume",
        )
    return RunDir(source).read_recipe(sets, plan)


def num_local_ranks(plan: Plan, device: str) -> int:
    """Return how many ranks `plait train` starts by default.

    The plan's number of ranks; with dp=auto the most that the GPUs allow, on CPUs the fewest.
    """
    if plan.dp:
        return plan.num_ranks
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    return max(1, gpus // plan.min_ranks) * plan.min_ranks


def _open_data(recipe: Recipe, *, is_saved: bool) -> TokenStore:
    """Build or open the tokens. Raises DataError."""
    path, is_built = recipe.tokenizer.path, (recipe.data.dir / INDEX).exists()
    if is_saved and is_built and path is not None and not path.exists():
        return open_store(recipe.data)  # the tokens contain the tokenizer; a checkpoint knows their hash
    try:
        return build(recipe.data, recipe.tokenizer)
    except DataError as error:
        if is_saved and not is_built:
            moved = f"--set data.dir=DIRECTORY if the tokens of {recipe.data.dir} were moved"
            error.hint = moved if error.hint is None else f"{error.hint}; {moved}"
        raise


def _check(recipe: Recipe, ranks: int | None, local: bool, *, is_saved: bool) -> Plan:
    """Check all that does not depend on the data, and return the plan with its number of ranks."""
    requested = Plan.parse(recipe.plan)
    num_ranks = ranks if ranks is not None else num_local_ranks(requested, recipe.run.device)
    plan = requested.resolved(num_ranks)
    plan.check_ranks(num_ranks)
    check_batches(recipe, plan)
    if plan.precision != "fp16" and recipe.loss_scale != LossScaleConfig():
        raise ConfigError(
            "loss scaling requires fp16, whose gradients underflow",
            given=f"[loss_scale] and precision={plan.precision}",
            expected="precision=fp16 in the plan",
            hint="--set loss_scale= removes the section from the recipe",
        )
    _check_local_steps(recipe.run, plan)
    if plan.num_servers:
        _check_servers(recipe.run)
    if plan.offload == "disk":  # other plans ignore the folder, so that one recipe can be run under several
        _check_offload(recipe.run)
    check_output_paths({"run.trace": recipe.run.trace})
    check_boards(recipe.run.report_to)
    callback_classes(recipe.run.callbacks)
    if local:
        check_devices(num_ranks, recipe.run.device)
    check_optimizer_args(recipe.optimizer)
    model = check_config(recipe.model, recipe.data.sequence, plan, recipe.adapter, is_saved=is_saved)
    param_groups(recipe.optimizer, model)
    return plan


def _check_local_steps(config: RunConfig, plan: Plan) -> None:
    """Raise ConfigError if the last steps would not be exchanged, or islands would decide differently."""
    if not plan.local_steps:
        return
    if config.steps % plan.local_steps:
        raise ConfigError(
            "the run does not end with an exchange of its islands",
            given=f"run.steps = {config.steps}, local_steps={plan.local_steps}",
            expected="a multiple of local_steps",
            hint=f"--set run.steps={-(-config.steps // plan.local_steps) * plan.local_steps}",
        )
    for key in ("spike_factor", "early_stopping"):
        if value := getattr(config, key):
            raise ConfigError(
                "islands have losses of their own, and cannot be rolled back or stopped together",
                given=f"run.{key} = {value}, local_steps={plan.local_steps}",
                expected="no rollbacks and no early stopping under local_steps",
                hint=f"--set run.{key}=0",
            )


def _check_offload(config: RunConfig) -> None:
    """Raise ConfigError unless files can be created in the offload folder, on this host.

    Other hosts' folders, and the free space in all of them, are checked by the ranks, which allocate all of
    it before the first step.
    """
    if config.save_in_background:
        raise ConfigError(
            "save_in_background needs the optimizer states in memory, and offload=disk keeps them on disk",
            given="run.save_in_background = true, offload=disk",
            expected="saves that read the states from their files",
            hint="--set run.save_in_background=false",
        )
    if config.offload_dir is None:
        raise ConfigError(
            "offload=disk needs a folder",
            given="no run.offload_dir",
            expected="a folder on a fast local disk of each host, not on a network file system",
            hint="--set run.offload_dir=/var/tmp",
        )
    MappedFile(config.offload_dir, 0).close()


def _check_servers(config: RunConfig) -> None:
    """Raise ConfigError for options of a run that parameter servers do not have."""
    for key in ("spike_factor", "early_stopping", "probe"):
        if value := getattr(config, key):
            raise ConfigError(
                f"run.{key} cannot be combined with parameter servers",
                given=f"run.{key} = {value}",
                expected="the default, which turns it off",
                hint=f"--set run.{key}={'false' if key == 'probe' else '0'}",
            )
    if config.device == "cuda":
        raise ConfigError(
            "parameter servers need CPU ranks",
            given="run.device = cuda",
            expected="ranks whose tensors are in host memory",
            hint="--set run.device=cpu",
        )


def check_devices(ranks: int, device: str) -> None:
    """Raise ConfigError unless there is a GPU per rank, or all ranks run on the CPU."""
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if ranks > _MAX_LOCAL_RANKS:
        raise ConfigError(
            "more ranks than this host can start",
            given=f"{ranks:,} local ranks",
            expected=f"at most {_MAX_LOCAL_RANKS:,}",
            hint="torchrun on several hosts; plait explain needs no ranks",
        )
    if (device == "cuda" and gpus == 0) or 0 < gpus < ranks:
        raise ConfigError(
            "more ranks than GPUs",
            given=f"{ranks} ranks, {gpus} GPUs",
            expected="one rank per GPU",
            hint=f'--plan "dp={gpus}", or the device cpu' if gpus else "the device cpu, or auto",
        )


def _complete(recipe: Recipe, store: TokenStore, plan: Plan, *, is_saved: bool) -> Recipe:
    """Return the recipe with the values that data and tokenizer determine, and absolute paths.

    Checks that data, tokenizer and model fit, and that the model, with its vocabulary, can be sharded.
    """
    tokenizer = read_tokenizer(store.tokenizer_dir)
    config = recipe.model.config if is_saved else None  # a run's is complete
    if config is None:
        config = complete_config(recipe.model, tokenizer, store.index.vocab_size)
    model = model_on_meta(recipe.model.model_copy(update={"config": config}))
    store.check_model(
        vocab_size=int(model.config.vocab_size),
        max_sequence=getattr(model.config, "max_position_embeddings", None),
        sequence=recipe.data.sequence,
    )
    validate(Arguments(with_adapter(model, recipe.adapter), plan, tensor_plan=recipe.model.tensor_plan))
    if recipe.sample.tokens:  # otherwise found only at the end of the run
        check_prompt(prompt_ids(tokenizer, recipe.sample.prompt), model.config)
        check_generates(model)
    tasks_of_run(recipe.eval, tokenizer, model)
    path = recipe.model.path if recipe.model.pretrained else None
    of_model = {"config": config, "generation": generation_of(recipe.model), "path": path}
    sections: dict[str, dict[str, Any]] = {
        "run": {"offload_dir": recipe.run.offload_dir, "trace": recipe.run.trace},
        "model": of_model,
        "data": {"dir": recipe.data.dir},
        "tokenizer": {
            "path": recipe.tokenizer.path,
            "chat_template": recipe.tokenizer.chat_template,
        },
        "eval": {"tasks": tuple(str(Task.parse(text).absolute()) for text in recipe.eval.tasks)},
    }
    if recipe.preference is not None:
        sections["preference"] = {"reference_model": recipe.preference.reference_model}
    if recipe.distillation is not None:
        sections["distillation"] = {"teacher": recipe.distillation.teacher}
    changed = {}
    for name, values in sections.items():
        absolute = {key: v.absolute() if isinstance(v, Path) else v for key, v in values.items()}
        changed[name] = getattr(recipe, name).model_copy(update=absolute)
    return recipe.model_copy(update=changed)
