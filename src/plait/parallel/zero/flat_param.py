"""FlatParam: parameters that are communicated together (a unit), in one flat storage that is the message.

[Note: storages of a unit and their lifetimes]
`storage`      unsharded parameters, in the compute dtype; the model's parameters are views of it. The output
               of the all-gather. Up to stage 2 it is always allocated. At stage 3 `Unsharder` allocates it
               before the all-gather and frees it (`unsharded.free`) when the last use is over. Tensor and
               views survive: tensors that autograd saved see the new memory after the next unshard.
`shard`        the range of `storage` that this rank owns. Up to stage 2 a view of `storage`; at stage 3 a
               tensor of its own, the input of the all-gather.
`master`       main storage: the same range in float32 (float64 for fp64), which the optimizer updates. The
               same tensor as `shard` if the dtypes are equal and neither is offloaded; otherwise `write_back`
               rounds it into `shard` after each update.
`grad_buffer`  unsharded gradients: hooks write into it, the reduce-scatter reads it. In the dtype in which
               gradients are communicated, or in master's if micro-batches accumulate in it. Allocated for the
               first gradient and freed when the reduction has completed, unless the stage keeps unsharded
               gradients.
`grad_shard`   the sum over data ranks of the range that this rank owns, in master's dtype: the output of the
               reduce-scatter. A view of `grad_buffer` if that is persistent and has that dtype. Nothing
               zeroes it: a step's first reduction overwrites it, later ones add to it.

[Note: parameters in shared memory]
If the ranks along `shard` can access each other's memory, all of them share one `storage`, of which each
writes its range. No all-gather is needed: a range is visible to all as soon as it is written. All ranks read
it from the end of one update to the start of the next, and the owners write it in between. Before the first
write all ranks have reduced the gradient norm together, or met at a barrier if weights are loaded; after the
last write they meet at a barrier. `grad_buffer` and `grad_shard` are then allocated by the transport, which
reads them in place.

[Note: gaps]
The gaps between parameters (see `plan/layout.py`) are zero in all storages and stay zero. Frozen units have
no master, grad_buffer or grad_shard.

[Note: gradient accumulation in hooks]
Autograd produces a parameter's gradient in the compute dtype, in a tensor of its own. A hook that runs right
after copies it (first micro-batch) or adds it (later ones) to `grad_buffer` and drops the tensor: one pass
over memory, which is also the conversion. Letting autograd accumulate into views of the flat storage would
cost a zero-fill, a read and an add, and would sum bf16 gradients in bf16.

[Note: deferred early gradients]
The first half of a split backward (input gradients) also computes the gradients of parameters outside linear
layers (norms). Written to `grad_buffer` at once, these few numbers would keep a unit's full buffer allocated
until the second half (weight gradients). Unless it is persistent, they are queued with the deferred weight
gradients and accumulated together with them.
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
from plait.plan import UnitLayout
from plait.plan.layout import ParamShard


class MasterAllocator(Protocol):
    """Memory of master weights: on the device, on the host or in a file."""

    def allocate(self, numel: int) -> Tensor:
        """Return zeros for the master weights of a range."""

    def evict(self, master: Tensor) -> None:
        """Drop the weights' pages from memory if they are backed by a file."""


@dataclass(frozen=True)
class FlatParamConfig:
    """Placement and dtypes of all units' storages on one rank. Made by `flat_param_config`."""

    shard_rank: int  # coordinate on `shard`
    device: torch.device  # where the model computes
    state_device: torch.device  # where master weights, gradient shards and optimizer states are
    offloads: bool  # offload=cpu, also if the model itself computes on the CPU
    compute_dtype: torch.dtype
    master_dtype: torch.dtype
    grad_buffer_dtype: torch.dtype
    keeps_params_unsharded: bool  # `storage` is never freed
    keeps_grads_unsharded: bool  # `grad_buffer` is never freed
    master_allocator: MasterAllocator
    tracker: ByteTracker  # of unsharded parameters and gradients
    # See [Note: parameters in shared memory]. None: each rank has its own.
    allocate_shared: Callable[[int, torch.dtype], Tensor] | None
    allocate_grad: Callable[[int, torch.dtype], Tensor]  # memory from which the transport can send

    @property
    def has_masters(self) -> bool:
        return self.compute_dtype != self.master_dtype or (self.offloads and self.keeps_params_unsharded)


