"""DistributedDataParallel: communication hooks, what they are given, and what they may return."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future

from support.ddp import (
    Layers,
    assert_gradients,
    assert_same,
    init_gloo,
    loss_of,
    mean_gradients,
    over_both,
    wrapped,
)
from support.pool import Pool

Hook = Callable[[Any, dist.GradBucket], Future[Tensor]]


def _done(tensor: Tensor) -> Future[Tensor]:
    future: Future[Tensor] = Future()
    future.set_result(tensor)
    return future


def in_place(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    """The sum over ranks, in the bucket itself: by an asynchronous call, divided when it is over."""
    work = dist.all_reduce(bucket.buffer(), group=state, async_op=True)
    return work.get_future().then(lambda it: it.value()[0].div_(dist.get_world_size()))


def another(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    """The mean in memory of its own."""
    mean = bucket.buffer() / dist.get_world_size()
    dist.all_reduce(mean, group=state)
    return _done(mean)


def with_set_buffer(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    other = bucket.buffer().clone().div_(dist.get_world_size())
    bucket.set_buffer(other)
    assert bucket.buffer().data_ptr() == other.data_ptr()
    work = dist.all_reduce(bucket.buffer(), group=state, async_op=True)
    return work.get_future().then(lambda it: it.value()[0])


def of_gathered(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    """The mean of what all have gathered."""
    parts = [torch.empty_like(bucket.buffer()) for _ in range(dist.get_world_size())]
    work = dist.all_gather(parts, bucket.buffer(), group=state, async_op=True)
    return work.get_future().then(lambda _: torch.stack(parts).mean(0))


def chained(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    """Two communications, the second started by a callback of the first.

    The callback does not hold the process group: Gloo's thread, which frees the callback some time after its
    result is there, could be the last to free the group, and would then wait for its own end.
    """

    def again(future: Future[list[Tensor]]) -> Tensor:
        work = dist.all_reduce(future.value()[0], async_op=True)
        return work.get_future().wait()[0]

    work = dist.all_reduce(bucket.buffer(), group=state, async_op=True)
    twice = work.get_future().then(again)
    return twice.then(lambda it: it.value() / dist.get_world_size() ** 2)


HOOKS: dict[str, Hook] = {
    "in place": in_place,
    "another": another,
    "set_buffer": with_set_buffer,
    "gathered": of_gathered,
    "chained": chained,
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "batched": {"batched_grad_copy": True},
}


def _hooked(transport: str, name: str, arguments: dict[str, Any]) -> None:
    """In one bucket: two callbacks that communicate at a time would leave the order to chance."""
    group = init_gloo()
    ddp = wrapped(Layers(), transport, **arguments)
    ddp.register_comm_hook(group, HOOKS[name])
    for step in range(4):
        ddp.zero_grad(set_to_none=step < 2)
        expected = mean_gradients(ddp.module, lambda it, rank, step=step: loss_of(it, rank, step))
        loss_of(ddp, dist.get_rank(), step).backward()
        assert_gradients(ddp.module, expected)
        for parameter in ddp.parameters():
            assert_same(parameter.grad)


# What a callback starts is not in order with the message on what is unused.
CASES = [(name, way) for name in HOOKS for way in ARGUMENTS if (name, way) != ("chained", "unused")]


@over_both
@pytest.mark.parametrize(("name", "way"), CASES)
def test_a_hook_s_future_holds_the_gradients(pool: Pool, name: str, way: str, transport: str) -> None:
    pool.run(_hooked, 2, transport, name, ARGUMENTS[way])


class Recorded:
    """A hook that communicates nothing, and writes down what it is given."""

    def __init__(self) -> None:
        self.buckets: list[tuple[int, bool, list[tuple[int, ...]]]] = []
        self.buffers: list[Tensor] = []

    def hook(self, state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
        buffer = bucket.buffer()
        assert state == "state"
        assert buffer.dim() == 1
        parameters, gradients = bucket.parameters(), bucket.gradients()
        assert len(parameters) == len(gradients)
        assert buffer.numel() == sum(parameter.numel() for parameter in parameters)
        begin = 0
        for parameter, gradient in zip(parameters, gradients, strict=True):
            assert gradient.shape == parameter.shape
            assert gradient.data_ptr() == buffer[begin:].data_ptr()
            assert torch.equal(gradient.flatten(), buffer[begin : begin + parameter.numel()])
            begin += parameter.numel()
        self.buckets.append((bucket.index(), bucket.is_last(), [tuple(it.shape) for it in parameters]))
        self.buffers.append(buffer.clone())
        return _done(buffer)


def _given(arguments: dict[str, Any]) -> None:
    init_gloo()
    ddp = wrapped(Layers(), bucket_cap_mb=0.0001, **arguments)  # 104 bytes
    recorded = Recorded()
    ddp.register_comm_hook("state", recorded.hook)
    for _ in range(3):
        recorded.buckets.clear()
        recorded.buffers.clear()
        ddp.zero_grad()
        local = mean_gradients(ddp.module, lambda it, _: loss_of(it, dist.get_rank()), 1)
        loss_of(ddp, dist.get_rank()).backward()
        assert_gradients(ddp.module, local)  # neither summed nor divided by anyone
    shapes = [[(3,), (3, 7)], [(7,), (7, 5)]]  # once rebuilt, in the order in which gradients come
    assert recorded.buckets == [(0, False, shapes[0]), (1, True, shapes[1])]
    assert [*ddp.module.parameters()][2].shape == shapes[0][1]


@pytest.mark.parametrize("arguments", [{}, {"gradient_as_bucket_view": True}], ids=["copied", "views"])
def test_a_hook_is_given_undivided_buckets_in_order(pool: Pool, arguments: dict[str, Any]) -> None:
    pool.run(_given, 2, arguments)


def _identities() -> None:
    """The parameters of a bucket are those of the module; under no_sync no hook is called."""
    init_gloo()
    ddp = wrapped(Layers())
    seen: list[int] = []

    def hook(state: None, bucket: dist.GradBucket) -> Future[Tensor]:
        seen.extend(map(id, bucket.parameters()))
        return _done(bucket.buffer())

    ddp.register_comm_hook(None, hook)
    with ddp.no_sync():
        loss_of(ddp, 0).backward()
    assert not seen
    loss_of(ddp, 0).backward()
    assert {*seen} == {id(parameter) for parameter in ddp.parameters()}
    assert len(seen) == 4


def test_the_parameters_of_a_bucket_are_the_module_s(pool: Pool) -> None:
    pool.run(_identities, 2)


class Towers(nn.Module):
    """Three, of which a model in training uses the first, and one in evaluation the second."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Linear(5, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.towers[0 if self.training else 1](x)
        return out


