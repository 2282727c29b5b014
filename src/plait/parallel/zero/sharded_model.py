"""ZeRO 0 to 3 over the data ranks (Rajbhandari et al. 1910.02054): one code path, and what is cut differs.

[Note: the four stages]
dp = replicate x shard ranks see different data. The ranks along `shard` share one copy of what the
stage cuts: each unit's flat storage is divided into equal ranges, and each rank owns one. Stage 0 is the
case that `shard` has one rank, which owns everything.

  stage  storage (parameters)    incoming (whole gradients)   gradient, master, optimizer states
  0      whole                   whole                        whole: the range is everything
  1      whole                   whole                        own range
  2      whole                   until they are reduced       own range
  3      while they are used     until they are reduced       own range

A step is the same walk for all of them:

  forward    a unit is gathered before it is used (3)                                        gather.py
  backward   gathered again (3); its gradients fill `incoming`; when they are complete, a
             reduce-scatter over `shard` leaves the sum of the own range in `gradient`       reduce.py
             and, once a step, an all-reduce over `replicate` adds up the copies
  update     the norm is summed over `shard`; each rank's optimizer updates its range;
             stages 1 and 2 gather each unit's new parameters while the next one is updated

Over N ranks of `shard` (N-1)/N elements per parameter and rank travel for each gather and each reduction:
stages 1 and 2 as much as stage 0's all-reduce, stage 3 half as much again, because backward gathers once
more.

Where the ranks of `shard` share memory (see the note of that name in `units.py`) one storage serves all of
them from stage 1 on: nothing is gathered, and a barrier ends the update.

With `reshard=step` stage 3 gathers once a step; `accumulate=unsharded` keeps whole gradients over a step's
micro-batches. Both take memory for less traffic.

[Note: two lanes]
Gathers and reductions use connections (on CUDA: streams) of their own. A gather that a computation waits for
does not queue behind a reduction that nobody waits for, and ranks whose gathers and reductions interleave
differently still match each kind in its own order.

What of a model a rank holds: the units of its stages, which step together.

[Note: one parameter on several stages]
A parameter that several stages compute with (an embedding that is the head too) is on each of them, in units
of its own, so that its copies lie at the same place among the same neighbours on all of them. Once a step,
when a stage's gradient is the sum over data ranks, the copies are added up over the stages; from then on they
see the same gradient and stay equal, bit for bit. The first stage's is counted in norms and saved. Summing
earlier would have the first and the last stage wait for each other in the middle of a schedule; what is
summed is a rank's range, in the master's dtype.
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
from plait.parallel.zero.flat_param import FlatParam, FlatParamConfig, MasterMemory, changed_behind_our_back
from plait.parallel.zero.grad_buffer import ByteTracker
from plait.parallel.zero.grad_reduce import GradReducer, InFlightReductions
from plait.parallel.zero.groups import DataGroups, Precision, ReplicatedGradReduce, shares_parameters
from plait.parallel.zero.reduce_ops import incoming, reduction_of_plan
from plait.parallel.zero.unshard import Unsharder
from plait.plan import Plan
from plait.plan.prefetch import ExecOrder

# Where a backward starts: a tensor, or its place in the graph when the tensor itself is gone.
Root = Tensor | torch.autograd.graph.GradientEdge


def flat_param_config(
    plan: Plan, groups: DataGroups, device: torch.device, masters: MasterMemory
) -> FlatParamConfig:
    """Where this rank keeps what. See [Note: the four stages]."""
    precision = Precision.of(plan)
    offloads = plan.offload == "cpu"
    nothing_to_free = groups.gathers.size == 1 and not offloads
    shares = shares_parameters(plan, groups)
    lenders = [group for group in (groups.reductions, groups.replicate) if shares_memory(group)]
    return FlatParamConfig(
        rank=groups.gathers.rank,
        device=device,
        home=torch.device("cpu") if offloads else device,
        offloads=offloads,
        compute=precision.compute,
        master=precision.master,
        incoming=incoming(plan, groups),
        whole_parameters=plan.zero < 3 or nothing_to_free or shares,
        full_gradients=plan.keeps_full_grads,
        masters=masters,
        meter=ByteTracker(),
        share=partial(share, group=groups.gathers) if shares else None,
        lend=partial(empty, device=device, group=(lenders or [groups.reductions])[0]),
    )


def _refuse_to_load(*_: Any) -> None:
    raise changed_behind_our_back("load_state_dict() of a model that is being trained")


class DeferredWork(Protocol):
    """What a backward in halves has left to compute."""

    def parameters(self) -> Sequence[Tensor]:
        """Those whose gradients are to come, as often as they will."""

    def keep(self, parameter: Tensor, gradient: Tensor) -> None:
        """One that the first half has computed already, to be delivered in its turn."""

    def run(self, deliver: Callable[[Tensor, Tensor], object]) -> None:
        """Computes them; `deliver(parameter, gradient)`."""


class ShardedStage:
    """Units under a plan: what a step does with their parameters and gradients."""

    def __init__(
        self,
        model: nn.Module,
        bundles: Sequence[ParamGroup],
        owners: Mapping[ParamGroup, Sequence[nn.Module]],
        plan: Plan,
        groups: DataGroups,
        partial: ReplicatedGradReduce,
        under_way: InFlightReductions,
        cut: FlatParamConfig,
    ) -> None:
        self._plan = plan
        self._all = groups.all
        self.cut = cut
        self.units = [unit for bundle in bundles for unit in bundle]
        self.trained = [unit for unit in self.units if unit.trains]
        self._single = [(unit,) for unit in self.trained]
        self._bundles = bundles
        self._meter = cut.meter
        self._sums = reduction_of_plan(self.trained, plan, groups, cut.device, self._meter)
        self._reducer = GradReducer(
            self.trained,
            self._sums,
            partial,
            under_way,
            cut=cut,
            grid=groups.grid.size,
            replicas=groups.replicate.size,
            everyone=groups.all,
            whole=plan.accumulates_full,
            hurries=not (cut.whole_parameters or plan.reshard == "step" or plan.keeps_full_grads),
            meter=self._meter,
        )
        self._gatherer = Unsharder(
            model,
            bundles,
            owners,
            groups.gathers,
            groups.all,
            cut,
            prefetch=plan.prefetch,
            keeps=plan.zero < 3 or plan.reshard == "step",
            watches=not plan.compile,
            on_progress=self._reducer.start_due,
        )
        self._reducer.order_by(self.trained[::-1], self._gatherer.last_uses, plan.prefetch)
        for unit in self.trained:
            unit.on_complete.append(self._gatherer.on_complete)
        self._gathers_after_update = cut.whole_parameters
        self.publish()
        for unit in self.units:
            unit.note_versions()
        self._unit_of = {id(p): unit for unit in self.units for p in unit.parameters.values()}
        self._model = model
        self._note_tree()
        model.register_load_state_dict_pre_hook(_refuse_to_load)

    def _note_tree(self) -> None:
        """Where parameters are; `check_unchanged` finds what is put there instead, or beside them."""
        named = list(self._model.named_modules())
        self._places = [
            (module._parameters, key, f"{name}.{key}" if name else key, parameter)
            for name, module in named
            for key, parameter in module._parameters.items()
        ]
        self._tree = [(m, list(m._modules.values()), len(m._parameters)) for _, m in named]

    @property
    def recorded(self) -> ExecOrder[str]:
        """In which order the first step's passes have used the units, by their blocks; nothing where no unit
        is gathered for a use."""
        return self._gatherer.recorded.map(lambda bundle: bundle[0].layout.block)

    @property
    def scratch_bytes(self) -> int:
        """What a named algorithm holds for what it has received."""
        return self._sums.scratch_bytes

    @property
    def residual_bytes(self) -> int:
        """What compressed sums keep from step to step."""
        return self._sums.residual_bytes

    def check_unchanged(self) -> None:
        """Raises ModelError when a parameter was changed or replaced behind our back, or came later."""
        for unit in self.units:
            unit.check_unchanged()
        for holder, key, name, parameter in self._places:
            if holder.get(key) is not parameter:
                raise changed_behind_our_back(name)
        for module, children, number in self._tree:
            if len(module._parameters) != number or [*module._modules.values()] != children:
                self._check_all_known()
                return

    def _check_all_known(self) -> None:
        """Raises ModelError for a parameter that is in no unit and wants to train."""
        known = {id(parameter) for *_, parameter in self._places}
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and id(parameter) not in known:
                raise ModelError(
                    "a parameter came after parallelize: nobody would add up its gradient or update it",
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
        rest: DeferredWork | None = None,
    ) -> None:
        """Runs a micro-batch's backward from `roots`, whose gradients these are (None: of a scalar, 1); with
        `last`, the step's gradients are complete after it. With `rest` the gradients of some weights come
        later, by `backward_weight`: all of them where whole gradients do not stay, see [Note: gradients
        that are early] in `units.py`."""
        half = rest is not None
        self._gatherer.begin_backward(half=half)
        self._reducer.begin_micro(last=last and not half, half=half)
        for unit in self.trained:
            unit.keep_early = None if rest is None or self.cut.full_gradients else rest.keep
        if roots:  # else nothing before them trains
            torch.autograd.backward(roots, gradients)  # type: ignore[arg-type]  # a mixture is fine
        self._gatherer.finish_walk()
        self._reducer.end_micro()
        self._gatherer.end_backward()

    def backward_weight(self, rest: DeferredWork, *, last: bool) -> None:
        """A backward's second half: computes gradients of weights and takes them over."""
        for unit in self.trained:
            unit.keep_early = None
        for parameter in rest.parameters():
            self._unit_of[id(parameter)].expect(parameter)
        self._reducer.begin_rest(last=last)
        rest.run(lambda parameter, gradient: self._unit_of[id(parameter)].deliver(parameter, gradient))
        self._reducer.end_micro()

    def land(self) -> None:
        """Waits for the sums of gradients over the data ranks."""
        self._reducer.land()

    def square(self) -> Tensor:
        """After `land`: the sum of the squares of this rank's gradients, each whole element once over the
        ranks that hold one copy; float64, a scalar."""
        return self._reducer.square()

    def square_again(self, unit: FlatParam) -> None:
        """After `land`: the unit's gradient has changed."""
        self._reducer.square_again(unit)

    @property
    def digest(self) -> int:
        """Of this step's gathers, the same on all ranks that share the units. Reading it begins a new one."""
        return self._gatherer.digest

    def update(self, step: Callable[[FlatParam], None]) -> None:
        """Has each unit's range updated by `step` and lets the model see it."""
        if not self._gathers_after_update:
            self._gatherer.forget()
        self._gatherer.wait_all()
        for bundle in self._bundles:
            for unit in bundle:
                if unit.trains:
                    step(unit)
                    unit.publish()
            if self._gathers_after_update:
                self._gatherer.start_updated(bundle)
        self._gatherer.wait_all()

    def end_step(self, *, skipped: bool, scale: float) -> None:
        """Makes ready for the next step. `scale`: how many times this step's the next one's gradients are."""
        completed = self._reducer.completed
        self._reducer.reset()
        if skipped:
            self._forget_sums()
        elif scale != 1.0:
            self._sums.scale(scale)
        if self._gatherer.agree() and self._single:
            order = agreed_order([(unit,) for unit in completed], self._single, self._all)
            self._reducer.order_by([unit for (unit,) in order], self._gatherer.last_uses, self._plan.prefetch)

    def wait_for_readers(self) -> None:
        """Returns when weights may be written otherwise than by `update`: see [Note: memory that ranks share]
        in `units.py`."""
        self._gatherer.wait_for_readers()

    def publish(self) -> None:
        """Lets the model see weights that were written into the ranges otherwise than by `update`."""
        for unit in self.units:
            unit.publish()
        if self._gathers_after_update:
            self._gatherer.start_all()
            self._gatherer.wait_all()
        self._gatherer.forget()

    def reset(self) -> None:
        """Forgets a step that an exception ended, or all steps of another training."""
        self._reducer.reset()
        self._forget_sums()
        self._gatherer.reset()

    def _forget_sums(self) -> None:
        self._sums.forget()
        for unit in self.trained:
            unit.clear_gaps()

    def watching(self) -> AbstractContextManager[None]:
        """For a forward and its loss: see [Note: weights that are used outside their owners]."""
        return self._gatherer.watching()

    def show(self) -> None:
        """The parameters are views of their storages, also of those that have no memory now."""
        for unit in self.units:
            unit.show()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, the model's hooks do nothing: a copy of the model has them too."""
        self._gatherer.is_paused = True
        try:
            yield
        finally:
            self._gatherer.is_paused = False


