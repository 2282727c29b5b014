"""Timelines as pictures, pages and grids of text: every action is there, at its place and in its colour."""

from collections import Counter
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex, to_rgb
from matplotlib.image import imread

from plait.cli.schedule_report import draw_png, figure_of, grid
from plait.pages.timeline import COLORS, WORDS, shade, timeline_values
from plait.plan.schedule import Durations, Kind, Schedule, Span, Timeline, make_schedule, simulate

SPLIT = make_schedule("zb-h1", 3, 5)
CHUNKED = make_schedule("interleaved", 2, 4, 3)


def uniform(schedule: Schedule, **times: float) -> Timeline:
    return simulate(schedule, Durations.uniform(schedule.num_stages, **times))


def late(timeline: Timeline) -> Timeline:
    """The same, counted from another moment."""
    return Timeline.from_spans(
        timeline.schedule,
        [[Span(s.action, s.start + 7.0, s.end + 7.0) for s in spans] for spans in timeline.ranks],
    )


def expected_bars(timeline: Timeline) -> Counter[tuple[int, float, float, str]]:
    """(rank, start, length, colour) of every action."""
    bars = []
    for rank, spans in enumerate(timeline.ranks):
        stages = timeline.schedule.stages_of(rank)
        for span in spans:
            color = shade(span.action.kind, stages.index(span.action.stage), len(stages))
            bars.append((rank, round(span.start, 6), round(span.end - span.start, 6), color))
    return Counter(bars)


def drawn_bars(axes: Axes) -> Counter[tuple[int, float, float, str]]:
    bars = []
    for row in axes.collections:
        assert isinstance(row, PolyCollection)
        for path, color in zip(row.get_paths(), row.get_facecolors(), strict=True):
            box = path.get_extents()
            bars.append((round((box.y0 + box.y1) / 2), round(box.x0, 6), round(box.width, 6), to_hex(color)))
    return Counter(bars)


@pytest.mark.parametrize("schedule", [SPLIT, CHUNKED], ids=lambda schedule: schedule.name)
def test_a_picture_has_a_bar_for_every_action_at_its_time(schedule: Schedule) -> None:
    first, second = uniform(schedule), uniform(schedule, forward=2.0, transfer=0.5)
    figure = figure_of([first, late(second)], ["predicted", "measured"])
    above, below = figure.axes
    assert drawn_bars(above) == expected_bars(first)
    assert drawn_bars(below) == expected_bars(second)
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["predicted", "measured"]
    assert above.get_xlim() == below.get_xlim() == (0, second.total)
    numbers = Counter(text.get_text() for text in above.texts)
    assert numbers == Counter(str(action.micro) for _, action in schedule)


def test_stages_of_a_rank_differ_in_shade_and_kinds_in_colour() -> None:
    shades = {shade(kind, chunk, 4) for kind in Kind for chunk in range(4)}
    assert len(shades) == 12
    assert all(shade(kind, 0, 4) == shade(kind, 0, 1) == COLORS[kind] for kind in Kind)
    brightness = [sum(to_rgb(shade(Kind.F, chunk, 4))) for chunk in range(4)]
    assert brightness == sorted(brightness)


def test_the_legend_names_what_there_is() -> None:
    for schedule, kinds in ((SPLIT, "FBW"), (CHUNKED, "FB"), (make_schedule("inference", 2, 3), "F")):
        (legend,) = figure_of([uniform(schedule)], [""]).legends
        assert [text.get_text() for text in legend.get_texts()] == [WORDS[Kind(kind)] for kind in kinds]


def test_a_png_has_its_size_and_the_colours(tmp_path: Path) -> None:
    timelines, titles = [uniform(SPLIT), uniform(SPLIT, transfer=0.2)], ["one", "two"]
    draw_png(timelines, tmp_path / "a.png", titles)
    pixels = imread(tmp_path / "a.png")
    width, height = figure_of(timelines, titles).get_size_inches()
    assert pixels.shape[:2] == (round(height * 120), round(width * 120))
    assert height == pytest.approx(2 * (0.75 + 3 * 0.32))
    found = Counter(map(tuple, (pixels[..., :3] * 255).round().astype(int).reshape(-1, 3).tolist()))
    areas = [found[tuple(round(255 * c) for c in to_rgb(COLORS[kind]))] for kind in Kind]
    # F, B and W take equally long: their areas are equal, but for borders and digits.
    assert min(areas) > 0.8 * max(areas)
    assert sum(areas) > 0.3 * pixels.shape[0] * pixels.shape[1]


