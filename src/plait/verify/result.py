"""The result of a verification: values that are printed and written as JSON."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from torch import Tensor

from plait.verify.reference import Step, Trajectory

MAX_SHOWN = 10  # parameters that are listed


class Outcome(Enum):
    """The outcome of a case. `REFUSED`: a PlaitError. `DIED`: a rank ended in any other way."""

    SAME = "same"
    DIFFERS = "differs"
    REFUSED = "refused"
    DIED = "died"


@dataclass(frozen=True)
class Mismatch:
    """The error of a parameter relative to the reference.

    gradient_error   norm of the difference over the norm of the reference gradient: of the first step that
                     differs, or the largest of all steps
    weight_error     the same of the weight after the last step
    tolerance        the largest error that is allowed
    ranks            coordinates of the ranks whose shards are wrong, such as "col=1"; "" if not located
    """

    name: str
    gradient_error: float
    weight_error: float
    tolerance: float
    ranks: str = ""

    @property
    def excess(self) -> float:
        """The larger error over the tolerance; above 1 the parameter differs."""
        return max(self.gradient_error, self.weight_error) / self.tolerance


@dataclass(frozen=True)
class Verdict:
    """The verdict on one plan.

    tolerance          of losses and gradient norms, relative
    steps              losses and gradient norms of the ranks
    reference_steps    those of the one-process reference
    worst_parameters   the parameters with the largest errors, the largest first
    num_parameters     how many were compared
    suspects           parts of the plan without which it matches the reference
    traffic            of rank 0 in the last step: (operation, calls, bytes)
    message            the error that refused the plan or ended the ranks
    """

    model: str
    plan: str
    dtype: str
    num_ranks: int
    outcome: Outcome
    tolerance: float = 0.0
    steps: tuple[Step, ...] = ()
    reference_steps: tuple[Step, ...] = ()
    worst_parameters: tuple[Mismatch, ...] = ()
    num_parameters: int = 0
    suspects: tuple[str, ...] = ()
    traffic: tuple[tuple[str, int, int], ...] = ()
    message: str = ""

    @property
    def max_error(self) -> float:
        """The largest relative error of any loss, norm, gradient or weight."""
        errors = [
            _step_error(one, other) for one, other in zip(self.steps, self.reference_steps, strict=True)
        ]
        worst = self.worst_parameters
        return max([*errors, *(max(p.gradient_error, p.weight_error) for p in worst)], default=math.nan)

    def to_values(self) -> dict[str, Any]:
        """Return the verdict as JSON values. Non-finite numbers become None, as JSON has none."""
        values: dict[str, Any] = _finite(asdict(self))
        return {**values, "outcome": self.outcome.value, "max_error": _finite(self.max_error)}

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "Verdict":
        """Restore a verdict from `to_values`."""
        fields = {key: value for key, value in values.items() if key != "max_error"}
        return cls(
            **{
                **fields,
                "outcome": Outcome(fields["outcome"]),
                "steps": tuple(Step(**_numbers(step)) for step in fields["steps"]),
                "reference_steps": tuple(Step(**_numbers(step)) for step in fields["reference_steps"]),
                "worst_parameters": tuple(Mismatch(**_numbers(p)) for p in fields["worst_parameters"]),
                "suspects": tuple(fields["suspects"]),
                "traffic": tuple((key, count, size) for key, count, size in fields["traffic"]),
            }
        )


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _numbers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace None, for a non-finite number, by infinity: the largest possible error."""
    return {key: math.inf if value is None else value for key, value in values.items()}


@dataclass(frozen=True)
class Tolerances:
    """The relative errors that are allowed: `base` for every number, plus `factor` times the rounding noise.

    base        1e-9 in float64, where only the order of additions differs
    noise       error of one process in the plan's dtype relative to float64, by parameter
    step_noise  the same for losses and gradient norms
    """

    base: float
    factor: float = 4.0
    noise: Mapping[str, float] = field(default_factory=dict)
    step_noise: float = 0.0

    def of(self, name: str) -> float:
        return self.base + self.factor * self.noise.get(name, 0.0)

    @property
    def of_steps(self) -> float:
        return self.base + self.factor * self.step_noise

    def allow(self, step: Step, expected: Step) -> bool:
        return _step_error(step, expected) <= self.of_steps


def compare(actual: Trajectory, expected: Trajectory, tolerances: Tolerances) -> tuple[bool, list[Mismatch]]:
    """Return whether all errors are within the tolerances, and all parameters, the largest error first.

    Without weights, if a mismatch ended the run, only the gradients of the last step are compared.
    """
    steps = len(actual.steps)
    is_same = all(tolerances.allow(*pair) for pair in zip(actual.steps, expected.steps[:steps], strict=True))
    first = 0 if actual.weights else steps - 1
    gradients = relative_errors(actual.gradients[first:], expected.gradients[first:steps])
    weights = relative_errors([actual.weights], [expected.weights]) if actual.weights else {}
    mismatches = [
        Mismatch(name, gradients.get(name, 0.0), weights.get(name, 0.0), tolerances.of(name))
        for name in weights or gradients
    ]
    mismatches.sort(key=lambda mismatch: mismatch.excess, reverse=True)
    return is_same and bool(actual.weights) and all(m.excess <= 1.0 for m in mismatches), mismatches


def rounding_noise(rounded: Trajectory, exact: Trajectory) -> tuple[dict[str, float], float]:
    """Return the errors due to rounding: by parameter, and the largest of losses and norms."""
    gradients = relative_errors(rounded.gradients, exact.gradients)
    weights = relative_errors([rounded.weights], [exact.weights])
    steps = [_step_error(one, other) for one, other in zip(rounded.steps, exact.steps, strict=True)]
    return {name: max(gradients.get(name, 0.0), weights[name]) for name in weights}, max(steps)


def relative_errors(
    actual: Sequence[Mapping[str, Tensor]], expected: Sequence[Mapping[str, Tensor]]
) -> dict[str, float]:
    """Return by name the largest norm of the difference over the norm of the expected tensor.

    A tensor that is nearly zero is noise: its error is relative to a thousandth of the largest norm.
    """
    errors: dict[str, float] = {}
    for tensors, references in zip(actual, expected, strict=True):
        assert tensors.keys() == references.keys(), (
            f"{sorted(tensors.keys() ^ references.keys())} on one side only"
        )
        norms = {name: float(tensor.double().norm()) for name, tensor in references.items()}
        min_norm = max(1e-3 * max(norms.values(), default=0.0), 1e-30)
        for name, tensor in references.items():
            error = float((tensors[name].double() - tensor.double()).norm()) / max(norms[name], min_norm)
            errors[name] = max(errors.get(name, 0.0), error if math.isfinite(error) else math.inf)
    return errors


def _step_error(actual: Step, expected: Step) -> float:
    """Return the larger relative error of loss and gradient norm."""
    pairs = ((actual.loss, expected.loss), (actual.grad_norm, expected.grad_norm))
    error = max(abs(a - b) / max(abs(b), 1e-30) for a, b in pairs)
    return error if math.isfinite(error) else math.inf
