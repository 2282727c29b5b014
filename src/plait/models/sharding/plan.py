"""From a model to a `TPPlan`: what becomes of its layers and parameters on a grid of rows and columns.

[Note: which gradients are parts]
Take a parameter that is whole, or cut over `row` alone, so that every column holds the same piece. Its
gradient on a column is all of it where what the module reads, and the gradient of what it gives, are the same
on every column.

- In the stream, outside of regions: they are. A COLUMN layer sums its input's gradient over the columns, a
  ROW layer its output, so the stream and its gradient are whole on each. The bias of a ROW layer is added
  after the sum: whole.
- Under sequence parallelism a column has its own tokens of the stream between the first block and the last:
  norms, biases of ROW layers (added after the tokens are dealt out), all that is in a block and in no region:
  parts. Before the first block and after the last the stream is whole: not parts.
- In a region, a whole weight that reads the region's input (a router, a latent projection) reads all tokens,
  also under sequence parallelism, and gives what the columns share: what a COLUMN layer, a gather or the
  experts read, and these sum its gradient. Not parts.
- In a region, a weight applied to each head by itself (HEAD_NORM), or a number that an activation learns,
  sees this column's features: parts, always. Between projections that are gathered it sees all: not parts.

A piece that columns share because they share kv heads (see `DimSharding.sharers`) is a part on each of them,
and needs no mark. Along `row` nothing is a part: rows hold different pieces, or compute the same.
"""

from collections.abc import Mapping, Sequence

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from plait.errors import ModelError
from plait.models.sharding.builder import TPPlanBuilder, add_linear, one_range_each, part_width
from plait.models.sharding.families import add_head_arguments, family_plan
from plait.models.sharding.heads import (
    add_activations,
    add_head_attributes,
    add_head_norm,
    add_undeclared_head_norms,
    check_heads,
    find_heads,
    shard_over_col,
)
from plait.models.sharding.residual import (
    add_residual_layers,
    check_rows,
    check_sequence,
    find_regions,
    mark_partial_grads,
    pure_regions,
)
from plait.models.sharding.styles import StyleSpec, layer_pattern, replicate_hint, resolve_styles
from plait.plan.sharding import DimSharding, LayerSharding, Style, TPPlan, split_width


def build_tp_plan(
    model: nn.Module,
    rows: int,
    cols: int,
    *,
    sequence: bool,
    blocks: Sequence[tuple[str, nn.Module]],
    given: Mapping[str, str] | None = None,
) -> TPPlan:
    """What becomes of `model`, which is whole (on meta or not), on a grid of `rows` x `cols`.

    `blocks`: as `blocks_of` gives them. `sequence`: whether the stream's tokens are cut between regions.
    `given`: words of the user's, by patterns of paths from the model; for a transformers model they add to
    its own plan, or override it. Raises ModelError for what cannot be cut, PlanError for a grid that does not
    fit.
    """
    words = resolve_styles(model, family_plan(model, cols), given)
    draft = TPPlanBuilder(model, rows, cols, tuple(name for name, _ in blocks), words)
    _declare_embedding_and_head(draft)
    for name, word in words.items():
        if name in draft.modules:
            _add_module(draft, name, word)
        else:
            _add_parameter(draft, name, word)
    _add_experts(draft)
    _add_head_numbers(draft)
    add_undeclared_head_norms(draft)
    add_activations(draft)
    if not draft.layers or (given is None and not any(draft.block_of(name) for name in draft.layers)):
        raise ModelError(
            "there is no tensor plan for this model",
            given=type(model).__name__,
            expected="a transformers model with a plan, or tensor_plan = {path: style}",
            hint=_example_plan(draft),
        )
    regions = find_regions(draft)
    if rows > 1:
        add_residual_layers(draft, regions)
        check_rows(draft, regions)
    if sequence and cols > 1:
        check_sequence(draft, regions)
    mark_partial_grads(draft, regions, sequence=sequence)
    return TPPlan(
        rows,
        cols,
        tuple(draft.layers.values()),
        tuple(draft.parameters.values()),
        regions,
        pure_regions(draft, regions),
        tuple((module, key, values) for (module, key), values in draft.attributes.items()),
        tuple(draft.arguments),
    )


