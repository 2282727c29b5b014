"""From autograd's hooks to averaged gradients: what one backward of DistributedDataParallel comes to.

[Note: one backward]
`prepare_for_backward` (at the end of forward) begins it: hooks are expected. Each parameter's hook puts its
gradient into its bucket; a bucket that is complete starts, in the order of buckets
(`parallel/in_order.py`), while autograd goes on. With the last one a callback of the engine is queued,
which waits for the sums and hands them out when autograd is through. If buckets are left over when the next
forward begins, a gradient has not come. Hooks outside of this (in `no_sync`, in a second backward of the
same forward) leave gradients to autograd.

[Note: buckets of the first backward and of the others]
Nobody knows in which order gradients come before they have come. The first buckets follow the parameters,
the last one comes first; they are reduced as they fill. From the second forward on buckets follow the order
in which rank 0's gradients came, on all ranks. With find_unused_parameters the parameters that a graph
leaves out may change, and the first buckets stay, but under static_graph, which rules changes out.

The rest of what torch's module asks its reducer for: joining, hooks, settings. The names are torch's.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.profiler import record_function

from plait.comm.attach import AttachedGroup
from plait.comm.collectives import broadcast
from plait.comm.transport import Work
from plait.errors import DDPError
from plait.parallel.ddp.allreduce import AnyBucket, BucketReducer, Hook, finish_all, seen_by_hook
from plait.parallel.ddp.bucket import Arrivals, GradBucket, SparseBucket, hook_of, node_of
from plait.parallel.ddp.build_buckets import Options, build_buckets, slots_of
from plait.parallel.ddp.errors import CREATE_GRAPH, STATIC_LATE, changed, twice, unfinished, warn_once
from plait.parallel.ddp.timings import Timings
from plait.parallel.ddp.unused_params import StaticGraph, UsedMap, unused_in_backward
from plait.parallel.ordered_launch import OrderedLauncher

# Of this process: parameters do not tell who listens to their gradients.
_living: "weakref.WeakSet[Reducer]" = weakref.WeakSet()


class ErrorLog(Protocol):
    def set_error_and_log(self, text: str) -> None: ...


class Reducer:
    """Averages gradients over ranks. What has one of torch's names is what torch's module calls."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        are_sparse: Sequence[bool],
        names: Mapping[int, str],
        options: Options,
        behind: AttachedGroup,
    ) -> None:
        """`names`: to be told in messages, by number."""
        self.parameters = list(parameters)
        self.options = options
        self.times = Timings()
        self.carrier = BucketReducer(behind)
        self.static: StaticGraph | None = None
        self.is_static_so_far = True  # the set of unused parameters has not changed yet
        self._names = dict(names)
        self._has_sparse = any(are_sparse)
        self._deal = partial(build_buckets, self.parameters, are_sparse, self._names, options, behind)
        self._device = self.parameters[0].device
        self._arrivals = Arrivals(len(self.parameters))
        self._lock = self._arrivals.lock
        self._futures: list[Any] = []  # of buffers, waited for when backward ends
        self._may_rebuild = not options.find_unused
        self._used = UsedMap(len(self.parameters), self._device) if options.find_unused else None
        self._outputs: list[Any] = []  # nodes of forward's outputs
        self._unused: list[int] = []
        self._optimizers_run_in_backward = False
        self._landings: dict[int, Callable[[], Tensor]] = {}
        self._left_over: list[Callable[[], Tensor]] = []
        self._expects_hooks = self._has_begun = self._is_unfinished = False
        self.has_rebuilt = False
        self.num_reduced = 0
        self.error_log: weakref.ref[ErrorLog] | None = None
        self._is_alone = True
        self._set_buckets(range(len(self.parameters)), is_reverse=True)
        self._nodes = [node_of(parameter) for parameter in self.parameters]
        self._hooks: list[Any] = []
        self._register_hooks()
        self._look_for_others()

    def _register_hooks(self) -> None:
        me = weakref.ref(self)  # autograd, which holds on to hooks, is not to hold on to all of this
        fill, otherwise = partial(_fill, me), partial(_otherwise, me)
        for index, node in enumerate(self._nodes):
            hook = hook_of(self._arrivals, index, fill, otherwise)
            self._hooks.append(node.register_hook(hook))

    def _look_for_others(self) -> None:
        """Reducers that take gradients of the same parameters. See `bucket.py`."""
        mine = {id(parameter) for parameter in self.parameters}
        for other in list(_living):
            if other._hooks and not mine.isdisjoint(id(parameter) for parameter in other.parameters):
                for reducer in (self, other):
                    reducer._is_alone = False
                    for bucket in reducer.buckets:
                        bucket.part()
        _living.add(self)

    # --- buckets

    def _set_buckets(self, order: Sequence[int], *, is_reverse: bool = False) -> None:
        """`order`: of the parameters. `is_reverse`: the last bucket of it comes first."""
        self.buckets = self._deal(order, is_reverse)
        for bucket in self.buckets if not self._is_alone else ():
            bucket.part()
        self._arrivals.slots[:] = slots_of(self.buckets)
        self._queue = OrderedLauncher(range(len(self.buckets)), partial(_start, weakref.ref(self)))

    @property
    def unused_bytes(self) -> int:
        """Of parameters that the last backward has not reached."""
        return sum(self.parameters[number].nbytes for number in self._unused)

    @torch.compiler.disable
    def _rebuild_buckets(self) -> bool:
        """Before a forward. Whether buckets have been dealt anew. See [Note: buckets of the first ...]."""
        with self._lock:
            self._check_reducer_finalized()
            if not self._may_rebuild or not self._arrivals.order:
                return False
            order = torch.tensor(self._arrivals.order, dtype=torch.int64, device=self._device)
            if self.carrier.group.size > 1:
                broadcast(order, self.carrier.group, label="the order of gradients")
            self._may_rebuild = False
            self._set_buckets(order.tolist())
            self.has_rebuilt = True
            return True

    @property
    def order_of_arrival(self) -> list[int]:
        """Of the gradients of the last backward, by number."""
        return self._arrivals.order

    # --- forward

    @torch.compiler.disable
    def prepare_for_forward(self) -> None:
        """A forward is about to run."""
        with self._lock:
            self._outputs.clear()
            self.carrier.leave_join()
            self.times.forward_begins()

    @torch.compiler.disable
    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """`outputs`: all tensors that forward returned, if parameters without gradient are to be found."""
        with self._lock:
            self.times.backward_begins()
            self._abandon()
            self._expects_hooks = True
            self._has_begun = False
            self._arrivals.begin()
            self._outputs = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
            for bucket in self.buckets:
                bucket.begin()
            self._queue.begin(starts=True)
            if self.static is not None:
                self.static.begin()

    def _abandon(self) -> None:
        """Whatever an unfinished backward has left. Sums that are under way are waited for behind it."""
        for index, landing in self._landings.items():
            if not isinstance(self.buckets[index], SparseBucket):  # of which nothing is under way
                self._left_over.append(landing)
        self.carrier.reset()
        if self._landings or self._is_unfinished:
            for bucket in self.buckets:
                bucket.drop()
        self._landings.clear()
        self._is_unfinished = False

    # --- backward

    def _autograd_hook(self, index: int) -> None:
        """A parameter's gradient has been accumulated."""
        with self._lock:
            static = self.static
            if static is not None and not static.is_known:
                static.count(index)
            if not self._expects_hooks or (static is not None and not static.is_known):
                if self._used is not None and self.parameters[index].grad is not None:
                    self._used.mark(index)  # in `no_sync` too
                return
            if not self._has_begun:
                self._begin()
            if static is not None:
                if static.has_changed(index):
                    raise self._logged(changed(index, self._names))
                if not static.is_last_of(index):
                    return
            self._arrivals.order.append(index)
            self._mark(index)

    def _begin(self) -> None:
        """The first hook of a backward."""
        self._has_begun = True
        if torch.is_grad_enabled():
            warn_once(CREATE_GRAPH)
        self._set_factor()
        if self.static is None and self.options.find_unused:
            self._find_unused()
        self._is_unfinished = True
        for number in self._unused:
            slot = self._arrivals.slots[number]
            slot.bucket.keep_apart(slot.place)
            self._mark(number)
        self._arrivals.is_usual = self.static is None

    def _set_factor(self) -> None:
        factor = self.carrier.factor()
        for bucket in self.buckets:
            bucket.factor = factor

    def _find_unused(self) -> None:
        with record_function("torch.distributed.ddp.reducer::search_unused_parameters"):
            before, self._unused = self._unused, unused_in_backward(self._nodes, self._outputs)
        self._outputs.clear()
        if self.times.iteration > 1 and before != self._unused:
            self.is_static_so_far = False

    def _mark(self, index: int) -> None:
        """The parameter's gradient goes into its bucket."""
        if self._arrivals.ready[index]:
            raise self._logged(twice(index, self._names))
        self._arrivals.ready[index] = 1
        slot = self._arrivals.slots[index]
        slot.waiting.places.append(slot.place)
        slot.waiting.nbytes += slot.nbytes
        slot.waiting.missing -= 1
        if not slot.waiting.missing or slot.waiting.nbytes >= slot.waiting.together_bytes:
            self._fill(index)

    def _fill(self, index: int) -> None:
        """The bucket of a parameter has enough to copy, or is complete."""
        bucket: AnyBucket = self._arrivals.slots[index].bucket
        if not bucket.waiting.places:
            return  # another thread's hook has filled it meanwhile
        if self._used is not None and self.static is None:
            for place in bucket.waiting.places:
                if bucket.parameters[place].grad is not None and not bucket.is_unreached(place):
                    self._used.mark(bucket.numbers[place])
        bucket.flush()
        if bucket.waiting.missing:
            return
        self._queue.complete(bucket.index)
        if self._queue.all_started:
            if not self._has_sparse:
                self._start_used()
            Variable._execution_engine.queue_callback(self._finish)

    def _start_used(self) -> None:
        """Behind the last sum. Sums of sparse gradients are started where they are waited for."""
        if self._used is not None and self.static is None and not self.options.skips_unused:
            self._used.start(self.carrier.group)

    def _start(self, index: int) -> None:
        self.times.communication_begins(index)
        bucket = self.buckets[index]
        if self.options.skips_unused and set(bucket.numbers) <= set(self._unused):
            bucket.drop()
            return
        given = bucket.seal()
        is_last = index == len(self.buckets) - 1
        self._landings[index] = self.carrier.start(bucket, given, is_last=is_last)

    def _finish(self) -> None:
        """All sums are under way and autograd is through: gradients become what the ranks agree on."""
        with self._lock:
            self.times.backward_computed()
            self._expects_hooks = self._has_begun = self._is_unfinished = self._arrivals.is_usual = False
            self._outputs.clear()
            try:
                self._land()
            finally:
                self._futures.clear()
                self.carrier.reset()
                if self._used is not None and self.static is None:
                    self._used.reset()
            if self.static is not None and self._arrivals.order:
                self._arrivals.order += self._unused
            self.times.communicated()

    def _land(self) -> None:
        while self._left_over:
            self._left_over.pop(0)()
        self.num_reduced = len(self._landings)
        is_unused = self._used.is_unused if self._used is not None else lambda _: False
        between = self._start_used if self._has_sparse else None
        finish_all(self.buckets, self._landings, between, is_unused, self._optimizers_run_in_backward)
        for future in self._futures:
            future.wait()
        if self._used is not None:
            self._used.land()

    # --- a static graph

    def _set_static_graph(self) -> None:
        with self._lock:
            if self.times.iteration > 0:
                raise self._logged(DDPError(STATIC_LATE))
            self.static = StaticGraph(len(self.parameters))
            self._may_rebuild = True
            self._used = UsedMap(len(self.parameters), self._device)

    @property
    def is_static(self) -> bool:
        """Whether it is known to be, or has been so far."""
        return self.static is not None or (self.options.find_unused and self.is_static_so_far)

    def _ddp_graph_static(self) -> bool:
        return self.is_static_so_far

    def _delay_all_reduce(self) -> None:
        """The end of a static graph's first backward, in which gradients only come. Then all are known."""
        with self._lock:
            assert self.static is not None, "no static graph"
            assert self._used is not None, "a static graph's first backward marks what it uses"
            self._expects_hooks = True
            self._unused = self.static.learn()
            # Before hooks, whose futures may start what they like when they like.
            self._used.start(self.carrier.group)
            self._set_factor()
            self._is_unfinished = True
            for slot in self._arrivals.slots:
                slot.waiting.places.append(slot.place)
            for number in self._unused:
                slot = self._arrivals.slots[number]
                slot.bucket.keep_apart(slot.place)
            for bucket in self.buckets:
                bucket.flush()
            self._queue.start_remaining()
            self._finish()

    # --- what torch's module asks for

    @torch.compiler.disable
    def _check_reducer_finalized(self) -> None:
        """Raises DDPError if gradients of the last backward have not come."""
        if not self._is_unfinished:
            return
        missing = self._arrivals.missing
        is_static = self.static is not None
        find_unused = self.options.find_unused
        rank = self.carrier.behind.rank
        raise self._logged(unfinished(missing, self._names, rank, find_unused=find_unused, static=is_static))

    def _remove_autograd_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _logged(self, error: DDPError) -> DDPError:
        log = None if self.error_log is None else self.error_log()
        if log is not None:
            log.set_error_and_log(str(error))
        return error

    def _reset_state(self) -> None:
        """Forgets what was under way. Buckets will be dealt anew."""
        with self._lock:
            self._abandon()
            self._left_over.clear()
            self._expects_hooks = self._has_begun = False
            self._may_rebuild = self.static is not None or not self.options.find_unused
            self._arrivals.begin()
            if self._used is not None and self.static is None:
                self._used.reset()


