"""`engine.shard`: every rank loads the same batches, and trains on its share."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import plait
from plait.errors import PlanError
from support.pool import Pool

SAMPLES = 20


def engine_of(plan: str) -> plait.Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)).double()

    def loss(outputs: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, int]:
        return (outputs[:, 0] - batch["labels"]).square().sum(), len(outputs)

    return plait.parallelize(model, f"{plan} precision=fp64", loss=loss, blocks=[nn.Linear])


def loader(batch_size: int, seed: int = 0) -> DataLoader[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.arange(SAMPLES * 3, dtype=torch.float64).view(SAMPLES, 3).sin()
    samples = [{"input": row, "labels": row.sum()} for row in rows]
    return DataLoader(samples, batch_size, shuffle=True, generator=generator)  # type: ignore[arg-type]


def losses(plan: str, batch_size: int) -> list[float]:
    engine = engine_of(plan)
    shares = engine.shard(loader(batch_size))
    assert len(shares) == len(loader(batch_size))
    trained = [engine.step(share).loss for _ in range(2) for share in shares]
    evaluated = [engine.evaluate(s) for s in engine.shard(loader(7), trains=False)]
    return [*trained, sum(result.loss_sum for result in evaluated)]


@pytest.mark.parametrize(
    ("ranks", "plan", "batch_size"),
    [(2, "dp=2 zero=1", 8), (3, "dp=3", 10), (2, "dp=2 micro=2", 8), (2, "pp=2 micro=2", 6)],
)
def test_shares_of_a_loader_train_as_the_loader_does_in_one_process(
    pool: Pool, ranks: int, plan: str, batch_size: int
) -> None:
    expected = losses("dp=1", batch_size)
    for of_rank in pool.run(losses, ranks, plan, batch_size):
        assert of_rank == pytest.approx(expected, rel=1e-9)


def refused(plan: str, batch_size: int, seeds: tuple[int, int]) -> str:
    engine = engine_of(plan)
    try:
        for share in engine.shard(loader(batch_size, seeds[engine.world.rank])):
            engine.step(share)
    except PlanError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("plan", "batch_size", "seeds", "message"),
    [
        ("dp=2", 19, (0, 0), "drop_last=True"),  # the last batch has one sample
        ("dp=2 micro=2", 5, (0, 0), "trains=False"),
        ("dp=2", 4, (0, 1), "ranks load different batches"),
    ],
)
def test_batches_without_a_share_for_every_rank_are_refused_on_all(
    pool: Pool, plan: str, batch_size: int, seeds: tuple[int, int], message: str
) -> None:
    assert all(message in said for said in pool.run(refused, 2, plan, batch_size, seeds))
