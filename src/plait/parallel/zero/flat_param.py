"""FlatParam: parameters that are communicated together (a unit), in one flat storage that is the message.

[Note: storages of a unit and their lifetimes]
`storage`      unsharded parameters, in the compute dtype; the model's parameters are views of it. The output
               of the all-gather. Up to stage 2 it is always allocated. At stage 3 `Unsharder` allocates it
               before the all-gather and frees it (`unsharded.free`) when the last use is over. Tensor and
               views survive: tensors that autograd saved see the new memory after the next unshard.
`shard`        the range of `storage` that this rank owns. Up to stage 2 a view of `storage`; at stage 3 a
               tensor of its own, the input of the all-gather.
`master`       what is trained and saved: the same range in float32 (float64 for fp64), which the optimizer
               updates. The same tensor as `shard` if the dtypes are equal and neither is offloaded; otherwise
               `write_back` rounds it into `shard` after each update.
`grad_buffer`  unsharded gradients: hooks write into it, the reduce-scatter reads it. In the dtype in which
               gradients are communicated, or in master's if micro-batches accumulate in it. Allocated for the
               first gradient and freed when the reduction has completed, unless the stage keeps unsharded
               gradients.
`grad_shard`   the sum over data ranks of the range that this rank owns, in master's dtype: the output of the
               reduce-scatter. A view of `grad_buffer` if that is persistent and has that dtype. No step
               zeroes it: its first reduction overwrites it, later ones add to it.

[Note: parameters in shared memory]
If the ranks along `shard` can access each other's memory, all of them share one `storage`, of which each
writes its range. No all-gather is needed: a range is visible to all as soon as it is written. All ranks read
it from the end of one update to the start of the next, and the owners write it in between. Before the first
write all ranks have reduced the gradient norm together, or met at a barrier if weights are loaded; after the
last write they meet at a barrier. `grad_buffer` and `grad_shard` are then allocated by the transport, which
reads them in place.

[Note: quantized units]
`gathered`     what is all-gathered: `unsharded`, or, in a unit of quantized frozen parameters, bytes of codes
               and absmax; then `shard` is a range of them. `storage`, in the compute dtype, is never kept: a
               use dequantizes into it, in forward and again in backward, and at stage 3, where the bytes are
               gathered for each use, frees them. So autograd, which saves views of `storage`, keeps nothing,
               and whatever reads the parameters sees them in the compute dtype.

[Note: gaps]
The gaps between parameters (see `plan/layout.py`) are zero in all storages and stay zero. Frozen units have
no master, grad_buffer or grad_shard.

[Note: gradient accumulation in hooks]
Autograd produces a parameter's gradient in the compute dtype, in a tensor of its own. A hook that runs right
after copies it (first micro-batch) or adds it (later ones) to `grad_buffer` and drops the tensor: one pass
over memory, which is also the conversion. Letting autograd accumulate into views of the flat storage would
cost a zero-fill, a read and an add, and would sum bf16 gradients in bf16. Gradients of embeddings on a CPU
are sparse (`_sparse_gradients` in engine/stage.py): only rows of the micro-batch's tokens are added.
In float32 and float64 the product of a split linear layer adds to `grad_buffer` itself (`add_product`).

[Note: deferred early gradients]
The first half of a split backward (input gradients) also computes the gradients of parameters outside linear
layers (norms). Written to `grad_buffer` at once, these few numbers would keep a unit's full buffer allocated
until the second half (weight gradients). Unless it is persistent, they are queued with the deferred weight
gradients and accumulated together with them.
"""

import math
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from enum import Enum, auto
from typing import Protocol

import torch
from torch import Tensor, nn

from plait.errors import ModelError
from plait.parallel.zero.block_codes import dequantize, quantize
from plait.parallel.zero.buffers import LeasedTensor, ResizableTensor
from plait.parallel.zero.grad_buffer import AddGradient, GradBuffer, GradientState
from plait.parallel.zero.parameter import (
    UnitParameter,
    bind,
    changed_outside_engine,
    move_gradients,
    owner_of,
    read_grad,
    write_data,
    write_grad,
)
from plait.parallel.zero.rank_context import RankContext
from plait.parallel.zero.state_io import slice_boxes
from plait.plan import Overlap, UnitLayout


class GradientListener(Protocol):
    """Follows the arrival of a unit's gradients. Implemented by `ShardedStage`."""

    def on_complete(self, unit: "FlatParam") -> None:
        """All gradients of a micro-batch have arrived."""

    def on_late(self, unit: "FlatParam") -> None:
        """Wait for the unit's reduction in flight, because another gradient of the unit has arrived."""

    def try_defer(self, parameter: Tensor, gradient: Tensor) -> bool:
        """Queue the gradient and return True, or return False. See [Note: deferred early gradients]."""


