"""All cases with an undesired outcome, each with its reason."""

# Fail with plait's class. The aim is an empty dict.
_EXCEPTIONS = {
    "test_compute_bucket_assignment_by_size_sparse_error_with_logger": (
        "passes the module's logger to a private C++ function, which accepts only torch's"
    ),
}
# Also fail if gradients do not use the process group.
_SHARED_MEMORY_EXCEPTIONS = {
    "test_ddp_profiling_torch_profiler": "expects Gloo's events, but Gloo is not used",
}

_NO_SYNC_BN = "SyncBatchNorm has kernels for GPUs only"
_NO_GPU = "reads a GPU index, and there is none"
_ROUNDING = "compares two diverging runs to 1.3e-6: 1/3 is not exact"

# Fail with torch's own class with the CPU in place of GPUs.
_TORCH_FAILS = {
    "test_DistributedDataParallel_SyncBatchNorm": _NO_SYNC_BN,
    "test_DistributedDataParallel_SyncBatchNorm_2D_Input": _NO_SYNC_BN,
    "test_DistributedDataParallel_SyncBatchNorm_Channels_Last": _NO_SYNC_BN,
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value": _NO_SYNC_BN,
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient": _NO_SYNC_BN,
    "test_DistributedDataParallel_SyncBatchNorm_No_Affine": _NO_SYNC_BN,
    "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process": _NO_SYNC_BN,
    "test_DistributedDataParallel_SyncBatchNorm_half": _NO_SYNC_BN,
    "test_DistributedDataParallel_non_default_stream": "creates a GPU stream",
    "test_ddp_device": _NO_GPU,
    "test_ddp_inference": _NO_SYNC_BN,
    "test_ddp_logging_data_gpu": _NO_GPU,
    "test_ddp_uneven_inputs_stop_iteration_sync_bn": _NO_SYNC_BN,
    "test_sync_bn_logged": _NO_SYNC_BN,
}
_TORCH_FAILS_AT = {
    3: {
        "test_ddp_apply_optim_in_backward": _ROUNDING,
        "test_ddp_apply_optim_in_backward_grad_as_bucket_view_false": _ROUNDING,
    },
}
# Flaky with any class, because the case itself has a race. Retried up to three times.
RACES = {"test_post_localSGD_optimizer_step_reload": "rank 0 removes a file that other ranks still read"}


def exceptions(transport: str) -> dict[str, str]:
    """Cases that plait's class fails over a transport, with reasons."""
    return _EXCEPTIONS if transport == "group" else _EXCEPTIONS | _SHARED_MEMORY_EXCEPTIONS


def torch_fails(world_size: int) -> dict[str, str]:
    """Cases that torch's class fails with this number of ranks, with reasons."""
    return _TORCH_FAILS | _TORCH_FAILS_AT.get(world_size, {})
