"""DistributedDataParallel: trains as one process on the whole batch, whatever the parameters are like."""

import copy
import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from support.ddp import (
    PLAIT_ONLY,
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


def _trained(transport: str, arguments: dict[str, Any]) -> None:
    init_gloo()
    ddp = wrapped(Layers(), transport, **arguments)
    alone = copy.deepcopy(ddp.module)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in (ddp, alone)]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss_of(ddp, dist.get_rank(), step).backward()
        losses = [loss_of(alone, rank, step) for rank in range(dist.get_world_size())]
        torch.stack(losses).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    for ours, one in zip(ddp.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours, one, rtol=1e-9, atol=1e-12)
        assert_same(ours)


@over_both
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.quick), 3])
def test_replicas_train_as_one_process_on_the_whole_batch(pool: Pool, ranks: int, transport: str) -> None:
    pool.run(_trained, ranks, transport, {})


OPTIONS: dict[str, dict[str, Any]] = {
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "static views": {"static_graph": True, "gradient_as_bucket_view": True},
    "unused views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "batched": {"batched_grad_copy": True},
    "batched views": {"batched_grad_copy": True, "gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 0.0001},
    "list of caps": {"bucket_cap_mb_list": [1, 2]},
    "skipped unused": {"skip_all_reduce_unused_params": True, "find_unused_parameters": True},
}


@over_both
@pytest.mark.parametrize("name", OPTIONS)
def test_options_do_not_change_what_is_trained(pool: Pool, name: str, transport: str) -> None:
    pool.run(_trained, 2, transport, OPTIONS[name])


def _broadcast_at_the_start(transport: str) -> None:
    init_gloo()
    model = nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7))
    with torch.no_grad():
        model[1].running_mean += dist.get_rank() + 1
    own = copy.deepcopy(model.state_dict())
    wrapped(model, transport)
    for name, tensor in model.state_dict().items():
        assert_same(tensor)
        assert dist.get_rank() != 0 or torch.equal(tensor, own[name])
    unsynced = nn.Linear(5, 7)
    own = copy.deepcopy(unsynced.state_dict())
    wrapped(unsynced, transport, init_sync=False)
    assert all(torch.equal(tensor, own[name]) for name, tensor in unsynced.state_dict().items())


@over_both
def test_parameters_and_buffers_are_rank_0s_at_the_start_unless_disabled(pool: Pool, transport: str) -> None:
    pool.run(_broadcast_at_the_start, 2, transport)


def _attributes() -> None:
    group = init_gloo()
    model = nn.Sequential(Layers(), nn.BatchNorm1d(3))
    ddp = wrapped(model)
    assert isinstance(ddp, DistributedDataParallel)
    assert ddp.module is model
    assert ddp.process_group is group
    assert (ddp.device, ddp.device_type) == (torch.device("cpu"), "cpu")
    assert ddp.device_ids is None
    assert ddp.output_device is None
    assert ddp.dim == 0
    assert ddp.require_backward_grad_sync
    assert ddp.require_forward_param_sync
    assert ddp.parameters_to_ignore == set()
    assert [*map(id, ddp.modules_buffers)] == [*map(id, model.buffers())]
    assert ddp.bucket_bytes_cap == 25 * 1024 * 1024
    assert not ddp.static_graph
    assert not ddp.find_unused_parameters
    assert not ddp.gradient_as_bucket_view
    assert ddp.broadcast_buffers
    assert ddp.will_sync_module_buffers()
    assert not ddp.is_multi_device_module
    assert callable(ddp.reducer.prepare_for_forward)
    assert callable(ddp.logger.set_runtime_stats_and_log)
    other = wrapped(
        Layers(),
        process_group=dist.new_group([0, 1]),
        bucket_cap_mb=3,
        static_graph=True,
        gradient_as_bucket_view=True,
        forward_sync_buffers=False,
    )
    assert other.process_group is not group
    assert other.bucket_bytes_cap == 3 * 1024 * 1024
    assert other.static_graph
    assert other.gradient_as_bucket_view
    assert not other.broadcast_buffers
    assert wrapped(Layers(), find_unused_parameters=True).find_unused_parameters


def test_the_attributes_that_libraries_read(pool: Pool) -> None:
    pool.run(_attributes, 2)


