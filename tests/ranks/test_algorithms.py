"""Collective algorithms over sends and receives: against torch's sums, and what they send."""

import time
import warnings
from collections.abc import Sequence
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import plait
from plait.comm import (
    AlgorithmReduce,
    BulkBroadcast,
    all_gather_by,
    all_reduce_by,
    broadcast_by,
    connect,
    ranks_by_host,
    reduce_scatter_by,
)
from plait.comm import algorithms as by
from plait.comm.shm import rendezvous
from plait.errors import CommError
from plait.plan.collectives import ALGORITHMS, Hosts, ranges
from support.covering import Case
from support.pool import Pool, RankError

NUMELS, DTYPES = (0, 1, 5, 1000, 100_003), ("float64", "float32", "bfloat16", "int64")
OPS = ("sum", "mean", "max", "min", "prod")
RANKS = (1, 2, 3, 4, 7)
# Two ways to cut each number of ranks into hosts: as many on each where that can be, and not.
HOSTS: dict[int, Sequence[Hosts]] = {
    1: [((0,),)] * 2,
    2: [((0,), (1,)), ((0, 1),)],
    3: [((0,), (2,), (1,)), ((1, 0), (2,))],
    4: [((0, 2), (1, 3)), ((3,), (0, 1, 2))],
    7: [(tuple(range(7)),), ((0, 1, 2, 3), (4, 5), (6,))],
}


def _cases() -> list[Case]:
    """Every pair of options meets: the op goes round with the sum of the others' places."""
    names = [(name, "0") for name in ALGORITHMS] + [("two-level", "1")]
    found: list[Case] = []
    for (i, (name, cut)), (j, numel), (k, dtype) in product(*map(enumerate, (names, NUMELS, DTYPES))):
        op = OPS[(i + j + k) % len(OPS)]
        if (dtype, op) != ("int64", "mean"):
            found.append({"algorithm": name, "cut": cut, "numel": str(numel), "dtype": dtype, "op": op})
    return found


def _contribution(rank: int, numel: int, dtype: str) -> Tensor:
    generator = torch.Generator().manual_seed(31 * rank + numel)
    if dtype == "int64":
        return torch.randint(-(2**40), 2**40, (numel,), generator=generator)
    return torch.randn(numel, dtype=torch.float64, generator=generator).to(getattr(torch, dtype))


def _all_reduced(cases: list[Case]) -> list[tuple[Tensor, Tensor]]:
    """Each case by all-reduce, and this rank's range by reduce-scatter."""
    group = connect().group
    found = []
    for case in cases:
        cut = HOSTS[group.size][int(case["cut"])]
        whole, scattered = (
            _contribution(group.rank, int(case["numel"]), case["dtype"]) for _ in ("whole", "scattered")
        )
        all_reduce_by(case["algorithm"], whole, group, case["op"], hosts=cut)
        own = reduce_scatter_by(case["algorithm"], scattered, group, case["op"], hosts=cut)
        found.append((whole, own.clone()))
    return found


def _reduced(parts: list[Tensor], op: str) -> Tensor:
    stacked = torch.stack(parts).to(torch.int64 if parts[0].dtype == torch.int64 else torch.float64)
    by_op = {"sum": stacked.sum, "mean": stacked.mean, "max": stacked.amax, "min": stacked.amin}
    return (by_op | {"prod": stacked.prod})[op](0)


def _bound(parts: list[Tensor], op: str) -> Tensor | float:
    """The error bound: half a unit of the last place for every result that was rounded, here and there."""
    if op in ("max", "min") or not parts[0].is_floating_point():
        return 0.0
    sizes = torch.stack(parts).double().abs()
    size = sizes.prod(0) if op == "prod" else sizes.sum(0) / (len(parts) if op == "mean" else 1)
    eps = torch.finfo(parts[0].dtype).eps + torch.finfo(torch.float64).eps
    return len(parts) * eps / 2 * size * 1.01


