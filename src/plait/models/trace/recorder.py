"""The recording of a model's run: what operators computed from what, in which modules.

A run is recorded once, and asked for several facts afterwards: which stage needs which parameter
(stages/dataflow.py), which layers may be sharded (sharding/uses.py).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from plait.models.attention import AttentionCall
from plait.models.tensors import direct_tensors, first_argument, tensors_in, with_first_argument
from plait.models.trace.modes import Functions, Operators, on_mixed


@dataclass(frozen=True, slots=True)
class Operator:
    """A call of an operator of torch."""

    func: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    result: Any


@dataclass(frozen=True, slots=True)
class Entered:
    """A call of a watched module begins. `tensors`: those in a layer's arguments; in a block's first one, and
    `others` in its others."""

    name: str
    tensors: Sequence[Tensor]
    others: Sequence[Tensor] = ()


@dataclass(frozen=True, slots=True)
class Left:
    """A call of a watched module has returned these tensors."""

    name: str
    tensors: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class Received:
    """Tensors that take the place of those that a block has returned, as if another stage had sent them."""

    name: str
    tensors: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class Differentiated:
    """A call of torch.autograd.grad in the run."""

    outputs: Sequence[Tensor]
    inputs: Sequence[Tensor]
    gradients: Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class Attended:
    """A handler has computed attention: see plait/models/attention.py."""

    call: AttentionCall
    result: Tensor


@dataclass(frozen=True, slots=True)
class Returned:
    """Tensors in the result of the model, or of the loss."""

    tensors: Sequence[Tensor]


Event = Operator | Entered | Left | Received | Differentiated | Attended | Returned


@dataclass
class ModelTrace:
    """Events of a run, in order. It keeps all tensors alive, so each has an `id` of its own.

    parameters, buffers   the ones that the run used, under all of their names
    masks                 of documents, if it had such
    """

    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    masks: list[Any] = field(default_factory=list)

    @contextmanager
    def recording(
        self,
        model: nn.Module,
        *,
        layers: Mapping[str, nn.Module] | None = None,
        blocks: Sequence[tuple[str, nn.Module]] = (),
    ) -> Iterator[None]:
        """Record what runs inside the context, which `prepared` surrounds.

        `layers`: whose forwards are watched, without what hooks do. `blocks`: whose calls are watched, with
        their hooks, as if each were on another stage: what a hook keeps is not what the call returns, and
        gradients with respect to what a block returned have no graph.
        """
        self.parameters = dict(model.named_parameters(remove_duplicate=False))
        self.buffers = dict(model.named_buffers(remove_duplicate=False))
        for name, layer in (layers or {}).items():
            layer.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True)
            layer.register_forward_hook(partial(self._leave, name), prepend=True)
        with ExitStack() as stack:
            if blocks:
                stack.enter_context(self._separate(blocks))
                stack.enter_context(Functions(self._differentiate))
            stack.enter_context(Operators(self._run))
            yield

    def add_result(self, result: Any) -> None:
        self.events.append(Returned(list(tensors_in(result))))

    def _run(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        result = on_mixed(func, args, kwargs)
        self.events.append(Operator(func, args, kwargs, result))
        return result

    def _enter(self, name: str, _: nn.Module, *given: Any) -> None:
        self.events.append(Entered(name, list(tensors_in(given))))

    def _leave(self, name: str, *call: Any) -> None:
        self.events.append(Left(name, list(tensors_in(call[-1]))))

    def _receive(self, name: str, output: Any) -> Any:
        received = tree_map_only(Tensor, torch.zeros_like, output)  # the same on all ranks
        self.events.append(Received(name, list(tensors_in(received))))
        return received

    def _differentiate(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return tensors of the gradients' shapes: the run has no graph."""
        if func is not torch.autograd.grad:
            return func(*args, **kwargs)
        outputs, inputs = args[:2]
        tensors = direct_tensors([inputs])
        gradients = tuple(torch.zeros_like(tensor) for tensor in tensors)
        self.events.append(Differentiated(list(tensors_in(outputs)), tensors, gradients))
        return gradients

    @contextmanager
    def _separate(self, blocks: Sequence[tuple[str, nn.Module]]) -> Iterator[None]:
        classes = [(name, block, type(block)) for name, block in blocks]
        for name, block, cls in classes:
            block.__class__ = self._separate_class(name, cls)
        try:
            yield
        finally:
            for _, block, cls in classes:
                block.__class__ = cls

    def _separate_class(self, name: str, cls: Any) -> Any:
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            others = with_first_argument(None, args, kwargs) if args or kwargs else ()
            first = tensors_in(first_argument(args, kwargs))
            self.events.append(Entered(name, list(first), list(tensors_in(others))))
            output = cls.__call__(module, *args, **kwargs)
            self._leave(name, output)
            return self._receive(name, output)

        names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
        return type(cls.__name__, (cls,), {**names, "__call__": call})
