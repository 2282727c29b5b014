"""Layout rules: named dims of a model's tensors, and the axes of the grid that they are sharded over.

[Note: layout rules]
The idea is Mesh-TensorFlow's (Shazeer et al. 1811.02084, section 3): every dim of a tensor has a name, and a
rule `ffn:col` shards all dims of that name over an axis. A layout never changes results. It is legal if no
tensor has two dims on one axis. A product sums over the name that both operands have and the result has not:
if that name is sharded, the partial results are reduced over its axis. For the weight (out, in) of a linear
layer these are the input features in forward and the output features in backward. The plan has the degrees:
`tp=2x4` shards names on `row` in two and names on `col` in four.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from plait.errors import PlanError, unknown_key_hint
from plait.plan.axes import FEATURES, HIDDEN, TENSOR
from plait.plan.sharding import LayerSharding, Style

# Axes of weights, and those of the batch's dims, which weights do not have: `dp=` and `sp=` of the plan.
BATCH_AXES = {"dp": "batch", "sp": "length"}

_EXAMPLE = "batch:dp heads:col ffn:col vocab:col hidden:row"
_RULE = re.compile(r"([A-Za-z_]\w*):([a-z]+)")
_DIM = re.compile(r"([A-Za-z_]\w*)|\((?:(\d+) )?([A-Za-z_]\w*)(?: (\d+))?\)")


@dataclass(frozen=True)
class NamedDim:
    """A dim of a tensor: `ffn`, or `(3 heads 64)` for 3 concatenated parts of heads, each 64 wide."""

    name: str
    parts: int = 1
    width: int | None = None

    def size(self, full: int, where: str) -> int:
        """Number of elements of the name in a dim of `full` elements, an integer. Raises PlanError."""
        each = self.parts * (self.width or 1)
        if each == 0 or full % each:
            raise PlanError(
                f"a dim of {where} does not have the size that its name gives",
                given=f"{full} elements, {self}",
                expected=f"a multiple of {each}",
                hint=f"{self.name} without numbers, or other numbers",
            )
        return full // each

    def __str__(self) -> str:
        if self.parts == 1 and self.width is None:
            return self.name
        numbers = (str(self.parts) if self.parts > 1 else "", self.name, str(self.width or ""))
        return f"({' '.join(filter(None, numbers))})"


def parse_dims(text: str, where: str) -> tuple[NamedDim, ...]:
    """Parse the names of a tensor's dims, from the first: `(3 heads 64) hidden`. Raises PlanError."""
    matches = list(_DIM.finditer(text))
    if not matches or _DIM.sub("", text).strip():
        raise PlanError(
            f"cannot read the dim names of {where}",
            given=repr(text),
            expected="a name per dim, 'ffn hidden'; '(3 heads 64) hidden' for packed or grouped features",
            hint="alphanumeric names, separated by spaces",
        )
    return tuple(
        NamedDim(match[1] or match[3], int(match[2] or 1), int(match[4]) if match[4] else None)
        for match in matches
    )


