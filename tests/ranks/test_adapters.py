"""Adapters of peft under every plan: gradients, norms and weights of three steps are those of peft in one
process. See docs/tensor.md, "Adapters and changed blocks"."""

import warnings
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

import plait
from plait.errors import PlaitError, RunError
from plait.models import init_weights
from plait.models.initial_adapters import adapter_resets
from plait.models.sharding.builder import TPPlanBuilder
from plait.parallel.tensor import rng, weight_norms
from support import programs
from support.changed_models import lora, task
from support.pool import Pool

KINDS: dict[str, dict[str, Any]] = {"lora": {}, "rslora": {"use_rslora": True}, "dora": {"use_dora": True}}
FAMILIES = (
    *("llama", "qwen3", "gpt2", "phi3", "deepseek_v3", "mixtral", "gemma2", "olmo2", "gpt_neox"),
    *("starcoder2", "opt", "qwen3_moe"),
)
WITH_EXPERTS = ("deepseek_v3", "mixtral", "qwen3_moe")
PLANS = (
    "dp=2",
    "dp=2 zero=1",
    "dp=2 zero=2 offload=cpu",
    "dp=2 zero=3",
    "dp=2 zero=3 recompute=full",
    "tp=2",
    "tp=2 sp=true",
    "pp=2",
    "pp=2 tp=2 sp=true",
    "cp=2",
    "dp=2 ep=2",
    "dp=2 tp=2 zero=3",
)


def _trained(task: programs.Task, plan: str, mutation: str = "") -> programs.Trace | str:
    """The training under a plan, or its error."""
    try:
        with MUTATIONS[mutation]():
            return programs.train_task(task, f"{plan} precision=fp64")
    except PlaitError as error:
        return str(error)


def _of_shard(tensor: Any, *_: Any) -> Any:
    return tensor


def _never_partial(self: Any, name: str, dims: Any, partial: bool = False) -> None:
    """No sum over columns of the gradient of a factor that all of them have."""
    del partial
    SHARD_PARAMETER(self, name, dims)


def _of_shard_fans(model: Any, *stored: Any) -> Any:
    """A is drawn as if it had one of two shards of its inputs."""

    def reset(layer: Any, full: Any) -> None:
        full(layer)
        for factor in layer.lora_A.values():
            torch.nn.init.kaiming_uniform_(half := factor.weight[:, ::2].clone(), a=5**0.5)
            factor.weight[:, ::2] = half

    return {layer: partial(reset, full=of) for layer, of in adapter_resets(model, *stored).items()}


SHARD_PARAMETER = TPPlanBuilder.shard_parameter
MUTATIONS: dict[str, Any] = {
    "": mock.MagicMock,
    "dropout of each column": lambda: mock.patch.object(rng, "_OF_ADAPTERS", "none"),
    "no sums of factors of experts": lambda: mock.patch.object(
        TPPlanBuilder, "shard_parameter", _never_partial
    ),
    "fan of the shard": lambda: mock.patch.object(init_weights, "adapter_resets", _of_shard_fans),
    "norm of the shard": lambda: mock.patch.object(weight_norms, "all_reduce_in_place", _of_shard),
}


def _largest(pool: Pool, task: programs.Task, plan: str, mutation: str = "") -> float:
    """The largest difference of a gradient from one process. Fails for a refused plan."""
    ours = pool.run(_trained, plait.Plan.parse(plan).num_ranks, task, plan, mutation)[0]
    assert not isinstance(ours, str), ours
    oracle = programs.one_process_task(task, ours.first_weights, 1)
    if not mutation:
        programs.assert_same(ours, oracle)
    pairs = zip(ours.gradients, oracle.gradients, strict=True)
    return max(programs.largest_difference(mine, theirs)[0] for mine, theirs in pairs)


def _cases() -> list[Any]:
    """All but those that the family itself does not run under. Of each family `make test` has other plans and
    kinds: every pair of a plan and a kind is there."""
    cases, count = list[Any](), len(PLANS)
    for at, family in enumerate(FAMILIES):
        for of_kind, kind in enumerate(KINDS):
            for index, plan in enumerate(PLANS):
                if ("ep=" in plan and family not in WITH_EXPERTS) or ("sp" in plan and family == "opt"):
                    continue
                is_selected = (5 * at + 4 * of_kind) % count == index
                marks = () if is_selected else pytest.mark.sweep
                cases.append(pytest.param(family, kind, plan, marks=marks))
    return cases


