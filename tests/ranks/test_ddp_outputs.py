"""DistributedDataParallel: what a forward may return, and outputs that the loss leaves out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.ddp import assert_gradients, init_gloo, loss_of, mean_gradients, rows, wrapped
from support.pool import Pool


class Pair(NamedTuple):
    left: Tensor
    right: Any


@dataclass
class Result:
    loss: Tensor
    rest: Any


NESTS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], list[Tensor]]]] = {
    "tensor": (lambda a, b: a * b.sum(), lambda out: [out]),
    "list": (lambda a, b: [a, [b]], lambda out: [out[0], out[1][0]]),
    "tuple": (lambda a, b: (a, (b, "text")), lambda out: [out[0], out[1][0]]),
    "dict": (lambda a, b: {"a": a, "in": {"b": b}}, lambda out: [out["a"], out["in"]["b"]]),
    "named tuple": (lambda a, b: Pair(a, [b]), lambda out: [out.left, out.right[0]]),
    "nothing": (lambda a, b: {"a": a, "none": None, "b": b, "n": 3}, lambda out: [out["a"], out["b"]]),
    "dataclass": (lambda a, b: Result(a, b), lambda out: [out.loss, out.rest]),
}


class Nested(nn.Module):
    """Two heads, whose outputs are returned in a structure; a third is never used."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.left, self.right, self.spare = nn.Linear(5, 2), nn.Linear(5, 3), nn.Linear(5, 4)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        return NESTS[self.kind][0](self.left(x), self.right(x))


def _nested_loss(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    kind = getattr(model, "module", model).kind
    out = NESTS[kind][1](model(rows(rank, step)))
    return torch.stack([tensor.square().sum() for tensor in out]).sum()


def _nested(arguments: dict[str, Any]) -> None:
    init_gloo()
    # A static graph's outputs pass through torch's pytree, which does not look into dataclasses.
    for kind in NESTS if "find_unused_parameters" in arguments else [*NESTS][:-1]:
        ddp = wrapped(Nested(kind), **arguments)
        assert type(ddp(rows(0))) is type(ddp.module(rows(0)))
        for step in range(3):
            ddp.zero_grad()
            expected = mean_gradients(ddp.module, lambda it, rank, step=step: _nested_loss(it, rank, step))
            assert expected["spare.weight"] is None
            _nested_loss(ddp, dist.get_rank(), step).backward()
            assert_gradients(ddp.module, expected)


@pytest.mark.parametrize("arguments", [{"find_unused_parameters": True}, {"static_graph": True}], ids=str)
def test_outputs_are_found_in_nested_structures(pool: Pool, arguments: dict[str, Any]) -> None:
    pool.run(_nested, 2, arguments)


class Heads(nn.Module):
    """Two heads and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.left, self.right = nn.Linear(5, 6), nn.Linear(6, 2), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        hidden = self.trunk(x)
        with torch.no_grad():
            constant = hidden + 1
        return self.left(hidden), self.right(hidden), constant, torch.zeros(3, requires_grad=False)


def _left_out(arguments: dict[str, Any]) -> None:
    init_gloo()
    ddp = wrapped(Heads(), **arguments)

    def left_alone(model: nn.Module, rank: int) -> Tensor:
        return model(rows(rank))[0].square().mean()

    expected = mean_gradients(ddp.module, left_alone)
    assert expected["right.weight"] is None
    for _ in range(4):
        ddp.zero_grad()
        left_alone(ddp, dist.get_rank()).backward()
        assert_gradients(ddp.module, expected)


@pytest.mark.parametrize(
    "arguments",
    [{"find_unused_parameters": True}, {"find_unused_parameters": True, "gradient_as_bucket_view": True}],
    ids=["copied", "views"],
)
def test_the_gradients_of_an_output_that_the_loss_leaves_out_stay_none(
    pool: Pool, arguments: dict[str, Any]
) -> None:
    pool.run(_left_out, 2, arguments)


def _constants() -> None:
    init_gloo()
    for arguments in ({}, {"find_unused_parameters": True}, {"static_graph": True}):
        ddp = wrapped(Heads(), **arguments)
        _, right, constant, zeros = ddp(rows(dist.get_rank()))
        assert right.requires_grad
        assert not constant.requires_grad
        assert constant.grad_fn is None
        assert not zeros.requires_grad
        assert torch.equal(constant, ddp.module.trunk(rows(dist.get_rank())) + 1)


def test_outputs_without_gradient_come_back_as_they_are(pool: Pool) -> None:
    pool.run(_constants, 2)


class Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.nothing = nn.Linear(5, 7), nn.Parameter(torch.empty(0, 7))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x) + self.nothing.sum()
        return out


def _empty() -> None:
    init_gloo()
    ddp = wrapped(Empty())
    expected = mean_gradients(ddp.module)
    for _ in range(3):
        ddp.zero_grad()
        loss_of(ddp, dist.get_rank()).backward()
        assert_gradients(ddp.module, expected)
        assert ddp.module.nothing.grad.shape == (0, 7)


def test_a_parameter_without_elements_is_no_obstacle(pool: Pool) -> None:
    pool.run(_empty, 2)


def _changed_in_place() -> None:
    """The sink clones outputs, so a loss may change them in place; without clones it returns the tensor."""
    init_gloo()
    ddp = wrapped(Heads(), find_unused_parameters=True)

    def loss(model: nn.Module, rank: int) -> Tensor:
        left, right = model(rows(rank))[:2]
        return (left.square_().sum() + right.sum()) / 4

    expected = mean_gradients(ddp.module, loss)
    loss(ddp, dist.get_rank()).backward()
    assert_gradients(ddp.module, expected)
    ddp.zero_grad()
    ddp._set_ddp_sink_clone(False)

    def kept(model: nn.Module, rank: int) -> Tensor:
        return model(rows(rank))[0].square().sum()

    expected = mean_gradients(ddp.module, kept)
    kept(ddp, dist.get_rank()).backward()
    assert_gradients(ddp.module, expected)


def test_a_loss_may_change_outputs_in_place(pool: Pool) -> None:
    pool.run(_changed_in_place, 2)


def both_heads(model: nn.Module, rank: int) -> Tensor:
    left, right = model(rows(rank).requires_grad_())[:2]
    return left.square().mean() + right.square().mean()


def _hooked() -> None:
    """Hooks on the wrapper and on what it wraps, in forward and in backward."""
    init_gloo()
    seen: list[str] = []
    ddp = wrapped(Heads())
    expected = mean_gradients(ddp.module, both_heads)
    expected["trunk.weight"] *= 3
    ddp.register_forward_hook(lambda *_: seen.append("wrapper forward"))
    ddp.register_full_backward_hook(lambda *_: seen.append("wrapper backward"))
    ddp.module.trunk.register_forward_pre_hook(lambda *_: seen.append("trunk forward"))
    ddp.module.trunk.register_full_backward_hook(lambda *_: seen.append("trunk backward"))
    ddp.module.trunk.weight.register_hook(lambda gradient: gradient * 3)
    both_heads(ddp, dist.get_rank()).backward()
    assert seen == ["trunk forward", "wrapper forward", "trunk backward", "wrapper backward"]
    assert_gradients(ddp.module, expected)


def test_hooks_of_modules_and_tensors_run_around_the_reduction(pool: Pool) -> None:
    pool.run(_hooked, 2)
