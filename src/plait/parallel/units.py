"""Units: parameters that are communicated together, in one flat storage that is also the message.

[Note: the storages of a unit, whose they are and how long they live]
`master`    the weights that the optimizer updates, in float32 (float64 for fp64). Lives as long as the
            unit. Initial weights are written here, in full precision.
`storage`   what the model computes with: the parameters are views of it. The same tensor as `master`
            unless the plan computes in bf16; then `publish` rounds master into it after each update.
`gradient`  the sum of this step's gradients, in master's dtype. Lives as long as the unit, but has
            meaning only from the first gradient of a step until `reset`: nothing zeroes it, because the
            first gradient of each parameter overwrites its piece and only later ones are added.
`incoming`  where hooks put gradients: `gradient` itself, or a storage in the compute dtype when that is what
            travels (see [Note: narrow tensors on the wire ...] in `comm/verbs.py`) and each parameter
            gives one gradient a step.
The gaps between pieces (see `plan/layout.py`) are zero in all of them and stay so.

[Note: why gradients are taken over in hooks]
Autograd hands a parameter's gradient over in the compute dtype, in a tensor of its own. A hook that
runs right after copies (first micro-batch) or adds (later ones) it into `gradient`, in float32, and
drops the tensor. One pass over memory, which is also the conversion. Letting autograd accumulate
into views of the flat storage instead would cost a zero-fill, a read and an add, and would sum bf16
gradients in bf16.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor, nn

from plait.plan import Layout, Piece, Plan, UnitLayout


@dataclass(frozen=True)
class Precision:
    """What parameters are computed in, and what master weights, gradients and optimizer state are kept in."""

    compute: torch.dtype
    master: torch.dtype

    @classmethod
    def of(cls, plan: Plan) -> "Precision":
        return {
            "fp64": cls(torch.float64, torch.float64),
            "fp32": cls(torch.float32, torch.float32),
            "bf16": cls(torch.bfloat16, torch.float32),
        }[plan.precision]


class UnitState(Enum):
    """Where a unit's gradient stands in a step."""

    IDLE = auto()  # no gradient of this step yet
    FILLING = auto()  # some gradients are in
    REDUCING = auto()  # the reduction reads and writes `gradient`
    REDUCED = auto()  # `gradient` holds the sum over data ranks


_MOVES = {
    UnitState.IDLE: {UnitState.FILLING, UnitState.REDUCING},
    UnitState.FILLING: {UnitState.REDUCING},
    UnitState.REDUCING: {UnitState.REDUCED},
    UnitState.REDUCED: set[UnitState](),
}


