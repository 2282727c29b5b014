"""How a model comes to life in its units: with first weights that are the same on every data rank."""

import torch
from torch import nn

from plait.comm import Group, Mesh, broadcast
from plait.errors import ModelError
from plait.models import initialise
from plait.parallel.units import Precision, Unit, make_units
from plait.plan import Layout, Plan


def bring_to_life(model: nn.Module, layout: Layout, plan: Plan, mesh: Mesh, seed: int) -> list[Unit]:
    """Units whose storages hold the model's first weights, the same on every data rank."""
    device = mesh.world.device
    on_meta = {parameter.is_meta for parameter in model.parameters()}
    if len(on_meta) != 1:
        raise ModelError(
            "a model is either on meta or has its weights",
            given="a model without parameters" if not on_meta else "some parameters on meta, others not",
        )
    if not layout.units:
        raise ModelError("the model has nothing to train", given="no parameter that requires a gradient")
    units = make_units(model, layout, Precision.of(plan), device)
    if on_meta == {True}:
        initialise(model, seed, device)
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None:
                wide = plan.precision == "fp64" and buffer.is_floating_point()
                module._buffers[key] = buffer.to(device, torch.float64 if wide else buffer.dtype)
    if on_meta == {False}:
        _take_rank_0s(model, units, mesh.group("replicate", "shard"))
    for unit in units:
        unit.compute_with_storage()
    return units


def _take_rank_0s(model: nn.Module, units: list[Unit], group: Group) -> None:
    held = {name for unit in units for name in unit.parameters}
    frozen = [p.data for name, p in model.named_parameters() if name not in held]
    for tensor in (*(unit.master for unit in units), *frozen, *model.buffers()):
        broadcast(tensor, group)
