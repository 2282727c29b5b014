"""The commands of the laboratory: walls, bills, published figures and scores of published runs."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import rich
import typer
from rich.console import Console
from rich.table import Table

from plait.cli.common import (
    STDOUT,
    Debug,
    Html,
    Json,
    check_outputs,
    print_line,
    report_errors,
    write_json_output,
    write_output,
)
from plait.cli.plan import read_count
from plait.errors import ConfigError
from plait.fileio import parse_json, read_text
from plait.pages.figures import Figure, Listing, figure_values, write_figures
from plait.planner.calibrate import Run
from plait.planner.cluster import cluster as cluster_of
from plait.planner.constants import DEFAULT
from plait.tables import plain, table
from planner_lab import bills
from planner_lab.figures import entries, machines, published_figures
from planner_lab.runs import read_runs
from planner_lab.score import estimate_all, fit_without, score_runs

_PREFIXES = [(1e3**power, prefix) for power, prefix in enumerate(("", "k", "M", "G", "T", "P", "E", "Z"))][
    ::-1
]
_RANKS = 64  # of the table of ZeRO's paper


@report_errors
def walls(json: Json = None, debug: Debug = False) -> None:  # noqa: ARG001 (read by report_errors)
    """Print the compute, memory and communication walls, ZeRO's table, fat trees, devices and hosts."""

    facts = bills.walls()
    rows = [(wall.name, wall.arithmetic, _shown(wall.value, wall.unit)) for wall in facts]
    zero = [
        (
            str(stage),
            *(f"{bills.zero_bytes(7.5e9, _RANKS, stage, gradient_bytes=size) / 1e9:,.1f}" for size in (2, 4)),
        )
        for stage in range(4)
    ]
    console = Console()
    console.print(table("Walls", ("", "arithmetic", "value"), rows, left=("", "arithmetic")))
    title = f"GB per rank of 7.5 B parameters on {_RANKS}, Adam in mixed precision"
    console.print(table(title, ("zero", "16 bytes (paper)", "18 bytes (fp32 gradients)"), zero))
    for listing in machines():
        console.print(_figure_table(listing))
    if json is not None:
        write_json_output(json, [vars(wall) for wall in facts])


@report_errors
def bill(
    parameters: Annotated[str | None, typer.Option("--params", help="Parameters, e.g. 70B.")] = None,
    tokens: Annotated[str | None, typer.Option(help="Tokens, e.g. 15T.")] = None,
    cluster: Annotated[str, typer.Option(help="A cluster, e.g. h100:512.")] = "h100:512",
    mfu: Annotated[
        float | None, typer.Option(help="Utilization of the peak, 0 to 1. Default: an interval.")
    ] = None,
    lost: Annotated[
        float, typer.Option(help="Share of the hours that failures and restarts take, 0 to below 1.")
    ] = 0.0,
    json: Json = None,
    debug: Debug = False,  # noqa: ARG001 (read by report_errors)
) -> None:
    """Print the device-hours, days, money and energy of a training; without options, of published ones."""

    if parameters is None and tokens is None:
        Console().print(_published())
        return
    if parameters is None or tokens is None:
        raise ConfigError(
            "a bill needs parameters and tokens",
            given=f"--params {parameters} --tokens {tokens}",
            expected="both, or neither for published trainings",
            hint="--params 70B --tokens 15T",
        )
    if mfu is not None and not 0 < mfu <= 1:
        raise ConfigError("--mfu is out of range", given=mfu, expected="above 0, at most 1", hint="--mfu 0.4")
    if not 0 <= lost < 1:
        raise ConfigError("--lost is out of range", given=lost, expected="0 to below 1", hint="--lost 0.4")

    on = cluster_of(cluster)
    numbers = read_count("--params", parameters), read_count("--tokens", tokens)
    found = bills.bill(*numbers, on.device, on.num_devices, None if mfu is None else (mfu, mfu), lost)
    print_line(f"{on}: {_shown(found.flops, 'FLOP')}")
    if on.topology == "tree":
        tree = on.tree()
        sizes = f"{tree.num_switches:,} switches in {len(tree.switches)} levels, {tree.links:,} cables"
        print_line(f"  {'network':<13}{sizes}, bisection {_shown(on.bisection_bytes_per_s, 'B/s')}")
    for name, text in _lines(found).items():
        print_line(f"  {name:<13}{text}")
    if lost:
        print_line(f"  {'of it lost':<13}{lost:.0%} of the hours, to failures and restarts")
    price = f"{on.device.dollars_per_hour:g} $/h and {on.device.watts:g} W"
    print_line(
        f"Assumed: {price} a device, {bills.FACILITY:g} x for the facility; 6 FLOP per parameter and token."
    )
    if json is not None:
        values = {name: getattr(found, name) for name in ("flops", "hours", "days", "dollars", "watt_hours")}
        write_json_output(json, {"cluster": on.name, "num_devices": on.num_devices, "lost": lost, **values})


