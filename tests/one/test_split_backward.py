"""Backward in halves: autograd's gradients, no weight's product before its time, what is held meanwhile."""

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.pytorch_utils import Conv1D

from plait.parallel.activation_checkpoint import COMPARED, recompute_blocks
from plait.parallel.pipeline.split_backward import BackwardSplitter, DeferredWeightGrads, split_linears
from support import hf_models, programs

LAYERS = {"llama": 15, "tied_llama": 15, "biased_llama": 15, "gpt2": 9, "falcon": 9, "opt": 15, "phi": 13}
BATCH = {key: values[:3] for key, values in programs.batches(1)[0].items()}


def _model(family: str) -> nn.Module:
    torch.manual_seed(0)
    return hf_models.model_of(family, on_meta=False).double().train()


def _loss(model: nn.Module) -> Tensor:
    return programs.summed_loss(model(BATCH["input_ids"], use_cache=False), BATCH)[0]


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found
    return found


def _add(parameter: Tensor, gradient: Tensor) -> None:
    assert (parameter.shape, parameter.dtype) == (gradient.shape, gradient.dtype)
    assert not gradient.requires_grad
    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient


def _in_halves(loss: Tensor, halves: BackwardSplitter) -> DeferredWeightGrads:
    with halves.deferring() as queued:
        torch.autograd.backward(loss)
    return queued


def _assert_same(found: nn.Module, expected: nn.Module) -> None:
    mine, theirs = _gradients(found), _gradients(expected)
    assert mine.keys() == theirs.keys()
    for name, gradient in theirs.items():
        torch.testing.assert_close(
            mine[name], gradient, rtol=1e-12, atol=1e-13, msg=lambda text, name=name: f"{name}: {text}"
        )


def _blocks(model: Any) -> list[nn.Module]:
    return next([*found] for found in model.modules() if isinstance(found, nn.ModuleList))


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("family", LAYERS)
def test_halves_give_autograds_gradients(family: str, recompute: str) -> None:
    plain, halves = _model(family), BackwardSplitter()
    split = copy.deepcopy(plain)
    assert split_linears([split], halves) == LAYERS[family]
    assert split_linears([split], halves) == 0  # they are split
    recompute_blocks(_blocks(split), recompute)
    _loss(plain).backward()
    for _ in range(2):
        split.zero_grad()
        queued = _in_halves(_loss(split), halves)
        assert sum(parameter.dim() == 2 for parameter in queued.parameters()) == LAYERS[family]
        queued.run(_add)
        _assert_same(split, plain)
    split.zero_grad()
    _loss(split).backward()  # whole
    _assert_same(split, plain)
    assert queued.parameters() == []


class _Products(TorchDispatchMode):
    """Counts matrix products; keeps track of all memory that operators take."""

    def __init__(self) -> None:
        super().__init__()
        self.num = 0
        self.taken: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func._schema.name in ("aten::mm", "aten::addmm")
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                self.taken[storage._cdata] = StorageWeakRef(storage)
        return out

    def alive(self) -> set[int]:
        """Storages that somebody holds."""
        return {key for key, reference in self.taken.items() if not reference.expired()}


@pytest.mark.parametrize(("recompute", "again"), [("none", 0), ("full", 1), ("selective", 0)])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_no_weights_product_is_computed_before_its_half(family: str, recompute: str, again: int) -> None:
    model, halves, layers = _model(family), BackwardSplitter(), LAYERS[family]
    split_linears([model], halves)
    recompute_blocks(_blocks(model), recompute)
    for _ in range(COMPARED):  # compares recomputed outputs, for which all products run again
        _loss(model).backward()
    loss = _loss(model)
    with _Products() as first:
        queued = _in_halves(loss, halves)
    with _Products() as second:
        queued.run(_add)
    assert (first.num, second.num) == (
        layers + again * (layers - 1),
        layers,
    )  # all but the head are in blocks
    loss = _loss(model)
    with _Products() as whole:
        loss.backward()
    assert whole.num == first.num + second.num


@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_inputs_and_output_gradients_are_held_between_the_halves_and_nothing_else(
    family: str, recompute: str
) -> None:
    model, halves = _model(family), BackwardSplitter()
    split_linears([model], halves)
    recompute_blocks(_blocks(model), recompute)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # taken before
    with _Products() as products:
        queued = _in_halves(_loss(model), halves)
        operands = (operand for _, _, operands in queued._grads for operand in operands)
        own = {t.untyped_storage()._cdata for t in operands if isinstance(t, Tensor)}
        gradients = {p.grad.untyped_storage()._cdata for p in model.parameters() if p.grad is not None}
        given = [*model.parameters(), *model.buffers(), *BATCH.values()]
        weights = {tensor.untyped_storage()._cdata for tensor in given}
        assert not own & weights
        assert products.alive() - gradients - weights == own
        queued.run(_drop)
        assert products.alive() <= gradients | weights


def _drop(_: Tensor, __: Tensor) -> None:
    """Return the gradients without keeping them."""


