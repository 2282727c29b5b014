"""Blocks that a family's tensor plan does not know: LoRA, and changes of one's own. Every gradient is that of
one process, or an error tells what does not fit; see [Note: partial gradients] in models/sharding/plan.py."""

from typing import Any
from unittest import mock

import pytest
from torch import Tensor

import plait
from plait.errors import PlaitError
from plait.models.sharding import placement
from plait.parallel.tensor.shared_input import InputView, SharedInputs
from plait.verify import ModelSource, Outcome
from support import changed_models, programs, verify_models
from support.changed_models import changed, lora, task
from support.pool import Pool

LORA = {
    "all projections": {},
    "embeddings and head": {"targets": "q_proj o_proj down_proj embed_tokens lm_head", "use_rslora": True},
    "in the model": {"wrapped": False, "lora_bias": True, "bias": "all"},
}
PLANS = ["tp=2", "tp=2 sp=true", "dp=2 zero=3", "pp=2", "pp=2 tp=2 sp=true", "dp=2 tp=2 zero=3"]
SELECTED = [
    ("llama", "embeddings and head", "tp=2"),
    ("llama", "embeddings and head", "pp=2 tp=2 sp=true"),
    ("biased_llama", "in the model", "tp=2 sp=true"),
    ("qwen3", "all projections", "dp=2 tp=2 zero=3"),
    ("gpt2", "all projections", "tp=2 sp=true"),
    ("gpt2", "in the model", "tp=2"),
    ("phi3", "all projections", "tp=2 sp=true"),
    ("deepseek_v3", "all projections", "tp=2"),
    ("mixtral", "in the model", "tp=2"),
    ("olmo2", "embeddings and head", "tp=2 sp=true"),
    ("llama", "all projections", "dp=2 zero=3"),
    ("phi3", "in the model", "pp=2"),
]
_FAMILIES = dict.fromkeys(family for family, _, _ in SELECTED)
_ALL = [(family, kind, plan) for family in _FAMILIES for kind in LORA for plan in PLANS]
_OTHERS = [
    pytest.param(*case, marks=pytest.mark.sweep)
    for case in _ALL
    if case not in SELECTED
    and not (case[0] in ("mixtral", "deepseek_v3") and "sp" in case[2])
    and not (case[0] in ("gpt2", "phi3", "deepseek_v3") and case[1].startswith("embeddings"))
]


def _trained(task: programs.Task, plan: str, mutation: str = "") -> programs.Trace | str:
    """The training under a plan, or its error."""
    try:
        with MUTATIONS[mutation]():
            return programs.train_task(task, f"{plan} precision=fp64")
    except PlaitError as error:
        return str(error)


def _of_wide(self: SharedInputs, x: Tensor, module: Any, scope: str) -> InputView:
    return InputView() if x.shape[-1] == changed_models.RANK else _share(self, x, module, scope)


_share = SharedInputs.share
MUTATIONS: dict[str, Any] = {
    "": mock.MagicMock,
    "no sum of A": lambda: mock.patch.object(SharedInputs, "share", _of_wide),
    "no marks": lambda: mock.patch.object(placement, "_mark_partial"),
}


def _largest(pool: Pool, task: programs.Task, plan: str, mutation: str = "") -> float | str:
    """The largest difference of a gradient from one process, or the error."""
    ours = pool.run(_trained, plait.Plan.parse(plan).num_ranks, task, plan, mutation)[0]
    if isinstance(ours, str):
        return ours
    oracle = programs.one_process_task(task, ours.first_weights, 1)
    if not mutation:
        programs.assert_same(ours, oracle)
    pairs = zip(ours.gradients, oracle.gradients, strict=True)
    return max(programs.largest_difference(mine, theirs)[0] for mine, theirs in pairs)


@pytest.mark.parametrize(("family", "kind", "plan"), [*SELECTED, *_OTHERS])
def test_adapters_train_as_in_one_process(pool: Pool, family: str, kind: str, plan: str) -> None:
    assert _largest(pool, task(lora, family, **LORA[kind]), plan) < 1e-9


@pytest.mark.parametrize(("family", "pad_token_id"), [("phi3", 5), ("opt", 40)])  # in either column
def test_an_adapter_of_an_embedding_leaves_out_the_padding_of_the_full_table(
    pool: Pool, family: str, pad_token_id: int
) -> None:
    padded = task(lora, family, targets="embed_tokens", pad_token_id=pad_token_id)
    assert _largest(pool, padded, "tp=2") < 1e-9


@pytest.mark.parametrize(("plan", "mutation"), [("tp=2", "no sum of A"), ("tp=2 sp=true", "no marks")])
def test_without_its_sums_an_adapters_gradient_is_wrong(pool: Pool, plan: str, mutation: str) -> None:
    found = _largest(pool, task(lora, "llama"), plan, mutation)
    assert not isinstance(found, str)
    assert found > 1e-3


@pytest.mark.parametrize(
    ("change", "plan"),
    [("temperature", "tp=2"), ("scalar in the mlp", "tp=2"), ("layer scale", "tp=2 sp=true")],
)
def test_without_its_sum_a_parameters_gradient_is_wrong(pool: Pool, change: str, plan: str) -> None:
    found = _largest(pool, task(changed, "llama", change), plan, "no marks")
    assert not isinstance(found, str)
    assert found > 1e-3


# Under sp, what is around a module whose layers have no style at their path, or are gathered.
REFUSED = (
    "layer scale of the module",
    "layer after the module",
    "adapter next to the mlp",
    "norm in the mlp",
    "mixed features",
    "mixed outputs",
    "mixed tokens",
)
_CHANGES = [
    (changed_models.FAMILIES[(index + grid) % 4], change, ("tp=2", "tp=2 sp=true")[grid])
    for index, change in enumerate(changed_models.CHANGES)
    for grid in (0, 1)
]
_REST = [
    pytest.param(family, change, plan, marks=pytest.mark.sweep)
    for family in changed_models.FAMILIES
    for change in changed_models.CHANGES
    for plan in ("tp=2", "tp=2 sp=true", "tp=2x1", "tp=2x2")
    if (family, change, plan) not in _CHANGES
]


@pytest.mark.parametrize(("family", "change", "plan"), [*_CHANGES, *_REST])
def test_a_changed_block_trains_as_in_one_process_or_is_refused(
    pool: Pool, family: str, change: str, plan: str
) -> None:
    found = _largest(pool, task(changed, family, change), plan)
    if isinstance(found, str):
        assert all(f"\n  {part}" in found for part in ("given   :", "expected:", "try     :")), found
        assert (
            change in REFUSED or "x" in plan or (change == "layer in the mlp" and family in ("gpt2", "phi3"))
        ), found
    else:
        assert found < 1e-9


def test_a_magnitude_next_to_sharded_weights_is_sharded_with_them(pool: Pool) -> None:
    dora = task(lora, "llama", use_dora=True, targets="q_proj k_proj v_proj up_proj")
    assert _largest(pool, dora, "tp=2 sp=true") < 1e-9


def test_verify_takes_a_function_that_builds_a_model_with_adapters(pool: Pool) -> None:
    source = ModelSource(build="support.changed_models:small_lora")
    verdict = pool.run(verify_models.verify_on_ranks, 2, source, "tp=2 sp=true")[0]
    assert verdict.outcome is Outcome.SAME
