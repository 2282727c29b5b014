"""Errors that no exception tells of, in gradients, norms and decay: each of them happened elsewhere.

The whole list, with the test of each entry, is in docs/reliability.md. Clipping is active, gradients
themselves are compared, and the optimizer is SGD: AdamW does not see a wrong scale.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from plait.parallel.zero.flat_param import FlatParam
from plait.parallel.zero.grad_reduce import ColumnGradReduce
from plait.plan import StageAssignment
from support import pipeline_faults, pipeline_models, programs, silent_error_models
from support.pool import Pool

SGD = {"optimizer": "SGD", "arguments": {"lr": 0.3, "weight_decay": 0.1}}


def _none(*_: Any) -> frozenset[str]:
    return frozenset()


MUTATIONS: dict[str, Any] = {  # what a test shows that it bites on
    "nothing": nullcontext,
    "parts are not summed": lambda: mock.patch.object(ColumnGradReduce, "reduce"),
    "copies count": lambda: mock.patch.object(FlatParam, "uncounted_grads", return_value=()),
    "tied copies count": lambda: mock.patch.object(StageAssignment, "counted_on_other_stage", _none),
    "others' squares are missing": lambda: pipeline_faults.muted("norm"),
}


def _train(task: programs.Task, plan: str, mutation: str) -> programs.Trace:
    patch: AbstractContextManager[Any] = MUTATIONS[mutation]()
    with patch:
        return programs.train_task(task, f"{plan} precision=fp64")


def _ours_and_the_oracles(
    pool: Pool, task: programs.Task, plan: str, ranks: int, mutation: str = "nothing", micros: int = 1
) -> tuple[list[programs.Trace], programs.Trace]:
    ours = pool.run(_train, ranks, task, plan, mutation)
    return ours, programs.one_process_task(task, ours[0].first_weights, micros)


# --- gradients of which every rank of a grid computes a part


@pytest.mark.parametrize(
    ("family", "plan", "ranks", "part"),
    [
        ("qwen3", "tp=2", 2, "q_norm.weight"),
        ("qwen3", "tp=2 sp=true", 2, "input_layernorm.weight"),
        ("biased_llama", "tp=2 sp=true", 2, "o_proj.bias"),
        ("gpt2", "tp=2 sp=true", 2, "ln_1.weight"),
        ("one_kv_llama", "tp=2", 2, "k_proj.weight"),
        ("qwen3", "pp=2 dp=2 tp=2 sp=true zero=1", 8, "k_norm.weight"),
    ],
)
def test_gradients_of_norms_sinks_and_biases_are_summed_over_tp(
    pool: Pool, family: str, plan: str, ranks: int, part: str
) -> None:
    """Megatron-LM#1446; AxoNN's biases: with and without sp, and not when the sum is left out."""
    task = silent_error_models.task(family, **SGD, steps=1)
    ours, oracle = _ours_and_the_oracles(pool, task, plan, ranks)
    silent_error_models.assert_each_same(ours[0].gradients[0], oracle.gradients[0])
    mutated = pool.run(_train, ranks, task, plan, "parts are not summed")[0].gradients[0]
    for name, theirs in oracle.gradients[0].items():
        if name.endswith(part):
            assert float((mutated[name] - theirs).abs().max()) > 0.05 * float(theirs.abs().max()), name


@pytest.mark.parametrize(
    ("plan", "ranks"), [("tp=2", 2), ("dp=2 tp=2 zero=3", 4), ("pp=2 dp=2 tp=2 zero=1", 8)]
)
def test_learned_sinks_and_their_part_of_the_norm_are_complete(pool: Pool, plan: str, ranks: int) -> None:
    """Megatron-LM#7452: sinks are cut by heads, and the norm counted those of the first rank alone."""
    ours, oracle = _ours_and_the_oracles(pool, silent_error_models.task("gpt_oss", **SGD), plan, ranks)
    for mine, theirs in zip(ours[0].gradients, oracle.gradients, strict=True):
        silent_error_models.assert_each_same(mine, theirs)
    assert ours[0].norms == pytest.approx(oracle.norms, rel=1e-10)
    squares = {name: float(g.square().sum()) for name, g in oracle.gradients[0].items()}
    assert sum(s for n, s in squares.items() if n.endswith("sinks")) > 1e-6 * sum(squares.values())


# --- the norm


