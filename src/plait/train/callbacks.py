"""Callbacks: a user's code at the events of a run."""

import signal
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from plait.engine.engine import Engine
from plait.errors import ConfigError, PlaitError, RunError
from plait.fileio import import_object
from plait.train.metrics import StepMetrics


class Requests(Protocol):
    """Requests of a rank: see `SignalHandler`."""

    stop_signal: signal.Signals | None
    save_requested: bool


@dataclass
class CallbackRun:
    """A run, as its callbacks see it.

    engine  of this rank
    folder  the run's directory
    rank    of this process, from 0
    step    steps done
    """

    engine: Engine
    folder: Path
    rank: int
    step: int
    _requests: Requests

    def save(self) -> None:
        """Save a checkpoint soon. One rank's request is enough."""
        self._requests.save_requested = True

    def stop(self) -> None:
        """Save, and stop soon, as after SIGTERM: the run can be resumed. One rank's request is enough."""
        self._requests.stop_signal = self._requests.stop_signal or signal.SIGTERM


class Callback:
    """Base of callbacks: override what is needed, and name the class in `run.callbacks`.

    Every rank makes an instance, without arguments, and calls the same methods in the same order, so that
    they may communicate. With parameter servers only worker 0 does. An error in one ends the run.
    """

    def on_start(self, run: CallbackRun) -> None:
        """Called before the first step, also of a resumed run, and after a rollback."""

    def on_step(self, run: CallbackRun, metrics: StepMetrics) -> None:
        """Called after a step. `metrics` has the loss and more, over all ranks."""

    def on_evaluate(self, run: CallbackRun, loss: float) -> None:
        """Called after an evaluation. `loss`: mean over the targets of the validation batches."""

    def on_save(self, run: CallbackRun, step: int) -> None:
        """Called when the checkpoint of `step` is complete, in `run.folder / "checkpoints"`."""

    def on_end(self, run: CallbackRun) -> None:
        """Called after the last step of this process. If training is complete, the export exists."""


@dataclass(frozen=True)
class Callbacks:
    """The callbacks of a run, by their names."""

    of_names: Mapping[str, Callback]

    def call(self, event: str, run: CallbackRun, *args: object) -> None:
        """Call the method `event` of each. Raises RunError for an error in one."""
        for name, callback in self.of_names.items():
            try:
                getattr(callback, event)(run, *args)
            except PlaitError:
                raise
            except Exception as error:  # whatever a user's code raises
                place = traceback.extract_tb(error.__traceback__)[-1]
                raise RunError(
                    f"a callback has failed in {event}",
                    given=f"{name}: {type(error).__name__}: {error} ({place.filename}:{place.lineno})",
                    expected="a callback that ends without an error",
                    hint="--debug, which prints the traceback",
                ) from error


def load_callbacks(names: Sequence[str]) -> Callbacks:
    """Make the callbacks with these names. Raises ConfigError."""
    return Callbacks({name: _make(name, kind) for name, kind in callback_classes(names).items()})


def callback_classes(names: Sequence[str]) -> dict[str, type[Callback]]:
    """Import the classes with these names: `module:Class`, in this folder or installed. Raises
    ConfigError."""
    return {name: _class(name) for name in names}


def _class(name: str) -> type[Callback]:
    module, _, attribute = name.partition(":")
    try:
        found = import_object(name, Path.cwd())
    except Exception as error:  # whatever a user's module raises
        raise _not_made(name, f"{type(error).__name__}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Callback)):
        raise ConfigError(
            "a callback is not derived from plait's class",
            given=f"{name}: {found!r}",
            expected="a subclass of plait.train.callbacks.Callback",
            hint=f"class {attribute}(Callback) in {module}",
        )
    return found


def _make(name: str, kind: type[Callback]) -> Callback:
    try:
        return kind()
    except Exception as error:  # whatever a user's class raises
        raise _not_made(name, f"{type(error).__name__}: {error}") from error


def _not_made(name: str, problem: str) -> ConfigError:
    module, _, attribute = name.partition(":")
    return ConfigError(
        "cannot make a callback",
        given=f"{name}: {problem}",
        expected="module:Class, in this folder or installed; a class without arguments",
        hint=f'python -c "from {module} import {attribute}; {attribute}()"',
    )
