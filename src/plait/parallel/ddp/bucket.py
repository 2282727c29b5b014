"""Buckets: gradients of several parameters in one flat memory, which is the message.

[Note: whose memory a gradient lies in]
Autograd hands a gradient over in a tensor of its own. It is copied into the bucket (small ones together,
while they are in the cache), and `.grad` becomes a tensor over the bucket's memory: what is reduced there
need not be copied back. With `gradient_as_bucket_view` it is a view, with torch's terms (`detach_()` is
refused, and what comes next is written over it). Without, the program owns its gradients: it may keep one,
set `.grad` to None and expect it to stay as it is. So the memory is written anew only when nobody holds a
tensor over it but the parameters whose gradients it takes; else the bucket takes other memory.

[Note: when a gradient changes hands]
A large one as soon as it has been copied: autograd's tensor is free, and the next gradient is written where
this one was, in pages that are there and in the cache (on 33.7 M parameters 4 % of the step). From then until
the end of backward `.grad` is not to be looked at. A small one when autograd is through, while the last sums
are under way.

[Note: gradients that stay where they are]
Where autograd adds to a tensor that the program had put into `.grad`, it is the program's: its result is
copied back into it. Such a tensor has been written in place, which its version tells. So does one that
carries a graph (`create_graph=True`), one that this backward does not reach, and one that hooks of the
program have seen (`register_post_accumulate_grad_hook`). Where two reducers take a parameter's gradient (one
wrapped module in another) none of its gradients lies in a bucket: each would write what the other reads.

What a communication hook gets to see of a bucket: torch's `dist.GradBucket`, method by method.

Which gradients of a backward have come, and the hooks that tell.

[Note: what runs for every parameter]
A model of many small parameters spends its communication here: 1,500 hooks at 5 us each are 7 ms, and a
whole step of so small a model takes 50. So a hook on its usual way (a backward that is expected and has
begun, a gradient that has not come before) touches only what it needs, calls nothing, and leaves all else
to the bucket, which takes gradients by the dozen. Everything unusual goes by `Reducer`.

A sparse gradient: of an embedding with `sparse=True`, alone in its bucket.

Ranks have different rows, so theirs are gathered and added up: (p-1) x the largest rank's rows arrive at
each. The messages depend on one another, so this is done when the bucket lands, behind backward.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm.collectives import Group, all_gather
from plait.parallel.ddp.errors import not_sparse, not_the_view
from plait.parallel.zero.grad_buffer import ByteTracker, GradBuffer, GradientState, LeasedTensor


class PendingCopies:
    """Of a bucket: gradients that have come and are not copied yet, and how many are still to come."""

    def __init__(self, count: int, together_bytes: int) -> None:
        self.places: list[int] = []
        self.nbytes = 0
        self.missing = count
        self.together_bytes = together_bytes  # copied in one go
        self._count = count

    def begin(self) -> None:
        self.clear()
        self.missing = self._count

    def clear(self) -> None:
        self.places.clear()
        self.nbytes = 0


@dataclass(slots=True)
class ParamSlot:
    """Where a parameter's gradient goes."""

    bucket: Any
    place: int
    nbytes: int
    waiting: PendingCopies


@dataclass
class Arrivals:
    """Of one backward after the other, by parameter."""

    count: int
    slots: list[ParamSlot] = field(default_factory=list)
    order: list[int] = field(default_factory=list)  # in which they came
    is_usual: bool = False  # see [Note: what runs for every parameter]
    lock: Any = field(default_factory=threading.RLock)  # hooks run in a thread per device

    def __post_init__(self) -> None:
        self.ready = bytearray(self.count)

    def begin(self) -> None:
        """Nothing has come."""
        self.is_usual = False
        self.ready[:] = bytes(self.count)
        self.order.clear()

    @property
    def missing(self) -> list[int]:
        return [index for index, is_ready in enumerate(self.ready) if not is_ready]


