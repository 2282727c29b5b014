"""`compile=auto`: rank 0 measures whether compiled blocks are faster, and all ranks do as it says.

[Note: trial steps]
The times are those of complete steps of this engine, without the update: all ranks run forward and backward
passes of a step's micro-batches, with their messages and reductions, and discard the gradients. So they hold
for any plan, and for ranks that share a host. Buffers that a forward changes get their values back. The first
trial is uncompiled also where the choice is known: `zero=3` finds parameters that are used outside their
modules in uncompiled code only.

Times of CPU ranks are of the processor, those of steps divided by the rank's threads: on a host that others
use, clock times of three rounds may say the opposite. GPUs are timed by the clock. The slowest rank's time
counts: the first stage of a pipeline, on rank 0, may have no blocks.

[Note: choices on disk]
Measured times are in a file for each model, plan, shape of a batch and machine, in plait's cache folder. A
choice is saved with a checkpoint, too: a resumed run does as before on any machine.
"""

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from plait.comm import all_reduce, broadcast_text, gather_texts
from plait.engine.build import EngineParts
from plait.engine.runner import Micro, MicrobatchRunner, OnLoss
from plait.errors import PlanError
from plait.fileio import json_hash, read_json, write_json
from plait.parallel.compile import prepare_compiler, problems, turn
from plait.plan.compile_choice import CompileChoice, CompileTimes
from plait.plan.host_profile import cache_folder, host_name

_ROUNDS = 3
Facts = Mapping[str, Any]  # of a choice: `CompileChoice.facts`


@dataclass(frozen=True)
class TrialPasses:
    """How an engine runs the passes of a step, and discards it. See [Note: trial steps]."""

    parts: EngineParts
    runner: MicrobatchRunner
    on_loss: OnLoss
    discard: Callable[[], None]

    def run(self, micros: Sequence[Micro]) -> None:
        try:
            with self.runner.kept_buffers():
                self.runner.train(micros, self.on_loss, (0, 0, 0))
                self.parts.sharded.finish_reductions()
        finally:
            self.discard()


