"""Which parameters a model computes with between which of its blocks: seen on a run on meta.

[Note: gaps]
A model with L blocks has L + 1 gaps: gap g lies before block g, the last one behind the last block. A stage
runs all gaps up to its first block, with what it received in the place of earlier blocks' outputs. So what
it needs of the parameters outside of blocks is what its own blocks read of them (the last stage: what flows
into the model's result) by another way than through a block. That is mostly what is used in its own gaps.
Yet a table that is looked up before the first block and given to all blocks is needed by all stages: each
looks up for itself, and the gradients add up.

What blocks compute goes on by the last one's result alone. If a block reads what an earlier one computed by
another way (a skip connection over blocks, a dict that blocks write into), no cut may lie between the two.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from plait.models.activation_memory import copy_to_meta, running_on_meta
from plait.models.blocks import forward_inputs

_TOKENS = (2, 8)  # batch and sequence of the run


class Dataflow:
    """What flows where. See [Note: gaps].

    into            names of parameters and buffers, by the number of the block that reads what became of
                    them; at the end, those in the result
    skips           (k, g): block g reads what block k computed, by another way than the result of g - 1
    is_complete     the run came to its end
    """

    def __init__(self, num_gaps: int) -> None:
        self.into: list[set[str]] = [set() for _ in range(num_gaps)]
        self.skips: set[tuple[int, int]] = set()
        self.is_complete = False

    def gaps_of(self, name: str) -> set[int]:
        return {gap for gap, names in enumerate(self.into) if name in names}


def trace_dataflow(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> Dataflow:
    """Runs a copy of the model on meta, on token ids; up to where that is impossible."""
    flow = Dataflow(len(blocks) + 1)
    with contextlib.suppress(Exception), torch.no_grad():  # whatever the model's code raises without values
        twin = copy_to_meta(model)
        tracer = _Tracer(twin, flow)
        for number, (name, _) in enumerate(blocks):
            watch = _BlockHooks(tracer, number)
            block = twin.get_submodule(name)
            block.register_forward_pre_hook(watch.before, prepend=True)
            block.register_forward_hook(watch.after)
        ids = torch.zeros(_TOKENS, dtype=torch.long, device="meta")
        with running_on_meta(torch.device("cpu")), tracer:
            result = twin(**forward_inputs(twin, {"input_ids": ids}))
        tracer.inside = len(blocks)
        tracer.read(tracer.sources_of(result))
        flow.is_complete = True
    return flow


class _BlockHooks:
    def __init__(self, tracer: "_Tracer", number: int) -> None:
        self._tracer, self._number = tracer, number

    def before(self, *_: Any) -> None:
        self._tracer.inside = self._number

    def after(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """What a block returns travels, so it is new, wherever it came from."""
        self._tracer.read(self._tracer.sources_of(output))
        self._tracer.inside = None
        return tree_map_only(Tensor, self._arrived, output)

    def _arrived(self, tensor: Tensor) -> Tensor:
        arrived = torch.empty_like(tensor)
        self._tracer.add(arrived, {_Computed(self._number, is_result=True)})
        return arrived


@dataclass(frozen=True)
class _Computed:
    """What a block returned, or made or changed inside."""

    block: int
    is_result: bool


# A parameter or buffer by its name, or a block.
_Source = str | _Computed


class _Tracer(TorchDispatchMode):
    """Follows values from storage to storage: of parameters and buffers, and of what blocks computed."""

    def __init__(self, model: nn.Module, flow: Dataflow) -> None:
        super().__init__()
        self.inside: int | None = None  # the block that runs
        self._flow = flow
        self._sources: dict[int, set[_Source]] = {}
        self._alive: list[Any] = []  # storages, so that no address is used twice
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self.add(tensor, {name})

    def add(self, tensor: Tensor, sources: Iterable[_Source]) -> None:
        storage = tensor.untyped_storage()
        self._alive.append(storage)
        self._sources.setdefault(storage._cdata, set()).update(sources)

    def sources_of(self, values: Any) -> set[_Source]:
        keys = _storages(values)
        return set().union(*(self._sources[key] for key in keys if key in self._sources))

    def read(self, sources: Iterable[_Source]) -> None:
        """The block that runs uses what came of these."""
        if self.inside is None:
            return
        for source in sources:
            if isinstance(source, str):
                self._flow.into[self.inside].add(source)
            elif source.block < self.inside - source.is_result:
                self._flow.skips.add((source.block, self.inside))

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = (args, kwargs or {})
        sources = set() if _reads_shape_only(func) else self.sources_of(given)
        self.read(sources)
        result = func(*args, **(kwargs or {}))
        views = set() if func._schema.is_mutable else _storages(given)  # type: ignore[attr-defined]  # of operators
        if self.inside is not None:
            sources = {_Computed(self.inside, is_result=False)}  # what went into it was read here
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.untyped_storage()._cdata not in views:
                self.add(value, sources)
        return result


def _storages(values: Any) -> set[int]:
    return {v.untyped_storage()._cdata for v in tree_leaves(values) if isinstance(v, Tensor)}


def _reads_shape_only(func: Any) -> bool:
    name = func.overloadpacket.__name__
    return name.endswith("_like") or name.startswith("new_")
