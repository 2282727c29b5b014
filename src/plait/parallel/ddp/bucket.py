"""Buckets: gradients of several parameters in one flat tensor, which is one message; and their autograd
hooks.

[Note: assignment to buckets]
A bucket closes when it has reached its limit, so it may overshoot; the next one of its kind takes the next
limit, and the last limit repeats (Li et al., 2006.15704, 3.2.3). Same algorithm as torch's function, which
the tests compare with.

[Note: storage of gradients]
Autograd produces each gradient in a tensor of its own. It is copied into the bucket (small ones together,
while they are in the cache), and `.grad` becomes a tensor over the bucket's memory, so the result need not be
copied back. With `gradient_as_bucket_view` it is a view, with torch's restrictions (`detach_()` raises, and
the next gradient overwrites it). Without, the program owns its gradients: it may keep one, set `.grad` to
None and expect it to stay unchanged. So the memory is reused only if no tensor refers to it except the
`.grad` of its own parameters; else the bucket allocates new memory.

[Note: time of aliasing]
Large ones as soon as they have been copied: autograd's tensor is freed, and the next gradient is written to
the same pages, which are mapped and in the cache (4 % of the step on 33.7 M parameters). From then until the
end of backward `.grad` must not be read. Small ones when autograd is done, while the last reductions are in
flight.

[Note: gradients that are not aliased]
If autograd accumulates into a tensor that the program has put into `.grad`, the program owns it: the result
is copied back into it. Such a tensor has been written in place, which its version counter shows. The same
holds for a gradient with a graph (`create_graph=True`), one that this backward does not reach, and one that
hooks of the program have seen (`register_post_accumulate_grad_hook`). If two reducers handle a parameter (one
wrapped module inside another), none of its gradients is aliased: each reducer would overwrite what the other
reads.

[Note: cost per parameter]
In a model of many small parameters hooks dominate the communication time: 1,500 hooks at 5 us each are 7 ms
of a 50 ms step. So on the fast path (a backward that is expected and has begun, a gradient that has not come
before) a hook touches only what it needs, calls nothing, and leaves the rest to the bucket, which copies
gradients by the dozen. All other cases go through `Reducer`.

[Note: sparse gradients]
The gradient of an embedding with `sparse=True` has a bucket of its own. Ranks have different rows, so rows
are gathered and added up: each rank receives (p-1) x the largest rank's rows. The messages depend on one
another, so this runs when the result is waited for, after backward.
"""

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plait.parallel.ddp.errors import not_bucket_view, not_sparse
from plait.parallel.zero.buffers import ByteTracker, LeasedTensor
from plait.parallel.zero.grad_buffer import GradBuffer, GradientState


class PendingCopies:
    """Gradients of a bucket that are ready but not copied yet, and how many are missing."""

    def __init__(self, num_params: int, flush_bytes: int) -> None:
        self.positions: list[int] = []
        self.nbytes = 0
        self.num_missing = num_params
        self.flush_bytes = flush_bytes  # copied in one call
        self._num_params = num_params

    def begin(self) -> None:
        self.clear()
        self.num_missing = self._num_params

    def clear(self) -> None:
        self.positions.clear()
        self.nbytes = 0


@dataclass(slots=True)
class ParamSlot:
    """A parameter's position in its bucket."""

    bucket: Any
    position: int
    nbytes: int
    pending: PendingCopies


@dataclass
class GradReadiness:
    """The gradients of the current backward that are ready, by parameter index."""

    num_params: int
    slots: list[ParamSlot] = field(default_factory=list)
    order: list[int] = field(default_factory=list)  # in which they became ready
    is_fast_path: bool = False  # see [Note: cost per parameter]
    lock: Any = field(default_factory=threading.RLock)  # autograd runs hooks in one thread per device

    def __post_init__(self) -> None:
        self.ready = bytearray(self.num_params)

    def begin(self) -> None:
        """Mark all gradients as missing."""
        self.is_fast_path = False
        self.ready[:] = bytes(self.num_params)
        self.order.clear()

    @property
    def missing(self) -> list[int]:
        return [index for index, is_ready in enumerate(self.ready) if not is_ready]


