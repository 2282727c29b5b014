"""DoRA's initial magnitudes, which follow from weights that are in files.

PEFT computes them when an adapter is added: the norms of the base's weights over their inputs (Liu et al.
2402.09353, section 4). A model on meta has no weights then. They are computed here, of the values that the
base has under the plan, when its files are read: one full weight at a time, on each rank that has a part of
its magnitudes.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from plait.checkpoint.compress import QuantizedReader
from plait.checkpoint.reader import Reader
from plait.comm import Group
from plait.errors import CheckpointError
from plait.models.adapters import adapter_layers
from plait.parallel.zero.block_codes import as_stored
from plait.parallel.zero.state_io import slice_boxes
from plait.plan.sharding import Boxes


class MagnitudeReader:
    """A StateReader, and a context like `Reader`, with the weights of a base and the magnitudes of its
    adapters."""

    def __init__(
        self,
        of_base: Reader | QuantizedReader,
        model: nn.Module,
        formats: Mapping[str, str],
        dtype: torch.dtype,
    ) -> None:
        """`model`: with the adapters, on meta. `formats`: of quantized weights, by their names. `dtype`: in
        which the plan computes."""
        self._of_base, self._formats, self._dtype = of_base, formats, dtype
        self._weight_of = dict(_weights(model))
        self._last: tuple[str, Tensor] | None = None  # parts of one parameter are read one after the other

    def __enter__(self) -> "MagnitudeReader":
        return self

    def __exit__(self, *error: object) -> None:
        self._of_base.__exit__(*error)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        shapes = self._of_base.shapes
        return {**shapes, **{key: shape for key, (_, shape, _) in self._weight_of.items()}}

    @property
    def dtypes(self) -> Mapping[str, torch.dtype]:
        dtypes = self._of_base.dtypes
        return {**dtypes, **{key: dtypes[f"weights/{of}"] for key, (of, _, _) in self._weight_of.items()}}

    def read(self, key: str, boxes: Boxes, start: int, into: Tensor, *, counted: bool = True) -> None:
        if key not in self._weight_of:
            self._of_base.read(key, boxes, start, into, counted=counted)
        else:
            into.copy_(slice_boxes(self.read_full(key), boxes).reshape(-1)[start : start + into.numel()])

    def read_full(self, key: str) -> Tensor:
        if key not in self._weight_of:
            return self._of_base.read_full(key)
        if self._last is None or self._last[0] != key:
            name, shape, dim = self._weight_of[key]
            weight = self._of_base.read_full(f"weights/{name}")
            weight = weight if weight.dtype == torch.float64 else weight.float()
            weight = as_stored(weight, self._formats.get(name), self._dtype)
            self._last = key, torch.linalg.vector_norm(weight, dim=dim).view(shape)
        return self._last[1]

    def finish(
        self, copy: Group, everyone: Group, device: torch.device, error: CheckpointError | None
    ) -> None:
        self._last = None
        self._of_base.finish(copy, everyone, device, error)


def _weights(model: nn.Module) -> Iterator[tuple[str, tuple[str, tuple[int, ...], int]]]:
    """Yield (key of a magnitude, (name of its weight, its own shape, the weight's dim of inputs))."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for path, layer in adapter_layers(model):
        magnitudes: Any = getattr(layer, "lora_magnitude_vector", {})
        for adapter, magnitude in magnitudes.items():
            base: Any = layer.get_base_layer().weight  # type: ignore[operator]
            dim = 0 if magnitude.fan_in_fan_out else 1
            key = f"weights/{path}.lora_magnitude_vector.{adapter}.weight"
            yield key, (names[id(base)], tuple(magnitude.weight.shape), dim)
