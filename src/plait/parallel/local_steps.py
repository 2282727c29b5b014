"""Local steps (DiLoCo): islands of ranks train alone and exchange the change of their weights, whose mean
the outer optimizer applies.

[Note: global weights]
Each rank keeps, for the range of master weights that it owns, the global weights: those that the last
exchange has produced, equal on all islands in every bit. An exchange sums over islands what each has
added to them, and every island takes the same outer step: global weights need not be sent. With `average` the
new global weights are the mean of the islands' weights. With Nesterov momentum m and mean change c

    m <- momentum m - c        global <- global - learning rate (momentum m - c)

as in torch.optim.SGD with the gradient -c. Inner optimizers keep their states.

[Note: order of an exchange]
The units of a part are exchanged one after the other, with few in flight, so that few changes are in memory
at a time. A part that is in flight during steps has all its units in flight. Units are exchanged by
themselves, like gradients: copies of a tensor on several ranks of an island then stay equal in every bit.

[Note: islands are one job]
Without servers, an island that dies ends the job. Four things are missing for the others to go on.
- Groups: a lost peer breaks every group that it is in. New groups of the survivors need a store that
  outlives every island: between hosts without torchrun, ours is in rank 0's process.
- Agreement: units are applied one after the other, so a death leaves some islands with more units applied
  than others. All sums would have to be complete, and agreed on, before the first is applied: all changes
  in memory at once.
- Numbers: the count of islands is a value of the plan, which data shares, batch sizes and checkpoints use.
- Launchers: `launch_local` can go on without some ranks, and start them again, but on one host, where islands
  are of little use. Under torchrun, an agent that loses a rank, or meets a new host, has all ranks of all
  hosts started again, with `dp=auto` from the newest checkpoint. Each island would have to be a job of its
  own.
Parameter servers (`server/`) have members that come and go, and numbered pushes that are applied once. With
`servers`, an island is one worker, and the outer optimizer is theirs: see `server/island.py`. This module
then keeps the global weights that the worker has pulled.

[Note: state of islands]
What islands have in common, and what each has alone, is saved by name:

  weights/<parameter>               global weights; of a parameter that does not train, its value
  buffers/<buffer>                  those of the first island
  outer_momentum/<parameter>        of the outer optimizer
  outer_change/<parameter>          the sum of an exchange that is not applied yet
  islands/<i>/<key>                 the state of island i, by the keys of a training without islands
  islands/<i>/outer_residual/<parameter>   what its codes have lost

[Note: other numbers of islands]
An island continues with its own state. One that was not there when the state was saved begins with the global
weights and the first island's optimizer states; so does a training without islands. If a training without
islands is continued by islands, all begin with its state. An exchange in flight is dropped if it does not
belong to the plan's schedule: what the islands have added to the global weights is in the next one.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plait.comm import CODECS, CompressedReduce, Group, Work, all_reduce, broadcast, start_all_reduce
from plait.errors import CheckpointError, RunError
from plait.optim.clip import squared_norm
from plait.parallel.zero.flat_param import FlatParam
from plait.parallel.zero.rank_context import RankContext
from plait.parallel.zero.sharded_model import ShardedStage
from plait.parallel.zero.state_dict import divided, read_overlaps, shards_of_unit
from plait.parallel.zero.state_io import StateReader, StateShard
from plait.plan import Boxes, Plan
from plait.plan.compression import code_bytes

_MAX_IN_FLIGHT = 2  # units, while training waits for the exchange
_ISLANDS = "islands/"
_OUTER = "outer_"
_CHANGE, _RESIDUAL = "outer_change", "outer_residual"
_OUTER_KEY = re.compile(f"(?:{_ISLANDS}[0-9]+/)?{_OUTER}[a-z]+/(.*)")


@dataclass(frozen=True)
class ExchangeResult:
    """Result of an exchange; the same on every rank.

    part   its number; see [Note: parts of an exchange] in `plan/local_steps.py`
    drift  the islands' distance from their mean (root mean square), relative to the mean change of weights
    """

    part: int
    drift: float


class OuterShard:
    """The range of a unit that this rank owns: global weights, momentum, and a change being exchanged.

    weights   [Note: global weights]
    momentum  None for an average
    change    this island's, then the sum over islands; None between exchanges
    """

    def __init__(self, unit: FlatParam, context: RankContext, plan: Plan, scratch: Tensor | None) -> None:
        """`plan`: of the job. `scratch`: for the messages of a compressed exchange."""
        self.unit = unit
        self.weights = context.allocate_state(unit.master.numel(), context.precision.master)
        self.momentum: Tensor | None = None
        self.change: Tensor | None = None
        self._context = context
        self._plan = plan
        self._work = Work()
        self._compressor = None
        if scratch is not None:
            codec = CODECS[plan.exchange]
            self._compressor = CompressedReduce(unit.master.numel(), context.groups.islands, codec, scratch)

    @property
    def kept(self) -> Mapping[str, Tensor]:
        """The states that all islands have in common, by their kind in a checkpoint."""
        kept = {"weights": self.weights, "outer_momentum": self.momentum, "outer_change": self.change}
        return {kind: tensor for kind, tensor in kept.items() if tensor is not None}

    @property
    def residual(self) -> Tensor | None:
        """The sum of what this island's codes have lost, if they are 8-bit."""
        state = self._compressor.state[0] if self._compressor is not None else torch.empty(0)
        return state if state.numel() else None

    @property
    def num_bytes(self) -> int:
        tensors = (self.weights, self.momentum, self.residual, self.change)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def reset(self) -> None:
        """Begin with the unit's weights as the global ones."""
        self.weights.copy_(self.unit.master)
        self.change = None
        if self._plan.local.learning_rate is not None:
            self.momentum = torch.zeros_like(self.weights)
        if self._compressor is not None:
            self._compressor.discard()

    def start(self) -> None:
        """Start to sum the islands' changes."""
        islands, label = self._context.groups.islands, self.unit.layout.name
        self.change = change = torch.sub(self.unit.master, self.weights).to(self._context.device)
        if self._compressor is None:
            self._work = start_all_reduce(change, islands, label=label)
            return
        codes = self._compressor.start(change, (0, change.numel()), label=label)
        self._work = Work(lambda: [*codes.into(change)])

    def wait(self) -> None:
        """Wait for the sum, which `change` then holds."""
        self._work.wait()
        self._work = Work()

    def apply(self) -> Tensor:
        """Take the outer step, and let the island continue from its result. Returns the squared distance of
        this island from the mean, and the squared mean change: float64, (2,)."""
        self.wait()
        assert self.change is not None, "no exchange was started"
        local = self._plan.local
        mean = self.change.div_(self._plan.num_islands).to(self.weights)
        self.change = None
        own = self.unit.master - self.weights
        squares = torch.stack([squared_norm(own - mean), squared_norm(mean)])
        if self.momentum is None:
            self.weights.add_(mean)
        else:
            assert local.learning_rate is not None
            self.momentum.mul_(local.momentum).sub_(mean)
            self.weights.add_(mean.sub_(self.momentum, alpha=local.momentum), alpha=local.learning_rate)
        if local.local_share:
            self.unit.master.lerp_(self.weights, 1 - local.local_share)
        else:
            self.unit.master.copy_(self.weights)
        return squares.to(self._context.device)


