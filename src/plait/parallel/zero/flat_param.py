"""Units: parameters that are communicated together, in one flat storage that is also the message.

[Note: the storages of a unit, whose they are and how long they live]
`storage`   whole, in the dtype that the model computes in: the parameters are views of it. Up to stage 2
            it lives as long as the unit; at stage 3 its memory is taken for a gather and given back after
            use. The tensor and its views stay: autograd's saved weights find the new memory in the old
            tensor.
`piece`     the range of `storage` that this rank owns. Up to stage 2 a view of it, at stage 3 a tensor of
            its own, from which gathers start.
`master`    the same range in float32 (float64 for fp64): what the optimizer updates. The same tensor as
            `piece` where the dtypes are equal and neither is offloaded; else `publish` rounds it into
            `piece` after each update.
`incoming`  whole: where hooks put gradients and reductions read them. In the dtype in which they
            travel, or in master's where micro-batches add up in it. Its memory is taken for the first
            gradient and given back after the reduction, unless the stage keeps whole gradients.
`gradient`  the sum over data ranks of the range that this rank owns, in master's dtype; a view of
            `incoming` where that lives as long and has that dtype. Nothing zeroes it: a step's first sum
            overwrites it and only later ones are added.

[Note: memory that ranks share]
Where the ranks along `shard` can read and write each other's memory, `storage` is one memory for all of them,
of which each writes its range: what a gather would copy is there as soon as it is written, and each rank's
part of the memory is its range. Everybody reads it from the end of an update to the next one's beginning, and
the owners write it between: before the first write all have reduced their gradients' norm together, or met at
a barrier where weights are loaded; after the last they meet at one. `incoming`, and `gradient`, are lent by
the transport, which reads them where they lie.

[Note: gaps]
The gaps between pieces (see `plan/layout.py`) are zero in all storages and stay so. Frozen units have no
master, incoming and gradient.

[Note: why gradients are taken over in hooks]
Autograd hands a parameter's gradient over in the compute dtype, in a tensor of its own. A hook that
runs right after copies (first micro-batch) or adds (later ones) it into `incoming`, and drops the
tensor. One pass over memory, which is also the conversion. Letting autograd accumulate into views of
the flat storage instead would cost a zero-fill, a read and an add, and would sum bf16 gradients in
bf16.

[Note: gradients that are early]
A backward in halves computes what is no linear layer's (norms') in its first half. In `incoming` a few such
numbers would hold a whole unit's memory until the other half comes. Where that is not held anyway, they wait
with what that half computes, and are delivered in their turn.
"""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from plait.errors import ModelError
from plait.parallel.zero.grad_buffer import (
    ByteTracker,
    GradBuffer,
    GradientState,
    LeasedTensor,
    ResizableTensor,
)
from plait.parallel.zero.state_io import slice_boxes
from plait.plan import ParamShard, UnitLayout


class MasterMemory(Protocol):
    """Where master weights are kept."""

    def new(self, numel: int) -> Tensor:
        """Zeros for the master weights of a range."""

    def forget(self, master: Tensor) -> None:
        """They will not be read soon: if they are in a file, they need no memory."""


@dataclass(frozen=True)
class FlatParamConfig:
    """What of a unit is where: the plan's answer for one rank. Made by `zero.cut_of`."""

    rank: int  # coordinate on `shard`
    device: torch.device  # where the model computes
    home: torch.device  # where master weights, sums of gradients and optimizer states live
    offloads: bool  # `home` is not where the model computes, or not to be taken for it
    compute: torch.dtype
    master: torch.dtype
    incoming: torch.dtype
    whole_parameters: bool  # `storage` keeps its memory
    full_gradients: bool  # `incoming` keeps its memory
    masters: MasterMemory
    meter: ByteTracker  # of gathered parameters and travelling gradients
    # See [Note: memory that ranks share]. None: parameters are each rank's own.
    share: Callable[[int, torch.dtype], Tensor] | None
    lend: Callable[[int, torch.dtype], Tensor]  # memory from which gradients travel

    @property
    def has_masters(self) -> bool:
        return self.compute != self.master or (self.offloads and self.whole_parameters)