def hook_of(
    arrivals: Arrivals, index: int, fill: Callable[[int], None], otherwise: Callable[[int], None]
) -> Callable[..., None]:
    """For autograd's node of parameter `index`. `fill`: when its bucket has enough to copy. `otherwise`:
    instead of all this, where something is unusual."""
    ready, slots, order, lock = arrivals.ready, arrivals.slots, arrivals.order, arrivals.lock

    def hook(_: object, __: object) -> None:
        if not arrivals.is_usual or ready[index]:
            otherwise(index)
            return
        slot = slots[index]
        waiting = slot.waiting
        with lock:
            ready[index] = 1
            order.append(index)
            waiting.places.append(slot.place)
            waiting.nbytes += slot.nbytes
            waiting.missing -= 1
            if waiting.missing and waiting.nbytes < waiting.together_bytes:
                return
        fill(index)

    return hook


def node_of(parameter: nn.Parameter) -> Any:
    """Autograd's node that puts a gradient into `.grad`; it lives as long as somebody holds it."""
    grad_fn: Any = parameter.expand_as(parameter).grad_fn
    return grad_fn.next_functions[0][0]


Lend = Callable[[int, torch.dtype, torch.device], Tensor]  # memory that travels, of undefined values

_TOGETHER_BYTES = 1 << 18  # copied in one call; on a GPU all of a bucket are, whose launches cost more
_WORTH_BYTES = 1 << 16  # whose memory is worth having for the next gradient