def _mode_and_state() -> None:
    init_gloo()
    ddp = wrapped(Layers())
    assert [*ddp.state_dict()] == [f"module.{name}" for name in ddp.module.state_dict()]
    assert [name for name, _ in ddp.named_parameters()] == [f"module.{n}" for n in ddp.module.state_dict()]
    saved = {name: torch.ones_like(tensor) for name, tensor in ddp.state_dict().items()}
    ddp.load_state_dict(saved)
    assert all(bool((parameter == 1).all()) for parameter in ddp.module.parameters())
    assert ddp.eval() is ddp
    assert not ddp.module.first.training
    assert ddp.train() is ddp
    assert ddp.module.first.training
    expected = mean_gradients(ddp.module)
    loss_of(ddp, dist.get_rank()).backward()
    assert_gradients(ddp.module, expected)


def test_state_has_the_prefix_module_and_loads_in_place(pool: Pool) -> None:
    pool.run(_mode_and_state, 2)


class Tied(nn.Module):
    """One weight under two names, a frozen layer, a layer that DDP ignores, and a bare parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(5, 7, bias=False), nn.Linear(5, 7, bias=False)
        self.out.weight = self.into.weight
        self.frozen, self.ignored = nn.Linear(7, 7).requires_grad_(False), nn.Linear(7, 7)
        self.scale = nn.Parameter(torch.randn(7))
        self.register_buffer("own", torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.ignored(self.frozen(self.into(x))) * self.scale
        return x @ self.out.weight


def _tied(transport: str) -> None:
    init_gloo()
    model = Tied()
    ignored = [f"ignored.{name}" for name in ("weight", "bias")] + ["own"]
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items() if name in ignored}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    ddp = wrapped(model, transport)
    assert ddp.parameters_to_ignore == set(ignored)
    assert all(torch.equal(model.state_dict()[name], kept[name]) for name in ignored), "were broadcast"
    for tensor in (model.into.weight, model.frozen.weight, model.scale):
        assert_same(tensor)
    with torch.no_grad():  # for the oracle, which has one copy of it
        for parameter in model.ignored.parameters():
            dist.broadcast(parameter, 0)
    for step in range(3):
        ddp.zero_grad()
        expected = mean_gradients(model, lambda it, rank, step=step: loss_of(it, rank, step))
        local = torch.autograd.grad(
            loss_of(copied := copy.deepcopy(model), dist.get_rank(), step), [*copied.ignored.parameters()]
        )
        expected["ignored.weight"], expected["ignored.bias"] = local
        loss_of(ddp, dist.get_rank(), step).backward()
        assert_gradients(model, expected)
        assert model.frozen.weight.grad is None


@over_both
def test_shared_parameters_count_once_and_frozen_and_ignored_ones_are_left_alone(
    pool: Pool, transport: str
) -> None:
    pool.run(_tied, 2, transport)


class Mixed(nn.Module):
    """Parameters of three dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.single, self.wide = nn.Linear(5, 7, dtype=torch.float32), nn.Linear(7, 3)
        self.coarse = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.wide(self.single(x.float()).double())
        return x * self.coarse.double()


def _mixed(transport: str) -> None:
    init_gloo()
    ddp = wrapped(Mixed(), transport, gradient_as_bucket_view=True)
    for step in range(3):
        ddp.zero_grad()
        expected = mean_gradients(ddp.module, lambda it, rank, step=step: loss_of(it, rank, step))
        loss_of(ddp, dist.get_rank(), step).backward()
        for name, parameter in ddp.module.named_parameters():
            assert parameter.grad.dtype == parameter.dtype
            near = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 2e-2}[parameter.dtype]
            torch.testing.assert_close(parameter.grad, expected[name], rtol=near, atol=near)
            assert_same(parameter.grad)


@over_both
def test_parameters_of_several_dtypes_are_reduced_each_in_its_own(pool: Pool, transport: str) -> None:
    pool.run(_mixed, 2, transport)


