"""Apply a TPPlan to a model: give its modules forwards that compute with shards.

[Note: forwards are methods]
A module's new forward is one function, the same for all modules, which calls what the module's attribute
`plait_forward` holds: torch.compile takes two modules to be alike only if their forwards are one function. A
copy of the module shares the callable. So callables hold groups and names, but no modules or tensors of the
model; those are arguments, or are looked up by identity.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MethodType
from typing import Any

from torch import nn

from plait.errors import ModelError
from plait.models import input_embedding, linear_forwards, pretrained_base
from plait.models.sharding.weight_norms import base_of, factors_of
from plait.parallel.float8 import PLAIN, LayerProducts
from plait.parallel.linear_products import PlainProducts
from plait.parallel.tensor.functional import UsedFeatures, split
from plait.parallel.tensor.linear import HeadOutput, ParallelLinear
from plait.parallel.tensor.norm import ParallelNorm
from plait.parallel.tensor.other_layers import (
    ParallelExperts,
    ReplicatedLayer,
    UnfusedForward,
    VocabParallelEmbedding,
    check_embedding,
    read_own_channels,
    slice_head_arguments,
)
from plait.parallel.tensor.sequence import SequenceShard
from plait.parallel.tensor.sequence_forward import (
    Region,
    SequenceParallelBlock,
    SequenceParallelRegion,
    SideInputs,
    begin_with_received,
    check_outer_modules,
)
from plait.parallel.tensor.shards import ShardedDim, TensorGroups
from plait.parallel.tensor.shared_input import SharedInputs
from plait.parallel.tensor.weight_norms import WeightNorms
from plait.plan.axes import FEATURES, HIDDEN
from plait.plan.sharding import DimSharding, LayerSharding, Style, TPPlan, token_regions

_LINEAR = (Style.COLUMN, Style.ROW)


def apply_tp_plan(
    model: nn.Module,
    plan: TPPlan,
    groups: TensorGroups,
    blocks: Sequence[tuple[str, nn.Module]],
    *,
    sequence_shard: SequenceShard | None = None,
    products: LayerProducts = PLAIN,
    compile_blocks: Callable[[], None] = lambda: None,
    head: HeadOutput | None = None,
) -> None:
    """Replace forwards in place, in a model whose parameters are this rank's shards already.

    `sequence_shard`: with it, a rank has only its tokens between the first block's input and the last block's
    output.
    `products`: of the sharded linear layers.
    `compile_blocks` is called when everything inside of the blocks is done. What shards and gathers their
    inputs and outputs stays outside of compiled code, because it keeps records of autograd's graph.
    `head`: the output mode of the head, also of one that is not sharded. Raises ModelError for a module that
    cannot be sharded as planned.
    """
    assert (groups.row.size, groups.col.size) == (plan.rows, plan.cols), "groups of another grid"
    names = [name for name, _ in blocks]
    application = _Application(model, plan, groups, names, sequence_shard, products, head or HeadOutput())
    if plan.rows == plan.cols == 1:
        application.defer_logits()
    for layer in plan.layers:
        application.apply_to_layer(layer)
    application.apply_to_regions()
    compile_blocks()
    if application.is_sequence_parallel:
        application.apply_to_blocks(blocks)
    slice_head_arguments(model, plan, groups.col.rank)
    for name, attribute, values in plan.attributes:
        setattr(model.get_submodule(name), attribute, values[groups.col.rank])
    application.shard_input_embeddings()


@dataclass
class _Application:
    """State that the forwards of one model share."""

    model: nn.Module
    plan: TPPlan
    groups: TensorGroups
    block_names: list[str]
    sequence_or_none: SequenceShard | None
    products: LayerProducts
    head: HeadOutput

    def __post_init__(self) -> None:
        self.shared_inputs = {HIDDEN: SharedInputs(self.groups.row), FEATURES: SharedInputs(self.groups.col)}
        self.sequence_shard = self.sequence_or_none or SequenceShard(self.groups.col)
        self.side_inputs = SideInputs(self.sequence_shard)
        self.regions = self._regions() if self.is_sequence_parallel else {}

    @property
    def is_sequence_parallel(self) -> bool:
        return self.sequence_or_none is not None and self.groups.col.size > 1

    def apply_to_layer(self, layer: LayerSharding) -> None:
        name, module = layer.module, self.model.get_submodule(layer.module)
        forward = own_forward(name, module)
        inp, out = self._sharded_dim(layer.inp), self._sharded_dim(layer.out)
        match layer.style:
            case Style.COLUMN | Style.ROW:
                _check_linear(layer, module, forward)
                set_forward(module, self._linear(layer, inp, out))
            case Style.VOCABULARY:
                check_embedding(name, module)
                if inp is not None and inp.group.size > 1:
                    set_forward(module, VocabParallelEmbedding(forward, inp))
            case Style.FEATURE_EMBEDDING:
                check_embedding(name, module)
            case Style.NORM:
                if out is not None and out.group.size > 1:
                    set_forward(module, ParallelNorm(name, forward, out))
            case Style.REPLICATE | Style.MLA_LATENT:
                if inp is not None or out is not None or layer.summed:
                    summed = layer.summed
                    set_forward(module, ReplicatedLayer(name, forward, inp, out, summed, self.groups.col))
            case Style.EXPERTS if not layer.splits:  # else see `parallel/experts/`
                set_forward(module, ParallelExperts(name, forward, self.groups.col))
            case Style.WEIGHT_NORM:
                set_forward(module, self._weight_norms(layer, inp, out))
            case Style.DEPTHWISE:
                self._apply_to_convolution(layer, module)
            case Style.PER_HEAD_NORM | Style.EXPERTS:
                pass  # unchanged: the engine reduces its weight's gradient

    def defer_logits(self) -> None:
        """Let the head, if it is a linear layer without an adapter, take part in its loss. See head.py."""
        base = pretrained_base(self.model)
        module = None if base is None else base.get_output_embeddings()
        if isinstance(module, nn.Linear) and linear_forwards().get(own_forward("the head", module)) is False:
            shared = self.shared_inputs[FEATURES]
            set_forward(module, ParallelLinear(PlainProducts(), self.groups.row, shared, head=self.head))

    def shard_input_embeddings(self) -> None:
        """Make the model shard the embeddings that it receives in place of token ids."""
        base = pretrained_base(self.model)
        table = None if base is None else input_embedding(base)
        for layer in self.plan.layers:
            out = self._sharded_dim(layer.out)
            if self.model.get_submodule(layer.module) is table and out is not None and out.group.size > 1:
                self.model.register_forward_pre_hook(_shard_input_embeddings(out), with_kwargs=True)

    def apply_to_regions(self) -> None:
        sequence, shared = self.sequence_shard, self.shared_inputs[FEATURES]
        readers = {name: self._readers_of(region) for name, region in self.regions.items()}
        input_cast = self.products.input_cast([*chain(*readers.values())], self.groups.row)
        for name, region in self.regions.items():
            if region.gathers:
                module = self.model.get_submodule(name)
                columns = tuple(reader.removeprefix(name).removeprefix(".") for reader in readers[name])
                forward, has_float8 = own_forward(name, module), self.products.any_of(readers[name])
                set_forward(
                    module,
                    SequenceParallelRegion(
                        region,
                        forward,
                        sequence,
                        self.side_inputs,
                        shared,
                        self._scope(name),
                        columns,
                        has_float8,
                        input_cast,
                    ),
                )

    def apply_to_blocks(self, blocks: Sequence[tuple[str, nn.Module]]) -> None:
        """Shard the tokens of the blocks' inputs and outputs."""
        sequence, side_inputs = self.sequence_shard, self.side_inputs
        for index, (name, block) in enumerate(blocks):
            forward, is_last = own_forward(name, block), index == len(blocks) - 1
            set_forward(
                block, SequenceParallelBlock(name, forward, sequence, side_inputs, index == 0, is_last)
            )
        begin_with_received(self.model, sequence)
        check_outer_modules(self.model, self.block_names, sequence)

    # --- layers

    def _apply_to_convolution(self, layer: LayerSharding, module: nn.Module) -> None:
        if layer.uses is not None:
            read_own_channels(module, layer.uses.ranges[self.groups.col.rank])
        if layer.fused:
            name = layer.module.rpartition(".")[0]
            mixer = self.model.get_submodule(name)
            set_forward(mixer, UnfusedForward(own_forward(name, mixer)))

    def _linear(self, layer: LayerSharding, inp: ShardedDim | None, out: ShardedDim | None) -> ParallelLinear:
        is_column = layer.style is Style.COLUMN
        output_axis, input_grad_axis = (HIDDEN, FEATURES) if is_column else (FEATURES, HIDDEN)
        region = next((r for r in self.regions.values() if _is_in(layer.module, r.name)), None)
        is_open = region is not None and not region.is_closed
        # COLUMN layers have input features over `row` and output features over `col`, ROW layers vice versa.
        products = self.products.of(
            layer.module, layer.transposed, self.groups.along(output_axis), self.groups.along(input_grad_axis)
        )
        return ParallelLinear(
            products,
            reduce_group=self.groups.along(output_axis),
            shared_inputs=self.shared_inputs[input_grad_axis],
            scope=self._scope(layer.module),
            input_is_gathered=is_column and region is not None and region.is_pure,
            split_input=inp if layer.splits else None,
            gather_output=out if layer.gathers or layer.head else None,
            head=self.head if layer.head else None,
            sequence_shard=self.sequence_shard if is_open and not is_column and not layer.summed else None,
            used_output=UsedFeatures(out, layer.uses) if out is not None and layer.uses is not None else None,
            summed=layer.summed,
        )

    def _weight_norms(
        self, layer: LayerSharding, inp: ShardedDim | None, out: ShardedDim | None
    ) -> WeightNorms:
        parameters = {parameter.name: parameter for parameter in self.plan.parameters}
        is_embedding = isinstance(self.model.get_submodule(base_of(layer.module)), nn.Embedding)
        names = factors_of(layer.module, is_embedding=is_embedding)
        full: tuple[DimSharding | None, ...] = (None, None)
        dims = [parameters[name].dims if name in parameters else full for name in names]
        of_A, of_B = ((self._sharded_dim(first), self._sharded_dim(second)) for first, second in dims)
        return WeightNorms(out, inp, of_A, of_B, layer.transposed, layer.gathers)

    def _sharded_dim(self, dim: DimSharding | None) -> ShardedDim | None:
        return None if dim is None else ShardedDim(dim, self.groups.along(dim.axis))

    # --- scopes and regions

    def _scope(self, name: str) -> str:
        """Return the block that contains a module, else the module's parent."""
        block = next((block for block in self.block_names if _is_in(name, block)), None)
        return block if block is not None else name.rpartition(".")[0]

    def _readers_of(self, region: Region) -> list[str]:
        """Names of a pure region's COLUMN layers, which multiply its input; of another region, none."""
        return [
            layer.module
            for layer in self.plan.layers
            if region.is_pure and layer.style is Style.COLUMN and _is_in(layer.module, region.name)
        ]

    def _regions(self) -> dict[str, Region]:
        found = token_regions(self.plan.layers, self.plan.regions, self.block_names)
        is_lone = {layer.module for layer in self.plan.layers if layer.style in _LINEAR}
        return {
            name: Region(
                name,
                name in is_lone or (name in self.plan.pure and not region.is_closed),
                region.is_closed,
                region.gathers,
            )
            for name, region in found.items()
        }


