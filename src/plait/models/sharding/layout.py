"""From layout rules and names of dims to styles.

[Note: from names to styles]
A user's table names the dims of parameters, or of modules' weights, as they are stored:
`{"blocks.*.up": "ffn hidden"}`. The rules give each dim an axis, and each linear layer a style:

  out   in    style
  col   row   colwise, or `colwise_gather_output`
  row   col   rowwise, or `rowwise_split_input`
  else        none: replicated

The second forms are right in any code. The first ones keep a name sharded from the layers that output it to
those that sum over it, if a block has both and, in the order of its modules, begins with an output and ends
with a sum: `ffn` and `heads`, but not the residual stream, which a block's first layer reads. Code between
them has to be element-wise, or to treat heads alike, as the self-check shows. An integer attribute with a
name, `{"blocks.*.num_heads": "heads"}`, counts elements of it and is divided alike.

For a model with a plan (its own, a family's or a derived one) names follow from the styles: `vocab` for
embedding and head, `heads` in attention, `ffn` for every other width, and `hidden`. A layer whose name has no
rule is replicated.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import nn

from plait.errors import ModelError, PlanError
from plait.models.sharding.builder import TPPlanBuilder, linear_features
from plait.models.sharding.heads import attention_of
from plait.models.sharding.styles import STYLES, StyleSpec, layer_pattern, matching
from plait.plan.axes import FEATURES, HIDDEN
from plait.plan.layout_rules import LayoutRules, NamedDim, parse_dims
from plait.plan.sharding import Style

LAYOUT = "layout"  # the key of the rules in a tensor plan

Dims = tuple[NamedDim, ...]
Axes = tuple[str | None, ...]


def with_layout(tensor_plan: Mapping[str, str] | None, layout: str | None) -> Mapping[str, str] | None:
    """Return the tensor plan with layout rules, if there are any."""
    return tensor_plan if layout is None else {**(tensor_plan or {}), LAYOUT: layout}


def split_table(given: Mapping[str, str] | None) -> tuple[str | None, dict[str, str], dict[str, str]]:
    """Split a tensor plan into layout rules, styles, and names of dims, of which only a layout has some."""
    styles = dict(given or {})
    layout = styles.pop(LAYOUT, None)
    if layout is None:
        return None, styles, {}
    keys = {pattern: text.partition("/")[0].partition(":")[0] for pattern, text in styles.items()}
    names = {pattern: styles.pop(pattern) for pattern, key in keys.items() if key not in STYLES}
    return layout, styles, names


def apply_layout(
    builder: TPPlanBuilder, text: str, table: Mapping[str, str], *, sequence: bool
) -> dict[str, Dims]:
    """Replace the builder's styles by those that follow from layout rules and the user's names of dims.

    Returns names of dims by module or parameter. Raises PlanError or ModelError for a layout that is illegal
    or not supported.
    """
    rules = LayoutRules.parse(text)
    named = _resolve(builder, table)
    for path in named:
        module = path.rpartition(".")[0]
        builder.specs.pop(module if module in builder.specs else path, None)
    styled = {name: implied_dims(builder, name, spec) for name, spec in builder.specs.items()}
    known = {dim.name for dims in (*named.values(), *styled.values()) for dim in dims}
    rules.check(known, builder.rows, builder.cols, sequence=sequence)
    for name, dims in styled.items():
        if dims and not _is_sharded(rules, name, dims):
            builder.specs[name] = STYLES["replicate"]
    builder.specs.update(_Translation(builder, rules).styles_of(named))
    return styled | {path.removesuffix(".weight"): dims for path, dims in named.items()}


def implied_dims(builder: TPPlanBuilder, name: str, spec: StyleSpec) -> Dims:
    """The names of the dims of a layer or parameter with a style; () for one that is not sharded itself."""
    if spec.attributes or (spec.style in (None, Style.REPLICATE) and not spec.divided):
        return ()
    is_vocabulary = spec.style is Style.VOCABULARY or builder.block_of(name) is None
    is_of_heads = attention_of(builder, f"{name}." if spec.divided else name) is not None
    sharded = NamedDim("vocab" if is_vocabulary else "heads" if is_of_heads else "ffn", spec.parts)
    is_of_mixer = spec.sizes and name in builder.shapes
    if is_of_mixer or spec.style not in (Style.COLUMN, Style.ROW, Style.VOCABULARY):
        return (sharded,)
    dims = (sharded, NamedDim("hidden"))
    features = linear_features(builder.modules[name]) if name in builder.modules else None
    is_transposed = features is not None and features[2]
    if (spec.style is Style.ROW) != is_transposed:
        dims = dims[::-1]
    num_dims = len(builder.shapes.get(name, dims))
    return (sharded,) if num_dims == 1 else (NamedDim("experts"), *dims) if num_dims == 3 else dims


def _is_sharded(rules: LayoutRules, name: str, dims: Dims) -> bool:
    """Return whether rules shard a layer that has a style. Raises PlanError if they shard it otherwise."""
    axes = rules.axes(dims, name)
    for dim, axis in zip(dims, axes, strict=True):
        expected = {"hidden": HIDDEN, "experts": None}.get(dim.name, FEATURES)
        if axis not in (None, expected):
            raise PlanError(
                f"the plan of {name} has no sums over {axis} for {dim.name}",
                given=f"{_text(dims)} with {rules}",
                expected=f"{dim.name}:{expected}" if expected else f"no rule for {dim.name}",
                hint=f"names of your own for '{layer_pattern(name)}', in tensor_plan=",
            )
    return FEATURES in axes


def _resolve(builder: TPPlanBuilder, table: Mapping[str, str]) -> dict[str, Dims]:
    """Names of dims, by module and its parameter or its attribute. Raises ModelError or PlanError."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, module in builder.modules.items():
        start = f"{name}." if name else ""
        counts = {key: value for key, value in vars(module).items() if type(value) is int and value > 0}
        shapes |= {start + key: (value,) for key, value in counts.items()}
        shapes |= {start + key: builder.shapes[of] for key, of in builder.own_parameters(name).items()}
    named: dict[str, Dims] = {}
    sizes: dict[str, tuple[int, str]] = {}
    for pattern, text in table.items():
        for found in matching(pattern, [*filter(None, builder.modules), *shapes]):
            path = f"{found}.weight" if found in builder.modules else found
            named[path] = parse_dims(text, path)
            _check_sizes(path, text, named[path], shapes.get(path, ()), sizes)
    return named


