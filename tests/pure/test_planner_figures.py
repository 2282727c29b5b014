"""Published figures: the planner is as near to them as docs/figures.md says."""

import pytest

from plait.pages.figures import Axis, Curve, Figure
from planner_lab.figures import PublishedPoint, entries, offloaded, published_figures

ERRORS = {  # a curve's mean error in docs/figures.md, and a little
    "zero=0": 0.001,
    "zero=1": 0.001,
    "zero=2": 0.003,
    "zero=3": 0.014,
    "model parallel, predicted": 0.02,
    "model and data parallel, predicted": 0.1,
    "epoch, predicted": 0.32,
    "Megatron-LM, predicted": 0.065,
    "BLOOM, predicted": 0.065,
    "OPT, predicted": 0.08,
    "NCCL on 8 V100, predicted": 0.2,
}


@pytest.fixture(scope="module")
def known() -> list[PublishedPoint]:
    return entries()


def test_predicted_figures_are_as_near_to_the_published_ones_as_documented(
    known: list[PublishedPoint],
) -> None:
    figures = [each for each in published_figures(known) if isinstance(each, Figure)]
    errors = {name: error for each in figures for name, error in each.errors().items()}
    assert errors.keys() == ERRORS.keys()
    assert {name: error for name, error in errors.items() if error > ERRORS[name]} == {}


def test_reported_hours_of_a_figure_are_within_its_intervals(known: list[PublishedPoint]) -> None:
    found = [each for each in published_figures(known) if each.title.endswith("of published trainings")]
    for figure in found:
        assert isinstance(figure, Figure)
        reported, bill = ({point[0]: point[1:] for point in curve.points} for curve in figure.curves)
        assert all(bill[x][1] <= value <= bill[x][2] for x, (value,) in reported.items())
    assert len(found) == 2


def test_models_of_figures_have_their_published_sizes(known: list[PublishedPoint]) -> None:
    for each in known:
        assert each.run.model.num_params / 1e9 == pytest.approx(each.billions, rel=0.02, abs=0.06), each.name
        assert each.estimate.memory.total < each.run.cluster.device.sheet_bytes, each.name


def test_offload_trains_ten_times_the_parameters_on_one_gpu() -> None:
    """As in DeepSpeed's figure: a V100 of 32 GB trains 1.3 B parameters, and with offload 13 B."""
    rows = {row[:2]: row[2:] for row in offloaded().rows}
    assert [(size, states, row[1]) for (size, states), row in rows.items()] == [
        ("1.3", "on the GPU", "yes"),
        ("1.3", "on the host", "yes"),
        ("13", "on the GPU", "no"),
        ("13", "on the host", "yes"),
    ]
    host_gib = rows["13", "on the host"][2]
    assert isinstance(host_gib, float)
    assert 250 < host_gib < 350, "24 bytes per parameter"
    assert rows["13", "on the GPU"][2] == 0


def test_all_reduces_of_60_million_parameters_level_off_at_millions_per_call(
    known: list[PublishedPoint],
) -> None:
    [figure] = [each for each in published_figures(known) if each.title.startswith("All-reduces")]
    assert isinstance(figure, Figure)
    for curve in figure.curves:
        totals = [y for _, y, *_ in curve.points]
        assert totals == sorted(totals, reverse=True)
        assert totals[0] > 900 * totals[-1], "one call a thousand parameters"
        assert totals[-2] < 1.2 * totals[-1], "16 M parameters per call"


def test_a_trillion_parameters_take_84_days(known: list[PublishedPoint]) -> None:
    """2104.04473, section 5.1: 450 B tokens on 3,072 A100."""
    [trillion] = [each for each in known if each.billions > 1000]
    days = trillion.estimate.step_s * 450e9 / trillion.run.work.tokens / 86_400
    assert days == pytest.approx(84, rel=0.11)
    assert trillion.num_ranks == 3072


def test_the_error_of_a_curve_is_the_mean_over_places_that_both_have() -> None:
    expected = Curve("a", ((1, 10), (2, 10), (3, 5)))
    curves = (
        expected,
        Curve("b", ((1, 11), (2, 7), (4, 1)), expected="a"),
        Curve("c", ((9, 1),), expected="a"),
    )
    assert Figure("", Axis(""), Axis(""), curves).errors() == {"b": pytest.approx(0.2)}
