"""Random schedules run to their end over a transport that holds nothing, with the numbers of one process.

[Note: a transport without buffers]
A channel that holds even one byte lets a sender go on before its receiver has asked. Here a message starts
when its receiver has taken memory for it and has said so, and not a byte sooner: a rank that relies on a
message being under way hangs. The sender's half waits on a thread, as a network's would.
"""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from plait.comm import Group, Mesh, Work, World, connect, send, start_receive, start_send
from plait.parallel.pipeline import p2p
from plait.parallel.pipeline.executor import Pipeline
from plait.parallel.pipeline.split_backward import BackwardSplitter, split_linears
from plait.plan import Grid
from plait.plan.communicators import Communicator, sends_channel
from plait.plan.schedule import Schedule, check
from support.pool import Pool
from support.schedules import random_schedule

RANKS, WIDTH, SAMPLES = 3, 4, 2
NUM_SCHEDULES, NUM_IN_SWEEP = 150, 500


class Meeting:
    """`start_send` and `start_receive` that meet. See [Note: a transport without buffers]."""

    def __init__(self) -> None:
        self.asked_early = 0  # sends before the receiver has posted

    def start_send(self, tensor: Tensor, group: Group, to: int, *, label: str = "") -> Work:
        def when_asked() -> None:
            asked = torch.zeros(1)
            coming = start_receive(asked, group, to)
            self.asked_early += not coming.is_done()
            coming.wait()
            send(tensor, group, to, label=label)

        assert group.comm_thread is not None
        return group.comm_thread.submit(when_asked)

    def start_receive(self, tensor: Tensor, group: Group, source: int, *, label: str = "") -> Work:
        coming = start_receive(tensor, group, source, label=label)
        asking = start_send(torch.ones(1), group, source)
        return Work(asking.wait, coming.wait, is_done=lambda: asking.is_done() and coming.is_done())


