"""Buckets: gradients of several parameters in one flat memory, which is the message.

[Note: whose memory a gradient lies in]
Autograd hands a gradient over in a tensor of its own. It is copied into the bucket (small ones together, while
they are in the cache), and `.grad` becomes a tensor over the bucket's memory: what is reduced there need not
be copied back. With `gradient_as_bucket_view` it is a view, with torch's terms (`detach_()` is refused, and
what comes next is written over it). Without, the program owns its gradients: it may keep one, set `.grad` to
None and expect it to stay as it is. So the memory is written anew only when nobody holds a tensor over it but
the parameters whose gradients it takes; else the bucket takes other memory.

[Note: when a gradient changes hands]
As soon as it has been copied: autograd's tensor is free, and the next gradient is written where this one was,
in pages that are there and in the cache (on 33.7 M parameters 4 % of the step). From then until the end of
backward `.grad` is not to be looked at. Where another reducer takes the same parameter's gradient (one
wrapped module in another), it changes hands behind the reduction.

[Note: gradients that stay where they are]
Where autograd adds to a tensor that the program had put into `.grad`, it is the program's: its result is copied
back into it. Such a tensor has been written in place, which its version tells. So has one that carries a graph
(`create_graph=True`) to stay the tensor that it is.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from plait.parallel.ddp.texts import not_the_view
from plait.parallel.incoming import GradientState, Incoming
from plait.parallel.memory import Loan
from plait.parallel.meter import Meter

Lend = Callable[[int, torch.dtype, torch.device], Tensor]  # memory that travels, of undefined values

_TOGETHER_BYTES = 1 << 18  # copied in one call, while they are in the cache


class Bucket:
    """Gradients that travel together. See the notes above."""

    is_sparse = False

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
        """`numbers`: of its parameters, among all. `names`: in messages. `lend`: called when the first gradient
        comes."""
        self.names = list(names)
        self.index = index
        self.numbers = tuple(numbers)
        self.parameters = list(parameters)
        self.sizes = [parameter.numel() for parameter in parameters]
        self.dtype = parameters[0].dtype
        self.nbytes = sum(self.sizes) * self.dtype.itemsize
        device = parameters[0].device
        self._together_bytes = self.nbytes if device.type != "cpu" else _TOGETHER_BYTES  # launches cost more
        memory = Loan(lambda: lend(sum(self.sizes), self.dtype, device), stays=False, meter=Meter())
        self.incoming = Incoming(f"bucket {index}", memory, len(self.sizes), self.views_of)
        self.factor: float | None = None  # what gradients are multiplied with on their way into the bucket
        self._as_views = as_views
        self._waiting: list[int] = []  # arrived, not copied yet
        self._waiting_bytes = 0
        self.hands_over_early = True  # see [Note: when a gradient changes hands]
        self._adopted: set[int] = set()  # in this backward; only with views
        self._unreached: set[int] = set()  # by this backward
        self._num_own = 0  # the tensors of ours over the memory

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """One for each parameter, in its shape, and its strides where they leave no gaps."""
        views, start = [], 0
        for parameter, size in zip(self.parameters, self.sizes, strict=True):
            part = flat[start : start + size]
            dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
            views.append(
                part.as_strided(parameter.shape, parameter.stride(), flat.storage_offset() + start)
                if dense
                else part.view(parameter.shape)
            )
            start += size
        return views

    @property
    def is_complete(self) -> bool:
        """Whether the gradients of all of its parameters have come."""
        return self.incoming.is_complete

    def zeros(self) -> Tensor:
        """What a rank without gradients contributes."""
        return torch.zeros(sum(self.sizes), dtype=self.dtype, device=self.parameters[0].device)

    @property
    def buffer(self) -> Tensor:
        assert self.incoming.memory.tensor is not None, f"bucket {self.index} before its first gradient"
        return self.incoming.memory.tensor

    # --- gradients come

    def begin(self) -> None:
        """A backward is about to run."""
        self.incoming.begin()
        self._adopted.clear()
        self._unreached.clear()

    def take(self, place: int) -> None:
        """The gradient of a parameter is final, or there is none in this backward."""
        if self.incoming.state is not GradientState.FILLING:
            self._open()
        self._waiting.append(place)
        self._waiting_bytes += self.sizes[place] * self.dtype.itemsize
        self.incoming.arrive(place)
        if self._waiting_bytes >= self._together_bytes or self.incoming.is_complete:
            self._write()

    def _open(self) -> None:
        self.incoming.move(GradientState.FILLING)
        if self.incoming.memory.tensor is not None and not self._as_views and self._is_held():
            self.incoming.forget()
        if self.incoming.hold():
            self._num_own = self._num_holders()
            if self._as_views:
                self._adopt_all()

    def _num_holders(self) -> int:
        return int(torch._C._storage_Use_Count(self.buffer.untyped_storage()._cdata))

    def _is_held(self) -> bool:
        """Whether somebody else's tensor is over the memory. See [Note: whose memory a gradient lies in]."""
        others = self._num_holders() - self._num_own
        if others > 0:
            pairs = zip(self.parameters, self.incoming.views, strict=True)
            others -= sum(
                p.grad is not None and view.numel() > 0 and _is_at(p.grad, view) for p, view in pairs
            )
        return others > 0

    def _adopt_all(self) -> None:
        """What has come before the memory was there (in `no_sync`, or into the buckets before) moves into it."""
        for place, (parameter, view) in enumerate(zip(self.parameters, self.incoming.views, strict=True)):
            if parameter.grad is not None:
                view.copy_(parameter.grad)
                self._adopt(place)

    def _adopt(self, place: int) -> None:
        """The gradient, which was copied, becomes one over the memory. See the notes above."""
        parameter, view = self.parameters[place], self.incoming.views[place]
        gradient = parameter.grad
        if gradient is None or parameter.dtype != self.dtype:
            return  # in another dtype for now: torch's mixed precision
        if self._as_views:
            if not _is_at(gradient, view):
                parameter.grad = _view(view)
            self._adopted.add(place)
        elif self.hands_over_early and place not in self._unreached and _is_autograds(gradient, self.dtype):
            parameter.grad = view.data

    @torch.no_grad()
    def _write(self) -> None:
        """Copies what waits into the memory."""
        given: list[Tensor] = []
        into: list[Tensor] = []
        for place in self._waiting:
            gradient, view = self.parameters[place].grad, self.incoming.views[place]
            if gradient is None:
                view.zero_()
            elif _is_at(gradient, view):
                if self.factor is not None:
                    view.mul_(self.factor)
            else:
                given.append(gradient.detach() if gradient.requires_grad else gradient)
                into.append(view)
        _copy(into, given, self.factor)
        for place in self._waiting:
            self._adopt(place)
        self._waiting.clear()
        self._waiting_bytes = 0

    def keep_apart(self, place: int) -> None:
        """This backward does not reach the parameter. If no rank's does, its gradient stays as it is."""
        self._unreached.add(place)
        parameter, views = self.parameters[place], self.incoming.views
        if (
            views
            and parameter.grad is not None
            and _is_at(parameter.grad, views[place])
            and not self._as_views
        ):
            parameter.grad = parameter.grad.clone()

    def seal(self) -> Tensor:
        """What is reduced: all have come."""
        self.incoming.move(GradientState.REDUCING)
        return self.buffer

    # --- the reduced gradients go

    def land(self, result: Tensor, is_unused: Callable[[int], bool]) -> None:
        """The result is every parameter's gradient, but of those that no rank has used."""
        self.incoming.move(GradientState.EMPTY)
        if result.data_ptr() != self.buffer.data_ptr():
            self.buffer.copy_(result.view(-1))
        into, given = [], []
        for place, (parameter, view) in enumerate(zip(self.parameters, self.incoming.views, strict=True)):
            gradient = parameter.grad
            if gradient is not None and _is_at(gradient, view):
                continue
            if is_unused(self.numbers[place]):
                continue
            if gradient is None:
                parameter.grad = _view(view) if self._as_views else view.data
            elif self._as_views and place in self._adopted:
                raise not_the_view(self.names[place])
            elif self._as_views:
                parameter.grad = _view(view)
            elif _is_autograds(gradient, self.dtype):
                parameter.grad = view.data
            else:
                into.append(gradient.detach())
                given.append(view)
        with torch.no_grad():
            _copy(into, given, None)

    def drop(self) -> None:
        """Backward was given up. Peers may still read the memory."""
        self._waiting.clear()
        self._waiting_bytes = 0
        self.incoming.reset()


def _view(view: Tensor) -> Tensor:
    """Another one of the same: the program may put other data into its own."""
    return view.as_strided(view.shape, view.stride(), view.storage_offset())


def _is_autograds(gradient: Tensor, dtype: torch.dtype) -> bool:
    """Whether nobody else has written it. See [Note: gradients that stay where they are]."""
    return gradient._version == 0 and not gradient.requires_grad and gradient.dtype == dtype


def _is_at(tensor: Tensor, view: Tensor) -> bool:
    """Whether it lies where the view does. Of nothing there is nothing to copy."""
    return tensor.data_ptr() == view.data_ptr() and tensor.layout is torch.strided


def _copy(into: list[Tensor], given: list[Tensor], factor: float | None) -> None:
    if len(into) == 1 and factor is not None:
        torch.mul(given[0], factor, out=into[0])
    elif into:
        torch._foreach_copy_(into, given)
        if factor is not None:
            torch._foreach_mul_(into, factor)
