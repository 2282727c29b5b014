"""Bytes that this rank holds, by category: counted on the tensors themselves, and foretold."""

from plait.comm import shares_memory
from plait.parallel.zero.groups import DataGroups, shares_parameters
from plait.parallel.zero.reduce_ops import exchanges, incoming, receives
from plait.parallel.zero.sharded_model import ShardedModel
from plait.parallel.zero.sharded_optim import ShardedOptimizer
from plait.plan import Layout, MemoryUse, Plan, model_state_bytes
from plait.plan.estimate.traffic import TransportFacts


def allocated_bytes(
    held: ShardedModel, owned: ShardedOptimizer, plan: Plan, activation_bytes: int | None
) -> MemoryUse:
    """What is held now; of buffers, the most so far."""
    offloads, host = plan.offload == "cpu", 0
    use = {"parameters": 0, "gradients": 0, "master": 0, "optimizer": owned.stepper.state_bytes}
    for unit in held.units:
        stays = unit.whole.stays and unit.cut.share is None
        own = 0 if stays else unit.piece.nbytes
        use["parameters"] += (unit.whole.nbytes if stays else 0) + (0 if offloads else own)
        host += own if offloads else 0
        if not unit.trains:
            continue
        whole = unit.incoming.memory.nbytes if unit.incoming.memory.stays else 0
        kept = unit.incoming.memory.tensor
        in_place = (
            kept is not None and kept.untyped_storage()._cdata == unit.gradient.untyped_storage()._cdata
        )
        use["gradients"] += whole + (0 if offloads or in_place else unit.gradient.nbytes)
        host += unit.gradient.nbytes if offloads else 0
        separate = unit.master is not unit.piece
        use["master"] += unit.master.nbytes if separate and plan.offload == "none" else 0
        host += unit.master.nbytes if separate and offloads else 0
    use["gradients"] += held.residual_bytes
    if offloads:
        host, use["optimizer"] = host + use["optimizer"], 0
    return MemoryUse(
        **use, buffers=held.buffer_bytes, activations=activation_bytes, host=host, disk=owned.disk_bytes
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

    `states_per_element`: of the optimizer. `scratch_bytes`: of a named algorithm.
    """
    return model_state_bytes(
        layout,
        plan,
        states_per_element=states_per_element,
        grad_itemsize=incoming(plan, groups).itemsize,
        exchanges=exchanges(plan, groups),
        receives=receives(plan, groups) and not _reads_in_place(plan, groups),
        shares=shares_parameters(plan, groups),
        scratch_bytes=scratch_bytes,
        activation_bytes=activation_bytes,
    )


def terms_of(plan: Plan, groups: DataGroups, host_size: int) -> TransportFacts:
    """What the transport of these groups decides of a step's traffic."""
    narrow = incoming(plan, groups).itemsize
    return TransportFacts(narrow, shares_parameters(plan, groups), exchanges(plan, groups), host_size)


def _reads_in_place(plan: Plan, groups: DataGroups) -> bool:
    """Whether peers' contributions to a sum are read where they lie."""
    return shares_memory(groups.replicate if exchanges(plan, groups) else groups.reductions)
