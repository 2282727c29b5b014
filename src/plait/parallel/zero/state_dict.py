"""The training state by name, as in a checkpoint: independent of units, ranges and ranks.

A key is `kind/name`, in the model's names:
  weights/<parameter>            master weights; a frozen parameter as it is
  buffers/<buffer>
  <state>/<parameter>            of the optimizer, in the parameter's shape: exp_avg/...
  scalar.<state>/<parameter>     of the optimizer, one number per parameter: scalar.step/...
  number.<state>/<parameter>     the same, if the optimizer holds a Python number
  engine/<number>                the engine's: num_steps, loss_scale..., param_groups.0.lr..., see
                                 `engine/engine.py`
"""

import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from plait.comm import all_gather, receive, send
from plait.errors import CheckpointError
from plait.parallel.zero.flat_param import FlatParam
from plait.parallel.zero.full_tensors import FullTensor
from plait.parallel.zero.rank_context import RankContext
from plait.parallel.zero.shard_map import ShardMap, persistent_buffers
from plait.parallel.zero.sharded_optim import OptimizerSlice, ShardedOptimizer
from plait.parallel.zero.state_io import StateReader, StateShard, not_engine_state, slice_boxes, write_boxes
from plait.plan import Boxes, Overlap, UnitLayout
from plait.plan.axes import UnitKind

_Value = TypeVar("_Value")
_COUNTERS = ("scalar.", "number.")
_NOT_OPTIMIZER = ("weights", "buffers", "engine")
_MIN_CHUNK_BYTES = 2**16  # smaller replicated tensors are saved by one rank instead of in chunks


def scalar_device(group: Mapping[str, Any], leaf: Tensor) -> torch.device:
    """The device of an optimizer's counters such as `step`: the CPU, unless a kernel reads them."""
    in_kernel = group.get("fused") or group.get("capturable")
    return leaf.device if in_kernel else torch.device("cpu")


