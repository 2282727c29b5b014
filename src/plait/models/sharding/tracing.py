"""Runs of a model on meta in which tensors are followed through operators."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx.experimental._config
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from plait.models.activation_memory import DeviceKernelsOnMeta
from plait.models.stages.dataflow import OperatorsOnMixed, borrowed_on_meta
from plait.models.transformers_types import linear_forwards

_ATEN = torch.ops.aten
BLANK = frozenset({_ATEN.new_empty, _ATEN.new_zeros, _ATEN.empty, _ATEN.zeros})  # memory without values


class TensorTracer(OperatorsOnMixed):
    """The bookkeeping of what follows tensors, by `id`, and their storages, by `storage_key`."""

    def __init__(self) -> None:
        super().__init__()
        self._blank: dict[int, Tensor] = {}  # memory without values, by storage
        self._alive: list[Any] = []  # tensors and storages, so that no address is reused

    def _hold(self, *tensors: Tensor) -> None:
        for tensor in tensors:
            self._alive += [tensor, tensor.untyped_storage()]

    def _add_blank(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            self._hold(tensor)
            self._blank[storage_key(tensor)] = tensor


def storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def has_linear_forward(module: nn.Module) -> bool:
    return getattr(module.forward, "__func__", None) in linear_forwards()


@contextmanager
def tracing_on_meta(model: nn.Module) -> Iterator[None]:
    """Run the model on meta inside the context, without gradients and dropout. Changes of its modules are
    reverted after it."""
    config: Any = torch.fx.experimental._config
    with borrowed_on_meta(model), torch.random.fork_rng(devices=[]), torch.no_grad():
        assumed = config.patch(meta_nonzero_assume_all_nonzero=True)
        with assumed, DeviceKernelsOnMeta(torch.device("cpu")), _WithoutDropout():
            yield


class _WithoutDropout(TorchFunctionMode):
    """Leave out dropout, which is element-wise, but not one operator."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            names = ("attn_mask", "dropout_p", "is_causal")
            args, kwargs = args[:3], {**dict(zip(names, args[3:], strict=False)), **kwargs, "dropout_p": 0.0}
        return args[0] if func is F.dropout else func(*args, **kwargs)
