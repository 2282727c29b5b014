"""Numbers of all tokens of a micro-batch: the auxiliary loss of routers, the loads of experts, and their
biases, equal to one process under every plan."""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import plait
from plait.verify.model_spec import parse_source
from plait.verify.result import Outcome, Verdict
from support import hf_models, programs, router_models, verify_models
from support.pool import Pool

PLANS = (
    "dp=2",
    "dp=2 ep=2",
    "dp=2 zero=1 micro=2",
    "dp=2 ep=2 zero=3 micro=2 recompute=full",
    "tp=2",
    "pp=2 micro=3",
    "pp=2 micro=4 chunks=2 schedule=interleaved",
    "pp=2 micro=2 schedule=zb-h1 recompute=full",
    "cp=2",
    "dp=2 cp=2 ep=2 zero=3",
    "dp=2 ep=2 tp=2 pp=2 micro=2 zero=1",
)


def check(pool: Pool, family: str, words: str, data: Any = programs.batches, **options: Any) -> None:
    plan = plait.Plan.parse(f"{words} precision=fp64")
    task = router_models.task_of(family, data, **options)
    ours, *others = pool.run(programs.train_task, plan.num_ranks, task, str(plan))
    for other in others:
        assert (other.losses, other.norms) == (ours.losses, ours.norms)
    programs.assert_same(ours, router_models.one_process(task, plan, ours.first_weights))


@pytest.mark.parametrize("words", PLANS)
def test_loss_gradients_and_weights_equal_the_one_process_programs(pool: Pool, words: str) -> None:
    check(pool, "mixtral", words)


@pytest.mark.parametrize("words", ["dp=2 ep=2 micro=2", "pp=2 micro=2", "cp=2"])
def test_padding_is_not_counted(pool: Pool, words: str) -> None:
    check(pool, "mixtral", words, router_models.padded)


Z_PLANS = (
    ("mixtral", "dp=2 ep=2 zero=3 micro=2 recompute=full"),
    ("mixtral", "pp=2 micro=3"),
    ("mixtral", "cp=2"),
    ("qwen2_moe", "dp=2 cp=2 ep=2 zero=1"),
    ("deepseek_v3", "dp=2 micro=2"),
    ("deepseek_v3", "tp=2 sp=true"),
    ("deepseek_v3", "pp=2 micro=4 chunks=2 schedule=interleaved"),
    ("deepseek_v3", "dp=2 ep=2 tp=2 pp=2 micro=2 zero=1"),
)


@pytest.mark.parametrize(("family", "words"), Z_PLANS)
def test_the_z_loss_is_the_one_process_programs(pool: Pool, family: str, words: str) -> None:
    """With and without an auxiliary loss; of tokens that the attention mask does not hide."""
    check(pool, family, words, router_models.padded, z_loss=router_models.Z_LOSS)


STEP_PLANS = (
    ("mixtral", "dp=2 micro=3"),
    ("mixtral", "dp=2 ep=2 zero=3 micro=2 recompute=full"),
    ("mixtral", "pp=2 micro=4 chunks=2 schedule=interleaved"),
    ("mixtral", "tp=2 micro=2"),
    ("qwen2_moe", "dp=2 micro=2 cp=2 ep=2 zero=3 reshard=step"),
    ("qwen2_moe", "pp=2 micro=3 schedule=zb-h1"),
    ("deepseek_v3", "dp=2 pp=2 micro=3 zero=1"),
    ("deepseek_v3", "dp=2 ep=2 tp=2 micro=2 zero=3"),
)


def test_counts_of_the_step_are_verified_with_one_batch(pool: Pool) -> None:
    verdict = _verified(pool, "mixtral", "dp=2 micro=2 router_balance=step")
    assert verdict.outcome is Outcome.SAME, verdict.message


@pytest.mark.parametrize(("family", "words"), STEP_PLANS)
def test_counts_of_the_step_make_one_micro_batch_of_it(pool: Pool, family: str, words: str) -> None:
    """Loss, gradients and weights are those of one process that has no micro-batches."""
    words += " router_balance=step"
    check(pool, family, words, router_models.padded, z_loss=router_models.Z_LOSS)