class ShardedState:
    """Saves and loads the state of a model, its units and their optimizer.

    Collecting full tensors is a collective over the ranks that together hold one copy; the first of them gets
    the result.
    """

    def __init__(
        self,
        context: RankContext,
        modules: Mapping[int, nn.Module],
        units: Mapping[int, Sequence[FlatParam]],
        optimizer: ShardedOptimizer,
        shard_map: ShardMap,
    ) -> None:
        """`modules`, `units`: by stage."""
        self._modules = modules
        self._units = units
        self._optimizer = optimizer
        self._context = context
        self._shard_group = context.groups.dense.all_gather  # ranks with the other ranges of the same units
        self._model_group = context.groups.same_data
        self._parts_group = context.groups.parts
        self._shard_map = shard_map
        self.num_loads = 0  # of weights
        # Without and with optimizer states.
        self._unit_shards: dict[bool, dict[UnitKind, list[StateShard]]] = {}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of all weights, by key."""
        shapes = {shard.name: shard.full_shape for shard, _ in self._shard_map.params()}
        shapes |= {name: tensor.shape for name, tensor in self._shard_map.standalone.items()}
        return {f"weights/{name}": shapes[name] for name in self._shard_map.names}

    def weights(self) -> dict[str, Tensor]:
        """Collect copies of the full master weights and frozen parameters, in the model's order."""
        in_units = self._gather_full(lambda unit: unit.own_values, frozen=True)
        return self._in_order([*in_units, *self._gather_standalone("weights").items()])

    def buffers(self) -> dict[str, Tensor]:
        """Collect copies of the persistent buffers, by the model's names."""
        return self._gather_standalone("buffers")

    def gradients(self) -> dict[str, Tensor]:
        """Collect copies of the last step's full gradients."""
        return self._in_order(self._gather_full(lambda unit: unit.grad_shard))

    def gradient_distance(self, name: str, expected: Tensor) -> tuple[float, float] | None:
        """For this rank's ranges of a parameter: the squared distance of its gradient from `expected` (the
        full gradient), and the squared norm of `expected`. None if this rank owns nothing of it."""
        total = None
        for unit in self._trained():
            for overlap in unit.overlaps():
                if overlap.shard.name == name:
                    actual = unit.grad_shard[overlap.place].double()
                    right = slice_boxes(expected, overlap.shard.boxes).reshape(-1)
                    right = right[overlap.start : overlap.stop].to(actual)
                    squares = (float((actual - right).square().sum()), float(right.square().sum()))
                    total = squares if total is None else (total[0] + squares[0], total[1] + squares[1])
        return total

    def shards(self) -> list[StateShard]:
        """This rank's part of a checkpoint, except the engine's counters. Over all ranks every element occurs
        once; ranks along `replicate` divide their copy. No communication."""
        if self._optimizer.has_states not in self._unit_shards:  # the layout is fixed
            of_units: dict[UnitKind, list[StateShard]] = {kind: [] for kind in UnitKind}
            for unit in self._all_units():
                of_units[unit.layout.kind] += self._shards_of(unit)
            if self._optimizer.has_states:
                of_units[UnitKind.EXPERT] += self._full_shards()  # one owner, also of ranks along EXPERTS
            self._unit_shards[self._optimizer.has_states] = of_units
        by_kind = {kind: [*of] for kind, of in self._unit_shards[self._optimizer.has_states].items()}
        local = self._local_standalone()
        for name, tensor in self._shard_map.standalone.items():
            if self._shard_group.rank == 0 and self._model_group.rank == self._shard_map.first_rank(
                tensor.stage
            ):
                by_kind[UnitKind.DENSE].append(
                    StateShard.from_tensor(f"{tensor.kind}/{name}", local[name][tensor.stage])
                )
        groups = {kind: of.replicate for kind, of in self._context.groups.units.items()}
        return [s for kind, of in by_kind.items() for s in divided(of, groups[kind].rank, groups[kind].size)]

    def _shards_of(self, unit: FlatParam) -> Iterator[StateShard]:
        """The state of this rank's range of a unit."""
        if unit.layout.format:
            yield from _dequantized_shards(unit)
        else:
            yield from shards_of_unit("weights", unit, unit.master)
        for part in self._optimizer.slices[unit] if unit.trains and self._optimizer.has_states else ():
            for overlap in unit.overlaps(part.start, part.stop):
                if overlap.shard.counted:
                    yield from self._optimizer_shards(part, overlap)

    def _optimizer_shards(self, part: OptimizerSlice, overlap: Overlap) -> Iterator[StateShard]:
        for kind in sorted(self._optimizer.state_shapes(overlap.shard.full_shape, part.group)):
            key = f"{kind}/{overlap.shard.name}"
            if "." not in kind:
                yield _shard_of(
                    key, overlap, part.leaf.dtype, functools.partial(self._state, part.leaf, kind)
                )
            elif overlap.start == 0 and all(dim[0][0] == 0 for dim in overlap.shard.boxes.ranges):
                # A parameter's counters are saved by the owner of its first element.
                yield self._full_shard(part.leaf, kind, key)

    def _full_shards(self) -> Iterator[StateShard]:
        """The states of the full tensors that this rank owns."""
        for tensor, leaf in self._owned():
            for kind in sorted(self._optimizer.state_shapes(tensor.shape, tensor.group)):
                is_other_counter = "." in kind and tensor.expert is not None and tensor.expert[0]
                if tensor.counted and not is_other_counter:
                    yield self._full_shard(leaf, kind, f"{kind}/{tensor.name}", tensor)

    def _full_shard(self, leaf: Tensor, kind: str, key: str, tensor: FullTensor | None = None) -> StateShard:
        """A state that this rank has all of, such as a counter; of a full tensor, all of its matrix."""

        def read() -> Tensor:
            return self._state(leaf, kind).reshape(-1)

        state = self._state(leaf, kind)
        shape = tuple(state.shape)
        is_part = tensor is not None and "." not in kind
        saved, boxes = tensor.state(shape) if tensor and is_part else (shape, Boxes.full(shape))
        return StateShard(key, saved, state.dtype, boxes, 0, state.numel(), read)

    def check(self, source: StateReader, *, weights_only: bool = False, kept: Collection[str] = ()) -> None:
        """Raise CheckpointError if a tensor is missing, or of another shape or optimizer. Of the engine's
        counters, only the presence of one is checked. `kept`: keys of weights that are not to be loaded."""
        shapes = source.shapes
        if not weights_only and "engine/num_steps" not in shapes:
            raise not_engine_state("no engine/num_steps", "the tensors of engine.state()")
        for key, shape in shapes.items():
            if key.startswith("engine/") and shape != ():
                raise not_engine_state(f"{key}: {shape}", "numbers")
        self._check(_without_counters(shapes), weights_only=weights_only, kept=kept)
        self._check_dtypes(source.dtypes, weights_only=weights_only)

    def keys(self) -> set[str]:
        """The keys of all weights and buffers."""
        return {*self.shapes(), *(f"{of.kind}/{name}" for name, of in self._shard_map.standalone.items())}

    def load_weights(self, source: StateReader, kept: Collection[str] = ()) -> None:
        """Load this rank's weights and buffers from a state that has passed `check`, except those of the keys
        `kept`."""
        self.num_loads += 1
        with torch.no_grad():
            for unit in self._all_units():
                overlaps = [each for each in unit.overlaps() if f"weights/{each.shard.name}" not in kept]
                if unit.layout.format:
                    _quantize_overlaps(source, unit, overlaps)
                else:
                    read_overlaps(source, "weights", unit, overlaps, unit.master)
            for name, by_stage in self._local_standalone().items():
                key = f"{self._shard_map.standalone[name].kind}/{name}"
                for tensor in by_stage.values() if key not in kept else ():
                    tensor.copy_(source.read_full(key))

    def load_optimizer(self, source: StateReader, *, weights_only: bool = False) -> None:
        """Load this rank's optimizer states from a state that has passed `check`. `weights_only`: the
        optimizer starts without states."""
        with torch.no_grad():
            has_states = not weights_only and _has_states(_without_counters(source.shapes))
            if not has_states:
                self._optimizer.chunked.clear()
            self._optimizer.has_states = has_states
            for unit in self._trained() if has_states else []:
                for part in self._optimizer.slices[unit]:
                    self._optimizer.chunked.load(part.leaf, self._state_of(unit, part, source))
            for full_tensor, leaf in self._owned() if has_states else ():
                self._optimizer.chunked.load(leaf, self._full_state_of(full_tensor, leaf, source))

    # --- collecting full tensors

    def _gather_full(
        self, own_range: Callable[[FlatParam], Tensor], *, frozen: bool = False
    ) -> Iterator[tuple[str, Tensor]]:
        """Gather every full parameter (with `frozen`, also those that do not train) from the ranks' ranges:
        on the first rank; nothing on the others."""
        for stage, index, layouts in self._shard_map.units():
            first = next(iter(layouts.values()))
            if not (first.trains or frozen):
                continue
            flat = None
            if stage in self._units:
                unit = self._units[stage][index]
                shard = own_range(unit).detach().to(self._context.device)
                flat = shard.new_empty(shard.numel() * unit.groups.all_gather.size)
                all_gather(flat, shard, unit.groups.all_gather)
            kind = first.kind
            is_holder = self._shard_map.holds(self._parts_group.rank, kind)
            if self._context.groups.units[kind].all_gather.rank == 0 and is_holder:
                precision = self._context.precision
                dtype = precision.master if first.trains or first.format else precision.compute
                yield from self._gather_from_model(layouts, flat, dtype)

    def _gather_from_model(
        self, layouts: Mapping[int, UnitLayout], flat: Tensor | None, dtype: torch.dtype
    ) -> Iterator[tuple[str, Tensor]]:
        """Assemble a unit's full parameters on the first rank along PARTS from each rank's flat storage."""
        if self._parts_group.rank:
            if flat is not None:
                send(flat, self._parts_group, 0)
            return
        full: dict[str, Tensor] = {}
        for rank, layout in layouts.items():
            if rank:
                flat = torch.empty(layout.numel, dtype=dtype, device=self._context.device)
                receive(flat, self._parts_group, rank)
            assert flat is not None, f"{layout.name} is not on the rank that the shard map names"
            for shard in layout.params:
                if shard.counted:
                    if shard.name not in full:
                        full[shard.name] = torch.empty(shard.full_shape, dtype=flat.dtype)
                    write_boxes(
                        full[shard.name], shard.boxes, flat[shard.start : shard.stop].view(shard.boxes.shape)
                    )
        yield from full.items()

    def _in_order(self, named: Iterable[tuple[str, _Value]]) -> dict[str, _Value]:
        """Sort by the model's order, which differs from that of its stages' units."""
        values = dict(named)
        return {name: values[name] for name in self._shard_map.names if name in values}

    def _gather_standalone(self, kind: str) -> dict[str, Tensor]:
        """Copies of the tensors outside units: all on the first rank, the local ones elsewhere."""
        local, copies = self._local_standalone(), {}
        for name, tensor in self._shard_map.standalone.items():
            if tensor.kind != kind or self._shard_group.rank:
                continue
            source = self._shard_map.first_rank(tensor.stage)
            if self._model_group.rank == source:
                copies[name] = local[name][tensor.stage].detach().clone()
                if source:
                    send(copies[name], self._model_group, 0)
            elif self._model_group.rank == 0:
                copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device=self._context.device)
                receive(copies[name], self._model_group, source)
        return copies

    def _local_standalone(self) -> dict[str, dict[int, Tensor]]:
        """This rank's tensors outside units, by stage."""
        local: dict[str, dict[int, Tensor]] = {}
        for stage, module in self._modules.items() if self._shard_map.standalone else ():
            for name, tensor in (*module.named_parameters(), *persistent_buffers(module).items()):
                if name in self._shard_map.standalone:
                    local.setdefault(name, {})[stage] = tensor
        return local

    def _trained(self) -> list[FlatParam]:
        return [unit for unit in self._all_units() if unit.trains]

    def _all_units(self) -> list[FlatParam]:
        return [unit for units in self._units.values() for unit in units]

    def _owned(self) -> Iterator[tuple[FullTensor, Tensor]]:
        return zip(self._optimizer.full.owned, self._optimizer.full.leaves, strict=True)

    def _state(self, leaf: Tensor, kind: str) -> Tensor:
        """A leaf's state or counter, where the optimizer has it."""
        value = self._optimizer.chunked.state(leaf)[kind.rpartition(".")[2]]
        return value.detach() if isinstance(value, Tensor) else torch.tensor(value)

    def _counter_of(self, leaf: Tensor, kind: str, name: str, source: StateReader) -> Any:
        """Read a parameter's counter, in the form in which the optimizer holds it."""
        value = source.read_full(f"{kind}/{name}")
        if kind.startswith("number."):
            return value.item()
        return value.to(scalar_device(self._optimizer.chunked.options(leaf), leaf), copy=True)

    def _full_state_of(self, tensor: FullTensor, leaf: Tensor, source: StateReader) -> dict[str, Any]:
        """Read a full tensor's state, in the form in which the optimizer holds it."""
        state: dict[str, Any] = {}
        for kind, shape in self._optimizer.state_shapes(tensor.shape, tensor.group).items():
            if kind.startswith(_COUNTERS):
                state[kind.partition(".")[2]] = self._counter_of(leaf, kind, tensor.name, source)
            else:
                state[kind] = torch.zeros(shape, dtype=leaf.dtype, device=leaf.device)
                flat = state[kind].view(-1)
                boxes = tensor.state(shape)[1]
                source.read(f"{kind}/{tensor.name}", boxes, 0, flat, counted=tensor.counted)
        return state

    def _state_of(self, unit: FlatParam, part: OptimizerSlice, source: StateReader) -> dict[str, Any]:
        """Read a slice's state, in the form in which the optimizer holds it."""
        overlaps = unit.overlaps(part.start, part.stop)
        name = overlaps[0].shard.name if overlaps else unit.layout.params[0].name
        present = self._optimizer.chunked.state(part.leaf)  # its memory is reused
        state: dict[str, Any] = {}
        for kind in self._optimizer.state_shapes((part.leaf.numel(),), part.group):
            if kind.startswith(_COUNTERS):
                state[kind.partition(".")[2]] = self._counter_of(part.leaf, kind, name, source)
            else:
                fresh = kind not in present
                flat = torch.zeros_like(part.leaf, requires_grad=False) if fresh else present[kind]
                state[kind] = flat
                read_overlaps(source, kind, unit, overlaps, flat)
        return state

    def _check(
        self, shapes: Mapping[str, tuple[int, ...]], *, weights_only: bool, kept: Collection[str]
    ) -> None:
        expected = self.shapes()
        expected |= {
            f"buffers/{name}": tensor.shape
            for name, tensor in self._shard_map.standalone.items()
            if tensor.kind == "buffers"
        }
        expected = {key: shape for key, shape in expected.items() if key not in kept}
        for shard, group in self._shard_map.params() if not weights_only and _has_states(shapes) else ():
            if group is not None:
                states = self._optimizer.parameter_states(shard, group)
                expected |= {f"{kind}/{shard.name}": shape for kind, shape in states.items()}
        empty = {shard.name for shard, _ in self._shard_map.params() if 0 in shard.full_shape}
        known = expected.keys() | (set() if weights_only else shapes.keys())
        for key in sorted(known, key=lambda key: (not key.startswith("weights/"), key)):
            if key.partition("/")[2] not in empty and shapes.get(key) != expected.get(key):
                raise CheckpointError(
                    "the checkpoint is of another model or optimizer",
                    given=f"{key}: {shapes.get(key, 'missing')}",
                    expected=f"{key}: {expected.get(key, 'nothing')}",
                    hint="the model that was saved"
                    if key.startswith("weights/")
                    else "weights_only=True loads only the weights",
                )

    def _check_dtypes(self, dtypes: Mapping[str, torch.dtype], *, weights_only: bool) -> None:
        """Raise CheckpointError for a dtype whose values the state cannot hold."""
        standalone = {f"{of.kind}/{name}": of.dtype for name, of in self._shard_map.standalone.items()}
        for key, dtype in dtypes.items():
            kind = key.partition("/")[0]
            if kind.startswith(("engine", *_COUNTERS)) or (
                weights_only and kind not in ("weights", "buffers")
            ):
                continue
            expected = standalone.get(key, torch.float32)
            if (dtype.is_floating_point, dtype.is_complex) != (
                expected.is_floating_point,
                expected.is_complex,
            ):
                raise CheckpointError(
                    "a state tensor has the wrong dtype",
                    given=f"{key}: {dtype}",
                    expected=f"such as {expected}",
                    hint="pass the tensors that engine.state() returned",
                )