class Bucket:
    """Gradients that travel together. See the notes above."""

    def __init__(
        self,
        index: int,
        numbers: Sequence[int],
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        lend: Lend,
        *,
        as_views: bool,
    ) -> None:
        """`numbers`: of its parameters, among all. `names`: in messages. `lend`: called when it is used."""
        self.index = index
        self.numbers = tuple(numbers)
        self.parameters = list(parameters)
        self.names = list(names)
        self.dtype = parameters[0].dtype
        self.device = parameters[0].device
        self.sizes = [parameter.numel() for parameter in parameters]
        self.bytes_of = [size * self.dtype.itemsize for size in self.sizes]
        self.nbytes = sum(self.bytes_of)
        # Without reference cycles: memory is free as soon as the reducer is.
        take = partial(lend, sum(self.sizes), self.dtype, self.device)
        memory = LeasedTensor(take, persistent=False, tracker=ByteTracker())
        self.views_of = partial(_views_of, self.parameters, self.sizes)
        self.incoming = GradBuffer(f"bucket {index}", memory, len(self.sizes), self.views_of)
        self.factor: float | None = None  # what gradients are multiplied with on their way into the bucket
        self.is_alone = True  # no other reducer takes gradients of its parameters
        self.waiting = PendingCopies(
            len(self.sizes), _TOGETHER_BYTES if self.device.type == "cpu" else self.nbytes
        )
        self._as_views = as_views
        self._has_large = max(self.bytes_of) >= _WORTH_BYTES
        self._addresses: list[int] = []  # of the views
        # In this backward: gradients in the memory that are to get the result, parameters that have none, and
        # those that it does not reach.
        self._copied: list[int] = []
        self._gradients: list[Tensor] = []
        self._absent: list[int] = []
        self._unreached: set[int] = set()
        self._num_own = 0  # the tensors of ours over the memory

    def zeros(self) -> Tensor:
        """What a rank without gradients contributes."""
        return torch.zeros(sum(self.sizes), dtype=self.dtype, device=self.device)

    @property
    def buffer(self) -> Tensor:
        """Flat, the gradients of all its parameters in their order. Only once a gradient has come."""
        assert self.incoming.memory.tensor is not None, f"bucket {self.index} before its first gradient"
        return self.incoming.memory.tensor

    # --- gradients come

    def begin(self) -> None:
        """A backward is about to run."""
        self.waiting.begin()
        self._copied.clear()
        self._gradients.clear()
        self._absent.clear()
        self._unreached.clear()

    @torch.no_grad()
    def flush(self) -> None:
        """Copies the gradients that wait into the memory."""
        if self.incoming.state is not GradientState.FILLING:
            self._open()
        views, addresses, parameters = self.incoming.views, self._addresses, self.parameters
        first = len(self._copied)
        for place in self.waiting.places:  # what follows runs for every parameter
            gradient = parameters[place].grad
            if gradient is None:
                views[place].zero_()
                self._absent.append(place)
            elif gradient.data_ptr() != addresses[place]:
                self._copied.append(place)
                self._gradients.append(gradient)
            elif self.factor is not None:
                views[place].mul_(self.factor)
        copied = self._copied[first:]
        self._write(copied, self._gradients[first:])
        if self._as_views:
            self._adopt()
        elif self._has_large:
            self.hand_over(_WORTH_BYTES)
        self.waiting.clear()

    def _write(self, places: list[int], gradients: list[Tensor]) -> None:
        """Copies gradients into the memory, multiplied."""
        views, factor = self.incoming.views, self.factor
        if factor is None:
            if places:
                torch._foreach_copy_([views[place] for place in places], gradients)
        elif len(places) == 1:
            torch.mul(gradients[0], factor, out=views[places[0]])
        elif places:
            torch._foreach_copy_([views[place] for place in places], gradients)
            low, high = min(places), max(places)
            if high - low + 1 == len(places):  # one range: many small products cost more than they are worth
                start = sum(self.sizes[:low])
                self.buffer[start : start + sum(self.sizes[low : high + 1])].mul_(factor)
            else:
                torch._foreach_mul_([views[place] for place in places], factor)

    def _open(self) -> None:
        self.incoming.move(GradientState.FILLING)
        if self.incoming.memory.tensor is not None and not self._as_views and self._is_held():
            self.incoming.discard()
        if self.incoming.allocate():
            self._num_own = self._num_holders()
            self._addresses = [view.data_ptr() for view in self.incoming.views]
            if self._as_views:
                self._adopt_all()

    def _num_holders(self) -> int:
        return int(torch._C._storage_Use_Count(self.buffer.untyped_storage()._cdata))

    def _is_held(self) -> bool:
        """Whether somebody else's tensor is over the memory. See [Note: whose memory a gradient lies in]."""
        others = self._num_holders() - self._num_own
        if others > 0:
            gradients = [parameter.grad for parameter in self.parameters]
            pairs = zip(gradients, self._addresses, strict=True)
            others -= sum(g is not None and g.numel() > 0 and g.data_ptr() == at for g, at in pairs)
        return others > 0

    def _adopt_all(self) -> None:
        """What has come before the memory was there, in `no_sync` or into the buckets before, moves in."""
        for place, (parameter, view) in enumerate(zip(self.parameters, self.incoming.views, strict=True)):
            if parameter.grad is not None:
                view.copy_(parameter.grad)
                self._copied.append(place)
        self._adopt()

    def _adopt(self) -> None:
        """Views become the gradients that were copied; not yet those of parameters that are in another dtype
        for now (torch's mixed precision)."""
        for place in self._copied:
            if self.parameters[place].dtype == self.dtype:
                self.parameters[place].grad = _view(self.incoming.views[place])
            else:
                self._absent.append(place)
        self._copied.clear()
        self._gradients.clear()

    def hand_over(self, least_bytes: int = 0) -> None:
        """Gradients of so many bytes from here on, but for those that stay where they are: see the notes."""
        if not self.is_alone:
            return
        views, parameters, bytes_of, dtype = self.incoming.views, self.parameters, self.bytes_of, self.dtype
        unreached, copied, gradients = self._unreached, self._copied, self._gradients
        self._copied, self._gradients = [], []
        for place, gradient in zip(copied, gradients, strict=True):  # what follows runs for every parameter
            if (
                gradient._version == 0
                and bytes_of[place] >= least_bytes
                and place not in unreached
                and not gradient.requires_grad
                and gradient.dtype is dtype
                and not parameters[place]._post_accumulate_grad_hooks
            ):
                parameters[place].grad = views[place].data
            else:
                self._copied.append(place)
                self._gradients.append(gradient)

    def _result_at(self, place: int) -> Tensor:
        """For a parameter without gradient."""
        view = self.incoming.views[place]
        if self._as_views:
            return _view(view)
        return view.data if self.is_alone else view.clone()

    def part(self) -> None:
        """From now on no gradient lies in the memory: another reducer takes those of the same parameters."""
        self.is_alone = False
        if self.incoming.views and not self._as_views:
            for parameter, address in zip(self.parameters, self._addresses, strict=True):
                if parameter.grad is not None and parameter.grad.data_ptr() == address:
                    parameter.grad = parameter.grad.clone()

    def is_unreached(self, place: int) -> bool:
        """Whether this backward has nothing to do with the parameter."""
        return place in self._unreached

    def keep_apart(self, place: int) -> None:
        """This backward does not reach the parameter. If no rank's does, its gradient stays as it is."""
        self._unreached.add(place)
        parameter, views = self.parameters[place], self.incoming.views
        if (
            views
            and parameter.grad is not None
            and parameter.grad.data_ptr() == self._addresses[place]
            and not self._as_views
        ):
            parameter.grad = parameter.grad.clone()

    def seal(self) -> Tensor:
        """What is reduced: all have come."""
        self.incoming.move(GradientState.REDUCING)
        return self.buffer

    # --- the reduced gradients go

    def land(self, result: Tensor, is_unused: Callable[[int], bool]) -> None:
        """The result is every parameter's gradient, but of those that no rank has used. After `hand_over`."""
        self.incoming.move(GradientState.EMPTY)
        if result.data_ptr() != self.buffer.data_ptr():
            with torch.no_grad():
                self.buffer.copy_(result.reshape(-1))
        if self._as_views:
            self._check_views()
        into, given = [], []
        views, parameters = self.incoming.views, self.parameters
        for place, gradient in zip(self._copied, self._gradients, strict=True):
            parameter = parameters[place]
            if place in self._unreached and is_unused(self.numbers[place]):
                continue
            if parameter.grad is not gradient:
                parameter.grad = self._result_at(place)
            else:
                into.append(gradient)
                given.append(views[place])
        if into:
            with torch.no_grad():
                torch._foreach_copy_(into, given)
        for place in self._absent:
            if not is_unused(self.numbers[place]):
                parameters[place].grad = self._result_at(place)
        self._copied.clear()
        self._gradients.clear()

    def _check_views(self) -> None:
        absent = set(self._absent)
        for place, (parameter, address) in enumerate(zip(self.parameters, self._addresses, strict=True)):
            gradient = parameter.grad
            if place not in absent and (gradient is None or gradient.data_ptr() != address):
                raise not_the_view(self.names[place])

    def drop(self) -> None:
        """Backward was given up. Peers may still read the memory."""
        self.waiting.begin()
        self.incoming.reset()