def make_hook(
    readiness: GradReadiness, index: int, flush: Callable[[int], None], slow_path: Callable[[int], None]
) -> Callable[..., None]:
    """Build the hook of a parameter's AccumulateGrad node.

    `flush`: called if its bucket has enough to copy. `slow_path`: called instead of all this outside of the
    fast path. See [Note: cost per parameter].
    """
    ready, slots, order, lock = readiness.ready, readiness.slots, readiness.order, readiness.lock

    def hook(_: object, __: object) -> None:
        if not readiness.is_fast_path or ready[index]:
            slow_path(index)
            return
        slot = slots[index]
        pending = slot.pending
        with lock:
            ready[index] = 1
            order.append(index)
            pending.positions.append(slot.position)
            pending.nbytes += slot.nbytes
            pending.num_missing -= 1
            if pending.num_missing and pending.nbytes < pending.flush_bytes:
                return
        flush(index)

    return hook


def accumulate_grad_node(parameter: nn.Parameter) -> Any:
    """AccumulateGrad node of a parameter; it lives as long as something refers to it."""
    grad_fn: Any = parameter.expand_as(parameter).grad_fn
    return grad_fn.next_functions[0][0]


Allocate = Callable[[int, torch.dtype, torch.device], Tensor]  # message memory, uninitialized

_FLUSH_BYTES = 1 << 18  # copied in one call; on a GPU the entire bucket, to save launches
_EARLY_ALIAS_BYTES = 1 << 16  # aliased early, so that their memory is reused by the next gradient


