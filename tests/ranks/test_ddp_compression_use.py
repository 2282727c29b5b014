"""DistributedDataParallel with compressed gradients: in training, with other features; what is refused."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

import plait
from plait.comm import CompressedReduce
from plait.errors import CommError, DDPError
from plait.parallel.ddp import Compression, compression_hook
from plait.parallel.ddp.bucket import GradBucket
from support.ddp import Layers, assert_same, init_gloo, over_both, rows
from support.ddp_compression import KINDS, compressed, loss32, mean_by_one, model_of_blocks, worst_error
from support.pool import Pool

# --- how it is used


def _trained(kind: str, transport: str, arguments: dict[str, Any]) -> None:
    init_gloo()
    torch.manual_seed(0)
    teacher, model = model_of_blocks(), model_of_blocks()
    ddp = compressed(model, kind, transport, bucket_cap_mb=0.0004, **arguments)
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
    losses = []
    for step in range(60):
        x = rows(dist.get_rank(), step, (32, 5)).float()
        optimizer.zero_grad()
        loss = (ddp(x) - teacher(x).detach()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert sum(losses[-10:]) < 0.25 * sum(losses[:10])
    for parameter in ddp.parameters():
        assert_same(parameter)


WAYS: list[dict[str, Any]] = [
    {},
    {"gradient_as_bucket_view": True},
    {"find_unused_parameters": True},
    {"static_graph": True},
]


@over_both
@pytest.mark.parametrize("arguments", WAYS, ids=["plain", "views", "unused", "static"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_learns_and_stays_the_same_on_all_ranks(
    pool: Pool, kind: str, arguments: dict[str, Any], transport: str
) -> None:
    pool.run(_trained, 2, kind, transport, arguments)


def _accumulated(kind: str, transport: str) -> None:
    init_gloo()
    ddp = compressed(model_of_blocks(), kind, transport)
    for _ in range(3):
        ddp.zero_grad()
        first, second = mean_by_one(ddp.module, 0), mean_by_one(ddp.module, 1)
        with ddp.no_sync():
            loss32(ddp, dist.get_rank(), 0).backward()
        loss32(ddp, dist.get_rank(), 1).backward()
        assert worst_error(ddp.module, {name: first[name] + second[name] for name in first}) < 0.05


@over_both
@pytest.mark.parametrize("kind", ["bf16", "fp16", "int8", "powersgd:8"])
def test_accumulated_gradients_are_compressed(pool: Pool, kind: str, transport: str) -> None:
    pool.run(_accumulated, 2, kind, transport)


def _uneven(kind: str, transport: str) -> None:
    """Rank 1 has one batch less, and takes part with zeros: the mean is over all ranks."""
    init_gloo()
    ddp = compressed(model_of_blocks(), kind, transport, bucket_cap_mb=0.0004)
    with ddp.join():
        for step in range(3 - dist.get_rank()):
            ddp.zero_grad()
            alone = torch.autograd.grad(loss32(ddp.module, 0, step), [*ddp.module.parameters()])
            loss32(ddp, dist.get_rank(), step).backward()
            if step == 2:
                for parameter, gradient in zip(ddp.module.parameters(), alone, strict=True):
                    near = 0.1 * float(gradient.abs().max())
                    torch.testing.assert_close(parameter.grad, gradient / 2, rtol=0, atol=near)


@over_both
@pytest.mark.parametrize("kind", ["bf16", "fp16", "int8"])
def test_a_rank_that_has_joined_takes_part(pool: Pool, kind: str, transport: str) -> None:
    pool.run(_uneven, 2, kind, transport)


def _two_models(kind: str, transport: str) -> None:
    """In one backward, over one process group."""
    init_gloo()
    models = [compressed(model_of_blocks(), kind, transport, bucket_cap_mb=0.0004) for _ in range(2)]
    first, second = (ddp._attached.group_with_comm_thread.comm_thread for ddp in models)
    assert first is second  # or the two would talk at the same time, in an order of their own on each rank
    for step in range(5):
        expected = [mean_by_one(ddp.module, step) for ddp in models]
        for ddp in models:
            ddp.zero_grad()
        torch.stack([loss32(ddp, dist.get_rank(), step) for ddp in models]).sum().backward()
        for ddp, mean in zip(models, expected, strict=True):
            assert worst_error(ddp.module, mean) < 0.1


@over_both
@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_two_models_share_a_backward(pool: Pool, kind: str, transport: str) -> None:
    pool.run(_two_models, 2, kind, transport)


def _given_up(kind: str, transport: str) -> None:
    """A backward that fails after its first bucket does not disturb the next one."""
    init_gloo()
    ddp = compressed(model_of_blocks(), kind, transport, bucket_cap_mb=0.0004)
    for step in range(4):
        ddp.zero_grad()
        expected = mean_by_one(ddp.module, step)
        if step == 2:
            x = rows(dist.get_rank(), step).float()
            handle = ddp.module[0].register_full_backward_pre_hook(_raise)
            with pytest.raises(ZeroDivisionError):
                ddp(x).square().mean().backward()
            handle.remove()
            ddp.reducer._reset_state()
            continue
        loss32(ddp, dist.get_rank(), step).backward()
        assert worst_error(ddp.module, expected) < 0.1


def _raise(*_: object) -> None:
    raise ZeroDivisionError


@over_both
@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_a_backward_that_is_given_up_leaves_the_next_one_alone(pool: Pool, kind: str, transport: str) -> None:
    pool.run(_given_up, 2, kind, transport)


def _wrapped_in_another(state: Compression, bucket: GradBucket) -> Future[Tensor]:
    return compression_hook(state, bucket).then(lambda it: it.value() * 2.0)


def _chained(transport: str) -> None:
    init_gloo()
    ddp = plait.DistributedDataParallel(model_of_blocks(), transport=transport)
    ddp.register_comm_hook(Compression(ddp, "fp16"), _wrapped_in_another)
    expected = {name: 2.0 * gradient for name, gradient in mean_by_one(ddp.module).items()}
    loss32(ddp, dist.get_rank()).backward()
    assert worst_error(ddp.module, expected) < 2**-10


@over_both
def test_the_hook_s_future_can_be_gone_on_from(pool: Pool, transport: str) -> None:
    pool.run(_chained, 2, transport)


def _alone(kind: str) -> None:
    init_gloo()
    ddp = compressed(model_of_blocks(), kind, "auto")
    for step in range(3):
        ddp.zero_grad()
        expected = mean_by_one(ddp.module, step)
        loss32(ddp, 0, step).backward()
        assert worst_error(ddp.module, expected) < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_on_one_rank_nothing_is_lost(pool: Pool, kind: str) -> None:
    pool.run(_alone, 1, kind)


# --- what is refused


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 4, sparse=True)


def _refused() -> None:
    init_gloo()
    ddp = plait.DistributedDataParallel(Layers().float())
    for kind in ("int9", "fp32", "powersgd:0", "INT8", 8):
        with pytest.raises(DDPError, match="unknown compression of gradients"):
            Compression(ddp, kind)  # type: ignore[arg-type]
    for dtype in (torch.float64, torch.bfloat16):
        other = plait.DistributedDataParallel(Layers().to(dtype))
        with pytest.raises(DDPError, match="cannot compress gradients that are not float32") as caught:
            Compression(other, "int8")
        assert str(dtype).removeprefix("torch.") in str(caught.value)
    with pytest.raises(DDPError, match="cannot compress sparse gradients"):
        Compression(plait.DistributedDataParallel(Embedded().float()), "int8")
    with pytest.raises(DDPError, match=r"another DistributedDataParallel\n  given   : a torch\.nn"):
        Compression(nn.parallel.DistributedDataParallel(Layers().float()), "int8")


def test_incompressible_models_are_refused_before_training(pool: Pool) -> None:
    pool.run(_refused, 2)


def _failed(transport: str) -> None:
    """A sum in the background that cannot be begun, on all ranks."""
    init_gloo()
    ddp = plait.DistributedDataParallel(model_of_blocks(), transport=transport)
    state = Compression(ddp, "int8")
    ddp.register_comm_hook(state, compression_hook)
    loss32(ddp, dist.get_rank()).backward()
    out = ddp(rows(dist.get_rank()).float())  # buckets are rebuilt
    state._begin()
    compressor = state._reductions[0].compressor
    assert isinstance(compressor, CompressedReduce)
    (message,) = compressor._messages
    compressor._messages = [replace(message, received=message.received[:1])]
    with pytest.raises(CommError, match="the tensors of all-to-all have mismatched sizes"):
        out.square().mean().backward()
    with pytest.raises(CommError, match="the tensors of all-to-all have mismatched sizes"):
        loss32(ddp, dist.get_rank()).backward()  # ranks may be at different calls by now


@over_both
def test_an_error_of_a_sum_comes_out_of_backward_and_is_the_last(pool: Pool, transport: str) -> None:
    pool.run(_failed, 2, transport)