@pytest.mark.parametrize(("family", "kind", "plan"), _cases())
def test_adapters_train_as_peft_in_one_process(pool: Pool, family: str, kind: str, plan: str) -> None:
    assert _largest(pool, task(lora, family, **KINDS[kind]), plan) < 1e-9


EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
OF_EXPERTS = (
    ("mixtral", "dp=2 zero=3 ep=2"),
    ("mixtral", "dp=2 tp=2 ep=2"),  # each column has other experts
    ("mixtral", "pp=2 tp=2 sp=true"),
    ("qwen3_moe", "dp=2 zero=3 recompute=full"),
    ("qwen3_moe", "tp=2 sp=true"),
    ("qwen3_moe", "cp=2"),
    ("gpt_oss", "dp=2 ep=2"),  # weights are transposed
    ("gpt_oss", "tp=2"),
)


@pytest.mark.parametrize(
    ("family", "plan"),
    [
        *OF_EXPERTS,
        *(
            pytest.param(family, plan, marks=pytest.mark.sweep)
            for family in ("mixtral", "qwen3_moe", "gpt_oss")
            for plan in (*PLANS, "dp=2 tp=2 ep=2")
            if (family, plan) not in OF_EXPERTS and not (family == "gpt_oss" and "sp" in plan)
        ),
    ],
)
def test_adapters_of_experts_train_as_peft_in_one_process(pool: Pool, family: str, plan: str) -> None:
    adapted = task(lora, family, target_parameters=EXPERTS, init_lora_weights=False)
    assert _largest(pool, adapted, plan) < 1e-9


@pytest.mark.parametrize("optimizer", ["Muon", "Adafactor"])
@pytest.mark.parametrize("plan", ["dp=2 ep=2", "dp=2 ep=2 zero=3", "dp=2 tp=2 ep=2", "tp=2"])
def test_full_factors_of_experts_are_updated(pool: Pool, plan: str, optimizer: str) -> None:
    """B has the experts in order in each r-th part of dim 1: no rank has a contiguous part."""
    options = {"target_parameters": EXPERTS, "init_lora_weights": False}
    adapted = replace(task(lora, "mixtral", **options), optimizer=optimizer, arguments={"lr": 0.02})
    ours = pool.run(_trained, plait.Plan.parse(plan).num_ranks, adapted, plan)[0]
    alone = pool.run(_trained, 1, adapted, "dp=1")[0]  # torch's optimizer, in place
    assert not isinstance(ours, str), ours
    programs.assert_same(ours, alone)


