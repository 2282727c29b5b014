"""How many bytes a forward pass keeps for backward: measured on a real pass, or seen before on meta."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from plait.models.loss import Loss, forward_inputs


class SavedBytes:
    """Bytes of the storages that autograd holds on to, each counted once."""

    def __init__(self, model: nn.Module) -> None:
        self._known = {p.untyped_storage()._cdata for p in model.parameters()}
        self._known |= {b.untyped_storage()._cdata for b in model.buffers()}
        self._alive: list[Tensor] = []  # keeps storages alive, so that no address is counted twice
        self.total = 0

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self._alive.append(tensor)
            self.total += storage.nbytes()
        return tensor


class _YesToQuestions(TorchDispatchMode):
    """Answers 1 where the program looks at a value: meta tensors have none.

    Hugging Face models ask "is no sequence packed?" and "does every position attend?", to leave out the
    mask; plain batches answer yes.
    """

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return args[0].dtype == torch.bool or 1
        return func(*args, **(kwargs or {}))


class _FusedAttention(TorchFunctionMode):
    """On meta, torch takes the unfused attention, which saves scores; devices take one that does not."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is not F.scaled_dot_product_attention or not args[0].is_meta:
            return func(*args, **kwargs)
        kwargs.pop("enable_gqa", None)  # the fused kernel reads fewer kv heads by itself
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*args, **kwargs)[0]


@contextmanager
def watch_saved(model: nn.Module) -> Iterator[SavedBytes]:
    """Counts what is saved for backward inside; parameters and buffers do not count."""
    watch = SavedBytes(model)
    with saved_tensors_hooks(watch.pack, lambda tensor: tensor):
        yield watch
    watch._alive.clear()


def saved_bytes(model: nn.Module, loss: Loss, batch: dict[str, Tensor], dtype: torch.dtype) -> int:
    """Bytes that one micro-batch will keep for backward, computed on meta: no memory, no FLOP.

    `model` is on meta; `batch` holds meta tensors of a micro-batch's shapes. The model's parameters
    are taken as `dtype`.
    """
    before = {name: p.dtype for name, p in model.named_parameters()}
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    try:
        with _YesToQuestions(), _FusedAttention(), watch_saved(model) as watch:
            outputs = model(**forward_inputs(model, batch))
            loss(outputs, batch)
    finally:
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(before[name])
    return watch.total
