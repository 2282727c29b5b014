"""A breakdown of DDP's step: what is asked, what times become, and what is shown of them."""

from dataclasses import astuple, replace
from io import StringIO

import pytest
from matplotlib.patches import Rectangle
from rich.console import Console

from plait.bench.ddp import Breakdown, Phases, check_ddp_memory, make_bars
from plait.bench.report import breakdown_figure, breakdown_json, breakdown_tables
from plait.bench.request import DdpRequest, cap_label, parse_caps
from plait.errors import ConfigError

CAPS = (None, 1, 5 << 20)
VARIANTS = tuple((carrier, cap) for carrier in ("group", "host") for cap in CAPS)


def rounds() -> list[list[float]]:
    """Times of three rounds: forward, backward alone, backward with sums, optimizer, of every variant."""
    visits = [(0.010, 0.020, 0.030 - 0.005 * place, 0.004) for place in range(len(VARIANTS))]
    return [[seconds * slow for visit in visits for seconds in visit] for slow in (1.0, 3.0, 2.0)]


def found() -> Breakdown:
    request = DdpRequest(CAPS, model="tiny", rounds=3)
    return Breakdown(make_bars(VARIANTS, (1, 21, 4, 1, 21, 4), rounds()), request, 133_440, 2, 1, 5.0)


def test_caps_are_sizes_or_words_each_once() -> None:
    assert parse_caps("one,each,1M,25m, 16K") == (None, 1, 1 << 20, 25 << 20, 16 << 10)
    assert parse_caps("5M,5M,1,each") == (5 << 20, 1)
    assert [cap_label(cap) for cap in (*CAPS, 1536)] == ["no overlap", "per parameter", "5M", "1.5K"]


@pytest.mark.parametrize("text", ["", "one,", "0", "-1M", "all", "1M;2M"])
def test_words_that_are_no_caps_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="invalid bucket caps") as caught:
        parse_caps(text)
    assert f"given   : --caps {text}" in str(caught.value)


def test_memory_needed_is_the_weights_and_a_bucket_of_every_variant() -> None:
    request = DdpRequest(CAPS, model="tiny")
    needed = 2 * 4 * 133_440 * (5 + 6)
    check_ddp_memory(request, 2, needed)
    check_ddp_memory(request, 2, None)
    for asked, ranks in (
        (request, 3),
        (replace(request, caps=(*CAPS, 7)), 2),
        (replace(request, model="small"), 2),
    ):
        with pytest.raises(ConfigError, match="too little memory"):
            check_ddp_memory(asked, ranks, needed)
    check_ddp_memory(replace(request, transport="host"), 2, needed - 6 * 4 * 133_440)


def test_communication_is_what_the_backward_with_sums_takes_longer_also_where_noise_makes_it_negative() -> (
    None
):
    bars = found().bars
    assert [(bar.transport, bar.cap, bar.num_buckets) for bar in bars] == [
        (*variant, buckets) for variant, buckets in zip(VARIANTS, (1, 21, 4, 1, 21, 4), strict=True)
    ]
    for place, bar in enumerate(bars):
        expected = Phases(0.020, 0.040, 0.020 - 0.010 * place, 0.008)  # the round in the middle
        assert astuple(bar.phases) == pytest.approx(astuple(expected), abs=1e-12)
        assert bar.step_s == pytest.approx(expected.step_s)
        without = bars[place // 3 * 3]
        assert bar.ratio_to_no_overlap == pytest.approx(bar.step_s / without.step_s)


def test_ratios_are_of_the_same_round_and_there_are_none_without_a_step_without_overlap() -> None:
    one, each = [0.0, 1.0, 1.0, 0.0], [0.0, 1.0, 2.0, 0.0]
    slow = [[5 * seconds for seconds in (*one, *each)]]
    bars = make_bars((("host", None), ("host", 1)), (1, 2), [[*one, *each], *slow, [*one, *each]])
    assert [bar.ratio_to_no_overlap for bar in bars] == [1.0, 2.0]
    [bar] = make_bars((("host", 1),), (2,), [each])
    assert bar.ratio_to_no_overlap is None
    [other] = make_bars((("host", 1), ("group", None)), (2, 1), [[*each, *one]])[:1]
    assert other.ratio_to_no_overlap is None  # that one was over something else


def test_times_made_negative_by_noise_are_shown_as_zero_and_kept_in_json() -> None:
    rows = breakdown_json(found())["rows"]
    assert [row["communication_s"] for row in rows] == pytest.approx(
        [0.02, 0.01, 0, -0.01, -0.02, -0.03], abs=1e-12
    )
    assert [row["cap_bytes"] for row in rows[:3]] == [None, 1, 5 << 20]
    out = StringIO()
    for table in breakdown_tables(found()):
        Console(file=out, width=80).print(table)
    lines = [[word.strip() for word in line.split("│")] for line in out.getvalue().splitlines()]
    shown = [line for line in lines if len(line) == 8]
    assert shown[0] == ["no overlap", "1", "20.0", "40.0", "20.0", "8.0", "88.0", "1.00"]
    assert shown[5] == ["5M", "4", "20.0", "40.0", "0.0", "8.0", "38.0", "0.66"]


def test_a_bar_is_its_phases_on_top_of_each_other() -> None:
    for axes, place in zip(breakdown_figure(found()).axes, (0, 3), strict=True):
        stacks: dict[float, list[Rectangle]] = {}
        for patch in axes.patches:
            assert isinstance(patch, Rectangle)
            stacks.setdefault(round(patch.get_x(), 6), []).append(patch)
        assert [text.get_text() for text in axes.get_xticklabels()] == ["no overlap", "per parameter", "5M"]
        for number, patches in enumerate(stacks.values()):
            exposed = max(0.0, 20.0 - 10.0 * (place + number))
            assert [patch.get_height() for patch in patches] == pytest.approx([20, 40, exposed, 8], abs=1e-9)
            assert [patch.get_y() for patch in patches] == pytest.approx([0, 20, 60, 60 + exposed], abs=1e-9)
