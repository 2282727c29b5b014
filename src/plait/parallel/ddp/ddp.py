"""DistributedDataParallel: torch's class on plait's reducer.

[Note: subclass of torch's class]
The Python part of torch's class (arguments, forward, buffers, join, pickling) is its contract: programs and
libraries use it, and check `isinstance(model, torch.nn.parallel.DistributedDataParallel)` to find out that
`.module` exists and that gradients are averaged. All of it is kept. The C++ part (buckets, hooks, reductions
and their log) is replaced: the methods below are the places where torch's class calls its reducer.
"""

import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm.attach import (
    AttachedGroup,
    broadcast_as_bytes,
    builtin_hook,
    check_attachable,
    debug_names_enabled,
    first_bucket_bytes,
    mismatched_param_index,
    remove_optimizer_hooks,
    sync_module_states,
)
from plait.comm.collectives import broadcast, shares_memory
from plait.errors import DDPError
from plait.parallel.ddp.allreduce import AnyBucket, Options
from plait.parallel.ddp.bucket import GradBucket
from plait.parallel.ddp.reducer import Reducer, weak_method


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """Average a module's gradients over ranks during backward; parameters stay equal on all ranks.

    Takes the arguments of `torch.nn.parallel.DistributedDataParallel` in the same order, and behaves as its
    documentation says (Li et al., 2006.15704); `state_dict`, `no_sync`, `join`, `register_comm_hook` and the
    rest are the same. Communication is faster: CPU ranks of one host sum gradients in shared memory, buckets
    are reduced while they fill from the first iteration on, and large results are not copied back.

    `transport`: "auto": shared memory if all ranks are on one host and tensors on the CPU, else the process
    group; "host" or "group": that one. Raises CommError if it is unavailable.

    Raises DDPError, which is also a RuntimeError, if training violates the contract; the first sentence is
    torch's.
    """

    reducer: Any  # a `Reducer` and a `Logger`; torch declares its C++ types
    logger: Any

    def __init__(self, module: nn.Module, *args: Any, transport: str = "auto", **kwargs: Any) -> None:
        check_attachable(transport)
        self._transport = transport
        bound = inspect.signature(super().__init__).bind(module, *args, **kwargs)
        given = bound.arguments
        syncs, broadcasts = given.get("init_sync", True), given.get("broadcast_buffers")
        # torch's rule: `forward_sync_buffers`, which torch 2.13 has, leaves the first synchronization alone.
        has_new_option = given.get("forward_sync_buffers") is not None
        self._pending_sync = (syncs, has_new_option or broadcasts is None or bool(broadcasts))
        given["init_sync"] = False  # done by `_ddp_init_helper`
        try:
            super().__init__(*bound.args, **bound.kwargs)
        except RuntimeError as error:
            index = mismatched_param_index(error)
            fact, found = str(error).splitlines()[0], "models with other numbers of parameters"
            if index is not None:
                found = f"{_parameter_name(module, index)} differs between ranks"
            elif "gloo" in fact:  # lost the rank that has found a difference
                fact, found = "DDP expects same model across all ranks", f"another rank has raised: {fact}"
            elif "same model" not in fact:
                raise
            raise DDPError(
                fact,
                given=found,
                expected="the same model on all ranks",
                hint="the same configuration on all ranks",
            ) from error

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()
        state.pop("_attached", None)
        return state

    # --- gradients

    def _ddp_init_helper(
        self,
        parameters: Sequence[nn.Parameter],
        expect_sparse_gradient: Sequence[bool],
        param_to_name_mapping: dict[int, str],
        static_graph: bool,
    ) -> None:
        """Build the reducer and the logger. Called by torch after it has checked arguments and parameters."""
        self._attached = AttachedGroup(self.process_group, self.device, self._transport)
        self._sync_once(parameters)
        if self.mixed_precision is not None:
            for number, parameter in enumerate(parameters):
                parameter._idx = number  # type: ignore[attr-defined]
        options = Options(
            limits=self._bucket_limits(),
            find_unused=self.find_unused_parameters,
            as_views=self.gradient_as_bucket_view,
            skips_unused=getattr(self, "skip_all_reduce_unused_params", False),
        )
        names = param_to_name_mapping if debug_names_enabled() else {}
        self.reducer = Reducer(parameters, expect_sparse_gradient, names, options, self._attached)
        self.logger = Logger(self.reducer, self._attached)
        self.reducer.log_error = weak_method(self.logger.set_error_and_log)
        self.logger.set_construction_data_and_log(
            type(self.module).__name__,
            self.device_ids or [],
            -1 if self.output_device is None else self.output_device,
            self.broadcast_buffers,
            any(isinstance(layer, nn.SyncBatchNorm) for layer in self.module.modules()),
            static_graph,
            self.bucket_bytes_cap,
        )
        self._passing_sync_batchnorm_handle(self.module)

    def _sync_once(self, parameters: Sequence[nn.Parameter]) -> None:
        """Synchronize the model when it is constructed, but not when it is unpickled."""
        (syncs, with_buffers), self._pending_sync = self._pending_sync, (False, False)
        if syncs:
            sync_module_states(
                self._attached,
                self.module,
                parameters,
                self.parameters_to_ignore,
                with_buffers=with_buffers,
                bucket_bytes=self.broadcast_bucket_size,
            )

    def _bucket_limits(self) -> list[int]:
        """Bucket limits in bytes, in reduction order; the last one repeats."""
        caps: Sequence[int] = getattr(self, "bucket_bytes_cap_list", ())  # from torch 2.13 on
        first = [first_bucket_bytes()] if self.bucket_bytes_cap_default else []
        return list(caps) or [*first, self.bucket_bytes_cap]

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Make `hook(state, bucket)` communicate each bucket; it returns a future of the new gradients.

        `bucket`: a `GradBucket`, whose gradients are not divided by the number of ranks. Call it once, before
        backward.
        """
        self._check_comm_hook(hook)
        self.logger._set_comm_hook_name(hook.__qualname__)
        self._comm_hooks.append((hook, state))
        self.reducer.register_comm_hook(hook, state)

    def _register_builtin_comm_hook(self, comm_hook_type: object) -> None:
        self.logger._set_comm_hook_name(str(comm_hook_type))
        self.reducer.register_comm_hook(builtin_hook(comm_hook_type), self.process_group)

    def _check_comm_hook(self, hook: Callable[..., Any]) -> None:
        is_torch_hook = str(getattr(hook, "__module__", "")).startswith("torch.distributed.algorithms.")
        if self.device_type == "cpu" and is_torch_hook and hook.__name__ in _BF16_HOOKS:
            return  # torch requires NCCL on any device; Gloo can sum bfloat16
        if callable(hook):
            bucket = inspect.signature(hook).parameters.get("bucket")
            if bucket is not None and bucket.annotation is GradBucket:
                return  # torch accepts only its own class
        super()._check_comm_hook(hook)

    def _setup_in_backward_optimizers(self) -> None:
        """Make optimizers that run in backward (`apply_optimizer_in_backward`) run after the reduction."""
        if any(hasattr(parameter, "_in_backward_optimizers") for parameter in self._module_parameters):
            remove_optimizer_hooks(self._module_parameters)
            self.reducer._set_optimizer_in_backward()

    def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> Any:
        if not is_joined_rank:
            self.reducer.bucket_reducer.enter_join()
        return super()._check_global_requires_backward_grad_sync(is_joined_rank)

    # --- other communication

    def _match_unused_params_allreduce(self) -> None:
        self.reducer.match_used_map()

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        """Broadcast buffers from one rank."""
        group = self._attached.group
        if not shares_memory(group):
            super()._distributed_broadcast_coalesced(tensors, buffer_size, authoritative_rank)
        else:
            run = partial(broadcast, group=group, source=authoritative_rank, label="buffers")
            broadcast_as_bytes(tensors, run, is_source=group.rank == authoritative_rank)


def _parameter_name(module: nn.Module, index: int) -> str:
    """Name of a parameter by its index among trained parameters, which is torch's numbering."""
    ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    names = [n for n, p in module.named_parameters() if p.requires_grad and n not in ignored]
    return names[index] if index < len(names) else f"parameter {index}"