class FlatParam:
    """A unit: flat storage, parameters, gradient. See [Note: storages of a unit and their lifetimes].

    Holds no process group: `Unsharder` unshards and reshards it, `GradReducer` reduces its gradient.
    """

    def __init__(self, layout: UnitLayout, config: FlatParamConfig) -> None:
        self.layout = layout
        self.config = config
        self.start, self.stop = layout.owned_range(config.shard_rank)
        if config.allocate_shared is None:
            storage = torch.zeros(layout.numel, dtype=config.compute_dtype, device=config.device)
        else:
            storage = config.allocate_shared(layout.numel, config.compute_dtype)
        self.unsharded = ResizableTensor(
            storage, persistent=config.keeps_params_unsharded, tracker=config.tracker
        )
        self.storage = self.unsharded.tensor
        if config.keeps_params_unsharded:
            self.shard = self.storage[self.start : self.stop]
        else:
            self.shard = _zeros(layout.range_numel, config.compute_dtype, config.state_device)
        self.has_sum = False  # this step: `grad_shard` holds the sum of earlier reductions
        # Called when all gradients of a micro-batch have arrived.
        self.on_complete: list[Callable[[FlatParam], None]] = []
        # Called when a gradient arrives while a reduction of the unit is in flight; waits for that reduction.
        self.on_late: Callable[[FlatParam], None] = lambda _: None
        # See [Note: deferred early gradients]. None: accumulate at once.
        self.defer_grad: Callable[[Tensor, Tensor], object] | None = None
        self._views = self.views_of(self.storage)
        self.unsharded.free()
        self._nan = torch.full((), math.nan, dtype=config.compute_dtype, device=config.device)
        self._points_to_nan = False
        self._parameters: list[nn.Parameter] = []
        self._versions: list[int] = []  # of the parameters
        self.master = self.shard
        if layout.trains:
            self._make_training_storages(config)

    def _make_training_storages(self, config: FlatParamConfig) -> None:
        numel, range_numel = self.layout.numel, self.layout.range_numel
        if config.has_masters:
            self.master = config.master_allocator.allocate(range_numel)
        memory = LeasedTensor(
            lambda: config.allocate_grad(numel, config.grad_buffer_dtype),
            persistent=config.keeps_grads_unsharded,
            tracker=config.tracker,
        )
        self.grad_buffer = GradBuffer(
            f"unit {self.layout.name}", memory, len(self.layout.params), self.views_of
        )
        if (
            memory.tensor is not None
            and config.grad_buffer_dtype == config.master_dtype
            and not config.offloads
        ):
            self.grad_shard = memory.tensor[self.start : self.stop]
        elif config.offloads:
            self.grad_shard = _zeros(range_numel, config.master_dtype, config.state_device)
        else:
            self.grad_shard = config.allocate_grad(range_numel, config.master_dtype).zero_()
        self._num_expected: Counter[int] = Counter()  # calls of `accumulate_deferred`, by parameter
        self._in_micro = False

    @property
    def trains(self) -> bool:
        return self.layout.trains

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """Views of a tensor laid out like the storage, one per parameter, each in its boxes' shape."""
        return [flat[p.start : p.stop].view(p.boxes.shape) for p in self.layout.params]

    def named_views(self, flat: Tensor) -> Iterator[tuple[ParamShard, Tensor]]:
        """The layout's pieces with their views of a tensor laid out like the storage."""
        return zip(self.layout.params, self.views_of(flat), strict=True)

    # --- parameters

    def write(self, name: str, values: Tensor) -> None:
        """Write this rank's range of a parameter into `master`. `values`: the full parameter."""
        for overlap in self.layout.overlaps(self.start, self.stop):
            if overlap.shard.name == name:
                boxes = slice_boxes(values.detach(), overlap.shard.boxes)
                owned = boxes.reshape(-1)[overlap.start : overlap.stop]
                self.master[overlap.at : overlap.at + owned.numel()].copy_(owned)

    def make_parameters(self, replaced: Mapping[str, nn.Parameter]) -> None:
        """Create parameters that are views of `storage`; copy attributes that libraries have set."""
        for piece, view in zip(self.layout.params, self._views, strict=True):
            parameter = nn.Parameter(view.new_empty(0), requires_grad=self.trains)
            # A version counter of its own: all-gathers and updates do not count as edits.
            parameter.data = view
            parameter.__dict__.update(replaced[piece.name].__dict__)
            self._parameters.append(parameter)
        self._index_of = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        if self.trains:
            for index, parameter in enumerate(self._parameters):
                parameter.register_post_accumulate_grad_hook(self._make_grad_hook(index))

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        names = (piece.name for piece in self.layout.params)
        return dict(zip(names, self._parameters, strict=True))

    def point_to_nan(self) -> None:
        """After a reshard: let the parameters read NaN instead of freed memory."""
        if not self.unsharded.persistent and not self._points_to_nan:
            for parameter in self._parameters:
                parameter.data = self._nan.expand(parameter.shape)
            self._points_to_nan = True

    def point_to_storage(self) -> None:
        """Make the parameters views of `storage` again. Raises ModelError if they were changed meanwhile."""
        if self._points_to_nan:
            self.check_unchanged()
            for parameter, view in zip(self._parameters, self._views, strict=True):
                parameter.data = view
            self._points_to_nan = False

    def write_back(self) -> None:
        """Round the updated master weights into `shard`."""
        if self.master is not self.shard:
            self.shard.copy_(self.master)
            self.config.master_allocator.evict(self.master)

    def record_versions(self) -> None:
        """Record the parameters' version counters, which `check_unchanged` compares with."""
        self._versions = [parameter._version for parameter in self._parameters]

    def check_unchanged(self) -> None:
        """Raise ModelError if a parameter was changed outside the engine: the change would be lost."""
        expected_storage = (self._nan if self._points_to_nan else self.storage).untyped_storage()._cdata
        for piece, p, version in zip(self.layout.params, self._parameters, self._versions, strict=True):
            if p._version != version or p.untyped_storage()._cdata != expected_storage:
                raise changed_outside_engine(piece.name)
            if p.requires_grad != self.trains:
                raise ModelError(
                    "requires_grad of a parameter was changed after parallelize",
                    given=f"{piece.name}.requires_grad = {p.requires_grad}",
                    hint="freeze before parallelize, which creates optimizer states of what trains",
                )

    # --- gradients

    def begin_micro(self) -> None:
        """Start a micro-batch's backward: no gradient has arrived."""
        self.grad_buffer.begin()
        self._in_micro = True

    def end_micro(self) -> None:
        """Refuse gradients until the next `begin_micro`: they are not from the engine's backward."""
        self._in_micro = False

    @property
    def is_complete(self) -> bool:
        """Whether all gradients of this micro-batch have arrived."""
        return self.grad_buffer.is_complete

    def expect_deferred(self, parameter: Tensor) -> None:
        """Expect one more `accumulate_deferred` of this parameter."""
        index = self._index_of[id(parameter)]
        self._num_expected[index] += 1
        self.grad_buffer.expect_again(index)

    def accumulate_deferred(self, parameter: Tensor, gradient: Tensor) -> None:
        """Accumulate a gradient from the second half of a split backward."""
        index = self._index_of[id(parameter)]
        assert self._num_expected[index], f"unit {self.layout.name}: unexpected deferred gradient"
        self._num_expected[index] -= 1
        self._accumulate(index, gradient, last=not self._num_expected[index])

    def finalize(self) -> Tensor:
        """Zero the gradients that never arrived and return `grad_buffer`'s memory, the reduction's input."""
        self._allocate_grad_buffer()
        return self.grad_buffer.finalize()

    def on_reduced(self) -> None:
        """Note that `grad_shard` holds the reduction's result; `grad_buffer` is emptied, and freed here."""
        self.has_sum = True
        self.grad_buffer.on_reduced()

    def reset(self) -> None:
        """End the step: `grad_shard` keeps its values until the next step's first reduction."""
        self._in_micro = False
        self.has_sum = False
        if self.trains:
            self._num_expected.clear()
            self.grad_buffer.reset()

    def _allocate_grad_buffer(self) -> None:
        if self.grad_buffer.allocate():
            self.zero_gaps()

    def uncounted_grads(self) -> Iterator[Tensor]:
        """Slices of `grad_shard` that another rank counts in the gradient norm."""
        for start, stop in self.layout.repeated:
            low, high = max(start, self.start), min(stop, self.stop)
            if low < high:
                yield self.grad_shard[low - self.start : high - self.start]

    def zero_gaps(self) -> None:
        """Zero `grad_buffer` outside parameters: blockwise compression spreads a NaN there."""
        if self.grad_buffer.memory.tensor is not None:
            for start, stop in self.layout.gaps:
                self.grad_buffer.memory.tensor[start:stop].zero_()

    def _make_grad_hook(self, index: int) -> Callable[[Tensor], None]:
        """A hook with a weak reference: the garbage collector does not traverse a parameter's hooks."""
        unit_ref = weakref.ref(self)

        def hook(parameter: Tensor) -> None:
            if (unit := unit_ref()) is not None:
                unit._on_grad(index, parameter)

        return hook

    def _on_grad(self, index: int, parameter: Tensor) -> None:
        """Move `parameter.grad` into `grad_buffer`. See [Note: gradient accumulation in hooks]."""
        if parameter.grad is None:
            return  # a split backward: it arrives with the second half
        self._check_expected(index, parameter)
        gradient, parameter.grad = parameter.grad, None
        if self.defer_grad is not None:
            self.defer_grad(parameter, gradient)
            self.grad_buffer.mark_arrived(index)
        else:
            self._accumulate(index, gradient, last=True)

    def _accumulate(self, index: int, gradient: Tensor, *, last: bool) -> None:
        """Copy or add a gradient to `grad_buffer`. `last`: of this parameter, in this backward."""
        buffer = self.grad_buffer
        if buffer.state is GradientState.REDUCING:
            self.on_late(self)
        if buffer.state is not GradientState.FILLING:
            buffer.move(GradientState.FILLING)
            self._allocate_grad_buffer()
        if buffer.written[index]:
            buffer.views[index].add_(gradient)
        else:
            buffer.views[index].copy_(gradient)
        buffer.written[index] = True
        if last:
            buffer.mark_arrived(index)
            if buffer.is_complete:
                for callback in self.on_complete:
                    callback(self)

    def _check_expected(self, index: int, parameter: Tensor) -> None:
        if self._in_micro and not self.grad_buffer.has_arrived(index):
            return
        parameter.grad = None
        name = self.layout.params[index].name
        if not self._in_micro:
            raise ModelError(
                "a gradient arrived outside the engine's backward",
                given=name,
                expected="engine.backward(loss, num_targets) instead of loss.backward()",
                hint="torch.autograd.grad for gradients that are not to be trained on",
            )
        raise ModelError(
            "a parameter got two gradients in one backward",
            given=name,
            expected="one, in which autograd has accumulated all uses",
            hint="use_reentrant=False if the model checkpoints a module that it uses twice",
        )


def changed_outside_engine(name: str) -> ModelError:
    """The error for a parameter that something other than the engine wrote."""
    return ModelError(
        "a parameter was changed outside the engine",
        given=name,
        expected="weights that only the engine changes: its master weights would overwrite other changes",
        hint="load weights before parallelize, or with engine.load_state",
    )


def _zeros(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    pin = device.type == "cpu" and torch.cuda.is_available()
    return torch.zeros(numel, dtype=dtype, device=device, pin_memory=pin)