FAMILIES = ("qwen3_moe", "gpt_oss", "dbrx")
OTHER_FAMILIES = "qwen2_moe olmoe granitemoe phimoe ernie4_5_moe jamba minimax_m2 flex_olmo granitemoeshared"


@pytest.mark.parametrize(
    "family", [*FAMILIES, *(pytest.param(name, marks=pytest.mark.sweep) for name in OTHER_FAMILIES.split())]
)
def test_families_have_their_own_auxiliary_loss(pool: Pool, family: str) -> None:
    verdict = _verified(pool, family, "dp=2 micro=2")
    assert verdict.outcome is Outcome.SAME, verdict.message


def _verified(pool: Pool, family: str, words: str, **options: Any) -> Verdict:
    source = parse_source(family, layers=3, length=11)
    assert source.config is not None
    more = {"output_router_logits": True, "router_aux_loss_coef": router_models.COEFFICIENT}
    given = replace(source, config={**source.config, **more}), words
    verdict, _ = pool.run(verify_models.verify_on_ranks, 2, *given, timeout_s=180, **options)
    assert isinstance(verdict, Verdict)
    return verdict


def test_islands_have_the_loss_of_their_own_tokens(pool: Pool) -> None:
    verdict = _verified(pool, "mixtral", "dp=2 micro=2 local_steps=2")
    assert verdict.outcome is Outcome.SAME, verdict.message


def test_packed_rows_have_no_loss_of_routers_to_compare(pool: Pool) -> None:
    verdict = _verified(pool, "mixtral", "dp=2", packed=True)
    assert verdict.outcome is Outcome.REFUSED
    assert "follows from all tokens of a micro-batch" in verdict.message


BIASED_PLANS = (
    "dp=2 micro=2",
    "dp=2 ep=2 zero=3 recompute=full",
    "tp=2",
    "cp=2",
    "pp=2 micro=2 schedule=zb-h1 recompute=full",
)


def _loads_in_one_process(batch: dict[str, Tensor]) -> dict[str, list[int]]:
    """The loads with the model's initial weights."""
    engine = programs.engine_of(programs.Task(hf_models.builder("deepseek_v3")), "dp=1 precision=fp64")
    model: Any = hf_models.model_of("deepseek_v3", on_meta=False).double()
    model.load_state_dict(engine.full_parameters(), strict=False)
    loads = {}
    for name, module in model.named_modules():
        if name.endswith("mlp.experts"):

            def count(_: Any, args: Any, name: str = name, number: int = module.num_experts) -> None:
                loads[name] = torch.bincount(args[1].flatten(), minlength=number).tolist()

            module.register_forward_pre_hook(count)
    model(input_ids=batch["input_ids"])
    return loads


@functools.cache
def _biased_alone(pool: Pool) -> Any:
    return pool.run(router_models.biased, 1, "dp=1")[0]


def test_biases_follow_the_loads_of_all_tokens(pool: Pool) -> None:
    loads, _, biases, _ = _biased_alone(pool)
    (expected,) = pool.run(_loads_in_one_process, 1, programs.batches(1)[0])
    assert loads[0] == expected
    assert len(loads[0]) == len(biases) > 0
    for name, load in loads[0].items():
        (bias,) = [of for key, of in biases.items() if key.startswith(name.rpartition(".")[0])]
        load_E = torch.tensor(load).double()
        torch.testing.assert_close(bias.double(), router_models.RATE * torch.sign(load_E.mean() - load_E))


@pytest.mark.parametrize("words", BIASED_PLANS)
def test_biases_and_loads_are_those_of_one_process(pool: Pool, words: str) -> None:
    """Not changed by evaluation and recomputed blocks, and continued from a state."""
    loads, losses, _, biases = _biased_alone(pool)
    ours, *others = pool.run(router_models.biased, plait.Plan.parse(words).num_ranks, words)
    assert ours[0] == loads
    assert ours[1] == pytest.approx(losses, rel=1e-9)
    assert biases.keys() == ours[3].keys()
    assert all(torch.equal(biases[name], bias) for name, bias in ours[3].items())
    assert all(other[:2] == ours[:2] for other in others)
