"""The values that all units, stages and reductions of a rank share: plan, groups, dtypes and memory."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from plait.comm import Group, Mesh, empty, is_direct, sends_narrow, share, shares_memory
from plait.parallel.zero.buffers import ByteTracker, CopyStream, StagingBuffers
from plait.plan import Plan, compresses
from plait.plan.axes import (
    BATCH,
    EXPERTS,
    MODEL,
    PARTS,
    REPLICAS,
    SEQUENCE,
    STAGES,
    TENSOR,
    TOKENS,
    Roles,
    UnitKind,
    in_order,
)
from plait.plan.compression import full_grad_dtype, reduces_over_all


@dataclass(frozen=True)
class Precision:
    """The dtype of parameters in forward and backward, and that of master weights and reduced gradients."""

    compute: torch.dtype
    master: torch.dtype

    @classmethod
    def from_plan(cls, plan: Plan) -> "Precision":
        return cls(_DTYPES[plan.dtype], torch.float64 if plan.dtype == "fp64" else torch.float32)


# By value of `precision`.
_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class UnitGroups:
    """The process groups over which the units of a kind are sharded and replicated. Under local steps they
    are groups of an island."""

    gradient_sum: Group  # ranks that sum a gradient
    replicate: Group  # of these, ranks with the same shards of states
    all_gather: Group  # of these, ranks with other shards of states
    reduce_scatter: Group  # the ranks of `all_gather`: see [Note: two channels] in `sharded_model.py`
    # The ranks of `gradient_sum`, on the channel of reductions, if the plan reduces over all of them at once;
    # otherwise `reduce_scatter`.
    first_reduction: Group
    counts: bool  # this rank's units are counted: it is the first of those in `one_copy` that have the same

    @classmethod
    def build(cls, mesh: Mesh, plan: Plan, kind: UnitKind) -> "UnitGroups":
        roles = Roles.from_plan(plan)
        reduce_scatter = mesh.group(*roles.states(kind), channel="reductions")
        single_reduction = compresses(plan) and reduces_over_all(plan)
        return cls(
            mesh.group(*roles.gradient_sum(kind)),
            mesh.group(*roles.replicas(kind), channel="reductions"),
            mesh.group(*roles.states(kind), channel="gathers"),
            reduce_scatter,
            mesh.group(*roles.gradient_sum(kind), channel="reductions")
            if single_reduction
            else reduce_scatter,
            not any(mesh.coord[axis] for axis in roles.replicas(kind) if axis in roles.one_copy),
        )


@dataclass(frozen=True)
class RankGroups:
    """The process groups of this rank."""

    batch_shares: Group  # ranks with other samples of a batch
    tokens: Group  # ranks with other tokens, which have the same weights
    islands: Group  # ranks that differ only along REPLICAS: islands, under local steps
    world: Group  # ranks of a step: all, or those of an island
    tp: Group  # ranks that shard the same layers
    same_data: Group  # ranks with other parts of the model, for the same data
    parts: Group  # ranks with other parts of the model
    experts: Group  # ranks with other experts of the same layers
    same_samples: Group  # the same, and ranks with other tokens of these samples
    sequence: Group  # ranks with other tokens of the same samples
    same_stage: Group  # ranks of a step with the same stages
    pp: Group  # ranks with other stages, for the same data
    one_copy: Group  # ranks that together hold one copy of the gradient
    units: Mapping[UnitKind, UnitGroups]

    @classmethod
    def build(cls, mesh: Mesh, plan: Plan) -> "RankGroups":
        roles = Roles.from_plan(plan)
        return cls(
            mesh.group(*BATCH),
            mesh.group(*TOKENS),
            mesh.group(*REPLICAS, channel="reductions"),
            mesh.group(*roles.step) if roles.has_islands else mesh.world.group,
            mesh.group(*TENSOR),
            mesh.group(*MODEL),
            mesh.group(*PARTS),
            mesh.group(*EXPERTS),
            mesh.group(*in_order((*MODEL, *SEQUENCE))),
            mesh.group(*SEQUENCE),
            mesh.group(*roles.same_stage),
            mesh.group(STAGES),
            mesh.group(*roles.one_copy, channel="reductions"),
            {kind: UnitGroups.build(mesh, plan, kind) for kind in UnitKind},
        )

    @property
    def dense(self) -> UnitGroups:
        """The groups of dense units, by which ranks decide what holds for all units."""
        return self.units[UnitKind.DENSE]


class MasterAllocator(Protocol):
    """Memory of master weights. Implemented by `MasterWeights` (device, host or file) and, in dry
    runs, by `NullMasters`.

    are_in_file   the optimizer rounds updated weights into the shards itself, while it holds them in memory
    """

    @property
    def are_in_file(self) -> bool: ...

    def allocate(self, numel: int) -> Tensor:
        """Return zeros for the master weights of a range."""

    def evict(self, master: Tensor) -> None:
        """Drop the weights' pages from memory if they are backed by a file."""


