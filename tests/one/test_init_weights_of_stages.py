"""First weights of one pipeline stage: the values of the whole model's, without drawing the other stages'."""

from collections.abc import Callable, Mapping, Set
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from plait.errors import ModelError
from plait.models import blocks_of, foreign_modules, initialize_weights, plan_stages, receiving, split_stage
from support import hf_models

CPU = torch.device("cpu")
SEED = 5


def drawn(model: nn.Module, skip: Set[nn.Module] = frozenset()) -> dict[str, Tensor]:
    values: dict[str, Tensor] = {}
    initialize_weights(model, SEED, CPU, lambda name, whole: values.update({name: whole.clone()}), skip=skip)
    return values


class Draws(TorchDispatchMode):
    """Counts the numbers that are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drawing = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)
        if func in drawing and not args[0].is_meta:
            self.count += args[0].numel()
        return func(*args, **(kwargs or {}))


def numbers_drawn(model: nn.Module, skip: Set[nn.Module] = frozenset()) -> int:
    with Draws() as draws:
        drawn(model, skip)
    return draws.count


@pytest.mark.parametrize("family", hf_models.CONFIGS)
def test_a_stage_draws_what_the_whole_model_draws_for_it(family: str) -> None:
    """And that is all it needs: on nothing else, it runs."""
    whole = drawn(hf_models.model_of(family, exact=False))
    output: Any = None
    for stage in range(2):
        model = hf_models.model_of(family, exact=False)
        blocks = blocks_of(model)
        cut = plan_stages(model, blocks, 2)
        values = drawn(model, foreign_modules(model, blocks, cut, stage))
        own = {name for name in whole if stage in cut.stages_with(name)}
        assert own <= values.keys()
        assert all(torch.equal(value, whole[name]) for name, value in values.items())
        shell = split_stage(model, blocks, cut, stage, device=CPU).module
        assert not any(buffer.is_meta for buffer in shell.buffers())
        fill(shell, {parameter: values[name] for name, parameter in shell.named_parameters()})
        with receiving(shell, output) if stage else nullcontext():
            output = shell(input_ids=torch.ones(2, 5, dtype=torch.long), use_cache=False)
    assert output.logits.isfinite().all()


def fill(shell: nn.Module, values: Mapping[nn.Parameter, Tensor]) -> None:
    for module in shell.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[key] = nn.Parameter(values[parameter])


def test_skipped_modules_cost_nothing() -> None:
    model = hf_models.model_of("llama", exact=False, num_hidden_layers=8, intermediate_size=300)
    blocks = [block for _, block in blocks_of(model)]
    every = numbers_drawn(model)
    block = sum(p.numel() for p in blocks[0].parameters() if p.ndim > 1)
    outside = sum(p.numel() for p in (model.model.embed_tokens.weight, model.lm_head.weight))
    assert every == 8 * block + outside
    cut = plan_stages(model, blocks_of(model), 4)
    foreign = foreign_modules(model, blocks_of(model), cut, 0)
    assert foreign == {*blocks[2:], model.lm_head, model.model.norm}
    assert numbers_drawn(model, foreign) == 2 * block + outside // 2


class Scaled(nn.Module):
    """Its root draws once more for some layers, how much depends on what the layer's own drawing marked."""

    def __init__(self, reach: Callable[[nn.Module], None], tie: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(Marked() for _ in range(3))
        self.last = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(3))
        self.reach = reach
        if tie:
            self.last.weight = self.layers[2].weight

    def reset_parameters(self) -> None:
        self.reach(self)
        nn.init.normal_(self.scale)


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.register_buffer("table", torch.ones(2))

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self.table.fill_(3.0)
        self.weight.is_drawn = True


def _nothing(model: nn.Module) -> None:
    """The layers' own values stay."""


def _again_unless_drawn(model: nn.Module) -> None:
    if not getattr(model.layers[1].weight, "is_drawn", False):
        nn.init.normal_(model.layers[1].weight)
    model.layers[1].weight.mul_(2.0)


def _all_by_the_first(model: nn.Module) -> None:
    for layer in model.layers:
        layer.weight.div_(model.layers[1].weight.abs().max())


REACHES = [_nothing, _again_unless_drawn, _all_by_the_first]


@pytest.mark.parametrize("reach", REACHES)
@pytest.mark.parametrize("tie", [False, True])
def test_a_container_that_writes_to_skipped_modules_gives_the_same_values(
    reach: Callable[[nn.Module], None], tie: bool
) -> None:
    def build() -> Any:
        with torch.device("meta"):
            return Scaled(reach, tie)

    whole = drawn(build())
    for own in range(3):
        model = build()
        values = drawn(model, {layer for number, layer in enumerate(model.layers) if number != own})
        expected = {"first.weight", "first.bias", "last.weight", "last.bias", "scale", f"layers.{own}.weight"}
        if tie:
            expected = (expected - {"last.weight"}) | {"layers.2.weight"}
        assert values.keys() == expected
        assert all(torch.equal(value, whole[name]) for name, value in values.items())
        assert torch.equal(model.layers[own].table, torch.full((2,), 3.0))


def test_a_skipped_module_need_not_know_how_to_begin() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.ParameterDict({"gate": nn.Parameter(torch.ones(2))}))
    assert drawn(model, {model[1]}).keys() == {"0.weight", "0.bias"}
    with pytest.raises(ModelError, match="without an initial value"):
        drawn(model, {model[0]})