def _example_plan(draft: TPPlanBuilder) -> str:
    """How words for two layers of the model's blocks would look that follow on each other."""
    block = draft.blocks[0] if draft.blocks else ""
    inside = [name for name in draft.modules if name.startswith(f"{block}.")] if block else []
    layers = [name for name in inside if isinstance(draft.modules[name], nn.Linear | Conv1D)][-2:]
    if len(layers) < 2:
        return "tp=1"
    up, down = (layer_pattern(block) + name[len(block) :] for name in layers)
    return f"tensor_plan={{'{up}': 'colwise', '{down}': 'rowwise', ...}}, or tp=1"


def _declare_embedding_and_head(draft: TPPlanBuilder) -> None:
    """What every transformers model's embedding and head become, tied or not."""
    if not isinstance(draft.model, PreTrainedModel) or not draft.words:
        return
    names = {id(module): name for name, module in draft.modules.items()}
    embedding, head = draft.model.get_input_embeddings(), draft.model.get_output_embeddings()
    is_head_cut = False
    if isinstance(head, nn.Linear) and id(head) in names:
        is_head_cut = _declare(draft, names[id(head)], StyleSpec(Style.COLUMN, head=True), always=False)
    if isinstance(embedding, nn.Embedding) and id(embedding) in names:
        is_tied = is_head_cut and isinstance(head, nn.Linear) and head.weight is embedding.weight
        _declare(draft, names[id(embedding)], StyleSpec(Style.VOCABULARY), always=is_tied)


def _declare(draft: TPPlanBuilder, name: str, word: StyleSpec, *, always: bool) -> bool:
    """Says it over what is said, unless that is to leave the module whole; whether it did."""
    said = draft.words.get(name)
    if not always and said is not None and said.style is Style.REPLICATE:
        return False
    draft.words[name] = word
    return True


def _add_module(draft: TPPlanBuilder, name: str, word: StyleSpec) -> None:
    if word.style in (Style.COLUMN, Style.ROW):
        check_heads(draft, name, word)
        add_linear(draft, name, word, lambda size: shard_over_col(draft, name, word, size))
    elif word.style is Style.VOCABULARY:
        _add_vocabulary(draft, name)
    elif word.style is Style.PER_HEAD_NORM:
        add_head_norm(draft, name)
    elif word.style is Style.MLA_LATENT:
        path = name.rpartition(".")[0]
        around = draft.modules[path]
        if not isinstance(getattr(around, "qk_rope_head_dim", None), int):
            raise ModelError(
                f"{name} gives a rotary part of unknown width",
                given=f"{type(around).__name__} without qk_rope_head_dim",
                hint=replicate_hint(f"{path}.*" if path else "*"),
            )
        draft.layers[name] = LayerSharding(name, Style.MLA_LATENT)
    elif word.style is Style.EXPERTS:
        draft.layers[name] = LayerSharding(name, Style.EXPERTS)


def _add_vocabulary(draft: TPPlanBuilder, name: str) -> None:
    module = draft.modules[name]
    if not isinstance(module, nn.Embedding):
        raise ModelError(
            f"{name} is not an embedding",
            given=type(module).__name__,
            expected="nn.Embedding",
            hint=replicate_hint(name),
        )
    vocabulary = split_width(module.num_embeddings, draft.cols, of=f"the vocabulary of {name}")
    inp, out = one_range_each("col", vocabulary), draft.over_row(module.embedding_dim, name)
    draft.layers[name] = LayerSharding(name, Style.VOCABULARY, out, inp)
    draft.shard_parameter(draft.own_parameters(name)["weight"], (inp, out))


