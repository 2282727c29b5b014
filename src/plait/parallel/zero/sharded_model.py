"""ZeRO 0 to 3 over data ranks (Rajbhandari et al. 1910.02054): one code path; only what is sharded differs.

`ShardedStage` runs a step of one pipeline stage, `ShardedModel` of all stages on this rank.

[Note: the four ZeRO stages]
dp = replicate x shard ranks see different data. The ranks along `shard` share one copy of what the stage
shards: each unit's flat storage is divided into equal ranges, and each rank owns one. Stage 0 is the case
that `shard` has one rank, which owns everything.

  stage  storage (parameters)     grad_buffer (gradients)      grad_shard, master, optimizer states
  0      unsharded                unsharded                    unsharded: the range is everything
  1      unsharded                unsharded                    own range
  2      unsharded                until they are reduced       own range
  3      while they are used      until they are reduced       own range

All of them run the same step:

  forward    a unit is unsharded before its use (3)                                          unshard.py
  backward   unsharded again (3); its gradients fill `grad_buffer`; when they are complete, a
             reduce-scatter over `shard` leaves the sum of the own range in `grad_shard`     grad_reduce.py
             and, once a step, an all-reduce over `replicate` sums the replicas
  update     the norm is reduced over `shard`; each rank's optimizer updates its range;
             stages 1 and 2 all-gather each unit's new parameters while the next one is updated

With N ranks along `shard`, each all-gather and each reduce-scatter sends (N-1)/N elements per parameter and
rank: stages 1 and 2 as much as stage 0's all-reduce, stage 3 half as much again, because backward unshards
once more.

If the ranks of `shard` share memory ([Note: parameters in shared memory] in `flat_param.py`), one storage
serves all of them from stage 1 on: there is no all-gather, and a barrier ends the update.

With `reshard=step` stage 3 unshards once a step; `accumulate=unsharded` keeps unsharded gradients over a
step's micro-batches. Both trade memory for less communication.

[Note: two channels]
All-gathers and reduce-scatters have their own connections (on CUDA: streams). An all-gather that a
computation needs does not queue after a reduce-scatter that nothing waits for yet, and ranks that interleave
the two differently still match each kind in its own order.

[Note: tied parameters on several stages]
A parameter that several pipeline stages compute with (an embedding that is also the head) is on each of them,
in units of its own, so that its copies have the same position and neighbours on all of them. Once a step,
when each stage's gradient is the sum over data ranks, the copies' gradients are summed over the stages; from
then on the copies see the same gradient and stay bitwise equal. The first stage's is counted in norms and
saved. Summing earlier would make the first and the last stage wait for each other in the middle of a
schedule. The reduction is over a rank's range, in master's dtype.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from plait.comm import Group, Mesh, all_reduce, empty, share, shares_memory
from plait.errors import ModelError
from plait.parallel.zero.exec_order import ParamGroup, agreed_order
from plait.parallel.zero.flat_param import (
    FlatParam,
    FlatParamConfig,
    MasterAllocator,
    changed_outside_engine,
)
from plait.parallel.zero.grad_buffer import ByteTracker
from plait.parallel.zero.grad_reduce import GradReducer, InFlightReductions
from plait.parallel.zero.groups import DataGroups, Precision, ReplicatedGradReduce, shares_parameters
from plait.parallel.zero.reduce_ops import grad_buffer_dtype, reduction_of_plan
from plait.parallel.zero.unshard import Unsharder
from plait.plan import Plan
from plait.plan.prefetch import ExecOrder

# Where a backward starts: a tensor, or its edge in the graph if the tensor itself is gone.
Root = Tensor | torch.autograd.graph.GradientEdge


def flat_param_config(
    plan: Plan, groups: DataGroups, device: torch.device, master_allocator: MasterAllocator
) -> FlatParamConfig:
    """Placement and dtypes of this rank's storages. See [Note: the four ZeRO stages]."""
    precision = Precision.from_plan(plan)
    offloads = plan.offload == "cpu"
    nothing_to_free = groups.all_gather.size == 1 and not offloads
    shares = shares_parameters(plan, groups)
    sharing_groups = [g for g in (groups.reduce_scatter, groups.replicate) if shares_memory(g)]
    return FlatParamConfig(
        shard_rank=groups.all_gather.rank,
        device=device,
        state_device=torch.device("cpu") if offloads else device,
        offloads=offloads,
        compute_dtype=precision.compute,
        master_dtype=precision.master,
        grad_buffer_dtype=grad_buffer_dtype(plan, groups),
        keeps_params_unsharded=plan.zero < 3 or nothing_to_free or shares,
        keeps_grads_unsharded=plan.keeps_full_grads,
        master_allocator=master_allocator,
        tracker=ByteTracker(),
        allocate_shared=partial(share, group=groups.all_gather) if shares else None,
        allocate_grad=partial(empty, device=device, group=(sharing_groups or [groups.reduce_scatter])[0]),
    )