@pytest.mark.parametrize(
    ("family", "plan", "ranks", "mutation"),
    [
        ("one_kv_llama", "tp=2", 2, "copies count"),
        ("qwen3", "tp=2 sp=true", 2, "copies count"),
        ("mixtral", "dp=2 tp=2 zero=1", 4, "copies count"),
        ("tied_llama", "pp=2", 2, "tied copies count"),
        ("llama", "pp=2 schedule=zb-h1", 2, "others' squares are missing"),
        ("mixtral", "pp=2 dp=2 tp=2 zero=3", 8, "copies count"),
        ("tied_llama", "pp=2 dp=2 tp=2 zero=1", 8, "tied copies count"),
    ],
)
def test_a_norm_counts_each_element_once_and_is_the_same_on_all_ranks(
    pool: Pool, family: str, plan: str, ranks: int, mutation: str
) -> None:
    """Megatron-LM PR #7228 (tied), PR #6470 and #5916 (experts), ROCm/TransformerEngine#715 (replicated)."""
    task = silent_error_models.task(family, **SGD)
    ours, oracle = _ours_and_the_oracles(pool, task, plan, ranks)
    assert all(norm > 2 * programs.CLIP for norm in oracle.norms), "clipping was not active"
    programs.assert_same(ours[0], oracle)
    assert all((trace.norms, trace.losses) == (ours[0].norms, ours[0].losses) for trace in ours)
    wrong = pool.run(_train, ranks, task, plan, mutation)[0]
    assert abs(wrong.norms[0] / oracle.norms[0] - 1) > 1e-6


# --- parameters that are easily left out


class _Turn(nn.Module):
    """A block with a scalar, and with a parameter that it does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(pipeline_models.WIDTH, pipeline_models.WIDTH)
        self.gate = nn.Parameter(torch.full((), 0.7))
        self.unused = nn.Parameter(torch.linspace(0.5, 1.5, 6).view(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gate * torch.tanh(self.linear(x))


def lonely(on_meta: bool = False) -> nn.Module:
    torch.manual_seed(7)
    return pipeline_models.Turns([_Turn() for _ in range(4)])


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [
        ("dp=3 zero=3", 3),
        ("pp=2 micro=2", 2),
        ("pp=2 dp=2 zero=2 micro=3", 4),
        ("pp=2 dp=2 zero=3 schedule=zbv", 4),
    ],
)
def test_unused_and_scalar_parameters_have_the_one_process_programs_gradients(
    pool: Pool, plan: str, ranks: int
) -> None:
    """A parameter without a gradient must not stall a bucket, nor leave its range unreduced."""
    task = programs.Task(lonely, **SGD, steps=2)
    ours, oracle = _ours_and_the_oracles(pool, task, plan, ranks)
    for mine, theirs in zip(ours[0].gradients, oracle.gradients, strict=True):
        silent_error_models.assert_each_same(mine, theirs)
        assert all(theirs[name].any() for name in theirs if name.endswith("gate"))
    silent_error_models.assert_each_same(ours[0].weights, oracle.weights)


# --- weight decay


def all_in_one(model: nn.Module) -> list[dict[str, Any]]:
    return [{"params": [p for p in model.parameters() if p.requires_grad]}]


@pytest.mark.parametrize(
    ("plan", "ranks"),
    [("dp=3 zero=1", 3), ("dp=2 tp=2 zero=3", 4), ("tp=2x2 sp=true", 4), ("pp=2 dp=2 tp=2 zero=2", 8)],
)
def test_weight_decay_applies_to_matrices_only_in_any_layout(pool: Pool, plan: str, ranks: int) -> None:
    """Flattened parameters have one dim, and the rule that spares what has one dim spares all or none."""
    decay = {"optimizer": "SGD", "arguments": {"lr": 0.5, "weight_decay": 0.5}, "clip_norm": 1e-6, "steps": 1}
    ours, oracle = _ours_and_the_oracles(pool, silent_error_models.task("biased_llama", **decay), plan, ranks)
    silent_error_models.assert_each_same(ours[0].weights, oracle.weights)
    for name, weight in ours[0].weights.items():  # of gradients next to nothing is left
        kept = 0.75 if weight.ndim == 2 else 1.0
        torch.testing.assert_close(weight, kept * ours[0].first_weights[name], rtol=0, atol=1e-5)
