"""Parameter servers compute what data parallelism computes, and keep the clocks of their policies."""

import math
import os
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.checkpoint import open_checkpoint
from plait.comm import connect, rendezvous
from plait.comm.connection import Message
from plait.comm.rendezvous import leave_store
from plait.comm.shm import rendezvous as shm_rendezvous
from plait.errors import ConfigError, ModelError
from plait.plan import Plan
from plait.server.job import join_job, process_world
from plait.server.protocol import Verb
from plait.server.worker import Servers
from support import programs
from support.pool import Pool


def trained(plan: str, build: Any = programs.rough_llama, sends: bool = False) -> Any:
    """Losses, norms and weights of four steps; None on a server. `sends`: without shared memory."""
    parsed = Plan.parse(plan)
    world = process_world(join_job(parsed), shares_memory=not sends) if parsed.num_servers else None
    try:
        engine = plait.parallelize(
            build(),
            parsed,
            optimizer_args=programs.ADAMW,
            clip_norm=programs.CLIP,
            loss=programs.summed_loss,
            seed=3,
            world=world,
        )
    except SystemExit:
        return None
    results = [engine.step(programs.share_of(batch, engine)) for batch in programs.batches(4)]
    weights, counts = engine.full_parameters(), engine.server_counts()
    if world is not None:
        world.close()
    return [(result.loss, result.grad_norm) for result in results], weights, counts


def first_weights(plan: str) -> dict[str, Tensor]:
    return plait.parallelize(
        programs.rough_llama(), plan, loss=programs.summed_loss, seed=3
    ).full_parameters()


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return [name for name in one if not torch.equal(one[name], other[name])]


@pytest.mark.parametrize(
    ("servers", "sends"),
    [("servers=1", False), ("servers=2", True), ("server=colocated", False)],
)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_servers_that_sum_all_pushes_have_the_bits_of_zero_1(
    pool: Pool, servers: str, sends: bool, precision: str
) -> None:
    expected, weights, _ = pool.run(trained, 2, f"dp=2 zero=1 precision={precision}")[0]
    plan = f"dp=2 precision={precision} {servers}"
    for found in pool.run(trained, Plan.parse(plan).num_ranks, plan, programs.rough_llama, sends)[:2]:
        assert found[0] == expected
        assert not differing(found[1], weights)


def on_hosts_of_their_own(plan: str) -> Any:
    host = {"host_identity": lambda: f"host {os.environ['RANK']}"}
    with mock.patch.multiple(rendezvous, **host), mock.patch.multiple(shm_rendezvous, **host):
        return trained(plan)


@pytest.mark.parametrize("servers", ["servers=1", "server=colocated"])
def test_processes_on_several_hosts_send_what_others_map(pool: Pool, servers: str) -> None:
    expected, weights, _ = pool.run(trained, 2, "dp=2 zero=1")[0]
    plan = f"dp=2 {servers}"
    results = pool.run(on_hosts_of_their_own, Plan.parse(plan).num_ranks, plan)
    found = results[0]
    assert found[0] == expected
    assert not differing(found[1], weights)
    if servers == "servers=1":
        # Four pushes without the zeros of unused rows; five pulls, and a read of weights and two states.
        size = sum(weight.nbytes for weight in weights.values())
        sent, received = results[1][2]["moved_bytes"][1]  # by worker 1's own count, taken after its reads
        assert 2 * size < sent < 4.1 * size
        assert 8 * size <= received < 8.2 * size


def branches() -> nn.Module:
    torch.manual_seed(5)
    return programs.Branches()


def reference(build: Any, micros: int) -> Any:
    return trained(f"dp=1 precision=fp64 micro={micros}", build)


@pytest.mark.parametrize(
    ("build", "plan", "sends"),
    [
        (programs.tied_llama, "dp=1 servers=3", True),
        (branches, "dp=4 servers=3 micro=1", False),
        (branches, "dp=3 server=colocated", True),
    ],
)
def test_workers_and_servers_of_any_number_compute_what_one_process_does(
    pool: Pool, build: Any, plan: str, sends: bool
) -> None:
    """Tied, frozen and unused parameters; a scalar; more servers than large chunks."""
    parsed = Plan.parse(f"{plan} precision=fp64")
    found = pool.run(trained, parsed.num_ranks, str(parsed), build, sends)[0]
    expected, weights, _ = pool.run(reference, 1, build, parsed.dp * parsed.micro)[0]
    torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(expected), rtol=1e-9, atol=0)
    for name, weight in weights.items():
        torch.testing.assert_close(found[1][name], weight, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("reduce", "sends", "error"), [("bf16", False, 0.02), ("int8", True, 0.12), ("topk:0.5", False, 0.5)]
)
def test_compressed_pushes_train_nearly_as_exact_ones(
    pool: Pool, reduce: str, sends: bool, error: float
) -> None:
    """The distance from the exact weights, relative to the distance that training has moved them."""
    start = pool.run(first_weights, 1, "dp=1")[0]
    exact = pool.run(trained, 3, "dp=2 servers=1")[0][1]
    plan = f"dp=2 servers=1 reduce={reduce}"
    found = pool.run(trained, 3, plan, programs.rough_llama, sends)[0][1]
    moved = sum((exact[name] - start[name]).square().sum() for name in exact)
    off = sum((exact[name] - found[name]).square().sum() for name in exact)
    assert 0 < float((off / moved).sqrt()) < error


