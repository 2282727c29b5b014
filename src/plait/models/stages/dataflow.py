"""Trace which parameters a model uses between which of its blocks, in a run on meta.

[Note: run on borrowed modules]
The model itself runs, not a copy, with its tensors replaced by ones on meta: a loss or a hook may hold a
reference to the model or to a list, and the values that blocks store there must be traced too. Afterwards all
attributes of its modules are restored, and the contents of their lists, dicts and sets. Once the model is
split for ranks, only a copy can run, for a batch with other entries. Hooks do not run on the copy.

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
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.fx.experimental._config
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from plait.models.activation_memory import DeviceKernelsOnMeta, OperatorsOnMeta
from plait.models.task import forward_inputs
from plait.models.tensors import tensors_in

TOKENS = (2, 8)  # batch and sequence of the run


@dataclass
class Dataflow:
    """The flow of values between gaps. See [Note: gaps].

    into        names of the parameters and buffers that flow into each block, by its number; at the end,
                those that flow into the result or the loss
    skips       (k, g): block g reads a result of block k other than through the output of g - 1
    changing    names of the blocks' attributes that their forwards set
    error       the exception that ended the run: the other fields are incomplete
    """

    into: list[set[str]]
    skips: set[tuple[int, int]] = field(default_factory=set)
    changing: set[str] = field(default_factory=set)
    error: Exception | None = None

    def gaps_of(self, name: str) -> set[int]:
        return {gap for gap, names in enumerate(self.into) if name in names}


def trace_dataflow(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    batch: Mapping[str, Tensor] | None = None,
    loss: Callable[[Any, Mapping[str, Tensor]], Any] | None = None,
) -> Dataflow:
    """Run the model and the loss on meta, as far as possible. `batch`: an example, of which only names,
    shapes and dtypes are used; None: token ids. The model is not changed."""
    flow = Dataflow([set() for _ in range(len(blocks) + 1)])
    ids = torch.zeros(TOKENS, dtype=torch.long, device="meta")
    batch = {"input_ids": ids, "labels": ids} if batch is None else batch
    on_meta = {key: torch.empty_like(value, device="meta") for key, value in batch.items()}
    try:
        with borrowed_on_meta(model), torch.random.fork_rng(devices=[]), torch.no_grad():
            _run(model, blocks, on_meta, loss, flow)
    except Exception as error:  # any error of the model's code without values
        flow.error = error
    return flow


def _run(model: nn.Module, blocks: Any, batch: Mapping[str, Tensor], loss: Any, flow: Dataflow) -> None:
    tracer = _Tracer(model, flow)
    for number, (_, block) in enumerate(blocks):
        block.register_forward_pre_hook(partial(tracer.enter, number), prepend=True)
        block.register_forward_hook(partial(tracer.leave, number))
    plain = [dict(vars(block)) for _, block in blocks]
    # nonzero and masks: on meta, as if every condition were true.
    config: Any = torch.fx.experimental._config
    assumed = config.patch(meta_nonzero_assume_all_nonzero=True)
    with assumed, DeviceKernelsOnMeta(torch.device("cpu")), tracer:
        result = model(**forward_inputs(model, batch))
        tracer.inside = len(blocks)
        if loss is not None:
            result = (result, loss(result, batch))
    tracer.read(tracer.sources_of(result))
    for before, (_, block) in zip(plain, blocks, strict=True):
        changed = {key for key, value in vars(block).items() if before.get(key, block) is not value}
        flow.changing |= {key for key in changed if not key.startswith("_")}


@contextlib.contextmanager
def borrowed_on_meta(model: nn.Module) -> Iterator[None]:
    """Replace the model's parameters and buffers by ones on meta inside the context. See [Note: run on
    borrowed modules]."""
    attributes = [(module, dict(vars(module))) for module in model.modules()]
    contents = [
        (value, _copied(value))
        for _, values in attributes
        for value in values.values()
        if isinstance(value, list | dict | set | deque)
    ]
    on_meta: dict[int, Tensor] = {}
    for module, _ in attributes:
        registered: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in registered:
            for key, tensor in tensors.items():
                if tensor is not None and id(tensor) not in on_meta:
                    on_meta[id(tensor)] = _on_meta(tensor)
                if tensor is not None:
                    tensors[key] = on_meta[id(tensor)]
    try:
        yield
    finally:
        for value, copied in contents:
            value.clear()
            value.extend(copied) if isinstance(value, list | deque) else value.update(copied)
        for module, values in attributes:
            vars(module).clear()
            vars(module).update(values)


def _copied(value: Any) -> Any:
    return dict(value) if isinstance(value, dict) else type(value)(value)


def _on_meta(tensor: Tensor) -> Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


@dataclass(frozen=True)
class _Computed:
    """A result of a block: its output, or a tensor that it created or changed."""

    block: int
    is_result: bool


# A parameter or buffer by its name, or a block.
_Source = str | _Computed


class _Tracer(OperatorsOnMeta):
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
        return self._sources_at({_key(tensor) for tensor in tensors_in(values)})

    def _sources_at(self, keys: Iterable[int]) -> set[_Source]:
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
        given: Any = (args, kwargs or {})
        tensors = _tensors(given)
        keys = {_key(tensor) for tensor in tensors}
        sources = set() if _reads_shape_only(func) else self._sources_at(keys)
        self.read(sources)
        is_mixed = len({tensor.is_meta for tensor in tensors}) > 1
        if is_mixed:  # with tables that a module keeps in plain attributes
            given = tree_map_only(Tensor, lambda t: torch.empty_like(t, device="meta"), given)
            keys = {_key(tensor) for tensor in _tensors(given)}
        views = set() if func._schema.is_mutable else keys
        result = super().__torch_dispatch__(func, types, *given)
        if self.inside is not None:
            sources = {_Computed(self.inside, is_result=False)}  # its inputs were read above
        for value in (*_tensors(result), *(tensors if is_mixed and func._schema.is_mutable else ())):
            if _key(value) not in views:
                self.add(value, sources)
        return result


def _tensors(values: Any) -> list[Tensor]:
    """The tensors among an operator's arguments or results."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, tuple | list):
        return []
    return [tensor for value in values for tensor in _tensors(value)]


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _reads_shape_only(func: Any) -> bool:
    name = func.overloadpacket.__name__
    return name.endswith("_like") or name.startswith("new_")
