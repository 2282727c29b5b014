"""Find a model's blocks, and collect the facts about it that a plan needs.

Also `Chain`: a model as a list of modules, for pipeline stages that pass more than one tensor.
"""

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from plait.errors import ModelError
from plait.models.transformers_types import is_pretrained_model
from plait.plan import ExpertDim, ParamInfo
from plait.plan.axes import UnitKind
from plait.plan.cost_model import training_flops_per_token
from plait.plan.layout import UnitInfo


class Chain(nn.Module):
    """A sequence of modules, called in order; they are its children "0", "1", ... and its blocks.

    The first is called with the batch's entries by name, each next one with the previous one's result: a
    tuple or list becomes its positional arguments, a dict its keywords, anything else a single argument. The
    chain returns the last one's result.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        super().__init__()
        modules = list(modules)
        if len({id(module) for module in modules}) < len(modules):
            raise ModelError(
                "a module occurs twice in a list of modules",
                given=", ".join(type(module).__name__ for module in modules),
                expected="distinct modules, which may share parameters",
                hint="copy.copy(module), a distinct module with the same parameters",
            )
        for number, module in enumerate(modules):
            self.add_module(str(number), module)

    def forward(self, *args: Any, **batch: Any) -> Any:
        first, *others = self.children()
        result = first(*args, **batch)
        for module in others:
            if isinstance(result, Mapping):
                result = module(**result)
            else:
                result = module(*(result if isinstance(result, tuple | list) else (result,)))
        return result


_LARGE = 0.25  # of the parameters of the largest list

# Classes or modules that a user declares as the model's blocks.
Blocks = type[nn.Module] | Sequence[type[nn.Module]] | Sequence[nn.Module]


def block_lists(model: nn.Module) -> list[list[tuple[str, nn.Module]]]:
    """Return the lists of modules that may be the model's blocks, with their names, the largest list first.

    They are the children of each `ModuleList`, `Sequential` or `Chain` that is not nested in another one and
    has a quarter of the parameters of the largest, such as an encoder's and a decoder's layers.
    """
    lists: list[tuple[int, list[tuple[str, nn.Module]]]] = []
    inside: list[str] = []
    for name, module in model.named_modules():
        is_list = isinstance(module, nn.ModuleList | nn.Sequential | Chain)
        if is_list and not name.startswith(tuple(inside)):
            prefix = f"{name}." if name else ""
            inside.append(prefix)
            lists.append((sum(p.numel() for p in module.parameters()), [*_called_children(prefix, module)]))
    lists.sort(key=lambda entry: entry[0], reverse=True)
    return [children for size, children in lists if size >= _LARGE * lists[0][0]]


def _called_children(prefix: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules in a list, and in lists in it, which no forward calls."""
    for key, child in module.named_children():
        if isinstance(child, nn.ModuleList):
            yield from _called_children(f"{prefix}{key}.", child)
        else:
            yield f"{prefix}{key}", child


def named_blocks(model: nn.Module, given: Blocks) -> list[tuple[str, nn.Module]]:
    """Return the blocks that a user declares, with their names, in the order of their registration. Raises
    ModelError for one that the model does not have."""

    def is_one(module: nn.Module, w: type[nn.Module] | nn.Module) -> bool:
        return isinstance(module, w) if isinstance(w, type) else module is w

    wanted: list[type[nn.Module] | nn.Module] = [given] if isinstance(given, type) else list(given)
    blocks: list[tuple[str, nn.Module]] = []
    for name, module in model.named_modules():
        is_nested = any(name.startswith(f"{outer}.") for outer, _ in blocks)
        if name and not is_nested and any(is_one(module, w) for w in wanted):
            blocks.append((name, module))
    for w in wanted:
        if not any(is_one(module, w) for _, module in blocks):
            raise ModelError(
                "the model has no such block, or only nested in another block",
                given=w.__name__ if isinstance(w, type) else f"a {type(w).__name__}",
                expected="classes of modules in the model, or its modules themselves",
                hint="blocks=type(block), of one of the repeated modules",
            )
    return blocks


