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
computation needs does not queue after a reduce-scatter that nothing waits for yet. Kernels of two NCCL
communicators that may run at the same time need one order on all ranks: NCCL_LAUNCH_ORDER_IMPLICIT makes it
that of the program. The ranks that share units run one program: hooks fire in autograd's order, gathers
follow the agreed order of uses, and reductions start in an order of their own at the same uses. Only a branch
that one rank takes and another does not (see `plan/prefetch.py`) interleaves the two kinds differently, each
still in its own order. CPU ranks, which match each kind by itself, need no more than that.

[Note: calls of the optimizer]
On a CPU, each unit group is updated by itself, or with other small ones: its weights are still in cache when
they are rounded and sent, and the updates of offloaded units overlap with the copies of those before. A call
of torch's optimizer takes some hundred microseconds of Python and launches its kernels for all its parameters
together. On CUDA the calls would take longer than the kernels, so there is one, or, where all-gathers follow,
one per third of the units: the all-gathers overlap with the next third's update.

[Note: tied parameters on several stages]
A parameter that several pipeline stages compute with (an embedding that is also the head) is on each of them,
in units of its own, so that its copies have the same position and neighbours on all of them. Once a step,
when each stage's gradient is the sum over data ranks, the copies' gradients are summed over the stages; from
then on the copies see the same gradient and stay bitwise equal. The first stage's is counted in norms and
saved. Summing earlier would make the first and the last stage wait for each other in the middle of a
schedule. The reduction is over a rank's range, in master's dtype.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from plait.comm import Group, Mesh, all_reduce
from plait.errors import ModelError
from plait.parallel.zero.exec_order import UnitGroup, agreed_order
from plait.parallel.zero.flat_param import FlatParam, given_to_another_engine
from plait.parallel.zero.grad_buffer import AddGradient
from plait.parallel.zero.grad_reduce import ColumnGradReduce, GradReducer, InFlightReductions
from plait.parallel.zero.parameter import UnitParameter, changed_outside_engine
from plait.parallel.zero.rank_context import RankContext, RankGroups
from plait.parallel.zero.reduce_ops import GradReduction, make_reduction
from plait.parallel.zero.shard_map import persistent_buffers
from plait.parallel.zero.unshard import Unsharder
from plait.plan.axes import STAGES

_UPDATES_WITH_GATHERS = 3  # calls of the optimizer, if all-gathers follow them
_UPDATED_TOGETHER = 2**17  # elements: with gradients and states they are in a core's cache

# Where a backward starts: a tensor, or its edge in the graph if the tensor itself is gone.
Root = Tensor | torch.autograd.graph.GradientEdge


def _refuse_to_load(model: nn.Module, *_: Any) -> None:
    if any(isinstance(parameter, UnitParameter) for parameter in model.parameters()):  # not of a copy
        raise changed_outside_engine("load_state_dict() of a model that is being trained")


class DeferredWork(Protocol):
    """Weight gradients that a split backward has deferred. Implemented in `pipeline/split_backward.py`."""

    def parameters(self) -> Sequence[Tensor]:
        """The parameters of the deferred gradients, one entry per gradient."""

    def keep(self, parameter: Tensor, gradient: Tensor) -> None:
        """Queue a gradient that the first half has already computed."""

    def run(self, deliver: Callable[[Tensor, Tensor | AddGradient], object]) -> None:
        """Compute the gradients; call `deliver(parameter, gradient)` for each."""


