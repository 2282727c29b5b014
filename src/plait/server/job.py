"""The roles of a job's processes: workers, then servers; with `server=colocated` each is both."""

import threading
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from plait.comm import JobProcess, Mesh, World, join_store
from plait.comm.connection import ServerAddress
from plait.comm.rendezvous import leave_store
from plait.comm.shm.remote import new_arena
from plait.engine.build import EngineParts, build_shard_map
from plait.engine.engine import Engine
from plait.engine.spec import TrainingSpec
from plait.engine.update import Updater
from plait.plan import Grid, Plan
from plait.server.chunks import ChunkTable
from plait.server.island import IslandUpdater
from plait.server.replica import Replica
from plait.server.server import Server
from plait.server.worker import ServedModel, Servers, ServerUpdater

_DRAIN_S = 10.0  # from the end of worker 0, and of the job, to the end of the others
_LEAVE_S = 30.0  # for other workers to leave a colocated server


def is_server(plan: Plan, process: JobProcess) -> bool:
    """Return whether this process is a server only."""
    return process.rank >= plan.dp


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


def restart_policy(plan: Plan, max_restarts: int) -> dict[str, Any]:
    """Return arguments of `launch_local`: with dedicated servers, all workers but the first may die and are
    started again, `max_restarts` times in all; so may servers that have replicas, which are not started
    again. Worker 0 ends the job. The error of a death names the role."""
    roles = [f"worker {rank}" for rank in range(plan.dp)] + [
        f"server {index}" for index in range(plan.servers)
    ]
    return {
        "names": dict(enumerate(roles)) if plan.num_servers else None,
        "optional_ranks": range(1, plan.num_ranks if plan.server == "replicated" else plan.dp)
        if plan.servers
        else (),
        "restartable_ranks": range(1, plan.dp),
        "drain_s": _DRAIN_S if plan.num_servers else None,
        "max_restarts": max_restarts,
    }


def chunk_table(model: nn.Module, spec: TrainingSpec) -> ChunkTable:
    """The division of the model over the servers; it may be on meta."""
    of_worker = worker_spec(spec)
    (layouts,) = build_shard_map(model, of_worker, Grid.from_plan(of_worker.plan)).layouts
    units = [unit for layout in layouts.values() for unit in layout.units if unit.trains]
    return ChunkTable.build(units, spec.plan.num_servers)


def worker_spec(spec: TrainingSpec) -> TrainingSpec:
    """The specification of a worker's engine."""
    return replace(spec, plan=spec.plan.of_worker)


def served_spec(spec: TrainingSpec) -> TrainingSpec:
    """The specification with the optimizer of the servers: under local steps the outer one."""
    local = spec.plan.local
    if not local.steps:
        return spec
    arguments: dict[str, Any] = {"lr": 1.0}
    if local.learning_rate is not None:
        arguments = {"lr": local.learning_rate, "momentum": local.momentum, "nesterov": local.momentum > 0}
    groups: list[dict[str, Any]] = [{} for _ in spec.groups]
    return replace(spec, optimizer=torch.optim.SGD, arguments=arguments, groups=groups, clip_value=None)


def serve(model: nn.Module, spec: TrainingSpec, process: JobProcess) -> None:
    """Serve the workers until they have left or the job is over. `spec`: see `served_spec`."""
    index, table, replica = process.rank - spec.plan.dp, chunk_table(model, spec), None
    if spec.plan.server == "replicated":
        thread = _serve_replica(index, spec, table, process)
        replica = _connect_replica(index, spec.plan, process)
    Server(index, spec, table, replica).serve(ServerAddress(process.store, index))
    if replica is not None:
        replica.leave()
        thread.join(_LEAVE_S)
    leave_store()


def _serve_replica(
    index: int, spec: TrainingSpec, table: ChunkTable, process: JobProcess
) -> threading.Thread:
    """Start the replica of the server before this one."""
    previous = (index - 1) % spec.plan.servers
    server = Server(previous, spec, table, primary=spec.plan.dp + previous)
    address = ServerAddress(process.store, previous, is_replica=True)
    thread = threading.Thread(target=server.serve, args=(address,), name="plait-replica", daemon=True)
    thread.start()
    return thread


def _connect_replica(index: int, plan: Plan, process: JobProcess) -> Replica:
    """Connect a server with its replica, on the next one."""
    rank = plan.dp + (index + 1) % plan.servers
    connection = ServerAddress(process.store, index, is_replica=True).connect(process.rank, process.timeout_s)
    return Replica(index, rank, connection, ServerAddress(process.store, index))


def start_worker(model: nn.Module, spec: TrainingSpec, process: JobProcess, world: World) -> Engine:
    """Return a worker's engine, connected with the servers until `world.close()` or the process's end."""
    thread = None
    if spec.plan.server == "colocated":
        server = Server(process.rank, served_spec(spec), chunk_table(model, spec))
        address = ServerAddress(process.store, process.rank)
        thread = threading.Thread(target=server.serve, args=(address,), name="plait-server", daemon=True)
        thread.start()
    servers = Servers(process, spec.plan, world.clock)

    def leave() -> None:
        servers.leave(ends_job=process.ends_with_first and process.rank == 0)
        if thread is not None:
            thread.join(_LEAVE_S)
        leave_store()

    def make_updater(parts: EngineParts) -> Updater:
        if spec.plan.local_steps:
            return IslandUpdater(parts, spec, servers, world.arena)
        return ServerUpdater(parts, spec.plan, servers, world.arena, ServedModel(parts))

    world.before_close(leave)
    of_worker = worker_spec(spec)
    mesh = Mesh(world, Grid.from_plan(of_worker.plan))
    try:
        return Engine(model, of_worker, mesh, make_updater, plan=spec.plan)
    except BaseException:
        world.close()  # or servers would wait for this worker
        raise