def test_the_second_half_needs_no_weights() -> None:
    """ZeRO-3 frees a unit's weights after its block's backward."""
    plain, halves = _model("llama"), BackwardSplitter()
    split = copy.deepcopy(plain)
    split_linears([split], halves)
    _loss(plain).backward()
    queued = _in_halves(_loss(split), halves)
    for parameter in split.parameters():
        parameter.data = torch.full((), torch.nan, dtype=torch.float64).expand(parameter.shape)
    queued.run(_add)
    _assert_same(split, plain)


# --- single layers


def _layer(kind: str, bias: bool, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(1)
    layer = Conv1D(7, 5) if kind == "conv1d" else nn.Linear(5, 7, bias=bias)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer.to(dtype)


Case = Callable[[nn.Module, Tensor], Tensor]


def _compare(
    layer: nn.Module, x: Tensor, use: Case, *, rtol: float = 1e-12, num_queued: int = 1
) -> dict[str, Tensor]:
    """A layer, whole and in halves; the gradients in halves, that of the input among them."""
    layer.zero_grad()
    halves, split = BackwardSplitter(), copy.deepcopy(layer)
    assert split_linears([split], halves) == 1
    found = []
    for module in (layer, split):
        given = x.detach().clone().requires_grad_(x.requires_grad)
        out = use(module, given)
        loss = (out * torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)).sum()
        if module is layer:
            loss.backward()
        else:
            queued = _in_halves(loss, halves)
            trainable = [parameter for parameter in split.parameters() if parameter.requires_grad]
            assert len(queued.parameters()) == num_queued * len(trainable)
            queued.run(_add)
        gradients = {name: p.grad for name, p in module.named_parameters()}
        found.append((out, {**gradients, "input": given.grad}))
    (out, whole), (half_out, in_halves) = found
    torch.testing.assert_close(half_out, out, rtol=rtol, atol=rtol)
    assert whole.keys() == in_halves.keys()
    for name, gradient in whole.items():
        assert (gradient is None) == (in_halves[name] is None), name
        if gradient is not None:
            torch.testing.assert_close(
                in_halves[name], gradient, rtol=rtol, atol=rtol, msg=lambda text, name=name: f"{name}: {text}"
            )
    return {name: gradient for name, gradient in in_halves.items() if gradient is not None}


def _call(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 3, 5), (2, 3, 2, 5), (0, 5), (2, 0, 5)], ids=str)
@pytest.mark.parametrize("kind", ["linear", "linear without bias", "conv1d"])
def test_inputs_of_all_dims_are_split(kind: str, shape: tuple[int, ...]) -> None:
    layer = _layer(kind, kind == "linear", torch.float64)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    found = _compare(layer, x, _call)
    assert found.keys() == {"input", *dict(layer.named_parameters())}


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_strided_inputs_and_expanded_gradients_are_split(kind: str) -> None:
    layer = _layer(kind, True, torch.float64)
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    if kind == "linear":
        _compare(layer, x, lambda module, x: module(x.transpose(1, 2)))
    _compare(layer, x, lambda module, x: module(x.transpose(1, 2).contiguous()).sum((0, 1)))


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
@pytest.mark.parametrize("frozen", ["weight", "bias", "weight bias", "input", "input bias", "input weight"])
def test_frozen_weights_get_no_gradient(kind: str, frozen: str) -> None:
    layer = _layer(kind, True, torch.float64)
    for name, parameter in layer.named_parameters():
        parameter.requires_grad = name not in frozen
    x = torch.randn(4, 5, dtype=torch.float64, requires_grad="input" not in frozen)
    num_queued = 0 if frozen == "weight bias" else 1
    assert set(_compare(layer, x, _call, num_queued=num_queued)) == {"weight", "bias", "input"} - {
        *frozen.split()
    }


def test_a_weight_that_is_used_twice_is_delivered_twice() -> None:
    def use(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(F.pad(layer(x).tanh(), (0, -2)))

    _compare(
        _layer("linear", True, torch.float64),
        torch.randn(3, 5, dtype=torch.float64, requires_grad=True),
        use,
        num_queued=2,
    )
    _compare(
        _layer("linear", True, torch.float64),
        torch.randn(3, 5, dtype=torch.float64, requires_grad=True),
        lambda layer, x: layer(x) @ layer.weight,  # and by somebody else, in the first half
    )


@pytest.mark.parametrize("kind", ["linear", "conv1d"])
def test_bf16_layers_are_split(kind: str) -> None:
    layer = _layer(kind, True, torch.bfloat16)
    found = _compare(layer, torch.randn(2, 3, 5).to(torch.bfloat16).requires_grad_(), _call, rtol=2e-2)
    assert {gradient.dtype for gradient in found.values()} == {torch.bfloat16}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["linear", "linear without bias", "conv1d"])
