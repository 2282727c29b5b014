"""Parameters that a model uses between its blocks, as the recording of a run shows.

[Note: gaps]
A model with L blocks has L + 1 gaps: gap g is before block g, the last one after the last block. A stage runs
all gaps up to its first block, with the received input in place of earlier blocks' outputs. So it needs those
parameters outside of blocks that flow into its own blocks (on the last stage: into the model's result) other
than through a block. These are mostly the ones used in its own gaps. But an embedding that is looked up
before the first block and passed to all blocks is needed by all stages: each looks it up itself, and the
gradients are summed.

If the first stage has no blocks, it computes the first block's first argument, which it sends: gap -1. The
stage of the first block computes the other arguments itself. So a parameter that flows into both is of both
stages.

Stages pass on the output of their last block, and outputs of earlier blocks that later ones read (skip
connections, a decoder's blocks that read the encoder's output). If a block reads what an earlier one has
computed but not returned (a dict that blocks write into), the model cannot be split between the two.

[Note: gradients in a forward]
A forward may call torch.autograd.grad, for forces or a penalty. In one process that gradient passes through
all blocks between its inputs and the call. On a stage the graph ends at what it has received: the gradient
would lack these blocks' part, without an error. So those blocks have to be on the stage of the call.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from plait.models.blocks import Blocks, block_lists, named_blocks
from plait.models.task import forward_inputs
from plait.models.tensors import direct_tensors, storage_key
from plait.models.trace.prepare import batch_with_values, meta_like, prepared, traced_batches, zeros_like
from plait.models.trace.recorder import (
    Differentiated,
    Entered,
    Left,
    ModelTrace,
    Operator,
    Received,
    Returned,
)

_MAX_PARAMETERS_OF_ZEROS = 10**10  # of a run on the CPU: some ten seconds


@dataclass
class Dataflow:
    """The flow of values between gaps. See [Note: gaps].

    read_by_gap   names of the parameters and buffers that flow into each block, by its number; at the end,
                  those that flow into the result or the loss; apart from `read_by_input`
    read_by_input those that flow into the first argument of the first block
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
    read_by_input: set[str] = field(default_factory=set)
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
        return {gap for gap, names in enumerate([self.read_by_input, *self.read_by_gap], -1) if name in names}


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
    attempts = [(traced, meta_like) for traced in traced_batches(model, batch)]
    if sum(parameter.numel() for parameter in model.parameters()) <= _MAX_PARAMETERS_OF_ZEROS:
        attempts.append((batch_with_values(model, batch), zeros_like))
    best: Dataflow | None = None
    for traced, make in attempts:
        flow = _traced(model, blocks, traced, make, loss)
        if flow.error is None and flow.loss_error is None:
            return flow
        if best is None or (best.error is not None and flow.error is None):
            best = flow
        if make is zeros_like and flow.error is not None and type(best.error) is type(flow.error):
            best.error, best.is_models = flow.error, True
    assert best is not None, "there are attempts"
    return best


def _traced(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    batch: Mapping[str, Tensor],
    make: Callable[[Tensor], Tensor],
    loss: Callable[[Any, Mapping[str, Tensor]], Any] | None,
) -> Dataflow:
    trace, changing = ModelTrace(), set[str]()
    error: Exception | None = None
    loss_error: Exception | None = None
    try:
        with prepared(model, make):
            before = [dict(vars(block)) for _, block in blocks]
            with trace.recording(model, blocks=blocks):
                result = model(**forward_inputs(model, batch))
                trace.add_result(result)
                if loss is not None:
                    try:
                        trace.add_result(loss(result, batch))
                    except Exception as of_loss:  # any error of the user's code without values
                        loss_error = of_loss
            for values, (_, block) in zip(before, blocks, strict=True):
                changing |= {key for key, value in vars(block).items() if values.get(key, block) is not value}
    except Exception as of_model:  # any error of the model's code without values
        error = of_model
    flow = Dataflow([set() for _ in range(len(blocks) + 1)])
    try:
        _DataflowQuery(trace, [name for name, _ in blocks], flow)
    except Exception as of_query:  # a tensor without a storage, such as a sparse one
        error = error or of_query
    flow.changing, flow.error, flow.loss_error = changing, error, loss_error
    return flow


@dataclass(frozen=True)
class _Computed:
    """A result of a block: its output, or a tensor that it created or changed."""

    block: int
    is_result: bool


# A parameter or buffer by its name, or a block.
_Source = str | _Computed