class ShardedStage:
    """One pipeline stage under ZeRO: forward hooks, backward, reduction and update of its units."""

    def __init__(
        self,
        model: nn.Module,
        owners: Mapping[UnitGroup, Sequence[nn.Module]],
        context: RankContext,
        column_reduce: ColumnGradReduce,
        in_flight: InFlightReductions,
    ) -> None:
        """`owners`: by unit group, in the layout's order: the modules that use it."""
        self._context = context
        self._unit_groups = tuple(owners)
        self.units = [unit for unit_group in owners for unit in unit_group]
        self.trained = [unit for unit in self.units if unit.trains]
        self.reduction = make_reduction(self.trained, context)
        self.reducer = GradReducer(self.trained, context, self.reduction, column_reduce, in_flight)
        self.unsharder = Unsharder(model, owners, context, self.reducer.start_due)
        self.reducer.set_order(self.trained[::-1], self.unsharder.last_uses, context.plan.prefetch)
        self._unshards_after_update = context.keeps_params_unsharded
        self._update_groups = _update_groups(self._unit_groups, context)
        self._deferred: DeferredWork | None = None  # of the current backward
        for unit in self.units:
            unit.listener = self
            unit.record_versions()
            unit.point_to_nan()
        self.sync_params()
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

    def reduce_with(self, reduction: GradReduction) -> None:
        """Give gradients to another reduction than the plan's: to parameter servers."""
        self.reduction = reduction
        self.reducer.reduce_with(reduction)
        for unit in self.units:
            unit.is_shared = True

    # --- listener of the units' gradients

    def on_complete(self, unit: FlatParam) -> None:
        # The reduction starts before the parameters are freed: it is what other ranks may wait for.
        self.reducer.on_complete(unit)
        self.unsharder.on_complete(unit)

    def on_late(self, unit: FlatParam) -> None:
        self.reducer.on_late(unit)

    def try_defer(self, parameter: Tensor, gradient: Tensor) -> bool:
        if self._deferred is not None:
            self._deferred.keep(parameter, gradient.to_dense() if gradient.is_sparse else gradient)
        return self._deferred is not None

    # --- a step

    def check_unchanged(self) -> None:
        """Raise ModelError if a parameter was changed, replaced or added outside the engine."""
        for holder, key, name, parameter in self._slots:
            if (present := holder.get(key)) is not parameter:
                is_engines = isinstance(present, UnitParameter)
                raise given_to_another_engine(name) if is_engines else changed_outside_engine(name)
        for unit in self.units:
            unit.check_unchanged()
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
                    "a parameter was added after parallelize: it would not be reduced or updated",
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
        self.unsharder.begin_backward(split=split)
        self.reducer.begin_micro(last=last and not split, split=split)
        self._deferred = None if self._context.keeps_grads_unsharded else deferred
        if roots:  # otherwise nothing upstream trains
            torch.autograd.backward(roots, gradients)  # type: ignore[arg-type]  # a mixture is fine
        self.unsharder.finish_walk()
        self.reducer.end_micro()
        self.unsharder.end_backward()

    def backward_weight(self, deferred: DeferredWork, *, last: bool) -> None:
        """Compute and accumulate the weight gradients that a split backward has deferred."""
        self._deferred = None
        for parameter in deferred.parameters():
            self._unit_of[id(parameter)].expect_deferred(parameter)
        self.reducer.begin_deferred(last=last)
        deferred.run(
            lambda parameter, gradient: self._unit_of[id(parameter)].accumulate_deferred(parameter, gradient)
        )
        self.reducer.end_micro()

    def begin_update(self) -> None:
        """Free unsharded parameters that will be out of date."""
        self.adopt_writes()
        if not self._unshards_after_update:
            self.unsharder.reshard_all()
        self.unsharder.wait_all()

    def adopt_writes(self) -> None:
        """Make writes to parameters through `.data` those of the master weights."""
        for unit in self.units:
            unit.adopt_writes()

    def update(self, step: Callable[[Sequence[FlatParam]], None]) -> None:
        """Update the units' shards with `step`, and all-gather them unless they are freed after use."""
        for unit_groups in self._update_groups:
            units = [unit for unit_group in unit_groups for unit in unit_group if unit.trains]
            step(units)
            for unit in units if not self._context.masters.are_in_file else ():
                unit.write_back()
            if self._unshards_after_update:
                for unit_group in unit_groups:
                    self.unsharder.start_unshard(unit_group, include_frozen=False)
        self.unsharder.wait_all()

    def end_step(self, *, skipped: bool, scale: float) -> None:
        """Prepare the next step. `scale`: the next step's loss scale divided by this one's."""
        completion_order = self.reducer.completion_order
        self.reducer.reset()
        if skipped:
            self._discard_residuals()
        elif scale != 1.0:
            for compressor in self.reduction.compressors:
                compressor.scale(scale)
        if self.unsharder.agree() and self.trained:
            of_units, layout = [(unit,) for unit in completion_order], [(unit,) for unit in self.trained]
            order = [
                unit for (unit,) in agreed_order(of_units, layout, self._context.groups.dense.gradient_sum)
            ]
            self.reducer.set_order(order, self.unsharder.last_uses, self._context.plan.prefetch)

    def sync_params(self) -> None:
        """Make master weights that were written other than by `update` visible to the model."""
        for unit in self.units:
            unit.write_back()
        if self._unshards_after_update:
            for unit_group in self._unit_groups:
                self.unsharder.start_unshard(unit_group)
            self.unsharder.wait_all()
        self.unsharder.reshard_all()

    def reset(self) -> None:
        """Discard a step that an exception ended, or the state of another training."""
        self.reducer.reset()
        self._discard_residuals()
        self.unsharder.reset()

    def _discard_residuals(self) -> None:
        for compressor in self.reduction.compressors:
            compressor.discard()
        for unit in self.trained:
            unit.zero_gaps()

    def buffers(self) -> list[Tensor]:
        """The persistent buffers; forward may have replaced the tensors."""
        return [*persistent_buffers(self._model).values()]


