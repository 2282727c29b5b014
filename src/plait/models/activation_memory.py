"""Bytes that a forward pass saves for backward: measured on a real pass, or estimated on meta.

[Note: repeated operators]
Operators on meta are mostly Python code of torch, which takes most of the time of a run on meta, and blocks
repeat them. The result of an operator that neither writes nor makes a view depends on the shapes, strides and
dtypes of its arguments, on plain values and on the default dtype. An equal call gets a new tensor of the
first one's shape, without that code; also in the next run, as programs that build several engines or estimate
several plans repeat one model's operators.
"""

import copy
import functools
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from plait.models.placeholder import placeholders
from plait.models.tensors import tensors_in

_MAX_RESULTS = 10_000  # a model has hundreds


@runtime_checkable
class ReportsSavedTensors(Protocol):
    """A module's forward that saves tensors for backward outside of autograd, as recompute does."""

    on_save: Callable[[Tensor], object] | None  # called with each


class ActivationBytes:
    """Counter of the bytes of storages that autograd saves, each counted once."""

    def __init__(self, model: nn.Module, weights: Iterable[Tensor] = ()) -> None:
        known = (*model.parameters(), *model.buffers(), *weights)
        self._known = {t.untyped_storage()._cdata for t in known}
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


class OperatorsOnMeta(TorchDispatchMode):
    """Return 1 where the program reads a value, as meta tensors have none; run equal operators once.

    Hugging Face models check "is no sequence packed?" and "does every position attend?", to leave out the
    mask; both hold for plain batches. See also [Note: repeated operators].
    """

    _results: ClassVar[dict[Hashable, Callable[[], Tensor]]] = {}  # of this process

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return args[0].dtype == torch.bool or 1
        if func is torch.ops.aten.bincount.default and args[0].is_meta:
            return _bincount_on_meta(*args, **(kwargs or {}))
        default = torch.get_default_dtype()
        key = (func, _signature(args), _signature(kwargs), default) if _is_pure(func) else None
        if key in self._results:
            return self._results[key]()
        result = func(*args, **(kwargs or {}))
        if key is not None and type(result) is Tensor and result.is_meta and not _shares(result, args):
            if len(self._results) >= _MAX_RESULTS:
                self._results.clear()
            like = functools.partial(torch.empty_strided, dtype=result.dtype, device="meta")
            self._results[key] = functools.partial(like, result.shape, result.stride())
        return result


def _bincount_on_meta(numbers: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Return counts of numbers below `minlength`: transformers 5.17 counts the tokens of each expert with
    this operator, which torch does not have on meta."""
    if not minlength:
        return torch.bincount(numbers, weights)  # raises: the numbers are unknown
    return torch.empty(minlength, dtype=torch.long if weights is None else torch.float64, device="meta")


def _shares(result: Tensor, args: Any) -> bool:
    """Return whether a result is a view although its operator's schema does not say so (_unsafe_view)."""
    storage = result.untyped_storage()._cdata
    return any(tensor.untyped_storage()._cdata == storage for tensor in tensors_in(args))


@functools.cache
def _is_pure(func: Any) -> bool:
    """Return whether an operator of torch neither writes nor makes a view nor returns a shape that depends on
    values: on meta, the latter depends on a setting of torch."""
    schema = func._schema
    returns_new = all(result.alias_info is None for result in schema.returns)
    is_static = torch.Tag.dynamic_output_shape not in func.tags
    return func.namespace in ("aten", "prims") and not schema.is_mutable and returns_new and is_static


def _signature(values: Any) -> Hashable:
    """Return what a result on meta depends on. A value that cannot be compared equals no other."""
    if isinstance(values, Tensor):
        return (values.shape, values.stride(), values.dtype, values.device)
    if isinstance(values, tuple | list):
        return tuple([_signature(value) for value in values])
    if isinstance(values, dict):
        return tuple([(key, _signature(value)) for key, value in values.items()])
    return (type(values), values) if isinstance(values, _PLAIN) else object()


_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class DeviceKernelsOnMeta(TorchFunctionMode):
    """Save on meta the tensors that the device's kernels would save.

    Attention: on meta torch uses the unfused kernel, which saves scores; devices use a fused one (none if one
    key head is broadcast, as in Falcon; the CPU's does not support dropout). Grouped matrix products of
    experts: on meta they exist for bf16 only; one expert's product with all tokens saves the same.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._fused_dropout = device.type != "cpu"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch._grouped_mm and args[1].is_meta and args[1].ndim == 3:
            return args[0] @ args[1][0]
        if func is not F.scaled_dot_product_attention or not args[0].is_meta:
            return func(*args, **kwargs)
        named = dict(zip(_ATTENTION_ARGUMENTS, args, strict=False)) | kwargs
        grouped = named.pop("enable_gqa", False)  # the fused kernel supports fewer kv heads itself
        is_broadcast = not grouped and named["query"].shape[:-2] != named["key"].shape[:-2]
        is_uneven = named["query"].shape[-1] != named["value"].shape[-1]  # latent attention, unfused too
        if is_broadcast or is_uneven or (named.get("dropout_p", 0.0) and not self._fused_dropout):
            return func(*args, **kwargs)
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(**named)[0]


_ATTENTION_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")

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


@contextmanager
def running_on_meta(device: torch.device) -> Iterator[None]:
    """Run the forward of a meta copy inside the context, as it would run on `device`."""
    with OperatorsOnMeta(), DeviceKernelsOnMeta(device):
        yield


def copy_to_meta(model: nn.Module) -> nn.Module:
    """Return a copy of the model with parameters and buffers on meta, in the same dtypes."""
    memo: dict[int, Any] = {}
    attributes = (value for module in model.modules() for value in vars(module).values())
    computed = [t for t in attributes if isinstance(t, Tensor) and not t.is_leaf]  # as by nn.utils.prune
    given = [*model.parameters(), *model.buffers(), *(tensor for _, tensor in placeholders(model))]
    for tensor in (*given, *computed):
        empty = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_parameter else empty
    return copy.deepcopy(model, memo)


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
    """Outputs of the blocks of a full model on meta, from one forward, which the first call runs."""

    def __init__(self, meta_model: nn.Module, device: torch.device) -> None:
        self._meta_model = meta_model
        self._device = device
        self._outputs: dict[str, Any] = {}  # of a forward that has completed

    def output_of(self, block: str, inputs: dict[str, Any]) -> Any:
        """Return the block's output, with `requires_grad` set. `inputs`: the same at each call."""
        if not self._outputs:
            self._outputs = self._run(inputs)
        return tree_map_only(
            Tensor, lambda t: t.detach().requires_grad_(t.is_floating_point()), self._outputs[block]
        )

    def _run(self, inputs: dict[str, Any]) -> dict[str, Any]:
        outputs: dict[str, Any] = {}
        handles = [
            module.register_forward_hook(functools.partial(_record_output, outputs, name))
            for name, module in self._meta_model.named_modules()
        ]
        try:
            with running_on_meta(self._device), torch.no_grad():
                self._meta_model(**inputs)
        finally:
            for handle in handles:
                handle.remove()
        return outputs


def _record_output(outputs: dict[str, Any], name: str, *call: Any) -> None:
    outputs[name] = call[-1]
