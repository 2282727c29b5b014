"""Losses of pairs under a plan equal their formulas in one process, with gradients, in float64."""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.engine import preferences
from plait.errors import ConfigError
from plait.plan import Plan
from support import hf_models
from support.pairs import LENGTH, PAIRS, check_steps, pairs, row_log_probs
from support.pool import Pool

BETA = 0.3
PLANS = [
    "",
    "micro=4",
    "dp=2 zero=3 micro=2",
    "tp=2",
    "tp=2 sp=true micro=2",
    "tp=2x2",
    "cp=2",
    "cp=2 micro=2 dp=2 zero=2",
    "pp=2 micro=4",
    "pp=2 micro=4 schedule=zb-h1",
    "pp=1 chunks=2 micro=2 schedule=interleaved",
    "dp=2 tp=2 zero=3 micro=2 recompute=full",
    "tp=2 pp=2 micro=2",
]
LOSSES: dict[str, dict[str, Any]] = {
    "sigmoid": {},
    "cdpo": {"loss": "sigmoid", "label_smoothing": 0.2},
    "robust": {"loss": "robust", "label_smoothing": 0.2},
    "hinge": {"loss": "hinge"},
    "ipo": {"loss": "ipo"},
    "orpo": {"loss": "orpo"},
    "sft": {"sft_weight": 0.5},
}
FAMILIES = ("llama", "gemma2", "gpt2", "mixtral")
SELECTED = [("llama", "sigmoid", plan) for plan in PLANS]
SELECTED += [("llama", name, "dp=2 zero=3 micro=2") for name in LOSSES if name != "sigmoid"]
SELECTED += [("llama", name, "cp=2") for name in ("ipo", "orpo")]
SELECTED += [("gemma2", "sigmoid", "tp=2"), ("gpt2", "sft", "pp=2 micro=4")]
_OTHERS = [
    pytest.param(family, name, plan, marks=pytest.mark.sweep)
    for family in FAMILIES
    for name in LOSSES
    for plan in PLANS
    if (family, name, plan) not in SELECTED and not (family == "mixtral" and ("x" in plan or "sp" in plan))
]
BIG = {"gemma2": {"final_logit_softcapping": 0.5}}


def model_of(family: str, seed: int = 5) -> nn.Module:
    """A small model; another seed gives another one, as after training."""
    torch.manual_seed(seed)
    return hf_models.model_of(family, on_meta=False, **BIG.get(family, {})).double()


