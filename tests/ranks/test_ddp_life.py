"""DistributedDataParallel: pickled, copied, compiled, in mixed precision, with another group, and its log."""

import copy
import io
import os
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from support.ddp import (
    Layers,
    assert_gradients,
    assert_same,
    assert_steps,
    init_gloo,
    loss_of,
    mean_gradients,
    over_both,
    rows,
    wrapped,
)
from support.pool import Pool

ARGUMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.0001},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
}


def _pickled(transport: str, arguments: dict[str, Any]) -> None:
    init_gloo()
    ddp = wrapped(Layers(), transport, **arguments)
    assert_steps(ddp, 2)
    loaded = pickle.loads(pickle.dumps(ddp))
    assert type(loaded) is type(ddp)
    assert loaded.module is not ddp.module
    for name in ("gradient_as_bucket_view", "find_unused_parameters", "static_graph", "bucket_bytes_cap"):
        assert getattr(loaded, name) == getattr(ddp, name)
    for ours, other in zip(ddp.parameters(), loaded.parameters(), strict=True):
        assert torch.equal(ours, other)
    assert_steps(loaded)
    assert_steps(copy.deepcopy(ddp))
    assert_steps(ddp)
    file = io.BytesIO()
    torch.save(ddp, file)
    file.seek(0)
    assert_steps(torch.load(file, weights_only=False))


@over_both
@pytest.mark.parametrize("way", ["plain", "views", "unused"])
def test_it_is_pickled_and_copied(pool: Pool, way: str, transport: str) -> None:
    pool.run(_pickled, 2, transport, ARGUMENTS[way])


def _not_pickled() -> None:
    init_gloo()
    ddp = wrapped(Layers(), process_group=dist.new_group([0, 1]))
    text = "DDP Pickling/Unpickling are only supported when using DDP with the default process group"
    with pytest.raises(RuntimeError, match=text):
        pickle.dumps(ddp)
    with pytest.raises(RuntimeError, match=text):
        copy.deepcopy(ddp)


def test_it_is_not_pickled_with_a_group_of_its_own(pool: Pool) -> None:
    pool.run(_not_pickled, 2)


def _loaded(transport: str) -> None:
    """A checkpoint of rank 0, loaded by a plain module, by another wrapper, and with the prefix taken off."""
    init_gloo()
    ddp = wrapped(Layers(), transport)
    state = copy.deepcopy(ddp.state_dict())
    other = wrapped(Layers(), transport)
    other.load_state_dict(state)
    plain = Layers()
    nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
    plain.load_state_dict(state)
    for a, b, c in zip(ddp.parameters(), other.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    assert_steps(other)


@over_both
def test_a_state_dict_goes_from_one_to_another_and_to_a_plain_module(pool: Pool, transport: str) -> None:
    pool.run(_loaded, 2, transport)


def _compiled(transport: str, inside: bool, arguments: dict[str, Any]) -> None:
    """In buckets of a MiB, at which the compiler cuts modules that are marked as wrapped."""
    init_gloo()
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(5, 400), nn.Tanh(), nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 3))
    ddp = wrapped(
        torch.compile(model, backend="aot_eager") if inside else model,
        transport,
        bucket_cap_mb=1,
        **arguments,
    )
    runs = ddp if inside else torch.compile(ddp, backend="aot_eager")
    for step in range(4):
        ddp.zero_grad()
        expected = mean_gradients(model, lambda it, rank, step=step: loss_of(it, rank, step))
        loss_of(runs, dist.get_rank(), step).backward()
        assert_gradients(model, expected)


COMPILED: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "static": {"static_graph": True},
}


@over_both
@pytest.mark.parametrize("inside", [True, False], ids=["inside", "outside"])
@pytest.mark.parametrize("way", COMPILED)
def test_it_is_compiled_inside_or_outside(pool: Pool, way: str, inside: bool, transport: str) -> None:
    pool.run(_compiled, 2, transport, inside, COMPILED[way])


