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

[Note: documents of packed rows]
transformers searches position ids for documents only without an attention mask (transformers#46634), only in
models that pass the ids to their masks (OPT does not), and for FlashAttention only in batches of one row. So
`documents_of` decides, on the host and once for each micro-batch, and inside `documents_apart` every mask is
that of documents, whatever a model passes on: transformers' own search is off, its functions of masks are
given the documents, and its FlashAttention gets their lengths as its mask.

  packed row   the position of a token is not above that of the token before it, and neither is padding
  document     of a packed row: from a token whose position is not one more than the last, as in transformers
  padding      a document of its own, wherever it is
  other rows   without an attention mask transformers begins a document at each jump, and does so here; with
               one, positions that only jump forward are the user's, and their row is one document
"""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from plait.models.attention import SOFTMAX, active_handler
from plait.models.task import OF_TOKENS
from plait.models.tensors import WeakTensorMap

_PACKS_NOTHING = {"input_ids", "use_cache"}  # of other inputs, a model may make position ids that start again
_packs_nothing: ContextVar[bool] = ContextVar("packs_nothing")
_documents: ContextVar["Documents | None"] = ContextVar("documents", default=None)
_FLASH = ("flash_attention_2", "flash_attention_3", "flash_attention_4")


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


def remember_values(tensor: Tensor, values: Tensor) -> None:
    """Remember the values, on the CPU, of a tensor on a GPU."""
    _sources.put(tensor, (_Source(values, 1), 0))


def known_values(tensor: Tensor | None, *, waits: bool = True) -> Tensor | None:
    """Return the tensor's values on the CPU, if they are known; unless it `waits`, only those of batches that
    came from there."""
    found = None if tensor is None else _sources.get(tensor)
    if found is None or (found[0].tensor.is_cuda and not waits):
        return None
    return found[0].chunks[found[1]]


def host_values(tensor: Tensor) -> Tensor:
    """The tensor's values on the CPU: without waiting for the GPU, if it is an entry of a batch."""
    values = known_values(tensor)
    return tensor.cpu() if values is None else values


@dataclass(frozen=True)
class Documents:
    """Documents of a micro-batch of packed rows.  # B rows  S tokens

    starts_BS      a document starts at this token; on the CPU
    positions_BS   of tokens in their documents; on the CPU
    device         of masks
    on_mask        called with each mask that a model gets
    """

    starts_BS: Tensor
    positions_BS: Tensor
    device: torch.device
    on_mask: Callable[[Any], None] = lambda _: None

    @property
    def intervals(self) -> list[list[tuple[int, int]]]:
        """(start, stop) of each document of each row."""
        size = self.starts_BS.shape[1]
        starts = [row.nonzero().flatten().tolist() for row in self.starts_BS]
        return [[*zip(row, [*row[1:], size], strict=True)] for row in starts]

    @cached_property
    def on_device(self) -> tuple[Tensor, Tensor]:
        """The number of each token's document in its row, and positions."""
        return _moved(self.starts_BS.cumsum(1), self.device), _moved(self.positions_BS, self.device)

    @cached_property
    def of_flash_attention(self) -> dict[str, Any]:
        """Arguments that describe the documents of all rows, one after another."""
        flat = self.starts_BS.flatten()
        borders = torch.cat([flat.nonzero().flatten(), torch.tensor([len(flat)])]).to(torch.int32)
        longest, moved = int(borders.diff().max()), _moved(borders, self.device)
        lengths = {"max_length_q": longest, "max_length_k": longest}
        return {"cu_seq_lens_q": moved, "cu_seq_lens_k": moved, **lengths}


@dataclass(frozen=True)
class _FlashMask:
    """Documents as a mask: arguments of FlashAttention, which a forward that is repeated in backward has too.
    No block computes them, as it may be compiled."""

    arguments: Mapping[str, Any]


class PackedRows(dict[str, Tensor]):
    """A micro-batch with the documents of its rows."""

    def __init__(self, entries: Mapping[str, Tensor], documents: Documents) -> None:
        super().__init__(entries)
        self.documents = documents


def documents_of(batch: Mapping[str, Tensor]) -> Documents | None:
    """The documents of packed rows; None if no row is packed: [Note: documents of packed rows]."""
    positions, mask = batch.get("position_ids"), batch.get("attention_mask")
    if positions is None or positions.ndim != 2 or positions.is_meta or (mask is not None and mask.ndim != 2):
        return None
    num_rows = max(len(batch[key]) for key in OF_TOKENS & batch.keys())
    values = host_values(positions).expand(num_rows, -1)
    kept = torch.ones_like(values, dtype=torch.bool) if mask is None else host_values(mask).bool()
    steps, are_kept = values.diff(dim=1), kept[:, 1:] & kept[:, :-1]
    is_packed = ((steps <= 0) & are_kept).any(1, keepdim=True)
    if not is_packed.any():
        return None
    is_divided = is_packed | (mask is None)
    starts = torch.ones_like(kept)
    starts[:, 1:] = ((steps != 1) & are_kept & is_divided) | (kept[:, 1:] != kept[:, :-1])
    in_order = torch.arange(values.shape[1]).expand_as(values)
    return Documents(starts, torch.where(is_divided, values, in_order), positions.device)


def _moved(values: Tensor, device: torch.device) -> Tensor:
    pinned = values.pin_memory() if device.type == "cuda" else values
    return pinned.to(device, non_blocking=True)


@contextmanager
def documents_apart(documents: Documents) -> Iterator[None]:
    """Context of a forward of these rows. See [Note: documents of packed rows]."""
    install_decisions()
    token = _documents.set(documents)
    try:
        yield
    finally:
        _documents.reset(token)


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
    _install(masks.ALL_MASK_ATTENTION_FUNCTIONS, (*SOFTMAX, *_FLASH), _mask_of_documents)
    _install(sys.modules["transformers.modeling_utils"].ALL_ATTENTION_FUNCTIONS, _FLASH, _flash_of_documents)
    return True


def _install(functions: Any, names: Collection[str], replacement: Callable[..., Any]) -> None:
    """Wrap functions in one of transformers' two tables, once."""
    for name in functions.keys() & {*names}:
        if getattr(functions[name], "func", None) is not replacement:
            functions.register(name, partial(replacement, functions[name]))


def _mask_of_documents(make: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`make`: of transformers, whose keywords alone describe the mask."""
    documents = _documents.get(None)
    size = None if documents is None else documents.starts_BS.shape[1]
    if documents is None or not kwargs["q_length"] == kwargs["kv_length"] == size:
        return make(*args, **kwargs)
    masks: Any = sys.modules["transformers.masking_utils"]
    if make is masks.flash_attention_mask:
        return _FlashMask(documents.of_flash_attention)
    ids_BS, positions_BS = documents.on_device
    rule = masks.packed_sequence_compatibility_function(kwargs["mask_function"], positions_BS, ids_BS)
    no_skip = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    mask = make(*args, **{**kwargs, **no_skip, "mask_function": rule})
    documents.on_mask(mask)
    return mask


def _flash_of_documents(
    attend: Callable[..., Any],
    module: Any,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attention_mask: Any,
    **kwargs: Any,
) -> Any:
    """`attend`: of transformers."""
    if isinstance(attention_mask, _FlashMask):
        kwargs, attention_mask = {**kwargs, **attention_mask.arguments}, None
    return attend(module, q, k, v, attention_mask, **kwargs)


def _wrap_search(search: Callable[..., Tensor | None]) -> Callable[..., Any]:
    """`search`: for rows of several sequences."""

    def find_packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
        if _packs_nothing.get(False) or _documents.get(None) is not None:
            return None
        if (
            active_handler() is not None
        ):  # a handler knows the documents: `MaskRule.packed` is what it asks for
            return position_ids
        values = known_values(position_ids)
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
        documents = _documents.get(None)
        is_padding = getattr(attention_mask, "ndim", None) == 2
        if documents is not None and is_padding and attention_mask.shape[1] == documents.starts_BS.shape[1]:
            attention_mask = None  # padding is a document; chunks of others are not counted from its end
        early_exit, padding_mask, *others = preprocess(
            config, inputs_embeds, attention_mask, *arguments, **options
        )
        values = known_values(attention_mask) if isinstance(padding_mask, Tensor) and not early_exit else None
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
