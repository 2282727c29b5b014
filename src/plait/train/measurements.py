"""What the ranks of a run really held and said: `measured.json` in the run's directory.

A trace of some of a run's steps, once things run as they will.
"""

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
from plait.plan import CommCount, CommKey, MemoryUse, subtract_traffic
from plait.plan.comm_log import from_rows, to_rows
from plait.plan.schedule.trace import read_trace

_FIRST, _LAST = 3, 5  # of the steps of a run, which is from a start or a resume


class TraceRecorder:
    """Takes an engine's steps, and records the third to the fifth of them, or what there is of those."""

    def __init__(
        self,
        engine: Engine,
        take: Callable[[dict[str, Tensor]], StepResult],
        path: Path | None,
        steps: range,
        note: Callable[[str], object],
    ) -> None:
        """`take`: a step of the engine. `path`: None, no trace. `steps`: of the run, what is left of them.
        `note`: told, on every rank."""
        self._engine = engine
        self._take = take
        self._path = path if steps else None
        self._first = min(_FIRST, len(steps))
        self._last = min(_LAST, len(steps))
        self._note = note
        self._done = 0

    def step(self, batch: dict[str, Tensor]) -> StepResult:
        """Takes a step. Raises RunError if the trace cannot be written, after that step."""
        self._done += 1
        if self._path is not None and self._done == self._first:
            self._engine.start_trace()
        result = self._take(batch)
        if self._done == self._last:
            self.end()
        return result

    def end(self) -> None:
        """Writes what there is. Every rank calls it at the same step."""
        path, self._path = self._path, None
        if path is not None and self._done >= self._first:
            self._engine.write_trace(path)
            self._note(f"trace of {self._done - self._first + 1} steps: plait schedule --trace {path}")


_FORMAT = "plait measured 1"
_MEETING = CommKey((), "", "barrier")  # of all ranks, with which a step begins that is traced


class TrafficRecorder:
    """An engine's steps, of which one is listened to: the first after the first that was taken. Later ones
    say the same."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._done = 0
        self.number = 0  # the step's in the run, from 1; 0: none yet
        self.said: Mapping[CommKey, CommCount] = {}

    def step(self, batch: dict[str, Tensor]) -> StepResult:
        """`engine.step`."""
        ledger = self._engine.world.ledger
        before = ledger.read()
        result = self._engine.step(batch)
        self._done += 1
        if self._done > 1 and not self.number and not result.skipped:
            said = subtract_traffic(before, ledger.read())
            self.said = {line: tally for line, tally in said.items() if line != _MEETING}
            self.number = self._engine.num_steps
        return result


@dataclass(frozen=True)
class MeasuredRanks:
    """Ranks that held and said as much as each other."""

    ranks: tuple[int, ...]
    memory: MemoryUse
    traffic: Mapping[CommKey, CommCount]


@dataclass(frozen=True)
class Measurements:
    """Of a run. `step`: the one that was listened to; `bubble`: the median of the steps that were traced."""

    plan: str
    transport: str
    device: str
    step: int
    bubble: float | None
    alike: tuple[MeasuredRanks, ...]

    def of_rank(self, rank: int) -> MeasuredRanks:
        return next(found for found in self.alike if rank in found.ranks)


def write_measured(path: Path, engine: Engine, heard: TrafficRecorder, trace: Path | None) -> None:
    """The first rank writes what all of them tell it; every rank calls it. Of a run in which no step was
    listened to nothing is written: what an earlier part of it left stays. Raises RunError."""
    mine = {"memory": asdict(engine.memory()), "traffic": to_rows(heard.said)}
    told = _told(json.dumps(mine, sort_keys=True), engine.world)
    if engine.world.rank or not heard.number:
        return
    alike: dict[str, list[int]] = {}
    for rank, text in enumerate(told):
        alike.setdefault(text, []).append(rank)
    value = {
        "format": _FORMAT,
        "plan": str(engine.plan),
        "transport": engine.world.transport,
        "device": engine.device.type,
        "step": heard.number,
        "bubble": None if trace is None else _bubble(trace),
        "alike": [{"ranks": ranks, **json.loads(text)} for text, ranks in alike.items()],
    }
    try:
        write_json(path, value)
    except OSError as error:
        raise RunError("what was measured cannot be written", given=f"{path}: {error.strerror}") from error


def read_measured(path: Path) -> Measurements:
    """Raises RunError."""
    try:
        value: Any = json.loads(path.read_text(encoding="utf-8"))
        if value["format"] != _FORMAT:
            raise ValueError(f"format {value['format']!r}")
        alike = [
            MeasuredRanks(tuple(row["ranks"]), MemoryUse(**row["memory"]), from_rows(row["traffic"]))
            for row in value["alike"]
        ]
        facts = {key: value[key] for key in ("plan", "transport", "device", "step", "bubble")}
    except FileNotFoundError as error:
        raise RunError(
            "this run has measured nothing yet",
            given=f"no {path}",
            expected="a run that has come to its end, with two steps at least since it was last resumed",
            hint=f"plait train {path.parent} --resume, if it is at its end with --set run.steps= of two more",
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            "what the run measured cannot be read", given=f"{path}: {type(error).__name__}: {error}"
        ) from error
    return Measurements(**facts, alike=tuple(alike))


def _told(text: str, world: World) -> list[str]:
    """Every rank's text."""
    mine = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    most = torch.tensor([len(mine)], device=world.device)
    all_reduce(most, world.group, "max")
    row = torch.full((int(most.item()),), ord(" "), dtype=torch.uint8)
    row[: len(mine)] = mine
    rows = torch.empty(world.size * len(row), dtype=torch.uint8, device=world.device)
    all_gather(rows, row.to(world.device), world.group)
    return [bytes(one.tolist()).decode().rstrip() for one in rows.cpu().view(world.size, -1)]


def _bubble(trace: Path) -> float | None:
    try:
        return median(timeline.bubble_fraction for timeline in read_trace(trace).values())
    except PlaitError:  # of a run that was resumed after its traced steps, the file may have gone
        return None
