"""How a model comes to life in its units: with first weights that are the same on every data rank."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set

import torch
from torch import Tensor, nn

from plait.comm import broadcast
from plait.errors import ModelError
from plait.models import initialise
from plait.parallel.zero.exec_order import ParamGroup
from plait.parallel.zero.flat_param import FlatParam, FlatParamConfig
from plait.parallel.zero.grad_reduce import InFlightReductions
from plait.parallel.zero.groups import DataGroups, ReplicatedGradReduce
from plait.parallel.zero.shard_map import buffer_dtype
from plait.parallel.zero.sharded_model import ShardedStage
from plait.plan import Plan


def init_flat_params(
    model: nn.Module,
    units: Mapping[int, Sequence[FlatParam]],
    groups: DataGroups,
    plan: Plan,
    device: torch.device,
    seed: int,
    elsewhere: Set[nn.Module],
) -> dict[str, nn.Parameter]:
    """Writes the first weights of one whole model into the units, by stage, of this rank; its buffers become
    real and move to the device. Returns what has no place in a unit: parameters that are not floating. No
    rank holds more of the model at a time than its ranges and one module; what is in modules `elsewhere`
    is not made."""
    on_meta = {parameter.is_meta for parameter in model.parameters()}
    if len(on_meta) != 1:
        raise ModelError(
            "a model is either on meta or has its weights",
            given="a model without parameters" if not on_meta else "some parameters on meta, others not",
        )
    placed: dict[str, list[FlatParam]] = {}
    for unit in (unit for of_stage in units.values() for unit in of_stage):
        for piece in unit.layout.params:
            placed.setdefault(piece.name, []).append(unit)
    others: dict[str, nn.Parameter] = {}

    def store(name: str, values: Tensor) -> None:
        for unit in placed.get(name, ()):
            unit.write(name, values)
        if not (values.is_floating_point() or name in placed):
            others[name] = nn.Parameter(values.detach().to(device, copy=True), requires_grad=False)

    if on_meta == {True}:
        initialise(model, seed, device, store, skip=elsewhere)
    move_buffers(model, plan, device)
    if on_meta == {False}:
        _store_first_ranks(model, store, groups, device)
    return others


def bind_flat_params(
    model: nn.Module,
    names: Mapping[int, str],
    blocks: Sequence[tuple[str, nn.Module]],
    units: Sequence[FlatParam],
    others: Mapping[str, nn.Parameter],
    plan: Plan,
    groups: DataGroups,
    partial: ReplicatedGradReduce,
    under_way: InFlightReductions,
    cut: FlatParamConfig,
) -> ShardedStage:
    """The model, or one stage of it, whose parameters are views of units from now on. `names`: of parameters
    in the whole model, by identity: a stage may know one that blocks share under a later name only."""
    owners = _owners(model, names, dict(blocks), units)
    _bind(model, names, units, others)
    return ShardedStage(model, tuple(owners), owners, plan, groups, partial, under_way, cut)


def _bind(
    model: nn.Module, names: Mapping[int, str], units: Iterable[FlatParam], others: Mapping[str, nn.Parameter]
) -> None:
    """Puts the units' parameters, and of `others` its own, into the model. Tied parameters stay tied."""
    old = {names[id(parameter)]: parameter for parameter in model.parameters()}
    new = {id(old[name]): parameter for name, parameter in others.items() if name in old}
    for unit in units:
        unit.adopt(old)
        new |= {id(old[name]): parameter for name, parameter in unit.parameters.items()}
    for module in model.modules():
        for key, held in module._parameters.items():
            if held is not None:
                module._parameters[key] = new[id(held)]
    for unit in units:
        unit.note_versions()


def release_unused(model: nn.Module, kept: Set[int]) -> None:
    """What of the whole model no stage of this rank took over has no memory any more. `kept`: the identities
    of parameters that were."""
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta and id(parameter) not in kept:
                meta = torch.empty_like(parameter, device="meta")
                module._parameters[key] = nn.Parameter(meta, parameter.requires_grad)


def _store_first_ranks(
    model: nn.Module, store: Callable[[str, Tensor], None], groups: DataGroups, device: torch.device
) -> None:
    """All ranks take the first one's weights and buffers, one tensor at a time."""
    for name, parameter in model.named_parameters():
        values = parameter.detach().to(device, copy=True)
        broadcast(values, groups.everyone)
        store(name, values)
    for buffer in model.buffers():
        if not buffer.is_meta:
            broadcast(buffer, groups.everyone)


def move_buffers(model: nn.Module, plan: Plan, device: torch.device) -> None:
    """Those that are there, to the dtype in which they are kept; on meta all of them."""
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and (not buffer.is_meta or device.type == "meta"):
                moved = buffer.to(device, buffer_dtype(buffer, plan))
                module._buffers[key] = moved.contiguous()  # an expanded one is no place to receive into


def _owners(
    model: nn.Module, names: Mapping[int, str], blocks: Mapping[str, nn.Module], units: Sequence[FlatParam]
) -> dict[ParamGroup, list[nn.Module]]:
    """Units that are gathered together, with the modules whose forward and backward use them."""
    by_name: dict[str, list[FlatParam]] = {}
    for unit in units:
        by_name.setdefault(unit.layout.block, []).append(unit)
    in_unit = {piece.name: unit.layout.block for unit in units for piece in unit.layout.params}
    of_parameter = {id(p): in_unit[n] for p in model.parameters() if (n := names[id(p)]) in in_unit}
    found: dict[str, list[nn.Module]] = {name: [] for name in by_name}
    for name, block in blocks.items():
        if name in found:
            found[name].append(block)
    for module_name, module in model.named_modules():
        inside = [name for name in blocks if f"{module_name}.".startswith(f"{name}.")]
        for parameter in module._parameters.values():
            unit_name = of_parameter.get(id(parameter))
            if unit_name is not None and unit_name not in inside and module not in found[unit_name]:
                found[unit_name].append(module)
    return {tuple(by_name[name]): modules for name, modules in found.items()}