class Block(nn.Module):
    def __init__(self, stage: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        numbers = torch.Generator().manual_seed(stage)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=numbers, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


class Plain:
    """The part of ZeRO that an executor needs, for one data rank: autograd, and gradients in `.grad`."""

    def backward(self, roots: Sequence[Any], gradients: Sequence[Tensor | None], **_: Any) -> None:
        if roots:
            torch.autograd.backward(roots, gradients)

    def backward_weight(self, rest: Any, **_: Any) -> None:
        def deliver(parameter: Tensor, gradient: Tensor) -> None:
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

        rest.run(deliver)


class Stage:
    def __init__(self, number: int, last: int, inputs: Sequence[Tensor], halves: BackwardSplitter) -> None:
        self.sharded: Any = Plain()
        self.block = Block(number)
        self.is_last = number == last
        self.inputs = inputs
        self.loss = 0.0
        split_linears([self.block], halves)

    def forward(self, micro: int, received: Any) -> Any:
        out = self.block(self.inputs[micro] if received is None else received)
        if not self.is_last:
            return out
        total = out.square().sum()
        self.loss += total.item()
        return total


def inputs_of(schedule: Schedule) -> list[Tensor]:
    numbers = torch.Generator().manual_seed(99)
    return [
        torch.randn(SAMPLES, WIDTH, generator=numbers, dtype=torch.float64)
        for _ in range(schedule.num_micros)
    ]


def in_one_process(schedule: Schedule) -> tuple[float, list[nn.Module]]:
    blocks = [Block(stage) for stage in range(schedule.num_stages)]
    total = torch.zeros((), dtype=torch.float64)
    for x in inputs_of(schedule):
        total = total + nn.Sequential(*blocks)(x).square().sum()
    total.backward()
    return total.item(), list(blocks)


def execute(schedule: Schedule, mesh: Mesh) -> None:
    """This rank's part, compared with one process's."""
    halves = BackwardSplitter()
    pipeline = Pipeline(schedule.rank_of, mesh, halves)
    last = schedule.num_stages - 1
    stages = {
        stage: Stage(stage, last, inputs_of(schedule), halves)
        for stage, rank in schedule.rank_of.items()
        if rank == mesh.coord["pp"]
    }
    pipeline.run(schedule, stages, ["alike"] * schedule.num_micros)
    loss, blocks = in_one_process(schedule)
    for number, stage in stages.items():
        assert number != last or stage.loss == pytest.approx(loss, rel=1e-12)
        for mine, whole in zip(stage.block.parameters(), blocks[number].parameters(), strict=True):
            torch.testing.assert_close(mine.grad, whole.grad, rtol=1e-9, atol=1e-12)


def schedule_of(seed: int) -> Schedule:
    """A random one, of other numbers of micro-batches, chunks and splits each time."""
    rng = random.Random(seed)
    return random_schedule(
        rng, RANKS, micros=rng.randint(1, 5), chunks=rng.randint(1, 3), splits=rng.choice([0, 0.5, 1])
    )


def search(seeds: range, *, meets: bool) -> tuple[int, int]:
    """Runs the schedules of these seeds. Gives how many actions were done, and how many sends came early."""
    mesh, meeting, num_actions = Mesh(connect(), Grid.from_degrees(pp=RANKS)), Meeting(), 0
    with pytest.MonkeyPatch.context() as patch:
        if meets:
            patch.setattr(p2p, "start_send", meeting.start_send)
            patch.setattr(p2p, "start_receive", meeting.start_receive)
        for seed in seeds:
            schedule = schedule_of(seed)
            check(schedule)
            print(f"seed {seed}\n{schedule}", flush=True)  # the last one is shown if ranks hang
            execute(schedule, mesh)
            num_actions += len(schedule.ranks[mesh.coord["pp"]])
    return num_actions, meeting.asked_early


@pytest.mark.parametrize("number", [NUM_SCHEDULES, pytest.param(NUM_IN_SWEEP, marks=pytest.mark.sweep)])
def test_random_schedules_end_although_nothing_is_sent_before_it_is_asked_for(
    pool: Pool, number: int
) -> None:
    found = pool.over("host").run(search, RANKS, range(number), meets=True)
    for num_actions, asked_early in found:
        assert num_actions > 5 * number
        assert asked_early > number, "hardly anybody had to wait: the transport holds messages"


def test_random_schedules_end_over_gloo(pool: Pool) -> None:
    pool.over("gloo").run(search, RANKS, range(NUM_IN_SWEEP, NUM_IN_SWEEP + 40), meets=False)


class OneStream:
    """`start_send` and `start_receive` that run one after the other on each rank, and wait for their peer."""

    def start_send(self, tensor: Tensor, group: Group, to: int, *, label: str = "") -> Work:
        def when_asked() -> None:
            start_receive(torch.zeros(1), group, to).wait()
            send(tensor, group, to, label=label)

        return connect().group.comm_thread.submit(when_asked)  # type: ignore[union-attr]

    def start_receive(self, tensor: Tensor, group: Group, source: int, *, label: str = "") -> Work:
        def ask() -> None:
            work = start_receive(tensor, group, source, label=label)
            start_send(torch.ones(1), group, source).wait()
            work.wait()

        return connect().group.comm_thread.submit(ask)  # type: ignore[union-attr]


def search_on_one_stream(seeds: range) -> None:
    world, stream = connect(), OneStream()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(World, "shares_communicators", True)  # as on NCCL
        patch.setattr(p2p, "start_send", stream.start_send)
        patch.setattr(p2p, "start_receive", stream.start_receive)
        communicators = [Communicator(("pp",), sends_channel(number)) for number in range(3)]
        mesh = Mesh(world, Grid.from_degrees(pp=RANKS), communicators)
        for seed in seeds:
            schedule = schedule_of(seed)
            print(f"seed {seed}\n{schedule}", flush=True)  # the last one is shown if ranks hang
            execute(schedule, mesh)


def test_random_schedules_end_on_one_stream_per_rank(pool: Pool) -> None:
    pool.over("host").run(search_on_one_stream, RANKS, range(60))
