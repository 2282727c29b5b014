"""The words in which a model, or its user, says how layers are cut, and the modules that they are said of.

transformers has changed its words from release to release; here is one table of all of them. A plan maps
patterns of module or parameter paths to words; a `*` in a pattern is one part of a path (a layer's number).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from torch import nn
from transformers import PreTrainedModel

from plait.errors import ModelError, nearest, unknown_key_hint
from plait.plan.sharding import Style


@dataclass(frozen=True)
class StyleSpec:
    """What a plan says of a module or a parameter.

    style       None: nothing becomes of it as a module
    gathers, splits, head    as in `LayerCut`
    parts       a packed projection's parts, of equal width: each of them is cut
    grouped     a packed projection of [kv head][its query heads, key, value]
    multiple    its output is cut at multiples of this, a head's width; None: see `models/tensor_heads.py`
    attributes  of the module: numbers that are divided like its heads
    """

    style: Style | None = None
    gathers: bool = False
    splits: bool = False
    head: bool = False
    parts: int = 1
    grouped: bool = False
    multiple: int | None = None
    attributes: tuple[str, ...] = ()


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
    "embedding_colwise": _REPLICATE,
    "replicated_with_grad_allreduce": StyleSpec(Style.PER_HEAD_NORM),
    "mla_kv_a_proj": StyleSpec(Style.MLA_LATENT),
    "moe_tp_experts": StyleSpec(Style.EXPERTS),
    # What is whole is right without a word, and sequences are cut by plans of ours.
    "replicate": _REPLICATE,
    "sequence_parallel": _REPLICATE,
    # Marks of modules whose parameters are cut by words of their own.
    "local_params": StyleSpec(),
    "local": StyleSpec(),
    # Until 4.57, where sums were taken at the end of a mixture of experts. Taken at each layer they are the
    # same.
    "colwise_rep": _GATHERS,
    "rowwise_rep": _SPLITS,
    "local_colwise": StyleSpec(Style.COLUMN),
    "local_rowwise": StyleSpec(Style.ROW),
    "local_packed_rowwise": StyleSpec(Style.ROW, parts=2),
    "gather": StyleSpec(),
}

# Words of transformers that cannot be honoured, with the reason.
UNSUPPORTED: Mapping[str, str] = {
    "all_reduce": "a sum over ranks of what a module gives, of whose input nothing is known",
    "moe_identity_expert": "experts that give what they get, beside experts that are cut",
    "ep_router": "experts dealt out to ranks",
    "ep_dispatch_experts": "experts dealt out to ranks",
    "grouped_gemm": "experts dealt out to ranks",
}


def parse_style(text: str, where: str) -> StyleSpec:
    """`style[:parts][/multiple]`, or `local:attribute,attribute`. Raises ModelError."""
    body, _, multiple = text.partition("/")
    key, _, detail = body.partition(":")
    if key in UNSUPPORTED:
        raise ModelError(
            f"tensor parallelism cannot do what the plan says of {where}",
            given=f"{key}: {REFUSED[key]}",
            hint=f"tensor_plan= with 'replicate' for {numberless(where)} and all that is in it, or tp=1",
        )
    if key not in STYLES:
        raise ModelError(
            f"the tensor plan says an unknown word of {where}", given=text, hint=unknown_key_hint(key, STYLES)
        )
    word = STYLES[key]
    if key == "local" and detail:
        word = replace(word, attributes=tuple(name.strip() for name in detail.split(",")))
    elif detail:
        word = replace(word, parts=_parse_number(detail, text, where))
    return replace(word, multiple=_parse_number(multiple, text, where)) if multiple else word


def _parse_number(digits: str, text: str, where: str) -> int:
    if not digits.isdecimal() or int(digits) == 0:
        raise ModelError(
            f"the tensor plan says no number of {where}",
            given=text,
            expected="style:parts/multiple, such as packed_colwise:3/64, or local:num_heads,width",
        )
    return int(digits)


def resolve_styles(
    model: nn.Module, built_in: Mapping[str, str], given: Mapping[str, str] | None
) -> dict[str, StyleSpec]:
    """What is said of every module and parameter, by its name.

    From the model's own plan, then `built_in` (patterns under its base model), then `given`, which overrides
    both and whose every pattern has to match. Raises ModelError.
    """
    names = [name for name, _ in model.named_modules() if name]
    names += [name for name, _ in model.named_parameters()]
    prefix = base_prefix(model)
    own = {**shipped_plan(model), **{f"{prefix}{pattern}": text for pattern, text in built_in.items()}}
    found = {name: text for pattern, text in own.items() for name in _matches(pattern, names)}
    for pattern, text in (given or {}).items():
        matched = _matches(pattern, names)
        if not matched:
            close = nearest(pattern, {layer_pattern(name) for name in names})
            raise ModelError(
                "the tensor plan names nothing that the model has",
                given=pattern,
                expected="paths of modules or parameters, with * for a part of a path",
                hint=close,
            )
        found |= dict.fromkeys(matched, text)
    return {name: parse_style(text, name) for name, text in found.items()}


def shipped_plan(model: nn.Module) -> dict[str, str]:
    """The tensor plan that a transformers model ships, by paths from the model; {} where it ships none."""
    if not isinstance(model, PreTrainedModel):
        return {}
    plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None)
    if plan:
        return dict(plan)
    prefix = base_prefix(model)
    return {f"{prefix}{key}": word for key, word in (model.config.base_model_tp_plan or {}).items()}


def base_prefix(model: nn.Module) -> str:
    """The path of a transformers model's base model, with a dot, or ''."""
    prefix = getattr(model, "base_model_prefix", "")
    return f"{prefix}." if prefix and isinstance(getattr(model, prefix, None), nn.Module) else ""


def _matches(pattern: str, names: Iterable[str]) -> list[str]:
    wanted = pattern.split(".")
    return [name for name in names if _path_matches(name.split("."), wanted)]


def _path_matches(parts: list[str], wanted: list[str]) -> bool:
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def replicate_hint(name: str) -> str:
    """What to try where a module or a parameter cannot be cut."""
    return f"tensor_plan={{'{numberless(name)}': 'replicate'}}, or tp=1"


def layer_pattern(name: str) -> str:
    """The pattern of its like in all blocks."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))
