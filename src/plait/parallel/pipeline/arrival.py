"""Where a stage's autograd graph begins: tensors that have arrived, and the gradients that go back."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from plait.parallel.pipeline.parcel import Parcel


class Arrival:
    """What a stage was sent, as its forward may use it; afterwards the gradients that its sender waits for.

    [Note: arrivals are no leaves]
    A block may change its input in place (`x += ...`), which autograd forbids for leaves that need a
    gradient; in one process the input is the result of the block before. So it is a result here too: of a
    node that keeps the gradient which reaches it. Nothing has to be named to a backward as its input.
    """

    def __init__(self, parcel: Parcel, tensors: Sequence[Tensor]) -> None:
        """Under the grad mode of the forward: if gradients are not recorded, none are kept."""
        self._specs = parcel.grad_specs
        self._kept: list[Tensor | None] = [None] * len(self._specs)
        self._device = tensors[0].device if tensors else torch.device("cpu")
        self.tensors = list(tensors)  # for `unpack`; whoever has unpacked them need not keep the arrival's
        token = torch.empty(0, requires_grad=True)  # for autograd to record a node
        number = 0
        for place, spec in enumerate(parcel.specs):
            if spec.needs_grad:
                self.tensors[place] = _Arrive.apply(token, self._kept, number, tensors[place])
                number += 1

    def let_go(self) -> None:
        """Of the tensors: the graph holds what it needs."""
        self.tensors = []

    def take_gradients(self) -> list[Tensor]:
        """After backward: one for each of the parcel's `grad_specs`, zeros where nothing depended on the
        tensor. They are handed over: the next call gives zeros."""
        found = [
            kept if kept is not None else torch.zeros(spec.shape, dtype=spec.dtype, device=self._device)
            for kept, spec in zip(self._kept, self._specs, strict=True)
        ]
        self._kept[:] = [None] * len(self._kept)
        return found


class _Arrive(torch.autograd.Function):
    """See [Note: arrivals are no leaves]."""

    @staticmethod
    def forward(ctx: Any, _: Tensor, kept: list[Tensor | None], number: int, tensor: Tensor) -> Tensor:
        ctx.kept, ctx.number = kept, number
        return tensor.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None, None]:
        ctx.kept[ctx.number] = gradient
        return None, None, None, None
