"""Which parameters a model computes with between which of its blocks: seen on a run on meta.

[Note: gaps]
A model with L blocks has L + 1 gaps: gap g lies before block g, the last one behind the last block. A stage
runs all gaps up to its first block, with what it received in the place of earlier blocks' outputs. So what
it needs of the parameters outside of blocks is what flows into its own blocks' arguments (the last stage:
into the model's result) by another way than through a block. That is mostly what is used in its own gaps.
Yet a table that is looked up before the first block and given to all blocks is needed by all stages: each
looks up for itself, and the gradients add up.
"""

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from plait.models.loss import forward_inputs
from plait.models.saved import meta_twin, running_on_meta

_TOKENS = (2, 8)  # batch and sequence of the run


class Flow:
    """What flows where. See [Note: gaps].

    into            names of parameters and buffers, by the gap in which they reach a block's arguments or the
                    result
    is_complete     the run came to its end
    """

    def __init__(self, num_gaps: int) -> None:
        self.into: list[set[str]] = [set() for _ in range(num_gaps)]
        self.is_complete = False

    def gaps_of(self, name: str) -> set[int]:
        return {gap for gap, names in enumerate(self.into) if name in names}


def flow_of(model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]) -> Flow:
    """Runs a copy of the model on meta, on token ids; up to where that is impossible."""
    flow = Flow(len(blocks) + 1)
    with contextlib.suppress(Exception), torch.no_grad():  # whatever the model's code raises without values
        twin = meta_twin(model)
        tracer = _Tracer(twin)
        for gap, (name, _) in enumerate(blocks):
            watch = _BlockWatch(tracer, flow, gap)
            block = twin.get_submodule(name)
            block.register_forward_pre_hook(watch.before, with_kwargs=True, prepend=True)
            block.register_forward_hook(watch.after)
        ids = torch.zeros(_TOKENS, dtype=torch.long, device="meta")
        with running_on_meta(torch.device("cpu")), tracer:
            result = twin(**forward_inputs(twin, {"input_ids": ids}))
        flow.into[-1] |= tracer.sources_of(result)
        flow.is_complete = True
    return flow


class _BlockWatch:
    def __init__(self, tracer: "_Tracer", flow: Flow, gap: int) -> None:
        self._tracer, self._flow, self._gap = tracer, flow, gap

    def before(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        self._flow.into[self._gap] |= self._tracer.sources_of((args, kwargs))

    def after(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        """What a block returns travels, wherever it came from: it is new."""
        return tree_map_only(Tensor, torch.empty_like, output)


class _Tracer(TorchDispatchMode):
    """Follows the values of parameters and buffers from storage to storage."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._sources: dict[int, set[str]] = {}
        self._alive: list[Any] = []  # storages, so that no address is used twice
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self._sources.setdefault(tensor.untyped_storage()._cdata, set()).add(name)

    def sources_of(self, values: Any) -> set[str]:
        found: set[str] = set()
        for value in tree_leaves(values):
            if isinstance(value, Tensor):
                found |= self._sources.get(value.untyped_storage()._cdata, set())
        return found

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        found = set() if _reads_shape_only(func) else self.sources_of((args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result) if found else ():
            if isinstance(value, Tensor):
                storage = value.untyped_storage()
                self._alive.append(storage)
                self._sources[storage._cdata] = self._sources.get(storage._cdata, set()) | found
        return result


def _reads_shape_only(func: Any) -> bool:
    name = func.overloadpacket.__name__
    return name.endswith("_like") or name.startswith("new_")
