"""A run's directory, and everything that can be checked before the first rank starts.

[Note: whose run it is]
A run's directory that exists is refused, unless the run is to be resumed: somebody may be at work in it. But
torchrun starts its ranks again with the same words, after it has lost one or gained some. So whoever prepares
a run leaves in it by which process of torchrun, and by which --rdzv-id, its ranks were started; ranks that
are started by the same process go on with what is there. After a restart the id is enough, for the first rank
may have come to another host; at a first start it is not, for another job may use it again.
"""

import json
import os
import secrets
import shutil
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from plait.api import check_shardable
from plait.checkpoint import Checkpoint
from plait.data import TokenStore, build, check_samples, load_tokenizer
from plait.errors import ConfigError, PlanError, RunError
from plait.fileio import check_output_paths, file_lock, sync_folder, sync_tree, write_json
from plait.models import causal_lm_on_meta
from plait.optim import MappedFile
from plait.plan import Plan
from plait.train.config import LossScaleConfig, Recipe, RunConfig, differences, read_recipe
from plait.train.model import check_config, check_prompt, prompt_ids, whole_config
from plait.train.resume import Check, begin_with, go_back, newest_that_opens

_LEFT_S = 10.0


@dataclass(frozen=True)
class RunDir:
    """Where a run keeps what."""

    path: Path

    @property
    def recipe(self) -> Path:
        """What the run uses, resolved."""
        return self.path / "recipe.json"

    @property
    def job(self) -> Path:
        """Whose it is: see [Note: whose run it is]."""
        return self.path / "job.json"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        return self.path / "tensorboard"

    @property
    def picture(self) -> Path:
        return self.path / "loss.png"

    @property
    def measured(self) -> Path:
        """What the ranks held and said, for `plait explain`."""
        return self.path / "measured.json"

    @property
    def stacks(self) -> Path:
        """Of ranks that hang, and what each does, while they train."""
        return self.path / "stacks"

    @property
    def export(self) -> Path:
        """The trained model in Hugging Face form."""
        return self.path / "export"

    def read_recipe(self, sets: Sequence[str] = (), plan: str | None = None) -> Recipe:
        """The recipe of this run, wherever the run has been moved to. Raises RunError, ConfigError."""
        if not self.recipe.is_file():
            raise RunError(
                "there is no such run" if not self.path.exists() else "this is not a run's directory",
                given=self.path,
                expected=f"a directory with {self.recipe.name}",
                hint="plait train RECIPE begins one",
            )
        recipe = read_recipe(self.recipe, sets, plan)
        return recipe.model_copy(update={"run": recipe.run.model_copy(update={"dir": self.path})})


def prepare(
    source: Path,
    *,
    sets: Sequence[str] = (),
    plan: str | None = None,
    resume: bool = False,
    start: Path | None = None,
    ranks: int | None = None,
    local: bool = True,
    alone: ExitStack | None = None,
) -> Recipe:
    """Checks a run as far as it can be without a rank, builds its data and makes its directory.

    `source` is a recipe, or with `resume` also a run's directory. `start`: a checkpoint; a new run begins
    with it, one that is resumed goes back to it. `ranks`: how many there are, if that is decided; `local`
    when all of them are to run on this host. `alone`: holds the run's lock when this returns. Returns the
    recipe as the ranks are to use it, which is saved in the run's directory. Raises a PlaitError, and has
    then made no directory.
    """
    recipe = _read(source, sets, plan, resume)
    run = RunDir(recipe.run.dir)
    asked = Plan.parse(recipe.plan)
    num_ranks = ranks if ranks is not None else num_local_ranks(asked, recipe.run.device)
    the_plan = asked.resolved(num_ranks)
    the_plan.check_ranks(num_ranks)
    _check_batch(the_plan, recipe.run.batch)
    _check_loss_scale(the_plan, recipe.loss_scale)
    _check_offload(the_plan, recipe.run)
    check_output_paths({"run.trace": recipe.run.trace})
    if local:
        _check_devices(the_plan.num_ranks, recipe.run.device)
    check_config(recipe.model, recipe.data.sequence, the_plan)
    if resume:
        saved = run.read_recipe(sets, plan)
        _hold(run, alone)
        last = newest_that_opens(run.checkpoints) if start is None else None
    elif run.path.exists() and (not run.path.is_dir() or any(run.path.iterdir())):
        raise RunError(
            "the run's directory exists",
            given=f"run.dir = {run.path}",
            hint=f"--resume to go on with it, or --set run.dir={run.path}-2",
        )
    store = build(recipe.data, recipe.tokenizer)
    recipe = _resolve(recipe, store, the_plan)

    def check(found: Checkpoint) -> None:
        check_checkpoint(found, recipe, store)

    if not resume:
        _create(run, recipe, store, start, check)
        _hold(run, alone)
        return recipe
    _check_unchanged(recipe, saved, run)
    if start is not None:
        go_back(run.checkpoints, start, check)
    elif last is not None:
        check(last)
    _rewrite(run, recipe)
    return recipe


