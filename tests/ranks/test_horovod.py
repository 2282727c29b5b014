"""Horovod's interface: gradients and operations equal their formulas, in float64."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import plait.compat.horovod as hvd
from plait.errors import CompatError, DDPError, PlaitError
from support.pool import Pool

TIGHT = {"rtol": 1e-9, "atol": 1e-12}


def _model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def _batch(rank: int, number: int) -> Tensor:
    return torch.randn(
        5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(100 * rank + number)
    )


def _loss(model: nn.Module, rank: int, number: int) -> Tensor:
    return model(_batch(rank, number)).square().sum()


def _local(model: nn.Module, rank: int, numbers: range) -> list[Tensor]:
    """The sum of one rank's gradients, without communication."""
    alone = copy.deepcopy(model)
    alone.zero_grad()
    for number in numbers:
        _loss(alone, rank, number).backward()
    return [parameter.grad for parameter in alone.parameters() if parameter.grad is not None]


def _expected(model: nn.Module, active: list[int], size: int, passes: range, op: str) -> list[Tensor]:
    """The formula: the sum over ranks of the sum over passes, divided by all ranks for an average."""
    divisor = size if op == "Average" else 1
    return [sum(terms) / divisor for terms in zip(*(_local(model, r, passes) for r in active), strict=True)]


def _step(op: str, passes: int, arguments: dict[str, Any], clip: bool) -> None:
    hvd.init()
    model, size = _model(), hvd.size()
    reference = copy.deepcopy(model)
    plain = torch.optim.AdamW(reference.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.AdamW(model.parameters(), lr=0.1),
        named_parameters=model.named_parameters(),
        op=getattr(hvd, op),
        backward_passes_per_step=passes,
        **arguments,
    )
    assert isinstance(optimizer, torch.optim.AdamW)
    for step in range(3):
        numbers = range(step * passes, (step + 1) * passes)
        expected = _expected(reference, [*range(size)], size, numbers, op)
        for parameter, gradient in zip(reference.parameters(), expected, strict=True):
            parameter.grad = gradient
        optimizer.zero_grad()
        for number in numbers:
            _loss(model, hvd.rank(), number).backward()
        optimizer.synchronize()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(parameter.grad, gradient, **TIGHT)
        if clip:
            for module in (model, reference):
                nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()
        plain.step()
        for parameter, wanted in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(parameter, wanted, **TIGHT)


@pytest.mark.parametrize(
    ("transport", "ranks", "op", "passes", "arguments", "clip"),
    [
        ("host", 2, "Average", 1, {}, False),
        ("gloo", 3, "Average", 2, {"gradient_predivide_factor": 3.0}, True),
        ("host", 4, "Sum", 2, {"num_groups": 2}, True),
        ("gloo", 2, "Sum", 1, {"groups": 1}, False),
        ("auto", 1, "Average", 2, {}, True),
    ],
)
def test_gradients_and_steps_equal_the_formula(
    pool: Pool, transport: str, ranks: int, op: str, passes: int, arguments: dict[str, Any], clip: bool
) -> None:
    pool.over(transport).run(_step, ranks, op, passes, arguments, clip)


