"""The head's operator, in chunks of a few tokens, against full logits in one process in float64."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import plait
from plait.engine import loss
from plait.errors import ConfigError
from plait.parallel.tensor import cross_entropy, head
from support import hf_models, programs
from support.live_memory import LiveBytes
from support.pool import Pool

PLANS = {
    "": 1,
    "micro=2": 1,
    "dp=2 zero=3": 2,
    "tp=2": 2,
    "tp=4 sp=true": 4,
    "tp=2x2": 4,
    "cp=2": 2,
    "pp=2 micro=4": 2,
    "pp=2 micro=4 schedule=gpipe": 2,
    "pp=2 micro=4 schedule=zb-h1": 2,
    "pp=1 chunks=2 micro=2 schedule=interleaved": 1,
    "dp=2 tp=2 zero=3 micro=2 recompute=full": 4,
    "tp=2 pp=2 micro=2": 4,
}
FAMILIES = ("llama", "gemma2", "cohere", "granite", "gpt2", "gptj", "mixtral")
MORE: dict[str, dict[str, Any]] = {"gemma2": {"final_logit_softcapping": 0.5}}
TERMS = {"label_smoothing": 0.1, "z_loss": 0.01}


def model_of(family: str) -> nn.Module:
    torch.manual_seed(5)
    return hf_models.model_of(family, on_meta=False, **MORE.get(family, {})).double()


def batch_of(*, weights: bool = True, ignored: int = 1) -> dict[str, Tensor]:
    """Four rows; the first `ignored` have no target, and the others some."""
    generator = torch.Generator().manual_seed(7)
    ids = torch.randint(0, programs.VOCABULARY, (4, 16), generator=generator)
    labels = ids.masked_fill(torch.rand(4, 16, generator=generator) < 0.4, -100)
    labels[:ignored] = -100
    given = torch.rand(4, 16, generator=generator) * (torch.rand(4, 16, generator=generator) < 0.8)
    return {"input_ids": ids, "labels": labels} | ({"loss_weights": given} if weights else {})


@contextmanager
def small_chunks() -> Iterator[None]:
    with mock.patch.object(head, "head_chunk", lambda num_tokens, *_, **__: min(num_tokens, 5)):
        yield


def trained(family: str, plan: str, batch: dict[str, Tensor], terms: dict[str, float]) -> Any:
    """Loss, gradients, evaluation, log-probabilities, and the number of products of the head."""
    products = mock.Mock(side_effect=head._product)
    with small_chunks(), mock.patch.object(head, "_product", products):
        model = model_of(family)
        options = {"optimizer": torch.optim.SGD, "optimizer_args": {"lr": 0.0}, **terms}
        engine = plait.parallelize(model, f"{plan} precision=fp64", **options)
        own = {key: each.chunk(engine.data_ranks)[engine.data_rank] for key, each in batch.items()}
        step = engine.step(own)
        gradients, evaluated = engine.full_gradients(), engine.evaluate(own)
        given = {key: own[key] for key in ("input_ids", "labels")}
        asked = engine.label_statistics([given])[0].movedim(-1, 0)
        assert torch.equal(torch.stack(engine.log_probs(given)), asked[:2])
        found = (engine.data_rank, asked)
        return step, gradients, evaluated, found, products.call_count


def by_hand(model: nn.Module, batch: dict[str, Tensor], terms: dict[str, float]) -> Any:
    """Loss, gradients, evaluation and log-probabilities of one process."""
    labels = batch["labels"][:, 1:]
    given = batch.get("loss_weights", torch.ones(4, 16))[:, 1:].double() * (labels != -100)
    z = model(input_ids=batch["input_ids"]).logits[:, :-1]
    losses = F.cross_entropy(z.mT, labels, reduction="none", label_smoothing=terms.get("label_smoothing", 0))
    losses = losses + terms.get("z_loss", 0) * z.logsumexp(-1).square()
    loss = (losses * given).sum() / given.sum().clamp(min=1e-30)
    loss.backward()
    chosen = z.log_softmax(-1).gather(2, labels.clamp(min=0)[..., None])[..., 0]
    entropy = -(z.softmax(-1) * z.log_softmax(-1)).sum(-1)
    likeliest = z.argmax(-1) == labels
    asked = F.pad(torch.stack([chosen, entropy, likeliest]) * (labels != -100), (1, 0)).detach()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    return loss.item(), gradients, (-(chosen * given).sum() / given.sum()).item(), asked, given.sum().item()


def check(pool: Pool, family: str, plan: str, batch: dict[str, Tensor], terms: dict[str, float]) -> None:
    expected = by_hand(model_of(family), batch, terms)
    results = pool.run(trained, PLANS.get(plan, 1), family, plan, batch, terms)
    asked = dict(found for *_, found, _ in results)
    for step, gradients, evaluated, _, _ in results:
        assert step.loss == pytest.approx(expected[0], rel=1e-9)
        assert evaluated.num_tokens == pytest.approx(expected[4], rel=1e-9)
        assert evaluated.loss_sum / evaluated.num_tokens == pytest.approx(expected[2], rel=1e-9)
        for name, gradient in gradients.items():
            assert torch.allclose(gradient, expected[1][name], rtol=1e-9, atol=1e-12), name
    assert torch.allclose(torch.cat([asked[rank] for rank in sorted(asked)], 1), expected[3], atol=1e-10)
    assert max(products for *_, products in results) > 3, "full logits"


@pytest.mark.parametrize("plan", PLANS)
def test_a_head_under_a_plan_computes_what_one_process_does(pool: Pool, plan: str) -> None:
    check(pool, "gemma2", plan, batch_of(), TERMS)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("plan", ["", "tp=2"])
def test_heads_of_all_kinds_compute_what_one_process_does(pool: Pool, family: str, plan: str) -> None:
    check(pool, family, plan, batch_of(weights=False), {})


def test_a_rank_without_targets_adds_nothing(pool: Pool) -> None:
    check(pool, "llama", "dp=2 zero=3", batch_of(ignored=2), TERMS)
    for step, *_ in pool.run(trained_none, 2):
        assert step.skipped
        assert step.num_tokens == 0


def trained_none() -> Any:
    engine = plait.parallelize(model_of("llama"), "tp=2 precision=fp64")
    ids = batch_of()["input_ids"]
    return (engine.step({"input_ids": ids, "labels": torch.full_like(ids, -100)}),)


@pytest.mark.parametrize("name", ["rows", "maximum", "derivative", "count"])
def test_a_mistake_in_the_operator_is_seen(pool: Pool, name: str) -> None:
    expected = by_hand(model_of("gemma2"), batch_of(), TERMS)
    (step, gradients, *_), *_ = pool.run(mistaken, 2, name)
    is_same = all(torch.allclose(g, expected[1][n], rtol=1e-9, atol=1e-12) for n, g in gradients.items())
    assert not (is_same and step.loss == pytest.approx(expected[0], rel=1e-9))


def mistaken(name: str) -> Any:
    """Tokens are dropped after the product, in another order; a column's maximum, the derivative of the cap,
    or the sum of weights is forgotten."""
    original, reduce, write = loss._kept, cross_entropy.all_reduce, cross_entropy.write_gradient

    def other_rows(*args: Any) -> Any:
        found = original(*args)
        return found._replace(rows_n=torch.arange(len(found.targets_n)))

    def own_maximum(tensor: Tensor, group: Any, op: str = "sum", **options: Any) -> None:
        if op == "sum":
            reduce(tensor, group, op, **options)

    def uncapped(*args: Any) -> None:
        write(*args[:5], replace(args[5], softcap=None), args[6])

    def counted(*args: Any, **options: Any) -> Any:
        total, _ = summed(*args, **options)
        return total, (args[1] != -100).sum()

    summed = loss._cross_entropy
    patches = {
        "rows": (loss, "_kept", other_rows),
        "maximum": (cross_entropy, "all_reduce", own_maximum),
        "derivative": (head, "write_gradient", uncapped),
        "count": (loss, "_cross_entropy", counted),
    }
    with mock.patch.object(*patches[name]):
        return trained("gemma2", "tp=2", batch_of(), TERMS)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_narrow_head_rounds_its_gradients_once(precision: str) -> None:
    batch = batch_of()
    expected = by_hand(model_of("llama"), batch, {})
    with small_chunks():
        engine = plait.parallelize(model_of("llama").float(), f"dp=1 precision={precision}")
        assert engine.step(batch).loss == pytest.approx(
            expected[0], rel=2e-3 if precision == "bf16" else 1e-6
        )
        gradient = engine.full_gradients()["lm_head.weight"].double()
    error = (gradient - expected[1]["lm_head.weight"]).norm() / gradient.norm()
    assert error < (0.02 if precision == "bf16" else 1e-5)


def test_a_step_in_fp16_whose_tokens_have_one_target_is_not_skipped() -> None:
    """The weight's gradient is summed over a chunk's tokens, 2,048 of one sign, beyond 65,504 in forward."""
    ids = torch.randint(0, programs.VOCABULARY, (64, 32), generator=torch.Generator().manual_seed(7))
    batch = {"input_ids": ids, "labels": torch.full_like(ids, 5)}
    expected = by_hand(model_of("llama"), batch | {"loss_weights": torch.ones(64, 32)}, {})[1]
    scaling = plait.LossScaling(initial=1024)
    engine = plait.parallelize(model_of("llama").float(), "dp=1 precision=fp16", loss_scaling=scaling)
    assert not engine.step(batch).skipped
    gradient = engine.full_gradients()["lm_head.weight"].double()
    assert (gradient - expected["lm_head.weight"]).norm() < 5e-3 * gradient.norm()


def test_large_weights_of_losses_do_not_overflow_in_fp16() -> None:
    batch = batch_of()
    batch["loss_weights"] = 1000 * batch["loss_weights"]
    expected = by_hand(model_of("llama"), batch, {})[1]["lm_head.weight"]
    scaling = plait.LossScaling(initial=1024)
    engine = plait.parallelize(model_of("llama").float(), "dp=1 precision=fp16", loss_scaling=scaling)
    assert not engine.step(batch).skipped
    gradient = engine.full_gradients()["lm_head.weight"].double()
    assert (gradient - expected).norm() < 5e-3 * gradient.norm()


def test_an_evaluation_computes_no_gradient_of_the_head() -> None:
    batch, written = batch_of(), mock.Mock(side_effect=head.write_gradient)
    engine = plait.parallelize(model_of("llama"), "dp=1 precision=fp64")
    with mock.patch.object(head, "write_gradient", written):
        engine.evaluate(batch)
    assert not written.called


def changed(plan: str, how: str) -> Any:
    """Loss and gradients of a model that adds to its logits, by a hook of the head or in its own code."""
    shift, model = torch.linspace(-1, 1, programs.VOCABULARY, dtype=torch.float64), model_of("llama")
    if how == "hook":
        model.lm_head.register_forward_hook(lambda *call: call[-1] + shift)
    else:
        own = model.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            outputs = own(*args, **kwargs)
            outputs.logits = outputs.logits + shift
            return outputs

        model.forward = forward
    if not plan:
        return by_hand(model, batch_of(), {})
    engine = plait.parallelize(model, f"{plan} precision=fp64", optimizer=torch.optim.SGD)
    batch = {key: each.chunk(engine.data_ranks)[engine.data_rank] for key, each in batch_of().items()}
    return [(engine.step(batch).loss, engine.full_gradients()) for _ in range(2)]


@pytest.mark.parametrize("how", ["hook", "code"])
def test_a_model_that_changes_its_logits_in_another_way_trains_the_same(pool: Pool, how: str) -> None:
    expected = changed("", how)
    for steps in (*pool.run(changed, 2, "dp=2 zero=3", how), *pool.run(changed, 1, "dp=1", how)):
        assert steps[0][0] == pytest.approx(expected[0], rel=1e-9)
        for name, gradient in steps[0][1].items():
            assert torch.allclose(gradient, expected[1][name], rtol=1e-9, atol=1e-12), name


def test_a_factor_of_the_loss_scales_its_gradients() -> None:
    batch = batch_of()
    engine = plait.parallelize(model_of("llama"), "dp=1 precision=fp64")
    with small_chunks():
        total, count = engine.loss(batch)
    engine.backward(3 * total, 3 * count)
    engine.update()
    expected = by_hand(model_of("llama"), batch, {})[1]
    for name, gradient in engine.full_gradients().items():
        assert torch.allclose(gradient, expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("options", "words"),
    [({"label_smoothing": 1.5}, "not a valid weight"), ({"z_loss": 1e-4, "loss": abs}, "built-in loss")],
)
def test_terms_of_a_loss_that_it_cannot_have_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        plait.parallelize(model_of("llama"), "dp=1", **options)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_memory_of_a_step_with_a_large_vocabulary_is_as_estimated(precision: str) -> None:
    """The peak of all that a second step holds; logits of all tokens would be 537 MB more."""
    ids = torch.zeros(8, 128, dtype=torch.long)
    with LiveBytes() as live:
        model = hf_models.model_of("llama", exact=False, vocab_size=131072)
        engine = plait.parallelize(model, f"dp=1 precision={precision}")
        estimated = engine.estimated_memory(tuple(ids.shape))
        for _ in range(2):
            live.peak_bytes = 0
            engine.step({"input_ids": ids, "labels": ids})
    assert engine.memory().loss == estimated.loss
    assert live.peak_bytes == pytest.approx(estimated.total, rel=0.02)
