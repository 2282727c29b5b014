"""Layout rules: their text, what they shard, and what they refuse."""

import pytest

from plait.errors import PlanError
from plait.plan.layout_rules import LayoutRules, NamedDim, parse_dims

RULES = LayoutRules.parse("batch:dp heads:col ffn:col vocab:col hidden:row length:sp")


@pytest.mark.parametrize(
    ("text", "fact"),
    [
        ("ffn", "cannot read a layout rule"),
        ("ffn:column", "a layout rule has an unknown axis"),
        ("experts:ep", "a layout rule has an unknown axis"),
        ("ffn:col ffn:row", "the layout has two axes for ffn"),
        ("ffn:dp", "a layout cannot shard ffn over dp"),
        ("batch:col", "a layout cannot shard batch over col"),
    ],
)
def test_rules_that_cannot_be_read_are_refused_with_all_four_parts(text: str, fact: str) -> None:
    with pytest.raises(PlanError) as raised:
        LayoutRules.parse(text)
    assert raised.value.fact == fact
    assert None not in (raised.value.given, raised.value.expected, raised.value.hint)


def test_a_name_has_its_rules_axis_in_every_tensor() -> None:
    assert RULES.axes(parse_dims("(3 heads 64) hidden", "qkv"), "qkv") == ("col", "row")
    assert RULES.axes(parse_dims("hidden ffn", "down"), "down") == ("row", "col")
    assert RULES.axes(parse_dims("width", "norm"), "norm") == (None,)


def test_an_axis_shards_a_tensor_once() -> None:
    with pytest.raises(PlanError, match="two dims of mix over col") as raised:
        RULES.axes(parse_dims("ffn heads", "mix"), "mix")
    assert None not in (raised.value.given, raised.value.expected, raised.value.hint)
    with pytest.raises(PlanError, match="two dims of mix over row"):
        RULES.axes(parse_dims("hidden hidden", "mix"), "mix")


@pytest.mark.parametrize(
    ("rows", "cols", "layout", "fact"),
    [
        (1, 2, "ffn:col hiden:row", "a layout rule names a dim that the model does not have"),
        (2, 2, "ffn:col", "no dim is sharded over row, so its ranks would repeat each other's work"),
        (1, 2, "hidden:row", "no dim is sharded over col, so its ranks would repeat each other's work"),
        (1, 2, "ffn:col length:sp", "the layout shards the sequence, but the plan does not"),
    ],
)
def test_rules_have_to_fit_the_names_and_the_grid(rows: int, cols: int, layout: str, fact: str) -> None:
    with pytest.raises(PlanError) as raised:
        LayoutRules.parse(layout).check(["ffn", "hidden"], rows, cols, sequence=False)
    assert raised.value.fact == fact
    assert None not in (raised.value.given, raised.value.expected, raised.value.hint)


def test_dims_are_named_parts_of_names_of_a_width() -> None:
    assert parse_dims("(3 heads 64) hidden", "qkv") == (NamedDim("heads", 3, 64), NamedDim("hidden"))
    assert NamedDim("heads", 3, 64).size(3 * 8 * 64, "qkv") == 8
    assert str(NamedDim("heads", 3, 64)) == "(3 heads 64)"
    with pytest.raises(PlanError, match="does not have the size that its name gives"):
        NamedDim("heads", 3, 64).size(1000, "qkv")
    for text in ("", "3 heads", "(heads", "ffn, hidden", "(0 heads)"):
        with pytest.raises(PlanError):
            parse_dims(text, "qkv")[0].size(6, "qkv")