class Phases(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.phase = nn.Parameter(torch.randn(5, dtype=torch.complex128))
        self.scale = nn.Parameter(torch.randn(5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = (x * self.phase * self.scale).abs()
        return out


def _phases(transport: str) -> None:
    init_gloo()
    ddp = wrapped(Phases(), transport)
    assert_steps(ddp)


@over_both
def test_complex_parameters_are_reduced(pool: Pool, transport: str) -> None:
    pool.run(_phases, 2, transport)


def _image_loss(model: nn.Module, rank: int) -> Tensor:
    out: Tensor = model(rows(rank, shape=(2, 3, 6, 6)).contiguous(memory_format=torch.channels_last))
    return out.square().mean()


def _strides(transport: str, arguments: dict[str, Any]) -> None:
    init_gloo()
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).to(
        memory_format=torch.channels_last
    )
    ddp = wrapped(model, transport, **arguments)
    expected = mean_gradients(model, _image_loss)
    for _ in range(3):
        ddp.zero_grad()
        _image_loss(ddp, dist.get_rank()).backward()
        assert_gradients(model, expected)
        for parameter in (model[0].weight, model[2].weight):
            assert parameter.grad.stride() == parameter.stride()
            assert parameter.grad.is_contiguous(memory_format=torch.channels_last)
            assert not parameter.grad.is_contiguous()


@over_both
@pytest.mark.parametrize("arguments", [{}, {"gradient_as_bucket_view": True}], ids=["copied", "views"])
def test_gradients_keep_the_strides_of_channels_last_weights(
    pool: Pool, arguments: dict[str, Any], transport: str
) -> None:
    pool.run(_strides, 2, transport, arguments)


class Turned(nn.Module):
    """A weight whose memory is that of its transpose, and whose gradient comes in the usual order."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5).t())

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bi,io->bo", x, self.weight).square()


def _turned(transport: str, arguments: dict[str, Any]) -> None:
    init_gloo()
    ddp = wrapped(Turned(), transport, **arguments)
    expected = mean_gradients(ddp.module)
    for _ in range(3):
        ddp.zero_grad()
        loss_of(ddp, dist.get_rank()).backward()
        assert_gradients(ddp.module, expected)
        assert ddp.module.weight.grad.stride() == ddp.module.weight.stride() == (1, 5)


@over_both
@pytest.mark.parametrize("arguments", [{}, {"gradient_as_bucket_view": True}], ids=["copied", "views"])
def test_gradients_have_their_parameters_strides(
    pool: Pool, arguments: dict[str, Any], transport: str
) -> None:
    pool.run(_turned, 2, transport, arguments)


def _meshes() -> None:
    init_gloo()
    whole = init_device_mesh("cpu", (2,))
    ddp = wrapped(Layers(), device_mesh=whole)
    assert ddp.process_group is whole.get_group()
    expected = mean_gradients(ddp.module)
    loss_of(ddp, dist.get_rank()).backward()
    assert_gradients(ddp.module, expected)
    with pytest.raises(RuntimeError, match="Cannot specify both process_group and device_mesh"):
        wrapped(Layers(), device_mesh=whole, process_group=dist.group.WORLD)
    with pytest.raises(RuntimeError, match="Only 1D device mesh is supported"):
        wrapped(Layers(), device_mesh=init_device_mesh("cpu", (2, 1)))


def test_a_mesh_of_one_dimension_names_the_group(pool: Pool) -> None:
    pool.run(_meshes, 2)


def _part_of_the_world(transport: str) -> None:
    """Ranks 0 and 2 have a model of their own, and so has rank 1."""
    init_gloo()
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1])]
    members = [1] if dist.get_rank() == 1 else [0, 2]
    ddp = wrapped(Layers(), transport, process_group=groups[dist.get_rank() == 1])
    for step in range(3):
        ddp.zero_grad()
        expected = mean_gradients(
            ddp.module, lambda it, place, step=step: loss_of(it, members[place], step), len(members)
        )
        loss_of(ddp, dist.get_rank(), step).backward()
        assert_gradients(ddp.module, expected)


@over_both
def test_a_group_may_be_a_part_of_the_world(pool: Pool, transport: str) -> None:
    pool.run(_part_of_the_world, 3, transport)


@PLAIT_ONLY
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_replicas_train_through_shared_memory(pool: Pool, ranks: int) -> None:
    pool.run(_trained, ranks, "host", {})


def _unnamed() -> None:
    """The program names no backend, and gets Gloo for the CPU."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.FileStore(f"{os.environ['PLAIT_RENDEZVOUS_FILE']}-unnamed", size)
    dist.init_process_group(store=store, rank=rank, world_size=size)
    torch.set_default_dtype(torch.float64)
    ddp = wrapped(Layers(), "host")
    assert_steps(ddp, 2)
    assert ddp._get_ddp_logging_data()["gloo_num_threads"] == 2


@PLAIT_ONLY
def test_ranks_share_memory_where_no_backend_is_named(pool: Pool) -> None:
    pool.run(_unnamed, 2)