def _hold(run: RunDir, alone: ExitStack | None) -> None:
    """No other job trains this run from now on. Of one that has just ended, a process may be left for a
    little while."""
    if alone is None:
        return
    try:
        alone.enter_context(file_lock(run.path / ".lock", _LEFT_S))
    except BlockingIOError as error:
        raise RunError(
            "another job trains this run", given=run.path, expected="one job to a run", hint="end that one"
        ) from error
    except OSError as error:
        raise RunError("the run's directory cannot be written", given=f"{run.path}: {error}") from error


def _read(source: Path, sets: Sequence[str], plan: str | None, resume: bool) -> Recipe:
    if resume and not source.exists() and not source.suffix:
        raise RunError("there is no such run", given=source, hint="plait train RECIPE begins one")
    if not source.is_dir():
        return read_recipe(source, sets, plan)
    if not resume:
        raise RunError("a directory is not a recipe", given=source, hint=f"plait train {source} --resume")
    return RunDir(source).read_recipe(sets, plan)


def is_later_attempt(run: RunDir) -> bool:
    """Whether torchrun had started this process's job before, which then began or resumed the run. It goes on
    with it then: see [Note: whose run it is]."""
    try:
        run_id, process = json.loads(run.job.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False
    our_id, our_process = _job()
    is_named = our_id not in ("", "none")  # torchrun's word for none
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return our_id != "" and (process == our_process or (restarts > 0 and is_named and run_id == our_id))


def num_local_ranks(plan: Plan, device: str) -> int:
    """How many ranks `plait train` starts when nobody says it: as many as the plan has; with dp=auto as many
    as the GPUs allow, on a CPU as few as can be."""
    if plan.dp:
        return plan.num_ranks
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    return max(1, gpus // plan.min_ranks) * plan.min_ranks


def discard_unused(run: RunDir) -> None:
    """Removes the directory of a run that ended before it had done anything."""
    if not run.metrics.exists():
        shutil.rmtree(run.path, ignore_errors=True)


def run_facts(recipe: Recipe, store: TokenStore) -> dict[str, object]:
    """What makes a checkpoint one of this run."""
    path = str(recipe.model.path) if recipe.model.path else None
    return {
        "model": {"config": recipe.model.config, "path": path},
        "data": store.digest,
        "optimizer": recipe.optimizer.name,
        # what sample is which: changed, a resumed run would see some twice and others never
        "samples": {
            "batch": recipe.run.batch,
            "sequence": recipe.data.sequence,
            "order": recipe.data.order,
            "seed": recipe.run.seed,
        },
    }


def check_checkpoint(last: Checkpoint, recipe: Recipe, store: TokenStore) -> None:
    """Raises CheckpointError unless it is one of this run: of its model, data, optimizer and samples."""
    for fact, value in run_facts(recipe, store).items():
        last.check_same(fact, value)


def _check_batch(plan: Plan, batch: int) -> None:
    try:
        plan.check_batch(batch)
    except PlanError as error:  # the recipe's name for it
        raise PlanError(
            error.fact, given=f"run.{error.given}", expected=error.expected, hint=f"run.{error.hint}"
        ) from error


def _resolve(recipe: Recipe, store: TokenStore, plan: Plan) -> Recipe:
    """The recipe with everything said that the data and the tokenizer decide; checks that they fit, and that
    the model with their vocabulary, or one that comes with its weights, can be cut as the plan says."""
    tokenizer = load_tokenizer(store.tokenizer_dir)
    config = whole_config(recipe.model, tokenizer, store.vocab_size)
    model = causal_lm_on_meta(config)
    store.check_model(
        vocab_size=int(model.config.vocab_size),
        max_sequence=getattr(model.config, "max_position_embeddings", None),
        sequence=recipe.data.sequence,
    )
    check_shardable(model, plan, recipe.model.tensor_plan)
    if recipe.sample.tokens:  # else found at the end of the run
        check_prompt(prompt_ids(tokenizer, recipe.sample.prompt), model.config)
    streams = [store.train, *([store.validation] if recipe.run.evaluate_every else [])]
    for stream in streams:
        check_samples(stream, sequence=recipe.data.sequence, global_batch=recipe.run.batch)
    if recipe.model.pretrained:
        resolved = recipe.model.model_copy(update={"path": _absolute(recipe.model.path)})
    else:
        resolved = recipe.model.model_copy(update={"config": config, "path": None})
    data = recipe.data.model_copy(update={"dir": _absolute(recipe.data.dir)})
    words = recipe.tokenizer.model_copy(update={"path": _absolute(recipe.tokenizer.path)})
    files = {"offload_dir": _absolute(recipe.run.offload_dir), "trace": _absolute(recipe.run.trace)}
    how = recipe.run.model_copy(update=files)
    return recipe.model_copy(update={"run": how, "model": resolved, "data": data, "tokenizer": words})


def _absolute(path: Path | None) -> Path | None:
    return None if path is None else path.absolute()


def _job() -> tuple[str, str]:
    """The id of the job that torchrun runs, empty without torchrun; and the process that has started us."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
    stat = Path(f"/proc/{os.getppid()}/stat")
    began = stat.read_text().rpartition(")")[2].split()[19] if stat.exists() else ""
    return run_id, f"{socket.gethostname()} {os.getppid()} {began}"


def _create(run: RunDir, recipe: Recipe, store: TokenStore, start: Path | None, check: Check) -> None:
    """Makes the directory wholly or not at all, and on disk: its checkpoints are worth nothing without it."""
    partial = run.path.with_name(f"{run.path.name}.tmp-{secrets.token_hex(4)}")
    try:
        partial.mkdir(parents=True)
        try:
            write_json(RunDir(partial).recipe, recipe.model_dump(mode="json"))
            write_json(RunDir(partial).job, _job())
            shutil.copytree(store.tokenizer_dir, RunDir(partial).tokenizer)
            if start is not None:
                begin_with(RunDir(partial).checkpoints, start, check)
            sync_tree(partial)
            partial.replace(run.path)  # also over an empty directory
            sync_folder(run.path.parent)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    except OSError as error:
        raise RunError("the run's directory cannot be made", given=f"{run.path}: {error}") from error


def _rewrite(run: RunDir, recipe: Recipe) -> None:
    """With what --set and --plan have changed."""
    try:
        write_json(run.recipe, recipe.model_dump(mode="json"))
        write_json(run.job, _job())
    except OSError as error:
        raise RunError("the run's recipe cannot be written", given=f"{run.recipe}: {error}") from error


def _check_unchanged(recipe: Recipe, saved: Recipe, run: RunDir) -> None:
    """A recipe file that has changed since the run began is refused; what --set and --plan say is not."""
    changed = differences(recipe, saved)
    if changed:
        raise RunError(
            "the recipe is not the one that the run began with",
            given=f"{', '.join(changed[:5])} differ from {run.recipe}",
            hint=f"plait train {run.path} --resume, with --set for what shall change",
        )


def _check_loss_scale(plan: Plan, scale: LossScaleConfig) -> None:
    if plan.precision != "fp16" and scale != LossScaleConfig():
        raise ConfigError(
            "a loss scale is for fp16, whose gradients underflow",
            given=f"[loss_scale] and precision={plan.precision}",
            hint="precision=fp16, or --set loss_scale= to take the section out of the recipe",
        )


def _check_offload(plan: Plan, how: RunConfig) -> None:
    """Raises ConfigError unless files can be made in the folder, where the plan offloads to disk.

    On this host: other hosts' folders, and the room in all of them, are for the ranks to find out, which
    take the whole of it before the first step. A plan that does not offload to disk has no use for the
    folder and may have one, so that a recipe can be run under several plans.
    """
    if plan.offload != "disk":
        return
    folder = how.offload_dir
    if how.save_in_background:
        raise ConfigError(
            "a save in the background copies into memory what offload=disk keeps out of it",
            given="run.save_in_background = true, offload=disk",
            hint="--set run.save_in_background=false",
        )
    if folder is None:
        raise ConfigError(
            "offload=disk does not say where to",
            given="no run.offload_dir",
            expected="a folder on a fast disk of the host, or of each host; not on a network's",
            hint="--set run.offload_dir=/var/tmp",
        )
    MappedFile(folder, 0).close()


def _check_devices(ranks: int, device: str) -> None:
    """One rank per GPU, or all on the CPU."""
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if (device == "cuda" and gpus == 0) or 0 < gpus < ranks:
        raise ConfigError(
            "more ranks than GPUs",
            given=f"{ranks} ranks, {gpus} GPUs",
            expected="one rank per GPU",
            hint=f'--plan "dp={gpus}", or --set run.device=cpu' if gpus else "--set run.device=cpu",
        )