def _unused_with_hook(transport: str) -> None:
    """Rank 0 uses the first tower and rank 1 the second; no rank the third."""
    group = init_gloo()
    ddp = wrapped(Towers(), transport, find_unused_parameters=True)
    ddp.register_comm_hook(group, default_hooks.allreduce_hook)

    def loss(model: nn.Module, rank: int, step: int = 0) -> Tensor:
        model.train(rank == 0)
        return loss_of(model, rank, step)

    for step in range(3):
        ddp.zero_grad()
        expected = mean_gradients(ddp.module, lambda it, rank, step=step: loss(it, rank, step))
        assert expected["towers.2.weight"] is None
        loss(ddp, dist.get_rank(), step).backward()
        assert_gradients(ddp.module, expected)


@over_both
def test_a_hook_leaves_the_gradients_of_unused_parameters_none(pool: Pool, transport: str) -> None:
    pool.run(_unused_with_hook, 2, transport)


def _accumulated(transport: str) -> None:
    group = init_gloo()
    ddp = wrapped(Layers(), transport)
    ddp.register_comm_hook(group, in_place)
    for _ in range(3):
        ddp.zero_grad()
        expected = mean_gradients(ddp.module, lambda it, rank: loss_of(it, rank, 0) + loss_of(it, rank, 1))
        with ddp.no_sync():
            loss_of(ddp, dist.get_rank(), 0).backward()
        loss_of(ddp, dist.get_rank(), 1).backward()
        assert_gradients(ddp.module, expected)


@over_both
def test_a_hook_reduces_accumulated_gradients(pool: Pool, transport: str) -> None:
    pool.run(_accumulated, 2, transport)


def _wrong_names(state: Any, gradients: dist.GradBucket) -> Future[Tensor]:
    return _done(gradients.buffer())