@pytest.mark.parametrize("num_ranks", RANKS)
def test_every_algorithm_reduces_as_torch_does_to_the_same_bits(pool: Pool, num_ranks: int) -> None:
    cases = _cases()
    found = pool.run(_all_reduced, num_ranks, cases)
    for case, results in zip(cases, zip(*found, strict=True), strict=True):
        numel = int(case["numel"])
        parts = [_contribution(rank, numel, case["dtype"]) for rank in range(num_ranks)]
        expected, bound = _reduced(parts, case["op"]), _bound(parts, case["op"])
        first = results[0][0]
        assert first.dtype == parts[0].dtype
        assert ((first.to(expected.dtype) - expected).abs() <= bound).all(), case
        for (whole, own), (start, stop) in zip(results, ranges(numel, num_ranks), strict=True):
            assert torch.equal(whole, first), case
            assert torch.equal(own, first[start:stop]), case


def _rooted(numel: int) -> list[Tensor]:
    group = connect().group
    found = []
    for name, segments in (("naive", 1), ("tree", 1), ("chain", 1), ("chain", 4)):
        tensor = _contribution(group.rank, numel, "float32")
        broadcast_by(name, tensor, group, source=group.size - 1, segments=segments)
        found.append(tensor)
    for name in ("ring", "halving") if group.size & (group.size - 1) == 0 else ("ring",):
        whole = torch.full((numel,), -1.0)
        start, stop = ranges(numel, group.size)[group.rank]
        whole[start:stop] = torch.arange(start, stop)
        all_gather_by(name, whole, group)
        found.append(whole)
    return found


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("numel", [0, 3, 1001])
def test_broadcasts_and_gathers_give_every_rank_all_values(pool: Pool, num_ranks: int, numel: int) -> None:
    last = _contribution(num_ranks - 1, numel, "float32")
    for *broadcasts, ring in (got[:5] for got in pool.run(_rooted, num_ranks, numel)):
        assert all(torch.equal(got, last) for got in broadcasts)
        assert torch.equal(ring, torch.arange(numel).float())
    if num_ranks in (1, 2, 4):
        assert torch.equal(pool.run(_rooted, num_ranks, numel)[0][5], torch.arange(numel).float())


def _bulk(num_hosts: int) -> tuple[bool, list[Tensor], bool]:
    """Broadcasts of three sizes from rank 1, and a plain model's weights, on ranks of several hosts."""
    rank = connect(transport="gloo").rank
    with mock.patch.object(rendezvous, "host_identity", return_value=f"host {rank % num_hosts}"):
        group = connect().group
        bulk = BulkBroadcast(group)
        tensors = [_contribution(group.rank, numel, "float32") for numel in (0, 1000, 400_003)]
        for tensor in tensors:
            bulk.run(tensor, source=1)
        torch.manual_seed(group.rank)  # the engine takes rank 0's weights
        engine = plait.parallelize([torch.nn.Linear(500, 500)], f"dp={group.size}", loss=_unused)
        weights = engine.model(torch.eye(500)).detach()
    assert group.comm_log is not None
    has_sent = any(key.op == "send" for key in group.comm_log.read())
    return bulk.chains, [*tensors, weights], has_sent