@report_errors
def figures(json: Json = None, html: Html = None, debug: Debug = False) -> None:  # noqa: ARG001 (read by report_errors)
    """Print published figures (scaling, throughput, memory, time and cost) next to predictions."""
    check_outputs({"--json": json, "--html": html})

    found = published_figures(entries())
    for each in found if json != STDOUT else ():
        Console().print(_figure_table(each))
    write_json_output(json, figure_values(found))
    write_output(html, lambda path: write_figures(path, "Published figures, and predictions", found))


def _figure_table(figure: Figure | Listing) -> Table:

    def cell(value: str | float, unit: str = "number") -> str:
        if isinstance(value, str):
            return value
        if unit == "percent":
            return f"{value:.1%}"
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e21 else f"{value:.4g}"

    def shown(y: float, *ends: float) -> str:
        interval = f" ({' to '.join(cell(end, unit) for end in ends)})" if ends else ""
        return cell(y, unit) + interval

    if not isinstance(figure, Figure):
        rows = [[*map(cell, row)] for row in figure.rows]
        return table(figure.title, figure.headings, rows, caption=figure.note)
    unit, names = figure.y.unit, dict(figure.names)
    columns = {each.name: {x: shown(*point) for x, *point in each.points} for each in figure.curves}
    expected = {each.name: each.expected for each in figure.curves if each.expected}

    def at_place(name: str, x: float) -> str:
        published = columns.get(expected.get(name, ""), {}).get(x)
        return columns[name].get(x, "") + (f" [{published}]" if published else "")

    drawn = [name for name in columns if name not in expected.values()]
    places = sorted({x for each in columns.values() for x in each})
    own = {x: [name for name in drawn if x in columns[name]] for x in places}
    if names and max(map(len, own.values())) == 1:  # curves of few points each: one column for all
        rows = [[cell(x), names[x], name, at_place(name, x)] for x in places for name in own[x]]
        headings = [figure.x.name, "", "", figure.y.name]
    else:
        labels = {x: [names[x]] if names else [] for x in places}
        rows = [[cell(x), *labels[x], *(at_place(name, x) for name in drawn)] for x in places]
        headings = [figure.x.name, *([""] if names else []), *drawn]
    errors = ", ".join(f"{name} {error:.1%}" for name, error in figure.errors().items())
    captions = ["[ ]: published"] * bool(expected) + [f"mean error: {errors}"] * bool(errors)
    return table(f"{figure.title}: {figure.y.name}", headings, rows, caption="; ".join(captions))


def _lines(found: bills.Bill) -> dict[str, str]:
    low, high = found.watt_hours
    return {
        "device-hours": _interval(*found.hours),
        "days": _interval(*found.days),
        "dollars": _interval(*found.dollars),
        "MWh": _interval(low / 1e6, high / 1e6),
    }


def _interval(low: float, high: float) -> str:
    digits = 0 if high >= 100 else 1
    texts = [f"{value:,.{digits}f}" for value in (low, high)]
    return texts[0] if texts[0] == texts[1] else " to ".join(texts)


def _published() -> Table:

    rows = []
    for each in bills.trainings().values():
        found = each.bill()
        low, high = found.hours
        rows.append(
            (
                each.name,
                f"{found.flops:.3g}",
                each.device.name.partition("-")[0],
                _interval(low / 1e3, high / 1e3),
                f"{each.hours / 1e3:,.0f}",
                f"{bills.energy_watt_hours(each.hours, each.device) / 1e6:,.0f}",
                f"{each.hours * each.device.dollars_per_hour / 1e6:,.1f}",
            )
        )
    headings = ("", "FLOP", "device", "1,000 hours", "reported", "MWh", "M$")
    return table("Published trainings", headings, rows, left=("", "device"))


