"""One tensor, many readers: one sum of their gradients, beside which their weights' gradients are computed.

[Note: weight gradients beside the sum]
q, k and v read one tensor x. In backward each gives a part of x's gradient dx; the parts are added up here
and then over the group; and each has a weight's gradient dW to compute, which nobody waits for. So dW is
not computed where dx is, but by the node through which all of them read x, between the start and the end of
the sum:

  forward    z = reading(x, w_q, w_k, w_v)     the identity on x; its inputs are x and the readers' weights
             q = product(z, w_q) ...           of the weights only their values: autograd sees z alone
  backward   product: gives dz = dq w_q, leaves (dq, z) with the reading
             reading: starts the sum of dz; computes every dW from what was left with it; ends the sum

Autograd runs the reading when all products that read z have run: every one leaves its pair before it is
asked for. That it computes dW there is right whatever order autograd has for other nodes, since all of it
is inside one node. The weights are inputs of the reading, so their gradients reach them as all gradients
do: hooks run, `torch.autograd.grad` works, and a weight that is used elsewhere too gets the sum. A weight
that needs no gradient is no input. A layer that reads z twice leaves two pairs.

The reading has to know its weights before the first reader has read. It takes those that read along with
that first one the last time. A reader that comes unexpected (in the first step all but the first), or whose
weight is not the tensor that was expected, computes dW in its product: the same numbers, without the
overlap. One that was expected and does not come has left nothing and gets no gradient from here. Neither
keeps other tensors for backward than it otherwise would, so a step may differ from its recomputation in
this.

A group of one sums nothing; there is no reading, and products do as a linear layer does.

[Note: what is gathered is not kept]
Under sequence parallelism z is the tokens of all ranks, and x this rank's. Products keep x, and z is gathered
again in backward (Korthikanti et al. 2205.05198, section 4.2.2), once for all who read it:

  backward   the first product: starts the gather of z, computes dz beside it
             reading: starts the sum of dz; awaits z; computes every dW; ends the sum; lets go of z

Whoever keeps x depends on the reading for z and for its dW, also in the first step and in a copy that has
learned nothing: a region names its readers. A second region that is handed the same tensor (attention and
mlp side by side) reads z through a node of its own, which computes what the first region's reading did not
expect, before the sum instead of beside it. From the second step on the reading expects all. A step and its
recomputation may differ in these nodes, not in what is kept. A layer that reads a view of z knows no reading,
and z is kept for it.

Gathers and sums are made on one group, in an order that is that of autograd's nodes: every rank has the same.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from plait.comm import Group, Work
from plait.parallel.tensor.functional import start_all_reduce_in_place

V = TypeVar("V")


class WeakTensorMap(Generic[V]):
    """What is known of tensors, each as long as it lives and is not changed in place."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[Tensor], int, V]] = {}

    def get(self, tensor: Tensor) -> V | None:
        found = self._known.get(id(tensor))
        if found is None or found[0]() is not tensor or found[1] != _version(tensor):
            return None
        return found[2]

    def put(self, tensor: Tensor, value: V) -> None:
        key, known = id(tensor), self._known

        def forget(dead: weakref.ref[Tensor]) -> None:
            if key in known and known[key][0] is dead:
                del known[key]

        known[key] = (weakref.ref(tensor, forget), _version(tensor), value)

    def clear(self) -> None:
        self._known.clear()


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


StartReduce = Callable[[Tensor], tuple[Tensor, Work]]
StartGather = Callable[[Tensor], Callable[[], Tensor]]  # begins; what it returns waits for the whole


class Regather:
    """What is read, during a backward. See [Note: what is gathered is not kept]."""

    def __init__(self, gather: StartGather) -> None:
        self._gather = gather
        self._end: Callable[[], Tensor] | None = None

    def begin(self, piece: Tensor) -> None:
        """By whoever is first."""
        if self._end is None:
            self._end = self._gather(piece)

    def whole(self) -> Tensor:
        assert self._end is not None, "a gather that nobody has begun"
        whole = self._end()
        self._end = lambda: whole
        return whole

    def forget(self) -> None:
        self._end = None


class SharedInput:
    """How a tensor is read. See [Note: weight gradients beside the sum]."""

    def __init__(
        self,
        first: nn.Module | None,
        scope: str,
        weights: list[Tensor],
        start: StartReduce,
        take: Callable[[Tensor], Tensor],
        again: Regather | None = None,
    ) -> None:
        """`start`: begins the sum of a gradient; what it returns holds it when the Pending is over. `take`:
        what is read, without a graph. `scope`: see Readers. `again`: where what is read is not kept."""
        self.first = (lambda: None) if first is None else weakref.ref(first)
        self.scope = scope
        self.start = start
        self.take = take
        self.again = again
        self._weights = weights  # alive, so that their identities are theirs
        self._places = {id(weight): place for place, weight in enumerate(weights)}
        self._left: list[list[Callable[[], Tensor]]] = [[] for _ in weights]

    def expects(self, weight: Tensor) -> bool:
        return id(weight) in self._places

    def leave(self, weight: Tensor, compute: Callable[[], Tensor]) -> None:
        """In backward: `compute` gives a part of the gradient of `weight`."""
        self._left[self._places[id(weight)]].append(compute)

    def end(self) -> None:
        """In backward: all that was left has been computed."""
        if self.again is not None:
            self.again.forget()

    def weight_gradient(self, place: int) -> Tensor | None:
        left, self._left[place] = self._left[place], []
        if not left:
            return None
        grad = left[0]()
        for compute in left[1:]:
            grad += compute()
        return grad

    def of(self, x: Tensor) -> Tensor:
        """What is to be read for `x`."""
        z: Tensor = _SharedInputFunction.apply(x, self, *self._weights)
        return z