def _start(reducer: "weakref.ref[Reducer]", index: int) -> None:
    found = reducer()
    assert found is not None, "a backward without its reducer"
    found._start(index)


def _fill(reducer: "weakref.ref[Reducer]", index: int) -> None:
    found = reducer()
    if found is not None:
        with found._lock:
            found._fill(index)


def _otherwise(reducer: "weakref.ref[Reducer]", index: int) -> None:
    found = reducer()
    if found is not None:
        found._autograd_hook(index)


class TorchReducer(Reducer):
    """`Reducer`, as torch's module takes it."""

    def register_comm_hook(self, hook: Hook, state: object) -> None:
        self.carrier.register(hook, state)

    @torch.compiler.disable
    def _set_forward_pass_work_handle(self, work: Any, use_static_world_size: bool) -> None:
        self.carrier.expect_active(work, is_static=use_static_world_size)

    def _get_zeros_like_grad_buckets(self) -> list[GradBucket]:
        last = len(self.buckets) - 1
        return [seen_by_hook(b, b.zeros(), is_last=b.index == last) for b in self.buckets]

    def _run_comm_hook(self, seen: GradBucket) -> Any:
        """A rank that has joined takes part in the sum of a bucket. Returns what can be waited for."""
        if self.carrier.has_hook:
            return Work(self.carrier.run_hook(seen))
        return Work(self.carrier.start_zeros(self.buckets[seen.index()], seen.buffer()))

    def _push_all_rebuilt_params(self) -> None:
        """A rank that has joined has no order of its own: rank 0's, or any, will do."""
        if self._may_rebuild and not self._arrivals.order:
            self._arrivals.order += range(len(self.parameters))

    def match_used_map(self) -> None:
        """A rank that has joined has used nothing."""
        used = UsedMap(len(self.parameters), self._device)
        used.start(self.carrier.group)
        used.land()

    def _get_local_used_map(self) -> Tensor:
        assert self._used is not None, "nobody looks for unused parameters"
        return self._used.tensor

    def _install_post_backward_futures(self, futures: Any) -> None:
        self._futures += futures if isinstance(futures, list | tuple) else [futures]

    def _set_optimizer_in_backward(self) -> None:
        self._optimizers_run_in_backward = True

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        self.times.sample_rate = sample_rate

    def _set_mixed_precision_param_dtype(self, dtype: torch.dtype) -> None:
        """Gradients come in it, and are cast on their way into buckets and back."""

    def _set_sparse_metadata(self, global_unique_ids: Mapping[str, Tensor]) -> None:
        """Which rows ranks have is found out anyway."""

    def _update_process_group(self, new_process_group: Any) -> None:
        self.carrier.behind.set_process_group(new_process_group)
        for bucket in self.buckets:
            bucket.drop()  # their memory is the former one's

    def _run_allreduce_hook(self, seen: GradBucket) -> "torch.futures.Future[list[Tensor]]":
        """For torch's own hooks: the sum over the process group, nothing divided."""
        return self.carrier.behind.all_reduce_future(seen.buffer())

    def get_backward_stats(self) -> list[int]:
        """When each parameter's gradient came is not written down."""
        return [0] * len(self.parameters)