def unit_facts(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    groups: Mapping[str, int] | None = None,
    experts: Mapping[str, ExpertDim] | None = None,
    formats: Mapping[str, str] | None = None,
) -> tuple[UnitInfo, ...]:
    """Return the model's floating-point parameters by unit, in forward order.

    A block is a unit; parameters registered before the blocks are the unit `embedding`, those after them
    `head`. A tied parameter belongs to the first unit that registers it. `groups`: the optimizer's group of
    each trainable parameter; None: `default_groups`. `experts`: of parameters of kind EXPERT. `formats`: of
    quantized ones.
    """
    names = [name for name, _ in blocks]
    groups = default_groups(model) if groups is None else groups
    tensors: dict[str, list[ParamInfo]] = {"embedding": [], **{name: [] for name in names}, "head": []}
    seen_block = not names  # a model without blocks is one unit
    for name, parameter in model.named_parameters():
        block = next((b for b in names if name.startswith(f"{b}.")), None)
        seen_block = seen_block or block is not None
        unit = block or ("head" if seen_block else "embedding")
        group = groups[name] if parameter.requires_grad else None
        if parameter.is_floating_point() or parameter.requires_grad:
            dim = (experts or {}).get(name)
            kind = UnitKind.DENSE if dim is None else UnitKind.EXPERT
            form = (formats or {}).get(name, "")
            info = ParamInfo(name, tuple(parameter.shape), group, kind, dim or ExpertDim(), form)
            tensors[unit].append(info)
    return tuple(UnitInfo(name, tuple(facts)) for name, facts in tensors.items() if facts)


def default_groups(model: nn.Module) -> dict[str, int]:
    """Return the optimizer's group of each trainable parameter: 0 has weight decay, 1 (norms, biases, other
    vectors) has none."""
    norms = _norm_parameters(model)
    return {
        name: int(parameter.ndim < 2 or name in norms or name.endswith("bias"))
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def _norm_parameters(model: nn.Module) -> set[str]:
    """Names of the parameters of normalization layers, recognized by their class name; an embedding that
    contains one (NormedEmbedding) is none."""
    modules = [(name, m) for name, m in model.named_modules() if not isinstance(m, nn.Embedding)]
    norms = [(name, m) for name, m in modules if "norm" in type(m).__name__.lower()]
    return {key for name, norm in norms for key, _ in norm.named_parameters(name, recurse=False)}


@dataclass(frozen=True)
class FlopFacts:
    """The sizes that determine a model's FLOPs, of experts those that a token uses. Taken before it is
    sharded."""

    matmul_parameters: int
    num_layers: int
    attention_width: int

    @classmethod
    def from_model(cls, model: nn.Module) -> "FlopFacts":
        """Embedding tables (tokens, positions) take part in no matrix product, unless tied to the head."""
        tables = {id(m.weight): m.weight.numel() for m in model.modules() if isinstance(m, nn.Embedding)}
        head = model.get_output_embeddings() if is_pretrained_model(model) else None
        for parameter in () if head is None else head.parameters():  # a list, if it has several heads
            tables.pop(id(parameter), None)
        total = active_parameters(model)
        config = getattr(model, "config", None)
        heads = config_int(config, "num_attention_heads", "n_head")
        width = heads * config_int(config, "head_dim") or config_int(config, "hidden_size", "n_embd")
        if config_int(config, "kv_lora_rank"):  # latent attention: the mean of what scores and values have
            names = "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
            width = heads * sum(config_int(config, name) for name in names) // 2
        layers = config_int(config, "num_hidden_layers", "n_layer")
        return cls(total - sum(tables.values()), layers, width)

    def per_token(self, sequence: int, *, causal: bool = True) -> float:
        """FLOPs of forward and backward for one token; counted as in `plan/cost_model.py`."""
        return training_flops_per_token(**asdict(self), sequence=sequence, causal=causal)


def active_parameters(model: nn.Module) -> int:
    """Number of elements that one token uses: of experts, those of its choice."""
    config = getattr(model, "config", None)
    experts = config_int(config, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    chosen = config_int(config, "num_experts_per_tok", "moe_k")
    total = sum(p.numel() for p in model.parameters())
    if not experts or not chosen:
        return total
    of_experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    return total - of_experts * (experts - chosen) // experts


def config_int(config: Any, *names: str) -> int:
    """The first of these attributes that the configuration has as an integer; 0 if it has none."""
    for name in names:
        with contextlib.suppress(RuntimeError):  # raised by transformers if layers differ in it
            if isinstance(value := getattr(config, name, None), int):
                return value
    return 0