def by_hand(family: str, name: str) -> tuple[float, dict[str, Tensor], dict[str, float]]:
    """Loss, gradients and rewards: each formula as in its paper."""
    batch, model, options = pairs(), model_of(family), LOSSES[name]
    kind, eps = options.get("loss", "sigmoid"), options.get("label_smoothing", 0.0)
    policy, count = row_log_probs(model, batch)
    with torch.no_grad():
        reference, _ = row_log_probs(model_of(family, seed=6), batch)
    losses, margins, rewards = [], [], []
    for at in range(0, 2 * PAIRS, 2):
        n_c, n_r = int(count[at]), int(count[at + 1])
        if not (n_c and n_r):
            continue
        c, r, ref_c, ref_r = policy[at], policy[at + 1], reference[at], reference[at + 1]
        d = (c - ref_c) - (r - ref_r)
        if kind == "ipo":
            c_ratio, r_ratio = (c - ref_c) / n_c, (r - ref_r) / n_r
            loss = (c_ratio - r_ratio - 1 / (2 * BETA)) ** 2
        elif kind == "orpo":
            c_ratio, r_ratio = c / n_c, r / n_r
            odds_c, odds_r = (p.exp() / (1 - p.exp()) for p in (c / n_c, r / n_r))
            loss = -c / n_c - BETA * torch.log(torch.sigmoid(torch.log(odds_c / odds_r)))
        else:
            c_ratio, r_ratio = c - ref_c, r - ref_r
            right, wrong = (-torch.log(torch.sigmoid(sign * BETA * d)) for sign in (1, -1))
            loss = {
                "sigmoid": (1 - eps) * right + eps * wrong,
                "robust": ((1 - eps) * right - eps * wrong) / (1 - 2 * eps),
                "hinge": torch.relu(1 - BETA * d),
            }[kind]
        loss = loss - options.get("sft_weight", 0.0) * c / n_c
        losses.append(loss)
        rewards.append(BETA * c_ratio.item())
        margins.append(BETA * (c_ratio - r_ratio).item())
    mean = torch.stack(losses).mean()
    mean.backward()
    gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    return mean.item(), gradients, {
        "chosen_reward": sum(rewards) / len(rewards),
        "reward_margin": sum(margins) / len(margins),
        "reward_accuracy": sum(margin > 0 for margin in margins) / len(margins),
        "pairs": len(losses),
        "num_tokens": int(sum(n for at, n in enumerate(count.tolist()) if at // 2 != 2)),
    }  # fmt: skip


def trained(family: str, name: str, plan: str, mutation: str = "") -> Any:
    """Loss and gradients of a step, the evaluation of the same pairs before it, and their rewards."""
    with MUTATIONS[mutation]():
        options = {"optimizer": torch.optim.SGD, "optimizer_args": {"lr": 0.0}}
        frozen = model_of(family, seed=6).requires_grad_(False)
        reference = plait.parallelize(frozen, f"{plan} precision=fp64", **options)
        loss = plait.Preference(beta=BETA, **LOSSES[name])
        engine = plait.parallelize(model_of(family), f"{plan} precision=fp64", loss=loss, **options)
        own: Any = engine.shard(pairs())
        if loss.needs_reference:
            own = plait.with_reference(reference, own)
        evaluated = engine.evaluate(own)
        assert engine.pairs is not None
        of_evaluation = engine.pairs.take()
        result = engine.step(own)
        return result, engine.full_gradients(), evaluated, of_evaluation, engine.pairs.take()


def _num_ranks(plan: str) -> int:
    return Plan.parse(plan).num_ranks if plan else 1


@pytest.mark.parametrize(("family", "name", "plan"), [*SELECTED, *_OTHERS])
def test_a_loss_of_pairs_is_its_formula(pool: Pool, family: str, name: str, plan: str) -> None:
    check_steps(pool.run(trained, _num_ranks(plan), family, name, plan), *by_hand(family, name))


def _mean_of_tokens() -> AbstractContextManager[Any]:
    original = preferences.losses_of_rows

    def of_means(given: Any, policy: Tensor, reference: Tensor, tokens: Tensor) -> Any:
        length = tokens.clamp(min=1)
        return original(given, policy / length, reference / length, tokens)

    return mock.patch.object(preferences, "losses_of_rows", of_means)


def _tokens_as_count() -> AbstractContextManager[Any]:
    original = preferences.PairLoss.__call__

    def counted(self: Any, *args: Any) -> Any:
        total, _ = original(self, *args)
        return total, (args[-1]["labels"] != -100).sum()

    return mock.patch.object(preferences.PairLoss, "__call__", counted)


def _always_sigmoid() -> AbstractContextManager[Any]:
    original = preferences.losses_of_rows

    def sigmoid(given: Any, *args: Any) -> Any:
        return original(plait.Preference(beta=given.beta), *args)

    return mock.patch.object(preferences, "losses_of_rows", sigmoid)


MUTATIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "mean of tokens": _mean_of_tokens,
    "tokens as count": _tokens_as_count,
    "always sigmoid": _always_sigmoid,
    "no sum over cp": lambda: mock.patch.object(preferences, "all_reduce"),
}


@pytest.mark.parametrize(
    ("mutation", "name", "plan"),
    [
        ("mean of tokens", "sigmoid", "dp=2 zero=3 micro=2"),
        ("tokens as count", "sigmoid", "dp=2 zero=3 micro=2"),
        ("no sum over cp", "sigmoid", "cp=2"),
        *(("always sigmoid", name, "") for name in LOSSES if name not in ("sigmoid",)),
    ],
)
def test_a_mistake_in_a_loss_of_pairs_is_seen(pool: Pool, mutation: str, name: str, plan: str) -> None:
    loss, gradients, _ = by_hand("llama", name)
    step, found, *_ = pool.run(trained, _num_ranks(plan), "llama", name, plan, mutation)[0]
    assert step.loss != pytest.approx(loss, rel=1e-6)
    assert not all(torch.allclose(found[key], gradients[key], rtol=1e-6, atol=1e-9) for key in found)


def first_loss(plan: str, precision: str) -> float:
    """The loss of a step whose reference is the same model."""
    engines = [
        plait.parallelize(model_of("llama").float(), f"{plan} precision={precision}", loss=loss)
        for loss in (None, plait.Preference())
    ]
    batch = {key: value[:4].repeat(2, 1) for key, value in pairs().items()}
    return engines[1].step(plait.with_reference(engines[0], engines[1].shard(batch))).loss


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("plan", ["micro=2", "dp=2 zero=3", "tp=2 sp=true", "pp=2 micro=2", "cp=2"])
def test_the_first_loss_is_log_2_to_the_last_bit(pool: Pool, plan: str, precision: str) -> None:
    losses = pool.run(first_loss, Plan.parse(plan).num_ranks, plan, precision)
    assert all(loss == math.log(2) for loss in losses)


def test_the_reference_of_a_model_may_be_itself_before_the_step() -> None:
    engine = plait.parallelize(model_of("llama"), "micro=2 precision=fp64", loss=plait.Preference())
    batch = {key: value[:4] for key, value in pairs().items()}
    assert engine.step(plait.with_reference(engine, batch)).loss == math.log(2)
    changed = engine.step(plait.with_reference(engine, batch))
    assert changed.loss == math.log(2), "the reference is the model as it is now"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss": "dpo"}, "loss is not valid"),
        ({"beta": 0.0}, "beta is not valid"),
        ({"loss": "hinge", "label_smoothing": 0.1}, "label_smoothing is not valid"),
        ({"sft_weight": -1.0}, "sft_weight is not valid"),
    ],
)
def test_a_loss_that_does_not_exist_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plait.Preference(**options)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda b: b, "no log-probabilities of the reference"),
        (lambda b: {key: value[:3] for key, value in b.items()}, "half a pair"),
        (lambda b: [{key: value[:3] for key, value in b.items()}], "half a pair"),
        (lambda b: b | {"loss_weights": torch.ones(16, LENGTH)}, "no weights of tokens"),
    ],
)
def test_a_batch_without_pairs_is_refused(change: Callable[[Any], Any], words: str) -> None:
    engine = plait.parallelize(model_of("llama"), "precision=fp64", loss=plait.Preference())
    with pytest.raises(plait.PlaitError, match=words):
        engine.step(change(pairs()))


def test_a_loss_of_pairs_needs_a_language_model_and_no_probe() -> None:
    with pytest.raises(ConfigError, match="that of a language model"):
        plait.parallelize(nn.Linear(2, 2), "dp=1", loss=plait.Preference())
    with pytest.raises(ConfigError, match="no pairs"):
        plait.parallelize(model_of("llama"), "dp=1", loss=plait.Preference(), probe=True)
