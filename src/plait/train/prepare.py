"""Check a run, build its data and create its directory, before the first rank starts."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from plait.api import check_shardable
from plait.checkpoint import Checkpoint
from plait.data.build import build
from plait.data.dataset import TokenStore
from plait.data.loader import check_samples
from plait.data.tokenizer import load_tokenizer
from plait.errors import ConfigError, PlanError, RunError
from plait.fileio import check_output_paths
from plait.models import causal_lm_on_meta
from plait.optim import MappedFile
from plait.plan import Plan
from plait.train.config import LossScaleConfig, Recipe, RunConfig, differences, read_recipe
from plait.train.model import check_config, check_prompt, complete_config, prompt_ids
from plait.train.optimizer import check_optimizer_args
from plait.train.resume import find_newest, rewind
from plait.train.run_dir import RunDir, create_run_dir, lock_run, rewrite_recipe


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
) -> Recipe:
    """Check a run as far as possible without ranks, build its data and create its directory.

    source  a recipe; with `resume` also a run directory
    start   a checkpoint: a new run starts from it, a resumed run rewinds to it
    ranks   the number of ranks, if it is fixed
    local   whether all ranks run on this host
    lock    holds the run's lock when this returns

    Returns the resolved recipe, as saved in the run directory. Raises a PlaitError, and then has created no
    directory.
    """
    recipe = _read(source, sets, plan, resume)
    run = RunDir(recipe.run.dir)
    resolved = _resolve_plan(recipe, ranks, local)
    if resume:
        saved = run.read_recipe(sets, plan)
        lock_run(run, lock)
        newest = find_newest(run.checkpoints) if start is None else None
    elif run.path.exists() and (not run.path.is_dir() or any(run.path.iterdir())):
        raise RunError(
            "the run directory already exists",
            given=f"run.dir = {run.path}",
            hint=f"--resume to continue the run, or --set run.dir={run.path}-2",
        )
    store = build(recipe.data, recipe.tokenizer)
    recipe = _resolve(recipe, store, resolved)

    def check(saved: Checkpoint) -> None:
        check_checkpoint(saved, recipe, store)

    if not resume:
        create_run_dir(run, recipe, store, start, check)
        lock_run(run, lock)
        return recipe
    _check_unchanged(recipe, saved, run)
    if start is not None:
        rewind(run.checkpoints, start, check)
    elif newest is not None:
        check(newest)
    rewrite_recipe(run, recipe)
    return recipe


def _resolve_plan(recipe: Recipe, ranks: int | None, local: bool) -> Plan:
    """Return the plan with its number of ranks. Raises a PlaitError if it does not fit the recipe."""
    requested = Plan.parse(recipe.plan)
    num_ranks = ranks if ranks is not None else num_local_ranks(requested, recipe.run.device)
    resolved = requested.resolved(num_ranks)
    resolved.check_ranks(num_ranks)
    _check_batch(resolved, recipe.run.batch)
    _check_loss_scale(resolved, recipe.loss_scale)
    _check_offload(resolved, recipe.run)
    check_output_paths({"run.trace": recipe.run.trace})
    if local:
        _check_devices(resolved.num_ranks, recipe.run.device)
    check_optimizer_args(recipe.optimizer)
    check_config(recipe.model, recipe.data.sequence, resolved)
    return resolved


def _read(source: Path, sets: Sequence[str], plan: str | None, resume: bool) -> Recipe:
    if resume and not source.exists() and not source.suffix:
        raise RunError("the run does not exist", given=source, hint="plait train RECIPE starts a run")
    if not source.is_dir():
        return read_recipe(source, sets, plan)
    if not resume:
        raise RunError("a directory is not a recipe", given=source, hint=f"plait train {source} --resume")
    return RunDir(source).read_recipe(sets, plan)


def num_local_ranks(plan: Plan, device: str) -> int:
    """Return how many ranks `plait train` starts by default.

    The plan's number of ranks; with dp=auto the most that the GPUs allow, on CPUs the fewest.
    """
    if plan.dp:
        return plan.num_ranks
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    return max(1, gpus // plan.min_ranks) * plan.min_ranks


def run_facts(recipe: Recipe, store: TokenStore) -> dict[str, object]:
    """Return the facts that a checkpoint must share with the run to be loaded by it."""
    path = str(recipe.model.path) if recipe.model.path else None
    return {
        "model": {"config": recipe.model.config, "path": path},
        "data": store.digest,
        "optimizer": recipe.optimizer.name,
        # the order of samples: if it changed, a resumed run would see some twice and others never
        "samples": {
            "batch": recipe.run.batch,
            "sequence": recipe.data.sequence,
            "order": recipe.data.order,
            "seed": recipe.run.seed,
        },
    }


def check_checkpoint(saved: Checkpoint, recipe: Recipe, store: TokenStore) -> None:
    """Raise CheckpointError unless the checkpoint has this run's model, data, optimizer and samples."""
    for fact, value in run_facts(recipe, store).items():
        saved.check_same(fact, value)


