"""What verifying found: values that are printed, and written as JSON."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from torch import Tensor

from plait.verify.reference import Step, Trajectory

MAX_SHOWN = 10  # parameters that are named


class Outcome(Enum):
    """`DIED`: a rank ended otherwise than with a letter."""

    SAME = "same"
    DIFFERS = "differs"
    REFUSED = "refused"
    DIED = "died"


@dataclass(frozen=True)
class Mismatch:
    """How far a parameter is from the one-process program's.

    gradient, weight    norm of the difference over the norm of what is expected: of the gradient, in the
                        first step that is off, or where it is largest; of the weight, at the end
    where               coordinates of the ranks whose pieces are off, such as "col=1"; nothing: not asked for
    """

    name: str
    gradient: float
    weight: float
    allowed: float
    where: str = ""

    @property
    def excess(self) -> float:
        """Above 1: off."""
        return max(self.gradient, self.weight) / self.allowed


@dataclass(frozen=True)
class Verdict:
    """Of one plan.

    steps, expected     what the ranks and what one process came to
    worst               parameters, the farthest first
    suspects            parts of the plan without which the numbers are those of one process
    traffic             of the last step and the first rank: (what, calls, bytes)
    letter              of a refusal, or of what ended the ranks
    """

    model: str
    plan: str
    dtype: str
    num_ranks: int
    outcome: Outcome
    allowed: float = 0.0
    steps: tuple[Step, ...] = ()
    expected: tuple[Step, ...] = ()
    worst: tuple[Mismatch, ...] = ()
    num_parameters: int = 0
    suspects: tuple[str, ...] = ()
    traffic: tuple[tuple[str, int, int], ...] = ()
    message: str = ""

    @property
    def largest(self) -> float:
        """The largest relative difference of all: losses, norms, gradients and weights."""
        found = [_apart(mine, theirs) for mine, theirs in zip(self.steps, self.expected, strict=True)]
        return max([*found, *(max(off.gradient, off.weight) for off in self.worst)], default=math.nan)

    def to_values(self) -> dict[str, Any]:
        """For JSON, which has no number that is not finite: None, as in `largest`."""
        found: dict[str, Any] = _finite(asdict(self))
        return {**found, "outcome": self.outcome.value, "largest": _finite(self.largest)}

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "Verdict":
        """Of what `to_values` gave."""
        given = {key: value for key, value in values.items() if key != "largest"}
        return cls(
            **{
                **given,
                "outcome": Outcome(given["outcome"]),
                "steps": tuple(Step(**_numbers(step)) for step in given["steps"]),
                "expected": tuple(Step(**_numbers(step)) for step in given["expected"]),
                "worst": tuple(Mismatch(**_numbers(off)) for off in given["worst"]),
                "suspects": tuple(given["suspects"]),
                "traffic": tuple((line, count, size) for line, count, size in given["traffic"]),
            }
        )


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """With infinity for what was not finite: as far off as can be."""
    return {key: math.inf if value is None else value for key, value in values.items()}


@dataclass(frozen=True)
class Tolerances:
    """What is allowed: `least` for every number, and beside it so many times what rounding alone does.

    least   1e-9 in float64; others round in other orders, by which they may differ
    noise   one process in the plan's dtype, against itself in float64: by parameter and for steps
    """

    least: float
    times: float = 4.0
    noise: Mapping[str, float] = field(default_factory=dict)
    step_noise: float = 0.0

    def of(self, name: str) -> float:
        return self.least + self.times * self.noise.get(name, 0.0)

    @property
    def of_steps(self) -> float:
        return self.least + self.times * self.step_noise

    def hold(self, step: Step, expected: Step) -> bool:
        return _apart(step, expected) <= self.of_steps


def compare(mine: Trajectory, theirs: Trajectory, limits: Tolerances) -> tuple[bool, list[Mismatch]]:
    """Whether all is within limits; all parameters, the farthest first.

    Without weights, of a course that was ended by a wrong step, it is that step's gradients that count.
    """
    steps = len(mine.steps)
    is_same = all(limits.hold(*pair) for pair in zip(mine.steps, theirs.steps[:steps], strict=True))
    first = 0 if mine.weights else steps - 1
    gradients = relative_errors(mine.gradients[first:], theirs.gradients[first:steps])
    weights = relative_errors([mine.weights], [theirs.weights]) if mine.weights else {}
    found = [
        Mismatch(name, gradients.get(name, 0.0), weights.get(name, 0.0), limits.of(name))
        for name in weights or gradients
    ]
    found.sort(key=lambda off: off.excess, reverse=True)
    return is_same and bool(mine.weights) and all(off.excess <= 1.0 for off in found), found


def rounding_noise(rough: Trajectory, exact: Trajectory) -> tuple[dict[str, float], float]:
    """What rounding does to parameters, and to losses and norms."""
    gradients = relative_errors(rough.gradients, exact.gradients)
    weights = relative_errors([rough.weights], [exact.weights])
    steps = [_apart(one, other) for one, other in zip(rough.steps, exact.steps, strict=True)]
    return {name: max(gradients.get(name, 0.0), weights[name]) for name in weights}, max(steps)


def relative_errors(
    mine: Sequence[Mapping[str, Tensor]], theirs: Sequence[Mapping[str, Tensor]]
) -> dict[str, float]:
    """By name the largest norm of a difference, over that of what is expected. One that is all but nothing
    is noise: what its neighbours have is the measure then."""
    found: dict[str, float] = {}
    for ours, expected in zip(mine, theirs, strict=True):
        assert ours.keys() == expected.keys(), f"{sorted(ours.keys() ^ expected.keys())} on one side only"
        norms = {name: float(tensor.double().norm()) for name, tensor in expected.items()}
        least = max(1e-3 * max(norms.values(), default=0.0), 1e-30)
        for name, tensor in expected.items():
            apart = float((ours[name].double() - tensor.double()).norm()) / max(norms[name], least)
            found[name] = max(found.get(name, 0.0), apart if math.isfinite(apart) else math.inf)
    return found


def _apart(mine: Step, theirs: Step) -> float:
    """Of loss and norm, the larger relative difference."""
    pairs = ((mine.loss, theirs.loss), (mine.norm, theirs.norm))
    found = max(abs(a - b) / max(abs(b), 1e-30) for a, b in pairs)
    return found if math.isfinite(found) else math.inf
