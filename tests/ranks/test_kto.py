"""The loss of single answers under a plan equals its formula in one process, with gradients, in float64."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import plait
from plait.engine import preferences
from plait.errors import ConfigError, PlanError
from plait.plan import Plan
from support import hf_models
from support.pairs import PAIRS, check_steps, pairs, row_log_probs
from support.pool import Pool

OPTIONS: dict[str, Any] = {"beta": 0.3, "good_weight": 1.5, "bad_weight": 0.5}
PLANS = [
    "",
    "micro=4",
    "dp=2 zero=3 micro=2",
    "dp=4 zero=1 micro=2",
    "tp=2 sp=true micro=2",
    "tp=2x2",
    "cp=2",
    "cp=2 micro=2 dp=2 zero=2",
    "pp=2 micro=4",
    "pp=2 micro=2 schedule=zb-h1",
    "pp=1 chunks=2 micro=2 schedule=interleaved",
    "dp=2 tp=2 zero=3 micro=2 recompute=full",
]
SELECTED = [*(("llama", plan) for plan in PLANS), ("gemma2", "tp=2"), ("mixtral", "dp=2 ep=2 zero=3 micro=2")]


def answers() -> dict[str, Tensor]:
    """Each answer, and one of another prompt, of which one has no trained token; every third is bad."""
    batch = pairs()
    batch["labels"][7] = -100
    is_bad = (torch.arange(2 * PAIRS) // 2 % 3 == 0)[:, None]
    signs = torch.ones(batch["labels"].shape).masked_fill(is_bad, -1.0)
    return batch | {"loss_weights": signs.masked_fill(batch["labels"] == -100, 0)}


def model_of(family: str, seed: int = 5) -> torch.nn.Module:
    torch.manual_seed(seed)
    return hf_models.model_of(family, on_meta=False).double()


def by_hand(family: str, floor: float = 0.0) -> tuple[float, dict[str, Tensor], dict[str, float]]:
    """Loss, gradients and rewards by section 4 of Ethayarajh et al. 2024; z is at least `floor`."""
    batch, model = answers(), model_of(family)
    policy, count = row_log_probs(model, batch)
    with torch.no_grad():
        reference, _ = row_log_probs(model_of(family, seed=6), batch)
    ratio = policy - reference
    z = max(floor, ratio[1::2][count[1::2] > 0].mean().item())
    losses, good, bad, right = [], [], [], []
    for at in range(0, 2 * PAIRS, 2):
        if not count[at]:
            continue
        if at // 2 % 3 == 0:
            losses.append(0.5 * (1 - torch.sigmoid(0.3 * (z - ratio[at]))))
        else:
            losses.append(1.5 * (1 - torch.sigmoid(0.3 * (ratio[at] - z))))
        (bad if at // 2 % 3 == 0 else good).append(0.3 * ratio[at].item())
        right.append((ratio[at].item() > z) == (at // 2 % 3 != 0))
    mean = torch.stack(losses).mean()
    mean.backward()
    gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    return mean.item(), gradients, {
        "chosen_reward": sum(good) / len(good),
        "rejected_reward": sum(bad) / len(bad),
        "reward_accuracy": sum(right) / len(right),
        "pairs": len(losses),
        "num_tokens": int(count[::2].sum()),
    }  # fmt: skip


def trained(family: str, plan: str, mutation: str = "") -> Any:
    """Loss and gradients of a step, the evaluation of the same answers before it, and their rewards."""
    with MUTATIONS[mutation]():
        options = {"optimizer": torch.optim.SGD, "optimizer_args": {"lr": 0.0}}
        frozen = model_of(family, seed=6).requires_grad_(False)
        reference = plait.parallelize(frozen, f"{plan} precision=fp64", **options)
        loss = plait.Preference(loss="kto", **OPTIONS)
        engine = plait.parallelize(model_of(family), f"{plan} precision=fp64", loss=loss, **options)
        own = plait.with_reference(reference, engine.shard(answers()), loss)
        evaluated = engine.evaluate(own)
        assert engine.pairs is not None
        of_evaluation = engine.pairs.take()
        result = engine.step(own)
        return result, engine.full_gradients(), evaluated, of_evaluation, engine.pairs.take()


@pytest.mark.parametrize(("family", "plan"), SELECTED)
def test_a_loss_of_answers_is_its_formula(pool: Pool, family: str, plan: str) -> None:
    check_steps(pool.run(trained, _num_ranks(plan), family, plan), *by_hand(family))


def _of_own_answers() -> AbstractContextManager[Any]:
    """Other answers' log-probabilities from the answers themselves."""
    original = preferences.losses_of_answers

    def changed(given: Any, relative: Tensor, is_good: Tensor, _: Tensor) -> Any:
        return original(given, relative, is_good, relative.mean().detach())

    return mock.patch.object(preferences, "losses_of_answers", changed)