def test_autocast_does_to_split_layers_what_it_does_to_others(kind: str, dtype: torch.dtype) -> None:
    def use(layer: nn.Module, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(x)
            assert out.dtype == (torch.float64 if dtype is torch.float64 else torch.bfloat16)
            # Somebody else reads the weight as autocast gives it, and gets its gradient.
            return out + x.sum() * F.linear(out.new_ones(layer.weight.shape[1]), layer.weight).sum()

    layer = _layer(kind, kind == "linear", dtype)
    found = _compare(layer, torch.randn(2, 3, 5, dtype=dtype, requires_grad=True), use, rtol=2e-2)
    assert {gradient.dtype for gradient in found.values()} == {dtype}


def test_a_weight_that_is_computed_gets_its_gradient_in_the_first_half() -> None:
    layer = _layer("linear", True, torch.float64)
    nn.utils.parametrizations.weight_norm(layer)
    found = _compare(layer, torch.randn(3, 5, dtype=torch.float64, requires_grad=True), _call, num_queued=0)
    assert len(found) == 4


# --- modules


def test_layers_read_the_parameters_that_their_module_has_now() -> None:
    halves, layer = BackwardSplitter(), _layer("linear", True, torch.float64)
    split_linears([layer], halves)
    other = copy.deepcopy(layer)
    layer._parameters["weight"] = nn.Parameter(torch.zeros(7, 5, dtype=torch.float64))
    x = torch.ones(2, 5, dtype=torch.float64)
    assert torch.equal(layer(x), layer.bias.expand(2, 7))
    delivered: Counter[int] = Counter()
    for module in (layer, other):
        queued = _in_halves(module(x).sum(), halves)
        queued.run(lambda parameter, _: delivered.update([id(parameter)]))
        assert delivered == Counter([id(module.weight), id(module.bias)])
        delivered.clear()


def test_hooks_of_parameters_run_with_a_gradient_also_in_halves() -> None:
    """Layers with such hooks are not split."""
    halves, layer = BackwardSplitter(), _layer("linear", True, torch.float64)
    split_linears([layer], halves)
    seen: list[Tensor | None] = []
    layer.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad))
    x = torch.ones(2, 5, dtype=torch.float64)
    for run in (Tensor.backward, lambda loss: _in_halves(loss, halves)):
        layer.weight.grad = None
        run(layer(x).sum())
        assert torch.equal(seen.pop(), torch.full((7, 5), 2.0, dtype=torch.float64))
        assert not seen


class _Force(torch.autograd.Function):
    """The sum of a layer's squares, whose backward asks for gradients again: of the input and the bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Linear) -> Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        return layer(x).square().sum()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy = ctx.layer(x).square().sum()
            [force, _] = torch.autograd.grad(energy, [x, ctx.layer.bias])
        return dy * force, None


def test_gradients_that_an_inner_backward_asks_for_are_not_those_of_weights() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.inner = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            force: Tensor = _Force.apply(self.first(x), self.inner)
            return force + self.inner(x).sum()

    plain, halves = Block().double(), BackwardSplitter()
    split, x = copy.deepcopy(plain), torch.randn(3, 4, dtype=torch.float64)
    split_linears([split], halves)
    plain(x).backward()
    _in_halves(split(x), halves).run(_add)
    _assert_same(split, plain)


def test_a_compiled_layer_is_not_split() -> None:
    halves, layer = BackwardSplitter(), _layer("linear", True, torch.float64)
    split_linears([layer], halves)
    compiled = torch.compile(nn.Sequential(layer), backend="aot_eager")
    assert _in_halves(compiled(torch.ones(2, 5, dtype=torch.float64)).sum(), halves).parameters() == []
    assert torch.equal(layer.weight.grad, torch.full((7, 5), 2.0, dtype=torch.float64))


def test_nothing_is_recorded_where_no_gradients_are() -> None:
    halves, layer = BackwardSplitter(), _layer("linear", True, torch.float64)
    plain = copy.deepcopy(layer)
    split_linears([layer], halves)
    x = torch.randn(2, 5, dtype=torch.float64)
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert torch.equal(layer(input=x), plain(x))
    assert layer(x).requires_grad


def test_a_backward_that_fails_leaves_the_next_one_whole() -> None:
    halves, layer = BackwardSplitter(), _layer("linear", True, torch.float64)
    split_linears([layer], halves)
    with pytest.raises(ZeroDivisionError), halves.deferring():
        raise ZeroDivisionError
    with halves.deferring(), pytest.raises(AssertionError, match="within another"), halves.deferring():
        pass
    layer(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
    assert layer.weight.grad is not None


def test_gradients_of_gradients_are_torchs() -> None:
    plain = _layer("linear", True, torch.float64)
    layer = copy.deepcopy(plain)
    split_linears([layer], BackwardSplitter())
    for each in (plain, layer):
        x = torch.ones(2, 5, dtype=torch.float64, requires_grad=True)
        [gradient] = torch.autograd.grad(each(x).pow(3).sum(), x, create_graph=True)
        gradient.square().sum().backward()
    _assert_same(layer, plain)


def test_a_weights_gradient_of_a_cast_input_has_no_derivative() -> None:
    """The layer has saved the cast input: the derivative by the input would be lost."""
    layer, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    split_linears([layer], BackwardSplitter())
    with torch.autocast("cpu", torch.bfloat16):
        energy = layer(x).float().square().sum()
    force, of_weight = torch.autograd.grad(energy, [x, layer.weight], create_graph=True)
    force.square().sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="under autocast"):
        of_weight.square().sum().backward()
