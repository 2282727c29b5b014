"""Trace which parameters a model uses between which of its blocks, in a run on meta.

[Note: gaps]
A model with L blocks has L + 1 gaps: gap g is before block g, the last one after the last block. A stage runs
all gaps up to its first block, with the received input in place of earlier blocks' outputs. So it needs those
parameters outside of blocks that flow into its own blocks (on the last stage: into the model's result) other
than through a block. These are mostly the ones used in its own gaps. But an embedding that is looked up
before the first block and passed to all blocks is needed by all stages: each looks it up itself, and the
gradients are summed.

Results of blocks are passed on only as the last block's output. If a block reads a result of an earlier one
in another way (a skip connection over blocks, a dict that blocks write into), the model cannot be split
between the two.
"""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from plait.models.activation_memory import copy_to_meta, running_on_meta
from plait.models.task import forward_inputs

_TOKENS = (2, 8)  # batch and sequence of the run


class Dataflow:
    """The flow of values between gaps. See [Note: gaps].

    into            names of the parameters and buffers that flow into each block, by its number; at the end,
                    those that flow into the result
    skips           (k, g): block g reads a result of block k other than through the output of g - 1
    is_complete     the run completed
    """

    def __init__(self, num_gaps: int) -> None:
        self.into: list[set[str]] = [set() for _ in range(num_gaps)]
        self.skips: set[tuple[int, int]] = set()
        self.is_complete = False

    def gaps_of(self, name: str) -> set[int]:
        return {gap for gap, names in enumerate(self.into) if name in names}


def trace_dataflow(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> Dataflow:
    """Run a copy of the model on meta, on token ids, as far as possible."""
    flow = Dataflow(len(blocks) + 1)
    with contextlib.suppress(Exception), torch.no_grad():  # any error of the model's code without values
        meta_model = copy_to_meta(model)
        tracer = _Tracer(meta_model, flow)
        for number, (name, _) in enumerate(blocks):
            block = meta_model.get_submodule(name)
            block.register_forward_pre_hook(partial(tracer.enter, number), prepend=True)
            block.register_forward_hook(partial(tracer.leave, number))
        ids = torch.zeros(_TOKENS, dtype=torch.long, device="meta")
        with running_on_meta(torch.device("cpu")), tracer:
            result = meta_model(**forward_inputs(meta_model, {"input_ids": ids}))
        tracer.inside = len(blocks)
        tracer.read(tracer.sources_of(result))
        flow.is_complete = True
    return flow


@dataclass(frozen=True)
class _Computed:
    """A result of a block: its output, or a tensor that it created or changed."""

    block: int
    is_result: bool


# A parameter or buffer by its name, or a block.
_Source = str | _Computed


class _Tracer(TorchDispatchMode):
    """Trace values from storage to storage: of parameters, buffers and results of blocks."""

    def __init__(self, model: nn.Module, flow: Dataflow) -> None:
        super().__init__()
        self.inside: int | None = None  # the running block
        self._flow = flow
        self._sources: dict[int, set[_Source]] = {}
        self._alive: list[Any] = []  # storages, so that no address is reused
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self.add(tensor, {name})

    def enter(self, number: int, *_: Any) -> None:
        self.inside = number

    def leave(self, number: int, _module: nn.Module, _args: Any, output: Any) -> Any:
        """Replace a block's output by new tensors, as if received from another stage."""
        self.read(self.sources_of(output))
        self.inside = None
        return tree_map_only(Tensor, partial(self._received, number), output)

    def _received(self, number: int, tensor: Tensor) -> Tensor:
        received = torch.empty_like(tensor)
        self.add(received, {_Computed(number, is_result=True)})
        return received

    def add(self, tensor: Tensor, sources: Iterable[_Source]) -> None:
        storage = tensor.untyped_storage()
        self._alive.append(storage)
        self._sources.setdefault(storage._cdata, set()).update(sources)

    def sources_of(self, values: Any) -> set[_Source]:
        keys = _storages(values)
        return set().union(*(self._sources[key] for key in keys if key in self._sources))

    def read(self, sources: Iterable[_Source]) -> None:
        """Record that the running block reads values derived from these."""
        if self.inside is None:
            return
        for source in sources:
            if isinstance(source, str):
                self._flow.into[self.inside].add(source)
            elif source.block < self.inside - source.is_result:
                self._flow.skips.add((source.block, self.inside))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = (args, kwargs or {})
        sources = set() if _reads_shape_only(func) else self.sources_of(inputs)
        self.read(sources)
        result = func(*args, **(kwargs or {}))
        views = set() if func._schema.is_mutable else _storages(inputs)
        if self.inside is not None:
            sources = {_Computed(self.inside, is_result=False)}  # its inputs were read above
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.untyped_storage()._cdata not in views:
                self.add(value, sources)
        return result


def _storages(values: Any) -> set[int]:
    return {v.untyped_storage()._cdata for v in tree_leaves(values) if isinstance(v, Tensor)}


def _reads_shape_only(func: Any) -> bool:
    name = func.overloadpacket.__name__
    return name.endswith("_like") or name.startswith("new_")
