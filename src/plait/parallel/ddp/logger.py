"""The data of `_get_ddp_logging_data`, with torch's keys."""

import os
from collections.abc import Iterable, Sequence

import torch

from plait.comm.attach import AttachedGroup
from plait.parallel.ddp.allreduce import AnyBucket
from plait.parallel.ddp.reducer import Reducer

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