class CompileTrial:
    """Chooses for an engine, between steps. Every rank calls the same methods."""

    def __init__(self, passes: TrialPasses, micros: Sequence[Micro]) -> None:
        """`micros`: the micro-batches of the trial steps."""
        parts = passes.parts
        self._stages, self._run = [*parts.stages.values()], partial(passes.run, micros)
        self._world, self._device = parts.context.mesh.world, parts.context.device
        self._threads = torch.get_num_threads() if self._device.type == "cpu" else 1
        self._blocks = [block for stage in self._stages for _, block in stage.module_part.blocks]
        named: Any = [
            (
                type(block).__qualname__,
                [(n, tuple(p.shape), str(p.dtype)) for n, p in block.named_parameters()],
            )
            for block in self._blocks
        ]
        of_ranks = map(json.loads, gather_texts(json.dumps(named), self._world.group, self._device))
        named = next(filter(None, of_ranks), named)  # of the first rank with blocks, as stages may have none
        shapes = [[(k, tuple(v.shape), str(v.dtype)) for k, v in sorted(micro.items())] for micro in micros]
        self.key = json_hash([named, str(parts.context.plan), self._world.size, shapes, torch.__version__])

    def choose(self, num_steps: float, kept: Facts | None) -> CompileChoice:
        """The choice for so many steps, after which blocks are compiled or not. `kept`: the facts of a
        checkpoint. Collective."""
        turn(self._blocks, on=False)  # an earlier choice may have left them on
        choice = self._of_rank_0(self._known(num_steps, kept))
        if choice is None:
            eager_s = min(self._timed(rounds=2)) / self._threads
            choice = self._of_rank_0(CompileChoice.of_short_run(eager_s, num_steps, self.key))
        elif choice.is_on:
            self._timed()
        if choice is not None and not choice.is_on:
            return choice
        if reason := self._no_compiler():
            return CompileChoice(is_on=False, reason=reason, key=self.key)
        if choice is None:
            return self._measured(num_steps)
        self._turn(on=True)
        return choice

    def _known(self, num_steps: float, kept: Facts | None) -> CompileChoice | None:
        """The choice that needs no measurement."""
        times, choice = self._read_times(), CompileChoice.kept(kept, self.key)
        if choice is None and times is not None:
            choice = CompileChoice.of_times(times, num_steps, self.key, is_compiled=False)
        return choice

    def _measured(self, num_steps: float) -> CompileChoice:
        self._turn(on=True)
        (first_s,) = self._timed()
        found = sorted(problems(self._blocks))
        if self._world.any_flag(bool(found)):
            self._turn(on=False)
            reason = found[0] if found else "a block of another rank cannot be compiled"
            return CompileChoice(is_on=False, reason=reason, key=self.key)
        eager, compiled = list[float](), list[float]()
        for _ in range(_ROUNDS):  # alternating: other programs of the host slow down both
            compiled += self._timed()
            self._turn(on=False)
            eager += self._timed()
            self._turn(on=True)
        least = min(eager), min(compiled), max(0.0, first_s - min(compiled))
        times = CompileTimes(least[0] / self._threads, least[1] / self._threads, least[2])
        measured = CompileChoice.of_times(times, num_steps, self.key, is_compiled=True)
        choice = self._of_rank_0(measured)
        assert choice is not None, "rank 0 has measured"
        if self._world.rank == 0:
            self._write_times(times)
        self._turn(on=choice.is_on)
        return choice

    def _timed(self, rounds: int = 1) -> list[float]:
        """Seconds of trial steps, on the slowest rank. See [Note: trial steps]. Collective."""
        found = []
        for _ in range(rounds):
            begin_s = self._clock_s()
            self._run()
            found.append(self._clock_s() - begin_s)
        slowest = torch.tensor(found, dtype=torch.float64, device=self._device)
        all_reduce(slowest, self._world.group, "max", label="times of trial steps")
        return [float(seconds) for seconds in slowest.tolist()]

    def _clock_s(self) -> float:
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
            return time.perf_counter()
        started = os.times()  # processes of the compiler, in ticks
        return time.process_time() + started.children_user + started.children_system

    def _turn(self, *, on: bool) -> None:
        for stage in self._stages:
            stage.sharded.unsharder.end_watch()
            stage.activation_bytes = None  # other ones are kept
        turn(self._blocks, on=on)

    def _no_compiler(self) -> str:
        """Why a rank cannot compile; "" if all can. Collective."""
        if not self._world.any_flag(bool(self._blocks)):
            return "the model has no repeated blocks"
        problem = ""
        try:
            prepare_compiler(self._device)
        except PlanError as error:
            problem = f"no compiler works here: {error.given}"
        return (problem or "no compiler works for another rank") * self._world.any_flag(bool(problem))

    def _of_rank_0(self, choice: CompileChoice | None) -> CompileChoice | None:
        text = "" if choice is None else json.dumps(choice.facts())
        text = broadcast_text(0, text, self._world.group, self._device)
        return CompileChoice(**json.loads(text)) if text else None

    @property
    def _path(self) -> Path:
        """See [Note: choices on disk]."""
        is_cpu = self._device.type == "cpu"
        device = (
            torch.backends.cpu.get_cpu_capability() if is_cpu else torch.cuda.get_device_name(self._device)
        )
        machine = [host_name(), device, os.cpu_count(), torch.get_num_threads()]
        return cache_folder() / "compile" / f"{json_hash([self.key, machine])}.json"

    def _read_times(self) -> CompileTimes | None:
        with suppress(OSError, ValueError, TypeError):  # of a missing or foreign file: measured again
            times = CompileTimes(**read_json(self._path))
            return times if all(map(math.isfinite, vars(times).values())) else None
        return None

    def _write_times(self, times: CompileTimes) -> None:
        with suppress(OSError):  # a read-only home: the next run measures again
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_json(self._path, asdict(times))
