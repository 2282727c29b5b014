"""Bytes on this rank by category: measured on the tensors themselves, and estimated from the plan."""

from collections.abc import Sequence, Set

import torch
from torch import Tensor

from plait.comm import shares_memory
from plait.parallel.zero.rank_context import RankContext
from plait.parallel.zero.sharded_model import ShardedModel
from plait.parallel.zero.sharded_optim import ShardedOptimizer
from plait.plan import Layout, MemoryUse, Plan, model_state_bytes, pinned_bytes
from plait.plan.events import TransportFacts


def allocated_bytes(
    model: ShardedModel,
    optimizer: ShardedOptimizer,
    context: RankContext,
    activation_bytes: int | None,
    loss_bytes: int,
    outer_bytes: int,
) -> MemoryUse:
    """Measure the bytes allocated now; for temporary buffers, the peak so far. `loss_bytes`: of the loss;
    `outer_bytes`: of the outer optimizer."""
    offloads, host = context.offloads, 0
    use = {
        "parameters": 0,
        "gradients": 0,
        "master": 0,
        "optimizer": optimizer.chunked.state_bytes + outer_bytes,
    }
    for unit in model.units:
        own_unsharded = unit.gathered.persistent and not context.shares_unit(unit.groups)
        shard_bytes = 0 if own_unsharded else unit.shard.nbytes
        use["parameters"] += (unit.gathered.nbytes if own_unsharded else 0) + (0 if offloads else shard_bytes)
        host += _host_bytes(unit.shard) if offloads and shard_bytes else 0
        if not unit.trains:
            continue
        buffer_bytes = unit.grad_buffer.memory.nbytes if unit.grad_buffer.memory.persistent else 0
        buffer = unit.grad_buffer.memory.tensor
        in_place = (
            buffer is not None and buffer.untyped_storage()._cdata == unit.grad_shard.untyped_storage()._cdata
        )
        use["gradients"] += buffer_bytes + (0 if offloads or in_place else unit.grad_shard.nbytes)
        host += _host_bytes(unit.grad_shard) if offloads else 0
        separate = unit.master is not unit.shard
        use["master"] += unit.master.nbytes if separate and context.plan.offload == "none" else 0
        in_host_memory = separate and offloads and not context.masters.are_in_file
        host += _host_bytes(unit.master) if in_host_memory else 0
    compressors = [c for stage in model.stages.values() for c in stage.reduction.compressors]
    use["gradients"] += sum(tensor.nbytes for compressor in compressors for tensor in compressor.state)
    buffers, blocks = context.tracker.peak_bytes + context.staged_grads.nbytes, optimizer.chunked.buffer_bytes
    if offloads:
        host, use["optimizer"] = host + use["optimizer"] + blocks, 0
        host += 2 * pinned_bytes(context.staged_params.nbytes // 2)
    return MemoryUse(
        **use,
        buffers=buffers + (0 if offloads else blocks),
        activations=activation_bytes,
        loss=loss_bytes,
        host=host,
        disk=optimizer.disk_bytes,
        **_besides_tensors(context.device),
    )


def _host_bytes(tensor: Tensor) -> int:
    return pinned_bytes(tensor.nbytes) if tensor.is_pinned() else tensor.nbytes


def _besides_tensors(device: torch.device) -> dict[str, int]:
    """Measure what a GPU holds besides tensors. See [Note: memory of a GPU besides tensors] in
    plan/memory.py. `runtime` includes other processes on the GPU, which has one rank."""
    if device.type != "cuda":
        return {}
    stats = torch.cuda.memory_stats(device)
    free, total = torch.cuda.mem_get_info(device)
    reserved = stats.get("reserved_bytes.all.current", 0)
    unused = stats.get("reserved_bytes.all.peak", 0) - stats.get("allocated_bytes.all.peak", 0)
    return {"runtime": max(0, total - free - reserved), "allocator": max(0, unused)}


def num_allocator_retries(device: torch.device) -> int:
    """How often this process's GPU had no free memory before unused memory was freed; 0 without a GPU."""
    return int(torch.cuda.memory_stats(device).get("num_alloc_retries", 0)) if device.type == "cuda" else 0


def estimated_bytes(
    layout: Layout,
    context: RankContext,
    plan: Plan,
    *,
    states_per_element: Sequence[int],
    coded_groups: Set[int],
    full_tensor_bytes: tuple[int, int],
    scratch_bytes: int,
    activation_bytes: int | None,
    num_communicators: int | None,
    loss_bytes: int,
) -> MemoryUse:
    """Estimate what `allocated_bytes` returns after a step.

    `plan`: as it was given, see `Plan.placed_on`. `states_per_element`: of the optimizer, by group.
    `coded_groups`, `full_tensor_bytes`: see `model_state_bytes`. `scratch_bytes`: receive buffers of a named
    algorithm. `num_communicators`: of NCCL; None on CPUs.
    """
    groups, exchanges = context.groups, context.exchanges_contributions
    reads_in_place = shares_memory(groups.dense.replicate if exchanges else groups.dense.reduce_scatter)
    return model_state_bytes(
        layout,
        plan,
        states_per_element=states_per_element,
        coded_groups=coded_groups,
        full_tensor_bytes=full_tensor_bytes,
        grad_itemsize=context.grad_buffer_dtype.itemsize,
        exchanges=exchanges,
        receives=context.receives_contributions and not reads_in_place,
        shares=context.shares_params,
        scratch_bytes=scratch_bytes,
        num_communicators=num_communicators,
    ).with_activations(activation_bytes, loss_bytes)


def transport_facts(context: RankContext, host_size: int) -> TransportFacts:
    """The properties of the groups' transport that determine a step's traffic."""
    exchanges, grad_bytes = context.exchanges_contributions, context.grad_buffer_dtype.itemsize
    return TransportFacts(grad_bytes, context.shares_params, exchanges, host_size)
