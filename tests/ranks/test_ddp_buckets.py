"""DistributedDataParallel: how parameters are assigned to buckets, as a communication hook sees them."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from support.ddp import PLAIT_ONLY, assert_gradients, init_gloo, mean_gradients, over_both, rows, wrapped
from support.pool import Pool

Layout = list[list[int]]  # by bucket, the places of its parameters in the module


class Scales(nn.Module):
    """Parameters of given numbers of elements, used in a given order. Gradients come in its reverse."""

    def __init__(self, sizes: list[int], order: list[int] | None = None, dtypes: str = "") -> None:
        super().__init__()
        kinds = {"s": torch.float32, "d": torch.float64}
        self.scales = nn.ParameterList(
            torch.ones(size, dtype=kinds[kind])
            for size, kind in zip(sizes, dtypes or "s" * len(sizes), strict=True)
        )
        self.order = order or [*range(len(sizes))]

    def forward(self, x: Tensor, order: list[int] | None = None) -> Tensor:
        out = x.sum().double()
        for number in order or self.order:
            out = torch.tanh(out * self.scales[number].double().sum() / self.scales[number].numel() + 0.1)
        return out


def _layouts(module: Scales, steps: int, arguments: dict[str, Any], cap: float | None) -> list[Layout]:
    """Layouts of every step's buckets. `cap`: a bucket's limit in KiB."""
    if cap is not None:
        arguments = {"bucket_cap_mb": cap / 1024} | arguments
    ddp = wrapped(module, **arguments)
    places = {id(parameter): place for place, parameter in enumerate(module.parameters())}
    layout: Layout = []

    def hook(state: None, bucket: dist.GradBucket) -> Future[Tensor]:
        assert bucket.index() == len(layout)
        layout.append([places[id(parameter)] for parameter in bucket.parameters()])
        future: Future[Tensor] = Future()
        future.set_result(bucket.buffer())
        return future

    ddp.register_comm_hook(None, hook)
    found = []
    for _ in range(steps):
        layout.clear()
        ddp.zero_grad()
        ddp(rows(0)).backward()
        found.append([*layout])
    return found


@dataclass(frozen=True)
class Case:
    """Sizes and cap in KiB (None: torch's); the layouts of the first, the second and the third step."""

    layouts: tuple[Layout, Layout, Layout]
    kibibytes: tuple[float, ...] = (1, 1, 1, 1)
    order: tuple[int, ...] = ()
    dtypes: str = ""
    cap: float | None = 2
    arguments: dict[str, Any] = field(default_factory=dict)


def rebuilt(first: Layout, then: Layout) -> tuple[Layout, Layout, Layout]:
    return first, then, then


PAIRS = [[2, 3], [0, 1]]  # of four, the last ones first
UNUSED = {"find_unused_parameters": True}
BIG = (1100, 600, 600, 600, 30000)
CASES: dict[str, Case] = {
    "a bucket closes when it reaches the cap": Case(rebuilt(PAIRS, [[3, 2], [1, 0]])),
    "and not before": Case(rebuilt(PAIRS, [[3, 2], [1, 0]]), cap=1.5),
    "each its own": Case(rebuilt([[3], [2], [1], [0]], [[3], [2], [1], [0]]), cap=1),
    "one that overshoots": Case(rebuilt([[2, 3], [0, 1]], [[3, 2, 1], [0]]), (0.04, 8, 0.04, 0.04)),
    "in the order in which gradients come": Case(rebuilt(PAIRS, [[1, 3], [0, 2]]), order=(2, 0, 3, 1)),
    "unused: from the start, and for good": Case(rebuilt(PAIRS, PAIRS), order=(2, 0, 3, 1), arguments=UNUSED),
    "static: a step later": Case(
        (PAIRS, PAIRS, [[1, 3], [0, 2]]), order=(2, 0, 3, 1), arguments={"static_graph": True}
    ),
    "by dtype": Case(rebuilt([[3], [1], [0, 2]], [[3], [1], [2, 0]]), dtypes="sdsd"),
    "by dtype, six": Case(
        rebuilt([[5], [4], [3], [1], [0, 2]], [[5], [3], [4, 2], [1], [0]]), (1,) * 6, dtypes="sdsdsd"
    ),
    "by dtype, unused": Case(
        rebuilt([[5], [4], [3], [1], [0, 2]], [[5], [4], [3], [1], [0, 2]]),
        (1,) * 6,
        dtypes="sdsdsd",
        arguments=UNUSED,
    ),
    "a list of caps": Case(
        rebuilt([[4, 5], [1, 2, 3], [0]], [[5], [4, 3, 2], [1, 0]]),
        (1,) * 6,
        arguments={"bucket_cap_mb_list": [1 / 1024, 3 / 1024]},
    ),
    "a list of caps, in order": Case(
        rebuilt([[5], [3, 4], [1, 2], [0]], [[5], [4, 0], [2, 1], [3]]),
        (1,) * 6,
        (3, 1, 2, 0, 4, 5),
        arguments={"bucket_cap_mb_list": [1 / 1024, 2 / 1024]},
    ),
    "a list of caps by dtype": Case(
        rebuilt([[3, 5], [2, 4], [1], [0]], [[5], [4], [3, 1], [2, 0]]),
        (1,) * 6,
        dtypes="sdsdsd",
        arguments={"bucket_cap_mb_list": [1 / 1024, 3 / 1024]},
    ),
    "small ones are one bucket": Case(rebuilt([[0, 1, 2, 3]], [[3, 2, 1, 0]]), cap=None),
    "the first of 1 MiB": Case(rebuilt([[1, 2, 3, 4], [0]], [[4], [3, 2, 1, 0]]), BIG, cap=None),
    "the first of 1 MiB, unused": Case(
        rebuilt([[1, 2, 3, 4], [0]], [[1, 2, 3, 4], [0]]), BIG, cap=None, arguments=UNUSED
    ),
}


def _assigned(transport: str, name: str) -> None:
    init_gloo()
    case = CASES[name]
    sizes = [round(256 * size) for size in case.kibibytes]
    arguments = case.arguments | {"transport": transport}
    found = _layouts(Scales(sizes, [*case.order], case.dtypes), 4, arguments, case.cap)
    assert found == [*case.layouts, case.layouts[-1]], found


@PLAIT_ONLY
@pytest.mark.parametrize("name", CASES)
def test_buckets_follow_the_parameters_at_first_and_then_the_order_of_their_gradients(
    pool: Pool, name: str
) -> None:
    pool.run(_assigned, 2, "auto", name)


def _rank_0s_order() -> None:
    """Ranks use the parameters in different orders."""
    init_gloo()
    order = [[2, 0, 3, 1], [0, 1, 2, 3]][dist.get_rank()]
    found = _layouts(Scales([256] * 4, order), 3, {}, 2)
    assert found == [PAIRS, [[1, 3], [0, 2]], [[1, 3], [0, 2]]], found


@PLAIT_ONLY
def test_all_ranks_take_the_order_of_rank_0(pool: Pool) -> None:
    pool.run(_rank_0s_order, 2)


def _other_orders(transport: str, arguments: dict[str, Any]) -> None:
    """Gradients come in another order on each rank and in each step: buckets start in theirs."""
    init_gloo()
    orders = [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]]
    ddp = wrapped(Scales([256] * 4, dtypes="d" * 4), transport, bucket_cap_mb=0.001, **arguments)
    for step in range(5):
        ddp.zero_grad()

        def loss(model: nn.Module, rank: int, step: int = step) -> Tensor:
            out: Tensor = model(rows(rank, step), orders[(rank + step) % 3])
            return out

        expected = mean_gradients(ddp.module, loss)
        loss(ddp, dist.get_rank()).backward()
        assert_gradients(ddp.module, expected)