@pytest.mark.parametrize("plan", ["dp=1", "dp=2 ep=2", "dp=2 ep=2 zero=3", "pp=2"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_all_linear_layers_of_mixtures(pool: Pool, family: str, plan: str) -> None:
    """Routers and experts are among them in mixtral and qwen3_moe."""
    adapted = task(lora, family, targets="all-linear", init_lora_weights=False)
    names = [name for name, p in adapted.build().named_parameters() if p.requires_grad]
    assert any(".experts." in name for name in names) == any(".gate." in name for name in names)
    assert any(".gate." in name for name in names) == (family != "gpt_oss")
    assert _largest(pool, adapted, plan) < 1e-9


def test_all_linear_layers_of_mixtral_under_tp_are_refused_by_name(pool: Pool) -> None:
    adapted = task(lora, "mixtral", targets="all-linear")
    refused = str(pool.run(_trained, 2, adapted, "tp=2")[0])
    assert "mlp.gate" in refused
    assert "target_modules" in refused


@pytest.mark.parametrize("plan", ["tp=2", "tp=2 sp=true", "pp=2 tp=2"])
@pytest.mark.parametrize("targets", ["embed_tokens q_proj down_proj", "lm_head o_proj"])
def test_magnitudes_of_embeddings_and_heads(pool: Pool, targets: str, plan: str) -> None:
    dora = task(lora, "llama", use_dora=True, targets=targets, init_lora_weights=False)
    assert _largest(pool, dora, plan) < 1e-9


@pytest.mark.parametrize("options", [{"lora_bias": False, "bias": "all"}, {"bias": "lora_only"}])
def test_magnitudes_next_to_biases(pool: Pool, options: dict[str, Any]) -> None:
    dora = task(lora, "biased_llama", use_dora=True, **options)
    assert _largest(pool, dora, "tp=2 sp=true") < 1e-9


SAVED: dict[str, tuple[str, dict[str, Any]]] = {
    "head": ("llama", {"modules_to_save": ["lm_head"]}),
    "embedding and head": ("llama", {"modules_to_save": ["embed_tokens", "lm_head"]}),
    "tied": ("tied_llama", {"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}),
}


@pytest.mark.parametrize("plan", ["tp=2", "pp=2 tp=2 sp=true", "dp=2 zero=3"])
@pytest.mark.parametrize("saved", SAVED)
def test_modules_to_save_train_as_in_one_process(pool: Pool, saved: str, plan: str) -> None:
    family, options = SAVED[saved]
    assert _largest(pool, task(lora, family, **options), plan) < 1e-9


@pytest.mark.parametrize("plan", ["tp=2", "pp=2"])
def test_single_tokens_train_as_in_one_process(pool: Pool, plan: str) -> None:
    assert _largest(pool, task(lora, "tied_llama", trainable_token_indices=[1, 2, 3]), plan) < 1e-9


def test_single_tokens_under_sp_are_refused_by_name(pool: Pool) -> None:
    refused = pool.run(_trained, 2, task(lora, "llama", trainable_token_indices=[1, 2]), "tp=2 sp=true")[0]
    assert "trainable_tokens_delta" in str(refused)


def _dropped(plan: str, mutation: str, options: dict[str, Any]) -> dict[str, Any]:
    """Return what a rank drops in front of A in the first block, and its factors after three steps."""
    with MUTATIONS[mutation]():
        of_dropout = task(lora, "llama", lora_dropout=0.5, init_lora_weights=False, **options)
        engine = programs.engine_of(of_dropout, f"{plan} precision=fp64")
    masks: dict[str, list[Any]] = {"q_proj": [], "o_proj": []}
    for name, module in engine.model.named_modules():
        layer = name.partition(".lora_dropout.")[0].rpartition(".")[2]
        if ".layers.0." in name and name.endswith(".lora_dropout.default") and layer in masks:
            keep = masks[layer].append
            module.register_forward_hook(lambda _, __, output, keep=keep: keep((output == 0).tolist()))
    for batch in of_dropout.data(3):
        engine.step(programs.share_of(batch, engine))
    factors = {n: p.detach().tolist() for n, p in engine.model.named_parameters() if "q_proj.lora_A" in n}
    return {**masks, "factors": factors}


@pytest.mark.parametrize("options", [{}, {"use_dora": True}], ids=["lora", "dora"])
@pytest.mark.parametrize("plan", ["tp=2", "tp=2 sp=true"])
def test_columns_drop_the_same_of_a_full_input_and_other_features_of_their_own(
    pool: Pool, plan: str, options: dict[str, Any]
) -> None:
    first, second = pool.run(_dropped, 2, plan, "", options)
    assert first["q_proj"] == second["q_proj"]
    assert first["o_proj"] != second["o_proj"]
    assert first["factors"] == second["factors"]


def test_columns_that_draw_for_themselves_get_other_factors(pool: Pool) -> None:
    first, second = pool.run(_dropped, 2, "tp=2", "dropout of each column", {})
    assert first["q_proj"] != second["q_proj"]
    assert first["factors"] != second["factors"]


def _on_meta(on_meta: bool = True) -> Any:
    import peft  # noqa: PLC0415 - takes seconds

    config = peft.LoraConfig(r=4, target_modules=["q_proj", "o_proj"], use_dora=True)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.filterwarnings("ignore")  # of transformers and peft, about names
        return peft.get_peft_model(programs.llama(on_meta=on_meta), config, autocast_adapter_dtype=False)


def _first_values(plan: str, mutation: str = "") -> dict[str, Any]:
    with MUTATIONS[mutation]():
        return programs.engine_of(
            programs.Task(_on_meta, own_loss=True), f"{plan} precision=fp64"
        ).full_parameters()


@pytest.mark.parametrize("plan", ["tp=2", "dp=2 zero=3", "pp=2", "dp=2 tp=2 zero=3"])
def test_initial_adapters_do_not_depend_on_the_plan(pool: Pool, plan: str) -> None:
    alone = pool.run(_first_values, 1, "dp=1")[0]
    ours = pool.run(_first_values, plait.Plan.parse(plan).num_ranks, plan)[0]
    assert ours.keys() == alone.keys()
    assert all(torch.equal(ours[name], values) for name, values in alone.items())
    _check_first_values(alone)


def _check_first_values(alone: dict[str, Any]) -> None:
    for name, values in alone.items():
        if ".lora_A." in name:  # peft's bound, of the full matrix's 32 inputs
            assert 0.9 * 32**-0.5 < float(values.abs().max()) <= 32**-0.5
        elif ".lora_B." in name:
            assert not values.any()
        elif ".lora_magnitude_vector." in name:
            base = alone[f"{name.partition('.lora_magnitude_vector.')[0]}.base_layer.weight"]
            torch.testing.assert_close(values, base.norm(dim=1))


def test_factors_with_the_fan_of_a_shard_are_found(pool: Pool) -> None:
    drawn = pool.run(_first_values, 2, "tp=2", "fan of the shard")[0]
    with pytest.raises(AssertionError):
        _check_first_values(drawn)


def _add_later(plan: str) -> str:
    import peft  # noqa: PLC0415 - takes seconds

    task = programs.Task(programs.llama, own_loss=True)
    engine = programs.engine_of(task, f"{plan} precision=fp64")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore")
            peft.get_peft_model(engine.model, peft.LoraConfig(r=4, target_modules=["q_proj"]))
        engine.step(programs.share_of(task.data(1)[0], engine))
    except PlaitError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("plan", ["dp=2", "dp=2 zero=3", "tp=2"])
def test_an_adapter_that_is_added_to_an_engines_model_is_an_error(pool: Pool, plan: str) -> None:
    assert all("before parallelize" in error for error in pool.run(_add_later, 2, plan))


def test_a_norm_of_the_shard_of_a_weight_is_wrong(pool: Pool) -> None:
    dora = task(lora, "llama", use_dora=True, init_lora_weights=False)
    assert _largest(pool, dora, "tp=2", "norm of the shard") > 1e-3


def test_factors_of_experts_that_columns_do_not_sum_are_wrong(pool: Pool) -> None:
    adapted = task(lora, "mixtral", target_parameters=EXPERTS, init_lora_weights=False)
    assert _largest(pool, adapted, "tp=2", "no sums of factors of experts") > 1e-3


def _replicas_differ(plan: str, family: str, options: dict[str, Any], mutation: str = "") -> str:
    """Return what the comparison of copies finds after three steps."""
    adapted = task(lora, family, init_lora_weights=False, **options)
    with MUTATIONS[mutation]():
        engine = programs.engine_of(adapted, f"{plan} precision=fp64")
    for batch in adapted.data(3):
        engine.step(programs.share_of(batch, engine))
    try:
        engine.check_replicas()
    except RunError as error:
        return str(error)
    return ""


OF_ATTENTION = {"modules_to_save": ["lm_head"], "lora_dropout": 0.3}


@pytest.mark.parametrize(
    ("plan", "family", "options"),
    [
        ("dp=2", "llama", OF_ATTENTION),
        ("tp=2", "llama", OF_ATTENTION | {"use_dora": True}),
        ("tp=2 sp=true", "llama", OF_ATTENTION),
        ("dp=2 tp=2 zero=1 sp=true", "phi3", {}),
        ("tp=2 sp=true", "deepseek_v3", {}),  # latent layers that all columns have
        ("tp=2", "mixtral", {"target_parameters": EXPERTS}),
        ("dp=2 ep=2", "mixtral", {"target_parameters": EXPERTS}),
    ],
)
def test_factors_that_several_ranks_have_stay_equal(
    pool: Pool, plan: str, family: str, options: dict[str, Any]
) -> None:
    ranks = plait.Plan.parse(plan).num_ranks
    assert pool.run(_replicas_differ, ranks, plan, family, options) == [""] * ranks


def test_factors_that_columns_do_not_sum_are_found_as_different_copies(pool: Pool) -> None:
    given = "tp=2", "mixtral", {"target_parameters": EXPERTS}, "no sums of factors of experts"
    assert all(".lora_" in error for error in pool.run(_replicas_differ, 2, *given))
