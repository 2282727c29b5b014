"""Measured speed of a machine's devices, which `plait bench device` and `make gpu` write for the planner."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class DeviceSpeed:
    """The speed of one rank's device while `num_ranks` of the host work at the same time.

    CPU ranks share cores, caches and memory: a speed holds for its number of ranks only.

    kind               cpu or cuda
    num_devices        GPUs, or cores, of the host
    num_sms            multiprocessors of the GPU; 1 for a CPU rank, whose products are measured
    memory_bytes       of the GPU; of the host's memory, a rank's share
    memory_bytes_per_s read and written by copies
    launch_s           seconds of an operator without work
    product_rates      by precision: FLOP/s of square products of so many FLOPs, in ascending order
    """

    num_ranks: int
    name: str
    kind: str
    num_devices: int
    num_sms: int
    memory_bytes: float
    memory_bytes_per_s: float
    launch_s: float
    product_rates: Mapping[str, tuple[tuple[float, float], ...]] = field(hash=False)

    @property
    def peak_flops(self) -> Mapping[str, float]:
        """The highest measured FLOP/s by precision."""
        return MappingProxyType(
            {precision: max(rate for _, rate in points) for precision, points in self.product_rates.items()}
        )


def to_json(speed: DeviceSpeed) -> dict[str, Any]:
    return asdict(speed)


def from_json(values: Any) -> DeviceSpeed:
    """Return what `to_json` wrote. Raises ValueError for anything else."""
    kinds = {each.name: each.type for each in fields(DeviceSpeed)}
    if not isinstance(values, dict) or values.keys() != kinds.keys():
        raise ValueError(f"a device does not have the keys {', '.join(kinds)}")
    for name, value in values.items():
        if kinds[name] is str and not isinstance(value, str):
            raise ValueError(f"{name}={value!r} is not a string")
        if kinds[name] is int and (type(value) is not int or value < 1):
            raise ValueError(f"{name}={value!r} is not an integer from 1")
        if kinds[name] is float and not _is_positive(value):
            raise ValueError(f"{name}={value!r} is not a number above 0")
    rates = values["product_rates"]
    if not isinstance(rates, dict) or not rates:
        raise ValueError("product_rates has no precision")
    return DeviceSpeed(**{**values, "product_rates": {key: _points(key, rates[key]) for key in rates}})


def _points(precision: str, points: Any) -> tuple[tuple[float, float], ...]:
    is_list = isinstance(points, list) and bool(points)
    if not is_list or not all(
        isinstance(p, list) and len(p) == 2 and all(map(_is_positive, p)) for p in points
    ):
        raise ValueError(f"product_rates of {precision} are not pairs of FLOPs and FLOP/s")
    return tuple(sorted((float(flops), float(rate)) for flops, rate in points))


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > 0