def _sparse(passes: int) -> None:
    """Ranks look up different rows of an embedding, some of them twice."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    for kind, options in ((torch.optim.SGD, {"sparse_as_dense": True}), (torch.optim.SparseAdam, {})):
        torch.manual_seed(2)
        model = nn.Embedding(9, 4, sparse=True).double()
        reference = copy.deepcopy(model)
        plain = kind(reference.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(
            kind(model.parameters(), lr=0.1), backward_passes_per_step=passes, **options
        )
        for step in range(2):
            plain.zero_grad()
            for each in range(size):
                rows = torch.tensor([each, each + 1, each, 2 * step + 4])
                for _ in range(passes):
                    reference(rows).square().sum().div(size).backward()
            plain.step()
            optimizer.zero_grad()
            for _ in range(passes):
                model(torch.tensor([rank, rank + 1, rank, 2 * step + 4])).square().sum().backward()
            optimizer.step()
            assert model.weight.grad is not None
            assert model.weight.grad.is_sparse == (kind is torch.optim.SparseAdam)
            torch.testing.assert_close(model.weight, reference.weight, **TIGHT)


@pytest.mark.parametrize(("transport", "passes"), [("host", 2), ("gloo", 1)])
def test_sparse_gradients_equal_the_formula_as_dense_and_with_sparse_adam(
    pool: Pool, transport: str, passes: int
) -> None:
    pool.over(transport).run(_sparse, 2, passes)


def _closures() -> None:
    """L-BFGS calls the closure several times a step, each time with other weights."""
    hvd.init()
    model, size = _model(), hvd.size()
    reference = copy.deepcopy(model)
    options = {"lr": 0.05, "max_iter": 3}
    plain = torch.optim.LBFGS(reference.parameters(), **options)
    optimizer = hvd.DistributedOptimizer(torch.optim.LBFGS(model.parameters(), **options))

    def of_all_ranks() -> Tensor:
        plain.zero_grad()
        loss = sum((_loss(reference, rank, 0) for rank in range(size)), torch.zeros(())) / size
        loss.backward()
        return loss

    def of_this_rank() -> Tensor:
        optimizer.zero_grad()
        loss = _loss(model, hvd.rank(), 0)
        loss.backward()
        return hvd.allreduce(loss.detach())

    for _ in range(2):
        torch.testing.assert_close(optimizer.step(of_this_rank), plain.step(of_all_ranks), **TIGHT)
    for parameter, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter, wanted, **TIGHT)


def test_gradients_of_a_closure_are_reduced_each_time_it_is_called(pool: Pool) -> None:
    pool.run(_closures, 2)


BATCHES = (2, 5, 3)


def _uneven(op: str) -> tuple[int, list[Tensor]]:
    hvd.init()
    model, size = _model(), hvd.size()
    reference = copy.deepcopy(model)
    plain = torch.optim.SGD(reference.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), op=getattr(hvd, op))
    for step in range(max(BATCHES)):
        active = [rank for rank in range(size) if step < BATCHES[rank]]
        for parameter, gradient in zip(
            reference.parameters(), _expected(reference, active, size, range(step, step + 1), op), strict=True
        ):
            parameter.grad = gradient
        plain.step()
        if hvd.rank() not in active:
            continue
        optimizer.zero_grad()
        _loss(model, hvd.rank(), step).backward()
        optimizer.step()
        total = hvd.allreduce(torch.ones(2), op=hvd.Sum)
        assert total.tolist() == [len(active)] * 2
    last = hvd.join()
    hvd.broadcast_parameters(model.state_dict(), last)
    for parameter, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(parameter, wanted, **TIGHT)
    return last, []


@pytest.mark.parametrize(("transport", "op"), [("host", "Average"), ("gloo", "Sum")])
def test_ranks_that_have_joined_give_zeros_and_means_stay_divided_by_all(
    pool: Pool, transport: str, op: str
) -> None:
    assert [last for last, _ in pool.over(transport).run(_uneven, 3, op)] == [1, 1, 1]


def _branches() -> None:
    """Rank 1 does not use the second layer, and gets the others' gradients of it."""
    hvd.init()
    model = _model().float()
    compression = hvd.Compression.fp16
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), compression=compression)
    x = torch.ones(2, 6)
    (model(x) if hvd.rank() == 0 else model[0](x)).sum().backward()
    assert hvd.allreduce(torch.tensor(1.0)).item() == 1.0  # in any order with reductions
    with pytest.raises(CompatError, match="zero_grad"):
        optimizer.zero_grad()
    with pytest.raises(DDPError, match="backward_passes_per_step"):
        model[0](x).sum().backward()
    optimizer.synchronize()
    grads = [parameter.grad for parameter in model.parameters()]
    assert grads[3] is not None
    torch.testing.assert_close(grads[3], torch.ones(3))  # 2 / 2 ranks
    with pytest.warns(UserWarning, match="not reduced again"):
        optimizer.step()


def test_branches_compression_and_misuse(pool: Pool) -> None:
    pool.run(_branches, 2)


