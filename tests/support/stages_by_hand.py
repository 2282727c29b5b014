"""Run a model's stages one after the other in one process, passing activations and gradients by hand."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from plait.models import StageModule, blocks_of, forward_inputs, plan_stages, receiving, split_stage
from plait.plan.stages import StageAssignment

CPU = torch.device("cpu")

Batches = Sequence[Mapping[str, Tensor]]


def stages_of(model: nn.Module, num_stages: int, **options: Any) -> tuple[StageAssignment, list[StageModule]]:
    """Split a model into stages. `options`: `blocks` and `given`, to override the model's own; `batch`."""
    blocks = blocks_of(model, options.pop("blocks", None), options.get("batch"))
    cut = plan_stages(model, blocks, num_stages, **options)
    return cut, [split_stage(model, blocks, cut, stage, device=CPU) for stage in range(num_stages)]


def whole(model: nn.Module, batches: Batches, loss: Any) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Loss summed over batches, and its gradients."""
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        value = loss(model(**forward_inputs(model, batch)), batch)
        value.backward()
        total += value.detach()
    return total, _take_gradients(model)


def in_stages(
    model: nn.Module, stages: Sequence[StageModule], batches: Batches, loss: Any
) -> tuple[Tensor, dict[str, Tensor | None]]:
    """The same for its stages. Parameters shared by stages are one object here, so gradients add up."""
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for batch in batches:
        sent, received = forward(model, stages, batch)
        value = loss(sent[-1], batch)
        total += value.detach()
        sent[-1] = value
        received.append(None)
        for output, arrived in zip(reversed(sent), reversed(received), strict=True):
            backward(output, arrived)
    return total, _take_gradients(model)


def forward(
    model: nn.Module, stages: Sequence[StageModule], batch: Mapping[str, Tensor]
) -> tuple[list[Any], list[Any]]:
    """Outputs of all stages, and inputs of all but the first."""
    inputs = forward_inputs(model, batch)
    sent = [stages[0].module(**inputs)]
    stages[0].check_taint(sent[0])
    received = []
    for stage in stages[1:]:
        received.append(tree_map_only(Tensor, _arrived, sent[-1]))
        with receiving(stage.module, received[-1]):
            sent.append(stage.module(**inputs))
        stage.check_taint(sent[-1], received[-1])
    return sent, received


def backward(output: Any, arrived: Any) -> None:
    """Run backward from the gradients of the next stage's inputs; from the loss if `arrived` is None."""
    if arrived is None:
        output.backward()
        return
    pairs = zip(tree_leaves(output), tree_leaves(arrived), strict=True)
    known = [(o, a.grad) for o, a in pairs if isinstance(o, Tensor) and a.grad is not None]
    if known:
        torch.autograd.backward([o for o, _ in known], [gradient for _, gradient in known])


def _arrived(tensor: Tensor) -> Tensor:
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _take_gradients(model: nn.Module) -> dict[str, Tensor | None]:
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found


def max_difference(found: Mapping[str, Tensor | None], expected: Mapping[str, Tensor | None]) -> float:
    """Largest difference of two sets of gradients, relative to each one's largest element."""
    assert found.keys() == expected.keys()
    worst = 0.0
    for name, want in expected.items():
        have = found[name]
        assert (want is None) == (have is None), name
        if want is not None and have is not None and want.numel():
            assert torch.isfinite(have).all(), name
            worst = max(worst, float((have - want).abs().max() / want.abs().max().clamp(min=1e-30)))
    return worst