class Bucket:
    """Gradients that are reduced in one message. See the notes above."""

    def __init__(
        self,
        index: int,
        param_indices: Sequence[int],
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        allocate: Allocate,
        *,
        as_views: bool,
    ) -> None:
        """`param_indices`: in the model. `names`: for messages. `allocate`: called on first use."""
        self.index = index
        self.param_indices = tuple(param_indices)
        self.parameters = list(parameters)
        self.names = list(names)
        self.dtype = parameters[0].dtype
        self.device = parameters[0].device
        self.sizes = [parameter.numel() for parameter in parameters]
        self.grad_bytes = [size * self.dtype.itemsize for size in self.sizes]
        self.nbytes = sum(self.grad_bytes)
        # No reference cycles: memory is freed together with the reducer.
        allocate_flat = partial(allocate, sum(self.sizes), self.dtype, self.device)
        memory = LeasedTensor(allocate_flat, persistent=False, tracker=ByteTracker())
        self.views_of = partial(_views_of, self.parameters, self.sizes)
        self.grad_buffer = GradBuffer(f"bucket {index}", memory, len(self.sizes), self.views_of)
        self.factor: float | None = None  # factor applied to gradients when they are copied in
        self.is_exclusive = True  # no other reducer handles its parameters
        flush_bytes = _FLUSH_BYTES if self.device.type == "cpu" else self.nbytes
        self.pending = PendingCopies(len(self.sizes), flush_bytes)
        self._as_views = as_views
        self._has_large = max(self.grad_bytes) >= _EARLY_ALIAS_BYTES
        self._addresses: list[int] = []  # data_ptr of the views
        # Of this backward: copied gradients and their positions, positions without a gradient, and positions
        # that backward does not reach.
        self._copied: list[int] = []
        self._gradients: list[Tensor] = []
        self._without_grad: list[int] = []
        self._unreached: set[int] = set()
        self._num_own_refs = 0  # references to the storage by this bucket

    def zeros(self) -> Tensor:
        """Zeros in the bucket's shape: the contribution of a rank without gradients."""
        return torch.zeros(sum(self.sizes), dtype=self.dtype, device=self.device)

    @property
    def buffer(self) -> Tensor:
        """Gradients of all parameters in order, flat. Exists from the first gradient on."""
        assert self.grad_buffer.memory.tensor is not None, f"bucket {self.index} has no gradient yet"
        return self.grad_buffer.memory.tensor

    # --- filling

    def begin(self) -> None:
        """Start a backward."""
        self.pending.begin()
        self._copied.clear()
        self._gradients.clear()
        self._without_grad.clear()
        self._unreached.clear()

    @torch.no_grad()
    def flush(self) -> None:
        """Copy pending gradients into the buffer."""
        if self.grad_buffer.state is not GradientState.FILLING:
            self._start_filling()
        views, addresses, parameters = self.grad_buffer.views, self._addresses, self.parameters
        first = len(self._copied)
        for position in self.pending.positions:  # hot loop
            gradient = parameters[position].grad
            if gradient is None:
                views[position].zero_()
                self._without_grad.append(position)
            elif gradient.data_ptr() != addresses[position]:
                self._copied.append(position)
                self._gradients.append(gradient)
            elif self.factor is not None:
                views[position].mul_(self.factor)
        copied = self._copied[first:]
        self._copy_in(copied, self._gradients[first:])
        if self._as_views:
            self._install_views()
        elif self._has_large:
            self.alias_grads(_EARLY_ALIAS_BYTES)
        self.pending.clear()

    def _copy_in(self, positions: list[int], gradients: list[Tensor]) -> None:
        """Copy gradients into the buffer, multiplied by `factor`."""
        views, factor = self.grad_buffer.views, self.factor
        if factor is None:
            if positions:
                torch._foreach_copy_([views[position] for position in positions], gradients)
        elif len(positions) == 1:
            torch.mul(gradients[0], factor, out=views[positions[0]])
        elif positions:
            torch._foreach_copy_([views[position] for position in positions], gradients)
            low, high = min(positions), max(positions)
            if high - low + 1 == len(positions):  # one range: cheaper than many small products
                start = sum(self.sizes[:low])
                self.buffer[start : start + sum(self.sizes[low : high + 1])].mul_(factor)
            else:
                torch._foreach_mul_([views[position] for position in positions], factor)

    def _start_filling(self) -> None:
        self.grad_buffer.move(GradientState.FILLING)
        memory = self.grad_buffer.memory.tensor
        if memory is not None and not self._as_views and self._is_referenced_elsewhere():
            self.grad_buffer.discard()
        if self.grad_buffer.allocate():
            self._num_own_refs = self._num_storage_refs()
            self._addresses = [view.data_ptr() for view in self.grad_buffer.views]
            if self._as_views:
                self._install_all_views()

    def _num_storage_refs(self) -> int:
        return int(torch._C._storage_Use_Count(self.buffer.untyped_storage()._cdata))

    def _is_referenced_elsewhere(self) -> bool:
        """True if other tensors than the parameters' `.grad` use the storage.

        See [Note: storage of gradients].
        """
        num_others = self._num_storage_refs() - self._num_own_refs
        if num_others > 0:
            gradients = [parameter.grad for parameter in self.parameters]
            pairs = zip(gradients, self._addresses, strict=True)
            num_others -= sum(g is not None and g.numel() > 0 and g.data_ptr() == at for g, at in pairs)
        return num_others > 0

    def _install_all_views(self) -> None:
        """Copy in existing gradients, from `no_sync` or former buckets, and replace them by views."""
        for position, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self.grad_buffer.views[position].copy_(parameter.grad)
                self._copied.append(position)
        self._install_views()

    def _install_views(self) -> None:
        """Replace copied gradients by views, except for parameters that currently have another dtype (torch's
        mixed precision)."""
        for position in self._copied:
            if self.parameters[position].dtype == self.dtype:
                self.parameters[position].grad = _new_view(self.grad_buffer.views[position])
            else:
                self._without_grad.append(position)
        self._copied.clear()
        self._gradients.clear()

    def alias_grads(self, min_bytes: int = 0) -> None:
        """Point `.grad` of copied gradients of at least `min_bytes` at the buffer.

        See [Note: gradients that are not aliased].
        """
        if not self.is_exclusive:
            return
        views, parameters, grad_bytes = self.grad_buffer.views, self.parameters, self.grad_bytes
        dtype, unreached, copied, gradients = self.dtype, self._unreached, self._copied, self._gradients
        self._copied, self._gradients = [], []
        for position, gradient in zip(copied, gradients, strict=True):  # hot loop
            if (
                gradient._version == 0
                and grad_bytes[position] >= min_bytes
                and position not in unreached
                and not gradient.requires_grad
                and gradient.dtype is dtype
                and not parameters[position]._post_accumulate_grad_hooks
            ):
                parameters[position].grad = views[position].data
            else:
                self._copied.append(position)
                self._gradients.append(gradient)

    def _result_grad(self, position: int) -> Tensor:
        """Result tensor for a parameter without a gradient."""
        view = self.grad_buffer.views[position]
        if self._as_views:
            return _new_view(view)
        return view.data if self.is_exclusive else view.clone()

    def disable_aliasing(self) -> None:
        """Stop aliasing gradients: another reducer handles the same parameters."""
        self.is_exclusive = False
        if self.grad_buffer.views and not self._as_views:
            for position in range(len(self.parameters)):
                self._unalias(position)

    def _unalias(self, position: int) -> None:
        """Give the parameter a copy of its gradient if that is in the buffer."""
        parameter = self.parameters[position]
        if parameter.grad is not None and parameter.grad.data_ptr() == self._addresses[position]:
            parameter.grad = parameter.grad.clone()

    def is_unreached(self, position: int) -> bool:
        """True if this backward does not reach the parameter."""
        return position in self._unreached

    def mark_unreached(self, position: int) -> None:
        """Mark a parameter that this backward does not reach. If no rank reaches it, `.grad` is unchanged."""
        self._unreached.add(position)
        if self.grad_buffer.views and not self._as_views:
            self._unalias(position)

    def finalize(self) -> Tensor:
        """Return the buffer for the reduction: all gradients are in it."""
        self.grad_buffer.move(GradientState.REDUCING)
        return self.buffer

    # --- results

    def write_grads(self, result: Tensor, is_unused: Callable[[int], bool]) -> None:
        """Write the result to `.grad`, except for globally unused parameters. Call it after `alias_grads`."""
        self.grad_buffer.move(GradientState.EMPTY)
        if result.data_ptr() != self.buffer.data_ptr():
            with torch.no_grad():
                self.buffer.copy_(result.reshape(-1))
        if self._as_views:
            self._check_views()
        destinations, sources = [], []
        views, parameters = self.grad_buffer.views, self.parameters
        for position, gradient in zip(self._copied, self._gradients, strict=True):
            parameter = parameters[position]
            if position in self._unreached and is_unused(self.param_indices[position]):
                continue
            if parameter.grad is not gradient:
                parameter.grad = self._result_grad(position)
            else:
                destinations.append(gradient)
                sources.append(views[position])
        if destinations:
            with torch.no_grad():
                torch._foreach_copy_(destinations, sources)
        for position in self._without_grad:
            if not is_unused(self.param_indices[position]):
                parameters[position].grad = self._result_grad(position)
        self._copied.clear()
        self._gradients.clear()

    def _check_views(self) -> None:
        without_grad = set(self._without_grad)
        for position, (parameter, address) in enumerate(zip(self.parameters, self._addresses, strict=True)):
            gradient = parameter.grad
            if position not in without_grad and (gradient is None or gradient.data_ptr() != address):
                raise not_bucket_view(self.names[position])

    def reset(self) -> None:
        """Abandon the backward, and the buffer, which peers may still read."""
        self.pending.begin()
        self.grad_buffer.reset()