def _has_states(keys: Iterable[str]) -> bool:
    """Return whether optimizer states were saved: none are before the first step."""
    return any(key.partition("/")[0] not in _NOT_OPTIMIZER for key in keys)


def shards_of_unit(kind: str, unit: FlatParam, flat: Tensor) -> Iterator[StateShard]:
    """The state in `flat`, which is laid out like this rank's range of the unit."""
    for overlap in unit.overlaps():
        if overlap.shard.counted:
            yield _shard_of(f"{kind}/{overlap.shard.name}", overlap, flat.dtype, lambda: flat)


def read_overlaps(
    source: StateReader, kind: str, unit: FlatParam, overlaps: Iterable[Overlap], flat: Tensor
) -> None:
    """Read parts of parameters of a unit, or of their states, into a flat tensor, each to its place in it."""
    for overlap in overlaps:
        key, shard = f"{kind}/{overlap.shard.name}", overlap.shard
        counted = shard.counted and unit.groups.counts
        source.read(key, shard.boxes, overlap.start, flat[overlap.place], counted=counted)


def _dequantized_shards(unit: FlatParam) -> Iterator[StateShard]:
    """The weights of a quantized unit, in the dtype of master weights: loading them gives the same codes."""
    dtype = unit.context.precision.master
    for overlap in unit.overlaps():
        if (shard := overlap.shard).counted:
            place = shard.full_shape, dtype, shard.boxes, overlap.start, overlap.stop
            yield StateShard(f"weights/{shard.name}", *place, functools.partial(unit.values, overlap.place))


