"""From models to tensor plans: pieces cover, columns compute what the whole does, the rest is refused."""

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import transformers
from torch import Tensor, nn

from plait.errors import ModelError, PlaitError
from plait.models import blocks_of, build_tp_plan, causal_lm_on_meta
from plait.models.sharding.columns import _ColumnTracer
from plait.plan.sharding import DimSharding, ParamSharding, Style, TPPlan
from plait.verify import parse_source
from support import changed_models
from support.derived_models import Block, Derived, Plain
from support.tensor_models import (
    COMMON,
    FAMILIES,
    coordinates,
    plan_of,
    real,
    shard_of,
    small,
)
from support.threaded_ranks import differences

EXPERTS = {"mixtral", "deepseek_v2", "deepseek_v3"}  # no sequence parallelism
ONE_ROW = {*EXPERTS, "deepseek_v2 dense"}
GRIDS = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2)]


@pytest.mark.parametrize("name", FAMILIES)
def test_the_pieces_of_all_ranks_cover_every_parameter(name: str) -> None:
    model = small(name)
    shapes = {key: parameter.shape for key, parameter in model.named_parameters()}
    for rows, cols in GRIDS:
        if rows > 1 and name in ONE_ROW:
            with pytest.raises(ModelError, match="sharded over rows"):
                plan_of(model, rows, cols)
            continue
        plan = plan_of(model, rows, cols)
        assert {cut.name for cut in plan.parameters} <= set(shapes)
        for cut in plan.parameters:
            assert_covers(cut, shapes[cut.name], plan)


def assert_covers(cut: ParamSharding, shape: torch.Size, plan: TPPlan) -> None:
    """Every element is on as many ranks as share it, and first on one."""
    held, first = torch.zeros(shape), torch.zeros(shape)
    number = torch.arange(shape.numel()).reshape(shape)
    is_cut = {axis: any(d is not None and d.axis == axis for d in cut.dims) for axis in ("row", "col")}
    expected = torch.zeros(shape)
    for row, col in coordinates(plan):
        mine = shard_of(number, cut, row, col).flatten()
        assert len(mine) > 0
        assert len(set(mine.tolist())) == len(mine), cut.name
        held.flatten()[mine] += 1
        first.flatten()[mine] += cut.is_first(row, col)
        sharers = len(cut.sharers(plan.cols, col)) or 1
        expected.flatten()[mine] = (sharers if is_cut["col"] else plan.cols) * (
            1 if is_cut["row"] else plan.rows
        )
    assert torch.equal(held, expected), cut.name
    assert bool((first == 1).all()), cut.name


@pytest.mark.parametrize("name", FAMILIES)
def test_columns_compute_the_whole_models_loss_and_gradients(name: str) -> None:
    model = real(small(name))
    for cols in (2, 3, 4):
        assert differences(model, plan_of(model, 1, cols)) == {}


@pytest.mark.filterwarnings("ignore")  # the family's own
def test_columns_compute_a_model_of_bytes_that_reads_where_patches_end() -> None:
    config = dict(parse_source("blt", layers=2).config)
    for key in ("encoder_config", "decoder_config", "patcher_config"):
        config[key] = {**config[key], "vocab_size": COMMON["vocab_size"]}
    model = real(causal_lm_on_meta({**config, "vocab_size": COMMON["vocab_size"]}))
    plan = plan_of(model, 1, 2)
    assert {name.split(".")[1] for layer in plan.layers if (name := layer.module).endswith("q_proj")} == {
        "patcher",
        "local_encoder",
        "global_transformer",
        "local_decoder",
    }
    assert differences(model, plan) == {}


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in EXPERTS])
def test_columns_of_cut_sequences_compute_the_whole_models_loss_and_gradients(name: str) -> None:
    model = real(small(name))
    for cols in (2, 3):
        assert differences(model, plan_of(model, 1, cols, sequence=True), sequence=True) == {}


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in ONE_ROW])
def test_rows_and_columns_compute_the_whole_models_loss_and_gradients(name: str) -> None:
    model = real(small(name))
    for rows, cols, sequence in ((2, 1, False), (3, 2, False), (2, 2, True)):
        plan = plan_of(model, rows, cols, sequence=sequence)
        assert differences(model, plan, sequence=sequence) == {}