class JoinedInput(SharedInput):
    """How a further region reads `z`, which `reading` gives: weights that this one does not expect."""

    def __init__(self, reading: SharedInput, weights: list[Tensor]) -> None:
        super().__init__(None, reading.scope, weights, _no_reduce, Tensor.detach, reading.again)
        self.first = reading.first  # which learns of these too

    def end(self) -> None:
        """The reading needs it yet."""


def _no_reduce(dz: Tensor) -> tuple[Tensor, Work]:
    return dz, Work()


class _SharedInputFunction(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, reading: SharedInput, *_: Tensor) -> Tensor:
        ctx.reading = reading
        ctx.set_materialize_grads(False)
        return reading.take(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dz: Tensor | None) -> tuple[Tensor | None, ...]:
        needs = ctx.needs_input_grad
        if dz is None:
            return (None,) * len(needs)
        dx, pending = ctx.reading.start(dz) if needs[0] else (None, Work())
        grads = [ctx.reading.weight_gradient(place) if need else None for place, need in enumerate(needs[2:])]
        pending.wait()
        ctx.reading.end()
        return dx, None, *grads


@dataclass(frozen=True)
class InputView:
    """What is known of a tensor that layers are given.

    tensor    what they read for it; None: itself, which nothing that is known of it may keep alive
    reading   sums the gradient
    piece     of what they read, if that is gathered again: what is kept
    """

    tensor: Tensor | None = None
    reading: SharedInput | None = None
    piece: Tensor | None = None


class SharedInputs:
    """The tensors that layers read, and which layers read together.

    What it knows is about tensors and modules, so copies of a model may share it. Layers wait for one another
    within a `scope` only (a block): a tensor that many blocks read would keep their gradients until the last.
    """

    def __init__(self, group: Group) -> None:
        self._group = group  # that sums gradients
        self._sources: WeakTensorMap[InputView] = WeakTensorMap()
        self._together: weakref.WeakKeyDictionary[nn.Module, list[weakref.ref[nn.Module]]] = (
            weakref.WeakKeyDictionary()
        )

    def read(self, x: Tensor, module: nn.Module, scope: str) -> InputView:
        """What `module` is to read for `x`; in the backward of that, gradients are summed over the group."""
        if self._group.size == 1 or not (torch.is_grad_enabled() and x.requires_grad):
            return InputView()
        if self._sources.get(x) is None:
            weights = self.expected(module, [weight_of(module)])
            reading = SharedInput(module, scope, weights, self._start_sum, Tensor.detach)
            self._sources.put(x, InputView(reading.of(x), reading))
        return self.find(x, module, scope)

    def find(self, x: Tensor, module: nn.Module, scope: str) -> InputView:
        """The same where who gave `x` made it known."""
        source = self._sources.get(x) or InputView()
        if source.reading is not None and source.reading.scope == scope:
            self._note(source.reading, module)
        return source

    def join(self, z: Tensor, weights: list[Tensor]) -> Tensor:
        """What a further region is to read for `z`, which a reading of another one's has given."""
        source = self._sources.get(z) or InputView()
        reading = source.reading
        if reading is None or all(reading.expects(weight) for weight in unique_trainable(weights)):
            return z
        joined = JoinedInput(reading, unique_trainable(weights))
        own = joined.of(z)
        self.make_known(own, joined, source.piece)
        return own

    def make_known(self, z: Tensor, reading: SharedInput, piece: Tensor | None) -> None:
        """`z` is what `reading` gives, for `piece`."""
        self._sources.put(z, InputView(None, reading, piece))

    def expected(self, first: nn.Module, weights: list[Tensor]) -> list[Tensor]:
        """`weights`, and those that were read along with `first` the last time."""
        others = [other() for other in self._together.get(first, ())]
        return unique_trainable([*weights, *(weight_of(module) for module in others if module is not None)])

    def _note(self, reading: SharedInput, module: nn.Module) -> None:
        first = reading.first()
        if first is None:
            return
        together = self._together.setdefault(first, [])
        if all(other() is not module for other in together):
            together.append(weakref.ref(module))

    def _start_sum(self, dz: Tensor) -> tuple[Tensor, Work]:
        """Nobody else has `dz`: products alone read z, and each gave a tensor of its own."""
        dz = dz.contiguous()
        return dz, start_all_reduce_in_place(dz, self._group, "gradient of features")


def weight_of(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor), f"a linear layer whose weight is a {type(weight).__name__}"
    return weight


def unique_trainable(weights: list[Tensor]) -> list[Tensor]:
    """Those that need a gradient, each once."""
    return list({id(weight): weight for weight in weights if weight.requires_grad}.values())
