"""Cuts a model's layers: gives its modules forwards that work on pieces, as a TPPlan says.

[Note: forwards are methods]
A new forward is `types.MethodType(callable, module)`: a copy of the module has the same callable, bound to
the copy. Callables therefore know groups and names, and of modules and tensors only what they are given or
told by identity.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

from torch import nn

from plait.errors import ModelError
from plait.models import LINEAR_FORWARDS
from plait.parallel.tensor.embedding import VocabParallelEmbedding, check_embedding, local_padding_idx
from plait.parallel.tensor.groups import ShardedDim, TensorGroups
from plait.parallel.tensor.linear import HeadOutput, ParallelLinear
from plait.parallel.tensor.norm import ParallelNorm
from plait.parallel.tensor.replicated import ParallelExperts, ReplicatedLayer, slice_head_arguments
from plait.parallel.tensor.sequence import SequenceShard
from plait.parallel.tensor.sequence_forward import (
    GatherTracker,
    SequenceParallelBlock,
    SequenceParallelRegion,
    check_outer_modules,
)
from plait.parallel.tensor.shared_input import SharedInputs
from plait.parallel.tensor.side_inputs import SideInputs
from plait.plan.sharding import DimSharding, LayerSharding, Style, TPPlan

_LINEAR = (Style.COLUMN, Style.ROW)


@dataclass(frozen=True)
class ParallelLayers:
    """A model whose layers have been cut."""

    head: HeadOutput

    @contextmanager
    def keep_logits_sharded(self) -> Iterator[None]:
        """Inside, the head gives this rank's logits of its vocabulary; outside, all of them."""
        before, self.head.stays_cut = self.head.stays_cut, True
        try:
            yield
        finally:
            self.head.stays_cut = before


def apply_tp_plan(
    model: nn.Module,
    plan: TPPlan,
    groups: TensorGroups,
    blocks: Sequence[tuple[str, nn.Module]],
    *,
    sequence: bool,
) -> ParallelLayers:
    """Changes the model in place, whose parameters are this rank's pieces by now.

    `sequence`: between the first block's input and the last one's output a rank has its tokens only. Raises
    ModelError for a module that cannot be cut as the plan says.
    """
    assert (groups.row.size, groups.col.size) == (plan.rows, plan.cols), "groups of another grid"
    cutting = _Application(
        model, plan, groups, [name for name, _ in blocks], sequence and groups.col.size > 1
    )
    for layer in plan.layers:
        cutting.cut(layer)
    if cutting.sequence:
        cutting.cut_tokens(blocks)
    slice_head_arguments(model, plan, groups.col.rank)
    for name, attribute, values in plan.attributes:
        setattr(model.get_submodule(name), attribute, values[groups.col.rank])
    return ParallelLayers(cutting.head)


