"""Parameter servers: ours, a program by torch's RPC, and data parallelism without servers; and stragglers.

    python benchmarks/servers.py [--tokens 256 16] [--rounds 3]

The Llama of 33.7 M parameters on 2 workers, and a server where there is one, with one thread each: fp32,
AdamW, a sequence of as many tokens a worker. Contenders run one after the other in every round, each
in processes of its own; a time is the median of a run's steps after the first ones: those of the slower
worker with RPC, and of worker 0 with us. `zero=1` has no server: the same update by reduce-scatter and
all-gather. The tutorial's program is run as it is written, and at its fastest: see `server_peers.py`.

Rows of `128 MiB` are of one worker and a server: a push, which the server reads from the worker's memory, and
of which it computes the norm, and a pull, which it writes there; relative to a copy in one process.

Rows of `straggler` are pushes per second that became part of an update, relative to sync=all, on 4 workers
whose computing is 50 short waits of 1 ms: the policies only, without cores that are shared. The last worker
is stopped for two thirds of the time, by SIGSTOP and SIGCONT, so that its step takes 150 ms.
`expected`: in 150 ms, sync=all takes 4 pushes, backup:1 takes 9 of the 3 fast workers, async 9 and 1, and
stale:3 in the long run 4, because the slowest worker bounds the others.
"""

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import common
import plait
import server_peers
from llama import Llama, llama_of
from peers import ADAMW
from plait.bench.report import machine
from plait.comm.shm.rendezvous import RemoteMemory, describe, new_arena
from plait.engine.spec import Arguments, validate
from plait.plan import Plan
from plait.server.job import chunk_table
from plait.server.state import ServerState

WORKERS = 2
RPC = "torch RPC"
TUTORIAL = "torch RPC, as written"
MEMORY = 2**25  # elements of float32
PLANS = ("servers=1", "servers=1 sync=async", "server=colocated", "zero=1")
WARM_UP = 2
STRAGGLER_WORKERS = 4
WAITS, WAIT_S = 50, 0.001  # of a step
PULSES = """
import os, select, signal, sys
pid = os.getppid()
while not select.select([sys.stdin], [], [], 0.02)[0]:
    os.kill(pid, signal.SIGSTOP)
    select.select([], [], [], 0.04)
    os.kill(pid, signal.SIGCONT)
"""
EXPECTED = {"sync=all": 1.0, "sync=backup:1": 9 / 4, "sync=stale:3": 1.0, "sync=async": 10 / 4}


def train(model: Llama, plan: str, steps: int) -> list[float]:
    """Be a rank of ours: seconds of each step."""
    torch.set_num_threads(1)
    engine = plait.parallelize(model.on_meta(), plan, optimizer_args=ADAMW)
    torch.manual_seed(engine.data_rank)
    batch = model.batch(1)
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step(batch)
        seconds.append(time.perf_counter() - start)
    engine.world.close()
    return seconds


class Waiting(nn.Module):
    """Computing that needs no core. A wait goes on while its process is stopped, so each of them is short."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(WAITS):
            time.sleep(WAIT_S)
        return self.linear(x)


@contextlib.contextmanager
def slowed(*, is_slow: bool) -> Iterator[None]:
    """Stop this process for two thirds of the time meanwhile, in pulses of 40 ms."""
    if not is_slow:
        yield
        return
    with subprocess.Popen([sys.executable, "-S", "-c", PULSES], stdin=subprocess.PIPE):
        yield  # then its input ends, and it leaves this process running


def straggle(sync: str, seconds: float) -> float:
    """Be a rank of 4 workers and a server; pushes per second that were taken, from the first step's end."""
    engine = plait.parallelize(
        Waiting(),
        f"dp={STRAGGLER_WORKERS} servers=1 {sync}",
        optimizer=torch.optim.SGD,
        optimizer_args={"lr": 1e-3},
        loss=lambda out, _: (out.square().sum(), len(out)),
    )
    batch = {"x": torch.ones(2, 8)}
    with slowed(is_slow=engine.data_rank == STRAGGLER_WORKERS - 1):
        engine.step(batch)
        before, start, num_pushes = engine.server_counts()["decided"], time.perf_counter(), []
        while time.perf_counter() < start + seconds:
            num_pushes.append(engine.step(batch).num_tokens / 2)
        taken = time.perf_counter() - start
        decided = engine.server_counts()["decided"] - before
    engine.world.close()
    return decided * statistics.mean(num_pushes) / taken