def _check_sizes(
    path: str, text: str, dims: Dims, shape: tuple[int, ...], sizes: dict[str, tuple[int, str]]
) -> None:
    """Check the names of one tensor. `sizes`: of names, and the first tensor that has each."""
    if len(shape) != len(dims):
        raise ModelError(
            f"the names do not match the dims of {path}",
            given=f"{text!r} for shape {shape}" if shape else f"{text!r}, but there is no such parameter",
            expected="a name for each dim of a parameter, or of a module's weight",
            hint=f"{len(shape)} names" if shape else "the paths of the module's parameters",
        )
    for dim, full in zip(dims, shape, strict=True):
        size = dim.size(full, path)
        expected, first = sizes.setdefault(dim.name, (size, path))
        if size != expected:
            raise ModelError(
                f"the dim {dim.name} has two sizes",
                given=f"{expected} in {first}, {size} in {path}",
                expected="one size of a name",
                hint=f"two names, or '(3 {dim.name})' for packed parts, '({dim.name} 64)' for heads of 64",
            )


@dataclass
class _Translation:
    """See [Note: from names to styles].

    outputs, inputs  for layers with features over `col`, a block (a module, outside of blocks) and the name
    kept             those places between whose layers the name stays sharded
    """

    builder: TPPlanBuilder
    rules: LayoutRules

    def __post_init__(self) -> None:
        self.styles: dict[str, StyleSpec] = {}
        self.outputs: dict[str, tuple[str, str]] = {}
        self.inputs: dict[str, tuple[str, str]] = {}
        self.kept: set[tuple[str, str]] = set()

    def styles_of(self, named: Mapping[str, Dims]) -> dict[str, StyleSpec]:
        """Return styles by module or parameter."""
        bare: dict[str, Dims] = {}
        for path, dims in named.items():
            axes = self.rules.axes(dims, path)
            owner, _, key = path.rpartition(".")
            module, own = self.builder.modules[owner], self.builder.own_parameters(owner)
            if key not in own:
                if axes == (FEATURES,):
                    counts = self.styles.get(owner, StyleSpec()).attributes
                    self.styles[owner] = StyleSpec(attributes=(*counts, key))
            elif linear_features(module) is not None:
                if key == "weight":  # a bias has its output features
                    self._add_linear(owner, dims)
            elif isinstance(module, nn.Embedding):
                self._add_embedding(owner, dims, axes)
            elif FEATURES in axes:
                bare[path] = dims
        places = self.outputs | self.inputs
        layers = [layer for layer in self.builder.modules if layer in places]
        first = {places[layer]: layer for layer in reversed(layers)}
        last = {places[layer]: layer for layer in layers}
        self.kept = {place for place in last if first[place] in self.outputs and last[place] in self.inputs}
        for layer in layers:
            if places[layer] not in self.kept:
                is_column = layer in self.outputs
                self.styles[layer] = STYLES["colwise_gather_output" if is_column else "rowwise_split_input"]
        for path, dims in bare.items():
            self._add_bare(path, dims)
        return self.styles

    def _place(self, path: str, dim: NamedDim) -> tuple[str, str]:
        return self.builder.block_of(path) or path.rpartition(".")[0], dim.name

    def _add_linear(self, layer: str, dims: Dims) -> None:
        features = linear_features(self.builder.modules[layer])
        out, inp = dims[::-1] if features is not None and features[2] else dims
        axes = self.rules.axes((out, inp), layer)
        if FEATURES not in axes:
            return  # of the residual stream, if it is over `row`: see `residual.py`
        if self.builder.rows > 1 and HIDDEN not in axes:
            other = inp if axes[0] == FEATURES else out
            raise PlanError(
                f"the layout shards {layer} over columns, but not over rows",
                given=f"{_text(dims)} with {self.rules}, tp={self.builder.rows}x{self.builder.cols}",
                expected=f"{other.name} on row: rows would repeat each other's work",
                hint=f"{other.name}:row, or tp=1x{self.builder.rows * self.builder.cols}",
            )
        is_column = axes[0] == FEATURES
        dim = out if is_column else inp
        (self.outputs if is_column else self.inputs)[layer] = self._place(layer, dim)
        style = STYLES["colwise" if is_column else "rowwise"]
        self.styles[layer] = replace(style, parts=dim.parts, multiple=dim.width)

    def _add_embedding(self, name: str, dims: Dims, axes: Axes) -> None:
        if axes[1] == FEATURES or axes[0] == HIDDEN:
            raise self._unplaced(name, dims, "an embedding's rows are summed over columns")
        if axes[0] == FEATURES:
            self.styles[name] = STYLES["embedding_rowwise"]

    def _add_bare(self, path: str, dims: Dims) -> None:
        """Add a parameter that is not a layer's: with a value per feature between layers, or of experts."""
        index = self.rules.axes(dims, path).index(FEATURES)
        dim = dims[index]
        is_between = len(dims) == 1 and self._place(path, dim) in self.kept
        if self.builder.is_norm(path.rpartition(".")[0]):
            if is_between:
                raise self._unplaced(path, dims, "a norm's statistics are sums over its features")
            return  # of the residual stream, which every column has in full
        if not is_between and (len(dims) != 3 or dims[0].name != "experts" or index == 0):
            raise self._unplaced(path, dims, "nothing is known of the products that read it")
        style = STYLES["rowwise" if index == 2 else "colwise"]
        self.styles[path] = replace(style, parts=dim.parts, multiple=dim.width)

    def _unplaced(self, path: str, dims: Dims, reason: str) -> PlanError:
        kind = type(self.builder.modules.get(path) or self.builder.modules[path.rpartition(".")[0]]).__name__
        return PlanError(
            f"the layout shards {path} where its sums cannot be reduced",
            given=f"{kind}, {_text(dims)} with {self.rules}",
            expected=f"features of linear layers, or the rows of an embedding, over col: {reason}",
            hint=f"names without a rule for '{layer_pattern(path)}', so that it is replicated",
        )


def _text(dims: Dims) -> str:
    return " ".join(map(str, dims))
