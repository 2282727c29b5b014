"""The metrics of a run: progress line, metrics.jsonl and boards (train/boards.py). Written on rank 0 only.

metrics.jsonl has one object per line: for a step all of `StepMetrics` that are not None, for an evaluation
`step`, `validation_loss` and `validation_perplexity`, for tasks `step` and `tasks` (scores by name), for an
exchange of islands `step`, `exchanged_part` and `island_drift`, for every `log_every`-th step with parameter
servers `step` and the values of `ServerMetrics`, and of a mixture `step` and `expert_loads` (by layer), for a
save `step` and `save_pause_s`, for a warning `step` and `warning`, for a start from a checkpoint `step` and
`resumed`.
Non-finite numbers are written as null. A resumed run truncates the file to the step that it resumes from, so
that no step is recorded twice.

[Note: reading of metrics] The file may be another's, or damaged, and have millions of lines: it is read line
by line. Lines that are not such records are left out, also those in which a number is text. `ThinnedRecords`
keeps as many as a picture can show.

[Note: peak FLOP/s] MFU is relative to the peak of a rank's device: from its data sheet, as published
utilizations are (Chowdhery et al. 2204.02311, appendix B; torchtitan; Megatron), and measured. A GPU under
load lowers its clock: a measured product is slower than the data sheet says, and a utilization relative to it
higher. Devices without an entry in `plan/devices.toml`, and CPUs, only have the measured peak.
"""

import contextlib
import json
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from plait.engine.preferences import PairResult
from plait.engine.totals import EvalResult
from plait.errors import DataError, RunError
from plait.fileio import TEXT_LIMIT_BYTES, WRITABLE, finite_json, open_regular, parse_json, write_lines
from plait.parallel.local_steps import ExchangeResult
from plait.plan.devices import device_of_driver
from plait.tables import counted, plain
from plait.train.boards import open_boards
from plait.train.run_dir import RunDir
from plait.train.sections import BoardName

_CURVES = {
    "loss", "lr", "grad_norm", "batch", "tokens", "tokens_per_s", "mfu", "mfu_full_attention",
    "mfu_of_matmul", "skipped_steps", "loss_scale", "aux_loss", "router_z_loss", "expert_imbalance",
    "idle_experts", "dropped_choices", "chosen_reward", "rejected_reward", "reward_margin", "reward_accuracy",
}  # fmt: skip
_STEPS_OF_TIME_LEFT = 100  # the time left is estimated from the last steps, of which single ones may be slow


def mean_loss(results: Sequence[EvalResult]) -> float:
    """Mean loss per target over evaluated batches. Raises DataError if they have no target."""
    targets = sum(result.num_tokens for result in results)
    if not targets:
        raise DataError(
            "the validation batches have no trained token",
            given=f"{counted(len(results), 'evaluated part')}, 0 trained tokens",
            expected="at least one trained token in run.evaluate_batches batches",
            hint="a longer data.sequence, a larger data.validation or run.evaluate_batches",
        )
    return sum(result.loss_sum for result in results) / targets