def move(numel: int, rounds: int) -> common.Times:
    """Be a server whose worker's memory is mapped: seconds of a push, of a pull, and of a copy."""
    torch.set_num_threads(1)
    model = nn.Linear(numel, 1, bias=False)
    spec = validate(Arguments(model, "dp=1 servers=1", optimizer=torch.optim.SGD))
    chunks = chunk_table(model, spec).of_server[0]
    state, arena = ServerState(chunks, spec, torch.float32, lambda _: None), new_arena(2)
    if arena is None:
        raise SystemExit("no memory can be shared here")
    sources, copied = [arena.empty(numel, torch.float32).zero_() for _ in range(2)], torch.zeros(numel)
    mapped = RemoteMemory(describe(arena), 2)
    base = arena.mapping.address
    gradient, weights = (mapped.tensor(t.data_ptr() - base, numel, torch.float32) for t in sources)

    def pull() -> None:
        for index, chunk in enumerate(chunks):
            state.read(index, weights[chunk.start : chunk.stop])

    def part_of(_worker: int, index: int) -> Tensor:
        return gradient[chunks[index].start : chunks[index].stop]

    found: common.Times = {"push": [], "pull": [], "copy": []}
    for clock in range(rounds):
        for name, work in (
            ("push", partial(state.sum, clock, (0,), part_of)),
            ("pull", pull),
            ("copy", partial(copied.copy_, weights)),
        ):
            start = time.perf_counter()
            work()
            found[name].append(time.perf_counter() - start)
    return {name: seconds[1:] for name, seconds in found.items()}


def times(arguments: argparse.Namespace, tokens: int) -> common.Times:
    model, steps = replace(llama_of(arguments), sequence=tokens), arguments.steps + WARM_UP
    contenders: dict[str, Callable[[], list[float]]] = {}
    for plan in PLANS:
        parsed = Plan.parse(f"dp={WORKERS} {plan}")
        contenders[plan] = lambda parsed=parsed: plait.launch(
            train, parsed.num_ranks, model, str(parsed), steps
        )

    def by_rpc(*, as_written: bool) -> list[float]:
        with tempfile.TemporaryDirectory(prefix="plait-bench-") as folder:
            words = (model, WORKERS, steps, as_written, str(Path(folder, "store")))
            return plait.launch(server_peers.train, WORKERS + 1, *words)

    contenders[RPC] = partial(by_rpc, as_written=False)
    contenders[TUTORIAL] = partial(by_rpc, as_written=True)
    found: common.Times = {name: [] for name in contenders}
    for _ in range(arguments.rounds):
        for name, run in contenders.items():
            found[name].append(statistics.median(run()[WARM_UP:]))
    return found


def stragglers(contenders: Sequence[str], seconds: float) -> list[common.Row]:
    rates = {sync: plait.launch(straggle, STRAGGLER_WORKERS + 1, sync, seconds) for sync in contenders}
    return [
        {"contender": sync, "of_sync": rate / rates["sync=all"], "expected": EXPECTED[sync]}
        for sync, rate in rates.items()
    ]


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 16])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--straggler-s", type=float, default=6.0)
    arguments = common.parse(parser, steps=1, rounds=1, straggler_s=0.2, tokens=[16])
    rows: list[common.Row] = []
    for tokens in arguments.tokens:
        found = times(arguments, tokens)
        ahead = {name: common.ratio(found[TUTORIAL], seconds) for name, seconds in found.items()}
        of_case = common.rows(f"{tokens} tokens", found, yardstick="zero=1", peers=(RPC, TUTORIAL))
        rows += [row | {"faster_than_tutorial": ahead[row["contender"]]} for row in of_case]
    moved = plait.launch(move, 1, 1024 if arguments.smallest else MEMORY, arguments.steps + 1)
    in_memory = common.rows("128 MiB", moved, yardstick="copy", peers=())
    rows += [row | {"faster_than_tutorial": None} for row in in_memory]
    empty: dict[str, Any] = dict.fromkeys(rows[0])
    policies = [*EXPECTED][:: 3 if arguments.smallest else 1]
    waits = [empty | {"case": "straggler", **row} for row in stragglers(policies, arguments.straggler_s)]
    rows = [row | {"of_sync": None, "expected": None} for row in rows]
    common.report("Parameter servers", [*rows, *waits], machine(), arguments.json)


if __name__ == "__main__":
    sys.exit(main())
