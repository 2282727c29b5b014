"""Parameters on their way from the owners of their ranges to where they are used.

[Note: when a unit is whole]
In memory that ranks share: always, with a barrier where a gather would be. Else:
Stages 1 and 2: always, but for the time of an update: a unit's gather starts when its piece is updated, and
all have landed when the update is over, so that nobody can read an old weight. Stage 3: from a gather
just before use (or `prefetch` uses earlier) until the use is over. A use is an *owner* at work:
the block for a block's units, else any module that holds one of their parameters itself. It begins with
the owner's forward, and again when the gradient of its output comes. It is over
- in forward, when the owner has ended and another use begins: the last in forward is the first in
  backward, and stays;
- in backward, for a block, when the next use begins: the gradient of its input is then complete, and
  every operation on the way has run. Units of other modules end when all their parameters have their
  gradients. Frozen ones among them, and any with a parameter that gets no gradient, stay until backward
  is over.
Parameters that have no memory are *hidden*: whoever reads them finds NaN.
The order of gathers is told in `walk.py`.

[Note: weights that are used outside their owners]
Some models read a parameter of a module that they do not call (tied heads written as
`F.linear(x, self.embedding.weight)`). The first step watches every torch function for that. Such
units, like those with a parameter that the root module, or another one that encloses owners, holds itself,
are *pinned*: whole from the beginning of forward to the end of their use in backward. (A pipeline's stage
ends its forward within its last block: of what encloses that nothing comes back that could announce its
backward.)
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm import Group, barrier, start_all_gather
from plait.errors import ModelError
from plait.parallel.zero.copy_stream import CopyStream
from plait.parallel.zero.exec_order import (
    ForwardWatch,
    ParamGroup,
    agreed_order,
    any_rank,
    encloses,
    reads_no_weight_in_backward,
    tensors_in,
)
from plait.parallel.zero.flat_param import FlatParam, FlatParamConfig
from plait.plan.prefetch import ExecOrder, PrefetchWalk


class Unsharder:
    """Makes units whole when they are used, and at stage 3 gives their memory back afterwards."""

    def __init__(
        self,
        model: nn.Module,
        bundles: Sequence[ParamGroup],
        owners: Mapping[ParamGroup, Sequence[nn.Module]],
        group: Group,
        everyone: Group,
        cut: FlatParamConfig,
        *,
        prefetch: int,
        keeps: bool,
        watches: bool,
        on_progress: Callable[[int], None],
    ) -> None:
        """At stage 3, installs hooks on `model`.

        keeps         what was gathered stays until the next update
        watches       the first step looks for weights that are used outside their owners
        on_progress   called when backward goes to this place of its walk, before it waits there
        """
        self._bundles = list(bundles)
        self._group = group
        self._all = everyone  # of data parallelism: they agree on orders
        self._prefetch = prefetch
        self._keeps = keeps
        self._on_progress = on_progress
        self._frees = any(not unit.whole.stays for bundle in bundles for unit in bundle)
        self._shares = cut.share is not None
        self._was_written = False  # shared memory, and not all ranks know
        self._device = cut.device
        self._lane = CopyStream(cut.device)
        self._pending: dict[FlatParam, Callable[[], None]] = {}
        self._whole: dict[FlatParam, ParamGroup] = {}  # whole, or being gathered
        self._agreed: set[ParamGroup] = set()  # whole on every rank between passes
        self._open: dict[ParamGroup, int] = {}  # how many of its owners are in forward
        inner = {module for modules in owners.values() for module in modules}
        self._pinned = {b for b in bundles if any(encloses(m, model, inner) for m in owners[b])}
        self._blocks = {b for b in bundles if len(owners[b]) == 1 and owners[b][0] is not model}
        self._walk: PrefetchWalk[ParamGroup] | None = None
        self._backward = False
        self._half = False  # this backward leaves the gradients of weights for later
        self._uses = ExecOrder(self._bundles, self._bundles[::-1], self._pinned)
        self._records: dict[bool, list[ParamGroup]] = {}  # of the first step's passes
        self._record: list[ParamGroup] | None = None  # of the pass under way
        self._is_agreed = False
        self._watch: ForwardWatch | None = None
        if self._frees:
            self._hook(model, owners)
            self._watch = ForwardWatch(self._bundles, self._used_outside) if watches else None
        self._is_watching = False
        self._forward_watch = ExitStack()  # from the beginning of a forward to its end
        self._digest = 0
        self.is_paused = False  # a copy of the model carries our hooks, but is none of our business

    # --- after an update

    def start_all(self) -> None:
        """Stages 1 and 2: gathers what the ranks have written into their pieces."""
        for bundle in self._bundles:
            for unit in bundle:
                self._start(unit, bundle)

    def start_updated(self, bundle: ParamGroup) -> None:
        """Stages 1 and 2: every rank has updated its piece of what trains."""
        for unit in bundle:
            if unit.trains:
                self._start(unit, bundle)

    def forget(self) -> None:
        """Stage 3: what is whole is out of date."""
        if not self._frees:
            return
        self.wait_all()
        for unit in list(self._whole):
            self._free(unit)
        self._agreed.clear()

    def wait_all(self) -> None:
        """Returns when no gather is under way, and none reads pieces that lie on the host."""
        for unit in list(self._pending):
            self._wait(unit)
        self._lane.drain()
        if self._was_written:
            self._was_written = False
            barrier(self._group, label="updated parameters")

    def wait_for_readers(self) -> None:
        """Weights in memory that ranks share may be written: nobody is in a forward or backward any more."""
        if self._shares:
            barrier(self._group, label="parameters to be written")

    def reset(self) -> None:
        """After an exception, which all ranks raised at the same point."""
        self.wait_all()
        self._forward_watch.close()
        self._walk, self._record, self._backward, self._half = None, None, False, False
        if not self._is_agreed:
            self._records.clear()
        self._open.clear()
        self.forget()

    # --- passes

    def begin_forward(self) -> None:
        if self.is_paused:
            return
        self._open.clear()
        self._begin(backward=False)
        for bundle in self._in_order(self._pinned):
            self._open_bundle(bundle)
        self._forward_watch.enter_context(self.watching())

    def end_forward(self, *, failed: bool) -> None:
        if self.is_paused:
            return
        self._forward_watch.close()
        if failed:
            self._record = None
        self._open.clear()
        self._end(self._uses.kept_after_forward() if torch.is_grad_enabled() else set())

    def begin_backward(self, *, half: bool = False) -> None:
        self._backward, self._half = True, half
        self._begin(backward=True)
        for bundle in self._in_order(self._pinned):  # an evaluation since forward may have freed them
            self._use(bundle)

    def finish_walk(self) -> None:
        """Goes to the end of the pass, over what this rank skipped."""
        if self._walk is not None:
            self._walk_to(self._walk, len(self._walk.uses) - 1)

    def end_backward(self) -> None:
        self._end(set())
        self._backward = self._half = False

    def agree(self) -> bool:
        """After the first step, all ranks take one order of uses: see [Note: one order of gathers]. Whether
        they did so just now."""
        if self._is_agreed or not self._frees or len(self._records) < 2:
            return False
        self._is_agreed, self._watch = True, None
        pinned = any_rank([bundle in self._pinned for bundle in self._bundles], self._all, self._device)
        self._pinned = {bundle for bundle, is_pinned in zip(self._bundles, pinned, strict=True) if is_pinned}
        ways = {False: self._bundles, True: self._bundles[::-1]}
        orders = [agreed_order(self._records[way], layout, self._all) for way, layout in ways.items()]
        self._uses = ExecOrder(orders[0], orders[1], self._pinned)
        return True

    @property
    def recorded(self) -> ExecOrder[ParamGroup]:
        """What the first step's passes have used."""
        return ExecOrder(self._records.get(False, ()), self._records.get(True, ()), self._pinned)

    @property
    def last_uses(self) -> dict[FlatParam, int]:
        """Of each unit in backward's walk, its last place there."""
        return {
            unit: index
            for index, bundle in enumerate(self._uses.walk_order(backward=True))
            for unit in bundle
        }

    @property
    def digest(self) -> int:
        """Of this step's gathers on demand: other than those of the walks, nobody has agreed on them."""
        digest, self._digest = self._digest, 0
        return digest

    def _begin(self, *, backward: bool) -> None:
        if self._frees:
            uses = self._uses.walk_order(backward=backward)
            self._walk = PrefetchWalk(uses, self._prefetch, self._agreed, reshards=not self._keeps)
            recording = not self._is_agreed and (backward or torch.is_grad_enabled())
            self._record = [] if recording and backward not in self._records else None

    def _end(self, stay: set[ParamGroup]) -> None:
        """Ends a pass, after which just `stay` are whole on every rank (all, where they are kept)."""
        if self._walk is None:
            return
        self.finish_walk()
        if self._record is not None:
            self._records[self._backward], self._record = self._record, None
        uses, self._walk = {*self._walk.uses, *self._pinned}, None
        self._agreed = uses if self._keeps else stay & uses
        for unit, bundle in list(self._whole.items()):
            if bundle not in self._agreed:
                self._free(unit)

    # --- uses

    def _hook(self, model: nn.Module, owners: Mapping[ParamGroup, Sequence[nn.Module]]) -> None:
        by_owner: dict[nn.Module, list[ParamGroup]] = {}
        for bundle in self._bundles:
            for module in owners[bundle]:
                by_owner.setdefault(module, []).append(bundle)
        for module, bundles in by_owner.items():
            module.register_forward_pre_hook(self._before_forward(bundles), prepend=True)
            module.register_forward_hook(self._after_forward(module, bundles), always_call=True)
        model.register_forward_pre_hook(lambda *_: self.begin_forward(), prepend=True)
        model.register_forward_hook(
            lambda _model, _inputs, output: self.end_forward(failed=output is None), always_call=True
        )
        for module in model.modules():
            module.register_state_dict_pre_hook(_refuse_state_dict)

    def _before_forward(self, bundles: list[ParamGroup]) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if not self.is_paused:
                for bundle in bundles:
                    self._open_bundle(bundle)

        return hook

    def _open_bundle(self, bundle: ParamGroup) -> None:
        was_open = self._open.get(bundle, 0)
        self._open[bundle] = was_open + 1
        if not was_open:
            self._use(bundle)

    def _after_forward(self, module: nn.Module, bundles: list[ParamGroup]) -> Callable[..., None]:
        reads_weights = not reads_no_weight_in_backward(module)

        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            if self.is_paused:
                return
            for bundle in bundles:
                self._open[bundle] = max(0, self._open.get(bundle, 0) - 1)
            if reads_weights and torch.is_grad_enabled():
                tensors, is_all = tensors_in(output)
                for tensor in tensors:
                    tensor.register_hook(before_backward)
                if not is_all:  # nobody would announce its backward
                    self._pinned.update(bundles)

        def before_backward(_: Tensor) -> None:
            for bundle in bundles:
                self._use(bundle)

        return hook

    def _use(self, bundle: ParamGroup) -> None:
        """Returns when it is whole (on CUDA: what is queued from now on will find it whole)."""
        if self._walk is not None and bundle not in self._pinned:
            index = self._walk.find(bundle)
            if index is not None:
                self._walk_to(self._walk, index)
            if self._record is not None and bundle not in self._record[-1:]:
                self._record.append(bundle)
        for unit in bundle:
            if unit not in self._whole and not unit.whole.stays:
                self._digest = (31 * self._digest + self._bundles.index(bundle) + 1) % 2**16
                self._start(unit, bundle)
            self._wait(unit)

    def _walk_to(self, walk: PrefetchWalk[ParamGroup], index: int) -> None:
        """Begins the uses up to this one. Those on the way are other ranks': over as soon as they begin."""
        while walk.position < index:
            to_start = walk.advance()
            self._free_what_is_over(walk)
            for bundle in to_start:
                self._start_bundle(bundle)
            if self._backward and not self._keeps:
                self._on_progress(walk.position)
            passed = walk.uses[walk.position]
            if walk.position < index and not self._keeps and not self._open.get(passed):
                for unit in passed:
                    if unit in self._whole and passed not in walk.window[1:]:
                        self._free(unit)

    def _used_outside(self, bundle: ParamGroup) -> None:
        """See [Note: weights that are used outside their owners]."""
        if not self._open.get(bundle):
            self._pinned.add(bundle)
            self._open_bundle(bundle)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Until the first step is over: looks inside for weights that are used outside their owners."""
        if self._watch is None or self._is_watching:
            yield
            return
        self._is_watching = True
        try:
            with self._watch:
                yield
        finally:
            self._is_watching = False

    def _free_what_is_over(self, walk: PrefetchWalk[ParamGroup]) -> None:
        for unit, bundle in list(self._whole.items()):
            if bundle in walk.window or bundle in self._pinned or self._open.get(bundle) or self._keeps:
                continue
            comes = unit.trains and not self._half  # its gradient, which tells when backward is through
            if not self._backward or (unit.is_complete if comes else bundle in self._blocks):
                self._free(unit)

    def on_complete(self, unit: FlatParam) -> None:
        """Every parameter has its gradient."""
        bundle = self._whole.get(unit)
        if bundle is None or self._walk is None or self._keeps or not self._backward:
            return
        if bundle not in self._walk.window and not self._open.get(bundle):
            self._free(unit)

    # --- gathers

    def _in_order(self, bundles: Iterable[ParamGroup]) -> list[ParamGroup]:
        return [bundle for bundle in self._bundles if bundle in bundles]

    def _start_bundle(self, bundle: ParamGroup) -> None:
        for unit in bundle:
            if not unit.whole.stays:
                self._start(unit, bundle)

    def _start(self, unit: FlatParam, bundle: ParamGroup) -> None:
        if self._shares:  # see [Note: memory that ranks share]
            self._was_written = True
            return
        self._wait(unit)
        unit.show()
        unit.whole.hold()
        own = unit.storage[unit.start : unit.stop]
        landed = None
        if own.data_ptr() != unit.piece.data_ptr():  # stage 3
            landed = self._lane.copy(own, unit.piece)
        if landed is not None and self._group.size > 1:
            landed()
        gathered = start_all_gather(unit.storage, own, self._group, label=unit.layout.name)
        self._pending[unit] = landed if landed is not None and self._group.size == 1 else gathered.wait
        if not unit.whole.stays:
            self._whole[unit] = bundle

    def _wait(self, unit: FlatParam) -> None:
        wait = self._pending.pop(unit, None)
        if wait is not None:
            wait()

    def _free(self, unit: FlatParam) -> None:
        self._wait(unit)
        unit.whole.free()
        unit.hide()
        self._whole.pop(unit, None)


def _refuse_state_dict(*_: Any) -> None:
    raise ModelError(
        "the model's parameters are cut: its state_dict would hold none of them",
        given="state_dict() of a model at ZeRO stage 3",
        hint="engine.full_parameters() or engine.state(), called by all ranks",
    )