@dataclass(frozen=True)
class StepMetrics:
    """One training step, over all ranks. `step` counts from 1. With local steps, loss and norm are those of
    the first island.

    skipped_steps  skipped since step 1
    batch          samples in the step
    tokens         target tokens since step 1
    mfu            model FLOP/s over the peak of the devices' data sheet; where it is unknown, over the
                   measured peak of a matrix product
    mfu_full_attention  the same, with attention counted as if it were not causal, as in other reports
    mfu_of_matmul  model FLOP/s over the measured peak of a matrix product
    loss_scale     fp16: the scale of this step's loss; None for other precisions
    aux_loss       the auxiliary loss of routers, without its coefficient; None for models without one
    router_z_loss  the same of their z loss, with `optimizer.router_z_loss`
    expert_imbalance  of mixtures: the largest load of an expert over the mean of its layer
    idle_experts      of mixtures: experts of all layers without a token in this step
    dropped_choices   of experts, beyond the plan's capacity, in this step; None without one
    chosen_reward     of pairs: beta x log-probability relative to the reference, a mean over the step's;
                      `reward_margin`: chosen - rejected, `reward_accuracy`: the share of those above 0
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    skipped: bool
    skipped_steps: int
    batch: int
    tokens: int
    tokens_per_s: float
    mfu: float
    mfu_full_attention: float
    mfu_of_matmul: float
    seconds: float
    loss_scale: float | None = None
    aux_loss: float | None = None
    router_z_loss: float | None = None
    expert_imbalance: float | None = None
    idle_experts: int | None = None
    dropped_choices: int | None = None
    chosen_reward: float | None = None
    rejected_reward: float | None = None
    reward_margin: float | None = None
    reward_accuracy: float | None = None


_MAX_BYTES = 1 << 32  # of metrics.jsonl: ten million steps
_NUMBERS = {each.name for each in fields(StepMetrics)}
_NUMBERS |= {"validation_loss", "validation_perplexity", "save_pause_s", "island_drift"}
_NUMBERS |= {f"validation_{name}" for name in PairResult.REWARDS}
MOST_STRETCHES = 400  # even


class Metrics:
    """Writes metrics during one run of the training loop: `with Metrics(...) as metrics`.

    console     None except on rank 0: then nothing is printed or written
    first_step  steps already done
    log_every   steps between printed lines and points of boards
    report_to   the boards

    Every method raises RunError if the disk is full or not writable.
    """

    def __init__(
        self,
        run: RunDir,
        console: Console | None,
        first_step: int,
        steps: int,
        log_every: int,
        report_to: Sequence[BoardName] = ("tensorboard",),
    ) -> None:
        self._console = console
        self._log_every = log_every
        self._steps = steps
        self._since_log: list[StepMetrics] = []
        self._seconds: deque[float] = deque(maxlen=max(log_every, _STEPS_OF_TIME_LEFT))
        self._num_due = first_step // log_every  # lines
        self._progress: Progress | None = None
        if console is None:
            return
        self._path = run.path
        with self._writing():
            self._boards = open_boards(report_to, run, first_step)
            truncate_metrics(run.metrics, first_step or -1)  # the records of step 0 are written again
            self._file = run.metrics.open("a", encoding="utf-8")
        if console.is_terminal:
            self._progress = Progress(  # in 80 columns, for numbers of the usual size
                TextColumn("{task.completed:.0f}/{task.total:.0f}"),
                BarColumn(bar_width=8),
                TextColumn("{task.fields[text]}"),
                TimeRemainingColumn(),
                console=console,
                refresh_per_second=4,
                speed_estimate_period=300,
            )
            self._task = self._progress.add_task("", total=steps, completed=first_step, text="starting")

    def __enter__(self) -> "Metrics":
        if self._console is not None:  # TensorBoard's thread prints an error that the next call here raises
            self._thread_hook, threading.excepthook = threading.excepthook, _print_unless_of_board
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._progress is not None:
            self._progress.stop()
        if self._console is None:
            return
        try:
            with self._writing(), contextlib.ExitStack() as stack:
                for board in self._boards:
                    stack.callback(board.close)
                self._file.close()
        except RunError:
            if error is None:  # otherwise that error is the cause, and the one to report
                raise
        finally:
            threading.excepthook = self._thread_hook

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(
                "cannot write the run's metrics",
                given=f"{self._path}: {error}",
                expected=WRITABLE,
                hint="free some disk space, then --resume",
            ) from error

    def _record(self, record: Mapping[str, Any], *, flush: bool = True) -> None:
        if self._console is not None:
            with self._writing():
                self._file.write(_json_line(record))
            if flush:
                self.flush()

    def flush(self) -> None:
        """Write buffered records to the file."""
        if self._console is not None:
            with self._writing():
                self._file.flush()

    def step(self, metrics: StepMetrics) -> None:
        """Record a step: each one in the file, every `log_every`-th on the console and boards."""
        if self._console is None:
            return
        values = {name: value for name, value in vars(metrics).items() if value is not None}
        self._record(values, flush=False)
        self._since_log.append(metrics)
        self._seconds.append(metrics.seconds)
        if metrics.skipped:
            scale = "" if metrics.loss_scale is None else f" (loss scale {metrics.loss_scale:g})"
            reason = f"the gradient is not finite{scale}" if metrics.tokens_per_s else "no token has a target"
            self.log(f"step {metrics.step}: skipped, {reason}")
        if self._progress is not None:
            self._progress.update(self._task, completed=metrics.step, text=self._text([metrics]))
        num_due = metrics.step // self._log_every
        if num_due == self._num_due and metrics.step != self._steps:
            return
        self._num_due = num_due
        if self._progress is None:
            self.log(f"step {metrics.step}/{self._steps}  {self._text(self._since_log)}{self._time_left()}")
        self._show("train", {name: values[name] for name in _CURVES & values.keys()}, metrics.step)
        self.flush()
        self._since_log.clear()

    def validation(self, step: int, loss: float, pairs: PairResult | None = None) -> None:
        """Record an evaluation after `step` steps."""
        if self._console is None:
            return
        if pairs is None:
            of_task, values = f"perplexity {perplexity(loss):,.2f}", {"perplexity": perplexity(loss)}
        else:
            of_task, values = pairs.text, pairs.rewards
        values = {"loss": loss, **values}
        self._record({"step": step} | {f"validation_{name}": value for name, value in values.items()})
        self._show("validation", values, step)
        self.log(f"step {step}/{self._steps}  validation loss {loss:.4f}  {of_task}")

    def tasks(self, step: int, scores: Mapping[str, Mapping[str, float]], texts: Mapping[str, str]) -> None:
        """Record the scores of tasks after `step` steps; `texts`: as they are printed."""
        self._record({"step": step, "tasks": scores})
        for task, values in scores.items():
            self._show(f"tasks/{task}", values, step)
            self.log(f"step {step}/{self._steps}  {task} {texts[task]}")

    def exchange(self, step: int, result: ExchangeResult) -> None:
        """Record an exchange of weights between islands after `step` steps."""
        self._record({"step": step, "exchanged_part": result.part, "island_drift": result.drift}, flush=False)
        self._show("train", {"island_drift": result.drift}, step)

    def experts(self, step: int, loads: Mapping[str, Sequence[int]]) -> None:
        """Record how often each expert was chosen in a step."""
        self._record({"step": step, "expert_loads": loads}, flush=False)

    def servers(self, step: int, values: Mapping[str, Any]) -> None:
        """Record what parameter servers have counted in the last steps, as `ServerMetrics` returns it."""
        self._record({"step": step, **values})
        if self._console is None:
            return
        counts = values["staleness"]
        staleness = np.repeat(np.arange(len(counts)), counts)
        scalars = {name: values[name] for name in ("pushes_per_s", "dropped_pushes", "waited_s")}
        scalars["moved_bytes"] = sum(values["moved_bytes"][0])
        self._show("servers", scalars, step)
        if staleness.size:
            with self._writing():
                for board in self._boards:
                    board.histogram("servers/staleness", staleness, step)

    def saved(self, step: int, pause_s: float, text: str) -> None:
        """Record that the state after `step` steps is saved, for which training paused `pause_s` seconds."""
        self._record({"step": step, "save_pause_s": pause_s})
        self.log(text)

    def warn(self, step: int, text: str) -> None:
        """Print and record a problem after `step` steps that does not end the run."""
        self._record({"step": step, "warning": text})
        self.log(f"warning: {text}")

    def resumed(self, step: int) -> None:
        """Record that the run goes on from the checkpoint of `step`, after a stop or a loss spike."""
        self._record({"step": step, "resumed": True})

    def log(self, text: str) -> None:
        """Print a line on the console."""
        if self._console is not None:
            self._console.print(plain(text), highlight=False, soft_wrap=True)

    def _show(self, group: str, values: Mapping[str, float], step: int) -> None:
        if self._console is not None:
            with self._writing():
                for board in self._boards:
                    board.scalars({f"{group}/{name}": value for name, value in values.items()}, step)

    def _text(self, window: list[StepMetrics]) -> str:
        last = window[-1]
        losses = [step.loss for step in window if math.isfinite(step.loss)]
        loss = sum(losses) / len(losses) if losses else math.nan
        speed = sum(step.tokens_per_s for step in window) / len(window)
        mfu = sum(step.mfu for step in window) / len(window)
        routers = "" if last.aux_loss is None else f" aux {last.aux_loss:.3f}"
        routers += "" if last.router_z_loss is None else f" router z {last.router_z_loss:.3f}"
        dropped = [step.dropped_choices for step in window if step.dropped_choices is not None]
        routers += f" dropped {sum(dropped):,}" if dropped else ""
        if last.reward_margin is not None and last.reward_accuracy is not None:
            routers += f" margin {last.reward_margin:.3f} right {last.reward_accuracy:.0%}"
        numbers = f"loss {loss:.4f}{routers} lr {last.lr:.1e} grad {last.grad_norm:.2f}"
        return f"{numbers} {speed:,.0f} tok/s mfu {mfu:.1%}"

    def _time_left(self) -> str:
        left_s = (self._steps - self._since_log[-1].step) * sum(self._seconds) / len(self._seconds)
        return f"  {time.strftime('%H:%M:%S', time.gmtime(left_s))} left" if left_s < 86400 else ""


def expert_facts(loads: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """The values of `StepMetrics` for these loads, by layer; none without experts."""
    used = [load for load in loads.values() if any(load)]
    if not used:
        return {}
    imbalance = max(max(load) * len(load) / sum(load) for load in used)
    return {"expert_imbalance": imbalance, "idle_experts": sum(load.count(0) for load in loads.values())}


def perplexity(loss: float) -> float:
    """Return e to the loss, a mean over tokens in nats; infinity where a float cannot hold it."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def _print_unless_of_board(of_thread: Any) -> None:
    if not type(of_thread.thread).__module__.startswith("tensorboard."):
        threading.__excepthook__(of_thread)