class _WithBuffers(torch.nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.large, self.half = torch.nn.Linear(600, 500), torch.nn.Linear(2, 2).bfloat16()
        self.register_buffer("counts", torch.randint(9, (3,)))
        self.register_buffer("own", torch.randn(()))
        self._ddp_params_and_buffers_to_ignore = ["own"]


def _wrapped(num_hosts: int, options: dict[str, bool]) -> tuple[bool, dict[str, Tensor]]:
    """The states of a model that DistributedDataParallel has synchronized, in buckets of two parameters."""
    world = connect(transport="gloo")
    host = f"host {world.rank % num_hosts}"
    with (
        mock.patch.object(rendezvous, "host_identity", return_value=host),
        mock.patch.object(by.BulkBroadcast, "run", autospec=True, side_effect=by.BulkBroadcast.run) as run,
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has another name for `broadcast_buffers`
        model = plait.DistributedDataParallel(_WithBuffers(world.rank), transport="group", **options)
    return run.called, dict(model.module.state_dict())


@pytest.mark.parametrize("num_hosts", [1, 3])
@pytest.mark.parametrize("options", [{}, {"broadcast_buffers": False}, {"init_sync": False}], ids=str)
def test_a_wrapped_model_is_synchronized_by_a_chain_between_hosts_alone(
    pool: Pool, num_hosts: int, options: dict[str, bool]
) -> None:
    syncs = options.get("init_sync", True)
    for rank, (chained, found) in enumerate(pool.over("gloo").run(_wrapped, 3, num_hosts, options)):
        assert chained == (syncs and num_hosts > 1)
        for name, value in _WithBuffers(rank).state_dict().items():
            taken = syncs and name != "own" and (name != "counts" or not options)
            expected = _WithBuffers(0).state_dict()[name] if taken else value
            assert torch.equal(found[name], expected), name


def _unused(outputs: Any, batch: Any) -> tuple[Tensor, int]:
    raise AssertionError("no step is taken")


@pytest.mark.parametrize(("num_ranks", "num_hosts", "chains"), [(4, 2, True), (3, 1, False), (2, 2, False)])
def test_weights_are_broadcast_by_a_chain_between_hosts_alone(
    pool: Pool, num_ranks: int, num_hosts: int, chains: bool
) -> None:
    found = pool.over("gloo").run(_bulk, num_ranks, num_hosts)
    expected = [_contribution(1, numel, "float32") for numel in (0, 1000, 400_003)] + [found[0][1][3]]
    for chained, tensors, has_sent in found:
        assert chained == has_sent == chains
        assert all(torch.equal(*pair) for pair in zip(tensors, expected, strict=True))


def _strided() -> tuple[Tensor, Tensor]:
    group = connect().group
    grid = torch.arange(12.0).view(3, 4) * (group.rank + 1)
    all_reduce_by("halving", grid.t()[1:], group)
    copied = torch.full((4, 3), float(group.rank)).t()
    broadcast_by("tree", copied, group, source=1)
    return grid, copied


def test_strided_tensors_are_reduced_in_place(pool: Pool) -> None:
    for rank, (grid, copied) in enumerate(pool.run(_strided, 3)):
        expected = torch.arange(12.0).view(3, 4) * torch.tensor([rank + 1.0, 6, 6, 6])
        assert torch.equal(grid, expected)
        assert torch.equal(copied, torch.ones(3, 4))


def _in_bf16(wide: torch.dtype) -> Tensor:
    group = connect().group
    mine = _contribution(group.rank, 3000, "bfloat16")
    out = torch.empty(3000)
    for _ in AlgorithmReduce("ring", group).start_sum(mine, scatter=False, wide=wide).into(out):
        pass
    return out


def test_partial_sums_are_rounded_once_a_hop_or_not_at_all(pool: Pool) -> None:
    """A range grows along the ring: from the rank after its owner's to the owner."""
    parts = [_contribution(rank, 3000, "bfloat16") for rank in range(3)]
    for wide in (torch.bfloat16, torch.float32):
        expected = torch.empty(3000)
        for owner, (start, stop) in enumerate(ranges(3000, 3)):
            second, third, own = (parts[(owner + k) % 3][start:stop] for k in (1, 2, 0))
            partial = (second.float() + third.float()).to(wide)
            expected[start:stop] = (partial.float() + own.float()).to(wide).float()
        assert all(torch.equal(out, expected) for out in pool.run(_in_bf16, 3, wide))


# --- what is sent


def _counted(numel: int) -> dict[str, tuple[int, int]]:
    """Messages and bytes that this rank sends, by algorithm."""
    group = connect().group
    found = {}
    for name in ALGORITHMS:
        tensor = torch.ones(numel)
        with mock.patch.object(by, "start_send", wraps=by.start_send) as verb:
            all_reduce_by(name, tensor, group, hosts=HOSTS[group.size][0])
        found[name] = verb.call_count, sum(call.args[0].nbytes for call in verb.call_args_list)
    with mock.patch.object(by, "start_send", wraps=by.start_send) as verb:
        broadcast_by("chain", torch.ones(numel), group, segments=6)
    found["chain"] = verb.call_count, sum(call.args[0].nbytes for call in verb.call_args_list)
    return found


def test_messages_and_bytes_on_the_wire_are_the_formulas(pool: Pool) -> None:
    p, numel = 4, 4800
    num_bytes = 4 * numel
    for rank, found in enumerate(pool.run(_counted, p, numel)):
        assert found["ring"] == (2 * (p - 1), 2 * (p - 1) * num_bytes // p)
        assert found["halving"] == (2 * 2, 2 * (p - 1) * num_bytes // p)
        assert found["naive"] == ((p - 1, (p - 1) * num_bytes) if rank == 0 else (1, num_bytes))
        messages = {0: 2, 1: 1, 2: 2, 3: 1}[rank]
        assert found["tree"] == (messages, messages * num_bytes)
        # n hosts of g: 2 (g-1)/g N inside and 2 (n-1)/n N/g between, here with n = g = 2.
        assert found["two-level"] == (2 + 2, num_bytes + num_bytes // 2)
        assert found["chain"] == ((6, num_bytes) if rank < p - 1 else (0, 0))


# --- during computation


def _many_at_once(numel: int) -> list[Tensor]:
    """Ends them in another order than they start in."""
    group = connect().group
    sums = AlgorithmReduce("halving", group)
    given = [torch.full((numel,), float(k + group.rank)) for k in range(6)]
    started = [sums.start_sum(tensor, scatter=k % 2 == 0) for k, tensor in enumerate(given)]
    found: list[Tensor] = []
    for k in reversed(range(6)):
        length = numel // group.size if k % 2 == 0 else numel
        out = torch.ones(length, dtype=torch.float64)
        assert sum(run.numel() for run in started[k].into(out, add=k == 5)) == length
        found.insert(0, out)
    return found


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_sums_end_in_any_order(pool: Pool, num_ranks: int) -> None:
    for found in pool.run(_many_at_once, num_ranks, 600):
        for k, out in enumerate(found):
            expected = sum(k + rank for rank in range(num_ranks)) + (k == 5)
            assert (out == expected).all()


def _started_and_left() -> float:
    group = connect().group
    sums, begin_s = AlgorithmReduce("tree", group), time.monotonic()
    if group.rank == 1:
        time.sleep(1.0)
    summing = sums.start_sum(torch.ones(10), scatter=False)
    started_s = time.monotonic() - begin_s
    out = torch.empty(10)
    for _ in summing.into(out):
        pass
    assert (out == 2).all()
    return started_s


def test_a_sum_starts_without_waiting_for_peers(pool: Pool) -> None:
    assert pool.run(_started_and_left, 2)[0] < 0.5


def _peer_leaves() -> list[str]:
    world = connect()
    if world.rank == 0:
        world.store.wait_for("joined")
        world.close()
        return []
    world.store.set("joined")
    sums = AlgorithmReduce("ring", world.group)
    started = [sums.start_sum(torch.ones(4), scatter=True, label="a unit") for _ in range(2)]
    messages = []
    for summing in started:
        with pytest.raises(CommError) as caught:
            for _ in summing.into(torch.empty(2)):
                pass
        messages.append(str(caught.value))
    return messages


def test_a_lost_peer_is_an_error_where_the_sum_is_awaited(pool: Pool) -> None:
    messages = pool.run(_peer_leaves, 2)[1]
    assert len(messages) == 2
    assert all("of a unit failed: rank 0 is gone" in message for message in messages)


# --- names and hosts


def _unknown(name: str) -> None:
    all_reduce_by(name, torch.ones(2), connect().group)


def test_an_unknown_name_is_refused(pool: Pool) -> None:
    with pytest.raises(RankError, match=r"'rings'\n.*naive or ring or halving or tree or two-level"):
        pool.run(_unknown, 1, "rings")


def _gathered_by(name: str) -> None:
    all_gather_by(name, torch.ones(6), connect().group)


def test_halves_of_three_ranks_are_refused_for_an_all_gather(pool: Pool) -> None:
    with pytest.raises(RankError, match="an all-gather of 3 ranks does not support"):
        pool.run(_gathered_by, 3, "halving")


def _on_hosts(cut: Hosts) -> None:
    all_reduce_by("two-level", torch.ones(2), connect().group, hosts=cut)


def test_hosts_that_leave_a_rank_out_are_refused(pool: Pool) -> None:
    with pytest.raises(RankError, match="do not contain each rank"):
        pool.run(_on_hosts, 2, ((0,),))


def _who_sits_where() -> Any:
    group = connect().group
    together = ranks_by_host(group)
    with mock.patch.object(rendezvous, "host_identity", return_value="b" if group.rank == 1 else "a"):
        return together, ranks_by_host(group)


def test_ranks_of_one_host_find_each_other(pool: Pool) -> None:
    assert pool.run(_who_sits_where, 3) == [(((0, 1, 2),), ((0, 2), (1,)))] * 3
    assert pool.run(_who_sits_where, 1)[0][0] == ((0,),)
