"""The training state by name: what a checkpoint holds, free of units, ranges and ranks.

Keys are `kind/name`: `weights/<parameter>` (master weights), `buffers/<buffer>`, for every state of the
optimizer `<state>/<parameter>` (`exp_avg/...`) in the parameter's shape or, for what it counts once per
parameter, `scalar.<state>/<parameter>` (`scalar.step/...`; `number.` where it is a Python number), and
`engine/num_steps`.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from plait.errors import CheckpointError
from plait.optim import FlatSlice
from plait.parallel.units import Unit
from plait.plan import Piece

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


def flat_slices(units: list[Unit]) -> list[FlatSlice]:
    """The ranges that the optimizer updates, in the order of units and their groups."""
    return [
        FlatSlice.of(0 if decay else 1, unit.master[start:stop], unit.gradient[start:stop])
        for unit in units
        for decay, start, stop in unit.layout.groups
    ]


class EngineState:
    """Reads and writes the state of a model, its units and its optimizer."""

    def __init__(
        self,
        model: nn.Module,
        units: list[Unit],
        slices: list[FlatSlice],
        optimizer: torch.optim.Optimizer,
        kinds: set[str],
    ) -> None:
        """`kinds`: those of the optimizer's states, as `save` names them."""
        self._kinds = kinds
        self._model = model
        self._units = units
        self._slices = slices
        self._optimizer = optimizer

    def weights(self) -> dict[str, Tensor]:
        """Copies of the master weights and of the frozen parameters, whole, in the model's order."""
        found = {piece.name: view.clone() for unit in self._units for piece, view in unit.named(unit.master)}
        parameters = self._model.named_parameters()
        return {name: found.get(name, parameter.detach().clone()) for name, parameter in parameters}

    def gradients(self) -> dict[str, Tensor]:
        """Copies of the last step's gradients, whole."""
        return {p.name: view.clone() for unit in self._units for p, view in unit.named(unit.gradient)}

    def save(self, num_steps: int) -> dict[str, Tensor]:
        """Everything, by key. Flat tensors are views of what lives on."""
        tensors = {f"weights/{name}": tensor for name, tensor in self._weight_views()}
        tensors |= {f"buffers/{name}": buffer for name, buffer in persistent_buffers(self._model).items()}
        for piece, flat_slice in self._owners():
            for key, value in self._optimizer.state.get(flat_slice.leaf, {}).items():
                if _is_flat(value, flat_slice):
                    start = piece.start - _offset(flat_slice)
                    view = value[start : start + piece.box.numel].view(piece.box.shape)
                    tensors[f"{key}/{piece.name}"] = view
                elif isinstance(value, Tensor):
                    tensors[f"scalar.{key}/{piece.name}"] = value.clone()
                else:
                    tensors[f"number.{key}/{piece.name}"] = torch.tensor(value)
        tensors["engine/num_steps"] = torch.tensor(num_steps)
        return tensors

    def load(self, tensors: Mapping[str, Tensor]) -> int:
        """Takes everything over and returns the number of steps. Raises CheckpointError before any change
        when a tensor is missing, of another shape or of another optimizer."""
        self._check(tensors)
        for name, view in self._weight_views():
            view.copy_(tensors[f"weights/{name}"])
        for name, buffer in persistent_buffers(self._model).items():
            buffer.copy_(tensors[f"buffers/{name}"])
        self._load_optimizer(tensors)
        for unit in self._units:
            unit.publish()
        return int(tensors["engine/num_steps"])

    def _check(self, tensors: Mapping[str, Tensor]) -> None:
        expected = {f"weights/{name}": view.shape for name, view in self._weight_views()}
        buffers = persistent_buffers(self._model)
        expected |= {f"buffers/{name}": buffer.shape for name, buffer in buffers.items()}
        expected["engine/num_steps"] = torch.Size(())
        kinds = self._optimizer_kinds(tensors)
        for piece, _ in self._owners():
            scalar = torch.Size(())
            for kind in kinds:
                is_flat = not kind.startswith(("scalar.", "number."))
                expected[f"{kind}/{piece.name}"] = torch.Size(piece.box.shape) if is_flat else scalar
        for key in sorted(expected.keys() | tensors.keys()):
            if key not in tensors or key not in expected or tensors[key].shape != expected[key]:
                raise CheckpointError(
                    "the checkpoint is of another model or optimizer",
                    given=f"{key}: {tuple(tensors[key].shape) if key in tensors else 'missing'}",
                    expected=f"{key}: {tuple(expected[key]) if key in expected else 'nothing'}",
                )

    def _optimizer_kinds(self, tensors: Mapping[str, Tensor]) -> set[str]:
        """The kinds of optimizer state to expect: none if it had not made a step when it was saved."""
        found = {key.partition("/")[0] for key in tensors} - set(_OURS)
        return self._kinds if found else set()

    def _load_optimizer(self, tensors: Mapping[str, Tensor]) -> None:
        states: dict[Tensor, dict[str, Any]] = {}
        groups = {leaf: group for group in self._optimizer.param_groups for leaf in group["params"]}
        for piece, flat_slice in self._owners():
            leaf = flat_slice.leaf
            state = states.setdefault(leaf, {})
            for kind in self._optimizer_kinds(tensors):
                value, name = tensors[f"{kind}/{piece.name}"], kind.partition(".")[2]
                if kind.startswith("number."):
                    state[name] = value.item()
                elif kind.startswith("scalar."):
                    state[name] = value.to(scalar_device(groups[leaf], leaf), copy=True)
                else:
                    start = piece.start - _offset(flat_slice)
                    flat = state.setdefault(kind, torch.zeros_like(leaf, requires_grad=False))
                    flat[start : start + piece.box.numel].copy_(value.reshape(-1))
        self._optimizer.state.clear()
        self._optimizer.state.update({leaf: state for leaf, state in states.items() if state})

    def _weight_views(self) -> Iterator[tuple[str, Tensor]]:
        held = set()
        for unit in self._units:
            for piece, view in unit.named(unit.master):
                held.add(piece.name)
                yield piece.name, view
        for name, parameter in self._model.named_parameters():
            if name not in held:
                yield name, parameter.detach()

    def _owners(self) -> Iterator[tuple[Piece, FlatSlice]]:
        """Every piece with the slice that it lies in."""
        slices = iter(self._slices)
        for unit in self._units:
            for (_, start, stop), flat_slice in zip(unit.layout.groups, slices, strict=False):
                for piece in unit.layout.pieces:
                    if start <= piece.start < stop:
                        yield piece, flat_slice


def _offset(flat_slice: FlatSlice) -> int:
    """Where the slice begins in its unit's storage."""
    return int(flat_slice.leaf.storage_offset())


def _is_flat(value: object, flat_slice: FlatSlice) -> bool:
    return isinstance(value, Tensor) and value.shape == flat_slice.leaf.shape