def truncate_metrics(path: Path, last_step: int) -> None:
    """Remove the records of steps after `last_step`, and invalid lines. Raises RunError, OSError."""
    if path.exists():
        kept = (_json_line(record) for record in read_metrics(path) if record["step"] <= last_step)
        write_lines(path, kept)


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the records of a metrics.jsonl, in order; see [Note: reading of metrics]. Raises OSError, and
    RunError for a file that is too large."""
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > _MAX_BYTES:
            raise RunError(
                "the run's metrics are too large",
                given=f"{path}: {size:,} bytes",
                expected=f"at most {_MAX_BYTES:,} bytes",
                hint=f"split -n l/8 {path}, and one of its parts",
            )
        while line := file.readline(TEXT_LIMIT_BYTES):
            with contextlib.suppress(ValueError):
                record = parse_json(line.decode("utf-8", "replace"), parse_constant=lambda _: None)
                if line.endswith(b"\n") and _is_valid(record):
                    yield record


def _is_valid(record: Any) -> bool:
    """True for an object whose values have the types of `Metrics`; None is allowed for any number."""
    if not isinstance(record, dict) or type(record.get("step")) is not int:
        return False
    numbers = (record[name] for name in _NUMBERS & record.keys())
    loads = record.get("expert_loads", {})
    if not isinstance(loads, dict) or not all(isinstance(load, list) for load in loads.values()):
        return False
    return isinstance(record.get("warning", ""), str) and all(
        isinstance(number, int | float | None) for number in chain(numbers, *loads.values())
    )


class ThinnedRecords:
    """At most 5 * MOST_STRETCHES of any number of records: of each stretch of equal length the first one, and
    those with the least and the largest value of each of `names` (up to two); and the last record of all."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._count, self._length = 0, 1
        self._stretches: list[list[Mapping[str, Any]]] = []
        self.last: Mapping[str, Any] = {}

    def add(self, record: Mapping[str, Any]) -> None:
        """Add a record, after all others."""
        if self._count % self._length == 0:
            if len(self._stretches) == MOST_STRETCHES:
                self._length *= 2
                pairs = zip(self._stretches[::2], self._stretches[1::2], strict=True)
                self._stretches = [self._extremes(one + other) for one, other in pairs]
            self._stretches.append([])
        self._stretches[-1] = self._extremes([*self._stretches[-1], record])
        self._count, self.last = self._count + 1, record

    def _extremes(self, records: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        if len(records) <= 2 * len(self._names) + 1:
            return records
        kept = {0}
        for name in self._names:
            known = [at for at, record in enumerate(records) if record.get(name) is not None]
            if known:
                kept |= {of(known, key=lambda at: records[at][name]) for of in (min, max)}
        return [records[at] for at in sorted(kept)]

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        kept = [*chain(*self._stretches)]
        return iter(kept if not kept or kept[-1] is self.last else [*kept, self.last])


def _json_line(record: Mapping[str, Any]) -> str:
    return json.dumps(finite_json(dict(record))) + "\n"


_PRODUCTS = 6  # timed; the fastest counts
_PRECISIONS = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
}


