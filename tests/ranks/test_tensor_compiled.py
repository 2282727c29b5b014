"""Compiled blocks on a tensor-parallel grid: one graph, the numbers of uncompiled ones, and errors that
name what cannot be compiled. C++ takes most of the time: one graph is compiled in it; all, in the sweep."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.errors import PlanError
from plait.parallel.compile import compile_blocks
from support import hf_models, programs
from support.compilers import compiles
from support.pool import Pool

HOWS = ("none", "full", "selective")
LAYERS, LENGTH = 3, 33  # an odd length: ranks have different numbers of tokens


def small_llama() -> nn.Module:
    torch.manual_seed(0)
    return programs.llama(on_meta=False, exact=False, layers=LAYERS)


def _trained(plan: str, steps: int = 2) -> tuple[list[float], dict[str, Tensor], dict[str, Tensor]]:
    """Losses and gradient norms, the last gradients, and the weights."""
    engine = plait.parallelize(small_llama(), plan, optimizer_args=programs.ADAMW, seed=3)
    ids = (torch.arange(4 * LENGTH) % programs.VOCABULARY).view(4, LENGTH)
    share = ids.chunk(engine.data_ranks)[engine.data_rank]
    results = [engine.step({"input_ids": share, "labels": share}) for _ in range(steps)]
    numbers = [number for result in results for number in (result.loss, result.grad_norm)]
    return numbers, engine.full_gradients(), engine.full_parameters()


def _compared(plans: list[str], in_cpp: bool) -> Any:
    """By plan: graphs that were compiled for it, graph breaks, and how far it is from its uncompiled run."""
    with compiles(in_cpp=in_cpp):
        compile_blocks([], torch.device("cpu"))  # its check compiles a graph
    torch._dynamo.reset()
    found = {}
    for plan in plans:
        counters = torch._dynamo.utils.counters
        counters.clear()
        with compiles(in_cpp=in_cpp):
            numbers, *tensors = _trained(f"{plan} compile=true")
        num_graphs, num_breaks = counters["stats"]["unique_graphs"], counters["graph_break"].total()
        plain, *expected = _trained(plan)
        gaps = [
            programs.largest_difference(mine, theirs)[0]
            for mine, theirs in zip(tensors, expected, strict=True)
            if mine  # rank 0 has them
        ]
        gaps += [abs(mine / theirs - 1) for mine, theirs in zip(numbers, plain, strict=True)]
        found[plan] = num_graphs, num_breaks, max(gaps)
    return found


@pytest.mark.parametrize(
    ("sp", "hows", "in_cpp"),
    [
        ("true", HOWS, False),
        ("true", ("none",), True),
        pytest.param("true", HOWS, True, marks=pytest.mark.sweep),
        pytest.param("false", HOWS, True, marks=pytest.mark.sweep),
    ],
)
def test_blocks_of_a_grid_share_one_graph_and_give_the_uncompiled_numbers(
    pool: Pool, sp: str, hows: tuple[str, ...], in_cpp: bool
) -> None:
    plans = [f"tp=2 sp={sp} recompute={how}" for how in hows]
    for found in pool.run(_compared, 2, plans, in_cpp, timeout_s=240.0):
        graphs = [num_graphs for num_graphs, _, _ in found.values()]
        assert max(graphs) == 1, found
        assert [num_breaks for _, num_breaks, _ in found.values()] == [0] * len(hows)
        assert max(gap for _, _, gap in found.values()) < 1e-5, found


@pytest.mark.parametrize("in_cpp", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_compiled_blocks_of_a_grid_train_the_same_with_sharded_parameters(pool: Pool, in_cpp: bool) -> None:
    plan = "dp=2 tp=2 sp=true zero=3 recompute=selective"
    for found in pool.run(_compared, 4, [plan], in_cpp, timeout_s=240.0):
        num_graphs, num_breaks, gap = found[plan]
        assert (num_graphs, num_breaks) == (1, 0)
        assert gap < 1e-5


# --- what cannot be compiled


def _refusal(options: dict[str, Any], plan: str) -> str:
    engine = plait.parallelize(hf_models.model_of("llama", exact=False, **options), plan)
    with pytest.raises(PlanError, match="cannot be compiled as one graph") as caught:
        engine.step(programs.share_of(programs.batches(1)[0], engine))
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "grid", "reason"),
    [
        ({}, "tp=2x1", "a norm over sharded features"),
        ({"attention_dropout": 0.1}, "tp=2 sp=true", "dropout on a tensor-parallel grid"),
    ],
)
def test_selective_recompute_of_a_block_that_is_no_single_graph_is_an_error(
    pool: Pool, options: dict[str, Any], grid: str, reason: str
) -> None:
    for text in pool.run(_refusal, 2, options, f"{grid} compile=true recompute=selective"):
        assert reason in text
        assert "LlamaDecoderLayer" in text
        assert "recompute=full" in text
