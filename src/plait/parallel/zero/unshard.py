"""Unsharding and resharding of parameters: all-gathers, prefetch and freeing.

[Note: unshard and reshard]
Parameters in shared memory are always unsharded; a barrier takes the place of the all-gather. Otherwise:
Stages 1 and 2: unsharded except during an update. A unit's all-gather starts when its shard is updated, and
all have completed when the update is over, so that no forward reads an old weight.
Stage 3: a unit is all-gathered just before a use (or `prefetch` uses earlier) and resharded when the use is
over. A use is an *owner* running: the block for a block's units, otherwise any module that holds one of their
parameters itself. A use starts with the owner's forward, and again when the gradient of its output arrives.
It is over
- in forward, when the owner has returned and the next use starts. The unit of the last use stays unsharded:
  that use is the first of backward;
- in backward, for a trained unit, when all its parameters have their gradients;
- in backward, for a frozen unit of a single owner, when the next use starts: the gradient of the owner's
  input is then complete, so all its operations have run. The same holds for trained units in the first half
  of a split backward.
Other units (frozen with several owners, or with a parameter that gets no gradient) are resharded at the end
of backward.
The all-gather reads the shard out of place. An offloaded shard is first copied into its range of the storage;
both happen on the copy stream, so that the current stream waits only before the use.
Resharded parameters point to NaN: reading one gives NaN instead of freed memory.
The order of all-gathers is in [Note: all-gather order] in `exec_order.py`; how far ahead they start is in
`plan/prefetch.py`.

[Note: parameters used outside their modules]
Some models read a parameter of a module that they do not call (tied heads written as
`F.linear(x, self.embedding.weight)`). The first step finds them with a torch-function mode. Such units, like
those with a parameter held by the root module or by another module that encloses owners, are
*always unsharded*: from the start of forward to the end of their use in backward. (A pipeline stage returns
from within its last block, so modules that enclose blocks have no output whose gradient would signal the
start of their backward.)
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm import barrier, start_all_gather
from plait.errors import ModelError
from plait.parallel.zero.exec_order import (
    ForwardWatch,
    UnitGroup,
    agreed_order,
    any_rank,
    encloses,
    reads_no_weight_in_backward,
    tensors_in,
)
from plait.parallel.zero.flat_param import FlatParam, UnshardState
from plait.parallel.zero.rank_context import RankContext
from plait.plan.prefetch import ExecOrder, PrefetchWalk


class Unsharder:
    """Unshards units before their uses, and at stage 3 reshards them afterwards."""

    def __init__(
        self,
        model: nn.Module,
        owners: Mapping[UnitGroup, Sequence[nn.Module]],
        context: RankContext,
        on_progress: Callable[[int], None],
    ) -> None:
        """At stage 3, install hooks on `model`.

        owners        by unit group, in the layout's order: the modules that use it
        on_progress   called when backward reaches this index of its walk, before it waits there
        """
        plan = context.plan
        self._unit_groups = list(owners)
        self._all_gather_group = context.groups.dense.all_gather
        self._dp_group = context.groups.dense.gradient_sum  # agrees on orders
        self._prefetch = plan.prefetch
        self._unshards_once = plan.reshard == "step"
        self._on_progress = on_progress
        self._reshards = any(not unit.unsharded.persistent for g in owners for unit in g)
        self._shares_memory = context.shares_params
        self._was_written = False  # shared memory was written, and no barrier since
        self._device = context.device
        self._offloads = context.offloads
        self._copy_stream = context.copy_stream
        self._group_of = {unit: unit_group for unit_group in owners for unit in unit_group}
        self._kept_between_passes: set[UnitGroup] = set()  # unsharded on every rank between passes
        self._num_in_forward: dict[UnitGroup, int] = {}  # owners that are in forward
        inner = {module for modules in owners.values() for module in modules}
        self._always_unsharded = {
            g for g, of_group in owners.items() if any(encloses(m, model, inner) for m in of_group)
        }
        self._single_owner = {
            g for g, of_group in owners.items() if len(of_group) == 1 and of_group[0] is not model
        }
        self._walk: PrefetchWalk[UnitGroup] | None = None
        self._in_backward = False
        self._is_split = False  # this backward leaves weight gradients for later
        # `_always_unsharded` grows during the first step, and this order with it.
        self._exec_order = ExecOrder(self._unit_groups, self._unit_groups[::-1], self._always_unsharded)
        self._records: dict[bool, list[UnitGroup]] = {}  # of the first step's forward and backward
        self._record: list[UnitGroup] | None = None  # of the current pass
        self._has_agreed = False
        self._watch: ForwardWatch | None = None
        if self._reshards:
            self._install_hooks(model, owners)
            if plan.compile is not True:  # the first step looks for parameters used outside their modules
                self._watch = ForwardWatch(self._unit_groups, self._on_outside_use)
        self._is_watching = False
        self._watch_scope = ExitStack()  # from the start of a forward to its end
        self._digest = 0
        self._is_paused = False

    # --- after an update

    def start_unshard(self, unit_group: UnitGroup, *, include_frozen: bool = True) -> None:
        """Stages 1 and 2: start all-gathers of the group's shards after every rank has updated its own."""
        for unit in unit_group:
            if unit.trains or include_frozen:
                self._start_all_gather(unit)
                if _can_reshard(unit):  # it is dequantized for its uses
                    unit.reshard()

    def reshard_all(self) -> None:
        """Stage 3: free unsharded parameters, which are out of date."""
        if not self._reshards:
            return
        self.wait_all()
        for unit, _ in self._unsharded():
            unit.reshard()
        self._kept_between_passes.clear()

    def wait_all(self) -> None:
        """Wait for all all-gathers, after copies of shards from host memory."""
        for unit in self._group_of:
            unit.wait_for_unshard()
        if self._was_written:
            self._was_written = False
            barrier(self._all_gather_group, label="updated parameters")

    def wait_for_readers(self) -> None:
        """Wait until no rank reads parameters in shared memory in a forward or backward."""
        if self._shares_memory:
            barrier(self._all_gather_group, label="parameters to be written")

    def reset(self) -> None:
        """Recover from an exception that all ranks raised at the same point."""
        self.wait_all()
        self._watch_scope.close()
        self._walk, self._record, self._in_backward, self._is_split = None, None, False, False
        if not self._has_agreed:
            self._records.clear()
        self._num_in_forward.clear()
        self.reshard_all()

    # --- passes

    def begin_forward(self) -> None:
        if self._is_paused:
            return
        self._num_in_forward.clear()
        self._begin(backward=False)
        for unit_group in self._in_layout_order(self._always_unsharded):
            self._enter_forward(unit_group)
        self._watch_scope.enter_context(self.watch_outside_uses())

    def end_forward(self, *, failed: bool) -> None:
        if self._is_paused:
            return
        self._watch_scope.close()
        if failed:
            self._record = None
        self._num_in_forward.clear()
        self._end(self._exec_order.kept_after_forward() if torch.is_grad_enabled() else set())

    def begin_backward(self, *, split: bool = False) -> None:
        self._in_backward, self._is_split = True, split
        self._begin(backward=True)
        # An evaluation since forward may have resharded them.
        for unit_group in self._in_layout_order(self._always_unsharded):
            self._unshard_for_use(unit_group)

    def finish_walk(self) -> None:
        """Walk to the end of the pass, over the uses that this rank skipped."""
        if self._walk is not None:
            self._walk_to(self._walk, len(self._walk.uses) - 1)

    def end_backward(self) -> None:
        self._end(set())
        self._in_backward = self._is_split = False

    def agree(self) -> bool:
        """After the first step, adopt one execution order on all ranks; return True if that happened now.

        See [Note: all-gather order].
        """
        if self._has_agreed or not self._reshards or len(self._records) < 2:
            return False
        self._has_agreed, self._watch = True, None
        always = any_rank(
            [g in self._always_unsharded for g in self._unit_groups], self._dp_group, self._device
        )
        self._always_unsharded = {g for g, flag in zip(self._unit_groups, always, strict=True) if flag}
        layouts = {False: self._unit_groups, True: self._unit_groups[::-1]}
        orders = [
            agreed_order(self._records[backward], layout, self._dp_group)
            for backward, layout in layouts.items()
        ]
        self._exec_order = ExecOrder(orders[0], orders[1], self._always_unsharded)
        return True

    @property
    def recorded_order(self) -> ExecOrder[str]:
        """Block names of the units in the order in which the first step's passes used them; empty if no unit
        is unsharded for a use."""
        order = ExecOrder(self._records.get(False, ()), self._records.get(True, ()), self._always_unsharded)
        return order.map(lambda unit_group: unit_group[0].layout.block)

    @property
    def last_uses(self) -> dict[FlatParam, int]:
        """The last index of each unit in backward's walk."""
        return {
            unit: i for i, group in enumerate(self._exec_order.walk_order(backward=True)) for unit in group
        }

    def take_digest(self) -> int:
        """Return the digest of this step's all-gathers on demand, those of uses that are not in the agreed
        order, and reset it. Equal on ranks that share the units."""
        digest, self._digest = self._digest, 0
        return digest

    def _begin(self, *, backward: bool) -> None:
        if self._reshards:
            uses = self._exec_order.walk_order(backward=backward)
            self._walk = PrefetchWalk(
                uses, self._prefetch, self._kept_between_passes, reshards=not self._unshards_once
            )
            recording = not self._has_agreed and (backward or torch.is_grad_enabled())
            self._record = [] if recording and backward not in self._records else None

    def _end(self, keep: set[UnitGroup]) -> None:
        """End a pass, after which `keep` are unsharded on every rank (all, if unsharded once a step)."""
        if self._walk is None:
            return
        self.finish_walk()
        if self._record is not None:
            self._records[self._in_backward], self._record = self._record, None
        uses, self._walk = {*self._walk.uses, *self._always_unsharded}, None
        self._kept_between_passes = uses if self._unshards_once else keep & uses
        for unit, unit_group in self._unsharded():
            if unit_group not in self._kept_between_passes:
                unit.reshard()

    # --- uses

    def _install_hooks(self, model: nn.Module, owners: Mapping[UnitGroup, Sequence[nn.Module]]) -> None:
        by_owner: dict[nn.Module, list[UnitGroup]] = {}
        for unit_group in self._unit_groups:
            for module in owners[unit_group]:
                by_owner.setdefault(module, []).append(unit_group)
        for module, unit_groups in by_owner.items():
            module.register_forward_pre_hook(self._make_pre_forward(unit_groups), prepend=True)
            module.register_forward_hook(self._make_post_forward(module, unit_groups), always_call=True)
        model.register_forward_pre_hook(lambda *_: self.begin_forward(), prepend=True)
        model.register_forward_hook(
            lambda _model, _inputs, output: self.end_forward(failed=output is None), always_call=True
        )
        for module in model.modules():
            module.register_state_dict_pre_hook(_refuse_state_dict)

    def _make_pre_forward(self, unit_groups: list[UnitGroup]) -> Callable[..., None]:
        def pre_forward(*_: Any) -> None:
            if not self._is_paused:
                for unit_group in unit_groups:
                    self._enter_forward(unit_group)

        return pre_forward

    def _enter_forward(self, unit_group: UnitGroup) -> None:
        num_before = self._num_in_forward.get(unit_group, 0)
        self._num_in_forward[unit_group] = num_before + 1
        if not num_before:
            self._unshard_for_use(unit_group)

    def _make_post_forward(self, module: nn.Module, unit_groups: list[UnitGroup]) -> Callable[..., None]:
        reads_weights = not reads_no_weight_in_backward(module)

        def post_forward(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if self._is_paused:
                return
            for unit_group in unit_groups:
                self._num_in_forward[unit_group] = max(0, self._num_in_forward.get(unit_group, 0) - 1)
            if reads_weights and torch.is_grad_enabled():
                tensors, is_all = tensors_in(output)
                for tensor in tensors:
                    tensor.register_hook(pre_backward)
                if not is_all:  # no hook would signal its backward
                    self._always_unsharded.update(unit_groups)

        def pre_backward(_: Tensor) -> None:
            for unit_group in unit_groups:
                self._unshard_for_use(unit_group)

        return post_forward

    def _unshard_for_use(self, unit_group: UnitGroup) -> None:
        """Unshard for a use and wait (on CUDA: kernels queued from now on see the parameters)."""
        if self._walk is not None and unit_group not in self._always_unsharded:
            index = self._walk.find(unit_group)
            if index is not None:
                self._walk_to(self._walk, index)
            if self._record is not None and unit_group not in self._record[-1:]:
                self._record.append(unit_group)
        for unit in unit_group:
            if unit.state is UnshardState.SHARDED:  # on demand
                if not unit.gathered.persistent:
                    self._digest = (31 * self._digest + self._unit_groups.index(unit_group) + 1) % 2**16
                self._start_use(unit)
            unit.wait_for_unshard()

    def _walk_to(self, walk: PrefetchWalk[UnitGroup], index: int) -> None:
        """Walk to this use. Uses before it that this rank skipped start, for the other ranks' sake, and are
        over at once."""
        while walk.position < index:
            to_start = walk.advance()
            self._reshard_finished(walk)
            for unit_group in to_start:
                self._prefetch_group(unit_group)
            if self._in_backward and not self._unshards_once:
                self._on_progress(walk.position)
            skipped = walk.uses[walk.position]
            if walk.position < index and not self._unshards_once and not self._num_in_forward.get(skipped):
                for unit in skipped:
                    if _can_reshard(unit) and skipped not in walk.window[1:]:
                        unit.reshard()

    def _on_outside_use(self, unit_group: UnitGroup) -> None:
        """See [Note: parameters used outside their modules]."""
        if not self._num_in_forward.get(unit_group):
            self._always_unsharded.add(unit_group)
            self._enter_forward(unit_group)

    def end_watch(self) -> None:
        """Look no more for parameters used outside their modules: compiled code cannot be watched."""
        self._watch = None

    @contextmanager
    def watch_outside_uses(self) -> Iterator[None]:
        """Until the first step is over, look for parameters used outside their modules in this context."""
        if self._watch is None or self._is_watching:
            yield
            return
        self._is_watching = True
        try:
            with self._watch:
                yield
        finally:
            self._is_watching = False

    def _reshard_finished(self, walk: PrefetchWalk[UnitGroup]) -> None:
        """Reshard units whose uses are over. See [Note: unshard and reshard]."""
        for unit, unit_group in self._unsharded():
            if (
                unit_group in walk.window
                or unit_group in self._always_unsharded
                or self._num_in_forward.get(unit_group)
                or self._unshards_once
            ):
                continue
            gets_grad = unit.trains and not self._is_split  # complete when its backward is over
            if not self._in_backward or (unit.is_complete if gets_grad else unit_group in self._single_owner):
                unit.reshard()

    def on_complete(self, unit: FlatParam) -> None:
        """Reshard a unit whose gradients are complete, if its uses are over."""
        if not _can_reshard(unit) or self._walk is None or self._unshards_once or not self._in_backward:
            return
        unit_group = self._group_of[unit]
        if unit_group not in self._walk.window and not self._num_in_forward.get(unit_group):
            unit.reshard()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Disable the model's hooks in this context: a copy of the model has them too."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    @property
    def sharded_bytes(self) -> int:
        """Bytes that `unsharded` would allocate now."""
        sharded = (unit for unit in self._group_of if unit.state is UnshardState.SHARDED)
        return sum(unit.storage.numel() * unit.storage.element_size() for unit in sharded)

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Gather all units once, and keep them for the forwards in this context. Collective. Afterwards they
        are resharded, unless the plan keeps them for the step."""
        before, self._unshards_once = self._unshards_once, True
        try:
            for unit in self._group_of if self._reshards else ():
                if unit.state is UnshardState.SHARDED:
                    self._start_use(unit)
                unit.wait_for_unshard()
                self._kept_between_passes.add(self._group_of[unit])
            yield
        finally:
            self._unshards_once = before
            if not before:
                self.reshard_all()

    # --- all-gathers

    def _in_layout_order(self, unit_groups: Iterable[UnitGroup]) -> list[UnitGroup]:
        return [unit_group for unit_group in self._unit_groups if unit_group in unit_groups]

    def _prefetch_group(self, unit_group: UnitGroup) -> None:
        for unit in unit_group:
            if not unit.unsharded.persistent:
                self._start_use(unit)

    def _start_use(self, unit: FlatParam) -> None:
        """Unshard for a use: gather, unless all that is gathered is on this rank, and to be dequantized."""
        if unit.gathered.persistent:
            unit.start_unshard(lambda: _nothing)
        else:
            self._start_all_gather(unit)

    def _start_all_gather(self, unit: FlatParam) -> None:
        if self._shares_memory:  # see [Note: parameters in shared memory] in `flat_param.py`
            self._was_written = True
            return
        unit.start_unshard(
            lambda: self._start_upload(unit) if self._offloads else self._start(unit, unit.shard)
        )

    def _start(self, unit: FlatParam, shard: Tensor) -> Callable[[], None]:
        return start_all_gather(
            unit.gathered.tensor, shard, unit.groups.all_gather, label=unit.layout.name
        ).wait

    def _start_upload(self, unit: FlatParam) -> Callable[[], None]:
        """All-gather after the copy of the shard from host memory, on the copy stream: the current stream
        waits for neither until the parameters are used."""
        own_range = unit.own_gathered
        with self._copy_stream.after_current() as copy:
            if not unit.gathered.persistent:
                own_range.copy_(unit.shard, non_blocking=True)
            wait = self._start(unit, own_range)

        def wait_for_both() -> None:
            wait()
            copy.wait()

        return wait_for_both

    def _unsharded(self) -> list[tuple[FlatParam, UnitGroup]]:
        """Units that can be resharded, and their groups."""
        return [(unit, unit_group) for unit, unit_group in self._group_of.items() if _can_reshard(unit)]


def _nothing() -> None:
    """Wait for no all-gather."""


def _can_reshard(unit: FlatParam) -> bool:
    """True if the unit is unsharded, or being unsharded, and can be freed."""
    return unit.state is not UnshardState.SHARDED and not unit.unsharded.persistent


def _refuse_state_dict(*_: Any) -> None:
    raise ModelError(
        "the model's parameters are sharded: its state_dict would contain none of them",
        given="state_dict() of a model at ZeRO stage 3",
        expected="full parameters",
        hint="engine.full_parameters() or engine.state(), called by all ranks",
    )
