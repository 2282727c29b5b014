"""Make transformers' decisions about attention masks on the CPU, without reading values from the GPU.

[Note: values that decide about masks]
transformers builds no attention mask where none is needed, so that faster kernels run: if an attention mask
masks no token, and if the position ids of no row start again, which would separate several sequences of it.
To decide, the CPU reads a flag from the GPU, once per forward of each stage, and so waits for all work queued
there: every micro-batch would begin with an empty queue.

The engine moves batches to the GPU, so the values are on the CPU as well. `remember_sources` stores them by
tensor on the GPU, and transformers' functions are wrapped to read them there. An entry of a batch that was on
the GPU from the start is copied back when it is first asked for, once per step and not once per micro-batch.
Tensors that a model computes itself are read from the GPU, except for the position ids of a batch of
`input_ids` alone, which packs nothing, because the model numbers the tokens of a row itself.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from plait.models.attention import is_handled
from plait.models.tensors import WeakTensorMap

_PACKS_NOTHING = {"input_ids", "use_cache"}  # of other inputs, a model may make position ids that start again
_packs_nothing: ContextVar[bool] = ContextVar("packs_nothing")


@dataclass
class _Source:
    """The full entry of a batch, from which the GPU's tensors are chunks."""

    tensor: Tensor
    num_chunks: int

    @cached_property
    def chunks(self) -> tuple[Tensor, ...]:
        return self.tensor.cpu().chunk(self.num_chunks)


_sources: WeakTensorMap[tuple[_Source, int]] = WeakTensorMap()  # and the chunk's number, by tensor on a GPU
_padding_masks: WeakTensorMap[bool] = WeakTensorMap()  # masks of known sources that mask some token


def remember_sources(micros: Sequence[Mapping[str, Tensor]], batch: Mapping[str, Tensor]) -> None:
    """Remember the values of micro-batches on a GPU, which are chunks of `batch`."""
    for key, tensor in batch.items():
        if micros[0][key].is_cuda and not tensor.is_floating_point():
            source = _Source(tensor, len(micros))
            for number, micro in enumerate(micros):
                _sources.put(micro[key], (source, number))


def _values(tensor: Tensor | None) -> Tensor | None:
    """Return the tensor's values on the CPU, if they are known."""
    found = None if tensor is None else _sources.get(tensor)
    return None if found is None else found[0].chunks[found[1]]


def host_values(tensor: Tensor) -> Tensor:
    """The tensor's values on the CPU: without waiting for the GPU, if it is an entry of a batch."""
    values = _values(tensor)
    return tensor.cpu() if values is None else values


@contextmanager
def decided_on_cpu(inputs: Mapping[str, Any]) -> Iterator[None]:
    """Context of a forward with these inputs. Does nothing unless they are token ids on a GPU."""
    ids = inputs.get("input_ids")
    on_gpu = isinstance(ids, Tensor) and ids.is_cuda
    if not on_gpu or not install_decisions():
        yield
        return
    token = _packs_nothing.set(inputs.keys() <= _PACKS_NOTHING)
    try:
        yield
    finally:
        _packs_nothing.reset(token)


@contextmanager
def packing_nothing() -> Iterator[None]:
    """Context of forwards whose rows are one sequence each: no search for others."""
    install_decisions()
    token = _packs_nothing.set(True)
    try:
        yield
    finally:
        _packs_nothing.reset(token)


def install_decisions() -> bool:
    """Wrap transformers' functions once; they work as before on tensors without known values. Return False
    without transformers."""
    masks: Any = sys.modules.get("transformers.masking_utils")
    if masks is None:
        return False
    for name, wrap in _WRAPPERS.items():
        function = getattr(masks, name, None)
        if function is not None and not hasattr(function, "decides_on_gpu"):
            wrapper: Any = wrap(function)
            wrapper.decides_on_gpu = function
            setattr(masks, name, wrapper)
    return True


def _wrap_search(search: Callable[..., Tensor | None]) -> Callable[..., Any]:
    """`search`: for rows of several sequences."""

    def find_packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
        if _packs_nothing.get(False):
            return None
        if is_handled():  # a handler knows the documents: `MaskRule.packed` is what it asks for
            return position_ids
        values = _values(position_ids)
        if values is None:
            return search(position_ids)
        indices = search(values)
        return None if indices is None else indices.pin_memory().to(position_ids.device, non_blocking=True)

    return find_packed_sequence_indices


def _wrap_preprocessing(preprocess: Callable[..., Any]) -> Callable[..., Any]:
    """`preprocess`: returns whether no mask is to be made, the padding mask, and more."""

    def preprocess_mask_arguments(
        config: Any, inputs_embeds: Tensor, attention_mask: Any, *arguments: Any, **options: Any
    ) -> Any:
        early_exit, padding_mask, *others = preprocess(
            config, inputs_embeds, attention_mask, *arguments, **options
        )
        values = _values(attention_mask) if isinstance(padding_mask, Tensor) and not early_exit else None
        if values is not None and values.bool().all():
            padding_mask = None
        elif values is not None:
            _padding_masks.put(padding_mask, True)
        return early_exit, padding_mask, *others

    return preprocess_mask_arguments


def _wrap_skip(may_skip: Callable[..., bool]) -> Callable[..., bool]:
    """`may_skip`: whether the attention kernel needs no mask for this padding mask."""

    def ignore_mask_sdpa(padding_mask: Tensor | None, *arguments: Any, **options: Any) -> bool:
        if padding_mask is not None and _padding_masks.get(padding_mask):
            return False
        return may_skip(padding_mask, *arguments, **options)

    return ignore_mask_sdpa


_WRAPPERS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "find_packed_sequence_indices": _wrap_search,
    "_preprocess_mask_arguments": _wrap_preprocessing,
    "_ignore_causal_mask_sdpa": _wrap_skip,
    "_ignore_bidirectional_mask_sdpa": _wrap_skip,
}