_BF16_HOOKS = ("bf16_compress_hook", "bf16_compress_wrapper_hook")


# --- the data of `_get_ddp_logging_data`, with torch's keys

_DTYPES = {
    "torch.float32": "float",
    "torch.float64": "double",
    "torch.float16": "c10::Half",
    "torch.bfloat16": "c10::BFloat16",
    "torch.complex64": "c10::complex<float>",
    "torch.complex128": "c10::complex<double>",
}
_ALWAYS_MEASURED = 10  # iterations that are measured at any sample rate
_VARIABLES = ("MASTER_PORT", "MASTER_ADDR", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES")
_GLOO_VARIABLES = ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT")
_NCCL_VARIABLES = ("NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_NTHREADS", "NCCL_IB_TIMEOUT")


class Logger:
    """Data about construction and measured iterations, with torch's keys; times are in nanoseconds."""

    def __init__(self, reducer: Reducer, attached: AttachedGroup) -> None:
        self.strs_map: dict[str, str] = {"backend_name": attached.backend}
        self.ints_map: dict[str, int] = {"rank": attached.rank, "world_size": attached.size}
        self._reducer = reducer
        self._total_ns = [0] * 4
        self._num_measured = 0
        if attached.num_threads is not None:
            self.ints_map["gloo_num_threads"] = attached.num_threads

    def _get_ddp_logging_data(self) -> "Logger":
        return self

    def set_construction_data_and_log(
        self,
        module_name: str,
        device_ids: Sequence[int],
        output_device: int,
        broadcast_buffers: bool,
        has_sync_bn: bool,
        static_graph: bool,
        bucket_cap_bytes: int = 0,
    ) -> None:
        reducer = self._reducer
        parameters = reducer.parameters
        self.strs_map |= {
            "module_name": module_name,
            "device_ids": _join(device_ids),
            "dtypes": _join(sorted({_DTYPES.get(str(p.dtype), str(p.dtype)[6:]) for p in parameters})),
            "bucket_sizes": _bucket_sizes(reducer.buckets),
        }
        names = _VARIABLES + (_GLOO_VARIABLES if "gloo_num_threads" in self.ints_map else ())
        names += _NCCL_VARIABLES if self.strs_map["backend_name"] == "nccl" else ()
        self.strs_map |= {name.lower(): os.environ.get(name, "N/A") for name in names}
        self.ints_map |= {
            "output_device": output_device,
            "broadcast_buffers": int(broadcast_buffers),
            "has_sync_bn": int(has_sync_bn),
            "bucket_cap_bytes": bucket_cap_bytes,
            "find_unused_parameters": int(reducer.options.find_unused),
            "gradient_as_bucket_view": int(reducer.options.as_views),
            "is_multi_device_module": int(len({p.device for p in parameters}) > 1),
            "num_parameter_tensors": len(parameters),
            "total_parameter_size_bytes": sum(p.numel() * p.element_size() for p in parameters),
            "iteration": 0,
        }
        if static_graph:
            self._set_static_graph()

    @torch.compiler.disable
    def set_runtime_stats_and_log(self) -> None:
        """Record the previous iteration, if it was measured. Called at the beginning of a forward."""
        reducer, timings = self._reducer, self._reducer.timings
        number = timings.iteration
        if not number or (number > _ALWAYS_MEASURED and number % timings.sample_rate):
            return
        self.ints_map["iteration"] = timings.iteration
        self.ints_map["can_set_static_graph"] = int(reducer.is_static)
        self.ints_map["num_buckets_reduced"] = reducer.num_reduced
        self.ints_map["unused_parameter_size"] = reducer.unused_bytes
        if reducer.has_rebuilt:
            self.ints_map["has_rebuilt_buckets"] = 1
            self.strs_map["rebuilt_bucket_sizes"] = _bucket_sizes(reducer.buckets)
            self.strs_map["rebuilt_per_bucket_param_indices"] = _join(
                " ".join(str(number) for number in bucket.param_indices) for bucket in reducer.buckets
            )
        self.strs_map["prev_iteration_grad_ready_order_indices"] = _join(reducer.grad_ready_order)
        if timings.comm_end >= timings.backward_start:
            self._record_times()

    def _record_times(self) -> None:
        timings = self._reducer.timings
        spans = {
            "forward_compute_time": timings.backward_start - timings.forward_start,
            "backward_compute_time": timings.backward_end - timings.backward_start,
            "backward_comm_time": timings.comm_end - timings.comm_start,
            "backward_compute_comm_overlap_time": timings.backward_end - timings.comm_start,
        }
        self._num_measured += 1
        for position, (name, span) in enumerate(spans.items()):
            self._total_ns[position] += span
            self.ints_map[name] = span
            self.ints_map[f"avg_{name}"] = self._total_ns[position] // self._num_measured
        self.ints_map |= {
            "forward_compute_time_start": timings.forward_start,
            "backward_compute_time_start": timings.backward_start,
            "backward_compute_time_end": timings.backward_end,
            "backward_comm_time_start": timings.comm_start,
            "backward_comm_time_end": timings.comm_end,
        }

    def set_error_and_log(self, text: str) -> None:
        self.ints_map["has_error"] = 1
        self.ints_map["iteration"] = self._reducer.timings.iteration
        self.strs_map["error"] = text

    def _set_comm_hook_name(self, name: str) -> None:
        self.strs_map["comm_hook"] = name

    def _set_uneven_input_join(self) -> None:
        self.ints_map["join_uneven_inputs"] = 1

    def _set_static_graph(self) -> None:
        self.ints_map["static_graph"] = 1


def _join(items: Iterable[object]) -> str:
    return ", ".join(str(item) for item in items)


def _bucket_sizes(buckets: Sequence[AnyBucket]) -> str:
    return _join(bucket.nbytes for bucket in buckets)