def test_gradients_differ_where_parts_are_not_summed() -> None:
    model = real(small("qwen3"))
    plan = plan_of(model, 1, 4)
    whole = replace(plan, parameters=tuple(replace(cut, partial=False) for cut in plan.parameters))
    assert {name.rpartition("self_attn.")[2] for name in differences(model, whole)} == {
        "q_norm.weight",
        "k_norm.weight",
    }


def test_the_loss_differs_where_heads_are_not_this_columns() -> None:
    model = real(small("bloom"))
    plan = plan_of(model, 1, 2)
    assert plan.arguments
    swapped = [
        replace(cut, sharding=DimSharding("col", tuple(reversed(cut.sharding.ranges))))
        for cut in plan.arguments
    ]
    assert "loss" in differences(model, replace(plan, arguments=tuple(swapped)))


def test_gradients_differ_where_a_region_is_taken_for_pure_that_is_not() -> None:
    model = real(small("deepseek_v2 dense"))
    plan = plan_of(model, 1, 2, sequence=True)
    assert plan.pure == {"model.layers.0.mlp", "model.layers.1.mlp"}
    assert differences(model, plan, sequence=True) == {}
    assert differences(model, replace(plan, pure=frozenset(plan.regions)), sequence=True)


def test_regions_are_attention_and_mlp_and_pure_where_all_that_reads_is_cut() -> None:
    plan = plan_of(small("llama"), 1, 2)
    block = ("model.layers.0.self_attn", "model.layers.0.mlp")
    assert set(block) <= set(plan.regions)
    assert len(plan.regions) == 4
    assert plan.pure == frozenset(plan.regions)
    mixture = plan_of(small("mixtral"), 1, 2)
    assert mixture.pure == {"model.layers.0.self_attn", "model.layers.1.self_attn"}
    gathered = plan_of(small("olmo2"), 1, 2)
    assert gathered.pure == frozenset(gathered.regions)  # its norms read queries and keys, not the input
    lone = plan_of(small("opt"), 1, 2)
    assert {region.rpartition(".")[2] for region in lone.regions} == {"self_attn", "fc1"}


def test_shared_keys_are_one_piece_on_the_columns_that_share_them() -> None:
    plan = plan_of(small("llama"), 1, 4)  # 6 heads, 2 of keys
    cuts = {cut.name: cut for cut in plan.parameters}
    key, query = (cuts[f"model.layers.0.self_attn.{which}_proj.weight"] for which in "kq")
    assert [key.sharers(4, col) for col in range(4)] == [(0, 1), (0, 1), (2, 3), (2, 3)]
    assert [query.sharers(4, col) for col in range(4)] == [()] * 4
    groups = {key: values for module, key, values in plan.attributes if module == "model.layers.0.self_attn"}
    assert groups["num_key_value_groups"] == (2, 1, 2, 1)


def test_sequence_parallelism_makes_parts_of_what_is_between_regions_and_of_rowwise_biases() -> None:
    model = small("gpt2")
    parts = {cut.name for cut in plan_of(model, 1, 2, sequence=True).parameters if cut.partial}
    assert {name.removeprefix("transformer.h.0.") for name in parts if ".h.0." in name} == {
        "ln_1.weight",
        "ln_1.bias",
        "attn.c_proj.bias",
        "ln_2.weight",
        "ln_2.bias",
        "mlp.c_proj.bias",
    }
    assert not any(".h." not in name for name in parts)  # embeddings and the last norm see all tokens
    assert not any(cut.partial for cut in plan_of(model, 1, 2).parameters)


def test_over_rows_norms_tables_and_single_linears_are_sharded() -> None:
    model = small("opt")
    plan = plan_of(model, 2, 2)
    layers = {layer.module.removeprefix("model.decoder."): layer for layer in plan.layers}
    styles = {name: layer.style for name, layer in layers.items()}
    assert styles["embed_tokens"] is Style.VOCABULARY
    assert styles["embed_positions"] is Style.FEATURE_EMBEDDING
    assert styles["layers.0.self_attn_layer_norm"] is styles["final_layer_norm"] is Style.NORM
    assert styles["project_in"] is styles["project_out"] is Style.REPLICATE
    assert layers["project_in"].inp == DimSharding("row", (((0, 8),), ((8, 16),)))
    assert layers["project_in"].out == DimSharding("row", (((0, 12),), ((12, 24),)))
    assert styles["lm_head"] is Style.COLUMN
    assert layers["lm_head"].head
    cuts = {cut.name: cut for cut in plan.parameters}
    assert "lm_head.weight" not in cuts  # tied: once, under its first name
    assert cuts["model.decoder.embed_tokens.weight"].dims == (layers["lm_head"].out, layers["lm_head"].inp)
    assert "model.decoder.project_in.weight" not in cuts
    unsharded = {name for name, _ in model.named_parameters()} - set(cuts)
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in unsharded} == {"project_in", "project_out"}