@over_both
@pytest.mark.parametrize(
    "arguments", [{}, UNUSED, {"static_graph": True}, {"gradient_as_bucket_view": True}], ids=str
)
def test_gradients_may_come_in_any_order(pool: Pool, arguments: dict[str, Any], transport: str) -> None:
    pool.run(_other_orders, 3, transport, arguments)


def _when_rebuilt() -> None:
    """Not after a step under no_sync, nor after a forward without backward; and only once."""
    init_gloo()
    ddp = wrapped(Scales([256] * 4), bucket_cap_mb=1 / 1024)
    assert not ddp._has_rebuilt_buckets
    with ddp.no_sync():
        ddp(rows(0)).backward()
        ddp(rows(0)).backward()
    ddp(rows(0))
    ddp(rows(0))
    assert not ddp._has_rebuilt_buckets
    ddp(rows(0)).backward()
    assert not ddp._has_rebuilt_buckets
    with torch.no_grad():
        ddp(rows(0))
    assert not ddp._has_rebuilt_buckets
    ddp(rows(0), [3, 2, 1, 0]).backward()
    assert ddp._has_rebuilt_buckets
    ddp(rows(0)).backward()
    logged = ddp._get_ddp_logging_data()  # of the latest forward
    assert logged["has_rebuilt_buckets"] == 1
    assert logged["bucket_sizes"] == "1024, 1024, 1024, 1024"
    assert logged["rebuilt_bucket_sizes"] == "1024, 1024, 1024, 1024"
    assert logged["rebuilt_per_bucket_param_indices"] == "3, 2, 1, 0"
    assert logged["num_buckets_reduced"] == 4


@PLAIT_ONLY
def test_buckets_are_rebuilt_once_before_the_forward_that_follows_a_synchronised_backward(
    pool: Pool,
) -> None:
    pool.run(_when_rebuilt, 2)


def _grown(transport: str, arguments: dict[str, Any]) -> None:
    """Gradients in the memory of the first buckets are used until the new buckets are there, and after."""
    init_gloo()
    ddp = wrapped(Scales([300, 200, 1, 500], dtypes="dddd"), transport, bucket_cap_mb=0.001, **arguments)
    sums = [torch.zeros_like(parameter) for parameter in ddp.parameters()]
    for step in range(4):  # never zeroed
        expected = mean_gradients(ddp.module, lambda it, rank, step=step: it(rows(rank, step)))
        ddp(rows(dist.get_rank(), step)).backward()
        for so_far, gradient in zip(sums, expected.values(), strict=True):
            so_far += gradient
        for parameter, so_far in zip(ddp.parameters(), sums, strict=True):
            torch.testing.assert_close(parameter.grad, so_far, rtol=1e-9, atol=1e-12)


@over_both
@pytest.mark.parametrize("arguments", [{}, {"gradient_as_bucket_view": True}], ids=["copied", "views"])
def test_gradients_outlive_the_buckets_that_they_began_in(
    pool: Pool, arguments: dict[str, Any], transport: str
) -> None:
    pool.run(_grown, 2, transport, arguments)
