"""torch's own machines over plait's backend: DDP, its hooks, DTensor, FSDP2; and what ends badly."""

import gc
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from plait.comm import all_reduce, connect
from plait.errors import CommError
from support.pool import Pool
from support.torch_backend import join


class Branches(nn.Module):
    """Layers of several sizes, one of which not every step uses, and a buffer that DDP broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(40, 60), nn.Linear(60, 5)
        self.branches = nn.ModuleList(nn.Linear(60, 60) for _ in range(3))
        self.norm = nn.BatchNorm1d(60)

    def forward(self, x: Tensor, skips: int) -> Tensor:
        x = self.norm(self.first(x))
        for number, branch in enumerate(self.branches):
            x = x if number == skips else x + torch.tanh(branch(x))
        out: Tensor = self.last(x)
        return out


def _trained(group: dist.ProcessGroup, hook: str = "", **options: Any) -> list[Tensor]:
    """Weights after four steps of DDP, in one bucket or in several of a few KB each.

    PowerSGD starts communications in callbacks: with several buckets, ranks would not agree on their order.
    """
    torch.manual_seed(3)
    model = Branches().double()
    cap_mb = 25 if hook == "powersgd" else 0.01
    ddp = DistributedDataParallel(model, process_group=group, bucket_cap_mb=cap_mb, **options)
    if hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(group, start_powerSGD_iter=2, min_compression_rate=1)
        ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif hook == "fp16":
        ddp.register_comm_hook(group, default_hooks.fp16_compress_hook)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(dist.get_rank())
    for step in range(4):
        skips = step % 3 if options.get("find_unused_parameters") else -1
        with ddp.no_sync() if step == 1 else torch.enable_grad():
            ddp(torch.randn(6, 40, dtype=torch.float64), skips).square().mean().backward()
        if step != 1:
            optimizer.step()
            optimizer.zero_grad()
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


DDP: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True, "gradient_as_bucket_view": True},
    "fp16 hook": {"hook": "fp16"},
    "powersgd hook": {"hook": "powersgd"},
}


def _ddp(names: list[str]) -> dict[str, list[list[Tensor]]]:
    ours = join()
    gloo = dist.new_group(backend="gloo")
    return {name: [_trained(group, **DDP[name]) for group in (ours, gloo)] for name in names}


@pytest.mark.parametrize("ranks", [2, 3])
def test_ddp_trains_as_over_gloo(pool: Pool, ranks: int) -> None:
    results = pool.run(_ddp, ranks, [*DDP])
    for name in DDP:
        first = results[0][name][0]
        for result in results:
            ours, gloo = result[name]
            # Gloo rounds to fp16 after every rank's term, we round the sum once.
            near = {"rtol": 1e-2, "atol": 1e-3} if name == "fp16 hook" else {"rtol": 1e-9, "atol": 1e-12}
            torch.testing.assert_close(ours, gloo, **near)
            weights = [i for i, tensor in enumerate(ours) if tensor.dim() == 2]
            assert all(torch.equal(ours[i], first[i]) for i in weights), f"replicas differ: {name}"


def _overlapped() -> list[Tensor]:
    group = join()
    rank = dist.get_rank()
    tensors = [torch.full((5,), float(number + rank)) for number in range(30)]
    works = [dist.all_reduce(tensor, group=group, async_op=True) for tensor in tensors[:20]]
    futures = [work.get_future() for work in works[:10]]
    sums = [future.then(lambda it: it.value()[0].sum()) for future in futures]
    for tensor in tensors[20:]:
        dist.all_reduce(tensor, group=group)
    for work in reversed(works):
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
    assert torch.futures.wait_all(sums) == [tensor.sum() for tensor in tensors[:10]]
    return tensors


def test_asynchronous_calls_overlap_and_end_in_any_order(pool: Pool) -> None:
    for tensors in pool.run(_overlapped, 2):
        assert torch.equal(torch.stack(tensors)[:, 0], 1.0 + 2 * torch.arange(30))


def _waiting_inside() -> list[float]:
    """A callback that waits for what is under way already, and one that waits for what it starts itself."""
    group = join()
    first, second = (
        dist.all_reduce(torch.full((3,), float(value)), group=group, async_op=True) for value in (1, 2)
    )
    later = second.get_future()

    def both(future: Any) -> float:
        return float(future.value()[0][0] + later.wait()[0][0])

    def again(future: Any) -> float:
        work = dist.all_reduce(torch.tensor([future.value()]), group=group, async_op=True)
        return float(work.get_future().wait()[0][0])

    seen = first.get_future().then(both)
    return [seen.wait(), seen.then(again).wait()]


def test_a_callback_may_wait_for_another_communication(pool: Pool) -> None:
    assert pool.run(_waiting_inside, 2) == [[6.0, 12.0]] * 2


def _uneven() -> tuple[list[Tensor], Tensor, list[Tensor]]:
    group = join()
    rank, size = dist.get_rank(), dist.get_world_size()
    gathered = [torch.empty(place) for place in range(size)]
    dist.all_gather(gathered, torch.full((rank,), float(rank)), group)
    mine = torch.empty(rank + 1)
    parts = [torch.full((place + 1,), float(rank)) for place in range(size)]
    dist.reduce_scatter(mine, parts, group=group)
    assert all(torch.equal(part, torch.full_like(part, rank)) for part in parts)
    received = [torch.empty(place + 1, 2) for place in range(size)]
    dist.all_to_all(received, [torch.full((2, rank + 1), float(rank)).t() for _ in range(size)], group)
    return gathered, mine, received


def test_parts_may_have_different_sizes(pool: Pool) -> None:
    for rank, (gathered, mine, received) in enumerate(pool.run(_uneven, 3)):
        assert [tensor.tolist() for tensor in gathered] == [[], [1.0], [2.0, 2.0]]
        assert mine.tolist() == [3.0] * (rank + 1)
        assert [tensor.tolist() for tensor in received] == [[[float(p)] * 2] * (p + 1) for p in range(3)]


def _others() -> tuple[list[float], list[bool], list[float]]:
    """A mean, which Gloo does not have; whether one is true; a parameter in inference mode."""
    group = join()
    mean = torch.tensor([1.0, 3.0 * dist.get_rank()])
    dist.all_reduce(mean, dist.ReduceOp.AVG, group)
    flags = torch.tensor([dist.get_rank() == 1, False])
    dist.all_reduce(flags, group=group)
    with torch.inference_mode():
        columns = torch.ones(3, 2).t()[:, ::2]
        dist.all_reduce(columns, group=group, async_op=True).get_future().wait()
    return mean.tolist(), flags.tolist(), columns.flatten().tolist()


def test_means_bools_and_inference_mode(pool: Pool) -> None:
    assert pool.run(_others, 3) == [([1.0, 3.0], [True, False], [3.0] * 4)] * 3


def _late() -> None:
    group = join()
    store = dist.distributed_c10d._get_default_store()
    if dist.get_rank() == 1:
        store.wait(["given up"])
    work = dist.all_reduce(torch.ones(1), group=group, async_op=True)
    if dist.get_rank() == 0:
        with pytest.raises(CommError, match="timed out"):
            work.wait(timedelta(seconds=0.1))
        assert not work.is_completed()
        store.set("given up", "1")
    assert work.wait(timedelta(seconds=20))
    assert work.result()[0].item() == 2


def test_a_wait_may_have_a_time_limit(pool: Pool) -> None:
    pool.run(_late, 2)


def _plait_inside() -> list[float]:
    """A program that has chosen the backend and then uses plait: its world uses the same backend."""
    join()
    world = connect()
    pair = world.new_group((0, 1)) if world.rank < 2 else world.new_group((world.rank,))
    tensor = torch.tensor([1.0 + world.rank])
    all_reduce(tensor, world.group, "mean")
    all_reduce(tensor, pair)
    return tensor.tolist()


def test_a_world_joins_the_programs_own_group(pool: Pool) -> None:
    assert pool.run(_plait_inside, 3) == [[4.0], [4.0], [2.0]]


def _dtensors() -> None:
    join()
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("col",))
    torch.manual_seed(0)
    a, b = torch.randn(6, 5, dtype=torch.float64), torch.randn(5, 12, dtype=torch.float64)
    rows = distribute_tensor(a, mesh, [Shard(0)])
    for cut in ([Replicate()], [Shard(1)], [Shard(0)]):
        other = distribute_tensor(b, mesh, cut)
        torch.testing.assert_close((rows @ other).full_tensor(), a @ b)
        assert torch.equal(rows.redistribute(mesh, cut).full_tensor(), a)
    partial = DTensor.from_local(a, mesh, [Partial()], run_check=False)
    for cut in ([Replicate()], [Shard(0)], [Shard(1)]):
        torch.testing.assert_close(partial.redistribute(mesh, cut).full_tensor(), size * a)


@pytest.mark.parametrize("ranks", [2, 3])
def test_dtensors_are_redistributed_and_multiplied(pool: Pool, ranks: int) -> None:
    pool.run(_dtensors, ranks)


def _fully_sharded(shape: tuple[int, ...]) -> None:
    """FSDP2 against the one-process program: the mean over ranks of each rank's loss."""
    join()
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3)).double()
    alone = nn.Sequential(nn.Linear(7, 9), nn.Tanh(), nn.Linear(9, 3)).double()
    alone.load_state_dict(model.state_dict())
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    ours, reference = (torch.optim.AdamW(it.parameters(), lr=0.1) for it in (model, alone))
    size = dist.get_world_size()
    for step in range(3):
        batch = torch.randn(size, 4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        model(batch[dist.get_rank()]).square().mean().backward()
        alone(batch).square().mean().backward()
        for optimizer in (ours, reference):
            optimizer.step()
            optimizer.zero_grad()
    for mine, expected in zip(model.parameters(), alone.parameters(), strict=True):
        assert isinstance(mine, DTensor)
        torch.testing.assert_close(mine.full_tensor(), expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)])
