"""Measured memory and traffic of the ranks (`measured.json` in the run directory), and pipeline traces."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from plait.comm import World, all_gather, all_reduce
from plait.engine.engine import Engine, StepResult
from plait.errors import PlaitError, RunError
from plait.fileio import write_json
from plait.plan import CommCount, CommKey, MemoryUse
from plait.plan.comm_log import from_rows, subtract_traffic, to_rows
from plait.plan.schedule.trace import read_trace

_FIRST, _LAST = 3, 5  # steps since the start or resume


class TraceRecorder:
    """Runs an engine's steps and traces the third to the fifth, as far as there are so many."""

    def __init__(
        self,
        engine: Engine,
        run_step: Callable[[dict[str, Tensor]], StepResult],
        path: Path | None,
        steps: range,
        log: Callable[[str], object],
    ) -> None:
        """
        run_step  runs one step of the engine
        path      None: no trace
        steps     the remaining steps of the run
        log       called on every rank
        """
        self._engine = engine
        self._run_step = run_step
        self._path = path if steps else None
        self._first = min(_FIRST, len(steps))
        self._last = min(_LAST, len(steps))
        self._log = log
        self._done = 0

    def step(self, batch: dict[str, Tensor]) -> StepResult:
        """Run a step. Raises RunError, after the step, if the trace cannot be written."""
        self._done += 1
        if self._path is not None and self._done == self._first:
            self._engine.start_trace()
        result = self._run_step(batch)
        if self._done == self._last:
            self.end()
        return result

    def end(self) -> None:
        """Write the trace so far. Collective: every rank calls it at the same step."""
        path, self._path = self._path, None
        if path is not None and self._done >= self._first:
            self._engine.write_trace(path)
            self._log(f"trace of {self._done - self._first + 1} steps: plait schedule --trace {path}")


_FORMAT = "plait measured 1"
_TRACE_BARRIER = CommKey((), "", "barrier")  # over all ranks, at the start of a traced step


class TrafficRecorder:
    """Runs an engine's steps and records the traffic of one: the second that is not skipped or later.

    All steps after the first have the same traffic.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._done = 0
        self.step_number = 0  # of the recorded step in the run, from 1; 0: none yet
        self.traffic: Mapping[CommKey, CommCount] = {}

    def step(self, batch: dict[str, Tensor]) -> StepResult:
        """Run `engine.step`."""
        comm_log = self._engine.world.comm_log
        before = comm_log.read()
        result = self._engine.step(batch)
        self._done += 1
        if self._done > 1 and not self.step_number and not result.skipped:
            traffic = subtract_traffic(before, comm_log.read())
            self.traffic = {key: count for key, count in traffic.items() if key != _TRACE_BARRIER}
            self.step_number = self._engine.num_steps
        return result


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


def write_measured(path: Path, engine: Engine, traffic: TrafficRecorder, trace: Path | None) -> None:
    """Gather the measurements of all ranks and write them on rank 0. Collective. Raises RunError.

    If no step was recorded, nothing is written, and the file from before a resume stays.
    """
    own = {"memory": asdict(engine.memory()), "traffic": to_rows(traffic.traffic)}
    texts = _gather_texts(json.dumps(own, sort_keys=True), engine.world)
    if engine.world.rank or not traffic.step_number:
        return
    ranks_by_text: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        ranks_by_text.setdefault(text, []).append(rank)
    value = {
        "format": _FORMAT,
        "plan": str(engine.plan),
        "transport": engine.world.transport,
        "device": engine.device.type,
        "step": traffic.step_number,
        "bubble": None if trace is None else _bubble(trace),
        "alike": [{"ranks": ranks, **json.loads(text)} for text, ranks in ranks_by_text.items()],
    }
    try:
        write_json(path, value)
    except OSError as error:
        raise RunError("cannot write the measurements", given=f"{path}: {error.strerror}") from error


def read_measured(path: Path) -> Measurements:
    """Read measured.json. Raises RunError."""
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
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
            "cannot read the measurements", given=f"{path}: {type(error).__name__}: {error}"
        ) from error
    return Measurements(**facts, rank_classes=tuple(rank_classes))


def _gather_texts(text: str, world: World) -> list[str]:
    """Return the texts of all ranks, in order of rank. Collective."""
    encoded = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    length = torch.tensor([len(encoded)], device=world.device)
    all_reduce(length, world.group, "max")
    row = torch.full((int(length.item()),), ord(" "), dtype=torch.uint8)
    row[: len(encoded)] = encoded
    rows = torch.empty(world.size * len(row), dtype=torch.uint8, device=world.device)
    all_gather(rows, row.to(world.device), world.group)
    return [bytes(row.tolist()).decode().rstrip() for row in rows.cpu().view(world.size, -1)]


def _bubble(trace: Path) -> float | None:
    try:
        return median(timeline.bubble_fraction for timeline in read_trace(trace).values())
    except PlaitError:  # the run was resumed after the traced steps, and the file may be gone
        return None
