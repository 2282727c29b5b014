"""Bytes on this rank by category: measured on the tensors themselves, and estimated from the plan."""

from plait.comm import shares_memory
from plait.parallel.zero.groups import DataGroups, shares_parameters
from plait.parallel.zero.reduce_ops import (
    exchanges_contributions,
    grad_buffer_dtype,
    receives_contributions,
)
from plait.parallel.zero.sharded_model import ShardedModel
from plait.parallel.zero.sharded_optim import ShardedOptimizer
from plait.plan import Layout, MemoryUse, Plan, model_state_bytes
from plait.plan.estimate.traffic import TransportFacts


def allocated_bytes(
    model: ShardedModel, optimizer: ShardedOptimizer, plan: Plan, activation_bytes: int | None
) -> MemoryUse:
    """Measure the bytes allocated now; for temporary buffers, the peak so far."""
    offloads, host = plan.offload == "cpu", 0
    use = {"parameters": 0, "gradients": 0, "master": 0, "optimizer": optimizer.chunked.state_bytes}
    for unit in model.units:
        own_unsharded = unit.unsharded.persistent and unit.config.allocate_shared is None
        shard_bytes = 0 if own_unsharded else unit.shard.nbytes
        use["parameters"] += (unit.unsharded.nbytes if own_unsharded else 0) + (
            0 if offloads else shard_bytes
        )
        host += shard_bytes if offloads else 0
        if not unit.trains:
            continue
        buffer_bytes = unit.grad_buffer.memory.nbytes if unit.grad_buffer.memory.persistent else 0
        buffer = unit.grad_buffer.memory.tensor
        in_place = (
            buffer is not None and buffer.untyped_storage()._cdata == unit.grad_shard.untyped_storage()._cdata
        )
        use["gradients"] += buffer_bytes + (0 if offloads or in_place else unit.grad_shard.nbytes)
        host += unit.grad_shard.nbytes if offloads else 0
        separate = unit.master is not unit.shard
        use["master"] += unit.master.nbytes if separate and plan.offload == "none" else 0
        host += unit.master.nbytes if separate and offloads else 0
    use["gradients"] += model.residual_bytes
    if offloads:
        host, use["optimizer"] = host + use["optimizer"], 0
    return MemoryUse(
        **use,
        buffers=model.buffer_bytes,
        activations=activation_bytes,
        host=host,
        disk=optimizer.disk_bytes,
    )


def estimated_bytes(
    layout: Layout,
    plan: Plan,
    groups: DataGroups,
    *,
    states_per_element: int,
    scratch_bytes: int,
    activation_bytes: int | None,
) -> MemoryUse:
    """Estimate what `allocated_bytes` returns after a step.

    `states_per_element`: of the optimizer. `scratch_bytes`: receive buffers of a named algorithm.
    """
    return model_state_bytes(
        layout,
        plan,
        states_per_element=states_per_element,
        grad_itemsize=grad_buffer_dtype(plan, groups).itemsize,
        exchanges=exchanges_contributions(plan, groups),
        receives=receives_contributions(plan, groups) and not _reads_in_place(plan, groups),
        shares=shares_parameters(plan, groups),
        scratch_bytes=scratch_bytes,
        activation_bytes=activation_bytes,
    )


def transport_facts(plan: Plan, groups: DataGroups, host_size: int) -> TransportFacts:
    """The properties of these groups' transport that determine a step's traffic."""
    grad_bytes = grad_buffer_dtype(plan, groups).itemsize
    return TransportFacts(
        grad_bytes, shares_parameters(plan, groups), exchanges_contributions(plan, groups), host_size
    )


def _reads_in_place(plan: Plan, groups: DataGroups) -> bool:
    """Whether a reduction reads the peers' contributions in place."""
    return shares_memory(groups.replicate if exchanges_contributions(plan, groups) else groups.reduce_scatter)
