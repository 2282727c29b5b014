"""The rest of what torch's module asks its reducer for: joining, hooks, settings. The names are torch's."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from plait.comm.transport import Pending
from plait.parallel.ddp.carry import Hook, seen_by_hook
from plait.parallel.ddp.grad_bucket import GradBucket
from plait.parallel.ddp.reducer import Reducer
from plait.parallel.ddp.used import UsedMap


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
            return Pending(self.carrier.run_hook(seen))
        return Pending(self.carrier.start_zeros(self.buckets[seen.index()], seen.buffer()))

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
        self.carrier.behind.move(new_process_group)
        for bucket in self.buckets:
            bucket.drop()  # their memory is the former one's

    def _run_allreduce_hook(self, seen: GradBucket) -> "torch.futures.Future[list[Tensor]]":
        """For torch's own hooks: the sum over the process group, nothing divided."""
        return self.carrier.behind.future_sum(seen.buffer())

    def get_backward_stats(self) -> list[int]:
        """When each parameter's gradient came is not written down."""
        return [0] * len(self.parameters)
