"""Layout rules and named dims become the plan that styles give; what has no sums to reduce is refused."""

import tomllib
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.engine.spec import Arguments
from plait.errors import PlaitError
from plait.estimate.explain import Explanation, explain
from plait.models import blocks_of, build_tp_plan
from plait.plan import subtract_traffic
from plait.plan.layout_rules import layer_collectives
from plait.plan.sharding import Style, TPPlan
from plait.train.explain_recipe import tensor_plan_text
from support.tensor_models import FAMILIES, small

MEGATRON = "heads:col ffn:col vocab:col"


def plan_of(model: nn.Module, rows: int, cols: int, given: dict[str, str] | None) -> TPPlan:
    return ordered(build_tp_plan(model, rows, cols, sequence=False, blocks=blocks_of(model), given=given))


def ordered(plan: TPPlan) -> TPPlan:
    """A plan without its text, and without the order of what it lists."""
    listed: Any = {key: tuple(sorted(getattr(plan, key), key=str)) for key in ("layers", "parameters")}
    return replace(plan, lines=(), layout="", regions=tuple(sorted(plan.regions)), **listed)


@pytest.mark.parametrize("family", FAMILIES)
def test_megatrons_layout_is_the_families_plan_which_is_read_back_from_its_text(family: str) -> None:
    model = small(family)
    plan = plan_of(model, 1, 2, None)
    assert plan_of(model, 1, 2, {"layout": MEGATRON}) == plan
    text = build_tp_plan(model, 1, 2, sequence=False, blocks=blocks_of(model)).lines
    assert plan_of(model, 1, 2, {line.pattern: line.style for line in text}) == plan


def test_hidden_on_row_is_the_grid_of_rows_and_columns() -> None:
    model = small("llama")
    assert plan_of(model, 2, 2, {"layout": f"{MEGATRON} hidden:row"}) == plan_of(model, 2, 2, None)


def test_names_without_a_rule_are_replicated() -> None:
    plan = plan_of(small("llama"), 1, 2, {"layout": "ffn:col"})
    assert plan.parameters
    assert all("mlp" in parameter.name for parameter in plan.parameters)


@pytest.mark.parametrize("plan", ["tp=2x2", "tp=2 sp=true"])
def test_collectives_that_follow_from_names_are_those_of_a_run_on_meta(plan: str) -> None:
    rules = "heads:col ffn:col vocab:col hidden:row"
    ids = torch.zeros(1, 8, dtype=torch.long)

    def explained(layers: int) -> Explanation:
        model = small("llama", num_hidden_layers=layers)
        return explain(Arguments(model, plan, layout=rules), {"input_ids": ids, "labels": ids})

    two, three = explained(2), explained(3)
    counts = (run.rank_classes[0].traffic["layers"] for run in (two, three))
    run = {f"{key.op} over {key.axes[0]}": n.count for key, n in subtract_traffic(*counts).items()}
    expected: Counter[str] = Counter()
    shared: set[tuple[str, str]] = set()  # what layers of a module that read one input do once
    for layer in three.tensor.layers:
        if not layer.module.startswith("model.layers.2."):
            continue
        tensor = three.tensor
        passes = layer_collectives(layer, tensor.rows, tensor.cols, sequence=three.plan.sp)
        for place, text in zip((f"{layer.module} forward", "backward"), passes, strict=True):
            for word in filter(None, text.split(", ")):
                is_of_input = layer.style is Style.COLUMN and word.endswith("col")
                once = (layer.module.rpartition(".")[0], f"{place.rpartition(' ')[2]} {word}")
                expected[word] += not (is_of_input and once in shared)
                shared.add(once)
    assert run == expected


