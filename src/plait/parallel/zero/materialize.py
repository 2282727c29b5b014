"""Initialise a model's units, with the same weights on every data rank, and bind the model to them."""

from collections.abc import Callable, Mapping, Sequence, Set

import torch
from torch import Tensor, nn

from plait.comm import BulkBroadcast, Group
from plait.errors import ModelError
from plait.models import initialize_weights
from plait.parallel.zero.block_codes import as_stored
from plait.parallel.zero.exec_order import UnitGroup
from plait.parallel.zero.flat_param import FlatParam
from plait.parallel.zero.rank_context import RankContext
from plait.parallel.zero.shard_map import buffer_dtypes
from plait.plan import Plan


def init_flat_params(
    model: nn.Module,
    units: Mapping[int, Sequence[FlatParam]],
    context: RankContext,
    seed: int,
    skip: Set[nn.Module],
) -> dict[str, nn.Parameter]:
    """Write the initial weights of a full model into this rank's units (by stage), and move its buffers.

    Returns the parameters that are in no unit: those that are not floating. At any time a rank holds only its
    ranges and one full module. Parameters of modules in `skip` are not initialised. Raises ModelError for a
    model that is partly on meta.
    """
    on_meta = {parameter.is_meta for parameter in model.parameters()}
    if len(on_meta) != 1:
        raise ModelError(
            "a model is either on meta or has its weights",
            given="a model without parameters" if not on_meta else "some parameters on meta, others not",
            expected="all parameters on meta, or none",
            hint="with torch.device('meta') around the entire construction",
        )
    units_of: dict[str, list[FlatParam]] = {}
    for unit in (unit for of_stage in units.values() for unit in of_stage):
        for shard in unit.layout.params:
            units_of.setdefault(shard.name, []).append(unit)
    standalone: dict[str, nn.Parameter] = {}
    device = context.device

    def store(name: str, values: Tensor) -> None:
        for unit in units_of.get(name, ()):
            unit.write(name, values)
        if not (values.is_floating_point() or name in units_of):
            standalone[name] = nn.Parameter(values.detach().to(device, copy=True), requires_grad=False)

    def stored(name: str, values: Tensor) -> Tensor:
        found = units_of.get(name)
        is_frozen = found is not None and not found[0].trains
        form = found[0].layout.format or None if found else None
        return as_stored(values, form, context.precision.compute) if is_frozen else values

    if on_meta == {True}:
        initialize_weights(model, seed, device, store, skip=skip, stored=stored)
    move_buffers(model, context.plan, device)
    if on_meta == {False}:
        _broadcast_weights(model, store, context.mesh.world.group, device)
    return standalone


def bind_flat_params(
    model: nn.Module,
    names: Mapping[int, str],
    blocks: Sequence[tuple[str, nn.Module]],
    units: Sequence[FlatParam],
    standalone: Mapping[str, nn.Parameter],
) -> dict[UnitGroup, list[nn.Module]]:
    """Make the parameters of a model, or of one stage of it, views of the units; return the modules that use
    each group of units. Tied parameters stay tied.

    `names`: of parameters in the full model, by id: in a stage, one that blocks share may have a later name
    only. `standalone`: parameters that are in no unit.
    """
    owners = _owners(model, names, dict(blocks), units)
    old = {names[id(parameter)]: parameter for parameter in model.parameters()}
    new = {id(old[name]): parameter for name, parameter in standalone.items() if name in old}
    for unit in units:
        unit.make_parameters(old)
        new |= {id(old[name]): parameter for name, parameter in unit.parameters.items()}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[key] = new[id(parameter)]
    for unit in units:
        unit.record_versions()
    return owners


def release_unused(model: nn.Module, used: Set[int]) -> None:
    """Free the full model's parameters that no stage of this rank uses. `used`: ids of those that are."""
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta and id(parameter) not in used:
                meta = torch.empty_like(parameter, device="meta")
                module._parameters[key] = nn.Parameter(meta, parameter.requires_grad)


def _broadcast_weights(
    model: nn.Module, store: Callable[[str, Tensor], None], world: Group, device: torch.device
) -> None:
    """Broadcast rank 0's weights and buffers, one tensor at a time."""
    bulk = BulkBroadcast(world)
    for name, parameter in model.named_parameters():
        values = parameter.detach().to(device, copy=True)
        bulk.run(values, label=name)
        store(name, values)
    for name, buffer in model.named_buffers():
        if not buffer.is_meta:
            bulk.run(buffer, label=name)


def move_buffers(model: nn.Module, plan: Plan, device: torch.device) -> None:
    """Move the model's buffers to the device, in the dtype in which they are stored. Buffers on meta stay
    there."""
    dtypes = buffer_dtypes(model, plan)
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and (not buffer.is_meta or device.type == "meta"):
                moved = buffer.to(device, dtypes.get(id(buffer), buffer.dtype))
                module._buffers[key] = moved.contiguous()  # an expanded one cannot be received into


def _owners(
    model: nn.Module, names: Mapping[int, str], blocks: Mapping[str, nn.Module], units: Sequence[FlatParam]
) -> dict[UnitGroup, list[nn.Module]]:
    """Map units that are unsharded together to the modules whose forward and backward use them."""
    by_block: dict[str, list[FlatParam]] = {}
    for unit in units:
        by_block.setdefault(unit.layout.block, []).append(unit)
    block_of_name = {shard.name: unit.layout.block for unit in units for shard in unit.layout.params}
    block_of = {id(p): block_of_name[n] for p in model.parameters() if (n := names[id(p)]) in block_of_name}
    owners: dict[str, list[nn.Module]] = {name: [] for name in by_block}
    for name, block in blocks.items():
        if name in owners:
            owners[name].append(block)
    for module_name, module in model.named_modules():
        inside = [name for name in blocks if f"{module_name}.".startswith(f"{name}.")]
        for parameter in module._parameters.values():
            block_name = block_of.get(id(parameter))
            if block_name is not None and block_name not in inside and module not in owners[block_name]:
                owners[block_name].append(module)
    return {tuple(by_block[name]): modules for name, modules in owners.items()}