def _refuse_to_load(*_: Any) -> None:
    raise changed_outside_engine("load_state_dict() of a model that is being trained")


class DeferredWork(Protocol):
    """Weight gradients that a split backward has deferred. Implemented in `pipeline/split_backward.py`."""

    def parameters(self) -> Sequence[Tensor]:
        """The parameters of the deferred gradients, one entry per gradient."""

    def keep(self, parameter: Tensor, gradient: Tensor) -> None:
        """Queue a gradient that the first half has already computed."""

    def run(self, deliver: Callable[[Tensor, Tensor], object]) -> None:
        """Compute the gradients; call `deliver(parameter, gradient)` for each."""


class ShardedStage:
    """One pipeline stage under ZeRO: forward hooks, backward, reduction and update of its units."""

    def __init__(
        self,
        model: nn.Module,
        param_groups: Sequence[ParamGroup],
        owners: Mapping[ParamGroup, Sequence[nn.Module]],
        plan: Plan,
        groups: DataGroups,
        replicated_reduce: ReplicatedGradReduce,
        in_flight: InFlightReductions,
        config: FlatParamConfig,
    ) -> None:
        self._plan = plan
        self._dp_group = groups.dp
        self.config = config
        self.units = [unit for param_group in param_groups for unit in param_group]
        self.trained = [unit for unit in self.units if unit.trains]
        self._single = [(unit,) for unit in self.trained]
        self._param_groups = param_groups
        self._tracker = config.tracker
        self._reduction = reduction_of_plan(self.trained, plan, groups, config.device, self._tracker)
        self._reducer = GradReducer(
            self.trained,
            self._reduction,
            replicated_reduce,
            in_flight,
            config=config,
            tp_size=groups.tp.size,
            num_replicas=groups.replicate.size,
            dp_group=groups.dp,
            accumulate_unsharded=plan.accumulates_full,
            has_deadlines=not (
                config.keeps_params_unsharded or plan.reshard == "step" or plan.keeps_full_grads
            ),
            tracker=self._tracker,
        )
        self._unsharder = Unsharder(
            model,
            param_groups,
            owners,
            groups.all_gather,
            groups.dp,
            config,
            prefetch=plan.prefetch,
            keep_unsharded=plan.zero < 3 or plan.reshard == "step",
            watch=not plan.compile,
            on_progress=self._reducer.start_due,
        )
        self._reducer.set_order(self.trained[::-1], self._unsharder.last_uses, plan.prefetch)
        for unit in self.trained:
            unit.on_complete.append(self._unsharder.on_complete)
        self._unshards_after_update = config.keeps_params_unsharded
        self.sync_params()
        for unit in self.units:
            unit.record_versions()
        self._unit_of = {id(p): unit for unit in self.units for p in unit.parameters.values()}
        self._model = model
        self._record_module_tree()
        model.register_load_state_dict_pre_hook(_refuse_to_load)

    def _record_module_tree(self) -> None:
        """Record the module tree, in which `check_unchanged` finds replaced and added parameters."""
        named = list(self._model.named_modules())
        self._slots = [
            (module._parameters, key, f"{name}.{key}" if name else key, parameter)
            for name, module in named
            for key, parameter in module._parameters.items()
        ]
        self._tree = [(m, list(m._modules.values()), len(m._parameters)) for _, m in named]

    @property
    def recorded_order(self) -> ExecOrder[str]:
        """Block names of the units in the order in which the first step's passes used them; empty if no unit
        is unsharded for a use."""
        return self._unsharder.recorded_order.map(lambda param_group: param_group[0].layout.block)

    @property
    def scratch_bytes(self) -> int:
        """Receive buffers of a named algorithm."""
        return self._reduction.scratch_bytes

    @property
    def residual_bytes(self) -> int:
        """Error-feedback residuals and factors that compressed reductions keep from step to step."""
        return self._reduction.residual_bytes

    def check_unchanged(self) -> None:
        """Raise ModelError if a parameter was changed, replaced or added outside the engine."""
        for unit in self.units:
            unit.check_unchanged()
        for holder, key, name, parameter in self._slots:
            if holder.get(key) is not parameter:
                raise changed_outside_engine(name)
        for module, children, num_params in self._tree:
            if len(module._parameters) != num_params or [*module._modules.values()] != children:
                self._check_all_known()
                return

    def _check_all_known(self) -> None:
        """Raise ModelError for a trainable parameter that is in no unit."""
        known = {id(parameter) for *_, parameter in self._slots}
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and id(parameter) not in known:
                raise ModelError(
                    "a parameter came after parallelize: it would not be reduced or updated",
                    given=name,
                    expected="a model that has all its parameters before",
                    hint="change the model before parallelize, or freeze the parameter",
                )

    def backward(
        self,
        roots: Sequence[Root],
        gradients: Sequence[Tensor | None],
        *,
        last: bool,
        deferred: DeferredWork | None = None,
    ) -> None:
        """Run a micro-batch's backward from `roots` with these gradients (None: of a scalar, 1).

        With `last`, the step's gradients are complete after it. With `deferred` (a split backward) some
        weight gradients follow in `backward_weight`: all of them unless unsharded gradients are kept, see
        [Note: deferred early gradients] in `flat_param.py`.
        """
        split = deferred is not None
        self._unsharder.begin_backward(split=split)
        self._reducer.begin_micro(last=last and not split, split=split)
        for unit in self.trained:
            unit.defer_grad = None if deferred is None or self.config.keeps_grads_unsharded else deferred.keep
        if roots:  # otherwise nothing upstream trains
            torch.autograd.backward(roots, gradients)  # type: ignore[arg-type]  # a mixture is fine
        self._unsharder.finish_walk()
        self._reducer.end_micro()
        self._unsharder.end_backward()

    def backward_weight(self, deferred: DeferredWork, *, last: bool) -> None:
        """Compute and accumulate the weight gradients that a split backward has deferred."""
        for unit in self.trained:
            unit.defer_grad = None
        for parameter in deferred.parameters():
            self._unit_of[id(parameter)].expect_deferred(parameter)
        self._reducer.begin_deferred(last=last)
        deferred.run(
            lambda parameter, gradient: self._unit_of[id(parameter)].accumulate_deferred(parameter, gradient)
        )
        self._reducer.end_micro()

    def wait_for_gradients(self) -> None:
        """Wait for the reductions of gradients over the data ranks."""
        self._reducer.wait()

    def squared_norm(self) -> Tensor:
        """After `wait_for_gradients`: the squared norm of this rank's gradient shards, float64, a scalar.
        Each element of the full gradient counts once over the ranks that hold one copy."""
        return self._reducer.squared_norm()

    def update_squared_norm(self, unit: FlatParam) -> None:
        """After `wait_for_gradients`: recompute it for a unit whose gradient has changed."""
        self._reducer.update_squared_norm(unit)

    @property
    def digest(self) -> int:
        """Digest of this step's all-gathers, equal on ranks that share the units. Reading it resets it."""
        return self._unsharder.digest

    def update(self, step: Callable[[FlatParam], None]) -> None:
        """Update each unit's shard with `step`, then all-gather it or discard the unsharded parameters."""
        if not self._unshards_after_update:
            self._unsharder.reshard_all()
        self._unsharder.wait_all()
        for param_group in self._param_groups:
            for unit in param_group:
                if unit.trains:
                    step(unit)
                    unit.write_back()
            if self._unshards_after_update:
                self._unsharder.start_unshard_updated(param_group)
        self._unsharder.wait_all()

    def end_step(self, *, skipped: bool, scale: float) -> None:
        """Prepare the next step. `scale`: the next step's loss scale divided by this one's."""
        completion_order = self._reducer.completion_order
        self._reducer.reset()
        if skipped:
            self._discard_residuals()
        elif scale != 1.0:
            self._reduction.scale_residuals(scale)
        if self._unsharder.agree() and self._single:
            order = agreed_order([(unit,) for unit in completion_order], self._single, self._dp_group)
            self._reducer.set_order(
                [unit for (unit,) in order], self._unsharder.last_uses, self._plan.prefetch
            )

    def wait_for_readers(self) -> None:
        """Wait until weights may be written other than by `update`: see [Note: parameters in shared memory]
        in `flat_param.py`."""
        self._unsharder.wait_for_readers()

    def sync_params(self) -> None:
        """Make master weights that were written other than by `update` visible to the model."""
        for unit in self.units:
            unit.write_back()
        if self._unshards_after_update:
            self._unsharder.start_unshard_all()
            self._unsharder.wait_all()
        self._unsharder.reshard_all()

    def reset(self) -> None:
        """Discard a step that an exception ended, or the state of another training."""
        self._reducer.reset()
        self._discard_residuals()
        self._unsharder.reset()

    def _discard_residuals(self) -> None:
        self._reduction.discard_residuals()
        for unit in self.trained:
            unit.zero_gaps()

    def watch_outside_uses(self) -> AbstractContextManager[None]:
        """For a forward and its loss: see [Note: parameters used outside their modules] in `unshard.py`."""
        return self._unsharder.watch_outside_uses()

    def point_to_storage(self) -> None:
        """Make the parameters views of their storages, also of those that are not allocated."""
        for unit in self.units:
            unit.point_to_storage()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Disable the model's hooks in this context: a copy of the model has them too."""
        self._unsharder.is_paused = True
        try:
            yield
        finally:
            self._unsharder.is_paused = False


