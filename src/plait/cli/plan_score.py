"""`plait plan score`: predictions next to published runs."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from plait.cli.common import STDOUT, Json, report_errors, write_json_output


@report_errors
def score(
    files: Annotated[
        list[Path],
        typer.Argument(
            metavar="FILE...", help="CSV files with the columns of published runs; fields may be empty."
        ),
    ],
    calibrate: Annotated[
        list[Path] | None,
        typer.Option(help="First fit the constants to this file; each source is left out of its own fit."),
    ] = None,
    json: Json = None,
) -> None:
    """Price published runs and print the errors by source, the ranking within groups, and false fits."""
    from plait.planner.calibrate import fit_without
    from plait.planner.constants import DEFAULT
    from plait.planner.runs import Run, read_runs
    from plait.planner.score import estimate_all, score_runs

    runs = [run for path in files for run in read_runs(path)]
    learned = [run for path in calibrate or () for run in read_runs(path) if isinstance(run, Run)]
    constants = fit_without(learned, {run.source for run in runs}) if learned else {}
    priced, refused = estimate_all(runs, lambda source: constants.get(source, DEFAULT))
    result = score_runs(priced, refused)
    result["refused"] = [{"row": one.row, "source": one.source, "reason": one.reason} for one in refused]
    result["constants"] = {"count": len(asdict(DEFAULT)), "values": asdict(constants.get("", DEFAULT))}
    write_json_output(json, result)
    if json != STDOUT:
        _show(result, leaves_out=bool(learned))


def _show(result: dict[str, Any], *, leaves_out: bool) -> None:
    import rich

    from plait.tables import plain, table

    def percent(value: float | None) -> str:
        return "-" if value is None else f"{value:.1%}"

    rows = [
        (name[:70], percent(each["error"]), str(each["rows"])) for name, each in result["sources"].items()
    ]
    rows.append(("mean of sources", percent(result["source_averaged_error"]), str(result["rows_priced"])))
    title = "error of the step's time" + (", each source left out of its fit" if leaves_out else "")
    rich.print(table(title, ("source", "error", "rows"), rows, left=("source",)))
    groups, memory = result["groups"], result["memory"]
    spearman = "-" if groups["spearman_mean"] is None else f"{groups['spearman_mean']:.2f}"
    rich.print(
        f"bias {percent(result['bias'])}, p90 {percent(result['p90_error'])}\n"
        f"{groups['count']} groups: Spearman {spearman}, regret {percent(groups['regret_mean'])} "
        f"(worst {percent(groups['regret_max'])})\n"
        f"memory: {percent(memory['error_mean'])} (worst {percent(memory['error_max'])}) "
        f"of {memory['rows']} rows, "
        f"{result['false_fits']} false fits"
    )
    reasons: dict[str, int] = {}
    for one in result["refused"]:
        reasons[one["reason"]] = reasons.get(one["reason"], 0) + 1
    for reason, number in reasons.items():
        rich.print(plain(f"refused {number} rows: {reason}"))
    values = [(name, f"{value:.4g}") for name, value in result["constants"]["values"].items()]
    rich.print(table(f"{len(values)} constants", ("constant", "value"), values, left=("constant",)))
