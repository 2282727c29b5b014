"""Choices of experts that batches give to a mixture, equal to routers written by hand, under every plan."""

import pytest
import torch
from torch import Tensor

import plait
from support import given_choices, programs
from support.pool import Pool

PLANS = (
    "dp=2",
    "dp=2 ep=2",
    "tp=2",
    "cp=2",
    "pp=2 schedule=1f1b micro=2",
    "dp=2 zero=3 recompute=full",
    "dp=2 ep=2 zero=3 micro=2 recompute=selective",
)
MORE = (
    ("mixtral", "tp=2 sp=true"),
    ("qwen3_moe", "tp=2 sp=true recompute=full"),
    ("deepseek_v3", "tp=2 sp=true"),
    ("mixtral", "dp=2 ep=2 tp=2 micro=2 zero=1"),
    ("qwen3_moe", "pp=2 schedule=zb-h1 micro=2 recompute=full"),
    ("gpt_oss", "dp=2 cp=2 ep=2 zero=3 recompute=full"),
)


@pytest.mark.parametrize(
    ("family", "words"), [*((family, words) for words in PLANS for family in given_choices.LAYERS), *MORE]
)
def test_a_step_uses_the_experts_that_its_batch_gives(pool: Pool, family: str, words: str) -> None:
    plan = plait.Plan.parse(f"{words} precision=fp64")
    ours, *others = pool.run(programs.train_task, plan.num_ranks, given_choices.task_of(family), str(plan))
    for other in others:
        assert (other.losses, other.norms) == (ours.losses, ours.norms)
    programs.assert_same(ours, given_choices.reference(family, ours.first_weights))


@pytest.mark.parametrize(
    "words", ["dp=1 recompute=full", "dp=2 ep=2", "tp=2", "cp=2", "dp=2 zero=3 recompute=selective"]
)
@pytest.mark.parametrize("family", given_choices.LAYERS)
def test_the_models_own_choices_change_no_bit(pool: Pool, family: str, words: str) -> None:
    (alone, *_), results = pool.run(given_choices.replayed, 1, family, "dp=1"), []
    for result in pool.run(given_choices.replayed, plait.Plan.parse(words).num_ranks, family, words):
        assert result.is_same
        results.append(result.own)
        assert torch.equal(result.recorded, result.given)
    own = torch.cat(results) if "dp=2" in words else results[-1]
    assert own.shape == (programs.SEQUENCES, programs.LENGTH, given_choices.LAYERS[family], 2)
    assert torch.equal(own.sort(-1).values, alone.own.sort(-1).values)


@pytest.mark.parametrize("words", ["dp=2 ep=2 zero=3 recompute=full", "cp=2"])
def test_loads_are_those_of_given_choices(pool: Pool, words: str) -> None:
    """Also with tokens that only fill up a rank's, 15 of a row over two; and by `loss` and `backward`."""
    chosen = given_choices.batches("mixtral", 1, 15)[0]["routing"]
    expected = [torch.bincount(chosen[:, :, layer].flatten(), minlength=4).tolist() for layer in range(2)]
    (_, alone), *_ = pool.run(given_choices.loads, 1, "dp=1", 15)
    for loads, numbers in pool.run(given_choices.loads, 2, words, 15):
        assert loads == expected
        assert numbers == pytest.approx(alone, rel=1e-9)


SHAPE = (programs.SEQUENCES, programs.LENGTH, 2)


@pytest.mark.parametrize(
    ("family", "words", "routing", "message"),
    [
        ("mixtral", "dp=1", torch.full((*SHAPE, 2), 4), "4 to 4"),
        ("mixtral", "dp=1", torch.full((*SHAPE, 2), -1), "-1 to -1"),
        ("mixtral", "dp=1", torch.zeros(*SHAPE, 2), "float32"),
        ("mixtral", "dp=1", torch.zeros(*SHAPE[:2], 3, 2, dtype=torch.long), "shape"),
        ("mixtral", "dp=1", torch.zeros(*SHAPE, 1, dtype=torch.long), "0 calls of topk"),
        ("mixtral", "dp=1 compile=true", torch.zeros(*SHAPE, 2, dtype=torch.long), "compile=true"),
        ("mixtral", "dp=1 compile=auto", torch.zeros(*SHAPE, 2, dtype=torch.long), "compile=auto"),
        ("shared", "dp=1", torch.zeros(*SHAPE[:2], 1, 2, dtype=torch.long), "cannot be replaced"),
        ("llama", "dp=1", torch.zeros(*SHAPE, 2, dtype=torch.long), "neither the model nor the loss"),
    ],
)
def test_choices_that_cannot_be_used_are_refused(
    pool: Pool, family: str, words: str, routing: Tensor, message: str
) -> None:
    (error,) = pool.run(given_choices.error_of, 1, family, words, {"routing": routing})
    assert message in error
