"""Compiled blocks: the numbers of uncompiled ones, storages that come and go, code that cannot be compiled, a
missing compiler, the order of collectives."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.errors import PlanError
from plait.models import blocks_of, copy_to_meta, watch_activations
from plait.parallel.activation_checkpoint import recompute_blocks
from plait.parallel.compile import check_compiler, compile_blocks
from plait.parallel.tensor.operators import CollectivesInOrder
from support import programs
from support.compilers import compiles

HOWS = ("none", "full", "every=2", "selective")
IN_CPP = pytest.mark.parametrize("in_cpp", [False, pytest.param(True, marks=pytest.mark.sweep)])
CPU = torch.device("cpu")
# One shape in all tests, so that compiled code is found again on disk; large next to a random state's 5 kB,
# which a compiled graph keeps with its tensors.
IDS = (torch.arange(128) % programs.VOCABULARY).view(4, 32)


def small_llama() -> nn.Module:
    torch.manual_seed(0)
    return programs.llama(on_meta=False, exact=False)


def wrapped(how: str, *, compiled: bool = True, in_cpp: bool = False) -> nn.Module:
    model = small_llama()
    blocks = [block for _, block in blocks_of(model)]
    if compiled:
        with compiles(in_cpp=in_cpp):
            compile_blocks(blocks, CPU, selective=how == "selective")
    if not (compiled and how == "selective"):
        recompute_blocks(blocks, how)
    return model


@pytest.mark.parametrize(
    ("how", "in_cpp"),
    [
        ("none", True),
        ("selective", True),
        *((how, False) for how in ("full", "every=2")),
        *(pytest.param(how, True, marks=pytest.mark.sweep) for how in ("full", "every=2")),
    ],
)
def test_a_compiled_run_is_the_uncompiled_one(how: str, in_cpp: bool) -> None:
    """And what it keeps for backward is counted in its first step, and no more than estimated."""

    def run(plan: str) -> tuple[float, dict[str, Tensor], plait.Engine]:
        with compiles(in_cpp=in_cpp):
            engine = plait.parallelize(small_llama(), plan, optimizer_args=programs.ADAMW, seed=3)
            loss = engine.step({"input_ids": IDS, "labels": IDS}).loss
        return loss, engine.full_gradients(), engine

    loss, gradients, _ = run(f"recompute={how}")
    found_loss, found, engine = run(f"recompute={how} compile=true")
    assert found_loss == pytest.approx(loss, rel=1e-6)
    difference, name = programs.largest_difference(found, gradients)
    assert difference < 1e-6, name
    estimated = engine.estimated_memory((4, 32)).activations
    measured = engine.memory().activations
    assert measured is not None
    assert estimated is not None
    assert 0 < measured <= 1.02 * estimated
    if how == "full":
        assert measured >= 0.98 * estimated


@pytest.mark.parametrize(
    ("how", "in_cpp"),
    [
        ("none", True),
        *((how, False) for how in ("full", "selective")),
        *(pytest.param(how, True, marks=pytest.mark.sweep) for how in ("full", "selective")),
    ],
)
def test_storages_may_be_freed_between_forward_and_backward(how: str, in_cpp: bool) -> None:
    """As ZeRO-3 does around a block's forward and backward: the views stay, their bytes come and go."""

    def gradients(model: nn.Module, flat: Tensor | None) -> list[Tensor]:
        out = model(IDS, use_cache=False).logits.square().sum()
        if flat is not None:
            values = flat.clone()
            flat.untyped_storage().resize_(0)
            flat.untyped_storage().resize_(values.nbytes)
            flat.fill_(torch.nan)
            flat.copy_(values)
        return list(torch.autograd.grad(out, list(model.parameters())))

    plain = gradients(small_llama(), None)
    model = wrapped(how, in_cpp=in_cpp)
    parameters = [parameter for _, block in blocks_of(model) for parameter in block.parameters()]
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    pieces = flat.split([parameter.numel() for parameter in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.data = piece.view_as(parameter)
    for _ in range(2):
        for mine, theirs in zip(gradients(model, flat), plain, strict=True):
            assert (mine - theirs).abs().max() <= 1e-6 * theirs.abs().max()


@IN_CPP
@pytest.mark.parametrize("how", ["none", "full", "selective"])
def test_hooks_stay_outside_of_compiled_code(how: str, in_cpp: bool) -> None:
    model, calls = wrapped(how, in_cpp=in_cpp), []
    for number, (_, block) in enumerate(blocks_of(model)):
        block.register_forward_pre_hook(lambda *_, number=number: calls.append(number))
    for _ in range(2):
        model(IDS, use_cache=False).logits.sum().backward()
    assert calls == [0, 1, 0, 1]


@IN_CPP
@pytest.mark.parametrize("how", ["none", "selective"])
def test_blocks_of_one_kind_share_compiled_code(how: str, in_cpp: bool) -> None:
    model = wrapped(how, in_cpp=in_cpp)  # may compile a graph to check the compiler
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with watch_activations(model) as watch:  # as in an engine's first step, but not in its others
        model(IDS, use_cache=False).logits.sum().backward()
    model(IDS, use_cache=False).logits.sum().backward()
    assert watch.total > 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@IN_CPP
@pytest.mark.parametrize("how", HOWS)
def test_a_copy_runs_uncompiled_with_its_own_parameters(how: str, in_cpp: bool) -> None:
    model = wrapped(how, in_cpp=in_cpp)
    copied = copy.deepcopy(model)
    expected = wrapped(how, compiled=False)(IDS, use_cache=False).logits
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(copied(IDS, use_cache=False).logits, expected)
    assert all(parameter.is_meta for parameter in copy_to_meta(model).parameters())


def test_a_missing_compiler_is_an_error_before_training(tmp_path: Path) -> None:
    check_compiler.cache_clear()
    without = torch._inductor.config.patch({"cpp.cxx": (None, str(tmp_path / "g++"))})
    with without, pytest.raises(PlanError, match="needs a working C\\+\\+ compiler") as caught:
        plait.parallelize(small_llama(), "compile=true")
    assert caught.value.hint == "compile=false"


def test_compile_without_blocks_is_an_error() -> None:
    with pytest.raises(PlanError, match="the model has none"):
        plait.parallelize(nn.Linear(2, 2), "compile=true", loss=lambda *_: (torch.zeros(()), 1))


# --- code that cannot be compiled


class Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        torch._dynamo.graph_break()
        return y.tanh()


def test_a_block_that_is_compiled_in_parts_is_reported_once() -> None:
    model = nn.Sequential(Untraceable(), Untraceable())
    compile_blocks(list(model), CPU)
    with pytest.warns(UserWarning, match="Untraceable is compiled in parts only") as found:
        model(model(torch.ones(3, 4))).sum().backward()
    assert "User-inserted graph break" in str(found[0].message)
    assert len(found) == 1


def test_selective_recompute_of_a_block_that_cannot_be_compiled_as_a_whole_is_an_error() -> None:
    block = Untraceable()
    compile_blocks([block], CPU, selective=True)
    with pytest.raises(PlanError, match="Untraceable cannot be compiled as one graph") as caught:
        block(torch.ones(3, 4))
    assert "User-inserted graph break" in str(caught.value.given)
    assert "recompute=full" in str(caught.value.hint)


# --- collectives


def test_each_collective_of_a_graph_waits_for_the_one_before_it() -> None:
    """Two that do not depend on each other, one with several results, and another operator between them."""
    graph, x = torch.fx.Graph(), torch.ones(4)
    inputs = [graph.placeholder(name) for name in "ab"]
    for node in inputs:
        node.meta["val"] = x
    all_gather = torch.ops.plait.all_gather.default
    first = graph.call_function(all_gather, (inputs[0], "group", 2, "tokens"))
    graph.call_function(torch.ops.aten.sin.default, (inputs[1],))
    second = graph.call_function(all_gather, (inputs[0], "another group", 2, "tokens"))
    third = graph.call_function(all_gather, (inputs[1], "group", 2, "tokens"))
    for node, value in ((first, x), (second, [x]), (third, x)):
        node.meta["val"] = value
    CollectivesInOrder()(graph)
    graph.lint()
    assert "after" not in first.kwargs
    assert second.kwargs["after"] is first
    assert third.kwargs["after"].args == (second, 0)