def _shown(value: float, unit: str) -> str:
    if unit == "s":
        days = value / 86_400
        return f"{days / 365.25:,.1f} years" if days > 700 else f"{value:,.1f} s"
    factor, prefix = next(each for each in _PREFIXES if value >= each[0])
    text = f"{value / factor:,.4g} {prefix}{unit}"
    return f"{text} ({value / 2**20:,.0f} MiB)" if unit == "B" and value < 1e10 else text


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
        typer.Option(help="First fit the constants to this file; each publisher is left out of its own fit."),
    ] = None,
    before: Annotated[
        Path | None,
        typer.Option(help="--json of an earlier score: figures also without the rows that it refused."),
    ] = None,
    json: Json = None,
) -> None:
    """Price published runs and print the errors by publisher, the ranking within groups, and what fits."""

    runs = [run for path in files for run in read_runs(path)]
    learned = [run for path in calibrate or () for run in read_runs(path) if isinstance(run, Run)]
    constants = (
        fit_without(learned, {run.publisher for run in runs if isinstance(run, Run)}) if learned else {}
    )
    priced, refused = estimate_all(runs, lambda publisher: constants.get(publisher, DEFAULT))
    result = score_runs(priced, refused)
    result["refused"] = [{"row": one.row, "source": one.source, "reason": one.reason} for one in refused]
    result["constants"] = {"count": len(asdict(DEFAULT)), "values": asdict(constants.get("", DEFAULT))}
    if before is not None:
        new = {(one["row"], one["source"]) for one in parse_json(read_text(before))["refused"]}
        result["without_rows_refused_before"] = score_runs(
            [one for one in priced if (one.run.row, one.run.source) not in new], refused
        )
    write_json_output(json, result)
    if json != STDOUT:
        _show(result, leaves_out=bool(learned))


def _show(result: dict[str, Any], *, leaves_out: bool) -> None:
    columns = ("error", "bias", "p90", "inside", "constant_efficiency")
    rows = [
        (name, *(_percent(each.get(key)) for key in columns), str(each["rows"]))
        for name, each in [*sorted(result["publishers"].items()), *result["kinds"].items()]
    ]
    means = {**result, "p90": result["p90_error"]}
    rows.append(("all", *(_percent(means[key]) for key in columns), str(result["rows_priced"])))
    title = "error of the step's time" + (", each publisher left out of its fit" if leaves_out else "")
    headings = ("publisher", "error", "bias", "p90", "in interval", "constant efficiency", "rows")
    rich.print(table(title, headings, rows, left=("publisher",)))
    rich.print(_summary(result))
    if "without_rows_refused_before" in result:
        only = result["without_rows_refused_before"]
        rich.print(f"without rows refused before: error {_percent(only['error'])}, {_summary(only)}")
    reasons: dict[str, int] = {}
    for one in result["refused"]:
        reasons[one["reason"]] = reasons.get(one["reason"], 0) + 1
    for reason, number in reasons.items():
        rich.print(plain(f"refused {number} rows: {reason}"))
    values = [(name, f"{value:.4g}") for name, value in result["constants"]["values"].items()]
    rich.print(table(f"{len(values)} constants", ("constant", "value"), values, left=("constant",)))


def _summary(result: dict[str, Any]) -> str:
    groups, memory = result["groups"], result["memory"]
    spearman = "-" if groups["spearman_mean"] is None else f"{groups['spearman_mean']:.2f}"
    number = result["rows_priced"] + result["rows_refused"]
    return (
        f"bias {_percent(result['bias'])}, p90 {_percent(result['p90_error'])}, "
        f"steps in their interval {_percent(result['rows_inside'])}\n"
        f"{groups['count']} groups: Spearman {spearman}, regret {_percent(groups['regret_mean'])} "
        f"(worst {_percent(groups['regret_max'])})\n"
        f"memory: {_percent(memory['error_mean'])} (worst {_percent(memory['error_max'])}) "
        f"of {memory['rows']} rows\n"
        f"false fits: {result['false_fits']} of {result['rows_ran_out']} that ran out of memory; "
        f"false refusals: {result['false_refusals']} of {result['rows_ran']} that ran\n"
        f"coverage: {result['rows_priced']} of {number} rows"
    )


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"
