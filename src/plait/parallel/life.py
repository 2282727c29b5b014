"""How a model comes to life in its units: with first weights that are the same on every data rank."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from plait.comm import broadcast
from plait.errors import ModelError
from plait.models import initialise
from plait.parallel.groups import DataGroups, PartialSums
from plait.parallel.units import MasterMemory, Unit, bind
from plait.parallel.walk import Bundle
from plait.parallel.zero import Zero, cut_of
from plait.plan import Layout, Plan


def bring_to_life(
    model: nn.Module,
    blocks: Sequence[tuple[str, nn.Module]],
    layout: Layout,
    plan: Plan,
    groups: DataGroups,
    partial: PartialSums,
    device: torch.device,
    seed: int,
    masters: MasterMemory,
) -> Zero:
    """Units that hold the model's first weights, of one whole model; the model's parameters are
    views of them. No rank holds more of the model at a time than its ranges and one module."""
    on_meta = {parameter.is_meta for parameter in model.parameters()}
    if len(on_meta) != 1:
        raise ModelError(
            "a model is either on meta or has its weights",
            given="a model without parameters" if not on_meta else "some parameters on meta, others not",
        )
    if not layout.trained_numel:
        raise ModelError("the model has nothing to train", given="no parameter that requires a gradient")
    cut = cut_of(plan, groups, device, masters)
    units = [Unit(unit, cut) for unit in layout.units]
    placed = {piece.name: unit for unit in units for piece in unit.layout.pieces}
    others: dict[str, nn.Parameter] = {}  # what has no place in a unit: parameters that are not floating

    def store(name: str, values: Tensor) -> None:
        if name in placed:
            placed[name].write(name, values)
        else:
            others[name] = nn.Parameter(values.detach().to(device, copy=True), requires_grad=False)

    if on_meta == {True}:
        initialise(model, seed, device, store)
    _move_buffers(model, plan, device)
    if on_meta == {False}:
        _store_first_ranks(model, store, groups, device)
    owners = _owners(model, dict(blocks), units)
    bind(model, units, others)
    return Zero(model, tuple(owners), owners, plan, groups, partial)


def _store_first_ranks(
    model: nn.Module, store: Callable[[str, Tensor], None], groups: DataGroups, device: torch.device
) -> None:
    """All ranks take the first one's weights and buffers, one tensor at a time."""
    for name, parameter in model.named_parameters():
        values = parameter.detach().to(device, copy=True)
        broadcast(values, groups.everyone)
        store(name, values)
    for buffer in model.buffers():
        broadcast(buffer, groups.everyone)


def _move_buffers(model: nn.Module, plan: Plan, device: torch.device) -> None:
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                wide = plan.precision == "fp64" and buffer.is_floating_point()
                moved = buffer.to(device, torch.float64 if wide else buffer.dtype)
                module._buffers[key] = moved.contiguous()  # an expanded one is no place to receive into


def _owners(
    model: nn.Module, blocks: Mapping[str, nn.Module], units: Sequence[Unit]
) -> dict[Bundle, list[nn.Module]]:
    """Units that are gathered together, with the modules whose forward and backward use them."""
    by_name: dict[str, list[Unit]] = {}
    for unit in units:
        by_name.setdefault(unit.layout.block, []).append(unit)
    in_unit = {piece.name: unit.layout.block for unit in units for piece in unit.layout.pieces}
    of_parameter = {id(p): in_unit[n] for n, p in model.named_parameters() if n in in_unit}
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