def test_a_long_schedule_gets_a_wider_picture_up_to_a_bound() -> None:
    widths = [
        figure_of([uniform(make_schedule("1f1b", 2, micros))], [""]).get_figwidth()
        for micros in (2, 30, 60, 1000)
    ]
    assert widths == sorted(widths)
    assert widths[0] == 8.0
    assert widths[1] < widths[2] < widths[3] == 40.0


def test_narrow_bars_have_no_number() -> None:
    figure = figure_of([uniform(make_schedule("1f1b", 2, 1000))], [""])
    assert drawn_bars(figure.axes[0]).total() == 4000
    assert not figure.axes[0].texts


def test_nothing_that_takes_time_can_be_drawn(tmp_path: Path) -> None:
    idle = uniform(SPLIT, forward=0.0, backward=0.0, weight=0.0)
    draw_png([idle], tmp_path / "a.png", ["idle"])
    assert all(set(row["spans"][2::4]) == {0.0} for row in timeline_values(idle, "idle")["rows"])
    assert drawn_bars(figure_of([idle], ["idle"]).axes[0]).total() == 45


def test_a_page_holds_every_action_at_its_time_in_its_colour() -> None:
    first, second = uniform(CHUNKED), uniform(CHUNKED, weight=2.0)
    for timeline, same in ((first, first), (second, late(second))):
        values = timeline_values(same, "a title", "s")
        assert values["total"] == timeline.total
        bars, actions = [], []
        for rank, row in enumerate(values["rows"]):
            for at in range(0, len(row["spans"]), 4):
                number, micro, start, end = row["spans"][at : at + 4]
                of = values["types"][number]
                bars.append((rank, round(start, 6), round(end - start, 6), of["color"]))
                actions.append((of["kind"], of["stage"], micro))
        assert Counter(bars) == expected_bars(timeline)
        assert sorted(actions) == sorted((a.kind.value, a.stage, a.micro) for _, a in CHUNKED)


def test_a_grid_has_a_column_for_every_unit_of_time() -> None:
    durations = Durations.uniform(2)
    drawn = grid(simulate(make_schedule("1f1b", 2, 3), durations), durations, most=80)
    assert drawn is not None
    assert drawn.plain.splitlines()[:2] == [
        "rank 0 F0F1    B0  F2B1    B2  ",
        "rank 1   F0B0  F1B1  F2B2  ",
    ]


def test_a_grid_marks_later_stages_and_waits_in_parts_of_a_unit() -> None:
    schedule = Schedule.from_csv("F0.0,F1.0,B1.0,B0.0\n")
    durations = Durations.uniform(2, forward=0.1, backward=0.2, weight=0.1)
    drawn = grid(simulate(schedule, durations), durations, most=80)
    assert drawn is not None
    assert drawn.plain.splitlines()[0] == "rank 0 F0f0b0    B0    "
    colors = {
        str(span.style).split()[-1] for span in drawn.spans if span.end <= len("rank 0 F0f0b0    B0    ")
    }
    assert colors == {shade(kind, chunk, 2) for kind in (Kind.F, Kind.B) for chunk in (0, 1)}


def test_a_grid_that_does_not_fit_is_none() -> None:
    durations = Durations.uniform(2)
    timeline = simulate(make_schedule("1f1b", 2, 3), durations)
    assert grid(timeline, durations, most=7 + 12 * 2) is not None
    assert grid(timeline, durations, most=7 + 12 * 2 - 1) is None
    nothing = Durations.uniform(2, forward=0.0, backward=0.0, weight=0.0)
    assert grid(simulate(timeline.schedule, nothing), nothing, most=80) is None
