"""DDP's reducer: from autograd hooks to averaged gradients.

[Note: one backward]
`prepare_for_backward` (at the end of forward) arms the hooks. Each parameter's hook copies its gradient into
a bucket; a complete bucket is reduced, in bucket order (`parallel/zero/grad_buffer.py`), while autograd
continues. The last bucket queues an engine callback, which waits for the reductions and writes the gradients
once autograd is done. Buckets left over when the next forward begins mean that a gradient is missing. Hooks
outside of this (in `no_sync`, in a second backward of the same forward) leave gradients to autograd.

[Note: bucket order in the first and later backwards]
The order in which gradients become ready is unknown before the first backward. The first buckets follow the
parameters, in reverse; they are reduced as they fill. From the second forward on, buckets follow rank 0's
ready order on all ranks. With find_unused_parameters the set of parameters that a graph omits may change, so
the first buckets stay, except under static_graph, which excludes such changes.

[Note: an optimizer's backwards]
An optimizer sees no forward. With `passes` the hooks are armed from `begin` to `finish`. The last of so many
gradients of a parameter goes into its bucket; `finish` reduces what is missing and writes the results, so
reductions also overlap with what follows backward.

The rest implements what torch's module calls: join, hooks, settings. Those names are torch's.
"""

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.profiler import record_function

from plait.comm.collectives import broadcast
from plait.comm.transport import Work
from plait.errors import DDPError
from plait.parallel.ddp.allreduce import (
    AnyBucket,
    BucketReducer,
    GradientGroup,
    Hook,
    Options,
    as_grad_bucket,
)
from plait.parallel.ddp.bucket import (
    Bucket,
    GradBucket,
    GradReadiness,
    GradSpec,
    ParamSlot,
    SparseBucket,
    accumulate_grad_node,
    assign_buckets,
    make_hook,
)
from plait.parallel.ddp.errors import (
    CREATE_GRAPH,
    STATIC_LATE,
    graph_changed,
    marked_ready_twice,
    too_many_passes,
    unfinished_reduction,
    warn_once,
)
from plait.parallel.ddp.unused_params import StaticGraph, UsedMap, unused_in_backward
from plait.parallel.zero.grad_buffer import OrderedLauncher

T = TypeVar("T")

# All live reducers of this process: a parameter does not record which reducers hook it.
_live_reducers: "weakref.WeakSet[Reducer]" = weakref.WeakSet()


@dataclass
class Timings:
    """CPU times of the current iteration in nanoseconds, with torch's names; `Logger` sums them."""

    sample_rate: int = 100
    iteration: int = 0  # forwards followed by a synchronized backward
    forward_start: int = 0
    backward_start: int = 0
    backward_end: int = 0
    comm_start: int = 0
    comm_end: int = 0


