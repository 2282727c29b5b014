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

Stages pass on the output of their last block, and outputs of earlier blocks that later ones read (skip
connections, a decoder's blocks that read the encoder's output). If a block reads what an earlier one has
computed but not returned (a dict that blocks write into), the model cannot be split between the two.

[Note: gradients in a forward]
A forward may call torch.autograd.grad, for forces or a penalty. In one process that gradient passes through
all blocks between its inputs and the call. On a stage the graph ends at what it has received: the gradient
would lack these blocks' part, without an error. So those blocks have to be on the stage of the call.

[Note: values in a traced batch]
A model may read values of its batch on the host, such as the sizes of images. So if the run on meta fails, it
is repeated with the values of the batch's integers: operators compute with values while all their tensors
have them, and on meta from there on. A model may also read what it has computed: how many tokens each expert
has, where patches of bytes end. So if that fails too, the last run is on the CPU, with zeros for weights,
which take no memory. What flows where must not depend on the values; `StageForward` and `DataflowCheck` raise
an error where it does.
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
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from plait.models.activation_memory import DeviceKernelsOnMeta, OperatorsOnMeta
from plait.models.blocks import Blocks, block_lists, named_blocks
from plait.models.task import cast_entries, forward_inputs, forward_names
from plait.models.tensors import tensors_in

TOKENS = (2, 8)  # batch and sequence of the run
_MAX_PARAMETERS_OF_ZEROS = 10**10  # of a run on the CPU: some ten seconds


@dataclass
class Dataflow:
    """The flow of values between gaps. See [Note: gaps].

    read_by_gap   names of the parameters and buffers that flow into each block, by its number; at the end,
                  those that flow into the result or the loss
    skip_reads    (k, g): block g reads the output of block k other than through the output of g - 1
    hidden_reads  (k, g): block g reads what block k has computed, but not returned
    gradients     (k, g): a gradient that block g, or code after it, takes passes through block k
    changing      names of the blocks' attributes that their forwards set
    written       names of parameters that code outside of blocks changes in place
    calls         the numbers of the blocks in the order of their calls
    error         the exception that ended the run: the other fields are incomplete
    is_models     one like it ended the run on the CPU too: the model itself fails
    loss_error    the exception that ended the loss: what it reads besides the model's result is unknown
    """

    read_by_gap: list[set[str]]
    skip_reads: set[tuple[int, int]] = field(default_factory=set)
    hidden_reads: set[tuple[int, int]] = field(default_factory=set)
    gradients: set[tuple[int, int]] = field(default_factory=set)
    changing: set[str] = field(default_factory=set)
    written: set[str] = field(default_factory=set)
    calls: list[int] = field(default_factory=list)
    error: Exception | None = None
    is_models: bool = False
    loss_error: Exception | None = None

    def gaps_of(self, name: str) -> set[int]:
        return {gap for gap, names in enumerate(self.read_by_gap) if name in names}


def blocks_of(
    model: nn.Module,
    given: Blocks | None = None,
    batch: Mapping[str, Tensor] | None = None,
    *,
    one_list: bool = False,
) -> list[tuple[str, nn.Module]]:
    """Return the model's repeated blocks with their names, in forward order.

    `given`: their class or classes, or the modules themselves. Without it they are the modules of the model's
    largest list, or of several large ones (see `block_lists`) if a run on meta calls each module once, and
    shows that stages can pass on what they need from each other. Empty if there are none. `batch`: an
    example, for that run. `one_list`: of blocks with one residual stream. Raises ModelError for a block that
    the model does not have.
    """
    if given is not None:
        return named_blocks(model, given)
    lists = block_lists(model)
    if len(lists) > 1 and not one_list:
        blocks = [block for blocks in lists for block in blocks]
        flow = trace_dataflow(model, blocks, batch)
        is_traced = flow.error is None and not flow.hidden_reads
        if is_traced and sorted(flow.calls) == [*range(len(blocks))]:
            return [blocks[number] for number in flow.calls]
    return lists[0] if lists else []


def trace_dataflow(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    batch: Mapping[str, Tensor] | None = None,
    loss: Callable[[Any, Mapping[str, Tensor]], Any] | None = None,
) -> Dataflow:
    """Run the model and the loss on meta, as far as possible. `batch`: an example; None: token ids. The model
    is not changed."""
    attempts = [(traced, _on_meta) for traced in traced_batches(model, batch)]
    if sum(parameter.numel() for parameter in model.parameters()) <= _MAX_PARAMETERS_OF_ZEROS:
        attempts.append((_with_values(model, batch), _of_zeros))
    best: Dataflow | None = None
    for traced, make in attempts:
        flow = Dataflow([set() for _ in range(len(blocks) + 1)])
        try:
            with _borrowed(model, make), torch.random.fork_rng(devices=[]), torch.no_grad():
                _run(model, blocks, traced, loss, flow)
            if flow.loss_error is None:
                return flow
        except Exception as error:  # any error of the model's code without values
            flow.error = error
        if best is None or (best.error is not None and flow.error is None):
            best = flow
        if make is _of_zeros and flow.error is not None and type(best.error) is type(flow.error):
            best.error, best.is_models = flow.error, True
    assert best is not None, "there are attempts"
    return best