class OuterOptimizer:
    """The exchanges of this rank's units. Without local steps it has no shards and does nothing.

    plan    of the job
    parts   the part in which each shard is exchanged
    """

    def __init__(self, stages: Sequence[ShardedStage], context: RankContext, plan: Plan) -> None:
        """`stages`: of this rank, with their initial weights."""
        self.context = context
        self.plan = plan
        self._stages = stages
        self._local = plan.local
        units, scratch = [u for stage in stages for u in stage.trained if plan.local_steps], None
        if units and plan.exchange != "fp32" and not plan.num_servers:
            largest = max(unit.master.numel() for unit in units)
            num_bytes = code_bytes(largest, plan.num_islands, plan.exchange)
            scratch = torch.zeros(num_bytes, dtype=torch.uint8, device=context.device)
            context.tracker.add(num_bytes)  # never freed
        self.shards = [OuterShard(unit, context, plan, scratch) for unit in units]
        parts = self._local.divide([shard.weights.numel() for shard in self.shards])
        self.parts = dict(zip(self.shards, parts, strict=True))
        self.reset()

    @property
    def num_bytes(self) -> int:
        """Bytes on this rank, if it takes the outer steps itself."""
        return 0 if self.plan.num_servers else sum(shard.num_bytes for shard in self.shards)

    @property
    def common(self) -> dict[str, list[tuple[FlatParam, Tensor]]]:
        """The states that are equal on all islands, for each kind those of this rank's units: for
        `ReplicaCheck`."""
        if not self._local.steps:
            return {}
        common = {"global weights": [(shard.unit, shard.weights) for shard in self.shards]}
        if self._local.learning_rate is not None:
            common["outer momentum"] = [(s.unit, s.momentum) for s in self.shards if s.momentum is not None]
        return common

    def reset(self) -> None:
        """Begin with the units' weights as the global ones, and without momentum."""
        for shard in self.shards:
            shard.reset()

    def is_due(self, num_steps: int) -> bool:
        """Return whether anything is to be exchanged or applied after this number of steps."""
        local = self._local
        return (local.started_after(num_steps), local.applied_after(num_steps)) != (None, None)

    def exchange(self, num_steps: int) -> ExchangeResult | None:
        """Apply and start what is due. Returns the result of what was applied. Every rank must call it, after
        a step."""
        local, result = self._local, None
        applied, started = local.applied_after(num_steps), local.started_after(num_steps)
        for stage in self._stages:
            stage.unsharder.wait_for_readers()
        if applied is not None:
            shards = self._in(applied)
            in_turn = [s for s in shards if s.change is not None] if local.delay else _started_in_turn(shards)
            result = self._apply(applied, in_turn)
        if num_steps % local.steps == 0:
            self._average_buffers()
        if local.delay:
            for shard in self._in(started):
                shard.start()
        for stage in self._stages if applied is not None else ():
            stage.sync_params()
        return result

    def _in(self, part: int | None) -> list[OuterShard]:
        return [shard for shard in self.shards if self.parts[shard] == part]

    def _apply(self, part: int, started: Iterable[OuterShard]) -> ExchangeResult:
        """Apply the exchanges of a part. Raises RunError, on all ranks, if an island's weights are not
        finite."""
        groups = self.context.groups
        totals = torch.zeros(2, dtype=torch.float64, device=self.context.device)
        for shard in started:
            totals += shard.apply() * shard.unit.groups.counts
        all_reduce(totals, groups.one_copy, label="drift of islands")
        all_reduce(totals, groups.islands, label="drift of islands")
        distance, change = totals.tolist()
        if not (distance >= 0 and change < float("inf")):
            raise RunError(
                "the weights of an island are not finite",
                given=f"part {part} of an exchange",
                expected="finite weights on every island",
                hint="a smaller learning rate, of the optimizer or of outer=nesterov:LR:MOMENTUM; --resume",
            )
        return ExchangeResult(part, (distance / change) ** 0.5 if change else 0.0)

    def _average_buffers(self) -> None:
        """Let buffers become the mean over islands; counters and masks those of the first one."""
        islands = self.context.groups.islands
        for stage in self._stages:
            for buffer in stage.buffers():
                if buffer.is_floating_point():
                    all_reduce(buffer, islands, "mean", label="buffers")
                else:
                    broadcast(buffer, islands, label="buffers")

    def is_in_flight(self, shard: OuterShard, num_steps: int) -> bool:
        """Return whether an exchange of the shard is in flight after this number of steps."""
        return self.parts[shard] == self._local.in_flight_after(num_steps)

    def wait(self) -> None:
        """Wait for the exchanges in flight, whose sums are then in `OuterShard.change`."""
        for shard in self.shards:
            shard.wait()


