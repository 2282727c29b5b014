"""Build a model's `TPPlan`: how its layers and parameters are sharded on a grid of rows and columns.

[Note: partial gradients]
Take a parameter that is replicated, or sharded over `row` alone, so that every column holds the same shard.
Its gradient on a column is complete if what it computes with is the same on all columns, and if the gradient
of its output is: a COLUMN layer sums its input's gradient over the columns, a ROW layer its output, so the
residual stream and its gradient are complete on each. If it meets features that only this column has, or
tokens (under sequence parallelism, between the first block and the last), its gradient is a partial sum. A
run of the model on meta shows what each parameter meets: columns.py [Note: states of tensors]. No name counts
in it, so a block may be changed: adapters, scales, other layers.

- A parameter that a table styles `replicated_with_grad_allreduce` is partial, as the table says.
- In an embedding that is sharded by vocabulary, other parameters than the table (a norm) see the rows of this
  column's tokens: always partial.
- Of a model that does not run on meta (and gets no example_batch), parameters between regions are partial
  under sequence parallelism, and the biases of ROW layers; others have to have styles.

A shard that columns share because they share kv heads (see `DimSharding.sharers`) has a partial gradient on
each of them, and needs no mark. Along `row` nothing is partial: rows hold different shards, or compute the
same.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from torch import Tensor, nn

from plait.errors import ModelError, PlanError
from plait.models.sharding.builder import (
    CONTAINERS,
    TPPlanBuilder,
    add_linear,
    concatenated,
    linear_features,
    one_range_each,
    part_width,
)
from plait.models.sharding.columns import Columns, MisfitError, follow_columns
from plait.models.sharding.derive import derive_styles
from plait.models.sharding.families import add_head_arguments, family_plan
from plait.models.sharding.heads import (
    add_head_attributes,
    add_head_norm,
    add_undeclared_head_norms,
    check_heads,
    find_heads,
    shard_over_col,
    used_sizes,
)
from plait.models.sharding.layout import LAYOUT, Dims, apply_layout, implied_dims, split_table
from plait.models.sharding.placement import (
    adapted_layer,
    add_parameter_adapters,
    check_mixed,
    columns_by_names,
    find_adapted,
    mark_sums,
    place_layers,
)
from plait.models.sharding.residual import (
    add_residual_layers,
    check_rows,
    check_sequence,
    find_regions,
    pure_regions,
)
from plait.models.sharding.styles import (
    StyleSpec,
    layer_pattern,
    replicate_hint,
    resolve_styles,
    style_text,
)
from plait.models.sharding.weight_norms import add_weight_norms, base_of, magnitudes
from plait.models.task import forward_names
from plait.models.transformers_types import input_embedding
from plait.plan.axes import FEATURES
from plait.plan.sharding import DimSharding, LayerSharding, Range, Style, StyleLine, TPPlan, split_width


def build_tp_plan(
    model: nn.Module,
    rows: int,
    cols: int,
    *,
    sequence: bool,
    blocks: Sequence[tuple[str, nn.Module]],
    given: Mapping[str, str] | None = None,
    batch: Mapping[str, Tensor] | None = None,
) -> TPPlan:
    """Return the plan that shards `model`, unsharded and on meta or not, on a grid of `rows` x `cols`.

    `blocks`: as returned by `blocks_of`. `sequence`: shard the tokens of the residual stream between regions.
    `given`: the user's styles, by patterns of module paths, which override the model's own plan, or layout
    rules and names (`layout.py`). Without a plan one is derived from a run on meta, with `batch` as example.
    Raises ModelError for a model that cannot be sharded, PlanError for a grid that does not fit.
    """
    build = partial(
        _build, model, rows, cols, sequence and cols > 1, [name for name, _ in blocks], given, batch
    )
    try:
        return build(derives=False)
    except MisfitError:
        with contextlib.suppress(ModelError, PlanError):
            if given is None:
                return build(derives=True)
        raise


def _build(
    model: nn.Module,
    rows: int,
    cols: int,
    sequence: bool,
    blocks: Sequence[str],
    given: Mapping[str, str] | None,
    batch: Mapping[str, Tensor] | None,
    *,
    derives: bool,
) -> TPPlan:
    """Build the plan. `derives`: without the styles of the model's family."""
    layout, styles, names = split_table(given)
    specs = {} if derives else resolve_styles(model, family_plan(model, cols), styles)
    builder = TPPlanBuilder(model, rows, cols, tuple(blocks), specs)
    is_derived = given in (None, {LAYOUT: layout}) and not any(map(builder.block_of, specs))
    failure = _derive(builder, batch) if is_derived else None
    builder.needs_all_features |= {base_of(name) for name in magnitudes(builder)}  # of a head
    _declare_embedding_and_head(builder)
    dims = {} if layout is None else apply_layout(builder, layout, names, sequence=sequence)
    _add_styles(builder)
    if not builder.layers or (given is None and not any(map(builder.block_of, builder.layers))):
        raise ModelError(
            "there is no tensor plan for this model",
            given=type(model).__name__ + (f", {failure}" if failure else ""),
            expected="a model with a plan, linear layers in blocks, or tensor_plan = {path: style}",
            hint=_example_plan(builder, batch),
        )
    _check_shared(builder)
    add_weight_norms(builder)
    regions = find_regions(builder)
    if sequence:
        check_sequence(builder, regions)
    pure = pure_regions(builder, regions)
    columns = Columns() if cols == 1 else follow_columns(builder, regions, pure, batch, sequence=sequence)
    columns = columns or columns_by_names(builder, regions, sequence=sequence)
    check_mixed(builder, columns, sequence=sequence, trusts_styles=is_derived or given is not None)
    place_layers(builder, columns, sequence=sequence)
    if rows > 1:
        add_residual_layers(builder, regions)
        check_rows(builder, regions)
    mark_sums(builder, columns, pure if sequence else frozenset(), sequence=sequence)
    return TPPlan(
        rows,
        cols,
        tuple(builder.layers.values()),
        tuple(builder.parameters.values()),
        regions,
        pure,
        tuple((module, key, values) for (module, key), values in builder.attributes.items()),
        tuple(builder.arguments),
        _lines(builder, dims),
        layout or "",
    )


