"""Measured speed of a machine's devices, which `plait bench device` and `make gpu` write for the planner."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from types import MappingProxyType
from typing import Any

from plait.plan.cost_model import COLLECTIVES

Points = tuple[tuple[float, float], ...]  # rates by size, ascending

# Parts of an eager decoder block and of a step. Work and size are elements, but for `linear` FLOPs by the
# smallest dimension of the product, and for `attention` heads x head dim x sequence^2 by the sequence.
_BOTH_WAYS = ("norm", "rotary", "activation", "attention", "loss")  # `norm` with the residual's addition
OPERATORS = (
    "linear",
    *(f"{name}{suffix}" for name in _BOTH_WAYS for suffix in ("", " backward")),
    "accumulate",  # moves a gradient into the buffer of the step's
    "update",  # of AdamW
)

# Collectives of plans. Through shared memory each rank adds up its range of the gradients itself, and all
# ranks use one copy of the parameters, so that to unshard them is to wait for the others. Activations are
# foreign to its memory, and copied.
KINDS = (*COLLECTIVES, "scattered sum", "unshard", "foreign all-reduce")


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
    operator_rates     of CPUs, by precision and OPERATORS: work per second by size, in ascending order
    collectives        kind, ranks, seconds and seconds per byte of the full tensor, with as many groups of
                       these ranks at once as the host's ranks form
    calibration        constants of the planner that `plait plan --measure` fitted to steps on these ranks
    """

    num_ranks: int
    name: str
    kind: str
    num_devices: int
    num_sms: int
    memory_bytes: float
    memory_bytes_per_s: float
    launch_s: float
    product_rates: Mapping[str, Points] = field(hash=False)
    operator_rates: Mapping[str, Mapping[str, Points]] = field(default_factory=dict, hash=False)
    collectives: tuple[tuple[str, int, float, float], ...] = ()
    calibration: Mapping[str, float] = field(default_factory=dict, hash=False)

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
    if isinstance(values, dict):  # of a file from before they existed
        values = {"operator_rates": {}, "collectives": [], "calibration": {}} | values
    if not isinstance(values, dict) or values.keys() != kinds.keys():
        raise ValueError(f"a device does not have the keys {', '.join(kinds)}")
    for name, value in values.items():
        if kinds[name] is str and not isinstance(value, str):
            raise ValueError(f"{name}={value!r} is not a string")
        if kinds[name] is int and (type(value) is not int or value < 1):
            raise ValueError(f"{name}={value!r} is not an integer from 1")
        if kinds[name] is float and not _is_positive(value):
            raise ValueError(f"{name}={value!r} is not a number above 0")
    rates, operators, calibration = (
        values[name] for name in ("product_rates", "operator_rates", "calibration")
    )
    if not isinstance(rates, dict) or not rates:
        raise ValueError("product_rates has no precision")
    if not isinstance(operators, dict) or not all(
        isinstance(each, dict) and each.keys() == set(OPERATORS) for each in operators.values()
    ):
        raise ValueError(f"operator_rates are not those of {', '.join(OPERATORS)}")
    if not isinstance(calibration, dict) or not all(map(_is_positive, calibration.values())):
        raise ValueError("a constant of calibration is not a number above 0")
    found = {
        "product_rates": {key: _points(f"product_rates of {key}", rates[key]) for key in rates},
        "operator_rates": {
            key: {name: _points(f"{name} of {key}", points) for name, points in each.items()}
            for key, each in operators.items()
        },
        "collectives": _collectives(values["collectives"]),
    }
    return DeviceSpeed(**{**values, **found})


def _points(what: str, points: Any) -> Points:
    is_list = isinstance(points, list) and bool(points)
    if not is_list or not all(
        isinstance(p, list) and len(p) == 2 and all(map(_is_positive, p)) for p in points
    ):
        raise ValueError(f"{what} are not pairs of a size and a rate")
    return tuple(sorted((float(size), float(rate)) for size, rate in points))


def _collectives(rows: Any) -> tuple[tuple[str, int, float, float], ...]:
    if not isinstance(rows, list) or not all(
        isinstance(row, list)
        and len(row) == 4
        and row[0] in KINDS
        and type(row[1]) is int
        and row[1] > 1
        and all(_is_positive(value) or value == 0 for value in row[2:])
        for row in rows
    ):
        raise ValueError("collectives are not rows of a kind, ranks, seconds, seconds per byte")
    return tuple((kind, ranks, float(start_s), float(byte_s)) for kind, ranks, start_s, byte_s in rows)


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > 0
