"""Skip transformers' search for packed sequences on a GPU, where its result is read by the CPU.

[Note: search for packed sequences]
A model of transformers without an attention mask looks for rows that contain several sequences: their
position ids start again. It then builds a mask that separates them. To decide, the CPU reads a flag, once per
forward of each stage, and so waits for all work queued on the GPU: every micro-batch would begin with an
empty queue.
A batch of `input_ids` alone packs nothing, because the model numbers the tokens of a row itself.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

_PACKS_NOTHING = {"input_ids", "use_cache"}  # of other inputs, a model may make position ids that start again
_packs_nothing: ContextVar[bool] = ContextVar("packs_nothing")


@contextmanager
def skip_packing_search(inputs: Mapping[str, Any]) -> Iterator[None]:
    """Context of a forward with these inputs. Does nothing unless they are token ids on a GPU."""
    ids = inputs.get("input_ids")
    on_gpu = isinstance(ids, Tensor) and ids.is_cuda
    if not on_gpu or not inputs.keys() <= _PACKS_NOTHING or not _install():
        yield
        return
    token = _packs_nothing.set(True)
    try:
        yield
    finally:
        _packs_nothing.reset(token)


def _install() -> bool:
    """Let transformers' search ask for the context; the search of other forwards is unchanged. Return False
    without transformers, or if it has no such search."""
    masks: Any = sys.modules.get("transformers.masking_utils")
    search = getattr(masks, "find_packed_sequence_indices", None)
    if search is None or hasattr(search, "searches"):
        return search is not None

    def find_packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
        return None if _packs_nothing.get(False) else search(position_ids)

    find_packed_sequence_indices.searches = search  # type: ignore[attr-defined]  # it is installed
    masks.find_packed_sequence_indices = find_packed_sequence_indices
    return True
