"""The result of a verification: values that are written as JSON, and printed as tables or as a matrix."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

from pydantic import TypeAdapter
from rich.console import Console
from rich.table import Table

from plait.engine.reference import Tolerances, relative_errors
from plait.plan import Plan
from plait.tables import Cell, cells, counted, plain, table
from plait.verify.trajectory import TrainedStep, Trajectory

MAX_SHOWN = 10  # parameters that are listed
DEPENDS_ON_DIVISION = (
    "numbers depend on how the batch is divided: batch statistics, other buffers that a forward updates, or "
    "a loss that is not a sum over samples; one process that divides it in the same way matches the ranks "
    "(batch statistics: micro=1 with sync_batchnorm=true; a contrastive loss: plait.all_gather)"
)


class Outcome(Enum):
    """The outcome of a case. `REFUSED`: a PlaitError. `DIED`: a rank ended in any other way."""

    SAME = "same"
    DIFFERS = "differs"
    REFUSED = "refused"
    DIED = "died"


@dataclass(frozen=True)
class Mismatch:
    """The error of a parameter or buffer relative to the reference.

    gradient_error   norm of the difference over the norm of the reference gradient: of the first step that
                     differs, or the largest of all steps
    weight_error     the same of the weight or buffer after the last step
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
    num_parameters     number of parameters and buffers that were compared
    suspects           parts of the plan without which it matches the reference
    traffic            of rank 0 in the last step: (operation, calls, bytes)
    message            the error that refused the plan or ended the ranks, or the reason for different results
    evaluation         losses of an evaluation after the last step: of the ranks, and of the reference
    leak               of packed rows: the largest change of a logit of one document, relative to the largest
                       logit, when a token of another one is changed
    """

    model: str
    plan: str
    dtype: str
    num_ranks: int
    outcome: Outcome
    tolerance: float = 0.0
    steps: tuple[TrainedStep, ...] = ()
    reference_steps: tuple[TrainedStep, ...] = ()
    worst_parameters: tuple[Mismatch, ...] = ()
    num_parameters: int = 0
    suspects: tuple[str, ...] = ()
    traffic: tuple[tuple[str, int, int], ...] = ()
    message: str = ""
    evaluation: tuple[float, float] | None = None
    leak: float | None = None

    @property
    def max_error(self) -> float:
        """The largest relative error of any loss, norm, gradient or weight."""
        errors = [step_error(one, other) for one, other in zip(self.steps, self.reference_steps, strict=True)]
        errors += [relative_error(*self.evaluation)] if self.evaluation is not None else []
        worst = self.worst_parameters
        return max([*errors, *(max(p.gradient_error, p.weight_error) for p in worst)], default=math.nan)

    def to_values(self) -> dict[str, Any]:
        """Return the verdict as JSON values, with non-finite numbers where there are some."""
        return {**asdict(self), "outcome": self.outcome.value, "max_error": self.max_error}

    @classmethod
    def from_values(cls, values: Mapping[str, Any]) -> "Verdict":
        """Restore a verdict from `to_values`."""
        return TypeAdapter(cls).validate_python(values)


def compare(actual: Trajectory, expected: Trajectory, tolerances: Tolerances) -> tuple[bool, list[Mismatch]]:
    """Return whether all errors are within the tolerances, and all parameters and buffers, the largest error
    first.

    If a mismatch ended the run, it has no weights: only the gradients of the last step are compared.
    """
    steps = len(actual.steps)
    pairs = zip(actual.steps, expected.steps[:steps], strict=True)
    is_same = all(step_error(one, other) <= tolerances.of_steps for one, other in pairs)
    first = 0 if actual.weights else steps - 1
    gradients = relative_errors(actual.gradients[first:], expected.gradients[first:steps])
    ends: dict[str, float] = {}
    if actual.weights:
        is_same = is_same and relative_error(actual.evaluation, expected.evaluation) <= tolerances.of_steps
        buffers = {name: expected.buffers[name] for name in actual.buffers}
        ends = relative_errors([actual.weights], [expected.weights])
        ends |= relative_errors([actual.buffers], [buffers])
    mismatches = [
        Mismatch(name, gradients.get(name, 0.0), ends.get(name, 0.0), tolerances.of(name))
        for name in ends or gradients
    ]
    mismatches.sort(key=lambda mismatch: mismatch.excess, reverse=True)
    return is_same and all(m.excess <= 1.0 for m in mismatches), mismatches


def rounding_noise(rounded: Trajectory, exact: Trajectory) -> tuple[dict[str, float], float]:
    """Return the errors due to rounding: by parameter, and the largest of losses and norms."""
    gradients = relative_errors(rounded.gradients, exact.gradients)
    weights = relative_errors([rounded.weights], [exact.weights])
    steps = [step_error(one, other) for one, other in zip(rounded.steps, exact.steps, strict=True)]
    return {name: max(gradients.get(name, 0.0), weights[name]) for name in weights}, max(steps)


def step_error(actual: TrainedStep, expected: TrainedStep) -> float:
    """Return the larger relative error of loss and gradient norm."""
    losses = relative_error(actual.loss, expected.loss)
    return max(losses, relative_error(actual.grad_norm, expected.grad_norm))


def relative_error(actual: float, expected: float) -> float:
    """Return the error relative to what is expected, infinite for a number that is not finite."""
    error = abs(actual - expected) / max(abs(expected), 1e-30)
    return error if math.isfinite(error) else math.inf


_ALONE = " with each document alone"
_STYLES = {Outcome.SAME: "green", Outcome.DIFFERS: "red", Outcome.REFUSED: "yellow", Outcome.DIED: "red"}


def print_verdict(verdict: Verdict, console: Console) -> None:
    """Print the losses, the worst parameters, the traffic and the verdict: first, if it differs."""
    text = plain(summary(verdict), style=_STYLES[verdict.outcome])
    if verdict.outcome is Outcome.DIFFERS:
        console.print(text, highlight=False, soft_wrap=True)
    if verdict.outcome in (Outcome.SAME, Outcome.DIFFERS):
        console.print(_steps(verdict))
        console.print(_parameters(verdict))
        if verdict.traffic:
            console.print(_traffic(verdict))
    if verdict.outcome is not Outcome.DIFFERS:
        console.print(text, highlight=False, soft_wrap=True)


def summary(verdict: Verdict) -> str:
    """Return the verdict as a sentence."""
    case = f"{verdict.model}, {verdict.plan}, on {counted(verdict.num_ranks, 'rank')}"
    change = f"{verdict.leak or 0:.1e} of a changed token reaches other documents"
    of_documents = "" if verdict.leak is None else f"; {change}"
    if verdict.outcome is Outcome.SAME:
        error = f"largest relative error {verdict.max_error:.1e}"
        return f"matches one process{_ALONE if of_documents else ''}: {case}; {error}{of_documents}"
    if verdict.outcome is Outcome.REFUSED:
        return f"refused: {case}\n{verdict.message}"
    if verdict.outcome is Outcome.DIED:
        return f"died: {case}\n{verdict.message}"
    suspects = (
        f"without {' or '.join(verdict.suspects)} it matches: look there"
        if verdict.suspects
        else "no simpler plan matches either"
    )
    error = f"largest relative error {verdict.max_error:.1e}{of_documents}"
    alone = _ALONE if of_documents else ""
    return f"does NOT match one process{alone}: {case}; {error}; {verdict.message or suspects}"


def summary_line(verdict: Verdict) -> str:
    """Return the verdict as one line, for one plan of many."""
    error = f"{verdict.max_error:.1e}" if verdict.outcome in (Outcome.SAME, Outcome.DIFFERS) else ""
    reason = verdict.message.splitlines()[0] if verdict.message else ""
    parts = (f"{verdict.outcome.value:8} {verdict.model}", verdict.plan, error, reason)
    return "  ".join(part for part in parts if part)


def _steps(verdict: Verdict) -> Table:
    rows = [
        (str(number), *(f"{x:.12g}" for x in (step.loss, ref.loss, step.grad_norm, ref.grad_norm)))
        for number, (step, ref) in enumerate(
            zip(verdict.steps, verdict.reference_steps, strict=True), start=1
        )
    ]
    if verdict.evaluation is not None:
        rows.append(("evaluation", *(f"{loss:.12g}" for loss in verdict.evaluation), "", ""))
    headings = ("step", "loss", "one process", "gradient norm", "one process")
    differs = verdict.outcome is Outcome.DIFFERS
    return table("steps, up to the first mismatch" if differs else "steps", headings, rows)


def _parameters(verdict: Verdict) -> Table:
    wrong_on = ["wrong on"] if verdict.outcome is Outcome.DIFFERS else []
    made = table(
        f"largest relative errors: {len(verdict.worst_parameters)} of {verdict.num_parameters} tensors",
        ("parameter", "gradient", "weight", "tolerance", *wrong_on),
        left=("parameter", "wrong on"),
    )
    for worst in verdict.worst_parameters:
        is_wrong = worst.excess > 1
        numbers = (worst.gradient_error, worst.weight_error, worst.tolerance)
        ranks = [worst.ranks if is_wrong else "" for _ in wrong_on]
        row = (worst.name, *(f"{value:.1e}" for value in numbers), *ranks)
        made.add_row(*cells(row), style="red" if is_wrong else None)
    return made


def _traffic(verdict: Verdict) -> Table:
    rows = ((operation, f"{count:,}", f"{size:,}") for operation, count, size in verdict.traffic)
    return table("traffic of rank 0, last step", ("", "calls", "bytes"), rows)


def verdict_matrix(verdicts: Sequence[Verdict]) -> Table:
    """Return a table with a row for plans that differ only in `zero`, and a column per ZeRO stage."""
    rows: dict[str, dict[int, Verdict]] = {}
    for verdict in verdicts:
        plan = Plan.parse(verdict.plan)
        keys = " ".join(w for w in str(plan).split() if w.partition("=")[0] not in ("zero", "precision"))
        row = rows.setdefault(keys, {})
        assert plan.zero not in row, f"two verdicts of {plan}"
        row[plan.zero] = verdict
    stages = sorted({zero for cells in rows.values() for zero in cells})
    counts = {o: sum(verdict.outcome is o for verdict in verdicts) for o in Outcome}
    return table(
        f"{verdicts[0].model} in {verdicts[0].dtype}",
        ("plan", *(f"zero={zero}" for zero in stages)),
        ((keys or "one rank", *(_cell(cells.get(z)) for z in stages)) for keys, cells in rows.items()),
        left=("plan",),
        caption=", ".join(f"{count} {outcome.value}" for outcome, count in counts.items() if count),
    )


def _cell(verdict: Verdict | None) -> Cell:
    if verdict is None:
        return ""
    number = "" if verdict.outcome in (Outcome.REFUSED, Outcome.DIED) else f"{verdict.max_error:.0e}"
    word = "" if verdict.outcome is Outcome.SAME else verdict.outcome.value
    return plain(" ".join(filter(None, (word, number))), style=_STYLES[verdict.outcome])