def _all_good() -> AbstractContextManager[Any]:
    original = preferences.losses_of_answers
    return mock.patch.object(
        preferences, "losses_of_answers", lambda g, r, is_good, o: original(g, r, torch.ones_like(is_good), o)
    )


MUTATIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "own answers": _of_own_answers,
    "all good": _all_good,
    "no sum over ranks": lambda: mock.patch.object(preferences, "all_reduce"),
}


@pytest.mark.parametrize("mutation", list(MUTATIONS)[1:])
def test_a_mistake_in_a_loss_of_answers_is_seen(pool: Pool, mutation: str) -> None:
    loss, *_ = by_hand("llama")
    step, *_ = pool.run(trained, 2, "llama", "dp=2 zero=3 micro=2", mutation)[0]
    assert step.loss != pytest.approx(loss, rel=1e-6)


def test_the_mean_of_other_answers_is_above_0_here_and_0_is_its_least_value() -> None:
    loss, *_ = by_hand("llama")
    unlimited, *_ = by_hand("llama", floor=-torch.inf)
    reference = plait.parallelize(model_of("llama"), "precision=fp64")
    engine = plait.parallelize(
        model_of("llama", seed=6), "precision=fp64", loss=plait.Preference(loss="kto", **OPTIONS)
    )
    changed = engine.step(plait.with_reference(reference, answers())).loss
    assert loss == unlimited
    assert changed == pytest.approx(_swapped(), rel=1e-9)


def _swapped() -> float:
    """The loss of the other model relative to this one, where the mean is below 0."""
    batch = answers()
    with torch.no_grad():
        (own, count), (other, _) = (row_log_probs(model_of("llama", seed), batch) for seed in (6, 5))
    ratio = (own - other)[::2][count[::2] > 0]
    assert (own - other)[1::2].mean() < 0
    is_bad = (torch.arange(PAIRS) % 3 == 0)[count[::2] > 0]
    losses = torch.where(is_bad, 0.5 * torch.sigmoid(0.3 * ratio), 1.5 * torch.sigmoid(-0.3 * ratio))
    return losses.mean().item()


def first_loss(plan: str, family: str, options: dict[str, Any]) -> Any:
    """The loss and rewards of a step whose reference is the same model."""
    loss = plait.Preference(loss="kto")
    engines = [
        plait.parallelize(model_of(family).float(), plan, loss=given, **options) for given in (None, loss)
    ]
    batch = {key: value[:12].repeat(2, 1) for key, value in answers().items()}
    result = engines[1].step(plait.with_reference(engines[0], engines[1].shard(batch), loss))
    assert engines[1].pairs is not None
    return result.loss, engines[1].pairs.take()


@pytest.mark.parametrize(
    ("plan", "family"),
    [
        ("micro=4 precision=fp32", "llama"),
        ("dp=2 zero=3 micro=2 precision=bf16", "llama"),
        ("tp=2 micro=4 precision=bf16", "llama"),
        ("dp=2 ep=2 capacity=1 precision=fp32", "mixtral"),
    ],
)
def test_the_first_loss_is_one_half_to_the_last_bit(pool: Pool, plan: str, family: str) -> None:
    for loss, facts in pool.run(first_loss, _num_ranks(plan), plan, family, {}):
        assert loss == 0.5
        assert facts.chosen_reward == facts.rejected_reward == 0.0


def evaluated(plan: str) -> Any:
    engine = plait.parallelize(
        model_of("llama", seed=6), f"{plan} precision=fp64", loss=plait.Preference(loss="kto")
    )
    reference = plait.parallelize(model_of("llama"), f"{plan} precision=fp64")
    return engine.evaluate(plait.with_reference(reference, engine.shard(answers())))


def test_evaluations_of_islands_compare_with_all_answers(pool: Pool) -> None:
    alone, islands = (pool.run(evaluated, 2, f"dp=2{more}")[0] for more in ("", " local_steps=2"))
    assert islands.loss_sum == pytest.approx(alone.loss_sum, rel=1e-9)


def test_answers_are_compared_within_a_step_alone() -> None:
    engine = plait.parallelize(model_of("llama"), "micro=2 precision=fp64", loss=plait.Preference(loss="kto"))
    with pytest.raises(PlanError, match="answers of other prompts"):
        engine.loss(answers())
    with pytest.raises(ConfigError, match="good_weight is not valid"):
        plait.Preference(good_weight=2.0)


def _num_ranks(plan: str) -> int:
    return Plan.parse(plan).num_ranks if plan else 1