def test_fsdp2_trains_as_one_process(pool: Pool, shape: tuple[int, ...]) -> None:
    pool.run(_fully_sharded, torch.Size(shape).numel(), shape)


def _again() -> list[float]:
    """Join, leave, join: nothing is left of the first group, not even its thread."""
    sums = []
    for times in (1, 2):
        group = join(times)
        half = dist.new_group([0, 1], backend="plait")
        tensor = torch.ones(1)
        dist.all_reduce(tensor, group=group, async_op=True).wait()
        if dist.get_rank() < 2:
            assert dist.get_backend(half) == "plait"
            dist.all_reduce(tensor, group=half, async_op=True).wait()
            dist.destroy_process_group(half)
        sums.append(tensor.item())
        del half, group
        dist.destroy_process_group()
        gc.collect()
        for thread in threading.enumerate():
            if thread.name == "plait-backend":
                thread.join(5)
                assert not thread.is_alive()
    return sums


def test_a_program_leaves_and_joins_again(pool: Pool) -> None:
    assert pool.run(_again, 3) == [[6.0, 6.0], [6.0, 6.0], [3.0, 3.0]]


def test_a_group_of_one_does_not_communicate(pool: Pool) -> None:
    pool.run(_fully_sharded, 1, (1,))


def _mistakes() -> dict[str, str]:
    """The error of each invalid call. The group still works after them."""
    group = join()
    x, other = torch.ones(4), 1 - dist.get_rank()
    mistakes: dict[str, Callable[[], Any]] = {
        "bits": lambda: dist.all_reduce(x.long(), dist.ReduceOp.BAND, group),
        "device": lambda: dist.broadcast(torch.ones(4, device="meta"), 0, group),
        "sparse": lambda: dist.broadcast(x.to_sparse(), 0, group),
        "tag": lambda: dist.send(x, other, group, tag=3),
        "anyone": lambda: dist.recv(x, None, group),
        "sizes": lambda: dist.all_gather([x, x[:3]], x[: 1 + dist.get_rank()], group),
        "splits": lambda: dist.all_to_all_single(x, x, [3, 2], [2, 2], group),
        "mean": lambda: dist.all_reduce(x.long(), dist.ReduceOp.AVG, group),
    }
    messages = {}
    for name, mistake in mistakes.items():
        with pytest.raises(CommError) as error:
            mistake()
        messages[name] = str(error.value)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [2.0] * 4
    return messages


