"""Print verdicts: detailed tables for one plan, a matrix for many."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from plait.plan import Plan
from plait.verify.result import Outcome, Verdict

_STYLES = {Outcome.SAME: "green", Outcome.DIFFERS: "red", Outcome.REFUSED: "yellow", Outcome.DIED: "red"}


def print_verdict(verdict: Verdict, console: Console) -> None:
    """Print the losses, the worst parameters, the traffic and the verdict on one plan."""
    if verdict.outcome in (Outcome.SAME, Outcome.DIFFERS):
        console.print(_steps(verdict))
        console.print(_parameters(verdict))
        if verdict.traffic:
            console.print(_traffic(verdict))
    text = Text(summary(verdict), style=_STYLES[verdict.outcome])  # no markup: it may quote anything
    console.print(text, highlight=False, soft_wrap=True)


def summary(verdict: Verdict) -> str:
    """Return the verdict as a sentence."""
    ranks = "1 rank" if verdict.num_ranks == 1 else f"{verdict.num_ranks} ranks"
    case = f"{verdict.model}, {verdict.plan}, on {ranks}"
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
    return f"does NOT match one process: {case}; {error}; {suspects}"


def summary_line(verdict: Verdict) -> str:
    """Return the verdict as one line, for one plan of many."""
    error = f"{verdict.max_error:.1e}" if verdict.outcome in (Outcome.SAME, Outcome.DIFFERS) else ""
    reason = verdict.message.splitlines()[0] if verdict.message else ""
    return f"{verdict.outcome.value:8} {verdict.model}  {verdict.plan}  {error}{reason}".rstrip()


def _steps(verdict: Verdict) -> Table:
    differs = verdict.outcome is Outcome.DIFFERS
    table = Table(title="steps, up to the first mismatch" if differs else "steps", title_justify="left")
    for heading in ("step", "loss", "one process", "gradient norm", "one process"):
        table.add_column(heading, justify="right")
    steps = zip(verdict.steps, verdict.reference_steps, strict=True)
    for number, (step, reference) in enumerate(steps, start=1):
        numbers = (step.loss, reference.loss, step.grad_norm, reference.grad_norm)
        table.add_row(str(number), *(f"{value:.12g}" for value in numbers))
    return table


def _parameters(verdict: Verdict) -> Table:
    title = f"largest relative errors: {len(verdict.worst_parameters)} of {verdict.num_parameters} parameters"
    table = Table(title=title, title_justify="left")
    differs = verdict.outcome is Outcome.DIFFERS
    table.add_column("parameter")
    for heading in ("gradient", "weight", "tolerance"):
        table.add_column(heading, justify="right")
    if differs:
        table.add_column("wrong on")
    for worst in verdict.worst_parameters:
        is_wrong = worst.excess > 1
        numbers = (worst.gradient_error, worst.weight_error, worst.tolerance)
        row = [escape(worst.name), *(f"{value:.1e}" for value in numbers)]
        row += [worst.ranks if is_wrong else ""] if differs else []
        table.add_row(*row, style="red" if is_wrong else None)
    return table


def _traffic(verdict: Verdict) -> Table:
    table = Table(title="traffic of rank 0, last step", title_justify="left")
    for heading in ("", "calls", "bytes"):
        table.add_column(heading, justify="right" if heading else "left")
    for operation, count, size in verdict.traffic:
        table.add_row(operation, f"{count:,}", f"{size:,}")
    return table


def verdict_matrix(verdicts: Sequence[Verdict]) -> Table:
    """Return a table with a row for plans that differ only in `zero`, and a column per ZeRO stage."""
    rows: dict[str, dict[int, Verdict]] = {}
    for verdict in verdicts:
        plan = Plan.parse(verdict.plan)
        keys = " ".join(w for w in str(plan).split() if w.partition("=")[0] not in ("zero", "precision"))
        row = rows.setdefault(keys, {})
        assert plan.zero not in row, f"two verdicts of {plan}"
        row[plan.zero] = verdict
    table = Table(title=f"{verdicts[0].model} in {verdicts[0].dtype}", title_justify="left")
    table.add_column("plan")
    stages = sorted({zero for cells in rows.values() for zero in cells})
    for zero in stages:
        table.add_column(f"zero={zero}", justify="right")
    for keys, cells in rows.items():
        table.add_row(keys or "one rank", *(_cell(cells.get(zero)) for zero in stages))
    counts = {o: sum(verdict.outcome is o for verdict in verdicts) for o in Outcome}
    table.caption = ", ".join(f"{count} {outcome.value}" for outcome, count in counts.items() if count)
    return table


def _cell(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    style = _STYLES[verdict.outcome]
    number = "" if verdict.outcome in (Outcome.REFUSED, Outcome.DIED) else f"{verdict.max_error:.0e}"
    word = "" if verdict.outcome is Outcome.SAME else verdict.outcome.value
    return f"[{style}]{' '.join(filter(None, (word, number)))}[/]"
