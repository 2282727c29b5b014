"""Sharding styles: the names by which a model, or its user, declares how layers are sharded.

transformers has changed the names from release to release; this is one table of all of them. A plan maps
patterns of module or parameter paths to styles; a `*` in a pattern matches one component of a path (a layer's
number).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import nn

from plait.errors import ModelError, nearest
from plait.models.parameter_adapters import unwrapped_names
from plait.models.task import pretrained_base
from plait.plan.sharding import Range, Style

Patterns = dict[str, str]  # styles by patterns of paths
Sizes = tuple[tuple[int, int], ...]  # (units, features of one) of each part


@dataclass(frozen=True)
class StyleSpec:
    """The style that a plan declares for a module or a parameter.

    style       None: the module itself stays as it is
    gathers, splits, head    as in `LayerSharding`
    parts       number of parts, of equal width, of a packed projection: each of them is sharded
    grouped     a packed projection of [kv head][its query heads, key, value]
    multiple    the output is split at multiples of this, a head's width; None: see `models/sharding/heads.py`
    attributes  of the module: numbers that are divided like its heads
    summed      of a MLA_LATENT layer: see `LayerSharding`; (): what its attention rotates
    sizes       units and width of the parts of a dim that packs parts of unequal width: see `heads.py`
    divided     attributes of the module, and the sizes that each of them is the sum of
    fused       as in `LayerSharding`
    is_inner    ROW: the output stays in the region, where every column reads it with channels of its own
    """

    style: Style | None = None
    gathers: bool = False
    splits: bool = False
    head: bool = False
    parts: int = 1
    grouped: bool = False
    multiple: int | None = None
    attributes: tuple[str, ...] = ()
    summed: tuple[Range, ...] = ()
    sizes: Sizes = ()
    divided: tuple[tuple[str, Sizes], ...] = ()
    is_inner: bool = False
    fused: bool = False

    @property
    def has_shared_parts(self) -> bool:
        """True if every column reads all of some part: see `heads.py` [Note: packed sizes]."""
        return any(units == 1 for units, _ in self.sizes)


_GATHERS = StyleSpec(Style.COLUMN, gathers=True)
_SPLITS = StyleSpec(Style.ROW, splits=True)
_REPLICATE = StyleSpec(Style.REPLICATE)

STYLES: Mapping[str, StyleSpec] = {
    "colwise": StyleSpec(Style.COLUMN),
    "rowwise": StyleSpec(Style.ROW),
    "colwise_gather_output": _GATHERS,
    "rowwise_split_input": _SPLITS,
    "packed_colwise": StyleSpec(Style.COLUMN, parts=2),
    "packed_rowwise": StyleSpec(Style.ROW, parts=2),
    "grouped_colwise": StyleSpec(Style.COLUMN, grouped=True),
    "head": StyleSpec(Style.COLUMN, head=True),
    "embedding_rowwise": StyleSpec(Style.VOCABULARY),
    "replicated_with_grad_allreduce": StyleSpec(Style.PER_HEAD_NORM),
    "mla_kv_a_proj": StyleSpec(Style.MLA_LATENT),
    "moe_tp_experts": StyleSpec(Style.EXPERTS),
    "rowwise_with_grad_allreduce": StyleSpec(Style.ROW, is_inner=True),
    "depthwise": StyleSpec(Style.DEPTHWISE),
    "fused_depthwise": StyleSpec(Style.DEPTHWISE, fused=True),
    "norm_over_columns": StyleSpec(Style.NORM),
    # Replicated modules need no style, and plait decides itself where sequences are sharded.
    "replicate": _REPLICATE,
    "embedding_colwise": _REPLICATE,
    "sequence_parallel": _REPLICATE,
    # Markers of modules whose parameters have styles of their own.
    "local_params": StyleSpec(),
    "local": StyleSpec(),
    # Until 4.57, where a mixture of experts was summed at its end. Summed at each layer the result is the
    # same.
    "colwise_rep": _GATHERS,
    "rowwise_rep": _SPLITS,
    "local_colwise": StyleSpec(Style.COLUMN),
    "local_rowwise": StyleSpec(Style.ROW),
    "local_packed_rowwise": StyleSpec(Style.ROW, parts=2),
    "gather": StyleSpec(),
}

# Styles of transformers that are not supported, with the reason.
UNSUPPORTED: Mapping[str, str] = {
    "all_reduce": "a sum over ranks of a module's output, where the module's input is unknown",
    "moe_identity_expert": "identity experts next to sharded experts",
    "ep_router": "expert parallelism",
    "ep_dispatch_experts": "expert parallelism",
    "grouped_gemm": "expert parallelism",
}


def parse_style(text: str, where: str) -> StyleSpec:
    """Parse `style[:parts][/multiple]`, `style:sizes`, `local:attribute,attribute=sizes` or
    `replicated_with_grad_allreduce:start-stop,start-stop`. Raises ModelError."""
    body, _, multiple = text.partition("/")
    key, _, detail = body.partition(":")
    if key in UNSUPPORTED:
        raise ModelError(
            f"tensor parallelism does not support the plan's style for {where}",
            given=f"{key}: {UNSUPPORTED[key]}",
            expected="another style",
            hint=f"tensor_plan= with 'replicate' for {layer_pattern(where)} and everything in it, or tp=1",
        )
    if key not in STYLES:
        raise ModelError(
            f"the tensor plan has an unknown style for {where}",
            given=text,
            expected=", ".join(STYLES),
            hint=nearest(key, STYLES) or "replicate",
        )
    spec = STYLES[key]
    if key == "local" and detail:
        pairs = [name.strip().partition("=") for name in detail.split(",")]
        divided = tuple((name, _parse_sizes(sizes, where)) for name, _, sizes in pairs if sizes)
        spec = replace(spec, attributes=tuple(name for name, _, sizes in pairs if not sizes), divided=divided)
    elif "x" in detail:
        spec = replace(spec, sizes=_parse_sizes(detail, where))
    elif detail and spec.style is Style.PER_HEAD_NORM:
        summed = tuple(_parse_range(of_range, text, where) for of_range in detail.split(","))
        spec = StyleSpec(Style.MLA_LATENT, summed=summed)
    elif detail:
        spec = replace(spec, parts=_parse_number(detail, text, where))
    return replace(spec, multiple=_parse_number(multiple, text, where)) if multiple else spec


def style_text(spec: StyleSpec) -> str:
    """Return the text that `parse_style` reads as this."""
    if spec.attributes or spec.divided:
        divided = [f"{name}={sizes_text(sizes)}" for name, sizes in spec.divided]
        return f"local:{','.join([*spec.attributes, *divided])}"
    if spec.sizes:
        return f"{style_text(replace(spec, sizes=()))}:{sizes_text(spec.sizes)}"
    if spec.summed:
        return f"replicated_with_grad_allreduce:{','.join(f'{start}-{stop}' for start, stop in spec.summed)}"
    plain, parts = replace(spec, multiple=None), f":{spec.parts}"
    forms = ((plain, ""), (replace(plain, parts=2), parts), (replace(plain, parts=1), parts))
    text = next(key + end for form, end in forms for key, known in STYLES.items() if known == form)
    return f"{text}/{spec.multiple}" if spec.multiple else text


def _parse_range(given: str, text: str, where: str) -> Range:
    start, _, stop = given.partition("-")
    return 0 if start == "0" else _parse_number(start, text, where), _parse_number(stop, text, where)


def _parse_sizes(text: str, where: str) -> Sizes:
    pairs = [part.partition("x") for part in text.split("+")]
    return tuple(
        (_parse_number(units, text, where), _parse_number(width, text, where)) for units, _, width in pairs
    )


def sizes_text(sizes: Sizes) -> str:
    return "+".join(f"{units}x{width}" for units, width in sizes)


def _parse_number(digits: str, text: str, where: str) -> int:
    if not digits.isdecimal() or int(digits) == 0:
        raise ModelError(
            f"the tensor plan's style for {where} has an invalid number",
            given=text,
            expected="style:parts/multiple, style:sizes, or local:attribute,attribute",
            hint="packed_colwise:3/64, colwise:32x64+1x128, or local:num_heads,width",
        )
    return int(digits)


def resolve_styles(
    model: nn.Module, built_in: Mapping[str, str], given: Mapping[str, str] | None
) -> dict[str, StyleSpec]:
    """Return the declared style of every module and parameter that has one, by name.

    From the model's own plan, then `built_in` (patterns under its base model), then `given`, which overrides
    both and whose every pattern has to match. Raises ModelError.
    """
    names = [name for name, _ in model.named_modules() if name]
    names += [name for name, _ in model.named_parameters()]
    unwrapped = unwrapped_names(model, names)
    prefix = base_prefix(model)
    plan = {**shipped_plan(model), **{f"{prefix}{pattern}": text for pattern, text in built_in.items()}}
    styles = {
        unwrapped[name]: text for pattern, text in plan.items() for name in _matches(pattern, unwrapped)
    }
    for pattern, text in (given or {}).items():
        styles |= dict.fromkeys(matching(pattern, names), text)
    return {name: parse_style(text, name) for name, text in styles.items()}


def shipped_plan(model: nn.Module) -> dict[str, str]:
    """The tensor plan that a transformers model ships, by paths from the model; {} where it ships none."""
    base = pretrained_base(model)
    if base is None:
        return {}
    plan = getattr(base, "tp_plan", None) or getattr(base, "_tp_plan", None)
    if plan:
        return {f"{path_of(model, base)}{key}": style for key, style in dict(plan).items()}
    prefix = base_prefix(model)
    return {f"{prefix}{key}": style for key, style in (base.config.base_model_tp_plan or {}).items()}


def plan_of_layers(layer: str, colwise: str, rowwise: str) -> Patterns:
    """The plan of modules in each layer, whose paths in it are separated by spaces."""
    styles = {"colwise": colwise, "rowwise": rowwise}
    return {f"{layer}.{path}": style for style, paths in styles.items() for path in paths.split()}


def base_prefix(model: nn.Module) -> str:
    """The path of a transformers model's base model, with a dot, or ''."""
    base = pretrained_base(model) or model
    prefix = getattr(base, "base_model_prefix", "")
    has_base = prefix and isinstance(getattr(base, prefix, None), nn.Module)
    return f"{path_of(model, base)}{prefix}." if has_base else path_of(model, base)


def path_of(model: nn.Module, inner: nn.Module) -> str:
    """The path of a module in the model, with a dot, or ''."""
    path = next(name for name, module in model.named_modules() if module is inner)
    return f"{path}." if path else ""


def matching(pattern: str, names: Sequence[str]) -> list[str]:
    """Return the names that match a pattern of the user. Raises ModelError if there are none."""
    matched = _matches(pattern, names)
    if not matched:
        raise ModelError(
            "the tensor plan has a pattern that matches nothing in the model",
            given=pattern,
            expected="paths of modules or parameters, with * for a component of a path",
            hint=nearest(pattern, {layer_pattern(name) for name in names}) or "names of named_modules()",
        )
    return matched


def _matches(pattern: str, names: Iterable[str]) -> list[str]:
    wanted = pattern.split(".")
    paths = ((name, name.split(".")) for name in names)
    return [name for name, path in paths if len(path) == len(wanted) and all(map(fnmatchcase, path, wanted))]


def replicate_hint(name: str) -> str:
    """The hint for a module or a parameter that cannot be sharded."""
    return f"tensor_plan={{'{layer_pattern(name)}': 'replicate'}}, or tp=1"


def layer_pattern(name: str) -> str:
    """The pattern that matches this name in all blocks."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))
