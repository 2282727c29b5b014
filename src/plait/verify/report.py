"""Verdicts as tables: of one plan all that was found, of many a matrix."""

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from plait.plan import Plan
from plait.verify.result import Outcome, Verdict

_SHOWN = {Outcome.SAME: "green", Outcome.DIFFERS: "red", Outcome.REFUSED: "yellow", Outcome.DIED: "red"}


def print_verdict(verdict: Verdict, console: Console) -> None:
    """Of one plan: losses, the parameters that are farthest, what was said between ranks, and the verdict."""
    if verdict.outcome in (Outcome.SAME, Outcome.DIFFERS):
        console.print(_steps(verdict))
        console.print(_parameters(verdict))
        if verdict.traffic:
            console.print(_traffic(verdict))
    shown = Text(summary(verdict), style=_SHOWN[verdict.outcome])  # no markup: it may quote anything
    console.print(shown, highlight=False, soft_wrap=True)


def summary(verdict: Verdict) -> str:
    """The verdict in words."""
    ranks = "1 rank" if verdict.num_ranks == 1 else f"{verdict.num_ranks} ranks"
    what = f"{verdict.model}, {verdict.plan}, on {ranks}"
    if verdict.outcome is Outcome.SAME:
        return f"the same as in one process: {what}; largest relative difference {verdict.largest:.1e}"
    if verdict.outcome is Outcome.REFUSED:
        return f"refused: {what}\n{verdict.message}"
    if verdict.outcome is Outcome.DIED:
        return f"died: {what}\n{verdict.message}"
    suspects = (
        f"without {' or '.join(verdict.suspects)} the numbers are right: look there"
        if verdict.suspects
        else "no simpler plan gives the right numbers"
    )
    apart = f"largest relative difference {verdict.largest:.1e}"
    return f"NOT the same as in one process: {what}; {apart}; {suspects}"


def summary_line(verdict: Verdict) -> str:
    """Of one among many."""
    found = f"{verdict.largest:.1e}" if verdict.outcome in (Outcome.SAME, Outcome.DIFFERS) else ""
    why = verdict.message.splitlines()[0] if verdict.message else ""
    return f"{verdict.outcome.value:8} {verdict.model}  {verdict.plan}  {found}{why}".rstrip()


def _steps(verdict: Verdict) -> Table:
    differs = verdict.outcome is Outcome.DIFFERS
    table = Table(title="steps, up to the first that differs" if differs else "steps", title_justify="left")
    for heading in ("step", "loss", "in one process", "gradient norm", "in one process"):
        table.add_column(heading, justify="right")
    for number, (mine, theirs) in enumerate(zip(verdict.steps, verdict.expected, strict=True), start=1):
        numbers = (mine.loss, theirs.loss, mine.norm, theirs.norm)
        table.add_row(str(number), *(f"{value:.12g}" for value in numbers))
    return table


def _parameters(verdict: Verdict) -> Table:
    title = f"the {len(verdict.worst)} farthest of {verdict.num_parameters} parameters, relative"
    table = Table(title=title, title_justify="left")
    differs = verdict.outcome is Outcome.DIFFERS
    table.add_column("parameter")
    for heading in ("gradient", "weight", "allowed"):
        table.add_column(heading, justify="right")
    if differs:
        table.add_column("off on")
    for off in verdict.worst:
        is_off = off.excess > 1
        row = [escape(off.name), *(f"{value:.1e}" for value in (off.gradient, off.weight, off.allowed))]
        row += [off.where if is_off else ""] if differs else []
        table.add_row(*row, style="red" if is_off else None)
    return table


def _traffic(verdict: Verdict) -> Table:
    table = Table(title="what the first rank said in the last step", title_justify="left")
    for heading in ("", "calls", "bytes"):
        table.add_column(heading, justify="right" if heading else "left")
    for what, count, size in verdict.traffic:
        table.add_row(what, f"{count:,}", f"{size:,}")
    return table


def verdict_matrix(verdicts: Sequence[Verdict]) -> Table:
    """A row for plans that differ in `zero` alone, a column for each stage."""
    rows: dict[str, dict[int, Verdict]] = {}
    for verdict in verdicts:
        plan = Plan.parse(verdict.plan)
        words = " ".join(w for w in str(plan).split() if w.partition("=")[0] not in ("zero", "precision"))
        row = rows.setdefault(words, {})
        assert plan.zero not in row, f"two verdicts of {plan}"
        row[plan.zero] = verdict
    table = Table(title=f"{verdicts[0].model} in {verdicts[0].dtype}", title_justify="left")
    table.add_column("plan")
    stages = sorted({zero for cells in rows.values() for zero in cells})
    for zero in stages:
        table.add_column(f"zero={zero}", justify="right")
    for words, cells in rows.items():
        table.add_row(words or "one rank", *(_cell(cells.get(zero)) for zero in stages))
    counts = {o: sum(verdict.outcome is o for verdict in verdicts) for o in Outcome}
    table.caption = ", ".join(f"{count} {outcome.value}" for outcome, count in counts.items() if count)
    return table


def _cell(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    style = _SHOWN[verdict.outcome]
    number = "" if verdict.outcome in (Outcome.REFUSED, Outcome.DIED) else f"{verdict.largest:.0e}"
    word = "" if verdict.outcome is Outcome.SAME else verdict.outcome.value
    return f"[{style}]{' '.join(filter(None, (word, number)))}[/]"
