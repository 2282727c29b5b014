"""Modes in which torch runs a model on meta, where there are no values.

[Note: repeated operators]
Operators on meta are mostly Python code of torch, which takes most of the time of a run on meta, and blocks
repeat them. The result of an operator that neither writes nor makes a view depends on the shapes, strides and
dtypes of its arguments, on plain values and on the default dtype. An equal call gets a new tensor of the
first one's shape, without that code; also in the next run, as programs that build several engines or estimate
several plans repeat one model's operators.
"""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from plait.models.tensors import direct_tensors, storage_key, tensors_in

_MAX_RESULTS = 10_000  # a model has hundreds
_ATEN = torch.ops.aten

Handler = Callable[[Any, Sequence[Any], Mapping[str, Any]], Any]  # (func, args, kwargs) -> result


class Functions(TorchFunctionMode):
    """Inside the context, `handle` takes the place of every function of torch."""

    def __init__(self, handle: Handler) -> None:
        super().__init__()
        self._handle = handle

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._handle(func, args, kwargs or {})


class Operators(TorchDispatchMode):
    """Inside the context, `handle` takes the place of every operator of torch: by default `on_meta`."""

    _results: ClassVar[dict[Hashable, Callable[[], Tensor]]] = {}  # of this process

    def __init__(self, handle: Handler | None = None) -> None:
        super().__init__()
        self._handle = handle or self.on_meta

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._handle(func, args, kwargs or {})

    @classmethod
    def on_meta(cls, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return 1 where the program reads a value, as meta tensors have none; run equal operators once.

        Hugging Face models check "is no sequence packed?" and "does every position attend?", to leave out the
        mask; both hold for plain batches. See also [Note: repeated operators].
        """
        if func is _ATEN._local_scalar_dense.default and args[0].is_meta:
            return torch.ones((), dtype=args[0].dtype).item()
        if func is _ATEN.bincount.default and args[0].is_meta:
            return _bincount_on_meta(*args, **kwargs)
        default = torch.get_default_dtype()
        key = (func, _signature(args), _signature(kwargs), default) if _is_pure(func) else None
        if key in cls._results:
            return cls._results[key]()
        result = func(*args, **kwargs)
        if key is not None and type(result) is Tensor and result.is_meta and not _shares(result, args):
            if len(cls._results) >= _MAX_RESULTS:
                cls._results.clear()
            like = functools.partial(torch.empty_strided, dtype=result.dtype, device="meta")
            cls._results[key] = functools.partial(like, result.shape, result.stride())
        return result


def watching_reads(on_read: Callable[[int], object]) -> Operators:
    """Return a context that calls `on_read` with the storage (`storage_key`) of each operator's arguments,
    before the operator runs. Sparse tensors have none."""

    def handle(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        for tensor in direct_tensors((args, kwargs)):
            if tensor.layout is torch.strided:
                on_read(storage_key(tensor))
        return func(*args, **kwargs)

    return Operators(handle)


def on_mixed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Run an operator on meta tensors and others: a batch's values, and tables that a module keeps in plain
    attributes. One without a kernel on meta runs on the CPU, with zeros."""
    given: Any = (args, dict(kwargs))
    are_meta = {tensor.is_meta for tensor in direct_tensors(given)}
    if len(are_meta) > 1:
        given = tree_map_only(Tensor, lambda t: torch.empty_like(t, device="meta"), given)
    elif True in are_meta and func is _ATEN._to_copy.default:
        given[1].pop("device", None)
    try:
        return Operators.on_meta(func, *given)
    except NotImplementedError:
        if True not in are_meta or func is _ATEN._to_copy.default:
            raise
        on_cpu = tree_map_only(Tensor, lambda t: torch.zeros_like(t, device="cpu"), given)
        result = func(*on_cpu[0], **on_cpu[1])
        return tree_map_only(Tensor, lambda t: torch.empty_like(t, device="meta"), result)


def _bincount_on_meta(numbers: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
    """Return counts of numbers below `minlength`: transformers 5.17 counts the tokens of each expert with
    this operator, which torch does not have on meta."""
    if not minlength:
        return torch.bincount(numbers, weights)  # raises: the numbers are unknown
    return torch.empty(minlength, dtype=torch.long if weights is None else torch.float64, device="meta")


def _shares(result: Tensor, args: Any) -> bool:
    """Return whether a result is a view although its operator's schema does not say so (_unsafe_view)."""
    key = storage_key(result)
    return any(storage_key(tensor) == key for tensor in tensors_in(args))


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


def device_kernels(device: torch.device) -> Functions:
    """Return a context in which meta tensors are saved that the device's kernels would save.

    Attention: on meta torch uses the unfused kernel, which saves scores; devices use a fused one (none if one
    key head is broadcast, as in Falcon; the CPU's does not support dropout). Grouped matrix products of
    experts: on meta they exist for bf16 only; one expert's product with all tokens saves the same.
    """

    def handle(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func is torch._grouped_mm and args[1].is_meta and args[1].ndim == 3:
            return args[0] @ args[1][0]
        if func is not F.scaled_dot_product_attention or not args[0].is_meta:
            return func(*args, **kwargs)
        named = {**dict(zip(_ATTENTION_ARGUMENTS, args, strict=False)), **kwargs}
        grouped = named.pop("enable_gqa", False)  # the fused kernel supports fewer kv heads itself
        is_broadcast = not grouped and named["query"].shape[:-2] != named["key"].shape[:-2]
        is_uneven = named["query"].shape[-1] != named["value"].shape[-1]  # latent attention, unfused too
        is_unfused_dropout = named.get("dropout_p", 0.0) and device.type == "cpu"
        if is_broadcast or is_uneven or is_unfused_dropout:
            return func(*args, **kwargs)
        return _ATEN._scaled_dot_product_flash_attention_for_cpu(**named)[0]

    return Functions(handle)


_ATTENTION_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")


def without_dropout() -> Functions:
    """Return a context without dropout, which is element-wise, but not one operator."""

    def handle(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if func is F.scaled_dot_product_attention:
            names = _ATTENTION_ARGUMENTS[3:]
            args, kwargs = args[:3], {**dict(zip(names, args[3:], strict=False)), **kwargs, "dropout_p": 0.0}
        return args[0] if func is F.dropout else func(*args, **kwargs)

    return Functions(handle)