def _add_styles(builder: TPPlanBuilder) -> None:
    """Add the layers and parameters that have styles, and what follows from these."""
    find_adapted(builder)
    for name, spec in builder.specs.items():
        if name in builder.modules:
            _add_module(builder, name, spec)
        else:
            _add_parameter(builder, name, spec)
    _add_experts(builder)
    add_parameter_adapters(builder)
    _add_head_numbers(builder)
    add_undeclared_head_norms(builder)


def _lines(builder: TPPlanBuilder, named: Mapping[str, Dims]) -> tuple[StyleLine, ...]:
    """Return the plan's text, a line for all that match a pattern if they have one style. `named`: dims."""
    names = [*filter(None, builder.modules), *builder.shapes]
    texts = {name: style_text(builder.specs[name]) if name in builder.specs else "" for name in names}

    def in_blocks(name: str) -> str:
        block = builder.block_of(name) or ""
        return layer_pattern(block) + name[len(block) :]

    patterns: dict[str, str] = {}
    for pattern_of in (layer_pattern, in_blocks, str):  # from wide ones to names
        groups: dict[str, list[str]] = {}
        for name in names:
            groups.setdefault(pattern_of(name), []).append(name)
        for pattern, matched in groups.items():
            if len({texts[name] for name in matched}) == 1:
                for name in matched:
                    patterns.setdefault(name, pattern)
    firsts = {patterns[name]: name for name in reversed(names)}
    lines = []
    for name in names:
        if texts[name] and firsts[patterns[name]] == name:
            dims = named.get(name) or implied_dims(builder, name, builder.specs[name])
            lines.append(StyleLine(name, patterns[name], texts[name], " ".join(map(str, dims))))
    return tuple(lines)


def _derive(builder: TPPlanBuilder, batch: Mapping[str, Tensor] | None) -> str:
    """Add the styles of a derived plan. Returns why there are none, if the model does not run on meta."""
    try:
        builder.specs.update(derive_styles(builder, batch))
    except Exception as error:  # any error of the model's code without values
        return f"which does not run on meta: {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return ""


def _example_plan(builder: TPPlanBuilder, batch: Mapping[str, Tensor] | None) -> str:
    """Return an example plan for two consecutive layers of the model's blocks, or what deriving one needs."""
    if batch is None and "input_ids" not in (forward_names(builder.model) or ("input_ids",)):
        return "example_batch=batch: its own inputs"
    block = builder.blocks[0] if builder.blocks else ""
    inside = [name for name in builder.modules if name.startswith(f"{block}.")] if block else []
    layers = [name for name in inside if linear_features(builder.modules[name])][-2:]
    if len(layers) < 2:
        return "tp=1"
    up, down = (layer_pattern(block) + name[len(block) :] for name in layers)
    return f"tensor_plan={{'{up}': 'colwise', '{down}': 'rowwise', ...}}, or tp=1"