@dataclass(frozen=True)
class LayoutRules:
    """Axes by names of dims; see [Note: layout rules]."""

    axis_of: dict[str, str]

    @classmethod
    def parse(cls, text: str) -> "LayoutRules":
        """Parse `name:axis name:axis`. Raises PlanError for an unknown axis or a name with two."""
        axis_of: dict[str, str] = {}
        for word in text.split():
            match = _RULE.fullmatch(word)
            if match is None:
                raise PlanError(
                    "cannot read a layout rule", given=repr(word), expected="name:axis", hint=_EXAMPLE
                )
            name, axis = match.groups()
            if axis not in (*TENSOR, *BATCH_AXES):
                raise PlanError(
                    "a layout rule has an unknown axis",
                    given=word,
                    expected=f"one of {', '.join((*TENSOR, *BATCH_AXES))}",
                    hint="ffn:col, which shards each expert" if axis == "ep" else f"{name}:col",
                )
            if axis_of.setdefault(name, axis) != axis:
                raise PlanError(
                    f"the layout has two axes for {name}",
                    given=f"{name}:{axis_of[name]} {word}",
                    expected="one axis for a name",
                    hint=f"another name for the dims that are sharded over {axis}",
                )
            if (axis in BATCH_AXES or name in BATCH_AXES.values()) and BATCH_AXES.get(axis) != name:
                rules = " ".join(f"{of}:{batch_axis}" for batch_axis, of in BATCH_AXES.items())
                raise PlanError(
                    f"a layout cannot shard {name} over {axis}",
                    given=word,
                    expected=f"{rules}; dims of weights over row or col",
                    hint=f"{name}:col, or zero= to shard weights over data ranks"
                    if axis in BATCH_AXES
                    else rules,
                )
        return cls(axis_of)

    def check(self, known: Iterable[str], rows: int, cols: int, *, sequence: bool) -> None:
        """Raise PlanError for a name that no tensor has, or an axis of the grid that shards nothing."""
        known = {*known, *BATCH_AXES.values()}
        for name in self.axis_of:
            if name not in known:
                raise PlanError(
                    "a layout rule names a dim that the model does not have",
                    given=f"{name}:{self.axis_of[name]}",
                    expected="a name of the table of dim names",
                    hint=unknown_key_hint(name, known),
                )
        for axis, degree in ((HIDDEN, rows), (FEATURES, cols)):
            if degree > 1 and axis not in self.axis_of.values():
                free = sorted(known - self.axis_of.keys() - set(BATCH_AXES.values()))
                name = "hidden" if axis == HIDDEN and "hidden" in free else free[0] if free else "name"
                grid = f"tp=1x{rows * cols}" if axis == HIDDEN else f"tp={rows * cols}x1"
                raise PlanError(
                    f"no dim is sharded over {axis}, so its ranks would repeat each other's work",
                    given=f"{self} with tp={rows}x{cols}",
                    expected=f"a name on {axis}",
                    hint=f"{name}:{axis}, or {grid}",
                )
        if "sp" in self.axis_of.values() and cols > 1 and not sequence:
            raise PlanError(
                "the layout shards the sequence, but the plan does not",
                given=f"{self} with tp={rows}x{cols}",
                expected="sp=true",
                hint=f"tp={rows}x{cols} sp=true, or a layout without length:sp",
            )

    def axes(self, dims: Sequence[NamedDim], where: str) -> tuple[str | None, ...]:
        """The axis of each dim of a weight. Raises PlanError for an axis that would shard two of them."""
        axes = tuple(self.axis_of.get(dim.name) for dim in dims)
        for axis in axes:
            if axis is not None and axes.count(axis) > 1:
                raise PlanError(
                    f"the layout shards two dims of {where} over {axis}",
                    given=f"{' '.join(map(str, dims))} with {self}",
                    expected="an axis once in a tensor",
                    hint="no rule, or another axis, for one of them; two dims of one name need two names",
                )
        return axes

    def __str__(self) -> str:
        return " ".join(f"{name}:{axis}" for name, axis in self.axis_of.items())


def layer_collectives(layer: LayerSharding, rows: int, cols: int, *, sequence: bool) -> tuple[str, str]:
    """Return what a layer communicates in forward and in backward; '' for nothing. See [Note: layout rules].

    Of products: the layers that read one input reduce its gradient once. `sequence`: tokens of the stream are
    sharded over `col`; then the input of COLUMN layers is gathered once for all that read it, in each pass.
    """
    reduce, gather = "all-reduce over {}", "all-gather over {}"
    scatter = "reduce-scatter over {}" if sequence else reduce
    regather = gather if sequence else ""
    over_row, over_col = [], []  # (forward, backward)
    match layer.style:
        case Style.COLUMN:
            over_row = [(reduce, "")]
            over_col = [(regather, regather), ("", scatter)]
            if layer.gathers:
                over_col.append((gather, ""))
            elif layer.uses is not None:
                over_col.append((gather, reduce))
            elif layer.head:
                over_col = [("", reduce)]
        case Style.ROW:
            over_row = [("", reduce)]
            over_col = [(scatter, gather if layer.splits else regather)]
            if layer.summed:
                over_col = [(reduce, reduce)]
        case Style.VOCABULARY:
            over_col = [(reduce, "")]
        case Style.NORM:
            pairs = [(reduce, reduce)]
            over_row, over_col = ([], pairs) if layer.out and layer.out.axis == FEATURES else (pairs, [])
        case Style.EXPERTS:
            over_col = [(gather, gather) if layer.splits else (reduce, reduce)]
    words: list[list[str]] = [[], []]
    for axis, degree, pairs in ((HIDDEN, rows, over_row), (FEATURES, cols, over_col)):
        for pair in pairs if degree > 1 else ():
            for of_pass, text in zip(words, pair, strict=True):
                of_pass.extend([text.format(axis)] if text else [])
    return ", ".join(words[0]), ", ".join(words[1])