def test_head_norms_are_parts_only_where_heads_are_cut() -> None:
    parts = {cut.name for cut in plan_of(small("qwen3"), 1, 2).parameters if cut.partial}
    assert {name.rpartition("self_attn.")[2] for name in parts} == {"q_norm.weight", "k_norm.weight"}
    assert not any(cut.partial for cut in plan_of(small("olmo2"), 1, 2).parameters)  # gathered projections
    cohere = {cut.name: cut for cut in plan_of(small("cohere"), 1, 2).parameters}
    weights = cohere["model.layers.0.self_attn.k_norm.weight"]  # one row of weights for every head
    assert weights.dims == (DimSharding("col", (((0, 1),), ((1, 2),))), None)


def test_a_users_words_override_the_models_own() -> None:
    model = real(small("llama"))
    given = {"model.layers.*.mlp.gate_proj": "replicate", "model.layers.*.mlp.up_proj": "replicate"}
    given["model.layers.*.mlp.down_proj"] = "replicate"
    plan = plan_of(model, 1, 2, given=given)
    assert not any(".mlp." in layer.module for layer in plan.layers)
    assert differences(model, plan) == {}


GIVEN = {
    "embed": "embedding_rowwise",
    "blocks.*.attn.qkv": "packed_colwise:3",
    "blocks.*.attn.proj": "rowwise",
    "blocks.*.attn": "local:num_heads,width",
    "blocks.*.fc1": "colwise",
    "blocks.*.fc2": "rowwise",
    "head": "head",
}


@pytest.mark.parametrize("cols", [1, 2, 3, 4])
@pytest.mark.parametrize("qkv", ["packed_colwise:3", "packed_colwise:3/4"])
def test_a_custom_module_is_sharded_by_a_custom_plan(cols: int, qkv: str) -> None:
    model = Plain()
    plan = plan_of(model, 1, cols, given=GIVEN | {"blocks.*.attn.qkv": qkv})
    heads = {key: values for module, key, values in plan.attributes if module == "blocks.1.attn"}
    assert sum(heads["num_heads"]) == 6
    assert heads["width"] == tuple(4 * count for count in heads["num_heads"])
    assert differences(model, plan) == {}


def test_over_rows_a_custom_module_has_its_norms_and_tables_sharded() -> None:
    plan = plan_of(Plain(), 2, 2, given={key: word for key, word in GIVEN.items() if key != "embed"})
    styles = {layer.module: layer.style for layer in plan.layers}
    assert styles["embed"] is Style.FEATURE_EMBEDDING
    assert styles["blocks.0.norm"] is Style.NORM
    for cut in plan.parameters:
        assert_covers(cut, Plain().get_parameter(cut.name).shape, plan)


def test_a_layer_that_leaves_the_stream_is_refused_over_rows_unless_it_is_said_to_be_the_head() -> None:
    with pytest.raises(ModelError, match="head does not support hidden features that are sharded"):
        plan_of(Plain(), 2, 2, given={key: word for key, word in GIVEN.items() if key != "head"})


class Scaled(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(24))