def _update_groups(unit_groups: Sequence[UnitGroup], context: RankContext) -> list[Sequence[UnitGroup]]:
    """The unit groups that are updated by one call of the optimizer. See [Note: calls of the optimizer]."""
    trained = [unit_group for unit_group in unit_groups if any(unit.trains for unit in unit_group)]
    if context.state_device.type == "cuda":
        gathers = context.keeps_params_unsharded and context.groups.dense.all_gather.size > 1
        num_calls = min(len(trained), _UPDATES_WITH_GATHERS if gathers else 1)
        stops = [(index + 1) * len(trained) // num_calls for index in range(num_calls)]
        return [trained[start:stop] for start, stop in pairwise([0, *stops])]
    found: list[list[UnitGroup]] = []
    total = _UPDATED_TOGETHER
    for unit_group in trained:
        numel = sum(unit.layout.range_numel for unit in unit_group if unit.trains)
        if total + numel > _UPDATED_TOGETHER:
            found.append([])
            total = 0
        found[-1].append(unit_group)
        total += numel
    return [*found]


class ShardedModel:
    """All pipeline stages of this rank, which step together: see `ShardedStage`."""

    def __init__(
        self, stages: Mapping[int, ShardedStage], groups: RankGroups, tied_reduce: "TiedGradReduce"
    ) -> None:
        self.stages = dict(stages)
        self._groups = groups
        self._tied_reduce = tied_reduce

    @property
    def units(self) -> list[FlatParam]:
        return [unit for stage in self.stages.values() for unit in stage.units]

    @property
    def trained(self) -> list[FlatParam]:
        return [unit for stage in self.stages.values() for unit in stage.trained]

    def start_remaining(self) -> int:
        """Start all reductions; return the number of this rank's units with late gradients."""
        for stage in self.stages.values():
            stage.reducer.start_remaining()
        return sum(stage.reducer.num_late for stage in self.stages.values())

    def finish_reductions(self) -> Tensor:
        """Wait for the gradients; return their squared norm, each element of the full gradient counted once,
        then the input of `check_digests`; float64, (1 + 2 x pipeline ranks,)."""
        for stage in self.stages.values():
            stage.reducer.wait()
        self._tied_reduce.reduce(self.stages)
        digest = 0
        for stage in self.stages.values():
            digest = (31 * digest + stage.unsharder.take_digest()) % 2**16
        return self._norm_totals(digest)

    def reduce_late(self) -> Tensor:
        """On all ranks, if any has late gradients: add them; return the squared norm, (1,)."""
        self._tied_reduce.undo(self.stages)
        for stage in self.stages.values():
            stage.reducer.reduce_late()
        self._tied_reduce.reduce(self.stages)
        return self._norm_totals(0)[:1]

    def _norm_totals(self, digest: int) -> Tensor:
        """The result of `finish_reductions`, summed over ranks."""
        pp_rank, pp_size = self._groups.pp.rank, self._groups.pp.size
        squares = [stage.reducer.squared_norm() for stage in self.stages.values()]
        totals = squares[0].new_zeros(1 + 2 * pp_size)
        totals[0] = torch.stack(squares).sum()
        for index, number in enumerate((digest, digest**2), 1 + 2 * pp_rank):
            totals[index : index + 1].fill_(number)  # `totals[index] = number` would block on CUDA
        all_reduce(totals, self._groups.one_copy)
        return totals

    def check_digests(self, digests: Sequence[float]) -> None:
        """Raise ModelError unless the ranks that share units have all-gathered the same units in this step.

        `digests`: for each pipeline rank, the sum of its digests over ranks and the sum of their squares.
        """
        num_ranks = self._groups.one_copy.size // self._groups.pp.size
        for total, of_squares in zip(digests[::2], digests[1::2], strict=True):
            if of_squares * num_ranks != total**2:
                raise ModelError(
                    "ranks gathered different parameters: this step's results are wrong",
                    given="modules whose order or number of calls depends on a rank's data",
                    expected="the same modules, in the same order, on every rank",
                    hint="zero=2, which does not shard parameters; or calls with zeros without data",
                )


class TiedGradReduce:
    """Sums gradients of parameters that are on several stages. See [Note: tied parameters on several
    stages]."""

    def __init__(self, names: Mapping[str, Sequence[int]], rank_of: Mapping[int, int], mesh: Mesh) -> None:
        """`names`: units and the stages that have them, in one order on all ranks. `rank_of`: each stage's
        coordinate on `pp`."""
        own = mesh.coord[STAGES]
        self._stages = {
            name: tuple(stages) for name, stages in names.items() if own in {rank_of[s] for s in stages}
        }
        self._groups: dict[str, Group] = {}
        for name, stages in self._stages.items():
            coords = sorted({rank_of[stage] for stage in stages})
            self._groups[name] = mesh.subgroup(STAGES, coords, channel="shared")

    def _copies(self, name: str, stages: Mapping[int, ShardedStage]) -> list[tuple[ShardedStage, FlatParam]]:
        """This rank's units of that name, in the order of stages; none if they are frozen."""
        own = [stages[index] for index in self._stages[name] if index in stages]
        return [(stage, unit) for stage in own for unit in stage.trained if unit.layout.name == name]

    def undo(self, stages: Mapping[int, ShardedStage]) -> None:
        """Prepare for another `reduce` of gradients that are sums already: keep the first stage's."""
        for name, indices in self._stages.items():
            copies = self._copies(name, stages)
            for _, unit in copies[1:] if indices[0] in stages else copies:
                unit.grad_shard.zero_()

    def reduce(self, stages: Mapping[int, ShardedStage]) -> None:
        """Sum the gradients; all stages' reductions over data ranks have completed."""
        for name in self._stages:
            copies = self._copies(name, stages)
            if not copies:
                continue
            (_, first), *others = copies
            total = first.grad_shard.to(first.context.device, copy=True) if others else first.grad_shard
            for _, unit in others:
                total.add_(unit.grad_shard.to(total.device))
            total = total.to(first.context.device)
            all_reduce(total, self._groups[name], label=f"gradients of {name}")
            for stage, unit in copies:
                if unit.grad_shard is not total:
                    unit.grad_shard.copy_(total)
                stage.reducer.update_squared_norm(unit)