@dataclass(frozen=True)
class RankContext:
    """The plan on this rank, and what follows from it for storages and reductions.

    device     where the model computes
    masters    memory of the master weights
    tracker    bytes of unsharded parameters and gradients
    """

    plan: Plan
    mesh: Mesh
    device: torch.device
    groups: RankGroups
    masters: MasterAllocator
    tracker: ByteTracker = field(default_factory=ByteTracker)

    @cached_property
    def precision(self) -> Precision:
        return Precision.from_plan(self.plan)

    # --- storages

    @cached_property
    def offloads(self) -> bool:
        """True if shards and states are in host memory, also if the model itself computes on the CPU."""
        return self.plan.offload == "cpu"

    @cached_property
    def state_device(self) -> torch.device:
        """The device of master weights, gradient shards and optimizer states."""
        return torch.device("cpu") if self.offloads and self.device.type != "meta" else self.device

    @cached_property
    def shares_params(self) -> bool:
        """True if the ranks along `shard` share one storage: [Note: parameters in shared memory],
        `flat_param.py`."""
        return shares_memory(self.groups.dense.all_gather) and not self.offloads

    @cached_property
    def keeps_params_unsharded(self) -> bool:
        """True if `storage` is never freed."""
        nothing_to_free = self.groups.dense.all_gather.size == 1 and not self.offloads
        return self.plan.zero < 3 or nothing_to_free or self.shares_params

    @cached_property
    def reshards_every_pass(self) -> bool:
        """True if parameters are freed after each forward and backward, not once a step."""
        return not (self.keeps_params_unsharded or self.plan.reshard == "step")

    @cached_property
    def keeps_grads_unsharded(self) -> bool:
        """True if `grad_buffer` is never freed."""
        return self.plan.keeps_full_grads

    @cached_property
    def has_masters(self) -> bool:
        """True if master weights are separate from the parameters that the model computes with."""
        keeps_host_copy = self.offloads and self.keeps_params_unsharded
        return self.precision.compute != self.precision.master or keeps_host_copy

    @cached_property
    def copy_stream(self) -> CopyStream:
        """The stream of this rank's copies between device and host, of all stages."""
        return CopyStream(self.device)

    @cached_property
    def staged_grads(self) -> StagingBuffers:
        """Device memory for reduced gradients that are copied to the host."""
        return StagingBuffers(self.device)

    @cached_property
    def staged_params(self) -> StagingBuffers:
        """Host memory for parameters that are copied to the device."""
        return StagingBuffers(torch.device("cpu"))

    def shares_unit(self, groups: UnitGroups) -> bool:
        """Return whether other ranks use the storage of a unit with these groups: see `shares_params`."""
        return self.shares_params and groups.all_gather.size > 1

    def keeps_unit(self, groups: UnitGroups) -> bool:
        """Return whether `storage` of a unit with these groups is never freed."""
        return self.keeps_params_unsharded or (groups.all_gather.size == 1 and not self.offloads)

    def allocate_params(self, numel: int, dtype: torch.dtype, groups: UnitGroups) -> Tensor:
        """Return zeros for a unit's unsharded parameters."""
        if self.shares_unit(groups):
            return share(numel, dtype, group=groups.all_gather)
        if (arena := self.mesh.world.arena) is not None:
            return arena.empty(numel, dtype).zero_()
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def allocate_state(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return zeros on the states' device; in host memory pinned, if the rank computes on a GPU."""
        if (arena := self.mesh.world.arena) is not None:
            return arena.empty(numel, dtype).zero_()
        pins = self.offloads and self.device.type == "cuda"
        return torch.zeros(numel, dtype=dtype, device=self.state_device, pin_memory=pins)

    def allocate_grad(self, numel: int, dtype: torch.dtype, of_unit: UnitGroups) -> Tensor:
        """Return uninitialized memory from which the transport can send to the groups of a unit."""
        if (arena := self.mesh.world.arena) is not None:
            return arena.empty(numel, dtype)
        groups = (of_unit.reduce_scatter, of_unit.replicate)
        group = next((group for group in groups if shares_memory(group)), groups[0])
        return empty(numel, dtype, device=self.device, group=group)

    # --- reductions

    @cached_property
    def exchanges_contributions(self) -> bool:
        """True if replicas send each other their unsharded gradients as they are."""
        plan = self.plan
        is_default = plan.micro == 1 and plan.algorithm == "auto" and not compresses(plan)
        if self.groups.dense.reduce_scatter.size > 1 or not is_default:
            return False
        narrow = torch.bfloat16 if plan.reduce == "bf16" else self.precision.compute
        return sends_narrow(self.groups.dense.replicate, narrow, self.precision.master)

    @cached_property
    def receives_contributions(self) -> bool:
        """True if a range's owner receives each peer's contribution as it is and sums them itself."""
        is_default = self.plan.algorithm == "auto" and is_direct(self.groups.dense.reduce_scatter)
        return self.exchanges_contributions or is_default

    @cached_property
    def grad_buffer_dtype(self) -> torch.dtype:
        """The dtype of unsharded gradients."""
        return _DTYPES[full_grad_dtype(self.plan, receives=self.receives_contributions)]
