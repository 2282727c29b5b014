"""Compiled blocks: the numbers of uncompiled ones, storages that come and go, a missing compiler."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import plait
import programs
from plait.errors import PlanError
from plait.models import blocks_of, meta_twin, watch_saved
from plait.parallel import compile_blocks, recompute_blocks
from plait.parallel.compile import check_compiler

HOWS = ("none", "full", "every=2", "selective")
CPU = torch.device("cpu")


def small_llama() -> nn.Module:
    torch.manual_seed(0)
    return programs.llama(on_meta=False, exact=False)


def wrapped(how: str, *, compiled: bool = True) -> nn.Module:
    model = small_llama()
    blocks = [block for _, block in blocks_of(model)]
    recompute_blocks(blocks, how)
    if compiled:
        compile_blocks(blocks, CPU)
    return model


@pytest.mark.parametrize("how", HOWS)
def test_a_compiled_run_is_the_uncompiled_one(how: str) -> None:
    """And what it keeps for backward is counted in its first step, and no more than foretold."""

    def run(plan: str) -> tuple[list[float], dict[str, Tensor], plait.Engine]:
        engine = plait.parallelize(small_llama(), plan, optimizer_args=programs.ADAMW, seed=3)
        losses = [engine.step(programs.batches(1)[0]).loss]
        return losses, engine.whole_gradients(), engine

    losses, gradients, _ = run(f"micro=2 recompute={how}")
    found_losses, found, engine = run(f"micro=2 recompute={how} compile=true")
    assert found_losses == pytest.approx(losses, rel=1e-6)
    difference, name = programs.largest_difference(found, gradients)
    assert difference < 1e-6, name
    foretold = engine.predicted_memory((programs.SEQUENCES // 2, programs.LENGTH)).activations
    measured = engine.memory().activations
    assert measured is not None
    assert foretold is not None
    assert 0 < measured <= 1.02 * foretold
    if how == "full":
        assert measured >= 0.98 * foretold


@pytest.mark.parametrize("how", ["none", "full", "selective"])
def test_storages_may_be_freed_between_forward_and_backward(how: str) -> None:
    """As ZeRO-3 does around a block's forward and backward: the views stay, their bytes come and go."""
    x, arguments = torch.randn(2, 8, 32), {"position_embeddings": (torch.ones(1, 8, 8), torch.zeros(1, 8, 8))}

    def gradients(block: nn.Module, flat: Tensor | None) -> list[Tensor]:
        out = block(x, **arguments).square().sum()
        if flat is not None:
            values = flat.clone()
            flat.untyped_storage().resize_(0)
            flat.untyped_storage().resize_(values.nbytes)
            flat.fill_(torch.nan)
            flat.copy_(values)
        return list(torch.autograd.grad(out, list(block.parameters())))

    plain = gradients(blocks_of(small_llama())[0][1], None)
    block = blocks_of(wrapped(how))[0][1]
    parameters = list(block.parameters())
    flat = torch.cat([parameter.detach().flatten() for parameter in parameters])
    pieces = flat.split([parameter.numel() for parameter in parameters])
    for parameter, piece in zip(parameters, pieces, strict=True):
        parameter.data = piece.view_as(parameter)
    for _ in range(2):
        for mine, theirs in zip(gradients(block, flat), plain, strict=True):
            assert (mine - theirs).abs().max() <= 1e-6 * theirs.abs().max()


@pytest.mark.parametrize("how", ["none", "full", "selective"])
def test_hooks_stay_outside_of_what_is_compiled(how: str) -> None:
    model, calls = wrapped(how), []
    for number, (_, block) in enumerate(blocks_of(model)):
        block.register_forward_pre_hook(lambda *_, number=number: calls.append(number))
    for _ in range(2):
        model(torch.zeros(2, 8, dtype=torch.long), use_cache=False).logits.sum().backward()
    assert calls == [0, 1, 0, 1]


def test_blocks_of_one_kind_share_what_is_compiled() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = wrapped("none")
    ids = torch.zeros(2, 8, dtype=torch.long)
    with watch_saved(model) as watch:  # as in an engine's first step, but not in its others
        model(ids, use_cache=False).logits.sum().backward()
    model(ids, use_cache=False).logits.sum().backward()
    assert watch.total > 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("how", HOWS)
def test_a_copy_runs_uncompiled_with_its_own_parameters(how: str) -> None:
    model = wrapped(how)
    twin = copy.deepcopy(model)
    ids = torch.zeros(2, 8, dtype=torch.long)
    expected = wrapped(how, compiled=False)(ids, use_cache=False).logits
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(twin(ids, use_cache=False).logits, expected)
    assert all(parameter.is_meta for parameter in meta_twin(model).parameters())


def test_a_missing_compiler_is_a_letter_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_compiler.cache_clear()
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", (None, str(tmp_path / "g++")))
    with pytest.raises(PlanError, match="needs a C\\+\\+ compiler") as caught:
        plait.parallelize(small_llama(), "compile=true")
    assert caught.value.hint == "compile=false"


def test_compile_without_blocks_is_a_letter() -> None:
    with pytest.raises(PlanError, match="none were found"):
        plait.parallelize(nn.Linear(2, 2), "compile=true", loss=lambda *_: (torch.zeros(()), 1))