@dataclass(frozen=True)
class PeakFlops:
    """FLOP/s of one rank. `data_sheet`: None for a device that has no entry. See [Note: peak FLOP/s]."""

    measured: float
    data_sheet: float | None

    @classmethod
    def of_device(cls, device: torch.device, dtype: torch.dtype) -> "PeakFlops":
        """Measure the device, and look it up. See `matmul_peak`."""
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        uses_tf32 = torch.get_float32_matmul_precision() != "highest"
        return cls(matmul_peak(device, dtype), data_sheet_peak(name, dtype, uses_tf32=uses_tf32))

    @property
    def for_mfu(self) -> float:
        return self.data_sheet or self.measured

    def __str__(self) -> str:
        measured = f"{self.measured / 1e9:,.1f} GFLOP/s per rank (measured matrix product)"
        if self.data_sheet is None:
            return measured
        return f"{self.data_sheet / 1e9:,.1f} GFLOP/s per rank (data sheet), {measured}"


def data_sheet_peak(name: str, dtype: torch.dtype, *, uses_tf32: bool = False) -> float | None:
    """Return the FLOP/s of the device with this name, as torch.cuda.get_device_name returns it: None if it
    has no entry. `uses_tf32`: float32 products are computed in TF32."""
    known = device_of_driver(name)
    if known is None:
        return None
    precision = "tf32" if dtype is torch.float32 and uses_tf32 else _PRECISIONS[dtype]
    return known.peak_flops.get(precision)


def matmul_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Measure the FLOP/s of a square matrix product on this device, with this process's threads.

    The best of several tries, so that noise from other processes does not count. All ranks of a host must
    call it at the same time, to share the host as in training.
    """
    size = 8192 if device.type == "cuda" else 1024
    if device.type == "cpu" and dtype is torch.float16:
        size = 256  # most CPUs have no fp16 arithmetic: a product of the size above takes seconds
    multiply: Callable[[Tensor, Tensor], Tensor] = torch.mm
    if dtype is torch.float8_e4m3fn and device.type == "cuda":
        one = torch.ones((), device=device)
        multiply = partial(
            torch._scaled_mm, scale_a=one, scale_b=one, out_dtype=torch.bfloat16, use_fast_accum=True
        )
    elif dtype is torch.float8_e4m3fn:
        dtype = torch.bfloat16  # CPUs emulate float8
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    right = right.t()  # the float8 kernel takes a column-major matrix
    best_s = math.inf
    for _ in range(_PRODUCTS):
        start_s = time.perf_counter()
        multiply(left, right)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best_s = min(best_s, time.perf_counter() - start_s)
    return 2.0 * size**3 / best_s
