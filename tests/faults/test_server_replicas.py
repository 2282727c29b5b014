"""Servers that are killed go on at their replicas, with the numbers of a run that nothing disturbed."""

import itertools
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import plait
from plait.comm import launch_local
from plait.errors import CommError
from plait.plan import Plan
from plait.server.job import join_job, process_world, restart_policy
from plait.server.replica import Replica
from plait.server.server import Server
from plait.server.state import ServerState

WORKERS, STEPS = 2, 8
INSTANTS: dict[
    str, tuple[type, str, bool]
] = {  # of the victim's death: a method, and whether it has returned
    "before it forwards": (Replica, "forward", False),
    "after it forwarded": (Replica, "forward", True),
    "before it executes": (Server, "_handle", False),
    "before it replies": (Server, "_handle", True),
    "during a pull": (ServerState, "read", False),
}


def die_at(instant: str, number: int) -> None:
    """Kill this process by SIGKILL at one of its calls."""
    kind, name, has_returned = INSTANTS[instant]
    call: Callable[..., Any] = getattr(kind, name)
    numbers = itertools.count()

    def call_or_die(*arguments: Any) -> Any:
        is_last = next(numbers) == number
        if is_last and not has_returned:
            os.kill(os.getpid(), signal.SIGKILL)
        result = call(*arguments)
        if is_last:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    mock.patch.object(kind, name, call_or_die).start()


def job(folder: Path, plan: Plan, deaths: dict[int, tuple[str, int]], sends: bool) -> None:
    """A worker or server; worker 0 writes weights and optimizer states. `deaths`: by server."""
    process = join_job(plan)
    if (death := deaths.get(process.rank - WORKERS)) is not None:
        die_at(*death)
    world = process_world(process, shares_memory=not sends)
    torch.manual_seed(1)
    try:
        engine = plait.parallelize(
            nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 1)),
            plan,
            optimizer_args={"lr": 0.1},
            clip_norm=0.5,
            loss=lambda out, _: (out.square().sum(), out.numel()),
            world=world,
        )
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(WORKERS * step + process.rank)
            engine.step({"input": torch.rand(4, 40, generator=generator)})
        state = engine.full_parameters()
    except CommError as error:
        (folder / f"error-{process.rank}").write_text(error.fact)
        raise SystemExit(2) from error
    if process.rank == 0:
        (folder / "weights").write_bytes(b"".join(state[name].numpy().tobytes() for name in sorted(state)))
    world.close()


def run(folder: Path, deaths: dict[int, tuple[str, int]], *, sends: bool = False, servers: int = 2) -> int:
    plan = Plan.parse(f"dp={WORKERS} servers={servers} server=replicated")
    function, policy = lambda: job(folder, plan, deaths, sends), restart_policy(plan, 0)
    return launch_local(plan.num_ranks, [], function=function, policy=policy)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run(folder, {}) == 0
    return (folder / "weights").read_bytes()


@pytest.mark.parametrize(
    ("server", "instant", "number", "sends"),
    [
        (0, "before it forwards", 40, True),
        (0, "after it forwarded", 41, False),
        (1, "before it replies", 30, True),
        (1, "during a pull", 17, True),
    ],
)
def test_a_run_whose_server_is_killed_goes_on_at_its_replica_with_the_same_bits(
    tmp_path: Path,
    undisturbed: bytes,
    capfd: pytest.CaptureFixture[str],
    server: int,
    instant: str,
    number: int,
    sends: bool,
) -> None:
    assert run(tmp_path, {server: (instant, number)}, sends=sends) == 0
    assert f"server {server} is gone: its replica goes on" in capfd.readouterr().err
    assert (tmp_path / "weights").read_bytes() == undisturbed


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(30))
def test_a_server_killed_at_any_instant_changes_no_bit(tmp_path: Path, undisturbed: bytes, seed: int) -> None:
    draw = random.Random(seed)
    death = (draw.choice(list(INSTANTS)), draw.randrange(10, 120))
    servers = draw.choice([2, 3])
    server, sends = draw.randrange(servers), draw.choice([False, True])
    assert run(tmp_path, {server: death}, sends=sends, servers=servers) == 0
    assert (tmp_path / "weights").read_bytes() == undisturbed


def test_the_death_of_a_server_and_its_replica_ends_the_job_with_an_error_that_names_the_server(
    tmp_path: Path,
) -> None:
    assert run(tmp_path, {0: ("before it replies", 20), 1: ("before it replies", 60)}) == 2
    errors = {path.read_text() for path in tmp_path.glob("error-*")}
    assert any("has lost server" in error for error in errors)
    assert not (tmp_path / "weights").exists()
