"""`plait schedule`: what a pipeline will do when, and what a run's trace says that it did."""

import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import Annotated, Any

import typer
from rich.console import Console

from plait.cli.common import Debug, check_picture, report_errors, write_output
from plait.cli.schedule_plot import draw_html, draw_png
from plait.cli.schedule_table import figures_table, grid, ranks_table
from plait.errors import ConfigError
from plait.fileio import check_output_paths, write_text
from plait.plan.schedule import GENERATORS, Durations, Schedule, ScheduleNeeds, Timeline, check, simulate
from plait.plan.schedule.load import FILE, load_schedule
from plait.plan.schedule.trace import durations_of, read_trace

_NAMES = f"{', '.join(GENERATORS)}, or {FILE}PATH, a CSV file"
_STDOUT = Path("-")
_SHORTEST, _LONGEST = 1e-6, 1e6  # durations
_WIDEST = 10_000


def _time(what: str) -> Any:
    return typer.Option(help=f"Time of {what}.", show_default=False)


@report_errors
def schedule(
    name: Annotated[
        str | None, typer.Argument(help=f"{_NAMES}. By default the trace's.", show_default=False)
    ] = None,
    pp: Annotated[int, typer.Option(help="Ranks of the pipeline.", show_default=False)] = 0,
    micro: Annotated[int, typer.Option(help="Micro-batches of a step.", show_default=False)] = 0,
    chunks: Annotated[
        int, typer.Option(help="Stages per rank. By default what is usual.", show_default=False)
    ] = 0,
    forward: Annotated[float | None, _time("a stage's forward, in any unit; by default 1")] = None,
    backward: Annotated[
        float | None, _time("its backward without the weights' gradients; by default 1")
    ] = None,
    weight: Annotated[float | None, _time("the weights' gradients; by default 1")] = None,
    transfer: Annotated[float | None, _time("a transfer between ranks; by default 0")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="A run's trace: compare it with what its durations predict.")
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Draw it into this file: png, pdf or svg.")] = None,
    html: Annotated[Path | None, typer.Option(help="Draw it as a page to zoom and point at.")] = None,
    csv: Annotated[
        Path | None, typer.Option(help="Write it as CSV, to edit and train with; - is stdout.")
    ] = None,
    text: Annotated[bool, typer.Option("--text", help="Print the grid, however wide it is.")] = False,
    debug: Debug = False,  # noqa: ARG001 (read by ends_with_letter)
) -> None:
    """Show a pipeline's schedule: bubble, what ranks hold, and the picture; beside it a run's trace."""
    check_output_paths({"--png": png, "--html": html, "--csv": None if csv == _STDOUT else csv})
    check_picture(png)
    asked = {"forward": forward, "backward": backward, "weight": weight, "transfer": transfer}
    times = {key: time for key, time in asked.items() if time is not None}
    sizes = {"pp": pp, "micro": micro, "chunks": chunks}
    view = _of_name(name, sizes, times) if trace is None else _of_trace(trace, name, sizes, times, text)
    say = sys.stderr if csv == _STDOUT else sys.stdout
    _show(view, Console(file=say), text)
    timelines, titles = list(view.timelines.values()), list(view.timelines)
    write_output(png, lambda path: draw_png(timelines, path, titles, unit=view.unit), say=say)
    write_output(html, lambda path: draw_html(timelines, path, titles, unit=view.unit), say=say)
    if csv == _STDOUT:
        sys.stdout.write(view.schedule.to_csv())
    else:
        write_output(csv, lambda path: write_text(path, view.schedule.to_csv()), say=say)


@dataclass(frozen=True)
class _View:
    """What is shown. `durations`: where they are the same for all stages, so that the grid has columns."""

    schedule: Schedule
    checked: ScheduleNeeds
    timelines: dict[str, Timeline]
    durations: Durations | None
    unit: str