def traced_batches(model: nn.Module, batch: Mapping[str, Tensor] | None) -> Iterator[dict[str, Tensor]]:
    """Yield the batch to run the model with on meta, and if that fails: [Note: values in a traced batch].
    Floating-point inputs have the dtype of the model, as in a step."""
    if batch is None:
        ids = torch.zeros(TOKENS, dtype=torch.long, device="meta")
        yield {"input_ids": ids, "labels": ids}
        return
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.get_default_dtype())
    casts = cast_entries(batch, forward_names(model))
    on_meta = {
        key: torch.empty_like(value, dtype=dtype if key in casts else value.dtype, device="meta")
        for key, value in batch.items()
    }
    yield on_meta
    yield {k: on_meta[k] if v.is_floating_point() or v.is_meta else v.cpu() for k, v in batch.items()}


def _with_values(model: nn.Module, batch: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """The batch to run the model with on the CPU, with values of integers."""
    *_, traced = traced_batches(model, batch)
    return {
        key: torch.zeros_like(value, device="cpu") if value.is_meta else value
        for key, value in traced.items()
    }


def _run(model: nn.Module, blocks: Any, batch: Mapping[str, Tensor], loss: Any, flow: Dataflow) -> None:
    tracer = _DataflowTracer(model, flow)
    plain = [dict(vars(block)) for _, block in blocks]
    # nonzero and masks: on meta, as if every condition were true.
    config: Any = torch.fx.experimental._config
    assumed = config.patch(meta_nonzero_assume_all_nonzero=True)
    kernels, gradients = DeviceKernelsOnMeta(torch.device("cpu")), _GradientCalls(tracer)
    with _traced(blocks, tracer), assumed, kernels, gradients, tracer:
        result = model(**forward_inputs(model, batch))
        tracer.inside = len(blocks)
        tracer.read(tracer.sources_of(result))
        if loss is not None:
            try:
                tracer.read(tracer.sources_of(loss(result, batch)))
            except Exception as error:  # any error of the user's code without values
                flow.loss_error = error
    for before, (_, block) in zip(plain, blocks, strict=True):
        changed = {key for key, value in vars(block).items() if before.get(key, block) is not value}
        flow.changing |= {key for key in changed if not key.startswith("_")}


@contextlib.contextmanager
def _traced(blocks: Sequence[tuple[str, nn.Module]], tracer: "_DataflowTracer") -> Iterator[None]:
    """Trace calls of the blocks inside the context, including their hooks: what a hook keeps is not what the
    call returns."""
    classes = [(block, type(block)) for _, block in blocks]
    for number, (block, cls) in enumerate(classes):
        block.__class__ = _traced_class(cls, partial(tracer.enter, number), partial(tracer.leave, number))
    try:
        yield
    finally:
        for block, cls in classes:
            block.__class__ = cls


def _traced_class(cls: Any, enter: Callable[[], None], leave: Callable[[Any], Any]) -> Any:
    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        enter()
        return leave(cls.__call__(module, *args, **kwargs))

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), {**names, "__call__": call})


def borrowed_on_meta(model: nn.Module) -> contextlib.AbstractContextManager[None]:
    """Replace the model's parameters and buffers by ones on meta inside the context. See [Note: run on
    borrowed modules]."""
    return _borrowed(model, _on_meta)


@contextlib.contextmanager
def _borrowed(model: nn.Module, make: Callable[[Tensor], Tensor]) -> Iterator[None]:
    attributes = [(module, dict(vars(module))) for module in model.modules()]
    contents = [
        (value, _copied(value))
        for _, values in attributes
        for value in values.values()
        if isinstance(value, list | dict | set | deque)
    ]
    generators = {v for _, values in attributes for v in values.values() if isinstance(v, torch.Generator)}
    drawn = [(generator, generator.get_state()) for generator in generators]
    made: dict[int, Tensor] = {}
    for module, _ in attributes:
        registered: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in registered:
            for key, tensor in tensors.items():
                if tensor is not None and id(tensor) not in made:
                    made[id(tensor)] = make(tensor)
                if tensor is not None:
                    tensors[key] = made[id(tensor)]
    try:
        yield
    finally:
        for generator, state in drawn:
            generator.set_state(state)
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


def _of_zeros(tensor: Tensor) -> Tensor:
    """A buffer's values, or zeros; a parameter of one zero, expanded."""
    if not isinstance(tensor, nn.Parameter):
        return (
            torch.zeros_like(tensor, device="cpu") if tensor.is_meta else tensor.detach().to("cpu", copy=True)
        )
    zeros = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
    return nn.Parameter(zeros, tensor.requires_grad)


