"""Models that cannot be sharded are refused with an error whose suggestion works."""

import pytest
import torch

from plait.errors import ModelError, PlanError
from plait.models import causal_lm_on_meta
from plait.verify.model_spec import parse_source
from support import hf_models
from support.tensor_models import COMMON, plan_of, small


def test_a_mixture_with_complete_routers_is_refused_with_sequence_parallelism() -> None:
    with pytest.raises(ModelError, match="without sp"):
        plan_of(hf_models.model_of("gpt_oss"), 1, 2, sequence=True)


def test_experts_with_an_unknown_layout_of_gate_and_up_are_refused() -> None:
    model, path = small("mixtral"), "model.layers.*.mlp.experts.gate_up_proj"
    with pytest.raises(
        ModelError, match=r"does not declare how the parts of model\.layers\.0\.mlp\.experts\.gate_up"
    ) as found:
        plan_of(model, 1, 2, given={path: "colwise"})
    assert "80 features, experts of 40" in str(found.value)
    assert f"tensor_plan={{'{path}': 'packed_colwise:2'}}" in str(found.value)
    for word, ranges in {"packed_colwise:2": ((0, 20), (40, 60)), "packed_colwise:1/2": ((0, 40),)}.items():
        plan = plan_of(model, 1, 2, given={path: word})
        (cut,) = (cut for cut in plan.parameters if cut.name.endswith("layers.1.mlp.experts.gate_up_proj"))
        assert cut.dims[1] is not None
        assert cut.dims[1].ranges[0] == ranges


def test_a_layer_that_gives_a_number_for_every_head_is_refused_where_heads_are_cut() -> None:
    model = causal_lm_on_meta({"model_type": "doge", **COMMON})
    projections = {f"model.layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"}
    by_heads = projections | {f"model.layers.*.self_attn.{name}_proj": "rowwise" for name in ("dt", "o")}
    with pytest.raises(ModelError, match=r"self_attn\.dt_proj outputs one number per head") as found:
        plan_of(model, 1, 2, given=by_heads)
    words = {"model.layers.*.self_attn.*": "replicate"}
    assert f"tensor_plan={words}" in str(found.value)
    assert plan_of(model, 1, 2, given=words).regions == ("model.layers.0.mlp", "model.layers.1.mlp")


def test_more_columns_than_heads_are_refused_with_grids_that_would_work() -> None:
    with pytest.raises(PlanError) as raised:
        plan_of(small("llama"), 1, 8)
    assert "model.layers.0.self_attn" in str(raised.value)
    assert "tp=1x6 or tp=1x3" in str(raised.value)
    with pytest.raises(PlanError) as raised:
        plan_of(small("llama"), 2, 8)
    assert "tp=2x6 or tp=2x3" in str(raised.value)
    assert plan_of(small("llama"), 2, 6).cols == 6


def test_a_bloom_that_multiplies_slices_of_its_weights_is_refused() -> None:
    with pytest.raises(ModelError, match="slow_but_exact=False"):
        plan_of(small("bloom", pretraining_tp=2, slow_but_exact=True), 1, 2)


def test_a_users_word_overrides_one_of_the_models_that_cannot_be_honoured() -> None:
    model = causal_lm_on_meta({"model_type": "llama", **COMMON})
    model._tp_plan = {**model.tp_plan, "model.layers.*.mlp": "all_reduce"}
    with pytest.raises(ModelError, match=r"style for model\.layers\.0\.mlp\n.*all_reduce") as raised:
        plan_of(model, 1, 2)
    path = "model.layers.*.mlp"
    assert f"'replicate' for {path} and everything in it" in str(raised.value)
    plan = plan_of(model, 1, 2, given={path: "replicate", f"{path}.*": "replicate"})
    assert not any(".mlp." in cut.name for cut in plan.parameters)


@pytest.mark.parametrize(
    ("model_type", "name", "given"),
    [
        ("ctrl", "transformer", "CTRLModel with pos_encoding, a table of 32 features"),
        ("xglm", "model.embed_positions", "with weights, a table of 32 features"),
        ("trocr", "model.decoder.layers.0.self_attn.k_proj", "Linear with weight, bias"),
    ],
)
def test_a_module_that_adds_full_features_to_those_of_one_row_is_refused_by_name(
    model_type: str, name: str, given: str
) -> None:
    """Tables of positions that are no parameters, and an attention that no plan shards."""
    model = parse_source(model_type, layers=2).spec().build(torch.float32)
    with pytest.raises(ModelError) as caught:
        plan_of(model, 2, 1)
    assert caught.value.fact == f"{name} does not support hidden features that are sharded over rows"
    assert given in str(caught.value.given)
    assert caught.value.hint == "tp=1x2"