def _views_of(parameters: Sequence[nn.Parameter], sizes: Sequence[int], flat: Tensor) -> list[Tensor]:
    """One for each parameter, in its shape, and its strides where they leave no gaps."""
    views, start = [], 0
    for parameter, size in zip(parameters, sizes, strict=True):
        part = flat[start : start + size]
        dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
        views.append(
            part.as_strided(parameter.shape, parameter.stride(), flat.storage_offset() + start)
            if dense
            else part.view(parameter.shape)
        )
        start += size
    return views


def _view(view: Tensor) -> Tensor:
    """Another one of the same: the program may put other data into its own."""
    return view.as_strided(view.shape, view.stride(), view.storage_offset())


class GradBucket:
    """Gradients that are ready to be communicated, in one tensor. Nothing has been divided."""

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
        """Of the bucket: 0 is the first one that is communicated."""
        return self._index

    def buffer(self) -> Tensor:
        """Flat (numel,); of a sparse gradient, the gradient itself."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Puts another tensor of as many elements in its place, such as one of another dtype."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Views of the buffer, one for each parameter, in its shape."""
        return self._views_of(self._buffer)

    def parameters(self) -> list[nn.Parameter]:
        """Whose gradients they are, in the order of `gradients()`."""
        return list(self._parameters)

    def is_last(self) -> bool:
        """Whether it is the last one that is communicated in this backward."""
        return self._is_last