class _DataflowQuery:
    """Follows values from storage to storage: of parameters, buffers and results of blocks."""

    def __init__(self, trace: ModelTrace, blocks: Sequence[str], flow: Dataflow) -> None:
        """Adds to `flow`."""
        self.flow = flow
        self._numbers = {name: number for number, name in enumerate(blocks)}
        self._inside: int | None = None  # the running block
        self._input: dict[int, set[_Source]] = {}  # sources of the running first block's first argument
        self._sources: dict[int, set[_Source]] = {}
        first_names: dict[int, str] = {}
        for name, tensor in (*trace.parameters.items(), *trace.buffers.items()):
            self._add(tensor, {first_names.setdefault(id(tensor), name)})
        self._parameters = {storage_key(t): first_names[id(t)] for t in trace.parameters.values()}
        for event in trace.events:
            self._follow(event)

    def _follow(self, event: Any) -> None:
        match event:
            case Operator():
                self._follow_operator(event)
            case Entered(name, tensors, others):
                self._inside = self._numbers[name]
                self.flow.calls.append(self._inside)
                if self._inside == 0:
                    self._begin(tensors, others)
            case Left(_, tensors):
                self._read(self._sources_of(tensors))
                self._inside = None
                for key, sources in self._input.items():
                    self._sources.setdefault(key, set()).update(sources)
                self._input = {}
            case Received(name, tensors):
                for tensor in tensors:
                    self._add(tensor, {_Computed(self._numbers[name], is_result=True)})
            case Differentiated(outputs, inputs, gradients):
                self._differentiate(inputs)
                for gradient in gradients:
                    self._add(gradient, self._sources_of((*outputs, *inputs)))
            case Returned(tensors):
                self._inside = len(self._numbers)
                self._read(self._sources_of(tensors))

    def _begin(self, tensors: Sequence[Tensor], others: Sequence[Tensor]) -> None:
        """Record what flows into the first argument of the first block, which then reads no more of it."""
        keys = {storage_key(tensor) for tensor in tensors}
        self.flow.read_by_input |= {name for name in self._sources_at(keys) if isinstance(name, str)}
        for key in keys - {storage_key(tensor) for tensor in others}:
            self._input[key] = self._sources.pop(key, set())

    def _add(self, tensor: Tensor, sources: Iterable[_Source]) -> None:
        self._sources.setdefault(storage_key(tensor), set()).update(sources)

    def _sources_of(self, tensors: Iterable[Tensor]) -> set[_Source]:
        return self._sources_at({storage_key(tensor) for tensor in tensors})

    def _sources_at(self, keys: Iterable[int]) -> set[_Source]:
        return set().union(*(self._sources[key] for key in keys if key in self._sources))

    def _read(self, sources: Iterable[_Source]) -> None:
        """Record that the running block reads values derived from these."""
        if self._inside is None:
            return
        for source in sources:
            if isinstance(source, str):
                self.flow.read_by_gap[self._inside].add(source)
            elif source.block < self._inside - source.is_result:
                reads = self.flow.skip_reads if source.is_result else self.flow.hidden_reads
                reads.add((source.block, self._inside))

    def _differentiate(self, inputs: Sequence[Tensor]) -> None:
        """Record a gradient with respect to these. See [Note: gradients in a forward]."""
        here = self._inside
        if here is None:  # code outside of blocks, which also runs on later stages
            here = len(self.flow.read_by_gap) - 1 if self.flow.calls else 0
        for tensor in inputs:
            sources = self._sources_of([tensor])
            computed = [source.block + 1 for source in sources if isinstance(source, _Computed)]
            readers = {gap for name in sources if isinstance(name, str) for gap in self.flow.gaps_of(name)}
            first = max(computed, default=min(readers, default=here if sources else -1))
            if first < here:
                self.flow.gradients.add((first, here))

    def _follow_operator(self, call: Operator) -> None:
        tensors = direct_tensors((call.args, call.kwargs))
        keys, is_mutable = {storage_key(tensor) for tensor in tensors}, call.func._schema.is_mutable
        sources = set() if _reads_shape_only(call.func) else self._sources_at(keys)
        self._read(sources)
        is_mixed = len({tensor.is_meta for tensor in tensors}) > 1
        if self._inside is None and is_mutable:
            written = {storage_key(tensor) for tensor in _written(call)}
            self.flow.written |= {self._parameters[key] for key in written & self._parameters.keys()}
        if self._inside is not None:
            sources = {_Computed(self._inside, is_result=False)}  # its inputs were read above
        views = set() if is_mixed or is_mutable else keys
        for value in (*direct_tensors(call.result), *(tensors if is_mixed and is_mutable else ())):
            if storage_key(value) not in views:
                self._add(value, sources)


def _written(call: Operator) -> list[Tensor]:
    """The tensors that an operator changes in place."""
    declared = call.func._schema.arguments
    given = {argument.name: value for argument, value in zip(declared, call.args, strict=False)}
    given |= call.kwargs
    return direct_tensors(
        [given.get(a.name) for a in declared if a.alias_info is not None and a.alias_info.is_write]
    )


def _reads_shape_only(func: Any) -> bool:
    name = func.overloadpacket.__name__
    return name.endswith("_like") or name.startswith("new_")