def _declare_embedding_and_head(builder: TPPlanBuilder) -> None:
    """Declare styles for a transformers model's embedding and head, tied or not."""
    if builder.pretrained is None or not builder.specs:
        return
    names = {id(module): name for name, module in builder.modules.items()}
    embedding = _adapted(builder, names, input_embedding(builder.pretrained), Style.VOCABULARY)
    head = _adapted(builder, names, builder.pretrained.get_output_embeddings(), Style.COLUMN)
    replicated = {name for name, spec in builder.specs.items() if spec.style is Style.REPLICATE}
    is_tied = False
    if isinstance(head, nn.Linear) and names.get(id(head), "") not in {"", *replicated}:
        builder.heads.add(name := names[id(head)])
        is_head = name not in builder.needs_all_features  # else its logits are gathered
        builder.specs[name] = StyleSpec(Style.COLUMN, head=is_head, gathers=not is_head)
        is_tied = isinstance(embedding, nn.Embedding) and head.weight is embedding.weight
    weight = getattr(embedding, "weight", None)
    readers = {name: m for name, m in builder.modules.items() if m._parameters.get("weight", m) is weight}
    tables = [name for name, module in readers.items() if isinstance(module, nn.Embedding)]
    is_read_elsewhere = any(module is not head and name not in tables for name, module in readers.items())
    for name in tables:  # several if an encoder and a decoder share the weight
        if is_tied or not (is_read_elsewhere or name in replicated):
            builder.specs[name] = StyleSpec(Style.VOCABULARY)


def _adapted(
    builder: TPPlanBuilder, names: Mapping[int, str], module: nn.Module | None, style: Style
) -> nn.Module | None:
    """The layer that a module of the model is or wraps. A list is none: a model may have several heads."""
    is_layer = id(module) in names and not isinstance(module, CONTAINERS)
    layer = adapted_layer(builder, names[id(module)], style) if is_layer else None
    return module if layer is None else builder.modules[layer]


def _check_shared(builder: TPPlanBuilder) -> None:
    """Raise ModelError for a module that shares a parameter with a sharded layer, and has no style itself."""
    of_layers = {
        of: name
        for name in builder.layers
        for of in builder.own_parameters(name).values()
        if of in builder.parameters
    }
    for name, module in builder.modules.items():
        shared = of_layers.keys() & builder.own_parameters(name).values()
        is_alias = any(True for _ in module.children())  # registers a bias again that its own layer adds
        if shared and name not in builder.layers and not is_alias:
            parameter = min(shared)
            raise ModelError(
                f"{name} shares a parameter with a sharded layer, and cannot compute with a shard",
                given=f"{parameter}, which is sharded for {of_layers[parameter]}",
                expected="one sharding of a shared parameter",
                hint=f"tensor_plan={{'{of_layers[parameter]}': 'replicate', ...}}, or tp=1",
            )


def _add_module(builder: TPPlanBuilder, name: str, spec: StyleSpec) -> None:
    _add_divided_attributes(builder, name, spec)
    if spec.style in (Style.COLUMN, Style.ROW):
        check_heads(builder, name, spec)
        add_linear(builder, name, spec, lambda size: shard_over_col(builder, name, spec, size))
        if spec.style is Style.COLUMN and spec.has_shared_parts and builder.cols > 1:
            layer, size = builder.layers[name], sum(units * width for units, width in spec.sizes)
            builder.layers[name] = replace(layer, uses=used_sizes(builder, name, spec.sizes, size))
    elif spec.style is Style.VOCABULARY:
        _add_vocabulary(builder, name)
    elif spec.style is Style.PER_HEAD_NORM:
        add_head_norm(builder, name)
    elif spec.style is Style.MLA_LATENT:
        summed = spec.summed or (_rotary_features(builder, name),)
        builder.layers[name] = LayerSharding(name, Style.MLA_LATENT, summed=summed)
    elif spec.style is Style.DEPTHWISE:
        _add_depthwise(builder, name, spec)
    elif spec.style is Style.NORM:
        _add_norm_over_columns(builder, name, spec)
    elif spec.style is Style.EXPERTS:
        builder.layers[name] = LayerSharding(name, Style.EXPERTS)