def test_an_unknown_parameter_in_the_stream_is_refused_over_rows_only() -> None:
    assert plan_of(Scaled(), 1, 4, given=GIVEN).layers
    with pytest.raises(ModelError) as raised:
        plan_of(Scaled(), 2, 2, given=GIVEN)
    assert "Scaled with scale" in str(raised.value)
    assert "tp=1x4" in str(raised.value)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"blocks.*.atn.qkv": "colwise"},
            r"matches nothing in the model[\s\S]*try     : blocks\.\*\.attn\.qkv",
        ),
        ({"blocks.*.fc1": "colwize"}, r"unknown style for blocks\.0\.fc1[\s\S]*try     : .*colwise"),
        ({"blocks.*.fc1": "packed_colwise:x"}, "style for blocks.0.fc1 has an invalid number"),
        ({"blocks.*.fc1": "packed_colwise:5"}, "does not pack 5 parts of equal width"),
        ({"blocks.*.fc1": "all_reduce"}, "does not support the plan's style for blocks.0.fc1"),
        ({"blocks.*.norm": "colwise"}, "blocks.0.norm is not a linear layer"),
        ({"blocks.*.fc1": "embedding_rowwise"}, "blocks.0.fc1 is not an embedding"),
        (
            {"blocks.*.attn": "local:heads"},
            r"attribute of blocks\.0\.attn that is not a positive integer[\s\S]*heads=None",
        ),
        (
            {"blocks.*.attn.qkv": "packed_colwise:3/2"},
            r"attribute of blocks\.0\.attn cannot be divided[\s\S]*num_heads=6, heads=12",
        ),
        (
            {"blocks.*.attn.qkv": "packed_colwise:3/7"},
            r"cannot shard blocks\.0\.attn\.qkv by heads[\s\S]*24 features, heads of 7",
        ),
        (
            {"blocks.*.attn.qkv": "packed_colwise:3/12"},
            r"cannot shard the heads of blocks\.0\.attn over 4 columns",
        ),
        ({"blocks.*.fc1": "mla_kv_a_proj"}, "rotary part of blocks.0.fc1's output has unknown width"),
        (
            {"blocks.*.fc1.weight": "embedding_rowwise"},
            "the parameter blocks.0.fc1.weight a style for modules",
        ),
        ({"blocks.*.fc1": "moe_tp_experts"}, "the experts of blocks.0.fc1 have parameters"),
    ],
)
def test_invalid_plans_are_refused_with_the_layers_name(changed: dict[str, str], message: str) -> None:
    with pytest.raises(PlaitError, match=message):
        plan_of(Plain(), 1, 4, given=GIVEN | changed)


def test_a_model_without_a_plan_that_does_not_run_on_meta_is_refused() -> None:
    with pytest.raises(
        ModelError, match=r"(?s)no tensor plan for this model.*does not run on meta.*use_cache"
    ):
        plan_of(Plain(), 1, 2)


def test_a_model_with_other_inputs_than_tokens_is_refused_with_a_hint_to_an_example() -> None:
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
    with pytest.raises(ModelError, match="no tensor plan for this model") as error:
        plan_of(model, 1, 2)
    assert "example_batch=batch" in str(error.value.hint)
    plan = build_tp_plan(
        model, 1, 2, sequence=False, blocks=blocks_of(model), batch={"input": torch.ones(4, 8)}
    )
    assert [layer.module for layer in plan.layers] == ["0", "2"]


@pytest.mark.parametrize(
    ("changed", "pattern"),
    [
        ({"blocks.*.fc1": "mla_kv_a_proj"}, "blocks.*.*"),
        ({"blocks.*.norm": "embedding_rowwise"}, "blocks.*.norm"),
    ],
)
def test_an_error_suggests_layers_to_replicate_and_that_works(changed: dict[str, str], pattern: str) -> None:
    with pytest.raises(PlaitError) as raised:
        plan_of(Plain(), 1, 3, given=GIVEN | changed)
    words = {pattern: "replicate"}
    assert raised.value.hint == f"tensor_plan={words}, or tp=1"
    numbers = {"blocks.*.attn": "replicate"} if pattern == "blocks.*.*" else {}
    assert plan_of(Plain(), 1, 3, given={**GIVEN, **changed, **words, **numbers})


def test_a_layer_shared_with_a_layer_that_is_cut_otherwise_is_refused() -> None:
    model = Plain()
    model.blocks[0].fc2.weight = model.blocks[1].fc1.weight
    model.blocks[0].fc2.weight = nn.Parameter(torch.zeros(24, 72, dtype=torch.float64))
    model.blocks[1].fc2.weight = model.blocks[0].fc2.weight
    assert plan_of(model, 1, 2, given=GIVEN).layers  # cut alike
    with pytest.raises(ModelError, match="shards in two ways"):
        plan_of(model, 1, 2, given=GIVEN | {"blocks.1.fc2": "colwise"})


