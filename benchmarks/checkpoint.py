"""Checkpoints: saving, loading and the pause of a save in the background, with
torch.distributed.checkpoint in the same run.

    python benchmarks/checkpoint.py [--layers N] [--rounds N] [--folder DIR] [--json FILE]

The Llama of benchmarks/llama.py, dp=2 zero=1 precision=bf16, 2 ranks with one thread each: master
weights and both of Adam's states, 12 bytes per parameter, half of them on each rank. torch's contender holds
the same tensors as DTensors cut over the two ranks. All save to one disk and wait until the bytes are on it
(torch's does by default), and load what is in the page cache.

The yardsticks: of a save, each rank's bytes copied from one file to another and synced; of a load, the same
copy without waiting for the disk; of a pause, the rank's tensors copied into memory that is there. A time is
that of the slower rank. Ours verifies what it reads, and says where damage is; torch's does neither.
"""

import argparse
import copy
import os
import shutil
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import common
import plait
from llama import Llama, llama_of
from peers import ADAMW
from plait.bench.report import machine
from plait.checkpoint import Saver, open_checkpoint, step_path
from plait.comm import World, all_reduce, connect

PLAN, OTHER = "dp=2 zero=1 precision=bf16", "tp=2 precision=bf16"
COPY, TORCH = "file copy", "torch.distributed.checkpoint"


def timed(work: Callable[[], Any], world: World) -> float:
    """Seconds of the slower rank."""
    world.barrier()
    begin = time.perf_counter()
    work()
    elapsed = torch.tensor([time.perf_counter() - begin])
    all_reduce(elapsed, world.group, "max")
    return elapsed.item()


def engine_of(model: Llama, plan: str, layers: int, world: World) -> plait.Engine:
    return plait.parallelize(model.on_meta(num_hidden_layers=layers), plan, optimizer_args=ADAMW, world=world)


def torchs(engine: plait.Engine, world: World) -> dict[str, Any]:
    """The same weights and states, cut over the ranks as torch has it."""
    mesh = init_device_mesh("cpu", (world.size,))
    kinds = ("weights", "exp_avg", "exp_avg_sq")
    return {
        f"{kind}/{key}": distribute_tensor(torch.randn(shape), mesh, [Shard(0)])
        for kind in kinds
        for key, shape in engine.weight_shapes().items()
    }


def copied(source: Path, target: Path, *, sync: bool) -> None:
    shutil.copyfile(source, target)
    if sync:
        with target.open("rb") as file:
            os.fsync(file.fileno())


class Case:
    """One rank's contenders."""

    def __init__(self, arguments: argparse.Namespace, world: World) -> None:
        self.world = world
        self.folder = arguments.folder
        model = llama_of(arguments)
        self.engine = engine_of(model, PLAN, arguments.layers, world)
        self.engine.step(model.batch(2))
        self.other = engine_of(model, OTHER, arguments.layers, world)
        self.other.step(model.batch(2))
        self.state_shards = self.engine.state_shards()
        self.num_bytes = sum(each.num_bytes for each in self.state_shards)
        self.bytes_file = self.folder / f"bytes-{world.rank}"
        self.bytes_file.write_bytes(os.urandom(2**20) * (self.num_bytes // 2**20 + 1))
        os.truncate(self.bytes_file, self.num_bytes)
        self.dcp = torchs(self.engine, world)
        self.memory = {
            each: torch.zeros(each.stop - each.start, dtype=each.dtype) for each in self.state_shards
        }
        self.background = Saver(self.folder / "background", world, background=True)
        self.front = Saver(self.folder / "front", world)
        self.round = 0

    def saves(self) -> Mapping[str, Callable[[], object]]:
        step, rank = self.round, self.world.rank
        return {
            COPY: lambda: copied(self.bytes_file, self.folder / f"copy-{step}-{rank}", sync=True),
            "plait": lambda: self.front.save(step, self.engine.state_shards(), {}),
            TORCH: lambda: dcp.save(self.dcp, checkpoint_id=self.folder / f"dcp-{step}"),
        }

    def loads(self) -> Mapping[str, Callable[[], object]]:
        step, rank = self.round, self.world.rank
        path = step_path(self.folder / "front", step)
        return {
            COPY: lambda: copied(self.bytes_file, self.folder / f"copy-{step}-{rank}-again", sync=False),
            "plait": lambda: self.engine.load(path),
            f"plait, for {OTHER}": lambda: self.other.load(path),
            TORCH: lambda: dcp.load(self.dcp, checkpoint_id=self.folder / f"dcp-{step}"),
        }

    def pauses(self) -> dict[str, float]:
        """Seconds until the training could go on."""

        def memory_copy() -> None:
            for each, memory in self.memory.items():
                memory.copy_(each.read())

        futures: list[Any] = []

        def torch_save() -> None:
            futures.append(dcp.async_save(self.dcp, checkpoint_id=self.folder / f"background-{self.round}"))

        found = {"memory copy": timed(memory_copy, self.world)}
        found["plait"] = timed(
            lambda: self.background.save(self.round, self.engine.state_shards(), {}), self.world
        )
        self.background.finish()
        found[TORCH] = timed(torch_save, self.world)
        futures[0].result()
        return found

    def clean(self) -> None:
        self.world.barrier()
        if self.world.rank == 0:
            for path in self.folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                elif path.name.startswith("copy"):
                    path.unlink()
            os.sync()
        self.world.barrier()


def worker(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)  # one batch on all ranks
    warnings.simplefilter("ignore")
    world = connect(device="cpu")
    if not dist.is_initialized():
        raise SystemExit("two ranks, please")
    case = Case(arguments, world)
    times: dict[str, common.Times] = {"save": {}, "load": {}, "pause": {}}
    for number in range(arguments.rounds + 1):
        case.round = number
        for what, contenders in (("save", case.saves()), ("load", case.loads())):
            for name, work in contenders.items():
                seconds = timed(work, world)
                if number:
                    times[what].setdefault(name, []).append(seconds)
        for name, seconds in case.pauses().items():
            if number:
                times["pause"].setdefault(name, []).append(seconds)
        if number < arguments.rounds:
            case.clean()
    read = open_checkpoint(step_path(case.folder / "front", case.round))
    with read.reader() as reader:
        case.other.load_from(reader)
        amounts = torch.tensor(
            [float(reader.bytes_read), sum(each.num_bytes for each in case.other.state_shards())]
        )
    all_reduce(amounts, world.group)
    if world.rank == 0:
        rows = []
        for what, found in times.items():
            yardstick = next(iter(found))
            rows += common.rows(what, found, yardstick=yardstick, peers=[TORCH])
        facts = copy.copy(machine()) | {
            "MB per rank": round(case.num_bytes / 1e6, 1),
            "bytes read for another plan, of those needed": round(float(amounts[0] / amounts[1]), 4),
        }
        common.report("Checkpoints", rows, facts, arguments.json)
    world.close()


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--folder", type=Path, default=Path("build/bench-checkpoints"))
    arguments = common.parse(parser, rounds=1, layers=1)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    common.on_ranks(__file__, 2, lambda: worker(arguments))


if __name__ == "__main__":
    main()