def _views_of(parameters: Sequence[nn.Parameter], sizes: Sequence[int], flat: Tensor) -> list[Tensor]:
    """Views of `flat`, one per parameter, with its shape, and with its strides if they leave no gaps."""
    views, start = [], 0
    for parameter, size in zip(parameters, sizes, strict=True):
        chunk = flat[start : start + size]
        if torch.ops.aten.is_non_overlapping_and_dense(parameter):
            offset = flat.storage_offset() + start
            views.append(chunk.as_strided(parameter.shape, parameter.stride(), offset))
        else:
            views.append(chunk.view(parameter.shape))
        start += size
    return views


def _new_view(view: Tensor) -> Tensor:
    """New view of the same data: the program may assign `.data` of the one it got."""
    return view.as_strided(view.shape, view.stride(), view.storage_offset())


class GradBucket:
    """One bucket, undivided, as communication hooks see it: torch's `dist.GradBucket`, method by method."""

    def __init__(
        self,
        index: int,
        buffer: Tensor,
        parameters: list[nn.Parameter],
        views_of: Callable[[Tensor], list[Tensor]],
        *,
        is_last: bool,
    ) -> None:
        self._index = index
        self._buffer = buffer
        self._parameters = parameters
        self._views_of = views_of
        self._is_last = is_last

    def index(self) -> int:
        """Index of the bucket; 0 is communicated first."""
        return self._index

    def buffer(self) -> Tensor:
        """Gradients, flat (numel,); for a sparse bucket, the sparse gradient."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the buffer by a tensor with as many elements, for example of another dtype."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Views of the buffer, one per parameter, in its shape."""
        return self._views_of(self._buffer)

    def parameters(self) -> list[nn.Parameter]:
        """Parameters in the order of `gradients()`."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """True if it is the last bucket of this backward."""
        return self._is_last


class SparseBucket:
    """Like `Bucket`, for one parameter with a sparse gradient. See [Note: sparse gradients]."""

    def __init__(self, index: int, param_index: int, parameter: nn.Parameter, name: str) -> None:
        self.index = index
        self.param_indices = (param_index,)
        self.parameters = [parameter]
        self.nbytes = parameter.numel() * parameter.dtype.itemsize
        self.factor: float | None = None
        self.name = name
        self.grad_bytes = [self.nbytes]
        self.pending = PendingCopies(1, self.nbytes)
        self._gradient: Tensor | None = None

    def begin(self) -> None:
        self.pending.begin()
        self._gradient = None

    def flush(self) -> None:
        """Take the parameter's gradient, multiplied by `factor`."""
        gradient = self.parameters[0].grad
        if gradient is None or gradient.layout is not torch.sparse_coo:
            raise not_sparse(self.name, has_gradient=gradient is not None)
        if self.factor is not None:
            with torch.no_grad():
                gradient.mul_(self.factor)
        self._gradient = gradient
        self.pending.clear()

    # A sparse gradient has its own storage.

    def disable_aliasing(self) -> None: ...

    def mark_unreached(self, _: int) -> None: ...

    def alias_grads(self) -> None: ...

    def is_unreached(self, _: int) -> bool:
        return False

    def finalize(self) -> Tensor:
        assert self._gradient is not None, f"{self.name}: reduced before its gradient was ready"
        return self._gradient

    def zeros(self) -> Tensor:
        like = self.parameters[0]
        return torch.sparse_coo_tensor(
            torch.zeros(1, 0, dtype=torch.int64),
            like.new_zeros(0, *like.shape[1:]),
            like.shape,
            device=like.device,
            check_invariants=False,
        )

    def views_of(self, gradient: Tensor) -> list[Tensor]:
        return [gradient]

    def write_grads(self, result: Tensor, _: object) -> None:
        """Copy the result into the parameter's gradient."""
        assert self._gradient is not None, f"{self.name}: written before its gradient was ready"
        with torch.no_grad():
            self._gradient.copy_(result)

    def reset(self) -> None:
        self.begin()