@dataclass
class _Application:
    """What the forwards of one model share."""

    model: nn.Module
    plan: TPPlan
    groups: TensorGroups
    blocks: list[str]
    sequence: bool
    head: HeadOutput = field(default_factory=HeadOutput)

    def __post_init__(self) -> None:
        self.readers = {"row": SharedInputs(self.groups.row), "col": SharedInputs(self.groups.col)}
        self.tokens = SequenceShard(self.groups.col)
        self.gathers = GatherTracker()
        self.beside = SideInputs(self.tokens)
        self.regions = self._regions() if self.sequence else {}

    def cut(self, layer: LayerSharding) -> None:
        module = self.model.get_submodule(layer.module)
        forward = _own_forward(layer.module, module)
        match layer.style:
            case Style.COLUMN | Style.ROW:
                _check_linear(layer, module, forward)
                _set(module, self._linear(layer))
            case Style.VOCABULARY:
                self._cut_embedding(layer, module, forward)
            case Style.FEATURE_EMBEDDING:
                check_embedding(layer.module, module)
            case Style.NORM:
                features = self._cut_of(layer.out)
                if features is not None and features.group.size > 1:
                    _set(module, ParallelNorm(layer.module, forward, features))
            case Style.REPLICATE | Style.MLA_LATENT:
                tail = self._rotary(layer.module) if layer.style is Style.MLA_LATENT else 0
                inp, out = self._cut_of(layer.inp), self._cut_of(layer.out)
                if inp is not None or out is not None or tail:
                    _set(module, ReplicatedLayer(layer.module, forward, inp, out, tail, self.groups.col))
            case Style.EXPERTS:
                _set(module, ParallelExperts(layer.module, forward, self.groups.col))
            case Style.PER_HEAD_NORM:
                pass  # as it is: the engine sums the gradients of its weight

    def cut_tokens(self, blocks: Sequence[tuple[str, nn.Module]]) -> None:
        for region in self.regions.values():
            if region.gathers:
                module = self.model.get_submodule(region.name)
                forward = _own_forward(region.name, module)
                scope = self._scope(region.name)
                columns = self._columns_of(region) if region.is_pure else ()
                _set(
                    module,
                    SequenceParallelRegion(
                        region.name,
                        forward,
                        self.tokens,
                        self.gathers,
                        self.beside,
                        self.readers["col"],
                        scope,
                        columns,
                        region.is_pure,
                        region.is_closed,
                    ),
                )
        for number, (name, block) in enumerate(blocks):
            forward, is_last = _own_forward(name, block), number == len(blocks) - 1
            _set(
                block,
                SequenceParallelBlock(
                    name, forward, self.tokens, self.gathers, self.beside, number == 0, is_last
                ),
            )
        check_outer_modules(self.model, [name for name, _ in blocks], self.tokens)

    # --- layers

    def _linear(self, layer: LayerSharding) -> ParallelLinear:
        is_column = layer.style is Style.COLUMN
        parts, reads = ("row", "col") if is_column else ("col", "row")
        region = self._region_of(layer.module)
        is_open = region is not None and not region.is_closed
        return ParallelLinear(
            parts=self.groups.along(parts),
            readers=self.readers[reads],
            scope=self._scope(layer.module),
            is_given=is_column and region is not None and region.is_pure,
            transposed=layer.transposed,
            splits=self._cut_of(layer.inp) if layer.splits else None,
            gathers=self._cut_of(layer.out) if layer.gathers or layer.head else None,
            head=self.head if layer.head else None,
            tokens=self.tokens if is_open and not is_column else None,
        )

    def _cut_embedding(self, layer: LayerSharding, module: nn.Module, forward: Callable[..., Any]) -> None:
        check_embedding(layer.module, module)
        vocabulary = self._cut_of(layer.inp)
        if vocabulary is None or vocabulary.group.size == 1:
            return
        if isinstance(module, nn.Embedding):
            padding = local_padding_idx(module.padding_idx, vocabulary)
            module.padding_idx = padding
        _set(module, VocabParallelEmbedding(forward, vocabulary))

    def _cut_of(self, dim: DimSharding | None) -> ShardedDim | None:
        return None if dim is None else ShardedDim(dim, self.groups.along(dim.axis))

    def _rotary(self, name: str) -> int:
        parent = self.model.get_submodule(name.rpartition(".")[0])
        width = getattr(parent, "qk_rope_head_dim", None)
        if not isinstance(width, int):
            raise ModelError(
                f"the latent layer {name} does not say how many rotary features it gives",
                given=f"{type(parent).__name__} without qk_rope_head_dim",
                hint="a tensor_plan that leaves the attention whole",
            )
        return width

    # --- places

    def _scope(self, name: str) -> str:
        """The block a module is in, else its parent."""
        block = next((block for block in self.blocks if _is_in(name, block)), None)
        return block if block is not None else name.rpartition(".")[0]

    def _region_of(self, name: str) -> "_Region | None":
        return next((region for region in self.regions.values() if _is_in(name, region.name)), None)

    def _columns_of(self, region: "_Region") -> tuple[str, ...]:
        """By their names in it; itself is called ""."""
        return tuple(
            layer.module.removeprefix(region.name).removeprefix(".")
            for layer in self.plan.layers
            if layer.style is Style.COLUMN and _is_in(layer.module, region.name)
        )

    def _regions(self) -> dict[str, "_Region"]:
        """The plan's, and cut layers in a block that are in none of them: each a region by itself."""
        linears = [layer for layer in self.plan.layers if layer.style in _LINEAR]
        lone = [
            layer.module
            for layer in linears
            if any(_is_in(layer.module, block) for block in self.blocks)
            and not any(_is_in(layer.module, region) for region in self.plan.regions)
        ]
        return {name: self._region(name) for name in (*self.plan.regions, *lone)}

    def _region(self, name: str) -> "_Region":
        within = [layer for layer in self.plan.layers if _is_in(layer.module, name)]
        itself = next((layer for layer in within if layer.module == name and layer.style in _LINEAR), None)
        if itself is not None:
            # A lone ROW layer reads features that are cut, of all tokens.
            reads_stream = itself.style is Style.COLUMN
            return _Region(
                name, is_pure=True, is_closed=reads_stream and itself.gathers, gathers=reads_stream
            )
        styles = {layer.style for layer in within}
        is_closed = Style.ROW not in styles or Style.EXPERTS in styles
        return _Region(name, name in self.plan.pure and not is_closed, is_closed, gathers=True)


@dataclass(frozen=True)
class _Region:
    name: str
    is_pure: bool
    is_closed: bool
    gathers: bool  # its input's tokens


def _is_in(name: str, ancestor: str) -> bool:
    """Also of itself; the model is called ""."""
    return not ancestor or name == ancestor or name.startswith(ancestor + ".")


def _set(module: nn.Module, forward: Callable[..., Any]) -> None:
    module.forward = MethodType(forward, module)


def _own_forward(name: str, module: nn.Module) -> Callable[..., Any]:
    """The module's forward as a function of the module. See [Note: forwards are methods]."""
    forward = module.forward
    if isinstance(forward, MethodType) and forward.__self__ is module:
        return forward.__func__
    raise ModelError(
        f"the forward of {name} has been replaced by something that is not its method",
        given=type(forward).__name__,
        expected="types.MethodType(function, module)",
    )


def _check_linear(layer: LayerSharding, module: nn.Module, forward: Callable[..., Any]) -> None:
    if type(module).__name__ == "Conv1D" if layer.transposed else forward in LINEAR_FORWARDS:
        return
    raise ModelError(
        f"{layer.module} cannot be cut as a linear layer",
        given=f"{type(module).__name__} with a forward of its own",
        expected="Conv1D of transformers"
        if layer.transposed
        else "nn.Linear, or a subclass with its forward",
        hint=f"a tensor_plan that leaves {layer.module} whole",
    )
