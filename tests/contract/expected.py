"""Where the outcome of a case is not the one to hope for, each with its reason. One place."""

# Fails with plait's class. Empty is the aim.
_EXCEPTIONS = {
    "test_compute_bucket_assignment_by_size_sparse_error_with_logger": (
        "hands the module's logger to a private function in C++, which takes torch's alone"
    ),
}
# The same, where gradients do not travel over the process group.
_EXCEPTIONS_BESIDE = {
    "test_ddp_profiling_torch_profiler": "looks for Gloo's events, and Gloo is not asked",
}

_NO_SYNC_BN = "SyncBatchNorm has kernels for GPUs only"
_NO_GPU = "looks at the GPU's number, and there is none"
_ROUNDING = "compares two runs that diverge, to 1.3e-6: a third is not exact"

# Fails with torch's own class where the CPU stands in for GPUs, so it says nothing of ours.
_TORCH_FAILS = {
    "test_DistributedDataParallel_SyncBatchNorm": _NO_SYNC_BN,
    "test_DistributedDataParallel_SyncBatchNorm_2D_Input": _NO_SYNC_BN,
    "test_DistributedDataParallel_SyncBatchNorm_Channels_Last": _NO_SYNC_BN,
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_Running_Value": _NO_SYNC_BN,
    "test_DistributedDataParallel_SyncBatchNorm_Diff_Input_Sizes_gradient": _NO_SYNC_BN,
    "test_DistributedDataParallel_SyncBatchNorm_No_Affine": _NO_SYNC_BN,
    "test_DistributedDataParallel_SyncBatchNorm_Single_Input_Per_Process": _NO_SYNC_BN,
    "test_DistributedDataParallel_SyncBatchNorm_half": _NO_SYNC_BN,
    "test_DistributedDataParallel_non_default_stream": "makes a stream of a GPU",
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
# Fails now and then with any class, because the case itself has a race. Run again, up to three times.
RACES = {"test_post_localSGD_optimizer_step_reload": "rank 0 removes a file that the others still read"}


def exceptions(transport: str) -> dict[str, str]:
    """The cases that plait's class fails over a transport, and why."""
    return _EXCEPTIONS if transport == "group" else _EXCEPTIONS | _EXCEPTIONS_BESIDE


def torch_fails(world_size: int) -> dict[str, str]:
    """The cases that torch's class fails with so many ranks, and why."""
    return _TORCH_FAILS | _TORCH_FAILS_AT.get(world_size, {})