class ShardedModel:
    """All pipeline stages of this rank, which step together: see `ShardedStage`."""

    def __init__(
        self, stages: Mapping[int, ShardedStage], groups: DataGroups, tied_reduce: "TiedGradReduce"
    ) -> None:
        """`stages`: by index."""
        self.stages = dict(stages)
        self.config = next(iter(self.stages.values())).config  # the same for all
        self._groups = groups
        self._tied_reduce = tied_reduce

    @property
    def units(self) -> list[FlatParam]:
        return [unit for stage in self.stages.values() for unit in stage.units]

    @property
    def trained(self) -> list[FlatParam]:
        return [unit for stage in self.stages.values() for unit in stage.trained]

    @property
    def buffer_bytes(self) -> int:
        """Peak bytes of temporarily unsharded parameters and gradients."""
        return self.config.tracker.peak_bytes

    @property
    def scratch_bytes(self) -> int:
        """Receive buffers of a named algorithm."""
        return sum(stage.scratch_bytes for stage in self.stages.values())

    @property
    def residual_bytes(self) -> int:
        """Error-feedback residuals and factors that compressed reductions keep from step to step."""
        return sum(stage.residual_bytes for stage in self.stages.values())

    def check_unchanged(self) -> None:
        """Raise ModelError if a parameter was changed or replaced outside the engine."""
        for stage in self.stages.values():
            stage.check_unchanged()

    def finish_reductions(self) -> Tensor:
        """Wait for the gradients; return their squared norm, each element of the full gradient counted once,
        then the input of `check_digests`; float64, (1 + 2 x pipeline ranks,)."""
        for stage in self.stages.values():
            stage.wait_for_gradients()
        self._tied_reduce.reduce(self.stages)
        pp_rank, pp_size = self._groups.pp.rank, self._groups.pp.size
        digest = 0
        for stage in self.stages.values():
            digest = (31 * digest + stage.digest) % 2**16
        squares = [stage.squared_norm() for stage in self.stages.values()]
        totals = squares[0].new_zeros(1 + 2 * pp_size)
        totals[0] = torch.stack(squares).sum()
        totals[1 + 2 * pp_rank] = digest
        totals[2 + 2 * pp_rank] = digest**2
        all_reduce(totals, self._groups.norm)
        return totals

    def check_digests(self, digests: Sequence[float]) -> None:
        """Raise ModelError unless the ranks that share units have all-gathered the same units in this step.

        `digests`: for each pipeline rank, the sum of its digests over ranks and the sum of their squares.
        """
        num_ranks = self._groups.norm.size // self._groups.pp.size
        for total, of_squares in zip(digests[::2], digests[1::2], strict=True):
            if of_squares * num_ranks != total**2:
                raise ModelError(
                    "ranks gathered different parameters: this step's results are wrong",
                    given="modules whose order or number of calls depends on a rank's data",
                    hint="zero=2, which does not shard parameters; or call the same modules, if with zeros",
                )

    def update(self, step: Callable[[FlatParam], None]) -> None:
        """Update each unit's shard with `step`, and make the new weights visible to the model."""
        for stage in self.stages.values():
            stage.update(step)

    def end_step(self, *, skipped: bool, scale: float) -> None:
        """Prepare the next step. `scale`: the next step's loss scale divided by this one's."""
        for stage in self.stages.values():
            stage.end_step(skipped=skipped, scale=scale)

    def wait_for_readers(self) -> None:
        """Wait until weights may be written other than by `update`."""
        for stage in self.stages.values():
            stage.wait_for_readers()

    def sync_params(self) -> None:
        """Make master weights that were written other than by `update` visible to the model."""
        for stage in self.stages.values():
            stage.sync_params()

    def reset(self) -> None:
        """Discard a step that an exception ended, or the state of another training."""
        for stage in self.stages.values():
            stage.reset()


