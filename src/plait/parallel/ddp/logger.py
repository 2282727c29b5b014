"""What `_get_ddp_logging_data` tells of a wrapped module: torch's keys."""

import os
from collections.abc import Iterable, Sequence

import torch

from plait.comm.attach import AttachedGroup
from plait.parallel.ddp.allreduce import AnyBucket
from plait.parallel.ddp.reducer import Reducer

_DTYPES = {
    "float32": "float",
    "float64": "double",
    "float16": "c10::Half",
    "bfloat16": "c10::BFloat16",
    "complex64": "c10::complex<float>",
    "complex128": "c10::complex<double>",
}
_ENVIRONMENT = ("MASTER_PORT", "MASTER_ADDR", "TORCH_DISTRIBUTED_DEBUG", "CUDA_VISIBLE_DEVICES")
_OF_GLOO = ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT")
_OF_NCCL = ("NCCL_SOCKET_IFNAME", "NCCL_DEBUG", "NCCL_NTHREADS", "NCCL_IB_TIMEOUT")


class Logger:
    """Facts of the construction, and of iterations that were measured. `strs_map` and `ints_map`: by torch's
    keys; times in nanoseconds."""

    def __init__(self, reducer: Reducer, behind: AttachedGroup) -> None:
        self.strs_map: dict[str, str] = {"backend_name": behind.backend}
        self.ints_map: dict[str, int] = {"rank": behind.rank, "world_size": behind.size}
        self._reducer = reducer
        self._sums = [0] * 4
        self._num_measured = 0
        if behind.num_threads is not None:
            self.ints_map["gloo_num_threads"] = behind.num_threads

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
            "device_ids": _listed(device_ids),
            "dtypes": _listed(sorted({_dtype_name(str(p.dtype)) for p in parameters})),
            "bucket_sizes": _sizes(reducer.buckets),
        }
        names = _ENVIRONMENT + (_OF_GLOO if "gloo_num_threads" in self.ints_map else ())
        names += _OF_NCCL if self.strs_map["backend_name"] == "nccl" else ()
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
        """At the beginning of a forward: of the iteration before it, if that was measured."""
        reducer, times = self._reducer, self._reducer.times
        if not times.is_sampled:
            return
        self.ints_map["iteration"] = times.iteration
        self.ints_map["can_set_static_graph"] = int(reducer.is_static)
        self.ints_map["num_buckets_reduced"] = reducer.num_reduced
        self.ints_map["unused_parameter_size"] = reducer.unused_bytes
        if reducer.has_rebuilt:
            self.ints_map["has_rebuilt_buckets"] = 1
            self.strs_map["rebuilt_bucket_sizes"] = _sizes(reducer.buckets)
            self.strs_map["rebuilt_per_bucket_param_indices"] = _listed(
                " ".join(str(number) for number in bucket.numbers) for bucket in reducer.buckets
            )
        self.strs_map["prev_iteration_grad_ready_order_indices"] = _listed(reducer.order_of_arrival)
        if times.comm_end >= times.backward_start:
            self._note_times()

    def _note_times(self) -> None:
        times = self._reducer.times
        spans = {
            "forward_compute_time": times.backward_start - times.forward_start,
            "backward_compute_time": times.backward_end - times.backward_start,
            "backward_comm_time": times.comm_end - times.comm_start,
            "backward_compute_comm_overlap_time": times.backward_end - times.comm_start,
        }
        self._num_measured += 1
        for place, (name, span) in enumerate(spans.items()):
            self._sums[place] += span
            self.ints_map[name] = span
            self.ints_map[f"avg_{name}"] = self._sums[place] // self._num_measured
        self.ints_map |= {
            "forward_compute_time_start": times.forward_start,
            "backward_compute_time_start": times.backward_start,
            "backward_compute_time_end": times.backward_end,
            "backward_comm_time_start": times.comm_start,
            "backward_comm_time_end": times.comm_end,
        }

    def set_error_and_log(self, text: str) -> None:
        self.ints_map["has_error"] = 1
        self.ints_map["iteration"] = self._reducer.times.iteration
        self.strs_map["error"] = text

    def _set_comm_hook_name(self, name: str) -> None:
        self.strs_map["comm_hook"] = name

    def _set_uneven_input_join(self) -> None:
        self.ints_map["join_uneven_inputs"] = 1

    def _set_static_graph(self) -> None:
        self.ints_map["static_graph"] = 1


def _dtype_name(name: str) -> str:
    name = name.removeprefix("torch.")
    return _DTYPES.get(name, name)


def _listed(items: Iterable[object]) -> str:
    return ", ".join(str(item) for item in items)


def _sizes(buckets: Sequence[AnyBucket]) -> str:
    return _listed(bucket.nbytes for bucket in buckets)