@dataclass(frozen=True)
class GradSpec:
    """The properties of a parameter's gradient that decide its bucket."""

    nbytes: int
    kind: Hashable  # dtype and device, the same for all of a bucket
    alone: bool = False  # a sparse gradient has a bucket of its own
    unlimited: bool = False  # its bucket holds all of its kind


def assign_buckets(
    grads: Sequence[GradSpec], limits: Sequence[int], order: Sequence[int]
) -> list[tuple[int, ...]]:
    """Return the gradient indices of each bucket, filled in `order`. See [Note: assignment to buckets].

    Buckets are in the order in which they close; those that never reach their limit come last. `limits`:
    bytes of the first bucket of each kind, of its second, and so on.
    """
    open_buckets: dict[Hashable, list[int]] = {}
    sizes: dict[Hashable, int] = {}
    num_closed: dict[Hashable, int] = {}
    buckets: list[tuple[int, ...]] = []
    for index in order:
        grad = grads[index]
        if grad.alone:
            buckets.append((index,))
            continue
        kind = grad.kind
        open_buckets.setdefault(kind, []).append(index)
        sizes[kind] = sizes.get(kind, 0) + grad.nbytes
        if not grad.unlimited and sizes[kind] >= limits[min(num_closed.get(kind, 0), len(limits) - 1)]:
            buckets.append(tuple(open_buckets.pop(kind)))
            num_closed[kind] = num_closed.get(kind, 0) + 1
            sizes[kind] = 0
    return buckets + [tuple(bucket) for bucket in open_buckets.values()]