def _quantize_overlaps(source: StateReader, unit: FlatParam, overlaps: Iterable[Overlap]) -> None:
    """Read parameters in this rank's range of a quantized unit, one at a time."""
    for overlap in overlaps:
        numel = overlap.stop - overlap.start
        values = unit.shard.new_empty(numel, dtype=unit.context.precision.master)
        read_overlaps(source, "weights", unit, [replace(overlap, at=0)], values)
        unit.store(overlap, values)


def divided(shards: Sequence[StateShard], rank: int, size: int) -> list[StateShard]:
    """One rank's share of shards that `size` ranks have in common."""
    own = []
    for index, shard in enumerate(shards):
        if shard.num_bytes >= size * _MIN_CHUNK_BYTES:
            own.append(shard.chunk(rank, size))
        elif index % size == rank:
            own.append(shard)
    return own


def _shard_of(key: str, overlap: Overlap, dtype: torch.dtype, flat: Callable[[], Tensor]) -> StateShard:
    """The elements of a parameter that overlap a flat tensor."""

    def read() -> Tensor:
        return flat().detach()[overlap.place]

    return StateShard(
        key, overlap.shard.full_shape, dtype, overlap.shard.boxes, overlap.start, overlap.stop, read
    )


def _without_counters(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {key: shape for key, shape in shapes.items() if not key.startswith("engine/")}