def memory_of_worker(plan: str) -> Any:
    """Predicted and measured bytes after a step, and a copy of the weights and states."""
    try:
        engine = plait.parallelize(programs.llama(), plan, loss=programs.summed_loss)
    except SystemExit:
        return None
    engine.step(programs.share_of(programs.batches(1)[0], engine))
    engine.full_parameters()
    found = engine.estimated_memory((programs.SEQUENCES, programs.LENGTH)), engine.memory()
    engine.world.close()
    return found


@pytest.mark.parametrize("plan", ["sync=async reduce=int8", "precision=bf16"])
def test_the_memory_of_a_worker_has_no_optimizer_states_but_what_its_codes_have_lost(
    pool: Pool, plan: str
) -> None:
    predicted, measured = pool.run(memory_of_worker, 2, f"dp=1 servers=1 {plan}")[0]
    assert measured == replace(predicted, activations=measured.activations)
    assert measured.optimizer == 0


def pushes_before_the_first_block() -> Any:
    """The number of pushes that the server has had when backward comes to the model's first block."""
    plan = Plan.parse("dp=1 servers=1")
    world = process_world(join_job(plan), shares_memory=False)
    try:
        engine = plait.parallelize(programs.llama(), plan, loss=programs.summed_loss, world=world)
    except SystemExit:
        return None
    replies: list[int] = []
    request = Servers.request

    def counted(servers: Servers, index: int, message: Message) -> Message:
        reply = request(servers, index, message)
        replies.append(reply.verb)
        return reply

    seen = []

    def wait(*_: Any) -> None:
        end = time.monotonic() + 10.0
        while not replies and time.monotonic() < end:
            time.sleep(0.001)
        seen.append([*replies])

    engine.model.model.layers[0].register_full_backward_pre_hook(wait)
    with mock.patch.object(Servers, "request", counted):
        engine.step(programs.share_of(programs.batches(1)[0], engine))
    world.close()
    return seen[0]


def test_gradients_are_pushed_while_backward_computes_others(pool: Pool) -> None:
    verbs = pool.run(pushes_before_the_first_block, 2)[0]
    assert {*verbs} == {Verb.PUSH}


def joined_with_another_model(plan: str) -> str:
    """Join with one layer more than the servers and the other worker have, on worker 1."""
    layers = 3 if os.environ["RANK"] == "1" else 2
    try:
        engine = plait.parallelize(programs.llama(layers=layers), plan, loss=programs.summed_loss)
    except SystemExit:
        return "served"
    except ModelError as error:
        leave_store()
        return str(error)
    engine.world.close()
    return "joined"


def test_a_worker_with_another_model_is_refused(pool: Pool) -> None:
    first, second, server = pool.run(joined_with_another_model, 3, "dp=2 servers=1")
    assert "a worker trains another model than the servers" in second
    assert (first, server) == ("joined", "served")


# --- clocks of real processes


class Ledger(nn.Module):
    """Weights of which row w is minus the number of worker w's updates, with SGD at a learning rate of 1."""

    def __init__(self, workers: int) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(workers, 1024))

    def forward(self, worker: Tensor) -> Tensor:
        return self.rows[int(worker)].sum()


def read_clocks(plan: str, steps: int, seed: int) -> Any:
    """At every clock, the updates that a worker reads; and what the servers have counted."""
    delays = random.Random(1000 * seed + int(os.environ["RANK"]))
    workers = Plan.parse(plan).dp
    try:
        engine = plait.parallelize(
            Ledger(workers),
            plan,
            optimizer=torch.optim.SGD,
            optimizer_args={"lr": 1.0},
            loss=lambda out, _: (out, 1),
        )
    except SystemExit:
        return None
    seen = []
    while engine.num_steps < steps:
        rows = -engine.model.rows.detach()
        seen.append((engine.num_steps, rows.amin(1).tolist(), rows.amax(1).tolist()))
        time.sleep(delays.choice([0.0, 0.0, 0.02, 0.05]))
        engine.step({"worker": torch.tensor([engine.data_rank])})
    counts = engine.server_counts()
    engine.world.close()
    return engine.data_rank, seen, counts