class TiedGradReduce:
    """Sums gradients of parameters that are on several stages. See [Note: tied parameters on several
    stages]."""

    def __init__(self, names: Mapping[str, Sequence[int]], rank_of: Mapping[int, int], mesh: Mesh) -> None:
        """`names`: units and the stages that have them, in one order on all ranks. `rank_of`: each stage's
        coordinate on `pp`."""
        own = mesh.coord["pp"]
        self._stages = {
            name: tuple(stages) for name, stages in names.items() if own in {rank_of[s] for s in stages}
        }
        self._groups: dict[str, Group] = {}
        for name, stages in self._stages.items():
            coords = sorted({rank_of[stage] for stage in stages})
            self._groups[name] = mesh.subgroup("pp", coords, channel="shared")

    def reduce(self, stages: Mapping[int, ShardedStage]) -> None:
        """Sum the gradients; all stages' reductions over data ranks have completed."""
        for name, indices in self._stages.items():
            copies = [
                (stages[index], unit)
                for index in indices
                if index in stages
                for unit in stages[index].trained
                if unit.layout.name == name
            ]
            if not copies:  # it is frozen
                continue
            (_, first), *others = copies
            total = first.grad_shard.to(first.config.device, copy=True) if others else first.grad_shard
            for _, unit in others:
                total.add_(unit.grad_shard.to(total.device))
            total = total.to(first.config.device)
            all_reduce(total, self._groups[name], label=f"gradients of {name}")
            for stage, unit in copies:
                if unit.grad_shard is not total:
                    unit.grad_shard.copy_(total)
                stage.update_squared_norm(unit)
