"""The training state by name: what a checkpoint holds, free of units, ranges and ranks.

Keys are `kind/name`: `weights/<parameter>` (master weights), `buffers/<buffer>`, for every state of the
optimizer `<state>/<parameter>` (`exp_avg/...`) in the parameter's shape or, for what it counts once per
parameter, `scalar.<state>/<parameter>` (`scalar.step/...`; `number.` where it is a Python number), and
`engine/...` for what the engine itself counts.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from plait.comm import Group, all_gather, receive, send
from plait.errors import CheckpointError
from plait.parallel.boxes import put, taken
from plait.parallel.owned import Owned, OwnedSlice
from plait.parallel.units import Unit
from plait.plan import Layout

_OURS = ("weights", "buffers", "engine")


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers that a state_dict holds: what forward may change, and what a resumed run needs."""
    return {
        f"{name}.{key}" if name else key: buffer
        for name, module in model.named_modules()
        for key, buffer in module._buffers.items()
        if buffer is not None and key not in module._non_persistent_buffers_set
    }


def scalar_device(group: Mapping[str, Any], leaf: Tensor) -> torch.device:
    """Where torch's optimizers keep counters such as `step`: on the CPU, unless a kernel reads them."""
    in_kernel = group.get("fused") or group.get("capturable")
    return leaf.device if in_kernel else torch.device("cpu")


