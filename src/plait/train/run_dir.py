"""The run directory: its files, its lock, and the job that owns it.

[Note: run ownership]
An existing run directory is refused unless the run is resumed: another job may be using it. torchrun,
however, restarts its ranks with the same command line after it has lost or gained one. Preparing a run
therefore writes to job.json which torchrun process, and which --rdzv-id, started its ranks; ranks started by
the same process resume the run. After a restart a matching id is enough, because the first rank may have
moved to another host; at a first start it is not, because another job may reuse the id.
"""

import os
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from plait.data.dataset import TokenStore
from plait.data.tokenizer import file_hashes
from plait.errors import RunError
from plait.fileio import (
    WRITABLE,
    copy_regular,
    disk_hint,
    file_lock,
    read_json,
    sync_folder,
    sync_tree,
    temporary_folder,
    write_json,
    writing,
)
from plait.launchers import process_identity
from plait.train.config import Recipe, override_recipe
from plait.train.resume import Check, start_from
from plait.train.saved_recipe import RECIPE_FILE, SavedRecipe, check_is_run

_LOCK_TIMEOUT_S = 10.0


class _Name:
    """The name of a file or folder in a run directory, which reads as its path."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: "RunDir | None", owner: type | None = None) -> Path:
        return (Path("RUN") if run is None else run.path) / self._name


@dataclass(frozen=True)
class RunDir:
    """The paths of a run's files."""

    path: Path

    recipe = _Name(RECIPE_FILE)  # resolved
    job = _Name("job.json")  # that owns the run, see [Note: run ownership]
    tokenizer = _Name("tokenizer")
    checkpoints = _Name("checkpoints")
    metrics = _Name("metrics.jsonl")
    tensorboard = _Name("tensorboard")
    wandb = _Name("wandb-id")  # of the run in Weights & Biases
    picture = _Name("loss.png")
    experts = _Name("experts.png")  # loads of a mixture's experts
    clocks = _Name("clocks.png")  # of the workers of parameter servers
    measured = _Name("measured.json")  # memory and traffic of the ranks, for `plait explain`
    stacks = _Name("stacks")  # stack traces of hung ranks, and during training each rank's status
    sample = _Name("sample.txt")  # of generated text
    report = _Name("report.html")
    export = _Name("export")  # the trained model in Hugging Face format
    adapter = _Name("adapter")  # in its place for an [adapter], in PEFT's format

    def read_recipe(self, sets: Sequence[str] = (), plan: str | None = None) -> Recipe:
        """Return the recipe of this run; its `run.dir` is this directory, even if it was moved.

        Raises RunError, ConfigError.
        """
        check_is_run(self.path)
        values = SavedRecipe.read(self.recipe).values
        recipe = override_recipe(values, sets, plan, source=str(self.recipe))
        return recipe.model_copy(update={"run": recipe.run.model_copy(update={"dir": self.path})})

    def checked_tokenizer(self) -> Path:
        """Return the directory of the tokenizer. Raises RunError if it is not the one the run began with."""
        expected, found = SavedRecipe.read(self.recipe).tokenizer_files, file_hashes(self.tokenizer)
        if changed := sorted({name for name, _ in found.items() ^ expected.items()}):
            raise RunError(
                "the run's tokenizer is damaged, or was edited",
                given=f"{self.tokenizer}: {', '.join(changed)}",
                expected="the tokenizer of the tokens that the model was trained on",
                hint="copy it from data.dir/tokenizer; what is to be changed for users, change in the export",
            )
        return self.tokenizer


def lock_run(run: RunDir, lock: ExitStack | None) -> None:
    """Lock the run against other jobs until `lock` is closed.

    Waits a little: processes of a job that has just ended may still hold the lock. Raises RunError.
    """
    if lock is None:
        return
    try:
        lock.enter_context(file_lock(run.path / ".lock", _LOCK_TIMEOUT_S))
    except BlockingIOError as error:
        raise RunError(
            "another job is training this run",
            given=run.path,
            expected="one job per run",
            hint="stop the other job",
        ) from error
    except OSError as error:
        raise RunError(
            "cannot write to the run directory",
            given=f"{run.path}: {error}",
            expected=WRITABLE,
            hint=disk_hint(run.path),
        ) from error


def create_run_dir(run: RunDir, recipe: Recipe, store: TokenStore, start: Path | None, check: Check) -> None:
    """Create the directory, atomically and durably: checkpoints are useless without it. Raises RunError."""
    with writing("cannot create the run directory", run.path), temporary_folder(run.path) as folder:
        partial = RunDir(folder)
        shutil.copytree(store.tokenizer_dir, partial.tokenizer, copy_function=copy_regular)
        _write_recipe(partial, recipe, store)
        write_json(partial.job, _current_job())
        if start is not None:
            start_from(partial.checkpoints, start, check)
        sync_tree(folder)
        folder.replace(run.path)  # also over an empty directory
        sync_folder(run.path.parent)


def rewrite_recipe(run: RunDir, recipe: Recipe, store: TokenStore) -> None:
    """Write the recipe with the changes of --set and --plan, and the current job. Raises RunError."""
    with writing("cannot write the run's recipe", run.recipe):
        _write_recipe(run, recipe, store)
        write_json(run.job, _current_job())


def _write_recipe(run: RunDir, recipe: Recipe, store: TokenStore) -> None:
    SavedRecipe(recipe.model_dump(mode="json"), store.index.tokenizer_files).write(run.recipe)


def is_later_attempt(run: RunDir) -> bool:
    """Return whether an earlier attempt of this torchrun job started or resumed the run.

    If so, this attempt resumes it. See [Note: run ownership].
    """
    try:
        run_id, process = read_json(run.job)
    except (OSError, ValueError, TypeError):
        return False
    our_id, our_process = _current_job()
    is_named = our_id not in ("", "none")  # torchrun's default id is "none"
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return our_id != "" and (process == our_process or (restarts > 0 and is_named and run_id == our_id))


def _current_job() -> tuple[str, str]:
    """torchrun's job id (empty without torchrun), and the process that started this one."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return run_id, process_identity(os.getppid())
