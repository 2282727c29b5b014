"""The loss of a distillation under a plan equals its formula in one process, with gradients, in float64."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import plait
from plait.engine import distillation
from plait.errors import ConfigError
from plait.parallel.tensor.cross_entropy import SINGLE_RANK, SoftTargets, cross_entropy
from plait.plan import Plan
from support import hf_models, programs
from support.pairs import pairs
from support.pool import Pool, RankError

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
    "pp=2 micro=2 schedule=zb-h1",
    "dp=2 tp=2 zero=3 micro=2 recompute=full",
    "tp=2 pp=2 micro=2",
]
CASES: dict[str, dict[str, Any]] = {
    "half": {"weight": 0.5, "temperature": 2.0, "top": 6},
    "teacher alone": {"weight": 1.0, "temperature": 1.0, "top": 6},
    "all tokens": {"weight": 0.3, "temperature": 3.0, "top": programs.VOCABULARY},
    "weighted": {"weight": 0.5, "temperature": 0.5, "top": 3},
}
SELECTED = [("llama", "half", plan) for plan in PLANS]
SELECTED += [("llama", name, plan) for name in list(CASES)[1:] for plan in ("dp=2 zero=3 micro=2", "tp=2")]
SELECTED += [("gemma2", "half", "tp=2"), ("gpt2", "half", "pp=2 micro=4")]  # a softcap; a tied head
BIG = {"gemma2": {"final_logit_softcapping": 0.5}}


def model_of(family: str, seed: int = 5) -> torch.nn.Module:
    torch.manual_seed(seed)
    return hf_models.model_of(family, on_meta=False, **BIG.get(family, {})).double()


def batch_of(name: str) -> dict[str, Tensor]:
    batch = pairs()
    if name != "weighted":
        return batch
    generator = torch.Generator().manual_seed(3)
    return batch | {"loss_weights": torch.rand(batch["labels"].shape, generator=generator).double()}


def of_classes(logits: Tensor, ids: Tensor) -> Tensor:
    """The probabilities of these tokens, and of all others together; none, if these are all."""
    chosen = logits.softmax(-1).gather(2, ids)
    if ids.shape[-1] == logits.shape[-1]:
        return chosen
    return torch.cat([chosen, logits.softmax(-1).scatter(2, ids, 0.0).sum(-1, keepdim=True)], -1)


def by_hand(family: str, name: str) -> tuple[float, float, dict[str, Tensor]]:
    """Loss, that of the labels alone, and gradients of the former."""
    options, batch, student = CASES[name], batch_of(name), model_of(family)
    given = {key: batch[key] for key in ("input_ids", "attention_mask")}
    labels = batch["labels"][:, 1:]
    inside = labels != -100
    weights = batch.get("loss_weights", torch.ones(batch["labels"].shape).double())[:, 1:] * inside
    with torch.no_grad():
        taught = model_of(family, seed=6)(**given).logits[:, :-1]
    logits = student(**given).logits[:, :-1]
    chosen = logits.log_softmax(-1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
    _, ids = taught.topk(options["top"])
    p, q = (of_classes(each / options["temperature"], ids) for each in (taught, logits))
    divergence = torch.where(p > 0, p * (p.log() - q.log()), 0.0).sum(-1)
    of_labels = -(chosen * weights).sum() / weights.sum()
    of_teacher = options["temperature"] ** 2 * (divergence * weights).sum() / weights.sum()
    loss = (1 - options["weight"]) * of_labels + options["weight"] * of_teacher
    loss.backward()
    gradients = {key: p.grad for key, p in student.named_parameters() if p.grad is not None}
    return loss.item(), of_labels.item(), gradients


def trained(family: str, name: str, plan: str, mutation: str = "") -> Any:
    """A step and its gradients, and the evaluation of the same batch before it."""
    with MUTATIONS[mutation]():
        options = {"optimizer": torch.optim.SGD, "optimizer_args": {"lr": 0.0}}
        case = CASES[name]
        frozen = model_of(family, seed=6).requires_grad_(False)
        teacher = plait.parallelize(frozen, f"{plan} precision=fp64", **options)
        loss = plait.Distillation(case["weight"], case["temperature"], case["top"])
        engine = plait.parallelize(model_of(family), f"{plan} precision=fp64", loss=loss, **options)
        own = engine.shard(batch_of(name))
        evaluated = engine.evaluate(own)
        return engine.step(plait.with_teacher(teacher, own, loss)), engine.full_gradients(), evaluated


@pytest.mark.parametrize(("family", "name", "plan"), SELECTED)
def test_a_distillation_is_its_formula(pool: Pool, family: str, name: str, plan: str) -> None:
    loss, of_labels, gradients = by_hand(family, name)
    for step, found, evaluated in pool.run(trained, _num_ranks(plan), family, name, plan):
        assert step.loss == pytest.approx(loss, rel=1e-9)
        assert evaluated.loss_sum / evaluated.num_tokens == pytest.approx(of_labels, rel=1e-9)
        assert found.keys() in (gradients.keys(), {}.keys())  # rank 0 has them all
        assert all(torch.allclose(found[key], gradients[key], rtol=1e-9, atol=1e-12) for key in found)


def _own_columns() -> AbstractContextManager[Any]:
    """Candidates of this rank's columns alone."""

    def own(out: Tensor, given: Tensor, *_: Any, **__: Any) -> None:
        out.copy_(given.repeat(len(out) // len(given)))

    return mock.patch("plait.parallel.tensor.cross_entropy.all_gather", own)


def _no_temperature() -> AbstractContextManager[Any]:
    original = distillation.distilled_loss

    def changed(given: plait.Distillation, *args: Any) -> Any:
        return original(plait.Distillation(given.weight, top_tokens=given.top_tokens), *args)

    return mock.patch("plait.engine.loss.distilled_loss", changed)


MUTATIONS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "": nullcontext,
    "own columns": _own_columns,
    "no temperature": _no_temperature,
}


def test_a_mistake_in_a_distillation_is_seen(pool: Pool) -> None:
    loss, *_ = by_hand("llama", "half")
    step, *_ = pool.run(trained, 2, "llama", "half", "tp=2", "no temperature")[0]
    assert step.loss != pytest.approx(loss, rel=1e-6)
    with pytest.raises(RankError, match="different batches"):
        pool.run(trained, 2, "llama", "half", "tp=2", "own columns")


@pytest.mark.parametrize("top", [1, 3, programs.VOCABULARY, 2 * programs.VOCABULARY])
@pytest.mark.parametrize("plan", ["micro=2", "tp=2", "cp=2"])
def test_a_student_that_equals_its_teacher_has_no_divergence_and_no_gradient(
    pool: Pool, plan: str, top: int
) -> None:
    for step in pool.run(of_itself, _num_ranks(plan), plan, top):
        assert step.loss == pytest.approx(0.0, abs=1e-12)
        assert step.grad_norm < 1e-12
        assert not step.skipped


def of_itself(plan: str, top: int) -> Any:
    loss = plait.Distillation(weight=1.0, temperature=3.0, top_tokens=top)
    engine = plait.parallelize(model_of("llama"), f"{plan} precision=fp64", loss=loss)
    return engine.step(plait.with_teacher(engine, engine.shard(pairs()), loss))


def test_a_rest_of_almost_nothing_keeps_its_digits() -> None:
    """The student's two likeliest tokens have all but 1e-20 of the probability, and the teacher's 1e-19."""
    logits = torch.tensor([[46.0, 46.0, 0.0, 0.5]], dtype=torch.float64, requires_grad=True)
    p = torch.tensor([[45.0, 45.0, 1.0, 0.0]], dtype=torch.float64).softmax(-1)
    rest, target = p[:, 2:].sum(1), torch.tensor([0])
    soft = SoftTargets(torch.tensor([[0, 1]]), p[:, :2], rest)
    cross_entropy(logits, target, SINGLE_RANK, [(0, 4)], soft=soft).backward()
    q = logits.detach().softmax(-1)
    expected = q[:, 2:] * (1 - rest / q[:, 2:].sum())
    assert logits.grad is not None
    assert torch.allclose(logits.grad[:, 2:], expected, rtol=1e-9, atol=0)


def test_a_distillation_without_its_teacher_or_model_is_refused() -> None:
    engine = plait.parallelize(model_of("llama"), "precision=fp64", loss=plait.Distillation())
    with pytest.raises(plait.PlaitError, match="no tokens of the teacher"):
        engine.step(pairs())
    unknown = plait.with_teacher(engine, pairs(), plait.Distillation(top_tokens=2))
    unknown["teacher_ids"][0, 5, 0] = programs.VOCABULARY
    with pytest.raises(plait.PlaitError, match="not in the vocabulary"):
        engine.step(unknown)
    with pytest.raises(ConfigError, match="language model"):
        plait.parallelize(torch.nn.Linear(2, 2), "dp=1", loss=plait.Distillation())
    with pytest.raises(ConfigError, match="weight is not valid"):
        plait.Distillation(weight=0.0)


def _num_ranks(plan: str) -> int:
    return Plan.parse(plan).num_ranks if plan else 1