def _refused() -> None:
    hvd.init()
    x = torch.ones(2)
    calls: list[tuple[str, Any]] = [
        ("dense", lambda: hvd.allreduce([1.0])),
        ("dense", lambda: hvd.allreduce_async(None)),
        ("dense", lambda: hvd.allreduce(x.to_sparse())),
        ("dense", lambda: hvd.broadcast(x.to("meta"), 0)),
        ("no rows", lambda: hvd.allgather(torch.tensor(1.0))),
        ("splits", lambda: hvd.alltoall(x, [3, -1])),
        ("in progress", lambda: hvd.synchronize(5)),
        ("in progress", lambda: hvd.poll(None)),
        ("compression", lambda: hvd.allreduce(x, compression="x")),
    ]
    for words, call in calls:
        with pytest.raises(CompatError, match=words) as caught:
            call()
        assert None not in (caught.value.given, caught.value.expected, caught.value.hint)
    assert hvd.allreduce(x, op=hvd.Sum).tolist() == [hvd.size()] * 2, "all ranks have made as many calls"


def test_arguments_that_no_operation_takes_are_errors(pool: Pool) -> None:
    pool.run(_refused, 2)


def _operations() -> None:
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    ranks = torch.arange(size, dtype=torch.float64) + 1
    x = torch.full((2,), rank + 1.0, dtype=torch.float64, requires_grad=True)
    for op, value in (
        (hvd.Average, ranks.mean()),
        (hvd.Sum, ranks.sum()),
        (hvd.Min, ranks.min()),
        (hvd.Max, ranks.max()),
        (hvd.Product, ranks.prod()),
    ):
        torch.testing.assert_close(hvd.allreduce(x.detach(), op=op), torch.full_like(x, value.item()))
    factored = hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=3.0)
    factored.sum().backward()
    torch.testing.assert_close(factored.detach(), torch.full_like(x, 1.5 * ranks.sum().item()))
    torch.testing.assert_close(x.grad, torch.full_like(x, 1.5 * size))
    handle = hvd.grouped_allreduce_async([torch.ones(1), torch.ones(3)], op=hvd.Sum)
    assert [t.tolist() for t in hvd.synchronize(handle)] == [[size], [size] * 3]
    assert hvd.poll(handle)

    rows = torch.full((rank + 1, 2), float(rank), requires_grad=True)
    gathered = hvd.allgather(rows)
    assert gathered[:, 0].tolist() == [float(r) for r in range(size) for _ in range(r + 1)]
    gathered.mul(rank + 1.0).sum().backward()
    assert rows.grad is not None
    assert rows.grad.tolist() == [[ranks.sum().item()] * 2] * (rank + 1)

    out, received = hvd.alltoall(torch.full((size * (rank + 1),), float(rank)), splits=[rank + 1] * size)
    assert received.tolist() == [r + 1 for r in range(size)]
    assert out.tolist() == [float(r) for r in range(size) for _ in range(r + 1)]
    scattered = hvd.reducescatter(torch.arange(size + 1.0), op=hvd.Sum)
    first = 0 if rank == 0 else rank + 1
    assert scattered.tolist() == [size * float(v) for v in range(first, first + (2 if rank == 0 else 1))]
    assert hvd.broadcast(torch.tensor([rank]), 1).tolist() == [1]
    thing = {"step": 3, "list": [1.5, None, ("a", True)], 7: torch.arange(3), "set": {rank}}
    copied = hvd.broadcast_object(thing, root_rank=1)
    assert (copied["list"], copied[7].tolist(), copied["set"]) == (thing["list"], [0, 1, 2], {1})
    assert hvd.allgather_object(rank * 10) == [10 * r for r in range(size)]
    norm = hvd.SyncBatchNorm(2).double()
    normalized = hvd.allgather(norm(torch.randn(4, 2, dtype=torch.float64) + rank))
    torch.testing.assert_close(normalized.mean(0), torch.zeros(2, dtype=torch.float64))
    assert normalized[:4].mean() < -0.1  # of rank 0 alone
    hvd.barrier()
    assert (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (rank, size, 0, 1)
    hvd.shutdown()


def _weights(rank: int, rows: int) -> Tensor:
    return torch.arange(2.0 * rows, dtype=torch.float64).view(rows, 2) + 10.0 * rank


def _gradients() -> None:
    """Gradients of a loss that weighs each row that a rank has received; rank i gets i + 1 rows of each."""
    hvd.init()
    rank, size = hvd.rank(), hvd.size()
    splits = [to + 1 for to in range(size)]
    x = torch.ones(sum(splits), 2, dtype=torch.float64, requires_grad=True)
    out, received = hvd.alltoall(x, splits=splits)
    assert received.tolist() == [rank + 1] * size
    (out * _weights(rank, len(out))).sum().backward()
    wanted = [_weights(to, size * (to + 1)).chunk(size)[rank] for to in range(size)]
    torch.testing.assert_close(x.grad, torch.cat(wanted), **TIGHT)
    for op, factor in ((hvd.Sum, 1.0), (hvd.Average, 1 / size)):
        full = torch.ones(2 * size + 1, 2, dtype=torch.float64, requires_grad=True)
        own = hvd.reducescatter(full, op=op, prescale_factor=0.5, postscale_factor=3.0)
        (own * _weights(rank, len(own))).sum().backward()
        rows = [3] + [2] * (size - 1)
        whole = torch.cat([_weights(owner, count) for owner, count in enumerate(rows)])
        torch.testing.assert_close(full.grad, 1.5 * factor * whole, **TIGHT)


def test_gradients_pass_through_an_alltoall_and_a_reducescatter_of_uneven_rows(pool: Pool) -> None:
    pool.run(_gradients, 2)


@pytest.mark.parametrize(("transport", "ranks"), [("host", 3), ("gloo", 2)])
def test_operations_and_their_gradients(pool: Pool, transport: str, ranks: int) -> None:
    pool.over(transport).run(_operations, ranks)


def _optimizer_state() -> list[float]:
    hvd.init()
    model = _model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 / (hvd.rank() + 1))
    if hvd.rank() == 0:
        _loss(model, 0, 0).backward()
        optimizer.step()
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    state = optimizer.state_dict()
    return [state["param_groups"][0]["lr"], *(float(s["exp_avg"].sum()) for s in state["state"].values())]