def _halves(transport: str, arguments: dict[str, Any]) -> None:
    """autocast: bf16 inside, fp32 gradients, the same on all ranks and near the fp32 mean."""
    init_gloo()
    ddp = wrapped(Layers().float(), transport, **arguments)

    def loss(model: nn.Module, rank: int, step: int = 0) -> Tensor:
        return model(rows(rank, step).float()).float().square().mean()

    for step in range(3):
        ddp.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            expected = mean_gradients(ddp.module, lambda it, rank, step=step: loss(it, rank, step))
            assert ddp(rows(0).float()).dtype == torch.bfloat16
            own = loss(ddp, dist.get_rank(), step)
        own.backward()
        for name, parameter in ddp.module.named_parameters():
            assert parameter.grad.dtype == torch.float32
            torch.testing.assert_close(parameter.grad, expected[name], rtol=2e-2, atol=2e-3)
            assert_same(parameter.grad)


@over_both
@pytest.mark.parametrize("way", ["plain", "views"])
def test_it_trains_under_autocast(pool: Pool, way: str, transport: str) -> None:
    pool.run(_halves, 2, transport, ARGUMENTS[way])


def _scaled(transport: str, arguments: dict[str, Any]) -> None:
    """GradScaler: one rank's infinity makes all ranks leave out the step."""
    init_gloo()
    ddp = wrapped(Layers(), transport, **arguments)
    alone = copy.deepcopy(ddp.module)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (ddp, alone)]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = loss_of(ddp, dist.get_rank(), step)
        if step == 2 and dist.get_rank() == 1:
            loss = loss * torch.inf
        scaler.scale(loss).backward()
        scaler.unscale_(optimizers[0])
        scaler.step(optimizers[0])
        scaler.update()
        assert scaler.get_scale() == (1024.0 if step < 2 else 512.0)
        if step != 2:
            torch.stack([loss_of(alone, rank, step) for rank in range(2)]).mean().backward()
            optimizers[1].step()
        for ours, one in zip(ddp.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours, one, rtol=1e-9, atol=1e-12)


@over_both
@pytest.mark.parametrize("way", ["plain", "views"])
def test_a_scaler_skips_the_same_steps_on_all_ranks(pool: Pool, way: str, transport: str) -> None:
    pool.run(_scaled, 2, transport, ARGUMENTS[way])


def _other_group(transport: str, arguments: dict[str, Any]) -> None:
    """The third rank leaves and comes back."""
    init_gloo()
    pair = dist.new_group([0, 1])
    ddp = wrapped(Layers(), transport, **arguments)
    rank = dist.get_rank()
    assert_steps(ddp, 2)
    ddp._update_process_group(pair)
    if rank < 2:
        assert ddp.process_group is pair
        for step in range(3):
            ddp.zero_grad()
            expected = mean_gradients(ddp.module, lambda it, r, step=step: loss_of(it, r, step), 2)
            loss_of(ddp, rank, step).backward()
            assert_gradients(ddp.module, expected)
    ddp._update_process_group(dist.group.WORLD)
    assert_steps(ddp)


@over_both
@pytest.mark.parametrize("way", ["plain", "views", "unused"])
def test_its_group_may_shrink_and_grow(pool: Pool, way: str, transport: str) -> None:
    pool.run(_other_group, 3, transport, ARGUMENTS[way])


def _functional(transport: str) -> None:
    """Called with parameters from elsewhere, whose gradients it knows nothing of."""
    init_gloo()
    ddp = wrapped(Layers(), transport)
    other = {name: torch.zeros_like(tensor, requires_grad=True) for name, tensor in ddp.named_parameters()}
    x = rows(dist.get_rank())
    out = functional_call(ddp, other, (x,))
    assert not bool(out.any())
    with torch.no_grad():
        assert torch.equal(functional_call(ddp, dict(ddp.named_parameters()), (x,)), ddp.module(x))
    fresh = wrapped(Layers(), transport)
    assert_steps(fresh)


def test_it_is_called_with_parameters_from_elsewhere(pool: Pool) -> None:
    pool.run(_functional, 2, "auto")


