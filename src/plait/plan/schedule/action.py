"""A pipeline schedule as a value: a list of actions per rank. It prints, parses, and converts to and from
CSV.

    rank 0: F0.0 F0.1 B0.0 B0.1        action, stage, micro-batch
    rank 1: F1.0 B1.0 F1.1 B1.1

`F` is a forward. `B` is a backward: a full one, or, if the schedule has a `W` of the same stage and
micro-batch, the gradients of the stage's input, which the previous stage waits for; `W` then computes the
weight gradients (Qi et al. 2401.10241, section 2). A stage is on the rank that runs its actions. A stage's
outputs are sent to the next stage, and gradients come back from it, on another rank or the same.
"""

import csv
import io
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from itertools import islice
from typing import NamedTuple

from plait.errors import ScheduleError

_ACTION = re.compile(r"([FBW])([0-9]{1,9})\.([0-9]{1,9})")
MAX_ACTIONS = 2**19  # of a schedule: its validation and simulation take seconds
_RANK = re.compile(r"\s*rank\s+([0-9]{1,9})\s*:(.*)")


class Kind(Enum):
    """The computation of an action."""

    F = "F"
    B = "B"
    W = "W"

    __hash__ = object.__hash__  # Enum's is slow Python, and actions are keys of large dicts


class Action(NamedTuple):
    """A forward, a backward, or the weight-gradient part of a backward, of one stage and one micro-batch."""

    kind: Kind
    stage: int
    micro: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.micro}"

    @classmethod
    def parse(cls, text: str) -> "Action":
        """Raises ScheduleError for an invalid action."""
        match = _ACTION.fullmatch(text.strip())
        if match is None:
            raise ScheduleError(
                "invalid action in a schedule",
                given=repr(text[:60]),
                expected="F, B or W with a stage and a micro-batch: F0.3",
                hint="F0.3, the forward of micro-batch 3 on stage 0",
            )
        return cls(Kind(match[1]), int(match[2]), int(match[3]))


# Searches for plans generate the same actions again and again.
_interned = lru_cache(maxsize=1 << 16)
FORWARD, WEIGHT = Kind.F, Kind.W  # for long loops: to look up a member of an Enum is slow Python too


@_interned
def F(stage: int, micro: int) -> Action:
    return Action(Kind.F, stage, micro)


@_interned
def B(stage: int, micro: int) -> Action:
    return Action(Kind.B, stage, micro)


@_interned
def W(stage: int, micro: int) -> Action:
    return Action(Kind.W, stage, micro)


@dataclass(frozen=True)
class Schedule:
    """The ordered actions of every rank of a pipeline. Not validated: see `check`."""

    name: str
    ranks: tuple[tuple[Action, ...], ...]

    @classmethod
    def from_actions(cls, name: str, ranks: Iterable[Iterable[Action]]) -> "Schedule":
        """Raises ScheduleError for more than MAX_ACTIONS."""
        left, rows = MAX_ACTIONS, []
        for actions in ranks:
            rows.append(tuple(islice(actions, left + 1)))
            left -= len(rows[-1]) or 1  # a rank counts too
            if left < 0:
                raise too_large(name, f"more than {MAX_ACTIONS:,} actions")
        return cls(name, tuple(rows))

    def __iter__(self) -> Iterator[tuple[int, Action]]:
        """(rank, action), rank by rank."""
        for rank, actions in enumerate(self.ranks):
            for action in actions:
                yield rank, action

    @property
    def num_ranks(self) -> int:
        return len(self.ranks)

    @cached_property
    def num_stages(self) -> int:
        return 1 + max(self.rank_of, default=-1)

    @cached_property
    def num_micros(self) -> int:
        return 1 + max((action.micro for _, action in self), default=-1)

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """The rank of each stage: the first that runs one of its actions."""
        ranks: dict[int, int] = {}
        for rank, actions in enumerate(self.ranks):
            ranks |= dict.fromkeys([stage for _, stage, _ in actions if stage not in ranks], rank)
        return ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank runs, in model order."""
        return tuple(stage for stage in range(self.num_stages) if self.rank_of.get(stage) == rank)

    @cached_property
    def split(self) -> frozenset[tuple[int, int]]:
        """(stage, micro-batch) of backwards that are split into B and W."""
        return frozenset([a[1:] for actions in self.ranks for a in actions if a.kind is WEIGHT])

    @cached_property
    def trains(self) -> bool:
        """True if there are backwards."""
        return any(action.kind is not Kind.F for _, action in self)

    def __str__(self) -> str:
        return "\n".join(f"rank {rank}: {' '.join(map(str, a))}" for rank, a in enumerate(self.ranks))

    @classmethod
    def parse(cls, text: str, name: str = "given") -> "Schedule":
        """Read what `str` prints; empty lines and `#` comments are skipped. Raises ScheduleError."""
        lines: list[list[Action]] = []
        for line in text.splitlines():
            line = line.partition("#")[0].strip()
            if not line:
                continue
            match = _RANK.fullmatch(line)
            if match is None or int(match[1]) != len(lines):
                raise ScheduleError(
                    "a schedule needs one line per rank, in order",
                    given=repr(line[:60]),
                    expected=f"rank {len(lines)}: F0.0 ...",
                    hint="number the lines from 0, without gaps",
                )
            lines.append([Action.parse(word) for word in match[2].split()])
        return cls.from_actions(name, lines)

    def to_csv(self) -> str:
        """One row per rank, one cell per action."""
        out = io.StringIO()
        csv.writer(out, lineterminator="\n").writerows([map(str, actions) for actions in self.ranks])
        return out.getvalue()

    @classmethod
    def from_csv(cls, text: str, name: str = "given") -> "Schedule":
        """Read rows of actions; empty cells (idle) are skipped. Raises ScheduleError."""
        rows = [row for row in csv.reader(io.StringIO(text)) if row]
        return cls.from_actions(name, ([Action.parse(cell) for cell in row if cell.strip()] for row in rows))


def too_large(name: str, given: str) -> ScheduleError:
    return ScheduleError(
        "the schedule is too large",
        given=f"schedule={name}: {given}",
        expected=f"at most {MAX_ACTIONS:,} actions over all ranks",
        hint="a smaller pp, micro or chunks",
    )