class Reducer:
    """Averages gradients over ranks. torch's module calls the methods that have torch's names."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        are_sparse: Sequence[bool],
        names: Mapping[int, str],
        options: Options,
        attached: GradientGroup,
    ) -> None:
        """`names`: parameter names for error messages, by index."""
        self.parameters = list(parameters)
        self.options = options
        self.timings = Timings()
        self.bucket_reducer = BucketReducer(attached, options.reduction)
        self.static_graph: StaticGraph | None = None
        self.is_static_so_far = True  # the set of unused parameters has not changed so far
        self._names = dict(names)
        self._has_sparse = any(are_sparse)
        self._are_sparse = list(are_sparse)
        self._device = self.parameters[0].device
        self._readiness = GradReadiness(len(self.parameters))
        self._lock = self._readiness.lock
        self._futures: list[Any] = []  # buffer broadcasts; waited for when backward ends
        self._may_rebuild = not options.find_unused
        self._used_map = UsedMap(len(self.parameters), self._device) if options.find_unused else None
        self._output_nodes: list[Any] = []  # grad_fn of forward's outputs
        self._unused: list[int] = []
        self._remaining: list[int] = []  # gradients of each parameter until it is reduced, with `passes`
        self._optimizers_run_in_backward = False
        self._in_flight: dict[int, Callable[[], Tensor]] = {}
        self._abandoned: list[Callable[[], Tensor]] = []
        self._expects_hooks = self._backward_started = self._is_unfinished = False
        self.has_rebuilt = False
        self.num_reduced = 0
        self.log_error: Callable[[str], object] = str  # set by the module; must not keep it alive
        self._is_exclusive = True
        self._set_buckets(range(len(self.parameters)), is_reverse=True)
        self._nodes = [accumulate_grad_node(parameter) for parameter in self.parameters]
        self._hooks: list[Any] = []
        self._register_hooks()
        self._detect_shared_parameters()

    def _register_hooks(self) -> None:
        # Autograd keeps the hooks alive; they must not keep the reducer alive.
        flush, slow_path = weak_method(self._flush_bucket), weak_method(self._autograd_hook)
        for index, node in enumerate(self._nodes):
            hook = make_hook(self._readiness, index, flush, slow_path)
            self._hooks.append(node.register_hook(hook))

    def _detect_shared_parameters(self) -> None:
        """Disable aliasing in reducers that share parameters.

        See [Note: gradients that are not aliased] in `bucket.py`.
        """
        parameter_ids = {id(parameter) for parameter in self.parameters}
        for other in list(_live_reducers):
            if other._hooks and not parameter_ids.isdisjoint(id(parameter) for parameter in other.parameters):
                for reducer in (self, other):
                    reducer._is_exclusive = False
                    for bucket in reducer.buckets:
                        bucket.disable_aliasing()
        _live_reducers.add(self)

    # --- buckets

    def _set_buckets(self, order: Sequence[int], *, is_reverse: bool = False) -> None:
        """Build buckets from parameters in `order`. `is_reverse`: reverse the order of the buckets."""
        groups = self.options.groups or [-1] * len(self.parameters)
        specs = [
            GradSpec(p.numel() * p.dtype.itemsize, (p.dtype, p.device, group), alone, group >= 0)
            for p, alone, group in zip(self.parameters, self._are_sparse, groups, strict=True)
        ]
        assignment = assign_buckets(specs, self.options.limits, order)
        if is_reverse:
            assignment.sort(key=min, reverse=True)
        self.buckets = [self._build_bucket(*each) for each in enumerate(assignment)]
        slots = {
            param_index: ParamSlot(bucket, position, bucket.grad_bytes[position], bucket.pending)
            for bucket in self.buckets
            for position, param_index in enumerate(bucket.param_indices)
        }
        self._readiness.slots[:] = [slots[param_index] for param_index in range(len(slots))]
        self._launcher = OrderedLauncher(range(len(self.buckets)), weak_method(self._start_reduction))

    def _build_bucket(self, index: int, param_indices: Sequence[int]) -> AnyBucket:
        names = [self._names.get(param_index, f"parameter {param_index}") for param_index in param_indices]
        parameters = [self.parameters[param_index] for param_index in param_indices]
        if self._are_sparse[param_indices[0]]:
            return SparseBucket(index, param_indices[0], parameters[0], names[0])
        allocate = self.bucket_reducer.attached.empty
        bucket = Bucket(index, param_indices, parameters, names, allocate, as_views=self.options.as_views)
        if not self._is_exclusive:
            bucket.disable_aliasing()
        return bucket

    @property
    def unused_bytes(self) -> int:
        """Bytes of the parameters that the last backward did not reach."""
        return sum(self.parameters[index].nbytes for index in self._unused)

    @torch.compiler.disable
    def _rebuild_buckets(self) -> bool:
        """Rebuild buckets before a forward. Return True if they were rebuilt.

        See [Note: bucket order in the first and later backwards].
        """
        with self._lock:
            self._check_reducer_finalized()
            if not self._may_rebuild or not self._readiness.order:
                return False
            order = torch.tensor(self._readiness.order, dtype=torch.int64, device=self._device)
            if self.bucket_reducer.group.size > 1:
                broadcast(order, self.bucket_reducer.group, label="the order of gradients")
            self._may_rebuild = False
            self._set_buckets(order.tolist())
            self.has_rebuilt = True
            return True

    @property
    def grad_ready_order(self) -> list[int]:
        """Indices of the last backward's gradients, in the order in which they became ready."""
        return self._readiness.order

    # --- forward

    @torch.compiler.disable
    def prepare_for_forward(self) -> None:
        """Start a forward: clear the state of the last one."""
        with self._lock:
            self._output_nodes.clear()
            self.bucket_reducer.leave_join()
            self.timings.iteration += 1
            self.timings.forward_start = time.perf_counter_ns()

    @torch.compiler.disable
    def prepare_for_backward(self, outputs: Sequence[Tensor]) -> None:
        """Arm the hooks. `outputs`: forward's tensors, in which unused parameters are searched."""
        with self._lock:
            self.timings.backward_start = time.perf_counter_ns()
            self._abandon_backward()
            self._expects_hooks = True
            self._backward_started = False
            self._readiness.begin()
            self._output_nodes = [tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None]
            for bucket in self.buckets:
                bucket.begin()
            self._launcher.begin(starts=True)
            if self.static_graph is not None:
                self.static_graph.begin()

    def _abandon_backward(self) -> None:
        """Drop the state of an unfinished backward. The next one waits for its reductions."""
        for index, wait in self._in_flight.items():
            if not isinstance(self.buckets[index], SparseBucket):  # nothing of it is in flight
                self._abandoned.append(wait)
        self.bucket_reducer.reset()
        if self._in_flight or self._is_unfinished:
            for bucket in self.buckets:
                bucket.reset()
        self._in_flight.clear()
        self._is_unfinished = False

    # --- backward

    def _autograd_hook(self, index: int) -> None:
        """Handle one run of a parameter's AccumulateGrad hook."""
        with self._lock:
            if self.options.passes is not None and not self._count_pass(index):
                return
            static = self.static_graph
            if static is not None and not static.is_recorded:
                static.record_hook(index)
            if not self._expects_hooks or (static is not None and not static.is_recorded):
                if self._used_map is not None and self.parameters[index].grad is not None:
                    self._used_map.mark(index)  # in `no_sync` too
                return
            if not self._backward_started:
                self._start_backward()
            if static is not None:
                if static.is_extra_hook(index):
                    raise self._logged(graph_changed(index, self._names))
                if not static.count_down(index):
                    return
            self._readiness.order.append(index)
            self._mark_ready(index)

    def _start_backward(self) -> None:
        """Start a backward, in its first hook."""
        self._backward_started = True
        if torch.is_grad_enabled():
            warn_once(CREATE_GRAPH)
        self._set_factor()
        if self.static_graph is None and self.options.find_unused:
            self._find_unused()
        self._is_unfinished = True
        for index in self._unused:
            slot = self._readiness.slots[index]
            slot.bucket.mark_unreached(slot.position)
            self._mark_ready(index)
        self._readiness.is_fast_path = self.static_graph is None and self.options.passes in (None, 1)

    def _count_pass(self, index: int) -> bool:
        """Count one of a parameter's `passes` gradients. Return True if it is the last."""
        if self._readiness.ready[index]:
            assert self.options.passes is not None, "gradients are not counted"
            raise too_many_passes(self._names.get(index, f"parameter {index}"), self.options.passes)
        self._remaining[index] -= 1
        return self._remaining[index] == 0

    def _set_factor(self) -> None:
        factor = self.bucket_reducer.factor()
        for bucket in self.buckets:
            bucket.factor = factor

    def _find_unused(self) -> None:
        with record_function("torch.distributed.ddp.reducer::search_unused_parameters"):
            before, self._unused = self._unused, unused_in_backward(self._nodes, self._output_nodes)
        self._output_nodes.clear()
        if self.timings.iteration > 1 and before != self._unused:
            self.is_static_so_far = False

    def _mark_ready(self, index: int) -> None:
        """Mark a gradient as ready and queue it for its bucket."""
        if self._readiness.ready[index]:
            raise self._logged(marked_ready_twice(index, self._names))
        self._readiness.ready[index] = 1
        slot = self._readiness.slots[index]
        slot.pending.positions.append(slot.position)
        slot.pending.nbytes += slot.nbytes
        slot.pending.num_missing -= 1
        if not slot.pending.num_missing or slot.pending.nbytes >= slot.pending.flush_bytes:
            self._flush_bucket(index)

    def _flush_bucket(self, index: int) -> None:
        """Copy the queued gradients of a parameter's bucket; start its reduction if it is complete."""
        with self._lock:
            bucket: AnyBucket = self._readiness.slots[index].bucket
            if not bucket.pending.positions:
                return  # another thread's hook has flushed it meanwhile
            if self._used_map is not None and self.static_graph is None:
                for position in bucket.pending.positions:
                    if bucket.parameters[position].grad is not None and not bucket.is_unreached(position):
                        self._used_map.mark(bucket.param_indices[position])
            bucket.flush()
            if bucket.pending.num_missing:
                return
            self._launcher.complete(bucket.index)
            if self._launcher.all_started:
                if self.options.passes is not None:
                    return  # until `finish`
                if not self._has_sparse:
                    self._start_used_map()
                Variable._execution_engine.queue_callback(self._finalize_backward)

    def _start_used_map(self) -> None:
        """Start the used-map reduction after the last bucket's; sparse reductions only start when waited
        for."""
        if self._used_map is not None and self.static_graph is None and not self.options.skips_unused:
            self._used_map.start(self.bucket_reducer.group)

    def _start_reduction(self, index: int) -> None:
        if index == 0:
            self.timings.comm_start = time.perf_counter_ns()
        bucket = self.buckets[index]
        if self.options.skips_unused and set(bucket.param_indices) <= set(self._unused):
            bucket.reset()
            return
        buffer = bucket.finalize()
        is_last = index == len(self.buckets) - 1
        self._in_flight[index] = self.bucket_reducer.start(bucket, buffer, is_last=is_last)

    def _finalize_backward(self) -> None:
        """Wait for the reductions and write averaged gradients to `.grad`. Runs when autograd is done."""
        with self._lock:
            self.timings.backward_end = time.perf_counter_ns()
            self._expects_hooks = self._backward_started = self._is_unfinished = False
            self._readiness.is_fast_path = False
            self._output_nodes.clear()
            try:
                self._write_results()
            finally:
                self._futures.clear()
                self.bucket_reducer.reset()
                if self._used_map is not None and self.static_graph is None:
                    self._used_map.reset()
            if self.static_graph is not None and self._readiness.order:
                self._readiness.order += self._unused
            self.timings.comm_end = time.perf_counter_ns()

    def _write_results(self) -> None:
        """Wait for reductions in order and write results to `.grad`. Without sparse gradients, a bucket
        is written while later ones are in flight."""
        while self._abandoned:
            self._abandoned.pop(0)()
        self.num_reduced = len(self._in_flight)
        for index in self._in_flight:
            self.buckets[index].alias_grads()
        results: dict[int, Tensor] = {}
        if self._has_sparse:  # ranks that have joined communicate in this order too
            results = {index: wait() for index, wait in self._in_flight.items()}
            self._start_used_map()
        is_unused = self._used_map.is_unused if self._used_map is not None else lambda _: False
        for index in [*self._in_flight]:
            result = results[index] if self._has_sparse else self._in_flight[index]()
            del self._in_flight[index]
            self.buckets[index].write_grads(result, is_unused)
            if self._optimizers_run_in_backward:
                _run_optimizers(self.buckets[index].parameters)
        for future in self._futures:
            future.wait()
        if self._used_map is not None:
            self._used_map.wait()

    # --- an optimizer's backwards, see the note

    def begin(self) -> None:
        """Arm the hooks until `finish`."""
        assert self.options.passes is not None, "a reducer of a module"
        self._remaining = [self.options.passes] * len(self.parameters)
        self.prepare_for_backward(())

    @property
    def has_gradients(self) -> bool:
        """True if a backward has computed a gradient since `begin`."""
        return any(self._readiness.ready) or min(self._remaining) < (self.options.passes or 0)

    @torch.no_grad()
    def finish(self) -> None:
        """Reduce the gradients that are missing (where there is none, zeros), and write all results."""
        with self._lock:
            if not self._backward_started:
                self._start_backward()
            for index in self._readiness.missing:
                self._mark_ready(index)
            self._finalize_backward()
            self._readiness.begin()

    def contribute_zeros(self) -> None:
        """Take part in the reductions of one `finish` of the other ranks, without gradients."""
        self.bucket_reducer.reset()
        last = len(self.buckets) - 1
        for wait in [self.bucket_reducer.start(b, b.zeros(), is_last=b.index == last) for b in self.buckets]:
            wait()

    # --- a static graph

    def _set_static_graph(self) -> None:
        with self._lock:
            if self.timings.iteration > 0:
                raise self._logged(DDPError(STATIC_LATE))
            self.static_graph = StaticGraph(len(self.parameters))
            self._may_rebuild = True
            self._used_map = UsedMap(len(self.parameters), self._device)

    @property
    def is_static(self) -> bool:
        """True if the graph was declared static, or has not changed so far."""
        return self.static_graph is not None or (self.options.find_unused and self.is_static_so_far)

    def _ddp_graph_static(self) -> bool:
        return self.is_static_so_far

    def _delay_all_reduce(self) -> None:
        """End a static graph's first backward: flush and reduce all buckets at once."""
        with self._lock:
            assert self.static_graph is not None, "no static graph"
            assert self._used_map is not None, "no used map"
            self._expects_hooks = True
            self._unused = self.static_graph.finish_recording()
            # Before communication hooks: they may start collectives at any time.
            self._used_map.start(self.bucket_reducer.group)
            self._set_factor()
            self._is_unfinished = True
            for slot in self._readiness.slots:
                slot.pending.positions.append(slot.position)
            for index in self._unused:
                slot = self._readiness.slots[index]
                slot.bucket.mark_unreached(slot.position)
            for bucket in self.buckets:
                bucket.flush()
            self._launcher.start_remaining()
            self._finalize_backward()

    # --- called by torch's module

    @torch.compiler.disable
    def _check_reducer_finalized(self) -> None:
        """Check that the last backward has finished. Raises DDPError if gradients are missing."""
        if not self._is_unfinished:
            return
        missing = self._readiness.missing
        is_static = self.static_graph is not None
        find_unused = self.options.find_unused
        rank = self.bucket_reducer.attached.rank
        raise self._logged(
            unfinished_reduction(missing, self._names, rank, find_unused=find_unused, static=is_static)
        )

    def _remove_autograd_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _logged(self, error: DDPError) -> DDPError:
        self.log_error(str(error))
        return error

    def _reset_state(self) -> None:
        """Discard the state of the current backward. Buckets will be rebuilt."""
        with self._lock:
            self._abandon_backward()
            self._abandoned.clear()
            self._expects_hooks = self._backward_started = False
            self._may_rebuild = self.static_graph is not None or not self.options.find_unused
            self._readiness.begin()
            if self._used_map is not None and self.static_graph is None:
                self._used_map.reset()

    # --- the rest of the interface that torch's module calls

    def register_comm_hook(self, hook: Hook, state: object) -> None:
        self.bucket_reducer.register(hook, state)

    @torch.compiler.disable
    def _set_forward_pass_work_handle(self, work: Any, use_static_world_size: bool) -> None:
        self.bucket_reducer.expect_active(work, is_static=use_static_world_size)

    def _get_zeros_like_grad_buckets(self) -> list[GradBucket]:
        last = len(self.buckets) - 1
        return [as_grad_bucket(b, b.zeros(), is_last=b.index == last) for b in self.buckets]

    def _run_comm_hook(self, bucket: GradBucket) -> Any:
        """Reduce a bucket on a rank that has joined. Return an object with `wait`."""
        if self.bucket_reducer.has_hook:
            return Work(self.bucket_reducer.run_hook(bucket))
        own = self.buckets[bucket.index()]
        return Work(self.bucket_reducer.start_sum(own, bucket.buffer(), divides=False))

    def _push_all_rebuilt_params(self) -> None:
        """Set any ready order on a rank that has joined: rank 0's order is used."""
        if self._may_rebuild and not self._readiness.order:
            self._readiness.order += range(len(self.parameters))

    def match_used_map(self) -> None:
        """Join the used-map reduction on a rank that has joined: it has used nothing."""
        used = UsedMap(len(self.parameters), self._device)
        used.start(self.bucket_reducer.group)
        used.wait()

    def _get_local_used_map(self) -> Tensor:
        assert self._used_map is not None, "find_unused_parameters and static_graph are off"
        return self._used_map.tensor

    def _install_post_backward_futures(self, futures: Any) -> None:
        self._futures += futures if isinstance(futures, list | tuple) else [futures]

    def _set_optimizer_in_backward(self) -> None:
        self._optimizers_run_in_backward = True

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        self.timings.sample_rate = sample_rate

    def _set_mixed_precision_param_dtype(self, dtype: torch.dtype) -> None:
        """Do nothing: gradients of this dtype are cast when copied into and out of buckets."""

    def _set_sparse_metadata(self, global_unique_ids: Mapping[str, Tensor]) -> None:
        """Do nothing: row indices are gathered in every reduction."""

    def _update_process_group(self, new_process_group: Any) -> None:
        attached: Any = self.bucket_reducer.attached  # of a module, an AttachedGroup
        attached.set_process_group(new_process_group)
        for bucket in self.buckets:
            bucket.reset()  # their memory belongs to the previous group

    def _run_allreduce_hook(self, bucket: GradBucket) -> "torch.futures.Future[list[Tensor]]":
        """Sum over the process group without dividing, for torch's own hooks."""
        attached: Any = self.bucket_reducer.attached
        return attached.process_group.allreduce([bucket.buffer()]).get_future()

    def get_backward_stats(self) -> list[int]:
        """Zeros: ready times of gradients are not recorded."""
        return [0] * len(self.parameters)


def weak_method(method: Callable[[T], None]) -> Callable[[T], None]:
    """Return a function that calls the bound method while its object lives, and does not keep it alive."""
    ref = weakref.WeakMethod(method)

    def call(argument: T) -> None:
        bound = ref()
        if bound is not None:
            bound(argument)

    return call


def _run_optimizers(parameters: Sequence[nn.Parameter]) -> None:
    """Step the optimizers of `apply_optimizer_in_backward`, and clear their gradients."""
    for parameter in parameters:
        optimizers: Sequence[torch.optim.Optimizer] = getattr(parameter, "_in_backward_optimizers", ())
        for optimizer in optimizers:
            optimizer.step()
        if optimizers:
            parameter.grad = None
