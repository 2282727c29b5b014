"""`plait schedule` as a user types it: its figures, grid, files, comparison with a trace, and errors."""

import re
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from plait.cli.main import app
from plait.plan.schedule import Durations, Schedule, Span, Timeline, make_schedule, simulate
from plait.plan.schedule.trace import write_trace
from support.cli_runs import finish, start

PNG = b"\x89PNG\r\n\x1a\n"
SMALL = ("1f1b", "--pp", "2", "--micro", "3")


def typed(*words: str | Path) -> Result:
    result = CliRunner().invoke(app, ["schedule", *map(str, words)])
    assert result.exit_code == 0, result.output
    return result


def row(out: str, heading: str) -> list[str]:
    """The cells of the line of a table that begins with the heading."""
    (line,) = [line for line in out.splitlines() if re.match(rf"│ +{heading} +│", line)]
    return [cell.strip() for cell in line.strip("│").split("│")][1:]


def test_the_tables_show_the_schedules_costs() -> None:
    out = typed("1f1b", "--pp", "4", "--micro", "8").output
    assert row(out, "stages") == ["4"]
    assert row(out, "total") == ["33"]
    assert row(out, "bubble") == ["27.27%"]  # (P - 1) / (M + P - 1)
    for rank in range(4):
        assert row(out, str(rank)) == [str(rank), str(4 - rank), "1", "9 (27.3%)"]


def test_durations_change_the_clock() -> None:
    words = ("--forward", "2", "--backward", "3", "--weight", "0.5", "--transfer", "0.25")
    out = typed("gpipe", "--pp", "2", "--micro", "1", "--chunks", "2", *words).output
    assert row(out, "stages") == ["4"]
    assert row(out, "total") == [str(4 * (2 + 3 + 0.5) + 6 * 0.25)]
    assert row(out, "0") == ["0 2", "2", "1", "12.5 (53.2%)"]


def test_the_grid_is_shown_where_it_fits_or_is_asked_for() -> None:
    assert "rank 1   F0B0  F1B1  F2B2" in typed(*SMALL).output
    wide = ("1f1b", "--pp", "2", "--micro", "30")
    assert "F0" not in typed(*wide).output
    lines = typed(*wide, "--text").output.splitlines()
    assert len([line for line in lines if re.match(r"rank [01] .*F0 .*B29", line)]) == 2


def test_a_written_schedule_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    result = typed("zb-h1", "--pp", "3", "--micro", "4", "--csv", path)
    assert f"written: {path}" in result.stdout
    assert Schedule.from_csv(path.read_text()).ranks == make_schedule("zb-h1", 3, 4).ranks
    again = typed(f"file:{path}", "--csv", "-", "--png", tmp_path / "mine.png")
    assert again.stdout == path.read_text()
    assert "schedule mine" in again.stderr
    assert f"written: {tmp_path / 'mine.png'}" in again.stderr


def test_pictures_are_written_and_warn_of_nothing(tmp_path: Path) -> None:
    out, _ = finish(
        start(
            *("schedule", "zbv", "--pp", "2", "--micro", "4"),
            *("--png", tmp_path / "a.png", "--html", tmp_path / "a.html"),
            entry=(sys.executable, "-W", "error", "-m", "plait"),
        )
    )
    assert f"written: {tmp_path / 'a.html'}" in out
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)
    assert "PAGES.schedule" in (tmp_path / "a.html").read_text(encoding="utf-8")


def stretched(timeline: Timeline, factor: float) -> Timeline:
    """The timeline of ranks that compute as fast but wait longer before every action."""
    return Timeline.from_spans(
        timeline.schedule,
        [
            [Span(s.action, s.start * factor, s.start * factor + s.end - s.start) for s in spans]
            for spans in timeline.ranks
        ],
    )