class EngineState:
    """Reads and writes the state of a model, its units and their optimizer.

    Reading is collective over the ranks that together hold one copy; the first of them gets what is whole.
    """

    def __init__(
        self,
        model: nn.Module,
        units: list[Unit],
        owned: Owned,
        shard: Group,
        grid: Group,
        layouts: Sequence[Layout],
    ) -> None:
        """`shard`: ranks with the ranges of the same units. `grid`: those with other pieces of the model,
        whose `layouts` these are."""
        self._model = model
        self._units = units
        self._owned = owned
        self._shard = shard
        self._grid = grid
        self._layouts = layouts

    @property
    def _is_first(self) -> bool:
        return self._shard.rank == self._grid.rank == 0

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all weights, by key."""
        found = {p.name: p.whole_shape for unit in self._units for p in unit.layout.pieces}
        found |= {name: tuple(p.shape) for name, p in self._elsewhere().items()}
        return {f"weights/{name}": found[name] for name, _ in self._model.named_parameters()}

    def weights(self) -> dict[str, Tensor]:
        """Copies of the master weights and of frozen parameters, whole, in the model's order."""
        found = dict(self._whole(self._units, lambda unit: unit.master))
        found |= {name: p.detach().clone() for name, p in self._elsewhere().items()}
        return {name: found[name] for name, _ in self._model.named_parameters() if name in found}

    def gradients(self) -> dict[str, Tensor]:
        """Copies of the last step's gradients, whole."""
        return dict(self._whole(self._trained(), lambda unit: unit.gradient))

    def save(self) -> dict[str, Tensor]:
        """Copies of everything but the engine's own, by key."""
        tensors = {f"weights/{name}": tensor for name, tensor in self.weights().items()}
        buffers = persistent_buffers(self._model)
        for kind in sorted(self._owned.kinds):
            if "." not in kind and self._owned.has_states:
                states = self._whole(self._trained(), functools.partial(self._flat, kind))
                tensors |= {f"{kind}/{name}": tensor for name, tensor in states}
        if not self._is_first:
            return {}
        tensors |= {f"buffers/{name}": buffer.clone() for name, buffer in buffers.items()}
        for unit in self._trained() if self._owned.has_states else []:
            for piece in unit.layout.pieces:
                for kind, value in self._counters(unit, piece.start).items():
                    tensors[f"{kind}/{piece.name}"] = value
        return tensors

    def check(self, tensors: Mapping[str, Tensor]) -> None:
        """Raises CheckpointError when a tensor is missing, of another shape or of another optimizer. Of the
        engine's own keys it looks for one."""
        if "engine/num_steps" not in tensors:
            raise CheckpointError("this is no engine's state", given="no engine/num_steps")
        self._check(_without_engines(tensors))

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes over everything that `check` lets pass, each rank its part."""
        tensors = _without_engines(tensors)
        with torch.no_grad():
            for unit in self._units:
                for piece in unit.layout.pieces:
                    unit.write(piece.name, tensors[f"weights/{piece.name}"])
            for name, parameter in self._elsewhere().items():
                parameter.copy_(tensors[f"weights/{name}"])
            for name, buffer in persistent_buffers(self._model).items():
                buffer.copy_(tensors[f"buffers/{name}"])
        kinds = self._kinds_in(tensors)
        self._owned.stepper.clear()
        self._owned.has_states = bool(kinds)
        for unit in self._trained() if kinds else []:
            for part in self._owned.slices[unit]:
                self._owned.stepper.load(part.leaf, self._state_of(unit, part, kinds, tensors))

    def _whole(self, units: list[Unit], own: Callable[[Unit], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Every parameter, whole, from the ranks' ranges and pieces: on the first rank, elsewhere nothing."""
        for unit in units:
            part = own(unit).detach().to(unit.cut.device)
            held = torch.empty(unit.layout.numel, dtype=part.dtype, device=part.device)
            all_gather(held, part, self._shard)
            if self._shard.rank == 0:
                yield from self._from_grid(self._units.index(unit), held)

    def _from_grid(self, number: int, held: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The unit's parameters, of what every rank of the grid holds; on its first rank."""
        if self._grid.rank:
            send(held, self._grid, 0)
            return
        found: dict[str, Tensor] = {}
        for rank, layout in enumerate(self._layouts):
            unit = layout.units[number]
            if rank:
                held = held.new_empty(unit.numel)
                receive(held, self._grid, rank)
            for piece in unit.pieces:
                if piece.name not in found:
                    found[piece.name] = torch.empty(piece.whole_shape, dtype=held.dtype)
                if piece.counted:
                    part = held[piece.start : piece.stop].view(piece.boxes.shape)
                    put(found[piece.name], piece.boxes, part)
        yield from ((piece.name, found[piece.name]) for piece in self._layouts[0].units[number].pieces)

    def _trained(self) -> list[Unit]:
        return [unit for unit in self._units if unit.trains]

    def _elsewhere(self) -> dict[str, nn.Parameter]:
        """Parameters that lie in no unit."""
        held = {piece.name for unit in self._units for piece in unit.layout.pieces}
        return {name: p for name, p in self._model.named_parameters() if name not in held}

    def _flat(self, kind: str, unit: Unit) -> Tensor:
        """A state of the range that this rank owns; zeros where no slice lies."""
        flat = torch.zeros_like(unit.master, requires_grad=False)
        for part in self._owned.slices[unit]:
            flat[part.start : part.stop] = self._owned.stepper.state(part.leaf)[kind]
        return flat

    def _counters(self, unit: Unit, start: int) -> dict[str, Tensor]:
        """What the optimizer counts once per parameter: all of a group's slices agree, and one is here."""
        parts = self._owned.slices[unit]
        group = next(group for group, low, high in unit.layout.groups if low <= start < high)
        part = next((part for part in parts if part.group == group), parts[0])
        found = {}
        for name, value in self._owned.stepper.state(part.leaf).items():
            if f"scalar.{name}" in self._owned.kinds:
                found[f"scalar.{name}"] = value.clone().cpu()
            elif f"number.{name}" in self._owned.kinds:
                found[f"number.{name}"] = torch.tensor(value)
        return found

    def _state_of(
        self, unit: Unit, part: OwnedSlice, kinds: set[str], tensors: Mapping[str, Tensor]
    ) -> dict[str, Any]:
        """A slice's state, as the optimizer will hold it."""
        groups = {leaf: g for g in self._owned.optimizer.param_groups for leaf in g["params"]}
        overlaps = unit.layout.overlaps(unit.start + part.start, unit.start + part.stop)
        name = overlaps[0].piece.name if overlaps else unit.layout.pieces[0].name
        state: dict[str, Any] = {}
        for kind in kinds:
            short = kind.partition(".")[2]
            if kind.startswith("number."):
                state[short] = tensors[f"{kind}/{name}"].item()
            elif kind.startswith("scalar."):
                device = scalar_device(groups[part.leaf], part.leaf)
                state[short] = tensors[f"{kind}/{name}"].to(device, copy=True)
            else:
                flat = state[kind] = torch.zeros_like(part.leaf, requires_grad=False)
                for lap in overlaps:
                    held = taken(tensors[f"{kind}/{lap.piece.name}"], lap.piece.boxes).reshape(-1)
                    flat[lap.at : lap.at + lap.stop - lap.start].copy_(held[lap.start : lap.stop])
        return state

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        expected = self.shapes()
        buffers = persistent_buffers(self._model)
        expected |= {f"buffers/{name}": tuple(buffer.shape) for name, buffer in buffers.items()}
        for kind in self._kinds_in(tensors):
            is_flat = not kind.startswith(("scalar.", "number."))
            for unit in self._trained():
                for piece in unit.layout.pieces:
                    expected[f"{kind}/{piece.name}"] = piece.whole_shape if is_flat else ()
        for key in sorted(expected.keys() | tensors.keys()):
            if key not in tensors or key not in expected or tuple(tensors[key].shape) != expected[key]:
                raise CheckpointError(
                    "the checkpoint is of another model or optimizer",
                    given=f"{key}: {tuple(tensors[key].shape) if key in tensors else 'missing'}",
                    expected=f"{key}: {expected.get(key, 'nothing')}",
                )

    def _kinds_in(self, tensors: Mapping[str, Tensor]) -> set[str]:
        """The kinds of optimizer state to expect: none if it had not made a step when it was saved."""
        found = {key.partition("/")[0] for key in tensors} - set(_OURS)
        return self._owned.kinds if found else set()


def _without_engines(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in tensors.items() if not key.startswith("engine/")}