def _rotary_features(builder: TPPlanBuilder, name: str) -> Range:
    """The last features of a latent projection, which all heads rotate and read."""
    path = name.rpartition(".")[0]
    attention, layer = builder.modules[path], adapted_layer(builder, name, Style.MLA_LATENT)
    features = None if layer is None else linear_features(builder.modules[layer])
    width = getattr(attention, "qk_rope_head_dim", None)
    if not isinstance(width, int) or features is None:
        raise ModelError(
            f"the rotary part of {name}'s output has unknown width",
            given=f"{type(attention).__name__} without qk_rope_head_dim",
            expected="an integer qk_rope_head_dim of the attention",
            hint=replicate_hint(f"{path}.*" if path else "*"),
        )
    return features[0] - width, features[0]


def _add_vocabulary(builder: TPPlanBuilder, name: str) -> None:
    module = builder.modules[name]
    if not isinstance(module, nn.Embedding):
        raise ModelError(
            f"{name} is not an embedding",
            given=type(module).__name__,
            expected="nn.Embedding",
            hint=replicate_hint(name),
        )
    vocabulary = split_width(module.num_embeddings, builder.cols, of=f"the vocabulary of {name}")
    inp, out = one_range_each(FEATURES, vocabulary), builder.shard_over_row(module.embedding_dim, name)
    builder.layers[name] = LayerSharding(name, Style.VOCABULARY, out, inp)
    builder.shard_parameter(builder.own_parameters(name)["weight"], (inp, out))


def _add_depthwise(builder: TPPlanBuilder, name: str, spec: StyleSpec) -> None:
    """Add a convolution of each channel separately."""
    module = builder.modules[name]
    if not isinstance(module, nn.Conv1d) or not module.groups == module.in_channels == module.out_channels:
        raise ModelError(
            f"{name} is not a depthwise convolution, and cannot be sharded over its channels",
            given=str(module),
            expected="nn.Conv1d with as many groups as channels",
            hint=replicate_hint(name),
        )
    own, channels = builder.own_parameters(name), module.groups
    is_full = spec.has_shared_parts and builder.cols > 1
    if spec.sizes:
        used = used_sizes(builder, name, spec.sizes, channels)
    else:
        used = shard_over_col(builder, name, spec, channels)
    builder.layers[name] = LayerSharding(
        name, Style.DEPTHWISE, uses=used if is_full else None, fused=spec.fused
    )
    for full_name in own.values():
        rest = [None] * (len(builder.shapes[full_name]) - 1)
        builder.shard_parameter(full_name, (None if is_full else used, *rest), partial=is_full)
    for key in ("in_channels", "out_channels", "groups"):
        builder.attributes[name, key] = used.sizes


def _add_norm_over_columns(builder: TPPlanBuilder, name: str, spec: StyleSpec) -> None:
    """Add a norm whose statistics are taken over the features of all columns, and its attributes that are as
    wide."""
    for full_name in builder.own_parameters(name).values():
        (size,) = builder.shapes[full_name]
        sharding = shard_over_col(builder, name, replace(spec, sizes=spec.sizes or ((size, 1),)), size)
        builder.layers[name] = LayerSharding(name, Style.NORM, sharding)
        builder.shard_parameter(full_name, (sharding,))
        widths = [key for key, value in vars(builder.modules[name]).items() if value == size]
        builder.attributes |= {(name, key): sharding.sizes for key in widths}


def _add_divided_attributes(builder: TPPlanBuilder, name: str, spec: StyleSpec) -> None:
    """Add attributes of a mixer that count what its columns read."""
    for key, sizes in spec.divided:
        value = getattr(builder.modules[name], key, None)
        if not isinstance(value, int):
            raise ModelError(
                f"the tensor plan divides an attribute of {name} that is not a positive integer",
                given=f"{key}={value!r}",
                expected="an integer that counts heads or their features",
                hint=replicate_hint(name),
            )
        builder.attributes[name, key] = used_sizes(builder, f"{name}.{key}", sizes, value).sizes