def _started_in_turn(shards: Sequence[OuterShard]) -> Iterator[OuterShard]:
    """Yield the shards in order; each has been started, and some after it."""
    for index, shard in enumerate(shards):
        for ahead in shards[index : index + _MAX_IN_FLIGHT]:
            if ahead.change is None:
                ahead.start()
        yield shard


class IslandReader:
    """A StateReader of one island's state in a state of all. See [Note: other numbers of islands].

    source   the state of all
    exists   whether the island was there when the state was saved
    """

    def __init__(self, source: StateReader, island: int | None) -> None:
        """`island`: None for a training without islands, or for global weights only. Raises CheckpointError
        if a state of the outer optimizer does not have the shape of its parameter."""
        shapes = source.shapes
        for key, shape in shapes.items():
            match = _OUTER_KEY.fullmatch(key)
            if match is not None and shape != shapes.get(f"weights/{match[1]}"):
                raise CheckpointError(
                    "the checkpoint is of another model or optimizer",
                    given=f"{key}: {shape}",
                    expected=f"{shapes.get(f'weights/{match[1]}', 'nothing')}, as of weights/{match[1]}",
                    hint="the model and the outer of the checkpoint's run",
                )
        self.source = source
        prefix = f"{_ISLANDS}{island}/"
        self.exists = any(key.startswith(prefix) for key in shapes)
        prefix = prefix if self.exists else f"{_ISLANDS}0/"
        common = {key: key for key in shapes if not key.startswith((_ISLANDS, _OUTER))}
        own = {key.removeprefix(prefix): key for key in shapes if key.startswith(prefix)}
        own = {key: name for key, name in own.items() if not key.startswith(_OUTER)}
        self._key_of = common | own if self.exists else own | common

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes = self.source.shapes
        return {key: shapes[name] for key, name in self._key_of.items()}

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        dtypes = self.source.dtypes
        return {key: dtypes[name] for key, name in self._key_of.items()}

    def read(self, key: str, boxes: Boxes, start: int, into: Tensor, *, counted: bool = True) -> None:
        self.source.read(self._key_of[key], boxes, start, into, counted=counted)

    def read_full(self, key: str) -> Tensor:
        return self.source.read_full(self._key_of[key])

    def finish(
        self, copy: Group, everyone: Group, device: torch.device, error: CheckpointError | None
    ) -> None:
        self.source.finish(copy, everyone, device, error)


