"""Under tp, inputs and outputs of the model are those of one process, or are refused."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import plait
from plait.errors import ModelError
from support import programs, silent_error_models
from support.pool import Pool

BATCH = programs.batches(1)[0]


def model_of(family: str = "llama") -> torch.nn.Module:
    return silent_error_models.with_random_weights(family).double()


def embedded() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = (*BATCH["input_ids"].shape, model_of().config.hidden_size)  # type: ignore[union-attr]
    embeddings = torch.randn(shape, generator=generator, dtype=torch.float64)
    return {"inputs_embeds": embeddings, "labels": BATCH["labels"]}


def _step(plan: str) -> tuple[float, dict[str, Tensor]]:
    engine = plait.parallelize(model_of(), f"{plan} precision=fp64")
    return engine.step(embedded()).loss, engine.full_gradients()


@pytest.mark.parametrize(("plan", "ranks"), [("tp=2x1", 2), ("tp=2x2 sp=true", 4), ("pp=2 tp=2x1", 4)])
def test_embeddings_in_place_of_tokens_train_as_in_one_process(pool: Pool, plan: str, ranks: int) -> None:
    model, batch = model_of(), embedded()
    loss = model(**batch).loss
    loss.backward()
    found, gradients = pool.run(_step, ranks, plan)[0]
    assert found == pytest.approx(loss.item(), rel=1e-6)
    for name, parameter in model.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(gradients[name], expected, rtol=1e-5, atol=1e-7)


def _refusal(run: Callable[[], object]) -> str:
    with pytest.raises(ModelError) as error:
        run()
    return str(error.value)


def _outside(token: int) -> tuple[str, bool]:
    engine = plait.parallelize(model_of(), "tp=2 precision=fp64")
    ids = BATCH["input_ids"].clone()
    ids[0, 3] = token
    message = _refusal(lambda: engine.step({**BATCH, "input_ids": ids}))
    return message, engine.step(BATCH).skipped


@pytest.mark.parametrize("token", [programs.VOCABULARY, 9999, -1])
def test_token_ids_outside_of_the_vocabulary_are_refused(pool: Pool, token: int) -> None:
    for message, skipped in pool.run(_outside, 2, token):
        assert "an index is not in the embedding's table" in message
        assert f"given   : {token}" in message
        assert f"0 to {programs.VOCABULARY - 1}" in message
        assert not skipped


def _attention_loss(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    total, count = programs.summed_loss(outputs, batch)
    return total + sum(scores[..., 0].mean() for scores in outputs.attentions), count


def _hidden_loss(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    total, count = programs.summed_loss(outputs, batch)
    return total + sum(1e-2 * states.square().mean() for states in outputs.hidden_states), count


def _engine(family: str, plan: str, loss: Any) -> plait.Engine:
    model: Any = model_of(family)
    model.set_attn_implementation("eager")
    model.config.output_attentions = model.config.output_hidden_states = True
    return plait.parallelize(model, f"{plan} precision=fp64", loss=loss)


def _reading(family: str, plan: str, what: str, since: int) -> tuple[str, str]:
    """The errors of a loss that reads an entry from a call on, and of outputs that are picked."""
    losses = {"attentions": _attention_loss, "hidden_states": _hidden_loss}
    numbers = itertools.count()
    engine = _engine(
        family,
        plan,
        lambda *given: (losses[what] if next(numbers) >= since else programs.summed_loss)(*given),
    )
    for _ in range(since):
        assert not engine.step(BATCH).skipped
    picked = _refusal(lambda: engine.outputs(BATCH, lambda outputs: outputs[what]))
    return _refusal(lambda: engine.step(BATCH)), picked


@pytest.mark.parametrize(("family", "since"), [("llama", 0), ("gpt2", 0), ("llama", 2)])
@pytest.mark.parametrize(
    ("plan", "what"),
    [("tp=2", "attentions"), ("tp=2 sp=true", "hidden_states"), ("tp=2x1", "hidden_states")],
)
def test_a_loss_of_outputs_that_tp_shards_is_refused(
    pool: Pool, family: str, since: int, plan: str, what: str
) -> None:
    """Also of a loss whose first calls do not read them."""
    for message, picked in pool.run(_reading, 2, family, plan, what, since):
        assert f"outputs['{what}'][" in message
        assert "only their shards of an output that is read" in picked


def _hidden_step(plan: str) -> tuple[float, dict[str, Tensor]]:
    engine = _engine("llama", plan, _hidden_loss)
    return engine.step(BATCH).loss, engine.full_gradients()


def test_a_loss_of_hidden_states_that_columns_do_not_shard_is_that_of_one_process(pool: Pool) -> None:
    [(loss, expected)] = pool.run(_hidden_step, 1, "dp=1")
    found, gradients = pool.run(_hidden_step, 2, "tp=2")[0]
    assert found == pytest.approx(loss, rel=1e-9)
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient, rtol=1e-6, atol=1e-9)
