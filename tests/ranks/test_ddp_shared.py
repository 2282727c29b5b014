"""DistributedDataParallel: gradients that more than one is after: another wrapper, hooks, the program."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.ddp import assert_gradients, init_gloo, mean_gradients, over_both, rows, wrapped
from support.pool import Pool

WIDE = 150  # a weight of 180 KB


def _layers(count: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(5, WIDE), *(nn.Linear(WIDE, WIDE) for _ in range(count)))


def _loss(model: nn.Module, rank: int, step: int = 0) -> Tensor:
    out: Tensor = model(rows(rank, step))
    return out.square().mean()


def _nested(transport: str) -> None:
    """A wrapped module in a wrapped module; gradients are made again, and then kept in place."""
    init_gloo()
    plain = nn.Sequential(_layers(3), nn.Linear(WIDE, 3))
    inner = wrapped(plain[0], transport)
    outer = wrapped(nn.Sequential(inner, plain[1]), transport)
    for step in range(6):
        outer.zero_grad(set_to_none=step < 3)
        expected = mean_gradients(plain, lambda it, rank, step=step: _loss(it, rank, step))
        _loss(outer, dist.get_rank(), step).backward()
        assert_gradients(plain, expected)


@over_both
def test_a_wrapped_module_in_a_wrapped_module_has_the_mean_once(pool: Pool, transport: str) -> None:
    pool.run(_nested, 2, transport)


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(20, 4, sparse=True)
        self.used, self.spare = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, index: Tensor) -> Tensor:
        out: Tensor = self.used(self.rows(index))
        return out


def _joined_sparse(transport: str) -> None:
    """A rank that has joined takes part in sums of rows and in the map of unused parameters."""
    init_gloo()
    rank = dist.get_rank()
    ddp = wrapped(Sparse(), transport, find_unused_parameters=True)
    with ddp.join():
        for step in range(2 + 2 * rank):
            ddp.zero_grad()
            ddp(torch.tensor([step, rank])).square().sum().backward()
            assert ddp.module.rows.weight.grad.is_sparse
            assert ddp.module.spare.weight.grad is None
    for parameter in ddp.parameters():
        gathered = [torch.empty_like(parameter) for _ in range(2)]
        dist.all_gather(gathered, parameter.detach())
        assert torch.equal(*gathered)


@over_both
def test_sparse_gradients_and_unused_parameters_go_together_in_join(pool: Pool, transport: str) -> None:
    pool.run(_joined_sparse, 2, transport)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x: Tensor, both: bool) -> Tensor:
        x = self.first(x)
        return self.second(x) if both else x


def _preset(transport: str) -> None:
    """The program's own tensors are gradients; one rank does not use some of the parameters."""
    init_gloo()
    ddp = wrapped(Branches(), transport, find_unused_parameters=True)
    expected = mean_gradients(ddp.module, lambda it, rank: it(rows(rank), rank == 0).square().mean())
    own = [torch.zeros_like(parameter) for parameter in ddp.parameters()]
    for parameter, gradient in zip(ddp.parameters(), own, strict=True):
        parameter.grad = gradient
    rank = dist.get_rank()
    ddp(rows(rank), rank == 0).square().mean().backward()
    assert_gradients(ddp.module, expected)
    for parameter, gradient in zip(ddp.parameters(), own, strict=True):
        assert parameter.grad is gradient


@over_both
def test_a_tensor_that_the_program_has_put_there_gets_the_mean(pool: Pool, transport: str) -> None:
    pool.run(_preset, 2, transport)


def _seen_by_hooks(transport: str) -> None:
    init_gloo()
    ddp = wrapped(_layers(1), transport)
    seen: dict[int, Tensor] = {}
    for parameter in ddp.parameters():
        parameter.register_post_accumulate_grad_hook(lambda it: seen.__setitem__(id(it), it.grad))
    for step in range(3):
        ddp.zero_grad()
        expected = mean_gradients(_copy_of(ddp.module), lambda it, rank, step=step: _loss(it, rank, step))
        _loss(ddp, dist.get_rank(), step).backward()
        assert_gradients(ddp.module, expected)
        assert all(seen[id(parameter)] is parameter.grad for parameter in ddp.parameters())


def _copy_of(module: nn.Module) -> nn.Module:
    copied = _layers(1)
    copied.load_state_dict(module.state_dict())
    return copied


@over_both
def test_a_gradient_that_a_hook_has_seen_gets_the_mean(pool: Pool, transport: str) -> None:
    pool.run(_seen_by_hooks, 2, transport)
