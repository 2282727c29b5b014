"""DistributedDataParallel: whose memory a gradient is, in place and as a view of its bucket; sparse ones."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from support.ddp import (
    Layers,
    assert_gradients,
    assert_same,
    assert_steps,
    gradients,
    init_gloo,
    loss_of,
    mean_gradients,
    over_both,
    rows,
    wrapped,
)
from support.pool import Pool

VIEWS: dict[str, dict[str, Any]] = {
    "copied": {},
    "copied in batches": {"batched_grad_copy": True},
    "views": {"gradient_as_bucket_view": True},
}
in_all_ways = pytest.mark.parametrize("way", VIEWS)


def _views(transport: str) -> None:
    init_gloo()
    ddp = wrapped(Layers(), transport, gradient_as_bucket_view=True)
    expected = mean_gradients(ddp.module)
    parameters = [*ddp.parameters()]
    for _ in range(3):
        loss_of(ddp, dist.get_rank()).backward()
        assert_gradients(ddp.module, expected)
        storages = {parameter.grad.untyped_storage().data_ptr() for parameter in parameters}
        assert len(storages) == 1, "gradients are not in one bucket"
        assert parameters[0].grad._base is not None
        ddp.zero_grad()
    loss_of(ddp, dist.get_rank()).backward()
    before = parameters[0].grad.data_ptr()
    ddp.zero_grad(set_to_none=False)
    assert not bool(parameters[0].grad.any())
    loss_of(ddp, dist.get_rank()).backward()
    assert parameters[0].grad.data_ptr() == before
    assert_gradients(ddp.module, expected)


@over_both
def test_a_gradient_is_a_view_of_the_bucket_and_becomes_one_again_after_none(
    pool: Pool, transport: str
) -> None:
    pool.run(_views, 2, transport)


def _detached(transport: str, views: bool) -> None:
    init_gloo()
    ddp = wrapped(Layers(), transport, gradient_as_bucket_view=views)
    for _ in range(3):
        loss_of(ddp, dist.get_rank()).backward()
        for parameter in ddp.parameters():
            if views:
                with pytest.raises(RuntimeError, match="Can't detach views in-place"):
                    parameter.grad.detach_()
            else:
                parameter.grad.detach_()
                assert parameter.grad._base is None
        ddp.zero_grad()


@over_both
@pytest.mark.parametrize("views", [False, True])
def test_only_views_refuse_to_be_detached(pool: Pool, views: bool, transport: str) -> None:
    pool.run(_detached, 2, transport, views)


def _kept(transport: str, arguments: dict[str, Any]) -> None:
    init_gloo()
    ddp = wrapped(Layers(), transport, **arguments)
    held: list[tuple[list[Tensor], dict[str, Tensor | None]]] = []
    for step in range(4):
        expected = mean_gradients(ddp.module, lambda it, rank, step=step: loss_of(it, rank, step))
        loss_of(ddp, dist.get_rank(), step).backward()
        assert_gradients(ddp.module, expected)
        held.append(([parameter.grad for parameter in ddp.parameters()], gradients(ddp.module)))
        ddp.zero_grad(set_to_none=True)
    for kept, values in held:
        for gradient, value in zip(kept, values.values(), strict=True):
            assert torch.equal(gradient, value), "a later step wrote into a gradient that the user holds"


@over_both
@pytest.mark.parametrize("way", ["copied", "copied in batches"])
def test_a_gradient_that_the_user_keeps_is_not_written_to_by_later_steps(
    pool: Pool, way: str, transport: str
) -> None:
    pool.run(_kept, 2, transport, VIEWS[way])


def _preset(transport: str, arguments: dict[str, Any]) -> None:
    """Gradients that the user has set are added to, in place."""
    init_gloo()
    ddp = wrapped(Layers(), transport, **arguments)
    expected = mean_gradients(ddp.module)
    for _ in range(3):
        ours = [torch.ones_like(parameter) for parameter in ddp.parameters()]
        for parameter, gradient in zip(ddp.parameters(), ours, strict=True):
            parameter.grad = gradient
        loss_of(ddp, dist.get_rank()).backward()
        assert_gradients(ddp.module, {name: 1 + gradient for name, gradient in expected.items()})
        for parameter, gradient in zip(ddp.parameters(), ours, strict=True):
            if not arguments.get("gradient_as_bucket_view"):
                assert parameter.grad is gradient


@over_both
@in_all_ways
def test_a_gradient_that_the_user_has_set_is_added_to(pool: Pool, way: str, transport: str) -> None:
    pool.run(_preset, 2, transport, VIEWS[way])


def _different_presets(transport: str, arguments: dict[str, Any]) -> None:
    """The value in .grad is averaged with the rest: it is this rank's part of the sum."""
    init_gloo()
    ddp = wrapped(Layers(), transport, **arguments)
    expected = mean_gradients(ddp.module)
    for parameter in ddp.parameters():
        parameter.grad = torch.full_like(parameter, float(dist.get_rank()))
    loss_of(ddp, dist.get_rank()).backward()
    assert_gradients(ddp.module, {name: 0.5 + gradient for name, gradient in expected.items()})


@over_both
@in_all_ways
def test_a_gradient_set_before_backward_is_averaged_with_the_new_one(
    pool: Pool, way: str, transport: str
) -> None:
    pool.run(_different_presets, 2, transport, VIEWS[way])