class Unit:
    """One flat storage, its parameters and their gradient. See [Note: the storages of a unit ...]."""

    def __init__(self, layout: UnitLayout, precision: Precision, device: torch.device) -> None:
        self.layout = layout
        self.master = torch.zeros(layout.numel, dtype=precision.master, device=device)
        self.gradient = self.incoming = torch.zeros_like(self.master)
        self.storage = self.master
        if precision.compute != precision.master:
            self.storage = torch.zeros(layout.numel, dtype=precision.compute, device=device)
        self.state = UnitState.IDLE
        # Called when every parameter has given its gradient in a micro-batch.
        self.on_complete: Callable[[Unit], None] = _ignore
        self._gradients = self.pieces_of(self.gradient)
        self._written = [False] * len(layout.pieces)  # this step: the piece holds a gradient
        self._arrived = [False] * len(layout.pieces)  # this micro-batch: it has come
        self._parameters: list[nn.Parameter] = []

    def keep_incoming_narrow(self) -> None:
        """From now on gradients come in, once per step each, in the compute dtype."""
        self.incoming = torch.zeros_like(self.storage)
        self._gradients = self.pieces_of(self.incoming)

    def pieces_of(self, flat: Tensor) -> list[Tensor]:
        """Views of a tensor that is laid out like the storage, one per piece, each in its box's shape."""
        return [flat[p.start : p.stop].view(p.box.shape) for p in self.layout.pieces]

    def named(self, flat: Tensor) -> Iterator[tuple[Piece, Tensor]]:
        """The pieces with their views of a tensor that is laid out like the storage."""
        return zip(self.layout.pieces, self.pieces_of(flat), strict=True)

    def adopt(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Makes the parameters views of `master`, keeping their values if they have any (meta has none)."""
        for piece, view in self.named(self.master):
            parameter = parameters[piece.name]
            if not parameter.is_meta:
                view.copy_(parameter.detach())
        self._parameters = [_rebound(parameters[piece.name], view) for piece, view in self.named(self.master)]
        for index, parameter in enumerate(self._parameters):
            parameter.register_post_accumulate_grad_hook(self._taker(index))

    def compute_with_storage(self) -> None:
        """From now on the parameters are views of `storage`, which holds what `master` holds."""
        for parameter, view in zip(self._parameters, self.pieces_of(self.storage), strict=True):
            parameter.data = view
        self.publish()

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        names = (piece.name for piece in self.layout.pieces)
        return dict(zip(names, self._parameters, strict=True))

    def publish(self) -> None:
        """Lets the model see the updated master weights."""
        if self.storage is not self.master:
            self.storage.copy_(self.master)

    def move(self, state: UnitState) -> None:
        """The only place where the state changes, but for `reset`."""
        assert state in _MOVES[self.state], (
            f"unit {self.layout.name}: from {self.state.name} to {state.name}: a gradient came after its "
            "reduction began, or a reduction began twice"
        )
        self.state = state

    def begin_micro(self) -> None:
        """A micro-batch's backward is about to run: no parameter has given its gradient yet."""
        self._arrived = [False] * len(self._arrived)

    def zero_missing(self) -> None:
        """Zeroes the pieces whose parameters gave no gradient in this step."""
        for index, written in enumerate(self._written):
            if not written:
                self._gradients[index].zero_()

    def reset(self) -> None:
        """The step is over: `gradient` keeps its values, but the next step will overwrite them."""
        self.state = UnitState.IDLE
        self._written = [False] * len(self._written)

    def _taker(self, index: int) -> Callable[[Tensor], None]:
        return lambda parameter: self._take(index, parameter)

    def _take(self, index: int, parameter: Tensor) -> None:
        """See [Note: why gradients are taken over in hooks]."""
        if self.state is not UnitState.FILLING:
            self.move(UnitState.FILLING)
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None, f"unit {self.layout.name}: a hook without a gradient"
        if self._written[index]:
            self._gradients[index].add_(gradient)
        else:
            self._gradients[index].copy_(gradient)
        self._written[index] = self._arrived[index] = True
        if all(self._arrived):
            self.on_complete(self)


def make_units(model: nn.Module, layout: Layout, precision: Precision, device: torch.device) -> list[Unit]:
    """Moves the model's trainable parameters into units. `model`'s parameters become new objects.

    On return they are views of `master`: give them values, then call `compute_with_storage`. Tied
    parameters stay tied. Frozen parameters get a tensor of their own in the compute dtype.
    """
    old = dict(model.named_parameters())
    units = [Unit(unit, precision, device) for unit in layout.units]
    new: dict[int, nn.Parameter] = {}
    for unit in units:
        unit.adopt(old)
        new |= {id(old[name]): parameter for name, parameter in unit.parameters.items()}
    for parameter in old.values():
        if id(parameter) not in new:
            new[id(parameter)] = _frozen(parameter, precision.compute, device)
    for module in model.modules():
        for key, held in module._parameters.items():
            if held is not None:
                module._parameters[key] = new[id(held)]
    return units


def _rebound(old: nn.Parameter, view: Tensor) -> nn.Parameter:
    new = nn.Parameter(view)
    new.__dict__.update(old.__dict__)  # marks that libraries leave on parameters
    return new


def _frozen(old: nn.Parameter, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    values = torch.empty_like(old, device=device) if old.is_meta else old.detach().to(device)
    return nn.Parameter(values.to(dtype if values.is_floating_point() else values.dtype), requires_grad=False)


def _ignore(unit: Unit) -> None:
    """Nobody waits for this unit's gradient yet."""
