"""Losses of reward models under a plan equal the formula of Bradley and Terry in one process, in float64."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification

import plait
from plait.engine import preferences
from plait.engine.spec import Arguments, validate
from plait.errors import ConfigError, PlaitError
from plait.models.reward import LastTokenScore
from plait.plan import Plan
from support import hf_models
from support.pairs import LENGTH, PAIRS, check_steps, pairs
from support.pool import Pool

PLANS = [
    "",
    "micro=4",
    "dp=2 zero=1 micro=2",
    "dp=2 zero=3 micro=2",
    "tp=2",
    "tp=2 sp=true micro=2",
    "tp=4",
    "pp=2 micro=4",
    "pp=2 micro=4 schedule=zb-h1",
    "dp=2 tp=2 zero=3 micro=2 recompute=full",
]
# A pad id that no token has; one of many tokens, also last ones, as if it ended texts; none.
PAD_IDS: dict[str, int | None] = {"unused": 0, "end": 3, "none": None}
SELECTED = [("llama", "none", plan) for plan in PLANS] + [("llama", "end", "dp=2 zero=3 micro=2")]
SELECTED += [("llama", "unused", "pp=2 micro=4"), ("gpt2", "end", "tp=2"), ("mixtral", "end", "micro=4")]
OTHERS = [
    pytest.param(family, pad, plan, marks=pytest.mark.sweep)
    for family in ("llama", "gemma2", "gpt2", "mixtral")
    for pad in PAD_IDS
    for plan in PLANS
    if (family, pad, plan) not in SELECTED and not (family == "mixtral" and "sp" in plan)
]


def model_of(family: str, pad: str, labels: int = 1) -> nn.Module:
    torch.manual_seed(5)
    options = {"num_labels": labels, "pad_token_id": PAD_IDS[pad]}
    return hf_models.model_of(
        family, on_meta=False, auto=AutoModelForSequenceClassification, **options
    ).double()


def batch_of_pairs() -> dict[str, Tensor]:
    """Rows that end in token 3 and have it inside, too; margins of pairs, in the chosen row."""
    batch = pairs()
    is_last = batch["attention_mask"] - torch.nn.functional.pad(batch["attention_mask"], (0, 1))[:, 1:] == 1
    ids = batch["input_ids"].masked_fill(is_last, 3)
    ids[:, 2] = 3
    margin = torch.linspace(0, 1, 2 * PAIRS, dtype=torch.float64)
    return {**batch, "input_ids": ids, "margin": margin}


def by_hand(family: str, pad: str) -> tuple[float, dict[str, Tensor], dict[str, float]]:
    """Loss, gradients and rewards: each row alone, without padding."""
    model, batch = model_of(family, pad), batch_of_pairs()
    model.config.pad_token_id = None
    losses, scores = [], []
    for at in range(0, 2 * PAIRS, 2):
        if at == 4:  # one of its rows has no label left
            continue
        lengths = batch["attention_mask"][at : at + 2].sum(1).tolist()
        chosen, rejected = (
            model(input_ids=batch["input_ids"][at + row : at + row + 1, : lengths[row]]).logits[0, 0]
            for row in (0, 1)
        )
        losses.append(-torch.log(1 / (1 + torch.exp(-(chosen - rejected - batch["margin"][at])))))
        scores.append((chosen.item(), rejected.item()))
    mean = torch.stack(losses).mean()
    mean.backward()
    gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    return mean.item(), gradients, {
        "chosen_reward": sum(c for c, _ in scores) / len(scores),
        "reward_margin": sum(c - r for c, r in scores) / len(scores),
        "reward_accuracy": sum(c > r for c, r in scores) / len(scores),
        "pairs": len(losses),
    }  # fmt: skip


def trained(family: str, pad: str, plan: str, mutation: str = "") -> Any:
    """Loss and gradients of a step, the evaluation of the same pairs before it, and their rewards."""
    with MUTATIONS[mutation]():
        model = model_of(family, pad)
        engine = plait.parallelize(
            model,
            f"{plan} precision=fp64",
            loss=plait.Preference(loss="reward"),
            optimizer=torch.optim.SGD,
            optimizer_args={"lr": 0.0},
        )
        own: Any = engine.shard(batch_of_pairs())
        evaluated = engine.evaluate(own)
        assert engine.pairs is not None
        of_evaluation = engine.pairs.take()
        result = engine.step(own)
        assert model.config.pad_token_id == PAD_IDS[pad]
        return result, engine.full_gradients(), evaluated, of_evaluation, engine.pairs.take()


def _num_ranks(plan: str) -> int:
    return Plan.parse(plan).num_ranks if plan else 1


@pytest.mark.parametrize(("family", "pad", "plan"), [*SELECTED, *OTHERS])
def test_the_loss_of_a_reward_model_is_its_formula(pool: Pool, family: str, pad: str, plan: str) -> None:
    check_steps(pool.run(trained, _num_ranks(plan), family, pad, plan), *by_hand(family, pad))


def _without_margin() -> AbstractContextManager[Any]:
    original = preferences.losses_of_scores
    return mock.patch.object(preferences, "losses_of_scores", lambda scores, _: original(scores, None))


def _rows_as_count() -> AbstractContextManager[Any]:
    original = preferences.PairLoss._of_scores

    def counted(self: Any, *args: Any) -> Any:
        total, count = original(self, *args)
        return total, count.clamp(min=len(args[-1]["labels"]) // 2)

    return mock.patch.object(preferences.PairLoss, "_of_scores", counted)


MUTATIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "no margin": _without_margin,
    "pairs without labels count": _rows_as_count,
    "last token by its id": lambda: mock.patch.object(LastTokenScore, "_select", return_value=None),
}


@pytest.mark.parametrize("mutation", [name for name in MUTATIONS if name])
def test_a_mistake_in_the_loss_of_a_reward_model_is_seen(pool: Pool, mutation: str) -> None:
    plan = "dp=2 zero=3 micro=2"
    loss, gradients, _ = by_hand("llama", "end")
    step, found, *_ = pool.run(trained, 2, "llama", "end", plan, mutation)[0]
    assert step.loss != pytest.approx(loss, rel=1e-6)
    assert not all(torch.allclose(found[key], gradients[key], rtol=1e-6, atol=1e-9) for key in found)


def test_outputs_are_the_scores_of_last_tokens() -> None:
    model, batch = model_of("llama", "end"), batch_of_pairs()
    engine = plait.parallelize(model, "precision=fp64", loss=plait.Preference(loss="reward"))
    given = {key: batch[key] for key in ("input_ids", "attention_mask")}
    scores = engine.outputs(given).logits[:, 0]
    length = int(batch["attention_mask"][3].sum())
    whole = engine.outputs({"input_ids": batch["input_ids"][2:4, :length]}).logits[1, 0]
    assert scores[3].item() == pytest.approx(whole.item(), rel=1e-9)


def test_training_raises_the_margin() -> None:
    engine = plait.parallelize(
        model_of("llama", "none"),
        "micro=2",
        loss=plait.Preference(loss="reward"),
        optimizer_args={"lr": 1e-2},
    )
    losses = [engine.step(batch_of_pairs()).loss for _ in range(10)]
    assert losses[-1] < 0.5 * losses[0]
    assert engine.memory().activations is not None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"beta": 0.5}, "beta"),
        ({"sft_weight": 1.0}, "sft_weight"),
        ({"label_smoothing": 0.1}, "label_smooth"),
    ],
)
def test_options_of_other_losses_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plait.Preference(loss="reward", **options)


@pytest.mark.parametrize(
    ("build", "plan", "words"),
    [
        (lambda: hf_models.model_of("llama", on_meta=False), "", "reward model"),
        (lambda: model_of("llama", "none", labels=3), "", "reward model"),
        (lambda: nn.Linear(2, 2), "", "reward model"),
        (lambda: model_of("llama", "none"), "cp=2", "no sum over tokens"),
        (lambda: model_of("llama", "none"), "tp=2x2", "score does not support"),
    ],
)
def test_models_and_plans_without_scores_are_refused(build: Any, plan: str, words: str) -> None:
    with pytest.raises(PlaitError, match=words):
        validate(Arguments(build(), Plan.parse(plan), loss=plait.Preference(loss="reward")))


def test_half_a_pair_and_weights_are_refused() -> None:
    engine = plait.parallelize(model_of("llama", "none"), "", loss=plait.Preference(loss="reward"))
    with pytest.raises(PlaitError, match="half a pair"):
        engine.step({key: value[:3] for key, value in batch_of_pairs().items()})
    with pytest.raises(PlaitError, match="no weights of tokens"):
        engine.step(batch_of_pairs() | {"loss_weights": torch.ones(2 * PAIRS, LENGTH)})