class ShardedModel:
    """The units of all stages that a rank has, as one: see `ShardedStage`."""

    def __init__(
        self, zeros: Mapping[int, ShardedStage], groups: DataGroups, shared: "TiedGradReduce"
    ) -> None:
        """`zeros`: by stage."""
        self.zeros = dict(zeros)
        self.cut = next(iter(self.zeros.values())).cut  # the same for all
        self._groups = groups
        self._shared = shared

    @property
    def units(self) -> list[FlatParam]:
        return [unit for zero in self.zeros.values() for unit in zero.units]

    @property
    def trained(self) -> list[FlatParam]:
        return [unit for zero in self.zeros.values() for unit in zero.trained]

    @property
    def buffer_bytes(self) -> int:
        """The most bytes that were held at a time for gathered parameters and travelling gradients."""
        return self.cut.meter.peak_bytes

    @property
    def scratch_bytes(self) -> int:
        """What a named algorithm holds for what it has received."""
        return sum(zero.scratch_bytes for zero in self.zeros.values())

    @property
    def residual_bytes(self) -> int:
        """What compressed sums keep from step to step."""
        return sum(zero.residual_bytes for zero in self.zeros.values())

    def check_unchanged(self) -> None:
        """Raises ModelError when a parameter was changed or replaced behind our back."""
        for zero in self.zeros.values():
            zero.check_unchanged()

    def finish(self) -> Tensor:
        """Waits for the sums of gradients; the sum of their squares, each whole element once, then what
        `check_digests` takes; float64, (1 + 2 x pipeline ranks,)."""
        for zero in self.zeros.values():
            zero.land()
        self._shared.add_up(self.zeros)
        place, size = self._groups.pipeline.rank, self._groups.pipeline.size
        digest = 0
        for zero in self.zeros.values():
            digest = (31 * digest + zero.digest) % 2**16
        squares = [zero.square() for zero in self.zeros.values()]
        totals = squares[0].new_zeros(1 + 2 * size)
        totals[0] = torch.stack(squares).sum()
        totals[1 + 2 * place] = digest
        totals[2 + 2 * place] = digest**2
        all_reduce(totals, self._groups.norm)
        return totals

    def check_digests(self, digests: Sequence[float]) -> None:
        """Raises ModelError unless the ranks that share units have gathered the same in this step. Of every
        stage's ranks: the sum, and that of the squares."""
        num_ranks = self._groups.norm.size // self._groups.pipeline.size
        for total, of_squares in zip(digests[::2], digests[1::2], strict=True):
            if of_squares * num_ranks != total**2:
                raise ModelError(
                    "ranks gathered different parameters: their numbers are not to be trusted",
                    given="modules that run in an order, or a number of times, that depends on a rank's data",
                    hint="zero=2, where parameters are not cut; or the same modules on each, if with zeros",
                )

    def update(self, step: Callable[[FlatParam], None]) -> None:
        """Has each unit's range updated by `step` and lets the model see it."""
        for zero in self.zeros.values():
            zero.update(step)

    def end_step(self, *, skipped: bool, scale: float) -> None:
        """Makes ready for the next step. `scale`: how many times this step's the next one's gradients are."""
        for zero in self.zeros.values():
            zero.end_step(skipped=skipped, scale=scale)

    def wait_for_readers(self) -> None:
        """Returns when weights may be written otherwise than by `update`."""
        for zero in self.zeros.values():
            zero.wait_for_readers()

    def publish(self) -> None:
        """Lets the model see weights that were written into the ranges otherwise than by `update`."""
        for zero in self.zeros.values():
            zero.publish()

    def reset(self) -> None:
        """Forgets a step that an exception ended, or all steps of another training."""
        for zero in self.zeros.values():
            zero.reset()


