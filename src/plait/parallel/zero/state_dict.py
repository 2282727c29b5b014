"""The training state by name: what a checkpoint holds, free of units, ranges and ranks.

Keys are `kind/name`: `weights/<parameter>` (master weights), `buffers/<buffer>`, for every state of the
optimizer `<state>/<parameter>` (`exp_avg/...`) in the parameter's shape or, for what it counts once per
parameter, `scalar.<state>/<parameter>` (`scalar.step/...`; `number.` where it is a Python number), and
`engine/...` for what the engine itself counts.
"""

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from plait.comm import Group, all_gather, receive, send
from plait.errors import CheckpointError
from plait.parallel.zero.flat_param import FlatParam, FlatParamConfig
from plait.parallel.zero.shard_map import ShardMap, persistent_buffers
from plait.parallel.zero.sharded_optim import OptimizerSlice, ShardedOptimizer
from plait.parallel.zero.state_io import StateReader, StateShard, slice_boxes, write_boxes
from plait.plan import Boxes, Overlap, UnitLayout

_Value = TypeVar("_Value")
_OURS = ("weights", "buffers", "engine")
_SHARED_BYTES = 2**16  # that each of several ranks saves of what all of them hold


def scalar_device(group: Mapping[str, Any], leaf: Tensor) -> torch.device:
    """Where torch's optimizers keep counters such as `step`: on the CPU, unless a kernel reads them."""
    in_kernel = group.get("fused") or group.get("capturable")
    return leaf.device if in_kernel else torch.device("cpu")