def _add_parameter(builder: TPPlanBuilder, name: str, spec: StyleSpec) -> None:
    """Add a parameter that the plan names by its own path: attention sinks, or experts."""
    if spec.style in (None, Style.REPLICATE):
        return
    shape = builder.shapes[name]
    if spec.style is Style.PER_HEAD_NORM:
        builder.shard_parameter(name, [None] * len(shape), partial=True)
        return
    if spec.style not in (Style.COLUMN, Style.ROW):
        raise ModelError(
            f"the tensor plan gives the parameter {name} a style for modules",
            given=spec.style.value,
            expected="colwise, rowwise, packed_colwise, packed_rowwise, replicated_with_grad_allreduce "
            "or replicate",
            hint=replicate_hint(name),
        )
    is_column, is_of_experts = spec.style is Style.COLUMN, len(shape) == 3 and not spec.sizes
    if spec.sizes:  # of a mixer: along the first dim of that size
        size = sum(units * width for units, width in spec.sizes)
        dim = shape.index(size) if size in shape else 0
    elif is_column:
        dim = max(len(shape) - 2, 0)
    elif len(shape) > 1:
        dim = len(shape) - 1
    else:
        return  # a bias, added after the sum over columns
    shard = _shard_expert_dim if is_of_experts else shard_over_col
    sharding = shard(builder, name, spec, shape[dim])
    builder.shard_parameter(name, [sharding if index == dim else None for index in range(len(shape))])


def _shard_expert_dim(builder: TPPlanBuilder, name: str, spec: StyleSpec, size: int) -> DimSharding:
    """Shard the experts' feature dim. A dim that interleaves several parts (gate, up, ...) is split between
    groups of them, and the plan has to declare it: the width alone does not tell interleaved parts from
    concatenated ones."""
    width, owner = part_width(size, spec.parts, name), name.rpartition(".")[0]
    declared = [(builder.specs.get(of), builder.shapes[of]) for of in builder.own_parameters(owner).values()]
    ffn = min(
        shape[-2 if of.style is Style.COLUMN else -1] // of.parts
        for of, shape in declared
        if of is not None and of.style in (Style.COLUMN, Style.ROW) and len(shape) == 3
    )
    each = width // ffn if width % ffn == 0 else 1
    if each not in (1, spec.multiple):
        style = f"packed_{'colwise' if spec.style is Style.COLUMN else 'rowwise'}"
        raise ModelError(
            f"the tensor plan does not declare how the parts of {name} are packed",
            given=f"{width} features, experts of {ffn}",
            expected=f"{style}:{each * spec.parts} for concatenated parts, "
            f"{style}:{spec.parts}/{each} for interleaved ones",
            hint=f"tensor_plan={{'{layer_pattern(name)}': '{style}:{each * spec.parts}'}}",
        )
    ranges = split_width(width // each, builder.cols, of=f"the features of {owner}")
    of_part = one_range_each(FEATURES, [(start * each, stop * each) for start, stop in ranges])
    return concatenated([(of_part, width)] * spec.parts)


def _add_experts(builder: TPPlanBuilder) -> None:
    """Add modules that own sharded expert tensors, declared or not; check that all their parameters are."""
    for name in builder.modules:
        own = builder.own_parameters(name).values()
        has_experts = any(
            of in builder.parameters and len(builder.shapes[of]) == 3 and not builder.spec_of(of).sizes
            for of in own
        )
        if has_experts and name not in builder.layers:
            builder.layers[name] = LayerSharding(name, Style.EXPERTS)
        if builder.style_of(name) is not Style.EXPERTS:
            continue
        inside = [full_name for full_name in builder.shapes if full_name.startswith(f"{name}.")]
        unsharded = [full_name for full_name in inside if full_name not in builder.parameters]
        if unsharded or not inside:
            given = ", ".join(full_name[len(name) + 1 :] for full_name in unsharded)
            raise ModelError(
                f"the experts of {name} have parameters that the tensor plan does not shard",
                given=given or "no parameters at all",
                expected="every parameter sharded, as the columns' outputs are summed",
                hint="tensor_plan= that shards them, or with 'replicate' for everything in it, or tp=1",
            )


def _add_head_numbers(builder: TPPlanBuilder) -> None:
    """Add the attributes and arguments of modules whose layers are sharded by heads."""
    seen: set[str] = set()
    for name, layer in builder.layers.items():
        if layer.style is not Style.COLUMN or layer.gathers or layer.head or builder.spec_of(name).sizes:
            continue
        heads = find_heads(builder, name)
        if heads is not None and heads.module not in seen:
            seen.add(heads.module)
            add_head_attributes(builder, heads)
            add_head_arguments(builder, heads)
    for name, spec in builder.specs.items():
        if spec.attributes and name not in seen:
            raise ModelError(
                f"the tensor plan divides attributes of {name}, but no layer in it is sharded by heads",
                given=", ".join(spec.attributes),
                expected="a colwise layer in that module",
                hint=replicate_hint(name),
            )