class SparseBucket:
    """As `Bucket`, for one parameter with a sparse gradient."""

    def __init__(self, index: int, number: int, parameter: nn.Parameter, name: str) -> None:
        self.index = index
        self.numbers = (number,)
        self.parameters = [parameter]
        self.nbytes = parameter.numel() * parameter.dtype.itemsize
        self.factor: float | None = None
        self.name = name
        self.bytes_of = [self.nbytes]
        self.waiting = PendingCopies(1, self.nbytes)
        self._gradient: Tensor | None = None

    def begin(self) -> None:
        self.waiting.begin()
        self._gradient = None

    def flush(self) -> None:
        """Takes the gradient."""
        gradient = self.parameters[0].grad
        if gradient is None or gradient.layout is not torch.sparse_coo:
            raise not_sparse(self.name, is_there=gradient is not None)
        if self.factor is not None:
            with torch.no_grad():
                gradient.mul_(self.factor)
        self._gradient = gradient
        self.waiting.clear()

    def part(self) -> None:
        """Its gradient is its own anyway."""

    def is_unreached(self, _: int) -> bool:
        return False

    def keep_apart(self, _: int) -> None:
        """It is nobody else's."""

    def hand_over(self) -> None:
        """It lies in no other memory."""

    def seal(self) -> Tensor:
        assert self._gradient is not None, f"{self.name}: sealed before its gradient has come"
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

    def land(self, result: Tensor, _: object) -> None:
        """The result is the parameter's gradient."""
        assert self._gradient is not None, f"{self.name}: landed before its gradient has come"
        with torch.no_grad():
            self._gradient.copy_(result)

    def drop(self) -> None:
        self.begin()


def sum_of_rows(gradient: Tensor, group: Group, name: str) -> Tensor:
    """The sum over the ranks of their sparse (COO) gradients. All of them call it together."""
    mine = gradient.coalesce()
    if group.size == 1:
        return mine
    indices, values = mine.indices(), mine.values()
    counts = torch.empty(group.size, dtype=torch.int64, device=indices.device)
    all_gather(counts, counts.new_tensor([indices.shape[1]]), group, label=f"numbers of rows of {name}")
    sizes = counts.tolist()
    largest = max(sizes)
    if largest == 0:
        return mine
    gathered_indices = _gathered(indices.mT, largest, group, name)
    gathered_values = _gathered(values, largest, group, name)
    rows = torch.cat([part[:size] for part, size in zip(gathered_indices, sizes, strict=True)])
    terms = torch.cat([part[:size] for part, size in zip(gathered_values, sizes, strict=True)])
    return torch.sparse_coo_tensor(rows.mT, terms, gradient.shape, check_invariants=False).coalesce()


def _gathered(rows: Tensor, largest: int, group: Group, name: str) -> Tensor:
    """The ranks' rows, (ranks, largest, ...)."""
    padded = rows.new_zeros(largest, *rows.shape[1:])
    padded[: len(rows)] = rows
    whole = rows.new_empty(group.size * padded.numel())
    real = torch.view_as_real(whole).view(-1) if whole.is_complex() else whole
    piece = torch.view_as_real(padded).reshape(-1) if padded.is_complex() else padded.reshape(-1)
    all_gather(real, piece, group, label=f"rows of {name}")
    return whole.view(group.size, *padded.shape)
