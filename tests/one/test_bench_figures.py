"""Figures of measured collectives: the lectures' formulas next to measured times."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from plait.bench.collectives import Measurement, Row
from plait.bench.report import collectives_figures, tables
from plait.pages.figures import Curve, Figure, draw_figures

RANKS, BANDWIDTH = 5, 1e9
SIZES = (1 << 20, 1 << 22, 1 << 24)


def row(collective: str, num_bytes: int, seconds: float, algorithm: str = "auto") -> Row:
    return Row(collective, "owned", num_bytes, seconds, seconds, 1, 1, algorithm)


def figures(*rows: Row) -> dict[str, Figure]:
    measurement = Measurement(rows, "gloo", "cpu", RANKS, 1, "float32", 1, 1.0)
    return {figure.title: figure for figure in collectives_figures(measurement)}


def values(curve: Curve) -> dict[float, float]:
    return {point[0]: point[1] for point in curve.points}


def test_a_chain_is_compared_with_its_formula_by_size_and_by_segments() -> None:
    """(K-1) N/B in one segment, (K-2+S) N/(S B) in S."""
    link = [row("send-receive", size, size / BANDWIDTH) for size in SIZES]
    chains = [row("broadcast", size, 1.0, f"chain:{number}") for number in (4, 1) for size in SIZES]
    found = figures(*link, *chains)
    size = SIZES[-1]
    drawn = {curve.name: values(curve) for curve in found["broadcast of 16M along a chain of 5 ranks"].curves}
    assert drawn["chain"] == {1: 1.0, 4: 1.0}
    assert drawn["chain, formula"] == pytest.approx({1: 4 * size / BANDWIDTH, 4: 7 * size / (4 * BANDWIDTH)})
    curves = {curve.name: curve for curve in found["broadcast by algorithm"].curves}
    expected = {size: 4 * size / BANDWIDTH for size in SIZES}
    assert values(curves["broadcast, chain:1, formula"]) == pytest.approx(expected)
    assert curves["broadcast, chain:1, formula"].expected == "broadcast, chain:1"


def test_without_a_measured_message_no_formula_is_drawn() -> None:
    found = figures(*(row("all-reduce", size, 1.0, "ring") for size in SIZES))
    assert [curve.name for curve in found["all-reduce by algorithm"].curves] == ["all-reduce, ring"]


def test_named_algorithms_alone_have_no_table_of_fits_and_no_word_is_cut_at_80_columns() -> None:
    rows = [row("all-reduce", size, 1.0, "two-level") for size in SIZES]
    measurement = Measurement((*rows,), "gloo", "cpu", RANKS, 1, "float32", 1, 1.0)
    [times] = tables(measurement)
    console = Console(file=io.StringIO(), width=80)
    console.print(times)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert text.count(" two-level ") == len(SIZES)
    assert "…" not in text


def test_the_total_of_60_million_parameters_is_that_of_all_calls() -> None:
    found = figures(row("all-reduce", 4 * 10**6, 0.5), row("all-reduce", 4 * 7 * 10**6, 2.0))
    [curve] = found["All-reduces of 60 M parameters"].curves
    assert curve.points == ((10**6, 60 * 0.5), (7 * 10**6, 9 * 2.0))


def test_every_figure_is_drawn_in_one_picture(tmp_path: Path) -> None:
    found = figures(row("barrier", 0, 1e-3), *(row("all-reduce", size, 1.0) for size in SIZES))
    draw_figures([*found.values()], "figures", tmp_path / "all.svg")
    assert len(found) == 3
    for title in found:
        assert f"<!-- {title}: " in (tmp_path / "all.svg").read_text()
    draw_figures([*figures(row("barrier", 0, 1e-3)).values()], "none", tmp_path / "none.svg")
    assert "<!-- none -->" in (tmp_path / "none.svg").read_text()