@pytest.mark.parametrize("bound", [0, 2])
def test_a_read_at_clock_c_has_every_update_up_to_c_minus_the_bound_minus_1(pool: Pool, bound: int) -> None:
    plan = f"dp=3 servers=2 sync=stale:{bound}"
    found = [each for each in pool.run(read_clocks, 5, plan, 15, bound) if each is not None]
    assert len(found) == 3
    for worker, seen, counts in found:
        assert counts["max_spread"] <= bound
        assert sum(counts["staleness"]) == counts["decided"] == counts["taken"]
        assert counts["staleness"][counts["max_staleness"]] > 0
        assert counts["waited_s"] > 0
        for clock, fewest, most in seen:
            assert fewest[worker] == most[worker] == clock, "it reads its own updates"
            for updates, latest in zip(fewest, most, strict=True):
                assert clock - bound <= updates
                assert latest <= clock + bound + 1


def descend(rate: float, updates: int) -> Any:
    """Workers that push in turns, each a gradient from weights that are dp - 1 updates old."""
    engine_of: list[plait.Engine] = []
    process = join_job(Plan.parse("dp=3 servers=1 sync=async"))

    class Point(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.x = nn.Parameter(torch.ones(1, dtype=torch.float64))

        def forward(self, worker: Tensor) -> Tensor:
            if engine_of:  # the weights are read; wait for the turn to push
                process.store.wait_for(f"turn {3 * engine_of[0].num_steps + int(worker)}")
            return 0.5 * self.x.square().sum()

    try:
        engine = plait.parallelize(
            Point(),
            "dp=3 servers=1 sync=async precision=fp64",
            optimizer=torch.optim.SGD,
            optimizer_args={"lr": rate},
            loss=lambda out, _: (out, 1),
        )
    except SystemExit:
        return None
    if engine.data_rank == 0:
        process.store.set("turn 0", "")
    engine_of.append(engine)
    size = []
    while engine.num_steps < updates // 3:
        turn = 3 * engine.num_steps + engine.data_rank
        engine.step({"worker": torch.tensor([engine.data_rank])})
        size.append(abs(engine.model.x.item()))
        process.store.set(f"turn {turn + 1}", "")
    counts = engine.server_counts()
    engine.world.close()
    return size, counts


def test_asynchronous_steps_are_stable_up_to_the_rate_of_their_staleness(pool: Pool) -> None:
    """With a delay of tau updates, lr < 2 sin(pi / (2 (2 tau + 1))) / L: here tau is 2 and L is 1."""
    limit = 2 * math.sin(math.pi / 10)
    sizes = {}
    for share in (0.95, 1.05):
        size, counts = pool.run(descend, 4, share * limit, 180)[0]
        assert counts["max_staleness"] == 2
        sizes[share] = max(size[-10:]) / max(size[10:20])
    assert sizes[0.95] < 0.5
    assert sizes[1.05] > 2.0


def _with_a_world_of_all() -> str:
    everybody = connect()
    with pytest.raises(ConfigError) as caught:
        plait.parallelize(
            programs.rough_llama(), "dp=1 servers=1", loss=programs.summed_loss, world=everybody
        )
    return str(caught.value)


def test_a_world_of_workers_and_servers_together_is_refused(pool: Pool) -> None:
    for said in pool.run(_with_a_world_of_all, 2):
        assert "workers and servers are no ranks of one world" in said
        assert "given   : world= of 2 ranks, dp=1 servers=1" in said
        assert "try     : parallelize(...) without world=" in said


def _saved_by_all(folder: str) -> dict[str, Tensor] | None:
    try:
        engine = plait.parallelize(programs.rough_llama(), "dp=2 servers=1", loss=programs.summed_loss)
    except SystemExit:
        return None
    first, second = programs.batches(2)
    engine.step(programs.share_of(first, engine))
    assert engine.save(folder).name == "step-00000001"
    weights = engine.full_parameters()
    engine.step(programs.share_of(second, engine))  # both workers: worker 0 has saved
    engine.world.close()
    return weights


def test_every_worker_may_save(pool: Pool, tmp_path: Path) -> None:
    weights, *_ = pool.run(_saved_by_all, 3, str(tmp_path))
    with open_checkpoint(tmp_path / "step-00000001").reader() as reader:
        assert differing(weights, {name: reader.read_full(f"weights/{name}") for name in weights}) == []