@dataclass(frozen=True)
class _Computed:
    """A result of a block: its output, or a tensor that it created or changed."""

    block: int
    is_result: bool


# A parameter or buffer by its name, or a block.
_Source = str | _Computed


class OperatorsOnMixed(OperatorsOnMeta):
    """Operators on meta tensors and others: [Note: values in a traced batch], and tables that a module keeps
    in plain attributes. One without a kernel on meta runs on the CPU, with zeros."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        are_meta = {tensor.is_meta for tensor in _tensors(given)}
        if len(are_meta) > 1:
            given = tree_map_only(Tensor, lambda t: torch.empty_like(t, device="meta"), given)
        elif True in are_meta and func is torch.ops.aten._to_copy.default:
            given[1].pop("device", None)
        try:
            return super().__torch_dispatch__(func, types, *given)
        except NotImplementedError:
            if True not in are_meta or func is torch.ops.aten._to_copy.default:
                raise
            on_cpu = tree_map_only(Tensor, lambda t: torch.zeros_like(t, device="cpu"), given)
            result = func(*on_cpu[0], **on_cpu[1])
            return tree_map_only(Tensor, lambda t: torch.empty_like(t, device="meta"), result)


class _DataflowTracer(OperatorsOnMixed):
    """Trace values from storage to storage: of parameters, buffers and results of blocks."""

    def __init__(self, model: nn.Module, flow: Dataflow) -> None:
        super().__init__()
        self.inside: int | None = None  # the running block
        self._flow = flow
        self._sources: dict[int, set[_Source]] = {}
        self._alive: list[Any] = []  # storages, so that no address is reused
        self._parameters = {_key(parameter): name for name, parameter in model.named_parameters()}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self.add(tensor, {name})

    def enter(self, number: int) -> None:
        self.inside = number
        self._flow.calls.append(number)

    def leave(self, number: int, output: Any) -> Any:
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
                self._flow.read_by_gap[self.inside].add(source)
            elif source.block < self.inside - source.is_result:
                flow = self._flow
                (flow.skip_reads if source.is_result else flow.hidden_reads).add((source.block, self.inside))

    def differentiate(self, inputs: Sequence[Tensor]) -> None:
        """Record a gradient with respect to these. See [Note: gradients in a forward]."""
        here = self.inside
        if here is None:  # code outside of blocks, which also runs on later stages
            here = len(self._flow.read_by_gap) - 1 if self._flow.calls else 0
        for tensor in inputs:
            sources = self.sources_of(tensor)
            computed = [source.block + 1 for source in sources if isinstance(source, _Computed)]
            readers = {gap for name in sources if isinstance(name, str) for gap in self._flow.gaps_of(name)}
            first = max(computed, default=min(readers, default=here if sources else 0))
            if first < here:
                self._flow.gradients.add((first, here))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = _tensors((args, kwargs or {}))
        keys = {_key(tensor) for tensor in tensors}
        sources = set() if _reads_shape_only(func) else self._sources_at(keys)
        self.read(sources)
        is_mixed = len({tensor.is_meta for tensor in tensors}) > 1
        views = set() if is_mixed or func._schema.is_mutable else keys
        if self.inside is None and func._schema.is_mutable:
            written = {_key(tensor) for tensor in _written(func, args, kwargs or {})}
            self._flow.written |= {self._parameters[key] for key in written & self._parameters.keys()}
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.inside is not None:
            sources = {_Computed(self.inside, is_result=False)}  # its inputs were read above
        for value in (*_tensors(result), *(tensors if is_mixed and func._schema.is_mutable else ())):
            if _key(value) not in views:
                self.add(value, sources)
        return result


class _GradientCalls(TorchFunctionMode):
    """Records calls of torch.autograd.grad, and returns tensors of the same shapes and sources: the run on
    meta has no graph."""

    def __init__(self, tracer: _DataflowTracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.autograd.grad:
            return func(*args, **(kwargs or {}))
        outputs, inputs = args[:2]
        inputs = _tensors([inputs])
        self._tracer.differentiate(inputs)
        gradients = tuple(torch.empty_like(tensor) for tensor in inputs)
        for gradient in gradients:
            self._tracer.add(gradient, self._tracer.sources_of((outputs, inputs)))
        return gradients


def _tensors(values: Any) -> list[Tensor]:
    """The tensors among an operator's arguments or results."""
    if isinstance(values, Tensor):
        return [values]
    if isinstance(values, dict):
        values = values.values()
    elif not isinstance(values, tuple | list):
        return []
    return [tensor for value in values for tensor in _tensors(value)]


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The tensors that an operator changes in place."""
    declared = func._schema.arguments
    given = {argument.name: value for argument, value in zip(declared, args, strict=False)} | dict(kwargs)
    return _tensors(
        [given.get(a.name) for a in declared if a.alias_info is not None and a.alias_info.is_write]
    )


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _reads_shape_only(func: Any) -> bool:
    name = func.overloadpacket.__name__
    return name.endswith("_like") or name.startswith("new_")