class FlatParam:
    """One flat storage, its parameters and their gradient. See [Note: the storages of a unit ...]."""

    def __init__(self, layout: UnitLayout, cut: FlatParamConfig) -> None:
        self.layout = layout
        self.cut = cut
        self.start, self.stop = layout.owned_range(cut.rank)
        if cut.share is None:
            storage = torch.zeros(layout.numel, dtype=cut.compute, device=cut.device)
        else:
            storage = cut.share(layout.numel, cut.compute)
        self.whole = ResizableTensor(storage, stays=cut.whole_parameters, meter=cut.meter)
        self.storage = self.whole.tensor
        if cut.whole_parameters:
            self.piece = self.storage[self.start : self.stop]
        else:
            self.piece = _zeros(layout.range_numel, cut.compute, cut.home)
        self.has_sum = False  # this step: `gradient` holds the sum of earlier reductions
        # Called when every parameter has given its gradient in a micro-batch.
        self.on_complete: list[Callable[[FlatParam], None]] = []
        # Called when a gradient comes although a reduction of the unit is under way: it has to land first.
        self.on_late: Callable[[FlatParam], None] = lambda _: None
        self.keep_early: Callable[[Tensor, Tensor], object] | None = None  # see [Note: gradients that ...]
        self._views = self.pieces_of(self.storage)
        self.whole.free()
        self._nan = torch.full((), math.nan, dtype=cut.compute, device=cut.device)
        self._hidden = False
        self._parameters: list[nn.Parameter] = []
        self._versions: list[int] = []  # of the parameters
        self.master = self.piece
        if layout.trains:
            self._make_training_storages(cut)

    def _make_training_storages(self, cut: FlatParamConfig) -> None:
        numel, range_numel = self.layout.numel, self.layout.range_numel
        if cut.has_masters:
            self.master = cut.masters.new(range_numel)
        memory = LeasedTensor(
            lambda: cut.lend(numel, cut.incoming), stays=cut.full_gradients, meter=cut.meter
        )
        self.incoming = GradBuffer(
            f"unit {self.layout.name}", memory, len(self.layout.params), self.pieces_of
        )
        if memory.tensor is not None and cut.incoming == cut.master and not cut.offloads:
            self.gradient = memory.tensor[self.start : self.stop]
        elif cut.offloads:
            self.gradient = _zeros(range_numel, cut.master, cut.home)
        else:
            self.gradient = cut.lend(range_numel, cut.master).zero_()
        self._expected: Counter[int] = Counter()  # what `deliver` will bring
        self._listens = False

    @property
    def trains(self) -> bool:
        return self.layout.trains

    def pieces_of(self, flat: Tensor) -> list[Tensor]:
        """Views of a tensor that is laid out like the storage, one per piece, each in its box's shape."""
        return [flat[p.start : p.stop].view(p.boxes.shape) for p in self.layout.params]

    def named(self, flat: Tensor) -> Iterator[tuple[ParamShard, Tensor]]:
        """The pieces with their views of a tensor that is laid out like the storage."""
        return zip(self.layout.params, self.pieces_of(flat), strict=True)

    # --- parameters

    def write(self, name: str, values: Tensor) -> None:
        """Sets the owned part of a parameter, of which `values` is the whole, in `master`."""
        for overlap in self.layout.overlaps(self.start, self.stop):
            if overlap.shard.name == name:
                held = slice_boxes(values.detach(), overlap.shard.boxes)
                part = held.reshape(-1)[overlap.start : overlap.stop]
                self.master[overlap.at : overlap.at + part.numel()].copy_(part)

    def adopt(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Makes parameters that are views of `storage`, with the marks that libraries left on old ones."""
        for piece, view in zip(self.layout.params, self._views, strict=True):
            new = nn.Parameter(view.new_empty(0), requires_grad=self.trains)
            new.data = view  # so it has a version of its own: gathers and updates do not count as edits
            new.__dict__.update(parameters[piece.name].__dict__)
            self._parameters.append(new)
        self._index_of = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        if self.trains:
            for index, parameter in enumerate(self._parameters):
                parameter.register_post_accumulate_grad_hook(self._taker(index))

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        names = (piece.name for piece in self.layout.params)
        return dict(zip(names, self._parameters, strict=True))

    def hide(self) -> None:
        """While no memory is behind `storage`, readers of parameters find NaN, not an invalid address."""
        if not self.whole.stays and not self._hidden:
            for parameter in self._parameters:
                parameter.data = self._nan.expand(parameter.shape)
            self._hidden = True

    def show(self) -> None:
        """The parameters are views of `storage` again. Raises ModelError when they were changed meanwhile."""
        if self._hidden:
            self.check_unchanged()
            for parameter, view in zip(self._parameters, self._views, strict=True):
                parameter.data = view
            self._hidden = False

    def publish(self) -> None:
        """Rounds the updated master weights into what the model computes with."""
        if self.master is not self.piece:
            self.piece.copy_(self.master)
            self.cut.masters.forget(self.master)

    def note_versions(self) -> None:
        """From now on `check_unchanged` finds edits."""
        self._versions = [parameter._version for parameter in self._parameters]

    def check_unchanged(self) -> None:
        """Raises ModelError when a parameter was changed behind our back: the change would be lost."""
        ours = (self._nan if self._hidden else self.storage).untyped_storage()._cdata
        for piece, p, version in zip(self.layout.params, self._parameters, self._versions, strict=True):
            if p._version != version or p.untyped_storage()._cdata != ours:
                raise changed_behind_our_back(piece.name)
            if p.requires_grad != self.trains:
                raise ModelError(
                    "whether a parameter trains was changed after parallelize",
                    given=f"{piece.name}.requires_grad = {p.requires_grad}",
                    hint="freeze before parallelize; what trains has an optimizer's state from then on",
                )

    # --- gradients

    def begin_micro(self) -> None:
        """A micro-batch's backward is about to run: no parameter has given its gradient yet."""
        self.incoming.begin()
        self._listens = True

    def end_micro(self) -> None:
        """Gradients that come now are not the engine's."""
        self._listens = False

    @property
    def is_complete(self) -> bool:
        """Every parameter has given its gradient in this micro-batch."""
        return self.incoming.is_complete

    def expect(self, parameter: Tensor) -> None:
        """One more `deliver` of a gradient of this parameter, of a backward's second half."""
        index = self._index_of[id(parameter)]
        self._expected[index] += 1
        self.incoming.expect_again(index)

    def deliver(self, parameter: Tensor, gradient: Tensor) -> None:
        """Adds what a backward's second half has computed."""
        index = self._index_of[id(parameter)]
        assert self._expected[index], f"unit {self.layout.name}: a gradient that was not expected"
        self._expected[index] -= 1
        self._add(index, gradient, last=not self._expected[index])

    def seal(self) -> Tensor:
        """No more gradients come: `incoming`, in which those that never came are zero."""
        self._hold_incoming()
        return self.incoming.seal()

    def landed(self) -> None:
        """The reduction is through: `gradient` holds its sum."""
        self.has_sum = True
        self.incoming.landed()

    def reset(self) -> None:
        """The step is over: `gradient` keeps its values, but the next step will overwrite them."""
        self._listens = False
        self.has_sum = False
        if self.trains:
            self._expected.clear()
            self.incoming.reset()

    def _hold_incoming(self) -> None:
        if self.incoming.hold():
            self.clear_gaps()

    def repeated_gradients(self) -> Iterator[Tensor]:
        """Runs of `gradient` that belong to pieces which another rank counts in norms."""
        for start, stop in self.layout.repeated:
            low, high = max(start, self.start), min(stop, self.stop)
            if low < high:
                yield self.gradient[low - self.start : high - self.start]

    def clear_gaps(self) -> None:
        """Zeroes what no parameter writes: a sum in blocks spreads a gradient's NaN over it."""
        if self.incoming.memory.tensor is not None:
            for start, stop in self.layout.gaps:
                self.incoming.memory.tensor[start:stop].zero_()

    def _taker(self, index: int) -> Callable[[Tensor], None]:
        """A hook that does not keep the unit: the collector does not see through a parameter's hooks."""
        unit = weakref.ref(self)

        def take(parameter: Tensor) -> None:
            if (found := unit()) is not None:
                found._take(index, parameter)

        return take

    def _take(self, index: int, parameter: Tensor) -> None:
        """See [Note: why gradients are taken over in hooks]."""
        if parameter.grad is None:
            return  # it comes with the second half of this backward
        self._check_expected(index, parameter)
        gradient, parameter.grad = parameter.grad, None
        if self.keep_early is not None:
            self.keep_early(parameter, gradient)
            self.incoming.arrive(index)
        else:
            self._add(index, gradient, last=True)

    def _add(self, index: int, gradient: Tensor, *, last: bool) -> None:
        """To `incoming`. `last`: of this parameter, in this backward."""
        incoming = self.incoming
        if incoming.state is GradientState.REDUCING:
            self.on_late(self)
        if incoming.state is not GradientState.FILLING:
            incoming.move(GradientState.FILLING)
            self._hold_incoming()
        if incoming.written[index]:
            incoming.views[index].add_(gradient)
        else:
            incoming.views[index].copy_(gradient)
        incoming.written[index] = True
        if last:
            incoming.arrive(index)
            if incoming.is_complete:
                for listener in self.on_complete:
                    listener(self)

    def _check_expected(self, index: int, parameter: Tensor) -> None:
        if self._listens and not self.incoming.has_arrived(index):
            return
        parameter.grad = None
        name = self.layout.params[index].name
        if not self._listens:
            raise ModelError(
                "a gradient came outside of the engine's backward",
                given=name,
                expected="engine.backward(loss, num_targets), and not loss.backward()",
                hint="torch.autograd.grad for gradients that are not to be trained on",
            )
        raise ModelError(
            "a parameter got two gradients in one backward",
            given=name,
            expected="one, into which autograd has added up all uses",
            hint="use_reentrant=False where the model checkpoints a module that it uses twice",
        )


def changed_behind_our_back(name: str) -> ModelError:
    """Somebody else wrote a parameter."""
    return ModelError(
        "a parameter was changed behind the engine's back",
        given=name,
        expected="weights that only the engine changes: its master weights know nothing of others",
        hint="load weights before parallelize, or with engine.load_state",
    )


def _zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    pin = device.type == "cpu" and torch.cuda.is_available()
    return torch.zeros(numel, dtype=dtype, device=device, pin_memory=pin)
