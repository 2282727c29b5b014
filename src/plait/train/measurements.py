"""Measured memory and traffic of the ranks (`measured.json` in the run directory), and pipeline traces."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from plait.comm import gather_texts
from plait.data.loader import Batch
from plait.engine.engine import Engine, StepResult
from plait.engine.preferences import PairResult
from plait.errors import PlaitError, RunError
from plait.fileio import WRITABLE, disk_hint, read_json, write_json
from plait.plan import CommCount, CommKey, MemoryUse
from plait.plan.comm_log import from_rows, subtract_traffic, to_rows
from plait.plan.schedule.trace import read_trace

_FIRST, _LAST = 3, 5  # steps since the start or resume
_FORMAT = "plait measured 1"
_TRACE_BARRIER = CommKey((), "", "barrier")  # over all ranks, at the start of a traced step


class StepRecorder:
    """Runs an engine's steps. Traces the third to the fifth since `begin`, as far as there are so many, and
    records the traffic of one: the second that is not skipped or later. All after the first have the same,
    except those after which islands exchange weights, which are not recorded.

    trace        the file of the trace; None: no trace
    pairs        of the last step, if its loss is of pairs
    step_number  of the step whose traffic is recorded, in the run, from 1; 0: none yet
    """

    def __init__(self, engine: Engine, trace: Path | None) -> None:
        self.trace = trace
        self.pairs: PairResult | None = None
        self.step_number = 0
        self.traffic: Mapping[CommKey, CommCount] = {}
        self._engine = engine
        self._done = 0
        self._done_before = 0  # before `begin`
        self._is_tracing = False

    def begin(self, steps: int, log: Callable[[str], object]) -> None:
        """Begin to run `steps` steps. `log`: called on every rank."""
        self._done_before, self._is_tracing = self._done, False
        self._first, self._last, self._log = min(_FIRST, steps), min(_LAST, steps), log

    def step(self, batch: Batch | list[Batch]) -> StepResult:
        """Run `engine.step`. Raises RunError, after the step, if the trace cannot be written."""
        self._done += 1
        number = self._done - self._done_before
        if self.trace is not None and number == self._first:
            self._engine.start_trace()
            self._is_tracing = True
        comm_log = self._engine.world.comm_log
        before = comm_log.read()
        result = self._engine.step(batch)
        exchanges = self._engine.plan.local.started_after(self._engine.num_steps) is not None
        if self._done > 1 and not self.step_number and not (result.skipped or exchanges):
            traffic = subtract_traffic(before, comm_log.read())
            self.traffic = {key: count for key, count in traffic.items() if key != _TRACE_BARRIER}
            self.step_number = self._engine.num_steps
        if number == self._last:
            self.end_trace()
        if self._engine.pairs is not None:
            self.pairs = self._engine.pairs.take()
        return result

    @property
    def rewards(self) -> dict[str, Any]:
        """Values of `StepMetrics` for the last step's pairs; none without pairs."""
        return {} if self.pairs is None else self.pairs.rewards

    def end_trace(self) -> None:
        """Write the trace so far, if one was started. Collective: every rank calls it at the same step."""
        if self._is_tracing and self.trace is not None:
            self._is_tracing = False
            self._engine.write_trace(self.trace)
            steps = self._done - self._done_before - self._first + 1
            self._log(f"trace of {steps} steps: plait schedule --trace {self.trace}")


@dataclass(frozen=True)
class MeasuredRanks:
    """Ranks with the same memory and traffic."""

    ranks: tuple[int, ...]
    memory: MemoryUse
    traffic: Mapping[CommKey, CommCount]


@dataclass(frozen=True)
class Measurements:
    """Measurements of a run.

    step    the step whose traffic was recorded
    bubble  the pipeline bubble: median fraction over the traced steps
    """

    plan: str
    transport: str
    device: str
    step: int
    bubble: float | None
    rank_classes: tuple[MeasuredRanks, ...]

    def of_rank(self, rank: int) -> MeasuredRanks:
        return next(group for group in self.rank_classes if rank in group.ranks)


def write_measured(path: Path, engine: Engine, recorder: StepRecorder) -> None:
    """Gather the measurements of all ranks and write them on rank 0. Collective. Raises RunError.

    If no step was recorded, nothing is written, and the file from before a resume stays.
    """
    world = engine.world
    own = {"memory": asdict(engine.memory()), "traffic": to_rows(recorder.traffic)}
    texts = gather_texts(json.dumps(own, sort_keys=True), world.group, world.device)
    if world.rank or not recorder.step_number:
        return
    ranks_by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks_by_text.setdefault(text, []).append(rank)
    value = {
        "format": _FORMAT,
        "plan": str(engine.plan),
        "transport": world.transport,
        "device": engine.device.type,
        "step": recorder.step_number,
        "bubble": None if recorder.trace is None else _bubble(recorder.trace),
        "alike": [{"ranks": ranks, **json.loads(text)} for text, ranks in ranks_by_text.items()],
    }
    try:
        write_json(path, value)
    except OSError as error:
        raise RunError(
            "cannot write the measurements",
            given=f"{path}: {error.strerror}",
            expected=WRITABLE,
            hint=disk_hint(path),
        ) from error


def read_measured(path: Path) -> Measurements:
    """Read measured.json. Raises RunError."""
    try:
        value: Any = read_json(path)
        if value["format"] != _FORMAT:
            raise ValueError(f"format {value['format']!r}")
        rank_classes = [
            MeasuredRanks(tuple(row["ranks"]), MemoryUse(**row["memory"]), from_rows(row["traffic"]))
            for row in value["alike"]
        ]
        facts = {key: value[key] for key in ("plan", "transport", "device", "step", "bubble")}
    except FileNotFoundError as error:
        raise RunError(
            "the run has no measurements yet",
            given=f"no {path}",
            expected="a finished run, with at least two steps since it was last resumed",
            hint=f"plait train {path.parent} --resume; if it is finished, with run.steps raised by two",
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            "cannot read the measurements",
            given=f"{path}: {type(error).__name__}: {error}",
            expected="measurements of this version of plait",
            hint=f"plait train {path.parent} --resume; if it is finished, with run.steps raised by two",
        ) from error
    return Measurements(**facts, rank_classes=tuple(rank_classes))


def _bubble(trace: Path) -> float | None:
    try:
        return median(timeline.bubble_fraction for timeline in read_trace(trace).values())
    except PlaitError:  # the run was resumed after the traced steps, and the file may be gone
        return None
