"""The state of a training with local steps, by name: what islands have in common, and what each has alone.

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
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from plait.comm import Group
from plait.errors import CheckpointError
from plait.parallel.local_steps.outer import OuterOptimizer
from plait.parallel.zero.flat_param import FlatParam
from plait.parallel.zero.state_dict import divided, shards_of_unit
from plait.parallel.zero.state_io import StateReader, StateShard
from plait.plan import Boxes

_ISLANDS = "islands/"
_OUTER = "outer_"
_CHANGE, _RESIDUAL = "outer_change", "outer_residual"
_OUTER_KEY = re.compile(f"(?:{_ISLANDS}[0-9]+/)?{_OUTER}[a-z]+/(.*)")


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
    for overlap in unit.layout.overlaps(unit.start, unit.stop):
        key, shard = f"{kind}/{overlap.shard.name}", overlap.shard
        if key in source.shapes:
            into = flat[overlap.at : overlap.at + overlap.stop - overlap.start]
            source.read(key, shard.boxes, overlap.start, into, counted=shard.counted)