class Derived(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        pairs = (nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16)) for _ in range(2))
        self.blocks = nn.ModuleList(pairs)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def test_the_printed_text_of_a_derived_plan_is_a_recipes_table_of_the_same_plan() -> None:
    micro = {"x": torch.zeros(1, 4, 16)}
    explanation = explain(Arguments(Derived(), "tp=2", loss=lambda out, _: (out.sum(), 4)), micro)
    text = tensor_plan_text(explanation)
    table = tomllib.loads(text)["model"]["tensor_plan"]
    assert table == {"blocks.*.0": "colwise", "blocks.*.2": "rowwise"}
    assert plan_of(Derived(), 1, 2, table) == ordered(explanation.tensor)
    assert "# ffn hidden; backward: all-reduce over col" in text


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(16), nn.LayerNorm(32)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.mix = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(32))
        self.table = nn.Embedding(8, 16)
        self.conv = nn.Conv1d(16, 32, 3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])


NAMES = {"blocks.*.up": "ffn hidden", "blocks.*.down": "hidden ffn", "blocks.*.norm": "hidden"}


def styles_of(layout: str, cols: int = 2, rows: int = 1, **names: str) -> dict[str, str]:
    with torch.device("meta"):
        model = Net()
    table = {**NAMES, **{f"blocks.*.{key}": text for key, text in names.items()}, "layout": layout}
    plan = build_tp_plan(model, rows, cols, sequence=False, blocks=blocks_of(model), given=table)
    return {line.pattern.removeprefix("blocks.*."): line.style for line in plan.lines}


def test_a_name_that_layers_output_and_sum_over_stays_sharded_between_them() -> None:
    assert styles_of("ffn:col hidden:row") == {"up": "colwise", "down": "rowwise"}
    mesh_tensorflow = {"up": "hidden io", "down": "io hidden", "norm": "io"}
    assert styles_of("batch:dp hidden:col", **mesh_tensorflow) == {"up": "colwise", "down": "rowwise"}


def test_other_features_are_gathered_after_or_split_before_the_layer() -> None:
    swapped = {"up": "rowwise_split_input", "down": "colwise_gather_output"}
    assert styles_of("hidden:col") == swapped
    assert styles_of("ffn:col", down="hidden wide")["up"] == "colwise_gather_output"


def test_values_of_each_feature_between_layers_are_sharded_with_them() -> None:
    assert styles_of("ffn:col", scale="ffn")["scale"] == "colwise"


@pytest.mark.parametrize(
    ("names", "layout", "fact"),
    [
        ({"act": "ffn"}, "ffn:col", "the layout shards blocks.0.act.weight where its sums cannot be reduced"),
        ({"scale": "wide"}, "wide:col", "the layout shards blocks.0.scale where its sums cannot be reduced"),
        (
            {"conv.weight": "wide hidden k"},
            "wide:col",
            "the layout shards blocks.0.conv.weight where its sums cannot be reduced",
        ),
        ({"table": "rows hidden"}, "hidden:col", "the layout shards blocks.0.table where its sums cannot be"),
        (
            {"mix": "hidden hidden"},
            "hidden:col",
            "the layout shards two dims of blocks.0.mix.weight over col",
        ),
        ({"mix": "ffn hidden"}, "ffn:col", "the dim ffn has two sizes"),
        ({"up": "(3 ffn) hidden"}, "ffn:col", "a dim of blocks.0.up.weight does not have the size that its"),
        ({"up": "ffn"}, "ffn:col", "the names do not match the dims of blocks.0.up.weight"),
        ({}, "fnn:col", "a layout rule names a dim that the model does not have"),
    ],
)
def test_a_layout_whose_sums_have_no_place_is_refused_with_all_four_parts(
    names: dict[str, str], layout: str, fact: str
) -> None:
    with pytest.raises(PlaitError) as raised:
        styles_of(layout, **names)
    assert raised.value.fact.startswith(fact)
    assert None not in (raised.value.given, raised.value.expected, raised.value.hint)


def test_too_few_elements_of_a_name_are_refused() -> None:
    with pytest.raises(PlaitError, match=r"cannot split blocks\.0\.up into 33 shards"):
        styles_of("ffn:col", cols=33)


def test_rows_need_a_name_in_every_layer_that_columns_shard() -> None:
    with pytest.raises(PlaitError, match=r"shards blocks\.0\.down over columns, but not over rows"):
        styles_of("ffn:col hidden:row", rows=2, down="out ffn")