class TiedGradReduce:
    """Adds up the gradients of parameters that are on several stages. See [Note: one parameter ...]."""

    def __init__(self, names: Mapping[str, Sequence[int]], rank_of: Mapping[int, int], mesh: Mesh) -> None:
        """`names`: units with the stages that have them, in one order on all ranks. `rank_of`: the place on
        `pp` of a stage."""
        own = mesh.coord["pp"]
        self._stages = {
            name: tuple(stages) for name, stages in names.items() if own in {rank_of[s] for s in stages}
        }
        self._groups: dict[str, Group] = {}
        for name, stages in self._stages.items():
            coords = sorted({rank_of[stage] for stage in stages})
            self._groups[name] = mesh.part("pp", coords, lane="shared")

    def add_up(self, zeros: Mapping[int, ShardedStage]) -> None:
        """After all of them have landed."""
        for name, stages in self._stages.items():
            held = [
                (zeros[stage], unit)
                for stage in stages
                if stage in zeros
                for unit in zeros[stage].trained
                if unit.layout.name == name
            ]
            if not held:  # it is frozen
                continue
            (_, first), *others = held
            total = first.gradient.to(first.cut.device, copy=True) if others else first.gradient
            for _, unit in others:
                total.add_(unit.gradient.to(total.device))
            total = total.to(first.cut.device)
            all_reduce(total, self._groups[name], label=f"gradients of {name}")
            for zero, unit in held:
                if unit.gradient is not total:
                    unit.gradient.copy_(total)
                zero.square_again(unit)