def test_a_shared_weight_is_sharded_in_every_embedding_and_changed_logits_are_gathered() -> None:
    sizes: dict[str, Any] = {"vocab_size": 64, "d_model": 24, "decoder_start_token_id": 0}
    t5 = plan_of(transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, num_layers=1)), 1, 2)
    tables = {layer.module for layer in t5.layers if layer.style is Style.VOCABULARY}
    assert tables == {"shared", "encoder.embed_tokens", "decoder.embed_tokens"}
    assert [layer.module for layer in t5.layers if layer.head] == ["lm_head"]
    sizes |= {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4}
    config = transformers.BartConfig(**sizes, decoder_attention_heads=4)  # adds a bias to its logits
    bart = plan_of(transformers.BartForConditionalGeneration(config), 1, 2)
    assert [layer.module for layer in bart.layers if layer.module == "lm_head" and layer.gathers] == [
        "lm_head"
    ]


class Tied(Derived):
    """Another module holds the weight of a block's layer too."""

    def __init__(self) -> None:
        super().__init__(lambda: Block(24, 6))
        self.reader = nn.Bilinear(1, 1, 24).double()
        self.reader.weight = self.blocks[0].fc1.weight


def test_a_module_that_shares_a_sharded_parameter_and_has_no_style_is_refused() -> None:
    with pytest.raises(ModelError, match="reader shares a parameter with a sharded layer"):
        plan_of(Tied(), 1, 2, given=GIVEN)


def test_a_user_may_leave_the_head_and_the_embedding_whole() -> None:
    model = small("llama")
    head = plan_of(model, 1, 2, given={"lm_head": "replicate"})
    assert not any(layer.head for layer in head.layers)
    assert any(layer.style is Style.VOCABULARY for layer in head.layers)
    embedding = plan_of(model, 1, 2, given={"model.embed_tokens": "replicate"})
    assert any(layer.head for layer in embedding.layers)
    assert not any(layer.style is Style.VOCABULARY for layer in embedding.layers)


def test_equal_blocks_are_followed_once() -> None:
    """But for those whose number is that of something in them, such as the heads."""
    counts = []
    for layers in (2, 12):
        with mock.patch.object(
            _ColumnTracer, "_begin", autospec=True, side_effect=_ColumnTracer._begin
        ) as begin:
            plan = plan_of(small("llama", num_hidden_layers=layers), 1, 2)
        counts.append(begin.call_count)
        assert sum(layer.style is Style.ROW for layer in plan.layers) == 2 * layers
    embedding_and_head, of_block = 2, 7
    assert counts[0] == embedding_and_head + 2 * of_block  # the first and the last are followed always
    assert counts[1] <= embedding_and_head + 6 * of_block


def test_a_parameter_without_a_style_is_refused_if_the_model_does_not_run_on_meta() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.scale = nn.Linear(8, 16), nn.Linear(16, 8), nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.up(x) * self.scale)

    model = nn.Module()
    model.blocks = nn.ModuleList([nn.ModuleDict({"ffn": Scaled()}) for _ in range(2)])
    styles = {"blocks.*.ffn.up": "colwise", "blocks.*.ffn.down": "rowwise"}
    with pytest.raises(ModelError, match=r"does not fit blocks\.0\.ffn\.scale") as caught:
        plan_of(model, 1, 2, given=styles)
    assert "try     : example_batch=batch, tensor_plan={'blocks.*.ffn.*': 'replicate'}, or tp=1" in str(
        caught.value
    )


def test_a_learned_scale_of_sharded_logits_is_refused() -> None:
    """Its gradient is a sum with one loss and not with another: the user's own gets all logits."""
    model: Any = small("llama")
    model.lm_head = changed_models.Scaled(model.lm_head, (), "output")
    with pytest.raises(ModelError, match=r"does not fit lm_head\.scale"):
        plan_of(model, 1, 2)


class _ReadsFirst(nn.Module):
    """A block that mixes its features with those of the first block, which gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.mix = nn.Linear(8, 16), nn.Linear(16, 8), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
        own = self.up(x)
        return x + self.down(own if first is None else self.mix * own + first), own


class _PassesFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_ReadsFirst() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        first = None
        for block in self.blocks:
            x, own = block(x, first)
            first = own if first is None else first
        return x


def test_equal_blocks_with_other_inputs_have_sums_of_their_own() -> None:
    model, styles = _PassesFirst(), {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    plan = build_tp_plan(
        model, 1, 2, sequence=False, blocks=blocks_of(model), given=styles, batch={"x": torch.ones(2, 8)}
    )
    summed = [parameter.name for parameter in plan.parameters if parameter.partial]
    assert summed == [f"blocks.{index}.mix" for index in range(1, 5)]
