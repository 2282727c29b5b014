"""`plait schedule`: a pipeline schedule simulated and drawn, and compared with the trace of a run."""

import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Annotated, Any

import typer

from plait.cli.common import (
    STDOUT,
    Debug,
    Html,
    Png,
    check_outputs,
    report_errors,
    write_output,
    write_page_output,
)
from plait.errors import ConfigError
from plait.fileio import write_text
from plait.plan.schedule import GENERATORS, Durations, Schedule, Timeline, check, simulate
from plait.plan.schedule.load import FILE, load_schedule
from plait.plan.schedule.trace import durations_of, read_trace
from plait.plan.schedule.validate import ScheduleNeeds

if TYPE_CHECKING:
    from rich.console import Console

_NAMES = f"{', '.join(GENERATORS)}, or {FILE}PATH, a CSV file"
_SHORTEST, _LONGEST = 1e-6, 1e6  # durations
_WIDEST = 10_000
_MOST_DRAWN, _MOST_IN_PAGE, _MOST_ROWS = 10_000, 150_000, 256  # actions and ranks in a picture


def _time(what: str) -> Any:
    return typer.Option(help=f"Duration of {what}.", show_default=False)


@report_errors
def schedule(
    name: Annotated[
        str | None,
        typer.Argument(metavar="SCHEDULE", help=f"{_NAMES}. Default: that of the trace.", show_default=False),
    ] = None,
    pp: Annotated[int, typer.Option(help="Pipeline ranks.", show_default=False)] = 0,
    micro: Annotated[int, typer.Option(help="Micro-batches per step.", show_default=False)] = 0,
    chunks: Annotated[
        int, typer.Option(help="Stages per rank. Default: that of the schedule.", show_default=False)
    ] = 0,
    forward: Annotated[float | None, _time("the forward of a stage, in any unit. Default: 1")] = None,
    backward: Annotated[float | None, _time("the input gradients of a stage. Default: 1")] = None,
    weight: Annotated[float | None, _time("the weight gradients of a stage. Default: 1")] = None,
    transfer: Annotated[float | None, _time("a transfer between ranks. Default: 0")] = None,
    trace: Annotated[
        Path | None, typer.Option(help="The trace of a run: compare it with a simulation from its durations.")
    ] = None,
    png: Png = None,
    html: Html = None,
    csv: Annotated[
        Path | None, typer.Option(help="Write it as CSV, to edit and to train with; - is stdout.")
    ] = None,
    text: Annotated[
        bool, typer.Option("--text", help="Print the grid even if it is wider than the terminal.")
    ] = False,
    debug: Debug = False,  # noqa: ARG001 (read by report_errors)
) -> None:
    """Show a pipeline schedule: bubble, memory, timeline; and the trace of a run next to it."""
    check_outputs({"--png": png, "--html": html, "--csv": csv})
    given = {"forward": forward, "backward": backward, "weight": weight, "transfer": transfer}
    times = {key: time for key, time in given.items() if time is not None}
    sizes = {"pp": pp, "micro": micro, "chunks": chunks}
    view = _simulated(name, sizes, times) if trace is None else _traced(trace, name, sizes, times, text)
    report = sys.stderr if csv == STDOUT else sys.stdout

    from rich.console import Console

    _show(view, Console(file=report), text)
    timelines, titles = list(view.timelines.values()), list(view.timelines)
    if png is not None:
        _check_drawable(view.schedule, "--png", _MOST_DRAWN)
        from plait.cli.schedule_report import draw_png

        write_output(png, lambda path: draw_png(timelines, path, titles, unit=view.unit), report=report)
    if html is not None:
        _check_drawable(view.schedule, "--html", _MOST_IN_PAGE)
        title = f"schedule {_size(view.schedule)}"
        write_page_output(html, "schedule", title, lambda: _values(view), report=report)
    if csv == STDOUT:
        sys.stdout.write(view.schedule.to_csv())
    else:
        write_output(csv, lambda path: write_text(path, view.schedule.to_csv()), report=report)


def _check_drawable(planned: Schedule, flag: str, most: int) -> None:
    """Raise ConfigError for a schedule whose picture would take minutes, or be too large for any file."""
    num_actions = sum(map(len, planned.ranks))
    if num_actions > most or planned.num_ranks > _MOST_ROWS:
        raise ConfigError(
            "the schedule is too large to draw",
            given=f"{planned.num_ranks:,} ranks, {num_actions:,} actions",
            expected=f"at most {_MOST_ROWS:,} ranks, {most:,} actions",
            hint=f"no {flag}: the tables and --csv have all of it",
        )


