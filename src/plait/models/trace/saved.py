"""Bytes that a forward pass saves for backward: measured on a real pass, or estimated on meta."""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_map_only

from plait.models.tensors import first_argument, storage_key
from plait.models.trace.prepare import running_on_meta


@runtime_checkable
class ReportsSavedTensors(Protocol):
    """A module's forward that saves tensors for backward outside of autograd, as recompute does."""

    on_save: Callable[[Tensor], object] | None  # called with each


class ActivationBytes:
    """Counter of the bytes of storages that autograd saves, each counted once."""

    def __init__(self, model: nn.Module, weights: Iterable[Tensor] = ()) -> None:
        self._known = {storage_key(t) for t in (*model.parameters(), *model.buffers(), *weights)}
        self._alive: list[Tensor] = []  # keeps storages alive, so that no address is reused
        self.total = 0

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self._alive.append(tensor)
            self.total += storage.nbytes()
        return tensor

    def release(self) -> None:
        self._alive.clear()


_FORWARDS = ("forward", "compiled_forward")  # a module's attributes; the latter of parallel/compile.py


@contextmanager
def watch_activations(model: nn.Module, weights: Iterable[Tensor] = ()) -> Iterator[ActivationBytes]:
    """Count the bytes saved for backward inside the context, without parameters, buffers and `weights`."""
    counter = ActivationBytes(model, weights)
    forwards = [module.__dict__.get(key) for module in model.modules() for key in _FORWARDS]
    reporters = [forward for forward in forwards if isinstance(forward, ReportsSavedTensors)]
    for reporter in reporters:
        reporter.on_save = counter.pack
    try:
        with saved_tensors_hooks(counter.pack, lambda tensor: tensor):
            yield counter
    finally:
        counter.release()
        for reporter in reporters:
            reporter.on_save = None


def activation_bytes(meta_model: nn.Module, run: Callable[[], object], device: torch.device) -> int:
    """Return the bytes that a forward of `meta_model` would save for backward on `device`, without computing.

    `run` is the forward, on meta tensors of a micro-batch's shapes. It runs uncompiled, as the tensors that
    torch.compile saves are unknown before compilation: exact where blocks save only their inputs, otherwise
    commonly more than the compiler's partitioner saves.
    """
    with running_on_meta(device), watch_activations(meta_model) as counter:
        run()
    return counter.total


class BlockOutputs:
    """Outputs and first arguments of the blocks of a full model on meta, from one forward, which the first
    call runs."""

    def __init__(self, meta_model: nn.Module, device: torch.device) -> None:
        self._meta_model = meta_model
        self._device = device
        self._calls: dict[str, tuple[Any, Any]] = {}  # of a forward that has completed

    def output_of(self, block: str, inputs: dict[str, Any], *, of_input: bool = False) -> Any:
        """Return the block's output, or its first argument, with `requires_grad` set. `inputs`: the same at
        each call."""
        if not self._calls:
            self._calls = self._run(inputs)
        found = self._calls[block][not of_input]
        return tree_map_only(Tensor, lambda t: t.detach().requires_grad_(t.is_floating_point()), found)

    def _run(self, inputs: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
        calls: dict[str, tuple[Any, Any]] = {}
        handles = [
            module.register_forward_hook(functools.partial(_record_call, calls, name), with_kwargs=True)
            for name, module in self._meta_model.named_modules()
        ]
        try:
            with running_on_meta(self._device), torch.no_grad():
                self._meta_model(**inputs)
        finally:
            for handle in handles:
                handle.remove()
        return calls


def _record_call(calls: dict[str, Any], name: str, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    calls[name] = first_argument(args, kwargs), output
