"""Choice of the weights that a plan with `base=` quantizes: see [Note: quantized weights], plan/quantized.py.

Frozen weights of linear layers in the blocks, and frozen tensors of experts. What trains, biases, norms,
embeddings, the head and other layers outside of blocks stay in the plan's dtype, and so does a weight that is
not a multiple of 64 elements, or that another kind of layer has too, and all of an adapter, also one that is
not trained. The choice is the same under all plans.
"""

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor, nn

from plait.errors import PlanError
from plait.models.adapters import AdapterFacts
from plait.models.experts import expert_layers
from plait.models.transformers_types import has_linear_forward
from plait.plan import ExpertDim, Plan, TPCoord, TPPlan
from plait.plan.axes import UnitKind
from plait.plan.layout import ParamInfo, ParamShard
from plait.plan.quantized import BLOCK, splits_blocks


def quantized_formats(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    tensor: TPPlan,
    plan: Plan,
    experts: Mapping[str, ExpertDim],
) -> dict[str, str]:
    """Return the format of each quantized parameter. `experts`: those that ep divides. Raises
    PlanError if there is none, or if a rank's shard would have a part of a block."""
    if plan.base == "none":
        return {}
    chosen = dict(quantized_weights(model, blocks))
    if not chosen:
        raise PlanError(
            "base has no effect: the model has no frozen weight that is quantized",
            given=f"base={plan.base}, {type(model).__name__}",
            expected=f"frozen weights of linear layers in blocks, of a multiple of {BLOCK} elements",
            hint="peft.get_peft_model, or requires_grad_(False), before parallelize; or no base",
        )
    coords = TPCoord.all_coords(tensor, plan.ep)
    for name, weight in chosen.items():
        kind = UnitKind.EXPERT if name in experts else UnitKind.DENSE
        info = ParamInfo(name, tuple(weight.shape), None, kind, experts.get(name, ExpertDim()))
        for coord in coords:
            if splits_blocks(info.shape, boxes := ParamShard.at_coord(info, coord).boxes):
                raise PlanError(
                    f"a shard of a quantized weight would split a block of {BLOCK}",
                    given=f"base={plan.base}, {name} {info.shape} in shards of {boxes.shape}",
                    expected=f"shards that begin and end at multiples of {BLOCK} elements of the full weight",
                    hint="a smaller tp, other rows and columns, or no base",
                )
    return dict.fromkeys(chosen, plan.base)


def quantized_weights(
    model: nn.Module, blocks: Sequence[tuple[str, nn.Module]]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights that are quantized under a plan with `base=`, with their names."""
    inside = {id(module) for _, block in blocks for module in block.modules()}
    in_experts = {id(model.get_submodule(name)) for name in expert_layers(model)}
    wanted, others = set[int](), set[int]()
    for module in model.modules():
        for key, parameter in module._parameters.items():
            is_linear = key == "weight" and has_linear_forward(module)
            is_expert = id(module) in in_experts and parameter is not None and parameter.dim() == 3
            kind = wanted if id(module) in inside and (is_linear or is_expert) else others
            kind.add(id(parameter))
    facts = AdapterFacts.from_model(model)
    of_adapters = {name for of in facts.keys.values() for name in of} if facts is not None else set()
    for name, parameter in model.named_parameters():
        if name in of_adapters:
            continue
        is_frozen = parameter.is_floating_point() and not parameter.requires_grad
        if is_frozen and id(parameter) in wanted - others and parameter.numel() % BLOCK == 0:
            yield name, parameter