def test_unsupported_calls_are_errors(pool: Pool) -> None:
    expected = {
        "bits": [
            "does not support this all-reduce reduction",
            "ReduceOp.BAND",
            "SUM, AVG, MAX, MIN or PRODUCT",
        ],
        "device": ["not on the CPU", "device meta", "(4,)"],
        "sparse": ["not dense", "sparse_coo"],
        "tag": ["does not support tags", "tag=3", "order"],
        "anyone": ["from any source", "src="],
        "sizes": ["mismatched sizes"],
        "splits": ["splits", "[3, 2] of 4 rows"],
        "mean": ["floating-point", "int64"],
    }
    for messages in pool.run(_mistakes, 2):
        assert messages.keys() == expected.keys()
        for name, words in expected.items():
            assert all(word in messages[name] for word in words), messages[name]


def _deserted() -> list[str]:
    """Rank 1 leaves; calls that rank 0 has started then fail, for every caller."""
    group = join()
    dist.all_reduce(torch.ones(1), group=group)
    if dist.get_rank() == 1:
        del group
        dist.destroy_process_group()
        return []
    texts = []
    work = dist.all_reduce(torch.ones(9), group=group, async_op=True)
    future = work.get_future()
    for ask in (
        work.wait,
        future.wait,
        lambda: dist.all_reduce(torch.ones(9), group=group),
        lambda: functional.wait_tensor(functional.all_reduce(torch.ones(9), "sum", group)),
        lambda: DistributedDataParallel(nn.Linear(2, 2), process_group=group),
    ):
        with pytest.raises((CommError, RuntimeError)) as error:
            ask()
        texts.append(f"{type(error.value).__name__} {error.value}")
    return texts


def test_a_lost_peer_is_an_error_in_every_way_of_waiting(pool: Pool) -> None:
    texts = pool.run(_deserted, 2)[0]
    assert len(texts) == 5
    assert all("rank 1 is gone" in text for text in texts), texts
    assert texts[0].startswith("CommError all-reduce failed")
    assert "CommError" in texts[3]