class IslandState:
    """Saves and loads the outer optimizer's state and that of the islands, which `ShardedState` knows without
    their number. Without local steps it changes nothing."""

    def __init__(self, outer: OuterOptimizer) -> None:
        self.outer = outer
        self.island = outer.context.groups.islands.rank  # with servers, their worker sets it
        self._plan = outer.plan
        self._islands = outer.context.groups.islands

    @property
    def _own(self) -> str:
        return f"{_ISLANDS}{self.island}/"

    def shards(self, own: list[StateShard]) -> list[StateShard]:
        """This rank's part of a checkpoint. `own`: its part of its island's state. Communicates nothing, but
        waits for an exchange in flight."""
        if not self._plan.local_steps:
            return own
        self.outer.wait()
        trained = {f"weights/{param.name}" for each in self.outer.shards for param in each.unit.layout.params}
        shards = []
        for shard in own:
            is_common = shard.key.startswith("weights/") and shard.key not in trained
            if self.island == 0 and (is_common or shard.key.startswith("buffers/")):
                shards.append(shard)
            if not is_common:
                shards.append(replace(shard, key=self._own + shard.key))
        common: list[StateShard] = []
        for each in self.outer.shards:
            for kind, flat in each.kept.items():
                common += shards_of_unit(kind, each.unit, flat)
            if each.residual is not None:
                shards += shards_of_unit(self._own + _RESIDUAL, each.unit, each.residual)
        return [*shards, *divided(common, self._islands.rank, self._islands.size)]

    def reader(self, source: StateReader, *, weights_only: bool) -> IslandReader:
        """A reader of this island's state, or of global weights only. Raises CheckpointError."""
        is_of_island = self._plan.local_steps and not weights_only
        return IslandReader(source, self.island if is_of_island else None)

    def load(self, reader: IslandReader, num_steps: int) -> None:
        """Load the outer optimizer's state after `num_steps` steps; the island's has been read already.
        Raises CheckpointError."""
        self.outer.wait()
        self.outer.reset()
        keys = reader.source.shapes.keys()
        for shard in self.outer.shards if reader.exists else ():
            is_saved = f"{_CHANGE}/{shard.unit.layout.params[0].name}" in keys
            if is_saved and self.outer.is_in_flight(shard, num_steps):
                shard.change = torch.zeros_like(shard.weights, device=self.outer.context.device)
            wanted = dict(shard.kept)
            if shard.residual is not None:
                wanted[self._own + _RESIDUAL] = shard.residual
            for kind, flat in wanted.items():
                _read(reader.source, kind, shard.unit, flat)


def _read(source: StateReader, kind: str, unit: FlatParam, flat: Tensor) -> None:
    """Fill a flat tensor with this rank's range of a unit. What the source does not have is unchanged."""
    saved = source.shapes
    known = [overlap for overlap in unit.overlaps() if f"{kind}/{overlap.shard.name}" in saved]
    read_overlaps(source, kind, unit, known, flat)
