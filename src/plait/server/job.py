"""The roles of a job's processes: workers, then servers; with `server=colocated` each is both."""

import threading
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from plait.comm import JobProcess, Mesh, World, join_store
from plait.comm.connection import ServerAddress
from plait.comm.rank_monitor import RestartPolicy
from plait.comm.rendezvous import leave_store
from plait.comm.shm.rendezvous import new_arena
from plait.engine.build import EngineParts, build_shard_map
from plait.engine.engine import Engine
from plait.engine.spec import TrainingSpec
from plait.engine.update import Updater
from plait.errors import ConfigError
from plait.optim.update_kinds import state_kinds
from plait.plan import Grid, Plan
from plait.server.island import IslandUpdater
from plait.server.protocol import ChunkTable
from plait.server.replica import Replica
from plait.server.server import Server
from plait.server.worker import ServedModel, Servers, ServerUpdater

_DRAIN_S = 10.0  # from the end of worker 0, and of the job, to the end of the others
_LEAVE_S = 30.0  # for other workers to leave a colocated server


class ServerJob:
    """A job of workers and servers: see `Job` in `api.py`."""

    def __init__(self, plan: Plan, world: World | None) -> None:
        """`world`: from `process_world`; None: join the job. Raises ConfigError for a world of several
        ranks."""
        if world is not None and world.size > 1:
            raise ConfigError(
                "workers and servers are no ranks of one world",
                given=f"world= of {world.size} ranks, {plan}",
                expected="no world: parallelize connects each process to the servers",
                hint="parallelize(...) without world=",
            )
        self._process = join_job(plan)
        self.world = world or process_world(self._process)
        self.size = self._process.size

    def serve(self, spec: TrainingSpec) -> None:
        """On a server, serve the workers until they have left or the job is over, and exit. Raises
        ConfigError, on all processes, for an optimizer that is not element-wise."""
        served = served_spec(spec)
        state_kinds(served.given.optimizer, served.given.optimizer_args, served.groups)
        if self._process.rank >= spec.job.dp:
            _serve(spec.given.model, served, self._process)
            raise SystemExit(0)

    def build(self, spec: TrainingSpec) -> Engine:
        """Return a worker's engine, connected with the servers until `world.close()` or the process's end."""
        process, world, model, thread = self._process, self.world, spec.given.model, None
        if spec.job.server == "colocated":
            server = Server(process.rank, served_spec(spec), chunk_table(model, spec))
            address = ServerAddress(process.store, process.rank)
            thread = threading.Thread(target=server.serve, args=(address,), name="plait-server", daemon=True)
            thread.start()
        servers = Servers(process, spec.job, world.clock)

        def leave() -> None:
            servers.leave(ends_job=process.ends_with_first and process.rank == 0)
            if thread is not None:
                thread.join(_LEAVE_S)
            leave_store()

        def make_updater(parts: EngineParts) -> Updater:
            if spec.job.local_steps:
                return IslandUpdater(parts, spec, servers, world.arena)
            return ServerUpdater(parts, spec.job, servers, world.arena, ServedModel(parts))

        world.before_close(leave)
        try:
            return Engine(model, spec, Mesh(world, Grid.from_plan(spec.plan)), make_updater)
        except BaseException:
            world.close()  # or servers would wait for this worker
            raise


def join_job(plan: Plan, timeout_s: float = 600.0, *, ends_with_first: bool = False) -> JobProcess:
    """Join the job; a second call returns the same process. `ends_with_first`: the job is over when
    worker 0 leaves. Raises PlanError unless the job has as many processes as the plan needs."""
    process = join_store(timeout_s, ends_with_first=ends_with_first)
    plan.check_ranks(process.size)
    return process


def process_world(process: JobProcess, *, shares_memory: bool = True) -> World:
    """The world of one process: a rank by itself, whose parameters and gradients the servers reach. Without
    shared memory, or if the job has several hosts, they are sent."""
    shares_memory &= process.is_one_host
    return World.of_process(process, new_arena(2 * process.size) if shares_memory else None)


def restart_policy(plan: Plan, max_restarts: int) -> RestartPolicy:
    """Return the deaths that a job with servers survives: with dedicated ones, all workers but the first may
    die and are started again; so may servers that have replicas, which are not started again. Worker 0 ends
    the job. The error of a death names the role."""
    roles = [f"worker {rank}" for rank in range(plan.dp)] + [
        f"server {index}" for index in range(plan.servers)
    ]
    stop = plan.num_ranks if plan.server == "replicated" else plan.dp
    optional = range(1, stop) if plan.servers else ()
    return RestartPolicy(optional, range(1, plan.dp), max_restarts, _DRAIN_S, dict(enumerate(roles)))


def chunk_table(model: nn.Module, spec: TrainingSpec) -> ChunkTable:
    """The division of the model over the servers; it may be on meta."""
    (layouts,) = build_shard_map(model, spec, Grid.from_plan(spec.plan)).layouts
    units = [unit for layout in layouts.values() for unit in layout.units if unit.trains]
    return ChunkTable.build(units, spec.job.num_servers)


def served_spec(spec: TrainingSpec) -> TrainingSpec:
    """The specification with the optimizer of the servers: under local steps the outer one."""
    local = spec.job.local
    if not local.steps:
        return spec
    arguments: dict[str, Any] = {"lr": 1.0}
    if local.learning_rate is not None:
        arguments = {"lr": local.learning_rate, "momentum": local.momentum, "nesterov": local.momentum > 0}
    groups: list[dict[str, Any]] = [{} for _ in spec.groups]
    given = replace(spec.given, optimizer=torch.optim.SGD, optimizer_args=arguments, clip_value=None)
    return replace(spec, given=given, groups=groups)


def _serve(model: nn.Module, spec: TrainingSpec, process: JobProcess) -> None:
    """Serve the workers until they have left or the job is over. `spec`: see `served_spec`."""
    index, table, replica = process.rank - spec.job.dp, chunk_table(model, spec), None
    if spec.job.server == "replicated":
        thread = _serve_replica(index, spec, table, process)
        replica = _connect_replica(index, spec.job, process)
    Server(index, spec, table, replica).serve(ServerAddress(process.store, index))
    if replica is not None:
        replica.leave()
        thread.join(_LEAVE_S)
    leave_store()


def _serve_replica(
    index: int, spec: TrainingSpec, table: ChunkTable, process: JobProcess
) -> threading.Thread:
    """Start the replica of the server before this one."""
    previous = (index - 1) % spec.job.servers
    server = Server(previous, spec, table, primary=spec.job.dp + previous)
    address = ServerAddress(process.store, previous, is_replica=True)
    thread = threading.Thread(target=server.serve, args=(address,), name="plait-replica", daemon=True)
    thread.start()
    return thread


def _connect_replica(index: int, plan: Plan, process: JobProcess) -> Replica:
    """Connect a server with its replica, on the next one."""
    rank = plan.dp + (index + 1) % plan.servers
    connection = ServerAddress(process.store, index, is_replica=True).connect(process.rank, process.timeout_s)
    return Replica(index, rank, connection, ServerAddress(process.store, index))