def test_a_trace_is_compared_with_the_prediction_from_its_durations(tmp_path: Path) -> None:
    """The step of median total out of three is shown: its actions last as long, its waits are longer."""
    schedule = make_schedule("1f1b", 2, 4)
    quick = simulate(schedule, Durations.uniform(2, forward=0.010, backward=0.010, weight=0.010))
    steps = {5: quick, 6: stretched(quick, 1.5), 7: stretched(quick, 2.0)}
    write_trace(tmp_path / "trace.json", steps)
    words = ("--trace", tmp_path / "trace.json", "--png", tmp_path / "a.png", "--html", tmp_path / "a.html")
    for name in ((), ("1f1b",), ("1f1b", "--pp", "2", "--micro", "4", "--chunks", "1")):
        out = typed(*name, *words).output
        assert re.search(r"│ +predicted │ measured, step 6 │ +off by │", out.replace("┃", "│"))
        slow = steps[6].total
        assert row(out, "total") == ["150.00 ms", f"{1e3 * slow:.2f} ms", f"{0.150 / slow - 1:+.1%}"]
        bubbles = row(out, "bubble")
        assert bubbles[:2] == ["20.00%", f"{steps[6].bubble_fraction:.2%}"]
        assert bubbles[2] == f"{20 - 100 * steps[6].bubble_fraction:+.1f} points"
        idle = steps[6].idle(1)
        assert row(out, "1")[-2:] == ["30.00 ms (20.0%)", f"{1e3 * idle:.2f} ms ({idle / slow:.1%})"]
    page = (tmp_path / "a.html").read_text(encoding="utf-8")
    assert "predicted" in page
    assert "measured, step 6" in page


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], ["ConfigError", "no schedule is given", "plait schedule 1f1b"]),
        (["1f2b", "--pp", "2", "--micro", "2"], ["ScheduleError", "unknown schedule", "try     : 1f1b"]),
        (["1f1b", "--micro", "2"], ["the number of ranks", "no --pp"]),
        (["1f1b", "--pp", "2"], ["the number of micro-batches", "no --micro"]),
        (["1f1b", "--pp", "-2", "--micro", "2"], ["the number of ranks", "--pp -2"]),
        (["zbv", "--pp", "2", "--micro", "4", "--chunks", "3"], ["ScheduleError", "2 stages per rank"]),
        ([*SMALL, "--chunks", "-1"], ["ScheduleError", "-1"]),
        ([*SMALL, "--forward", "nan"], ["the duration is out of range", "--forward nan"]),
        ([*SMALL, "--weight", "-1"], ["the duration is out of range", "--weight -1"]),
        ([*SMALL, "--transfer", "1e30"], ["the duration is out of range", "--transfer 1e+30"]),
        ([*SMALL, "--backward", "1.000001", "--text"], ["grid would be too wide", "--png"]),
        (
            [*SMALL, "--png", "{here}/none/a.png"],
            ["the folder of --png does not exist", "mkdir -p {here}/none"],
        ),
        ([*SMALL, "--html", "{here}"], ["--html is a folder"]),
        ([*SMALL, "--csv", "{here}/none/a.csv"], ["the folder of --csv does not exist"]),
        ([*SMALL, "--png", "{here}/a.txt"], ["unsupported image format", ".png"]),
        (["file:{here}/none.csv"], ["ScheduleError", "cannot be read", "{here}/none.csv: No such file"]),
        (["file:{here}/junk"], ["ScheduleError", "invalid action in a schedule", "'junk'"]),
        (["file:{here}/bytes"], ["ScheduleError", "not UTF-8 text", "{here}/bytes"]),
        (["file:{here}/long"], ["ScheduleError", "is not CSV", "{here}/long"]),
        (["file:{here}/stuck.csv"], ["ScheduleError", "comes before an action it depends on", ">B0.0<"]),
        (
            ["file:{here}/one.csv", "--pp", "2"],
            ["a different number of ranks", "one.csv: 1 ranks", "2 ranks"],
        ),
        (["file:{here}/one.csv", "--micro", "2"], ["a different number of micro-batches", "one.csv: 1"]),
        (["file:{here}/one.csv", "--chunks", "2"], ["assigns the stages to ranks", "no --chunks"]),
        (["--trace", "{here}/none.json"], ["DataError", "cannot be read", "{here}/none.json"]),
        (["--trace", "{here}/junk"], ["DataError", "not a complete pipeline trace", "{here}/junk"]),
        (["gpipe", "--trace", "{here}/trace.json"], ["another schedule", "1f1b: 2 ranks, 2 stages, 3"]),
        ([*SMALL, "--micro", "4", "--trace", "{here}/trace.json"], ["another schedule", "4 micro-batches"]),
        (["--pp", "2", "--trace", "{here}/trace.json"], ["determines its schedule", "--pp 2"]),
        (["--weight", "1", "--trace", "{here}/trace.json"], ["its own durations", "no --weight"]),
        (["--text", "--trace", "{here}/trace.json"], ["its own durations", "no --text"]),
    ],
    ids=lambda value: value[-1] if value and isinstance(value[-1], str) else None,
)
def test_a_mistake_is_an_error_and_leaves_no_files(tmp_path: Path, words: list[str], says: list[str]) -> None:
    (tmp_path / "junk").write_text("junk\n")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\xff")
    (tmp_path / "long").write_text("F" * 200_000)
    (tmp_path / "stuck.csv").write_text("B0.0,F0.0\n")
    (tmp_path / "one.csv").write_text("F0.0,B0.0\n")
    write_trace(tmp_path / "trace.json", {0: simulate(make_schedule("1f1b", 2, 3), Durations.uniform(2))})
    before = sorted(tmp_path.iterdir())
    result = CliRunner().invoke(app, ["schedule", *(word.format(here=tmp_path) for word in words)])
    assert result.exit_code == 2, result.output
    assert len(re.findall(r"^\w+Error: ", result.stderr, re.MULTILINE)) == 1, result.stderr
    assert all(word.format(here=tmp_path) in result.stderr for word in says), result.stderr
    assert sorted(tmp_path.iterdir()) == before


def test_an_unwritable_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "is").mkdir()
    (tmp_path / "is" / "a.png").symlink_to(tmp_path / "nowhere" / "a.png")
    result = CliRunner().invoke(app, ["schedule", *SMALL, "--png", str(tmp_path / "is" / "a.png")])
    assert result.exit_code == 2
    assert "ConfigError: the file cannot be written" in result.stderr
