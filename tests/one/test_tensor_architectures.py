"""The tensor plans of transformers: all their styles, and every causal language model that has a plan."""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations.tensor_parallel import ALL_PARALLEL_STYLES
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from plait.errors import PlaitError
from plait.models.sharding.families import FAMILIES as BUILT_IN
from plait.models.sharding.styles import STYLES, UNSUPPORTED
from plait.plan.sharding import TPPlan
from support.tensor_models import plan_of

ROOT = Path(__file__).resolve().parents[2]


def test_every_word_of_transformers_is_known_or_refused() -> None:
    known = set(STYLES) | set(UNSUPPORTED)
    assert set(ALL_PARALLEL_STYLES.keys()) - known <= {
        "free_full_weight",
        "keep_full_weight",
    }  # of its own shards


# What a configuration's defaults lack.
LACKING: dict[str, dict[str, Any]] = {
    "nemotron": {"num_key_value_heads": 8},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "ministral": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
}


@pytest.mark.filterwarnings("ignore")  # families' own
@pytest.mark.parametrize("kinds", ["of each plan", pytest.param("all", marks=pytest.mark.sweep)])
def test_every_causal_model_with_a_plan_is_sharded_or_refused(kinds: str) -> None:
    """All, or a family of each plan of transformers and all whose plans are ours."""
    made, refused, unbuilt = [], {}, []
    plans = {kind: plans_of(kind) for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    first = {plan: kind for kind, plan in reversed(plans.items()) if kind not in BUILT_IN}
    for kind in [kind for kind, plan in plans.items() if plan or kind in BUILT_IN]:
        if kinds != "all" and kind not in BUILT_IN and first[plans[kind]] != kind:
            continue
        model = on_meta(kind)
        if model is None:
            unbuilt.append(kind)
        elif kind in BUILT_IN or model.config.get_text_config().base_model_tp_plan:
            try:
                plan = plan_of(model, 1, 3)
            except PlaitError as error:
                refused[kind] = str(error)
                continue
            made.append(kind)
            assert_is_cut(model, plan)
    print(f"{len(made)} made; refused: {', '.join(refused)}; not built: {', '.join(unbuilt)}")
    assert len(made) > (100 if kinds == "all" else 60)
    assert len(refused) < 6
    assert all("\n  try     : " in message for message in refused.values())
    assert len(unbuilt) < 16


def plans_of(kind: str) -> str:
    """The plans of a family's configuration and of its parts; "" if there are none. They are known without
    the family's code, which takes most of the time."""
    of_family = CONFIG_MAPPING[kind]
    configs = (of_family, *of_family.sub_configs.values())
    plans = [getattr(config, "base_model_tp_plan", None) for config in configs]
    return str([sorted((plan or {}).items()) for plan in plans]) if any(plans) else ""


def assert_is_cut(model: nn.Module, plan: TPPlan) -> None:
    """The second of three columns has something of every parameter, and of most not all."""
    assert plan.regions
    assert sum(any(dim is not None and dim.axis == "col" for dim in cut.dims) for cut in plan.parameters) > 2
    for cut in plan.parameters:
        shape = model.get_parameter(cut.name).shape
        sizes = [sum(stop - start for start, stop in ranges) for ranges in cut.ranges(shape, 0, 1)]
        assert all(0 < size <= full for size, full in zip(sizes, shape, strict=True)), cut.name


def on_meta(kind: str) -> PreTrainedModel | None:
    """As its configuration is by itself, of two layers where it can be; None where that builds nothing."""
    for options in ({"num_hidden_layers": 2}, {}):
        try:
            config = CONFIG_MAPPING[kind](**options, **LACKING.get(kind, {}))
            with torch.device("meta"):
                return AutoModelForCausalLM.from_config(config)
        except Exception:  # whatever a family's own code raises
            continue
    return None


def test_derived_plans_send_what_the_models_own_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["compare_tensor_plans.py", "llama", "deepseek_v3"])
    runpy.run_path(str(ROOT / "tools" / "compare_tensor_plans.py"), run_name="__main__")
    assert "2 of 2 derived plans send no more" in capsys.readouterr().out
