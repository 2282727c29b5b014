"""Tensor plans of mixers: packed sizes, their text, and what is refused."""

import pytest
import torch
from torch import nn

from plait.errors import ModelError
from plait.models.sharding.styles import parse_style, style_text
from plait.plan.sharding import Style
from support import hf_models, mixer_configs
from support.tensor_models import plan_of


@pytest.mark.parametrize("family", mixer_configs.CONFIGS)
def test_every_feature_is_on_one_column_or_on_all(family: str) -> None:
    model = hf_models.model_of(family)
    for cols in (2, 4):
        plan = plan_of(model, 1, cols)
        for sharding in plan.parameters:
            shape = model.get_parameter(sharding.name).shape
            held = torch.zeros(shape)
            for col in range(cols):
                indices = (
                    torch.cat([torch.arange(*r) for r in dim]) for dim in sharding.ranges(shape, 0, col)
                )
                held[torch.meshgrid(*indices, indexing="ij")] += 1
            shared = {1, len(sharding.sharers(cols, 0)) or 1, sharding.copies(1, cols, 0)}
            assert set(held.flatten().tolist()) <= shared, sharding.name


@pytest.mark.parametrize("family", ["mamba", "mamba2", "nemotron_h", "zamba", "qwen3_5_text", "kimi_linear"])
def test_the_text_of_a_plan_gives_the_same_plan(family: str) -> None:
    model = hf_models.model_of(family)
    plan = plan_of(model, 1, 2)
    again = plan_of(model, 1, 2, given={line.pattern: line.style for line in plan.lines})
    for part in ("layers", "regions", "attributes"):
        assert sorted(getattr(again, part), key=str) == sorted(getattr(plan, part), key=str)
    assert {*again.parameters} == {*plan.parameters}


def test_most_weights_of_a_mixer_are_divided() -> None:
    for family in mixer_configs.CONFIGS:
        model = hf_models.model_of(family)
        plan = plan_of(model, 1, 2)
        shardings = {sharding.name: sharding for sharding in plan.parameters}
        for name, parameter in model.named_parameters():
            if (parameter.numel() >= 1000 and "mixer" in name) or ("mamba." in name and parameter.dim() == 2):
                assert any(shardings[name].dims), name


def test_gates_and_heads_are_split_alike_and_states_are_read_whole() -> None:
    plan = plan_of(hf_models.model_of("mamba2"), 1, 3)  # 8 heads of 12, one group of 6 states
    [layer, *_] = [layer for layer in plan.layers if layer.module.endswith("in_proj")]
    assert layer.out is not None
    assert layer.uses is not None
    assert layer.out.ranges[0] == ((0, 36), (96, 132), (192, 194), (198, 200), (204, 207))
    assert layer.uses.ranges[0] == ((0, 36), (96, 132), (192, 198), (198, 204), (204, 207))
    counts = {key: values for module, key, values in plan.attributes if module.endswith("0.mixer")}
    assert counts["num_heads"] == (3, 3, 2)
    assert counts["conv_dim"] == (48, 48, 36)
    grouped = plan_of(hf_models.model_of("grouped_mamba2"), 1, 3)
    assert all(layer.uses is None for layer in grouped.layers)


@pytest.mark.parametrize("family", ["mamba", "mamba2", "qwen3_5_text", "zamba"])
def test_a_layout_shards_all_of_a_mixer_or_nothing(family: str) -> None:
    model = hf_models.model_of(family)
    heads = "" if "mamba" in family else "heads:col "  # a dim that the model has to have
    everything = plan_of(model, 1, 2, given={"layout": f"{heads}ffn:col vocab:col"})
    plan = plan_of(model, 1, 2)
    assert (everything.layers, everything.attributes) == (plan.layers, plan.attributes)
    vocabulary = plan_of(model, 1, 2, given={"layout": "vocab:col"})
    assert not vocabulary.attributes
    assert {layer.style for layer in vocabulary.layers} == {Style.COLUMN, Style.VOCABULARY}


def test_more_columns_than_groups_leave_a_mixer_whole() -> None:
    for family, cols in (("zamba2", 4), ("grouped_mamba2", 5)):
        plan = plan_of(hf_models.model_of(family), 1, cols)
        styles = {
            line.pattern.rpartition("mamba.")[2].rpartition("mixer.")[2]: line.style for line in plan.lines
        }
        assert styles["in_proj"] == "colwise_gather_output"
        assert styles["out_proj"] == "rowwise_split_input"
        assert "conv1d" not in styles


def test_inner_sums_are_refused_on_several_rows() -> None:
    for family in ("mamba", "mamba2"):
        with pytest.raises(ModelError, match=r"sharded over rows\n[^\n]*tp=2x2"):
            plan_of(hf_models.model_of(family), 2, 2)
    assert plan_of(hf_models.model_of("lfm2"), 2, 2).layers


@pytest.mark.parametrize(
    "text",
    [
        "colwise:64x64+1x128+64x1",
        "rowwise:8x12",
        "depthwise",
        "depthwise:8x12+1x6",
        "norm_over_columns:8x12",
        "rowwise_with_grad_allreduce",
        "local:num_heads=8x1,conv_dim=8x12+1x6",
        "local:heads,width",
        "replicated_with_grad_allreduce:10-14",
    ],
)
def test_a_style_is_written_as_it_is_read(text: str) -> None:
    assert style_text(parse_style(text, "mixer")) == text


def test_a_latent_layer_may_declare_what_all_heads_read() -> None:
    model = hf_models.model_of("deepseek_v3")
    given = {"model.layers.*.self_attn.kv_a_proj_with_mqa": "replicated_with_grad_allreduce:10-14"}
    assert plan_of(model, 1, 2, given=given).layers == plan_of(model, 1, 2).layers


class _Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.width = 8.0
        self.up, self.conv, self.down = nn.Linear(6, 8), nn.Conv1d(8, 8, 3, groups=4), nn.Linear(8, 6)


class _Mixers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Mixer(), _Mixer()])


@pytest.mark.parametrize(
    ("styles", "message"),
    [
        ({"blocks.*.up": "colwise:3x2+1x3"}, "sizes are not those of blocks.0.up"),
        ({"blocks.*.up": "colwise:3xa"}, "invalid number"),
        ({"blocks.*.conv": "depthwise"}, "not a depthwise convolution"),
        ({"blocks.*": "local:width=4x2"}, "not a positive integer"),
    ],
)
def test_sizes_that_are_not_the_models_are_refused(styles: dict[str, str], message: str) -> None:
    given = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"} | styles
    with pytest.raises(ModelError, match=message) as error:
        plan_of(_Mixers(), 1, 2, given=given)
    assert "\n  try     : " in str(error.value)