def _add_parameter(draft: TPPlanBuilder, name: str, word: StyleSpec) -> None:
    """A parameter that is said by its own path: attention's sinks, or experts."""
    if word.style in (None, Style.REPLICATE):
        return
    owner, shape = name.rpartition(".")[0], draft.shapes[name]
    if word.style not in (Style.COLUMN, Style.ROW):
        raise ModelError(
            f"the tensor plan says of the parameter {name} what can be said of a module alone",
            given=word.style.value if word.style else None,
            expected="colwise, rowwise, packed_colwise, packed_rowwise or replicate",
        )
    is_column = word.style is Style.COLUMN
    if is_column:
        dim = max(len(shape) - 2, 0)
    elif len(shape) > 1:
        dim = len(shape) - 1
    else:
        return  # what is added after the sum over columns
    if len(shape) == 3:
        cut = _shard_expert_dim(draft, owner, shape[dim], word, name)
    else:
        cut = shard_over_col(draft, name, word, shape[dim])
    draft.shard_parameter(name, [cut if index == dim else None for index in range(len(shape))])


def _shard_expert_dim(draft: TPPlanBuilder, owner: str, size: int, word: StyleSpec, name: str) -> DimSharding:
    """Of experts' features. A dim that interleaves several of each (gate, up, ...) is cut between them, and
    has to be said to: what is told by widths alone may as well lie one after the other."""
    width = part_width(size, word.parts, name)
    ffn = min(_expert_widths(draft, owner))
    each = width // ffn if width % ffn == 0 else 1
    if each not in (1, word.multiple):
        style = f"packed_{'colwise' if word.style is Style.COLUMN else 'rowwise'}"
        raise ModelError(
            f"the tensor plan does not say how {name} holds its parts",
            given=f"{width} features, experts of {ffn}",
            expected=f"{style}:{each * word.parts} where they lie one after the other, "
            f"{style}:{word.parts}/{each} where they are interleaved",
            hint=f"tensor_plan={{'{numberless(name)}': '{style}:{each * word.parts}'}}",
        )
    ranges = split_width(width // each, draft.cols, of=f"the features of {owner}")
    parts = range(word.parts)
    return DimSharding(
        "col",
        tuple(
            tuple((part * width + start * each, part * width + stop * each) for part in parts)
            for start, stop in ranges
        ),
    )


def _expert_widths(draft: TPPlanBuilder, owner: str) -> list[int]:
    found = []
    for full in draft.own_parameters(owner).values():
        word, shape = draft.words.get(full), draft.shapes[full]
        if word is not None and word.style in (Style.COLUMN, Style.ROW) and len(shape) == 3:
            found.append(shape[-2 if word.style is Style.COLUMN else -1] // word.parts)
    return found


def _add_experts(draft: TPPlanBuilder) -> None:
    """A module of cut expert tensors is one whether it is said or not, and has nothing else."""
    for name in draft.modules:
        own = draft.own_parameters(name)
        cut = [full for full in own.values() if full in draft.parameters and len(draft.shapes[full]) == 3]
        if cut and name not in draft.layers:
            draft.layers[name] = LayerSharding(name, Style.EXPERTS)
        said = draft.layers.get(name)
        if said is None or said.style is not Style.EXPERTS:
            continue
        inside = [full for full in draft.shapes if full.startswith(f"{name}.")]
        unsaid = [full for full in inside if full not in draft.parameters]
        if unsaid or not inside:
            raise ModelError(
                f"the experts of {name} have parameters that the tensor plan leaves whole",
                given=", ".join(full[len(name) + 1 :] for full in unsaid) or "no parameters at all",
                expected="every parameter cut, as the columns' outputs are summed",
                hint="tensor_plan= that cuts them, or with 'replicate' for all that is in it, or tp=1",
            )


def _add_head_numbers(draft: TPPlanBuilder) -> None:
    """Attributes and arguments of the modules whose layers are cut at heads."""
    seen: set[str] = set()
    for name, cut in draft.layers.items():
        if cut.style is not Style.COLUMN or cut.gathers or cut.head:
            continue
        heads = find_heads(draft, name)
        if heads is not None and heads.module not in seen:
            seen.add(heads.module)
            add_head_attributes(draft, heads)
            add_head_arguments(draft, heads)
    for name, word in draft.words.items():
        if word.attributes and name not in seen:
            raise ModelError(
                f"the tensor plan divides numbers of {name}, in which no layer is cut at heads",
                given=", ".join(word.attributes),
                expected="a colwise layer inside of it",
            )