def _check_batch(plan: Plan, batch: int) -> None:
    try:
        plan.check_batch(batch)
    except PlanError as error:  # name the recipe's key
        raise PlanError(
            error.fact, given=f"run.{error.given}", expected=error.expected, hint=f"run.{error.hint}"
        ) from error


def _resolve(recipe: Recipe, store: TokenStore, plan: Plan) -> Recipe:
    """Return the recipe with the values that data and tokenizer determine, and absolute paths.

    Checks that data, tokenizer and model fit, and that the model, with its vocabulary, can be sharded.
    """
    tokenizer = load_tokenizer(store.tokenizer_dir)
    config = complete_config(recipe.model, tokenizer, store.vocab_size)
    model = causal_lm_on_meta(config)
    store.check_model(
        vocab_size=int(model.config.vocab_size),
        max_sequence=getattr(model.config, "max_position_embeddings", None),
        sequence=recipe.data.sequence,
    )
    check_shardable(model, plan, recipe.model.tensor_plan)
    if recipe.sample.tokens:  # otherwise found only at the end of the run
        check_prompt(prompt_ids(tokenizer, recipe.sample.prompt), model.config)
    streams = [store.train, *([store.validation] if recipe.run.evaluate_every else [])]
    for stream in streams:
        check_samples(stream, sequence=recipe.data.sequence, global_batch=recipe.run.batch)
    if recipe.model.pretrained:
        model_config = recipe.model.model_copy(update={"path": _absolute(recipe.model.path)})
    else:
        model_config = recipe.model.model_copy(update={"config": config, "path": None})
    data_config = recipe.data.model_copy(update={"dir": _absolute(recipe.data.dir)})
    tokenizer_config = recipe.tokenizer.model_copy(update={"path": _absolute(recipe.tokenizer.path)})
    paths = {"offload_dir": _absolute(recipe.run.offload_dir), "trace": _absolute(recipe.run.trace)}
    run_config = recipe.run.model_copy(update=paths)
    return recipe.model_copy(
        update={"run": run_config, "model": model_config, "data": data_config, "tokenizer": tokenizer_config}
    )


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else path.absolute()


def _check_unchanged(recipe: Recipe, saved: Recipe, run: RunDir) -> None:
    """Raise RunError if the recipe file has changed since the run started; --set and --plan may differ."""
    changed = differences(recipe, saved)
    if changed:
        raise RunError(
            "the recipe has changed since the run started",
            given=f"{', '.join(changed[:5])} differ from {run.recipe}",
            hint=f"plait train {run.path} --resume, with --set for each change",
        )


def _check_loss_scale(plan: Plan, scale: LossScaleConfig) -> None:
    if plan.precision != "fp16" and scale != LossScaleConfig():
        raise ConfigError(
            "loss scaling requires fp16, whose gradients underflow",
            given=f"[loss_scale] and precision={plan.precision}",
            hint="precision=fp16, or --set loss_scale= to remove the section from the recipe",
        )


def _check_offload(plan: Plan, config: RunConfig) -> None:
    """Raise ConfigError unless files can be created in the offload folder, if the plan has offload=disk.

    Checks this host only. Other hosts' folders, and the free space in all of them, are checked by the ranks,
    which allocate all of it before the first step. Plans without offload=disk ignore the folder, so that one
    recipe can be run under several plans.
    """
    if plan.offload != "disk":
        return
    folder = config.offload_dir
    if config.save_in_background:
        raise ConfigError(
            "background saves copy into memory the states that offload=disk keeps out of it",
            given="run.save_in_background = true, offload=disk",
            hint="--set run.save_in_background=false",
        )
    if folder is None:
        raise ConfigError(
            "offload=disk needs a folder",
            given="no run.offload_dir",
            expected="a folder on a fast local disk of each host, not on a network file system",
            hint="--set run.offload_dir=/var/tmp",
        )
    MappedFile(folder, 0).close()


def _check_devices(ranks: int, device: str) -> None:
    """Raise ConfigError unless there is a GPU per rank, or all ranks run on the CPU."""
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if (device == "cuda" and gpus == 0) or 0 < gpus < ranks:
        raise ConfigError(
            "more ranks than GPUs",
            given=f"{ranks} ranks, {gpus} GPUs",
            expected="one rank per GPU",
            hint=f'--plan "dp={gpus}", or --set run.device=cpu' if gpus else "--set run.device=cpu",
        )