KEYS = {
    "backend_name", "broadcast_buffers", "bucket_cap_bytes", "bucket_sizes", "cuda_visible_devices",
    "device_ids", "dtypes", "find_unused_parameters", "gloo_device_transport", "gloo_num_threads",
    "gloo_socket_ifname", "gradient_as_bucket_view", "has_sync_bn", "is_multi_device_module", "iteration",
    "master_addr", "master_port", "module_name", "num_parameter_tensors", "output_device", "rank",
    "torch_distributed_debug", "total_parameter_size_bytes", "world_size",
}  # fmt: skip
RUN_KEYS = {
    "avg_backward_comm_time", "avg_backward_compute_comm_overlap_time", "avg_backward_compute_time",
    "avg_forward_compute_time", "backward_comm_time", "backward_comm_time_end", "backward_comm_time_start",
    "backward_compute_comm_overlap_time", "backward_compute_time", "backward_compute_time_end",
    "backward_compute_time_start", "forward_compute_time", "forward_compute_time_start",
    "has_rebuilt_buckets", "num_buckets_reduced", "prev_iteration_grad_ready_order_indices",
    "rebuilt_bucket_sizes", "rebuilt_per_bucket_param_indices", "unused_parameter_size",
}  # fmt: skip


def _logged() -> None:
    init_gloo()
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = "INFO"
    ddp = wrapped(Layers(), bucket_cap_mb=2)
    logged = ddp._get_ddp_logging_data()
    assert logged.keys() >= KEYS
    expected = {
        "backend_name": "gloo", "broadcast_buffers": 1, "bucket_cap_bytes": 2 * 1024 * 1024,
        "bucket_sizes": "528", "device_ids": "", "dtypes": "double", "find_unused_parameters": 0,
        "gradient_as_bucket_view": 0, "has_sync_bn": 0, "is_multi_device_module": 0, "iteration": 0,
        "module_name": "Layers", "num_parameter_tensors": 4, "output_device": -1, "rank": dist.get_rank(),
        "total_parameter_size_bytes": 528, "world_size": 2, "torch_distributed_debug": "INFO",
        "master_addr": os.environ.get("MASTER_ADDR", "N/A"), "gloo_socket_ifname": "N/A",
    }  # fmt: skip
    assert {key: logged[key] for key in expected} == expected
    for step in range(12):
        loss_of(ddp, dist.get_rank(), step).backward()
    logged = ddp._get_ddp_logging_data()
    assert logged.keys() >= KEYS | RUN_KEYS
    assert logged["iteration"] == 10  # the last of those that are recorded before one in a hundred is
    assert logged["has_rebuilt_buckets"] == 1
    assert logged["rebuilt_bucket_sizes"] == "528"
    assert logged["prev_iteration_grad_ready_order_indices"] == "3, 2, 1, 0"
    assert logged["rebuilt_per_bucket_param_indices"] == "3 2 1 0"
    times = [
        logged[f"{name}_time_start"] for name in ("forward_compute", "backward_compute", "backward_comm")
    ]
    assert 0 < times[0] < times[1] < times[2] < logged["backward_comm_time_end"]
    ddp._set_ddp_runtime_logging_sample_rate(1)
    for step in range(3):
        loss_of(ddp, dist.get_rank(), step).backward()
    assert ddp._get_ddp_logging_data()["iteration"] > 10


def test_the_logging_data(pool: Pool) -> None:
    pool.run(_logged, 2)


def _static_found() -> None:
    init_gloo()
    for model, is_static in ((Layers(), True), (Changing(), False)):
        ddp = wrapped(model, find_unused_parameters=True)
        for step in range(4):
            ddp(rows(0, step)).sum().backward()
        assert ddp.reducer._ddp_graph_static() == is_static


class Changing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(5, 3) for _ in range(2))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        out: Tensor = self.layers[self.calls % 2](x)
        return out


def test_the_reducer_knows_whether_the_graph_was_static_so_far(pool: Pool) -> None:
    pool.run(_static_found, 2)