def _of_name(name: str | None, sizes: dict[str, int], times: dict[str, float]) -> _View:
    if name is None:
        raise ConfigError(
            "there is nothing to show", expected=_NAMES, hint="plait schedule 1f1b --pp 4 --micro 8"
        )
    if name.startswith(FILE) and sizes["chunks"]:
        raise ConfigError(
            "a schedule's file says which rank has which stages",
            given=f"{name} --chunks {sizes['chunks']}",
            hint="no --chunks",
        )
    for key, words in (("pp", "ranks"), ("micro", "micro-batches")):
        least = 0 if name.startswith(FILE) else 1
        if sizes[key] < least:
            given = f"--{key} {sizes[key]}" if sizes[key] else f"no --{key}"
            raise ConfigError(f"how many {words} is the schedule for?", given=given, hint=f"--{key} 8")
    for key, time in times.items():
        if time != 0 and not _SHORTEST <= time <= _LONGEST:
            raise ConfigError(
                "nothing takes that long",
                given=f"--{key} {time}",
                expected=f"0, or {_SHORTEST} to {_LONGEST}",
            )
    found = load_schedule(name, sizes["pp"], sizes["micro"], sizes["chunks"])
    checked = check(found)
    durations = Durations.uniform(found.num_stages, **times)
    return _View(found, checked, {"predicted": simulate(found, durations)}, durations, "")


def _of_trace(
    trace: Path, name: str | None, sizes: dict[str, int], times: dict[str, float], text: bool
) -> _View:
    """Beside what the median durations predict stands the step whose total is the median of all steps."""
    if times or text:
        flags = [f"--{key}" for key in times] + ["--text"] * text
        raise ConfigError(
            "a trace has durations of its own, which fill no columns",
            given=f"--trace with {' '.join(flags)}",
            hint=f"no {flags[0]}",
        )
    steps = read_trace(trace)
    found = next(iter(steps.values())).schedule
    _check_same(found, name, sizes)
    checked = check(found)
    middle = median_low((timeline.total, step) for step, timeline in steps.items())[1]
    timelines = {
        "predicted": simulate(found, durations_of(steps.values())),
        f"measured, step {middle}": steps[middle],
    }
    return _View(found, checked, timelines, None, "s")


def _check_same(traced: Schedule, name: str | None, sizes: dict[str, int]) -> None:
    """Raises ConfigError where the words ask for another schedule than the trace is of."""
    if name is None:
        if any(sizes.values()):
            given = " ".join(f"--{key} {size}" for key, size in sizes.items() if size)
            raise ConfigError("a trace says which schedule it is of", given=given, hint="--trace alone")
        return
    asked = load_schedule(
        name, sizes["pp"] or traced.num_ranks, sizes["micro"] or traced.num_micros, sizes["chunks"]
    )
    if asked.ranks != traced.ranks:
        raise ConfigError(
            "the trace is of another schedule",
            given=f"{_size(traced)}",
            expected=f"{_size(asked)}",
            hint="--trace alone",
        )


def _size(schedule: Schedule) -> str:
    sizes = f"{schedule.num_ranks} ranks, {schedule.num_stages} stages, {schedule.num_micros} micro-batches"
    return f"{schedule.name}: {sizes}"


def _show(view: _View, console: Console, text: bool) -> None:
    """The tables; the grid where it fits into the terminal, or was asked for."""
    console.print(figures_table(view.schedule, view.timelines, unit=view.unit))
    console.print(ranks_table(view.schedule, view.checked, view.timelines, unit=view.unit))
    if view.durations is None:
        return
    most = _WIDEST if text else console.width
    drawn = grid(view.timelines["predicted"], view.durations, most=most)
    if drawn is not None:
        console.print(drawn, soft_wrap=True)
    elif text:
        raise ConfigError(
            "the grid would be too wide",
            given=f"more than {_WIDEST:,} characters in a line",
            hint="durations that are small multiples of each other, or --png",
        )