def _is_in(name: str, ancestor: str) -> bool:
    """Return whether `name` is `ancestor` or a module inside it; "" is the model."""
    return not ancestor or name == ancestor or name.startswith(ancestor + ".")


class _Shared:
    """A callable that copies of a module share."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Shared":
        return self


def _forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    return module.plait_forward.forward(module, *args, **kwargs)


def set_forward(module: nn.Module, forward: Callable[..., Any]) -> None:
    """Replace the module's forward by a function of the module. See [Note: forwards are methods]."""
    module.plait_forward = _Shared(forward)  # type: ignore[assignment]
    module.forward = MethodType(_forward, module)


def own_forward(name: str, module: nn.Module) -> Callable[..., Any]:
    """Return the module's forward as a function of the module. See [Note: forwards are methods]."""
    forward = module.forward
    if isinstance(forward, MethodType) and forward.__self__ is module:
        replaced = module.plait_forward if forward.__func__ is _forward else None
        return replaced.forward if isinstance(replaced, _Shared) else forward.__func__
    raise ModelError(
        f"the forward of {name} has been replaced by something other than a method",
        given=type(forward).__name__,
        expected="a method of the module",
        hint="module.forward = types.MethodType(function, module)",
    )


def _check_linear(layer: LayerSharding, module: nn.Module, forward: Callable[..., Any]) -> None:
    if linear_forwards().get(forward) is layer.transposed:
        return
    raise ModelError(
        f"cannot shard {layer.module} as a linear layer",
        given=f"{type(module).__name__} with a custom forward",
        expected="Conv1D of transformers"
        if layer.transposed
        else "nn.Linear, or a subclass that does not override forward",
        hint=f"a tensor_plan that replicates {layer.module}",
    )


def _shard_input_embeddings(features: ShardedDim) -> Callable[..., Any]:
    """A forward pre-hook: `inputs_embeds` (B, S, H) becomes (B, S, h). Copies of the model share it."""

    def hook(_: nn.Module, args: Any, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        embeddings = inputs.get("inputs_embeds")
        return args, inputs if embeddings is None else {
            **inputs,
            "inputs_embeds": split(embeddings, features),
        }

    return hook