def test_the_roots_optimizer_state_arrives_everywhere(pool: Pool) -> None:
    first, second = pool.run(_optimizer_state, 2)
    assert first == second
    assert len(first) == 5


def _refused() -> None:
    hvd.init()
    optimizer = torch.optim.SGD(_model().parameters(), lr=0.1)
    refused = {
        "Adasum": lambda: hvd.DistributedOptimizer(optimizer, op=hvd.Adasum),
        "process sets": lambda: hvd.allreduce(torch.ones(1), process_set=3),
        "Min": lambda: hvd.DistributedOptimizer(optimizer, op=hvd.Min),
        "gradient_predivide_factor": lambda: hvd.DistributedOptimizer(
            optimizer, op=hvd.Sum, gradient_predivide_factor=2.0
        ),
        "ProcessSet": lambda: hvd.ProcessSet([0]),
        "add_process_set": lambda: hvd.add_process_set([0]),
        "start_timeline": lambda: hvd.start_timeline("file"),
        "sparse_allreduce_async": lambda: hvd.sparse_allreduce_async(torch.ones(1)),
    }
    for name, call in refused.items():
        with pytest.raises(PlaitError) as raised:
            call()
        assert name in str(raised.value), name
        assert raised.value.expected is not None


def test_unsupported_calls_are_refused_by_name(pool: Pool) -> None:
    pool.run(_refused, 1)
    hvd.shutdown()
    with pytest.raises(CompatError, match="not been initialized"):
        hvd.rank()


# horovod/torch/__init__.py of 0.28
NAMES = """
elastic Compression allgather_object broadcast_object broadcast_optimizer_state broadcast_parameters
allreduce allreduce_async allreduce_ allreduce_async_ grouped_allreduce grouped_allreduce_async
grouped_allreduce_ grouped_allreduce_async_ sparse_allreduce_async allgather allgather_async
grouped_allgather grouped_allgather_async broadcast broadcast_async broadcast_ broadcast_async_
alltoall alltoall_async reducescatter reducescatter_async grouped_reducescatter
grouped_reducescatter_async join barrier poll synchronize init shutdown is_initialized
start_timeline stop_timeline size local_size cross_size rank local_rank cross_rank
mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built ccl_built
cuda_built rocm_built ProcessSet global_process_set add_process_set remove_process_set Average Sum
Adasum Min Max Product HorovodInternalError DistributedOptimizer SyncBatchNorm"""


def test_every_public_name_of_horovod_exists() -> None:
    assert [name for name in NAMES.split() if not hasattr(hvd, name)] == []