def _wrong_argument(state: Any, bucket: int) -> Future[Tensor]:
    raise AssertionError


def _wrong_result(state: Any, bucket: dist.GradBucket) -> int:
    raise AssertionError


def _annotated(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return _done(bucket.buffer())


def _bare(state, bucket):  # type: ignore[no-untyped-def]
    return _done(bucket.buffer())


def _registered() -> None:
    init_gloo()
    ddp = wrapped(Layers())
    with pytest.raises(TypeError, match=r"Communication hook must be callable\."):
        ddp.register_comm_hook(None, 3)
    with pytest.raises(KeyError, match="bucket"):
        ddp.register_comm_hook(None, _wrong_names)
    text = r"Communication hook: bucket annotation should be dist.GradBucket\."
    with pytest.raises(ValueError, match=text):
        ddp.register_comm_hook(None, _wrong_argument)
    text = r"Communication hook: return annotation should be torch.futures.Future\[torch.Tensor\]\."
    with pytest.raises(ValueError, match=text):
        ddp.register_comm_hook(None, _wrong_result)
    ddp.register_comm_hook(None, _annotated)
    text = r"register_comm_hook or register_builtin_comm_hook can only be called once\."
    with pytest.raises(RuntimeError, match=text):
        ddp.register_comm_hook(None, _bare)
    wrapped(Layers()).register_comm_hook(None, _bare)
    built_in = wrapped(Layers())
    built_in._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    text = r"register_(builtin_)?comm_hook or register_(builtin_)?comm_hook can only be called once"
    with pytest.raises(RuntimeError, match=text):
        built_in._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    with pytest.raises(RuntimeError, match=text):
        built_in.register_comm_hook(None, _bare)


def test_invalid_hooks_are_refused(pool: Pool) -> None:
    pool.run(_registered, 2)


def _no_future(state: Any, bucket: dist.GradBucket):  # type: ignore[no-untyped-def]
    return bucket.buffer()


def _raising(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    raise ZeroDivisionError("in the hook")


def _failing_future(state: Any, bucket: dist.GradBucket) -> Future[Tensor]:
    def fail(future: Future[Tensor]) -> Tensor:
        raise ZeroDivisionError("in the future")

    return _done(bucket.buffer()).then(fail)


def _failed() -> None:
    init_gloo()
    for hook, text in (
        (_no_future, r"callback must return a torch\.futures\.Future"),
        (_raising, "in the hook"),
        (_failing_future, "in the future"),
    ):
        ddp = wrapped(Layers())
        ddp.register_comm_hook(None, hook)
        with pytest.raises((RuntimeError, ZeroDivisionError), match=text):
            loss_of(ddp, dist.get_rank()).backward()


def test_errors_of_a_hook_come_out_of_backward(pool: Pool) -> None:
    pool.run(_failed, 2)


def _built_in(transport: str) -> None:
    init_gloo()
    for kind, near in (
        (dist.BuiltinCommHookType.ALLREDUCE, 1e-9),
        (dist.BuiltinCommHookType.FP16_COMPRESS, 1e-2),
    ):
        ddp = wrapped(Layers(), transport)
        ddp._register_builtin_comm_hook(kind)
        for step in range(3):
            ddp.zero_grad()
            expected = mean_gradients(ddp.module, lambda it, rank, step=step: loss_of(it, rank, step))
            loss_of(ddp, dist.get_rank(), step).backward()
            for name, parameter in ddp.module.named_parameters():
                torch.testing.assert_close(parameter.grad, expected[name], rtol=near, atol=near / 10)
                assert_same(parameter.grad)
        assert ddp._get_ddp_logging_data()["comm_hook"] == str(kind)


@over_both
def test_the_built_in_hooks(pool: Pool, transport: str) -> None:
    pool.run(_built_in, 2, transport)


def _logged() -> None:
    init_gloo()
    ddp = wrapped(Layers())
    assert ddp._get_ddp_logging_data().get("comm_hook") is None
    ddp.register_comm_hook(None, default_hooks.allreduce_hook)
    assert ddp._get_ddp_logging_data()["comm_hook"] == "allreduce_hook"


def test_the_name_of_a_hook_is_in_the_logging_data(pool: Pool) -> None:
    pool.run(_logged, 2)
