"""Workers and servers that are killed at random instants: the job goes on, or ends with one error."""

import itertools
import json
import os
import random
import signal
import threading
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import plait
from plait.comm import launch_local
from plait.comm.connection import Message
from plait.comm.rank_monitor import RestartPolicy
from plait.errors import CommError
from plait.plan import Plan
from plait.server.job import join_job, process_world, restart_policy
from plait.server.server import Server

STEPS, WORKERS = 40, 3


class Ledger(nn.Module):
    """Weights of which row w is minus the number of worker w's updates, with SGD at a learning rate of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(WORKERS, 2048))

    def forward(self, worker: Tensor) -> Tensor:
        return self.rows[int(worker)].sum()


def job(
    folder: Path,
    sync: str,
    *victims: int,
    delay_s: float = 0.0,
    requests: int = 0,
    restarts: int = 0,
    server: str = "dedicated",
) -> None:
    """A worker or server. Each of `victims` kills itself: a worker this long after its first step, a server
    when it has executed so many requests, before it replies. One that was started again does not."""

    def die_later() -> None:
        (folder / "victim").touch()
        threading.Timer(delay_s, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()

    rank = int(os.environ["RANK"])
    is_victim = rank in victims and not (folder / "victim").exists()
    if is_victim and rank >= WORKERS:
        handle, numbers = Server._handle, itertools.count()

        def handle_or_die(server: Server, worker: int, message: Message) -> Message:
            reply = handle(server, worker, message)
            if next(numbers) == requests:
                os.kill(os.getpid(), signal.SIGKILL)
            return reply

        mock.patch.object(Server, "_handle", handle_or_die).start()
    try:
        engine = plait.parallelize(
            Ledger(),
            f"dp={WORKERS} servers=2 server={server} sync={sync}",
            optimizer=torch.optim.SGD,
            optimizer_args={"lr": 1.0},
            loss=lambda out, _: (out, 1),
        )
        while engine.num_steps < STEPS:
            engine.step({"worker": torch.tensor([rank])})
            if is_victim and engine.num_steps == 1:
                die_later()
            while is_victim and engine.num_steps == STEPS - 1:  # before its death, on a fast machine
                time.sleep(0.05)
            while rank == 0 and engine.num_steps == STEPS // 2 and restarts:
                restarts -= engine.server_counts()["joined"] > WORKERS
                time.sleep(0.05)
    except CommError as error:
        (folder / f"error-{rank}").write_text(error.fact)
        raise SystemExit(2) from error
    decided = engine.server_counts()["decided"]  # others go on between this, the rows and the counts
    rows = -engine.full_parameters()["rows"]
    counts = engine.server_counts()
    if rank == 0:
        text = json.dumps([rows.amin(1).tolist(), rows.amax(1).tolist(), decided, counts])
        (folder / "result").write_text(text)
    engine.world.close()


def check_death_of_a_worker(
    folder: Path, sync: str, seed: int, restarts: int = 0, *, with_server: bool = False
) -> None:
    """`with_server`: servers have replicas, and one of them dies too."""
    draw = random.Random(seed)
    delay_s, victims, requests, server = draw.uniform(0.0, 0.15), [1], 0, "dedicated"
    if with_server:
        victims, requests, server = [1, WORKERS + draw.randrange(2)], draw.randrange(20, 400), "replicated"
    code = launch_local(
        WORKERS + 2,
        [],
        function=lambda: job(
            folder, sync, *victims, delay_s=delay_s, requests=requests, restarts=restarts, server=server
        ),
        policy=RestartPolicy(range(1, WORKERS + 2 * with_server), range(1, WORKERS), restarts),
    )
    assert code == 0
    fewest, most, decided, counts = json.loads((folder / "result").read_text())
    if sync == "async":  # each update is one worker's, and was applied to all chunks or to none
        assert fewest == most
        assert fewest[0] == STEPS
        assert counts["decided"] >= sum(fewest) >= decided - 1  # the victim's last one may be lost
    else:
        torch.testing.assert_close(torch.tensor(fewest), torch.tensor(most))
        # A step is the mean of its workers.
        torch.testing.assert_close(sum(fewest), float(STEPS), rtol=1e-5, atol=0)
    assert counts["left"] <= 2 + restarts
    assert counts["joined"] == WORKERS + restarts


@pytest.mark.parametrize(("sync", "seed", "restarts"), [("all", 0, 1), ("async", 1, 0), ("async", 2, 1)])
def test_a_job_goes_on_without_a_killed_worker_or_with_it_again_and_applies_updates_once(
    tmp_path: Path, sync: str, seed: int, restarts: int
) -> None:
    check_death_of_a_worker(tmp_path, sync, seed, restarts)


@pytest.mark.sweep
@pytest.mark.parametrize("with_server", [False, True])
@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("sync", ["all", "async"])
def test_a_job_goes_on_after_the_death_of_a_worker_and_of_a_server_with_a_replica_at_any_instant(
    tmp_path: Path, sync: str, seed: int, with_server: bool
) -> None:
    check_death_of_a_worker(tmp_path, sync, seed, restarts=seed % 2, with_server=with_server)


def check_death_of_a_server(folder: Path, server: int, requests: int, *workers: int) -> None:
    delay_s = random.Random(requests).uniform(0.0, 0.1)
    victims = (*workers, WORKERS + server)
    code = launch_local(
        WORKERS + 2,
        [],
        function=lambda: job(folder, "all", *victims, delay_s=delay_s, requests=requests),
        policy=RestartPolicy(workers),
    )
    errors = {path.read_text() for path in folder.glob("error-*")}
    assert code in (2, 128 + signal.SIGKILL)
    assert any(f"has lost server {server}" in error for error in errors)
    assert not (folder / "result").exists()


@pytest.mark.parametrize(("server", "requests", "workers"), [(0, 40, ()), (1, 101, (1,))])
def test_a_killed_server_with_or_without_a_worker_ends_the_job_with_an_error_that_names_it(
    tmp_path: Path, server: int, requests: int, workers: tuple[int, ...]
) -> None:
    check_death_of_a_server(tmp_path, server, requests, *workers)


@pytest.mark.sweep
@pytest.mark.parametrize("workers", [(), (1,)])
@pytest.mark.parametrize("requests", range(10, 210, 20))
def test_a_server_killed_at_any_request_ends_the_job_with_an_error(
    tmp_path: Path, requests: int, workers: tuple[int, ...]
) -> None:
    check_death_of_a_server(tmp_path, requests // 20 % 2, requests, *workers)


def check_one_error(printed: str, *words: str) -> None:
    assert printed.count("Error") == 1, printed
    assert all(word in printed for word in (*words, "given   :", "expected:", "try     :"))


@pytest.mark.parametrize(
    ("words", "victim", "has_joined", "name"),
    [
        ("dp=2 servers=1", 1, False, "worker 1"),
        ("dp=2 servers=1", 1, True, "worker 1"),
        ("dp=2 servers=1", 2, True, "server 0"),
        ("dp=1 servers=2 server=replicated", 2, False, "server 1"),
    ],
)
def test_a_process_that_dies_before_all_have_joined_ends_the_job_with_one_error_that_names_it(
    capfd: pytest.CaptureFixture[str], words: str, victim: int, has_joined: bool, name: str
) -> None:
    plan = Plan.parse(words)

    def die_early() -> None:
        if int(os.environ["RANK"]) == victim and not has_joined:
            os.kill(os.getpid(), signal.SIGKILL)
        process = join_job(plan)
        if process.rank == victim:
            os.kill(os.getpid(), signal.SIGKILL)
        plait.parallelize(Ledger(), plan, world=process_world(process), loss=lambda out, _: (out, 1))
        time.sleep(60)

    begin_s = time.monotonic()
    code = launch_local(plan.num_ranks, [], function=die_early, policy=restart_policy(plan, 0))
    assert code == 128 + signal.SIGKILL
    assert time.monotonic() - begin_s < 25
    check_one_error(capfd.readouterr().err, f"{name} was killed before the job had begun", "SIGKILL")


@pytest.mark.parametrize("workers", [1, 2])
def test_the_death_of_worker_0_ends_the_job_with_one_error_that_names_it(
    capfd: pytest.CaptureFixture[str], workers: int
) -> None:
    plan = Plan.parse(f"dp={workers} servers=1")

    def train() -> None:
        rank = int(os.environ["RANK"])
        engine = plait.parallelize(Ledger(), plan, optimizer=torch.optim.SGD, loss=lambda out, _: (out, 1))
        try:
            for step in range(1000):
                engine.step({"worker": torch.tensor([rank])})
                if rank == 0 and step == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
        except CommError as error:
            os.write(2, f"{error.message()}\n".encode())
            raise SystemExit(1) from error

    code = launch_local(plan.num_ranks, [], function=train, policy=restart_policy(plan, 0))
    assert code == 128 + signal.SIGKILL
    check_one_error(capfd.readouterr().err, "worker 0 is gone" if workers == 2 else "worker 0 was killed")