class ShardedState:
    """Reads and writes the state of a model, its units and their optimizer.

    Reading is collective over the ranks that together hold one copy; the first of them gets what is whole.
    """

    def __init__(
        self,
        modules: Mapping[int, nn.Module],
        units: Mapping[int, Sequence[FlatParam]],
        owned: ShardedOptimizer,
        cut: FlatParamConfig,
        shard: Group,
        model: Group,
        replicate: Group,
        shard_map: ShardMap,
    ) -> None:
        """`modules`, `units`: by stage. `shard`: ranks with the ranges of the same units. `model`: those with
        other pieces of the model. `replicate`: those with the same."""
        self._modules = modules
        self._units = units
        self._owned = owned
        self._cut = cut
        self._shard = shard
        self._model = model
        self._replicate = replicate
        self._holdings = shard_map
        self._listed: dict[bool, list[StateShard]] = {}  # of units, by whether there are optimizer states

    @property
    def _is_first(self) -> bool:
        return self._shard.rank == self._model.rank == 0

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all weights, by key."""
        found = {piece.name: piece.full_shape for piece, _ in self._holdings.pieces()}
        found |= {name: loose.shape for name, loose in self._holdings.loose.items()}
        return {f"weights/{name}": found[name] for name in self._holdings.order}

    def weights(self) -> dict[str, Tensor]:
        """Copies of the master weights and of frozen parameters, whole, in the model's order."""
        found = self._whole(lambda unit: unit.master, frozen=True)
        return self._in_order([*found, *self._loose("weights").items()])

    def gradients(self) -> dict[str, Tensor]:
        """Copies of the last step's gradients, whole."""
        return self._in_order(self._whole(lambda unit: unit.gradient))

    def gradient_error(self, name: str, whole: Tensor) -> tuple[float, float] | None:
        """Of this rank's own ranges: the squared distance from `whole`, the square of what they should be."""
        found = None
        for unit in self._trained():
            for lap in unit.layout.overlaps(unit.start, unit.start + unit.gradient.numel()):
                if lap.shard.name == name:
                    own = unit.gradient[lap.at : lap.at + lap.stop - lap.start].double()
                    right = slice_boxes(whole, lap.shard.boxes).reshape(-1)[lap.start : lap.stop].to(own)
                    squares = (float((own - right).square().sum()), float(right.square().sum()))
                    found = squares if found is None else (found[0] + squares[0], found[1] + squares[1])
        return found

    def save(self) -> dict[str, Tensor]:
        """Copies of everything but the engine's own, by key."""
        tensors = {f"weights/{name}": tensor for name, tensor in self.weights().items()}
        tensors |= {f"buffers/{name}": tensor for name, tensor in self._loose("buffers").items()}
        if self._owned.has_states:
            for kind in sorted(self._owned.kinds):
                if "." not in kind:
                    states = self._in_order(self._whole(functools.partial(self._flat, kind)))
                    tensors |= {f"{kind}/{name}": tensor for name, tensor in states.items()}
            tensors |= self._all_counters()
        return tensors if self._is_first else {}

    def kept(self) -> list[StateShard]:
        """What this rank has to save, of everything but the engine's own: over all ranks every element once.
        Ranks along `replicate`, which hold the same, share the work."""
        if self._owned.has_states not in self._listed:  # what lies where does not change
            listed = [kept for unit in self._all_units() for kept in self._kept_of(unit)]
            self._listed[self._owned.has_states] = listed
        found = [*self._listed[self._owned.has_states]]
        here = self._loose_here()
        for name, loose in self._holdings.loose.items():
            if self._shard.rank == 0 and self._model.rank == self._holdings.first_rank(loose.stage):
                stages, tensors = here[name]
                found.append(StateShard.whole(f"{loose.kind}/{name}", tensors[stages.index(loose.stage)]))
        mine, copies = self._replicate.rank, self._replicate.size
        shares = []
        for number, kept in enumerate(found):
            if kept.num_bytes >= copies * _SHARED_BYTES:
                shares.append(kept.share(mine, copies))
            elif number % copies == mine:
                shares.append(kept)
        return shares

    def _kept_of(self, unit: FlatParam) -> Iterator[StateShard]:
        """Of the range of a unit that this rank owns."""
        for lap in unit.layout.overlaps(unit.start, unit.stop):
            if lap.shard.counted:
                yield _of(f"weights/{lap.shard.name}", lap, unit.master.dtype, lambda: unit.master)
        for part in self._owned.slices[unit] if unit.trains and self._owned.has_states else ():
            for lap in unit.layout.overlaps(unit.start + part.start, unit.start + part.stop):
                if lap.shard.counted:
                    yield from self._kept_states(part, lap)

    def _kept_states(self, part: OptimizerSlice, lap: Overlap) -> Iterator[StateShard]:
        for kind in sorted(self._owned.kinds):
            key = f"{kind}/{lap.shard.name}"
            if "." not in kind:
                yield _of(key, lap, part.leaf.dtype, functools.partial(self._flat_state, part, kind))
            elif lap.start == 0 and all(dim[0][0] == 0 for dim in lap.shard.boxes.ranges):
                # what is counted once per parameter is told by the owner of its first element
                yield self._kept_counter(part, kind, key)

    def _kept_counter(self, part: OptimizerSlice, kind: str, key: str) -> StateShard:
        def read() -> Tensor:
            return self._counter(part, kind).view(-1)

        return StateShard(key, (), read().dtype, Boxes.full(()), 0, 1, read)

    def _flat_state(self, part: OptimizerSlice, kind: str) -> Tensor:
        held: Tensor = self._owned.stepper.state(part.leaf)[kind]
        return held

    def check(self, source: StateReader, *, weights_only: bool = False) -> None:
        """Raises CheckpointError when a tensor is missing, of another shape or of another optimizer. Of the
        engine's own keys it looks for one."""
        shapes = source.shapes
        if not weights_only and "engine/num_steps" not in shapes:
            raise CheckpointError("this is no engine's state", given="no engine/num_steps")
        for key, shape in shapes.items():
            if key.startswith("engine/") and shape != ():
                raise CheckpointError(
                    "this is no engine's state", given=f"{key}: {shape}", expected="numbers"
                )
        self._check(_without_engines(shapes), weights_only=weights_only)

    def load(self, source: StateReader, *, weights_only: bool = False) -> None:
        """Takes over everything that `check` lets pass, each rank its part. `weights_only`: the optimizer
        begins anew."""
        with torch.no_grad():
            for unit in self._all_units():
                for lap in unit.layout.overlaps(unit.start, unit.stop):
                    into = unit.master[lap.at : lap.at + lap.stop - lap.start]
                    key, piece = f"weights/{lap.shard.name}", lap.shard
                    source.read(key, piece.boxes, lap.start, into, counted=piece.counted)
            for name, (_, held) in self._loose_here().items():
                for tensor in held:
                    tensor.copy_(source.whole(f"{self._holdings.loose[name].kind}/{name}"))
            kinds = set() if weights_only else self._kinds_in(_without_engines(source.shapes))
            if not kinds:
                self._owned.stepper.clear()
            self._owned.has_states = bool(kinds)
            for unit in self._trained() if kinds else []:
                for part in self._owned.slices[unit]:
                    self._owned.stepper.load(part.leaf, self._state_of(unit, part, kinds, source))

    # --- from the ranks that hold it

    def _whole(
        self, own: Callable[[FlatParam], Tensor], *, frozen: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Every parameter (with `frozen`, also those that do not train), whole, from the ranks' ranges and
        pieces: on the first rank, elsewhere nothing."""
        for stage, number, layouts in self._holdings.units():
            trains = next(iter(layouts.values())).trains
            if not (trains or frozen):
                continue
            held = None
            if stage in self._units:
                part = own(self._units[stage][number]).detach().to(self._cut.device)
                held = part.new_empty(part.numel() * self._shard.size)
                all_gather(held, part, self._shard)
            if self._shard.rank == 0:
                dtype = self._cut.master if trains else self._cut.compute
                yield from self._from_model(layouts, held, dtype)

    def _from_model(
        self, layouts: Mapping[int, UnitLayout], held: Tensor | None, dtype: torch.dtype
    ) -> Iterator[tuple[str, Tensor]]:
        """A unit's parameters, of what every rank of the model holds of it; on its first rank."""
        if self._model.rank:
            if held is not None:
                send(held, self._model, 0)
            return
        found: dict[str, Tensor] = {}
        for rank, layout in layouts.items():
            if rank:
                held = torch.empty(layout.numel, dtype=dtype, device=self._cut.device)
                receive(held, self._model, rank)
            assert held is not None, f"{layout.name} is not where it should be"
            for piece in layout.params:
                if piece.counted:
                    if piece.name not in found:
                        found[piece.name] = torch.empty(piece.full_shape, dtype=held.dtype)
                    write_boxes(
                        found[piece.name], piece.boxes, held[piece.start : piece.stop].view(piece.boxes.shape)
                    )
        yield from found.items()

    def _in_order(self, named: Iterable[tuple[str, _Value]]) -> dict[str, _Value]:
        """By name, in the model's order, which is not that of its stages' units."""
        found = dict(named)
        return {name: found[name] for name in self._holdings.order if name in found}

    def _loose(self, kind: str) -> dict[str, Tensor]:
        """Copies of what lies in no unit, on the first rank; elsewhere of what it has itself."""
        here, found = self._loose_here(), {}
        for name, loose in self._holdings.loose.items():
            if loose.kind != kind or self._shard.rank:
                continue
            home = self._holdings.first_rank(loose.stage)
            if self._model.rank == home:
                found[name] = here[name][1][here[name][0].index(loose.stage)].detach().clone()
                if home:
                    send(found[name], self._model, 0)
            elif self._model.rank == 0:
                found[name] = torch.empty(loose.shape, dtype=loose.dtype, device=self._cut.device)
                receive(found[name], self._model, home)
        return found

    def _loose_here(self) -> dict[str, tuple[list[int], list[Tensor]]]:
        """What of it this rank has: the stages, and the tensor of each."""
        found: dict[str, tuple[list[int], list[Tensor]]] = {}
        for stage, module in self._modules.items() if self._holdings.loose else ():
            for name, tensor in (*module.named_parameters(), *persistent_buffers(module).items()):
                if name in self._holdings.loose:
                    stages, tensors = found.setdefault(name, ([], []))
                    stages.append(stage)
                    tensors.append(tensor)
        return found

    def _all_counters(self) -> dict[str, Tensor]:
        """What the optimizer counts once per parameter, by key, on the first rank."""
        if self._shard.rank:
            return {}
        found = {
            f"{kind}/{piece.name}": value
            for unit in self._trained()
            for piece in unit.layout.params
            for kind, value in self._counters(unit, piece.start).items()
        }
        said = {key: (str(value.dtype).removeprefix("torch."), value.item()) for key, value in found.items()}
        column = {rank for stage in self._stages for rank in [self._holdings.first_rank(stage)]}
        for rank in sorted(column - {0}):
            text = self._told(json.dumps(said) if self._model.rank == rank else None, rank)
            if self._model.rank == 0:
                for key, (dtype, value) in json.loads(text).items():
                    found.setdefault(key, torch.tensor(value, dtype=getattr(torch, dtype)))
        return {
            f"{kind}/{name}": found[f"{kind}/{name}"]
            for name in self._holdings.order
            for kind in sorted(self._owned.kinds)
            if f"{kind}/{name}" in found
        }

    def _told(self, text: str | None, rank: int) -> str:
        """On the first rank what another one says."""
        if text is not None:
            said = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).to(self._cut.device)
            send(torch.tensor([said.numel()], device=self._cut.device), self._model, 0)
            send(said, self._model, 0)
        elif self._model.rank == 0:
            length = torch.zeros(1, dtype=torch.long, device=self._cut.device)
            receive(length, self._model, rank)
            said = torch.zeros(int(length.item()), dtype=torch.uint8, device=self._cut.device)
            receive(said, self._model, rank)
            return said.cpu().numpy().tobytes().decode()
        return ""

    @property
    def _stages(self) -> set[int]:
        return {stage for layouts in self._holdings.layouts for stage in layouts}

    def _trained(self) -> list[FlatParam]:
        return [unit for unit in self._all_units() if unit.trains]

    def _all_units(self) -> list[FlatParam]:
        return [unit for units in self._units.values() for unit in units]

    def _flat(self, kind: str, unit: FlatParam) -> Tensor:
        """A state of the range that this rank owns; zeros where no slice lies."""
        flat = torch.zeros_like(unit.master, requires_grad=False)
        for part in self._owned.slices[unit]:
            flat[part.start : part.stop] = self._owned.stepper.state(part.leaf)[kind]
        return flat

    def _counters(self, unit: FlatParam, start: int) -> dict[str, Tensor]:
        """What the optimizer counts once per parameter: all of a group's slices agree, and one is here."""
        parts = self._owned.slices[unit]
        group = next(group for group, low, high in unit.layout.groups if low <= start < high)
        part = next((part for part in parts if part.group == group), parts[0])
        return {kind: self._counter(part, kind) for kind in self._owned.kinds if "." in kind}

    def _counter(self, part: OptimizerSlice, kind: str) -> Tensor:
        """A copy, on the CPU."""
        value = self._owned.stepper.state(part.leaf)[kind.partition(".")[2]]
        return value.clone().cpu() if isinstance(value, Tensor) else torch.tensor(value)

    def _state_of(
        self, unit: FlatParam, part: OptimizerSlice, kinds: set[str], source: StateReader
    ) -> dict[str, Any]:
        """A slice's state, as the optimizer will hold it."""
        groups = {leaf: g for g in self._owned.optimizer.param_groups for leaf in g["params"]}
        overlaps = unit.layout.overlaps(unit.start + part.start, unit.start + part.stop)
        name = overlaps[0].shard.name if overlaps else unit.layout.params[0].name
        held = self._owned.stepper.state(part.leaf)  # memory that is there is filled again
        state: dict[str, Any] = {}
        for kind in kinds:
            short = kind.partition(".")[2]
            if kind.startswith("number."):
                state[short] = source.whole(f"{kind}/{name}").item()
            elif kind.startswith("scalar."):
                device = scalar_device(groups[part.leaf], part.leaf)
                state[short] = source.whole(f"{kind}/{name}").to(device, copy=True)
            else:
                fresh = kind not in held
                flat = torch.zeros_like(part.leaf, requires_grad=False) if fresh else held[kind]
                state[kind] = flat
                for lap in overlaps:
                    into, piece = flat[lap.at : lap.at + lap.stop - lap.start], lap.shard
                    source.read(f"{kind}/{piece.name}", piece.boxes, lap.start, into, counted=piece.counted)
        return state

    def _check(self, shapes: Mapping[str, tuple[int, ...]], *, weights_only: bool) -> None:
        expected = self.shapes()
        expected |= {
            f"buffers/{name}": loose.shape
            for name, loose in self._holdings.loose.items()
            if loose.kind == "buffers"
        }
        for kind in set() if weights_only else self._kinds_in(shapes):
            is_flat = not kind.startswith(("scalar.", "number."))
            for piece, trains in self._holdings.pieces():
                if trains:
                    expected[f"{kind}/{piece.name}"] = piece.full_shape if is_flat else ()
        empty = {piece.name for piece, _ in self._holdings.pieces() if 0 in piece.full_shape}
        known = expected.keys() | (set() if weights_only else shapes.keys())
        for key in sorted(known, key=lambda key: (not key.startswith("weights/"), key)):
            if key.partition("/")[2] not in empty and shapes.get(key) != expected.get(key):
                raise CheckpointError(
                    "the checkpoint is of another model or optimizer",
                    given=f"{key}: {shapes.get(key, 'missing')}",
                    expected=f"{key}: {expected.get(key, 'nothing')}",
                    hint=None
                    if key.startswith("weights/")
                    else "weights_only=True takes over the weights alone",
                )

    def _kinds_in(self, keys: Iterable[str]) -> set[str]:
        """The kinds of optimizer state to expect: none if it had not made a step when it was saved."""
        found = {key.partition("/")[0] for key in keys} - set(_OURS)
        return self._owned.kinds if found else set()


def _of(key: str, lap: Overlap, dtype: torch.dtype, flat: Callable[[], Tensor]) -> StateShard:
    """What lies of a piece in something flat."""

    def read() -> Tensor:
        return flat().detach()[lap.at : lap.at + lap.stop - lap.start]

    return StateShard(key, lap.shard.full_shape, dtype, lap.shard.boxes, lap.start, lap.stop, read)


def _without_engines(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {key: shape for key, shape in shapes.items() if not key.startswith("engine/")}