@dataclass(frozen=True)
class _View:
    """A schedule with its timelines by title. `durations`: if equal for all stages; the grid needs them."""

    schedule: Schedule
    checked: ScheduleNeeds
    timelines: dict[str, Timeline]
    durations: Durations | None
    unit: str


def _values(view: _View) -> dict[str, Any]:
    """Return what the tables show, and every action, as the values of a page."""
    from plait.pages.timeline import timeline_values

    needs = zip(view.checked.in_flight, view.checked.buffers, strict=True)
    ranks = [
        {"stages": view.schedule.stages_of(rank), "in_flight": held, "buffers": buffers}
        for rank, (held, buffers) in enumerate(needs)
    ]
    timelines = [timeline_values(each, title, view.unit) for title, each in view.timelines.items()]
    return {"schedule": view.schedule.name, "unit": view.unit, "ranks": ranks, "timelines": timelines}


def _simulated(name: str | None, sizes: dict[str, int], times: dict[str, float]) -> _View:
    if name is None:
        raise ConfigError(
            "no schedule is given",
            given="no name",
            expected=_NAMES,
            hint="plait schedule 1f1b --pp 4 --micro 8",
        )
    if name.startswith(FILE) and sizes["chunks"]:
        raise ConfigError(
            "the file of a schedule assigns the stages to ranks",
            given=f"{name} --chunks {sizes['chunks']}",
            expected="the stages per rank that the file has",
            hint="no --chunks",
        )
    for key, words in (("pp", "ranks"), ("micro", "micro-batches")):
        least = 0 if name.startswith(FILE) else 1
        if sizes[key] < least:
            given = f"--{key} {sizes[key]}" if sizes[key] else f"no --{key}, or 0"
            raise ConfigError(
                f"the schedule needs the number of {words}",
                given=given,
                expected=f"an integer from {least}",
                hint=f"--{key} 8",
            )
    for key, time in times.items():
        if time != 0 and not _SHORTEST <= time <= _LONGEST:
            raise ConfigError(
                "the duration is out of range",
                given=f"--{key} {time}",
                expected=f"0, or {_SHORTEST} to {_LONGEST}",
                hint=f"--{key} 1",
            )
    planned = load_schedule(name, sizes["pp"], sizes["micro"], sizes["chunks"])
    checked = check(planned)
    durations = Durations.uniform(planned.num_stages, **times)
    return _View(planned, checked, {"predicted": simulate(planned, durations)}, durations, "")


def _traced(
    trace: Path, name: str | None, sizes: dict[str, int], times: dict[str, float], text: bool
) -> _View:
    """Return the step of median total time, next to the simulation from the median durations."""
    if times or text:
        flags = [f"--{key}" for key in times] + ["--text"] * text
        raise ConfigError(
            "a trace has its own durations, which differ per action",
            given=f"--trace with {' '.join(flags)}",
            expected="no durations and no --text",
            hint=f"no {flags[0]}",
        )
    steps = read_trace(trace)
    planned = next(iter(steps.values())).schedule
    _check_same(planned, name, sizes)
    checked = check(planned)
    middle = median_low((timeline.total, step) for step, timeline in steps.items())[1]
    timelines = {
        "predicted": simulate(planned, durations_of(steps.values())),
        f"measured, step {middle}": steps[middle],
    }
    return _View(planned, checked, timelines, None, "s")


def _check_same(traced: Schedule, name: str | None, sizes: dict[str, int]) -> None:
    """Check that the trace is of the schedule asked for. Raises ConfigError."""
    if name is None:
        if any(sizes.values()):
            given = " ".join(f"--{key} {size}" for key, size in sizes.items() if size)
            raise ConfigError(
                "a trace determines its schedule",
                given=given,
                expected="the sizes of the traced run",
                hint="--trace alone",
            )
        return
    expected = load_schedule(
        name, sizes["pp"] or traced.num_ranks, sizes["micro"] or traced.num_micros, sizes["chunks"]
    )
    if expected.ranks != traced.ranks:
        raise ConfigError(
            "the trace is of another schedule",
            given=f"{_size(traced)}",
            expected=f"{_size(expected)}",
            hint="--trace alone",
        )


def _size(schedule: Schedule) -> str:
    sizes = f"{schedule.num_ranks} ranks, {schedule.num_stages} stages, {schedule.num_micros} micro-batches"
    return f"{schedule.name}: {sizes}"


def _show(view: _View, console: "Console", text: bool) -> None:
    """Print the tables, and the grid if it fits into the terminal or --text is given."""
    from plait.cli.schedule_report import figures_table, grid, ranks_table

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
            given="a longer line",
            expected=f"at most {_WIDEST:,} characters",
            hint="durations that are small multiples of each other, or --png",
        )
