"""What a run tells while it runs: a progress line, metrics.jsonl, TensorBoard. On rank 0; elsewhere nothing.

metrics.jsonl has an object per line: of a step all of `StepMetrics` (`loss_scale` only where there is one), of
an evaluation `step` and `validation_loss`, of a save `step` and `save_pause_s`, of what has to be known and
ends nothing `step` and `warning`. A number that is not finite stands as null. Resumed, a run cuts the file
back to the step that it resumes from, so that no step stands in it twice.
"""

import contextlib
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard.writer import SummaryWriter

from plait.errors import RunError
from plait.fileio import write_text
from plait.train.run import RunDir

_CURVES = {"loss", "lr", "grad_norm", "tokens_per_s", "mfu", "skipped_steps", "loss_scale"}


@dataclass(frozen=True)
class StepMetrics:
    """One training step, over all ranks. `step` counts from 1.

    skipped_steps  how many were skipped since step 1
    tokens         targets since step 1
    loss_scale     of fp16: what this step's loss was scaled by; None for other precisions
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    skipped: bool
    skipped_steps: int
    tokens: int
    tokens_per_s: float
    mfu: float
    seconds: float
    loss_scale: float | None = None


class Metrics:
    """Opened for one run of the loop: `with Metrics(...) as metrics`.

    console     None on every rank but the first: then nothing is shown or written
    first_step  how many steps are done already
    log_every   steps between lines on the screen and points on TensorBoard

    Every method raises RunError when the disk is full or cannot be written.
    """

    def __init__(
        self, run: RunDir, console: Console | None, first_step: int, steps: int, log_every: int
    ) -> None:
        self._console = console
        self._log_every = log_every
        self._steps = steps
        self._since_log: list[StepMetrics] = []
        self._progress: Progress | None = None
        if console is None:
            return
        self._path = run.path
        with self._writing():
            truncate_metrics(run.metrics, first_step or -1)  # what there is to say of step 0 comes again
            self._file = run.metrics.open("a", encoding="utf-8")
            # `purge_step`: TensorBoard drops what an earlier process wrote for the steps from here on
            self._board = SummaryWriter(str(run.tensorboard), purge_step=first_step + 1, flush_secs=30)
        if console.is_terminal:
            self._progress = _progress_line(console)
            self._task = self._progress.add_task("", total=steps, completed=first_step, text="starting")

    def __enter__(self) -> "Metrics":
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
        if self._console is None:
            return
        try:
            with self._writing(), contextlib.closing(self._board):
                self._file.close()
        except RunError:
            if error is None:  # else it is the cause, and what is to be told
                raise

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(
                "the run's metrics cannot be written",
                given=f"{self._path}: {error}",
                hint="free some space, then --resume",
            ) from error

    def step(self, facts: StepMetrics) -> None:
        """Records a step. The file gets every step; screen and TensorBoard every `log_every`-th."""
        if self._console is None:
            return
        with self._writing():
            self._file.write(_line(_given(facts)))
        self._since_log.append(facts)
        if facts.skipped:
            scale = "" if facts.loss_scale is None else f" (loss scale {facts.loss_scale:g})"
            self.note(f"step {facts.step}: the gradient is not finite; the step is skipped{scale}")
        if self._progress is not None:
            self._progress.update(self._task, completed=facts.step, text=self._text([facts]))
        if facts.step % self._log_every and facts.step != self._steps:
            return
        if self._progress is None:
            self.note(f"step {facts.step}/{self._steps}  {self._text(self._since_log)}{self._left()}")
        with self._writing():
            for name in _CURVES & _given(facts).keys():
                self._board.add_scalar(f"train/{name}", getattr(facts, name), facts.step)
            self._file.flush()
        self._since_log.clear()

    def validation(self, step: int, loss: float) -> None:
        """Records an evaluation after `step` steps."""
        if self._console is None:
            return
        with self._writing():
            self._file.write(_line({"step": step, "validation_loss": loss}))
            self._file.flush()
            self._board.add_scalar("validation/loss", loss, step)
        self.note(f"step {step}/{self._steps}  validation loss {loss:.4f}")

    def saved(self, step: int, pause_s: float, text: str) -> None:
        """Records that the state after `step` steps is saved, for which these waited `pause_s` seconds."""
        self._record({"step": step, "save_pause_s": pause_s})
        self.note(text)

    def warn(self, step: int, text: str) -> None:
        """Shows and records what has gone wrong after `step` steps and is no reason to end."""
        self._record({"step": step, "warning": text})
        self.note(f"warning: {text}")

    def _record(self, record: dict[str, Any]) -> None:
        if self._console is not None:
            with self._writing():
                self._file.write(_line(record))
                self._file.flush()

    def flush(self) -> None:
        """What was recorded is in the file when this returns."""
        if self._console is not None:
            with self._writing():
                self._file.flush()

    def note(self, text: str) -> None:
        if self._console is not None:
            self._console.print(text, highlight=False, soft_wrap=True, markup=False)

    def _text(self, window: list[StepMetrics]) -> str:
        last = window[-1]
        losses = [facts.loss for facts in window if math.isfinite(facts.loss)]
        loss = sum(losses) / len(losses) if losses else math.nan
        speed = sum(facts.tokens_per_s for facts in window) / len(window)
        mfu = sum(facts.mfu for facts in window) / len(window)
        return f"loss {loss:.4f} lr {last.lr:.1e} grad {last.grad_norm:.2f} {speed:,.0f} tok/s mfu {mfu:.1%}"

    def _left(self) -> str:
        window = self._since_log
        left_s = (self._steps - window[-1].step) * sum(facts.seconds for facts in window) / len(window)
        return f"  {time.strftime('%H:%M:%S', time.gmtime(left_s))} left" if left_s < 86400 else ""


def _progress_line(console: Console) -> Progress:
    """Of at most 80 columns, as long as the numbers are no larger than usual."""
    return Progress(
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        BarColumn(bar_width=8),
        TextColumn("{task.fields[text]}"),
        TimeRemainingColumn(),
        console=console,
        refresh_per_second=4,
    )


def truncate_metrics(path: Path, last_step: int) -> None:
    """Drops the records of later steps than `last_step`, and lines that are none."""
    if not path.exists():
        return
    kept = [_line(record) for record in read_metrics(path) if record["step"] <= last_step]
    write_text(path, "".join(kept))


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics.jsonl, in order. Lines that are none, which a killed process or a power cut
    has left, are left out."""
    records = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if line.endswith("\n") and isinstance(record, dict) and isinstance(record.get("step"), int):
                records.append(record)
    return records


def _given(facts: StepMetrics) -> dict[str, Any]:
    return {name: value for name, value in vars(facts).items() if value is not None}


def _line(record: dict[str, Any]) -> str:
    finite = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in record.items()
    }
    return json.dumps(finite) + "\n"


def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a square matrix product on this device now, with this process's threads: MFU's measure.

    The best of several tries, so that a neighbour's noise does not make the device look slow. Every rank
    of a host has to call it at the same time, to share the host as they do in training.
    """
    size = 8192 if device.type == "cuda" else 1024
    if device.type == "cpu" and dtype is torch.float16:
        size = 256  # most processors have no fp16 arithmetic: a product of the size above takes seconds
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    best_s = math.inf
    for _ in range(6):
        began = time.perf_counter()
        torch.mm(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best_s = min(best_s, time.perf_counter() - began)
    return 2.0 * size**3 / best_s