def _zeroed(transport: str, arguments: dict[str, Any]) -> None:
    init_gloo()
    ddp = wrapped(Layers(), transport, **arguments)
    sums = [torch.zeros_like(parameter) for parameter in ddp.parameters()]
    identities: list[int] = []
    for step in range(6):
        if step in (2, 4):
            ddp.zero_grad(set_to_none=step == 4)
            sums = [torch.zeros_like(parameter) for parameter in ddp.parameters()]
        expected = mean_gradients(ddp.module, lambda it, rank, step=step: loss_of(it, rank, step))
        loss_of(ddp, dist.get_rank(), step).backward()
        for parameter, so_far, gradient in zip(ddp.parameters(), sums, expected.values(), strict=True):
            so_far += gradient
            torch.testing.assert_close(parameter.grad, so_far, rtol=1e-9, atol=1e-12)
        identities.append(next(ddp.parameters()).grad.data_ptr())
    assert len({*identities[1:4]}) == 1, (
        "a gradient in use has moved"
    )  # the first may precede the new buckets


@over_both
@in_all_ways
def test_gradients_accumulate_until_they_are_zeroed_in_place_or_set_to_none(
    pool: Pool, way: str, transport: str
) -> None:
    pool.run(_zeroed, 2, transport, VIEWS[way])


def _replaced(transport: str, arguments: dict[str, Any]) -> None:
    """Between steps the user scales, replaces and drops gradients."""
    init_gloo()
    ddp = wrapped(Layers(), transport, **arguments)
    expected = mean_gradients(ddp.module)
    weight = ddp.module.first.weight
    for _ in range(3):
        loss_of(ddp, dist.get_rank()).backward()
        weight.grad = weight.grad.clone() * 2
        assert torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1e-3) > 1e-3
        loss_of(ddp, dist.get_rank()).backward()
        clipped = {n: gradients(ddp.module)[n] - expected[n] for n in expected}
        norm = torch.stack([gradient.norm() for gradient in clipped.values()]).norm()
        assert abs(norm - 1e-3) < 1e-8
        weight.grad = None
        ddp.module.last.bias.grad = None
        loss_of(ddp, dist.get_rank()).backward()
        torch.testing.assert_close(weight.grad, expected["first.weight"], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(ddp.module.last.bias.grad, expected["last.bias"], rtol=1e-9, atol=1e-12)
        ddp.zero_grad()


@over_both
@in_all_ways
def test_gradients_may_be_scaled_replaced_and_dropped_between_steps(
    pool: Pool, way: str, transport: str
) -> None:
    pool.run(_replaced, 2, transport, VIEWS[way])


class Words(nn.Module):
    """Embeddings with sparse gradients, before a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 5, sparse=True)
        self.bags = nn.EmbeddingBag(20, 5, sparse=True, mode="sum")
        self.layer = nn.Linear(5, 3)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.layer(self.words(ids).sum(1) + self.bags(ids))
        return out


def _ids(rank: int, step: int) -> Tensor:
    return torch.randint(0, 20, (4, 3), generator=torch.Generator().manual_seed(10 * step + rank))


def _sparse(transport: str, arguments: dict[str, Any]) -> None:
    init_gloo()
    ddp = wrapped(Words(), transport, **arguments)
    for step in range(4):
        ddp.zero_grad()

        def loss(model: nn.Module, rank: int, step: int = step) -> Tensor:
            return model(_ids(rank, step)).square().mean()

        expected = mean_gradients(ddp.module, loss)
        loss(ddp, dist.get_rank()).backward()
        for name, parameter in ddp.module.named_parameters():
            assert parameter.grad.is_sparse == (not name.startswith("layer"))
            dense, wanted = (it.to_dense() if it.is_sparse else it for it in (parameter.grad, expected[name]))
            torch.testing.assert_close(dense, wanted, rtol=1e-9, atol=1e-12)
            assert_same(dense)


@over_both
@pytest.mark.parametrize("arguments", [{}, {"gradient_as_bucket_view": True}], ids=["copied", "views"])
def test_gradients_of_sparse_embeddings_stay_sparse(
    pool: Pool, arguments: dict[str, Any], transport: str
) -> None:
    pool.run(_sparse, 2, transport, arguments)


def _sparse_optimizer(transport: str) -> None:
    init_gloo()
    ddp = wrapped(nn.Embedding(20, 5, sparse=True), transport)
    alone = nn.Embedding(20, 5, sparse=True)
    alone.load_state_dict(ddp.module.state_dict())
    optimizers = [torch.optim.SparseAdam([*model.parameters()], lr=0.1) for model in (ddp, alone)]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        ddp(_ids(dist.get_rank(), step)).square().mean().backward()
        torch.stack([alone(_ids(rank, step)).square().mean() for rank in range(2)]).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
    torch.testing.assert_close(ddp.module.weight, alone.weight, rtol=1e-9, atol=1e-9)
    assert_same(ddp.module.weight)


@over_both
def test_sparse_adam_trains_the_same(pool: Pool, transport: str) -> None:
    pool.run(_sparse_optimizer, 2, transport)


def _large(arguments: dict[str, Any]) -> None:
    """Parameters of 3 MB in several buckets: copies and sums of more than one round."""
    init_gloo()
    ddp = wrapped(nn.Sequential(*(nn.Linear(350, 350) for _ in range(4))), bucket_cap_mb=1, **arguments)

    def loss(model: nn.Module, rank: int, step: int = 0) -> Tensor:
        return model(rows(rank, step, (3, 350))).square().mean()

    assert_steps(ddp, loss=loss)


@in_all_ways
def test_large_parameters_in_several_buckets(pool: Pool, way: str) -> None:
    pool.run(_large, 3, VIEWS[way])