class UnshardState(Enum):
    """State of a unit's unsharded parameters. Those that are never freed are never SHARDED."""

    SHARDED = auto()  # `storage` is freed, and the model's parameters read NaN
    UNSHARDING = auto()  # an all-gather into `storage` is in flight
    UNSHARDED = auto()


_TRANSITIONS = {
    UnshardState.SHARDED: {UnshardState.UNSHARDING},
    UnshardState.UNSHARDING: {UnshardState.UNSHARDED},
    UnshardState.UNSHARDED: {UnshardState.UNSHARDING, UnshardState.SHARDED},
}


class FlatParam:
    """A unit: flat storage, parameters, gradient. See [Note: storages of a unit and their lifetimes].

    Communicates nothing: `Unsharder` decides when it is unsharded and resharded, and starts its all-gathers;
    `GradReducer` reduces its gradient.
    """

    def __init__(self, layout: UnitLayout, context: RankContext) -> None:
        self.layout = layout
        self.context = context
        self.groups = context.groups.units[layout.kind]
        assert layout.num_shards == self.groups.all_gather.size, f"{layout.name}: a layout for other ranks"
        self.start, self.stop = layout.owned_range(self.groups.all_gather.rank)
        keeps, compute = context.keeps_unit(self.groups), context.precision.compute
        stored = torch.uint8 if layout.format else compute
        numel, range_numel = (
            layout.num_bytes(count, compute.itemsize) // stored.itemsize
            for count in (layout.numel, layout.range_numel)
        )
        memory = context.allocate_params(numel, stored, self.groups)
        self.gathered = ResizableTensor(memory, persistent=keeps, tracker=context.tracker)
        self.unsharded = self.gathered
        if layout.format:  # see [Note: quantized units]
            values = torch.empty(layout.numel, dtype=compute, device=context.device)
            self.unsharded = ResizableTensor(values, persistent=False, tracker=context.tracker)
        self.storage = self.unsharded.tensor
        first = self.groups.all_gather.rank * range_numel
        self.own_gathered = self.gathered.tensor[first : first + range_numel]
        self.shard = self.own_gathered if keeps else context.allocate_state(range_numel, stored)
        self.has_sum = False  # this step: `grad_shard` holds the sum of earlier reductions
        self._views = self.views_of(self.storage)
        self.unsharded.free()
        self.gathered.free()
        self._nan = torch.full((), math.nan, dtype=context.precision.compute, device=context.device)
        self.state = UnshardState.UNSHARDED if self.unsharded.persistent else UnshardState.SHARDED
        self._wait: Callable[[], None] | None = None  # for the all-gather in flight
        self.listener: GradientListener  # the stage, from `ShardedStage.__init__` on
        self._parameters: list[UnitParameter] = []
        self._versions: list[int] = []  # of the parameters
        self._exposed: list[weakref.ref[Tensor]] = []  # tensors through which a script may write
        self._handed_out: list[tuple[str, Tensor, Tensor]] = []  # if shared: names, copies, and their values
        self.is_shared = context.shares_unit(self.groups)  # parameters are written by others than this rank
        self.master = self.shard
        if layout.trains:
            self._make_training_storages(context)

    def _make_training_storages(self, context: RankContext) -> None:
        numel, range_numel = self.layout.numel, self.layout.range_numel
        if context.has_masters:
            self.master = context.masters.allocate(range_numel)
        memory = LeasedTensor(
            lambda: context.allocate_grad(numel, context.grad_buffer_dtype, self.groups),
            persistent=context.keeps_grads_unsharded,
            tracker=context.tracker,
        )
        self.grad_buffer = GradBuffer(
            f"unit {self.layout.name}", memory, len(self.layout.params), self.views_of
        )
        dtype = context.precision.master
        if memory.tensor is not None and context.grad_buffer_dtype == dtype and not context.offloads:
            self.grad_shard = memory.tensor[self.start : self.stop]
        elif context.offloads:
            self.grad_shard = context.allocate_state(range_numel, dtype)
        else:
            self.grad_shard = context.allocate_grad(range_numel, dtype, self.groups).zero_()
        self._num_expected: Counter[int] = Counter()  # calls of `accumulate_deferred`, by parameter
        self._with_products: set[int] = set()  # parameters, before their hooks in this backward
        self._in_micro = False

    @property
    def trains(self) -> bool:
        return self.layout.trains

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """Views of a tensor laid out like the storage, one per parameter, each in its boxes' shape."""
        return [flat[p.start : p.stop].view(p.boxes.shape) for p in self.layout.params]

    def overlaps(self, start: int = 0, stop: int | None = None) -> tuple[Overlap, ...]:
        """The parameters in elements [start, stop) of this rank's range, by default all of it."""
        return self.layout.overlaps(self.start + start, self.stop if stop is None else self.start + stop)

    # --- parameters

    def write(self, name: str, values: Tensor) -> None:
        """Write this rank's range of a parameter into `master`. `values`: the full parameter."""
        for overlap in self.overlaps():
            if overlap.shard.name == name:
                boxes = slice_boxes(values.detach(), overlap.shard.boxes)
                self.store(overlap, boxes.reshape(-1)[overlap.start : overlap.stop])

    def zeros(self, names: Set[str]) -> list[tuple[slice, Tensor]]:
        """The places of these parameters in this rank's range of `master`, and where they are zero."""
        places = [overlap.place for overlap in self.overlaps() if overlap.shard.name in names]
        return [(place, self.master[place] == 0) for place in places]

    def store(self, overlap: Overlap, values: Tensor) -> None:
        """Write the elements of a parameter that overlap this rank's range into `master`."""
        if self.layout.format:
            self._stored(overlap.place).copy_(quantize(values, self.layout.format))
        else:
            self.master[overlap.place].copy_(values)

    def values(self, place: slice) -> Tensor:
        """The elements of this rank's range at `place`: of `master`, or dequantized."""
        if not self.layout.format:
            return self.master[place]
        values = self.shard.new_empty(place.stop - place.start, dtype=self.context.precision.master)
        dequantize(self._stored(place), self.layout.format, values)
        return values

    def _stored(self, place: slice) -> Tensor:
        """The bytes of quantized elements of this rank's range."""
        start, stop = (self.layout.num_bytes(edge, 1) for edge in (place.start, place.stop))
        return self.shard[start:stop]

    @property
    def own_values(self) -> Tensor:
        """All elements of this rank's range: `master`, or dequantized."""
        return self.values(slice(0, self.layout.range_numel))

    def make_parameters(self, replaced: Mapping[str, nn.Parameter]) -> None:
        """Make the model's parameters views of `storage`. Their gradients need a `listener`."""
        for shard, view in zip(self.layout.params, self._views, strict=True):
            old = replaced[shard.name]
            owner = owner_of(old)[0]
            # A parameter that several stages of this rank hold has a copy in each.
            is_copy = isinstance(owner, FlatParam) and owner.context is self.context
            self._parameters.append(bind(old, view, self, shard.name, is_copy=is_copy))
        self._index_of = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        if self.trains:
            for index, parameter in enumerate(self._parameters):
                move_gradients(parameter, self._make_grad_hook(index))

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        names = (shard.name for shard in self.layout.params)
        return dict(zip(names, self._parameters, strict=True))

    def _move(self, state: UnshardState) -> None:
        """Change the state. The only place that does."""
        assert state in _TRANSITIONS[self.state], (
            f"unit {self.layout.name}: from {self.state.name} to {state.name}"
        )
        self.state = state

    def start_unshard(self, all_gather: Callable[[], Callable[[], None]]) -> None:
        """Allocate `gathered` and start an all-gather into it, after one that is in flight. `all_gather`
        returns what waits for it. Raises ModelError if the parameters were changed meanwhile."""
        self.wait_for_unshard()
        if self.state is UnshardState.SHARDED:
            self._check_values()  # a script may freeze them in a forward that is not a step's
            for parameter, view in zip(self._parameters, self._views, strict=True):
                write_data(parameter, view)
        self._move(UnshardState.UNSHARDING)
        try:
            self.gathered.allocate()
            self._wait = all_gather()
        except BaseException:  # without memory, or a rank: there are no values to use
            self.reshard()
            raise

    def wait_for_unshard(self, *, dequantizes: bool = True) -> None:
        """Wait for an all-gather if one is in flight, and dequantize what is quantized."""
        if self.state is UnshardState.UNSHARDING:
            self._move(UnshardState.UNSHARDED)
            wait, self._wait = self._wait, None
            if wait is not None:
                wait()
            if self.layout.format:
                if dequantizes:
                    self.unsharded.allocate()
                    dequantize(self.gathered.tensor, self.layout.format, self.storage)
                self.gathered.free()

    def reshard(self) -> None:
        """Free `storage`, after an all-gather that is in flight."""
        self.wait_for_unshard(dequantizes=False)
        self.adopt_writes()
        self.unsharded.free()
        self.point_to_nan()
        self._move(UnshardState.SHARDED)

    def point_to_nan(self) -> None:
        """Let the parameters read NaN instead of freed memory; nothing if it is never freed."""
        if not self.unsharded.persistent:
            for parameter in self._parameters:
                write_data(parameter, self._nan.expand(parameter.shape))
            self._exposed.clear()  # of memory that is freed

    def expose(self, name: str, data: Tensor) -> Tensor:
        """Return what a script gets for `.data`; `adopt_writes` finds what it writes to it."""
        if self.state is UnshardState.SHARDED:
            raise ModelError(
                "the parameter is sharded: it has no values here",
                given=f"{name}.data",
                expected="values, which it has while its module computes, or under zero=2 or less",
                hint="engine.full_parameters()",
            )
        if self.is_shared or self.layout.format:
            copy = data.clone()
            self._handed_out.append((name, copy, copy.clone()))
            return copy
        if self.master is not self.shard or not self.unsharded.persistent:
            self._exposed.append(weakref.ref(data))
        return data

    def adopt_writes(self) -> None:
        """Write to `master` what was written to the parameters through `.data`; each rank its own range, so
        that ranks that hold the same parameter need to make the same writes. Compares only if `.data` was
        read. Raises ModelError if other ranks use the memory: the writes, to copies, have had no effect. One
        that leaves the values as they are is none: a model may clamp its weights in each forward."""
        while self._handed_out:
            name, copy, before = self._handed_out.pop()
            # Not compared with the memory itself, which may already be in another rank's update.
            if copy._version and not torch.equal(copy, before):
                in_codes = bool(self.layout.format)
                kind = "quantized parameter" if in_codes else "parameter in memory that others share"
                raise ModelError(
                    f"a {kind} was written through .data",
                    given=name,
                    expected="parameters of which each rank has its own copy, which it trains itself",
                    hint="no base" if in_codes else "zero=0, without servers",
                )
        if not self._exposed:
            return
        self._exposed = [reference for reference in self._exposed if reference() is not None]
        own = self.storage[self.start : self.stop]
        is_shard = own.data_ptr() == self.shard.data_ptr()
        held = (self.master if is_shard else self.shard).to(own.device, own.dtype)
        changed = (own != held).to(self.master.device)
        self.master[changed] = own.to(self.master.device, self.master.dtype)[changed]
        if not is_shard:
            self.shard.copy_(own)

    def write_back(self) -> None:
        """Round the updated master weights into `shard`; on the copy stream, if only they are in host
        memory."""
        if self.master is self.shard:
            return
        if self.shard.device == self.master.device:
            self.shard.copy_(self.master)
        else:
            self._upload_master()
        self.context.masters.evict(self.master)

    def _upload_master(self) -> None:
        """Round on the CPU into pinned memory: `copy_` between devices and dtypes would go through pageable
        memory, and block."""
        staged = self.context.staged_params.take(self.master.numel(), self.shard.dtype).copy_(self.master)
        self.context.staged_params.in_use_by(self.context.copy_stream.copy(self.shard, staged))

    def record_versions(self) -> None:
        """Record the parameters' version counters, which `check_unchanged` compares with."""
        self._versions = [parameter._version for parameter in self._parameters]

    def check_unchanged(self) -> None:
        """Raise ModelError if a parameter's values or `requires_grad` were changed outside the engine."""
        self.adopt_writes()
        self._check_values()
        for shard, p in zip(self.layout.params, self._parameters, strict=True):
            if p.requires_grad != self.trains:
                raise ModelError(
                    "requires_grad of a parameter was changed after parallelize",
                    given=f"{shard.name}.requires_grad = {p.requires_grad}",
                    expected="what trains to stay the same: it has optimizer states",
                    hint="requires_grad_() before parallelize",
                )

    def _check_values(self) -> None:
        """Raise ModelError if a parameter was changed outside the engine: the change would be lost."""
        is_sharded = self.state is UnshardState.SHARDED
        expected_storage = (self._nan if is_sharded else self.storage).untyped_storage()._cdata
        for shard, p, version in zip(self.layout.params, self._parameters, self._versions, strict=True):
            if p._version != version or p.untyped_storage()._cdata != expected_storage:
                of_another = owner_of(p)[0] is not self
                raise (given_to_another_engine if of_another else changed_outside_engine)(shard.name)

    def check_copy(self, name: str) -> None:
        """Raise ModelError if a copy of the parameter would be NaN."""
        if not self.unsharded.persistent:
            raise ModelError(
                "a copy of the model would be NaN: its parameters are sharded",
                given=name,
                expected="zero=2 or less, or the full parameters",
                hint="engine.full_parameters(), or a copy made before parallelize",
            )

    # --- gradients

    @property
    def has_gradient(self) -> bool:
        """True from a step's first gradient to its end."""
        return self.trains and (self.has_sum or self.grad_buffer.state is not GradientState.EMPTY)

    def begin_micro(self) -> None:
        """Start a micro-batch's backward: no gradient has arrived."""
        self.grad_buffer.begin()
        self._in_micro = True

    def end_micro(self) -> None:
        """Refuse gradients until the next `begin_micro`: they are not from the engine's backward."""
        self._in_micro = False

    @property
    def is_complete(self) -> bool:
        """True if all gradients of this micro-batch have arrived."""
        return self.grad_buffer.is_complete

    def expect_deferred(self, parameter: Tensor) -> None:
        """Expect one more `accumulate_deferred` of this parameter."""
        index = self._index_of[id(parameter)]
        self._num_expected[index] += 1
        self.grad_buffer.expect_again(index)

    def accumulate_deferred(self, parameter: Tensor, gradient: Tensor | AddGradient) -> None:
        """Accumulate a gradient from the second half of a split backward."""
        index = self._index_of[id(parameter)]
        assert self._num_expected[index], f"unit {self.layout.name}: unexpected deferred gradient"
        self._num_expected[index] -= 1
        self._accumulate(index, gradient, last=not self._num_expected[index])

    @property
    def has_late_gradient(self) -> bool:
        """After all reductions: whether a gradient has arrived since the unit's."""
        return self.grad_buffer.state is GradientState.FILLING

    def finalize(self) -> Tensor:
        """Zero the gradients that never arrived and return `grad_buffer`'s memory, the reduction's input."""
        self._allocate_grad_buffer()
        return self.grad_buffer.finalize()

    def on_reduced(self) -> None:
        """Note that `grad_shard` holds the result; empty `grad_buffer`, and free it unless it is kept."""
        self.has_sum = True
        self.grad_buffer.on_reduced()

    def reset(self) -> None:
        """End the step: `grad_shard` keeps its values until the next step's first reduction."""
        self._in_micro = False
        self.has_sum = False
        if self.trains:
            self._num_expected.clear()
            self._with_products.clear()
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
        gradient = read_grad(parameter)
        if gradient is None:
            if index in self._with_products:  # see [Note: gradient accumulation in hooks]
                self._mark_arrived(index)
            return  # otherwise it arrives with a split backward's second half, or a hook has dropped it
        self._check_expected(index, parameter)
        write_grad(parameter, None)
        if self.listener.try_defer(parameter, gradient):
            self.grad_buffer.mark_arrived(index)
        else:
            self._accumulate(index, gradient, last=True)

    def add_product(self, parameter: Tensor, add: AddGradient) -> bool:
        """In backward, let a layer's product add to a parameter's gradient, before the parameter's hook runs.
        Return False, and do nothing, if autograd has to pass the gradient on."""
        index = self._index_of.get(id(parameter))
        if index is None or not self._in_micro or self.grad_buffer.has_arrived(index):
            return False
        self._accumulate(index, add, last=False)
        self._with_products.add(index)
        return True

    def _accumulate(self, index: int, gradient: Tensor | AddGradient, *, last: bool) -> None:
        """Copy or add a gradient to `grad_buffer`. `last`: of this parameter, in this backward."""
        buffer = self.grad_buffer
        if buffer.state is GradientState.REDUCING:
            self.listener.on_late(self)
        if buffer.state is not GradientState.FILLING:
            buffer.move(GradientState.FILLING)
            self._allocate_grad_buffer()
        buffer.add(index, gradient)
        if last:
            self._mark_arrived(index)

    def _mark_arrived(self, index: int) -> None:
        self._with_products.discard(index)
        self.grad_buffer.mark_arrived(index)
        if self.grad_buffer.is_complete:
            self.listener.on_complete(self)

    def _check_expected(self, index: int, parameter: Tensor) -> None:
        if self._in_micro and not self.grad_buffer.has_arrived(index):
            return
        write_grad(parameter, None)
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


def given_to_another_engine(name: str) -> ModelError:
    """The error for a parameter that a newer engine of the same model has replaced."""
    return ModelError(
        "the model was given to another engine",
        given=f"{name}, which another call of parallelize has replaced",
        expected="one engine per model: the newest",
        hint="the newer engine; or parallelize(copy.deepcopy(model), ...) for each",
    )
