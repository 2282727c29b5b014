"""Boards that show curves of a run: TensorBoard, and Weights & Biases."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any, Protocol
from uuid import uuid4

from numpy.typing import NDArray

from plait.errors import ConfigError, RunError
from plait.fileio import read_text, write_text
from plait.train.run_dir import RunDir
from plait.train.saved_recipe import SavedRecipe
from plait.train.sections import BoardName


class Board(Protocol):
    """Curves of a run. Its methods may raise OSError."""

    def scalars(self, values: Mapping[str, float], step: int) -> None: ...

    def histogram(self, name: str, values: NDArray[Any], step: int) -> None: ...

    def close(self) -> None: ...


def check_boards(names: Sequence[BoardName]) -> None:
    """Raise ConfigError if the package of a board is not installed."""
    if "wandb" in names and find_spec("wandb") is None:
        raise ConfigError(
            "Weights & Biases is not installed",
            given="run.report_to has wandb, and there is no package wandb",
            expected="the packages of plait[wandb]",
            hint="pip install 'plait[wandb]'",
        )


def open_boards(names: Sequence[BoardName], run: RunDir, first_step: int) -> list[Board]:
    """Open the boards, which go on after `first_step`. Raises RunError, OSError."""
    return [
        _WandB(run) if name == "wandb" else _TensorBoard(run, first_step) for name in dict.fromkeys(names)
    ]


class _TensorBoard:
    def __init__(self, run: RunDir, first_step: int) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        # `purge_step`: TensorBoard drops what an earlier process wrote for later steps
        self._writer = SummaryWriter(str(run.tensorboard), purge_step=first_step + 1, flush_secs=30)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def histogram(self, name: str, values: NDArray[Any], step: int) -> None:
        self._writer.add_histogram(name, values, step, bins="auto")

    def close(self) -> None:
        self._writer.close()


class _WandB:
    """A run of Weights & Biases, which its own variables configure (WANDB_PROJECT, WANDB_MODE, ...).

    A resumed run has the same id. Steps that it repeats are logged again: `step` is a value, as W&B's own
    counter cannot go back.
    """

    def __init__(self, run: RunDir) -> None:
        import wandb

        self._wandb = wandb
        if not run.wandb.exists():
            write_text(run.wandb, uuid4().hex)
        with self._reporting("start"):
            self._run = wandb.init(
                id=read_text(run.wandb),
                name=run.path.name,
                dir=str(run.path),
                config=SavedRecipe.read(run.recipe).values,
                resume="allow",
                settings=wandb.Settings(console="off"),
            )
            self._run.define_metric("*", step_metric="step")

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        with self._reporting("log"):
            self._run.log({**values, "step": step})

    def histogram(self, name: str, values: NDArray[Any], step: int) -> None:
        with self._reporting("log"):
            self._run.log({name: self._wandb.Histogram(values), "step": step})

    def close(self) -> None:
        with self._reporting("finish"):
            self._run.finish()

    @contextlib.contextmanager
    def _reporting(self, action: str) -> Iterator[None]:
        try:
            yield
        except self._wandb.errors.Error as error:
            raise RunError(
                f"Weights & Biases cannot {action} the run",
                given=str(error),
                expected="an account that `wandb login` has stored, and a connection; or offline mode",
                hint="WANDB_MODE=offline, and `wandb sync` later",
            ) from error
