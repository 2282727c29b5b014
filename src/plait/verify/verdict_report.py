"""Print verdicts: detailed tables for one plan, a matrix for many."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from plait.plan import Plan
from plait.tables import Cell, cells, counted, plain, table
from plait.verify.result import Outcome, Verdict

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
    if verdict.outcome is Outcome.SAME:
        return f"matches one process: {case}; largest relative error {verdict.max_error:.1e}"
    if verdict.outcome is Outcome.REFUSED:
        return f"refused: {case}\n{verdict.message}"
    if verdict.outcome is Outcome.DIED:
        return f"died: {case}\n{verdict.message}"
    suspects = (
        f"without {' or '.join(verdict.suspects)} it matches: look there"
        if verdict.suspects
        else "no simpler plan matches either"
    )
    error = f"largest relative error {verdict.max_error:.1e}"
    return f"does NOT match one process: {case}; {error}; {verdict.message or suspects}"


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
