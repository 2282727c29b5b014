"""Walls and bills: the arithmetic that says what a training needs before any plan is chosen.

[Note: the interval of a bill]
Without a plan, the utilization is not known. Trainings from the A100 on report 30 to 55 % of the data
sheet's peak over their entire duration (the runs of `data/trainings.toml`); those on V100, before fused
attention, 20 to 35 %. A bill is the interval between both; `plait plan` prices a plan. Time lost to failures
and restarts is not in it unless its share of the total is given: OPT-175B worked 34 days of two months.
"""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from plait.errors import ConfigError, unknown_key_hint
from plait.fileio import parse_toml, read_text
from plait.plan.devices import Device, device

_TRAININGS = Path(__file__).parent / "data" / "trainings.toml"
_UTILIZATION = (0.30, 0.55)
_FIRST_UTILIZATION = (0.20, 0.35)  # of devices without bf16
FACILITY = 1.1  # energy of the facility per energy of its devices (PUE), as 2302.13971 assumes
_HOUR_S = 3600.0


@dataclass(frozen=True)
class Bill:
    """The costs of a training. Pairs: at the highest and at the lowest utilization.

    hours   of all devices together
    """

    flops: float
    device: Device
    num_devices: int
    hours: tuple[float, float]

    @property
    def days(self) -> tuple[float, float]:
        low, high = (hours / self.num_devices / 24 for hours in self.hours)
        return low, high

    @property
    def dollars(self) -> tuple[float, float]:
        low, high = (hours * self.device.dollars_per_hour for hours in self.hours)
        return low, high

    @property
    def watt_hours(self) -> tuple[float, float]:
        low, high = (energy_watt_hours(hours, self.device) for hours in self.hours)
        return low, high


@dataclass(frozen=True)
class Training:
    """A published training, with the hours that it reports."""

    name: str
    parameters: float
    tokens: float
    device: Device
    hours: float
    source: str

    def bill(self) -> Bill:
        return bill(self.parameters, self.tokens, self.device)


def training_flops(parameters: float, tokens: float) -> float:
    """Return the FLOPs of forward and backward, without attention's scores: 6 per parameter and token (Kaplan
    et al. 2001.08361, section 2.1)."""
    return 6.0 * parameters * tokens


def bill(
    parameters: float,
    tokens: float,
    on: Device,
    num_devices: int = 1,
    utilization: tuple[float, float] | None = None,
    lost: float = 0.0,
) -> Bill:
    """Return the bill of a training. `utilization`: lowest and highest, else see [Note: the interval of a
    bill]. `lost`: the share of the hours in which nothing is trained."""
    precision = "bf16" if "bf16" in on.peak_flops else "fp16"
    worst, best = utilization or (_UTILIZATION if precision == "bf16" else _FIRST_UTILIZATION)
    flops = training_flops(parameters, tokens)
    hours = flops / on.peak_flops[precision] / _HOUR_S / (1 - lost)
    return Bill(flops, on, num_devices, (hours / best, hours / worst))


def energy_watt_hours(hours: float, on: Device) -> float:
    """Return the energy of devices at full load, with the facility's share."""
    return hours * on.watts * FACILITY


@functools.cache
def trainings() -> Mapping[str, Training]:
    """Return the published trainings by name."""
    entries = parse_toml(read_text(_TRAININGS))
    return {
        name: Training(name, **{**entry, "device": device(entry["device"])})
        for name, entry in entries.items()
    }


def training(name: str) -> Training:
    """Return the published training with this name. Raises ConfigError."""
    by_lower = {known.lower(): known for known in trainings()}
    if name.lower() not in by_lower:
        raise ConfigError(
            "unknown training",
            given=name,
            expected=", ".join(trainings()),
            hint=unknown_key_hint(name, trainings()),
        )
    return trainings()[by_lower[name.lower()]]


def zero_bytes(parameters: float, ranks: int, stage: int, *, gradient_bytes: int = 2) -> float:
    """Return the bytes of parameters, gradients and optimizer states on a rank under mixed-precision Adam.

    2 bytes of parameter, 2 of gradient, 12 of master weight and moments, which stages 1, 2 and 3 shard from
    the last on (Rajbhandari et al. 1910.02054, section 3). plait sums gradients in fp32: `gradient_bytes=4`.
    """
    sizes = (12, gradient_bytes, 2)
    return parameters * sum(size / ranks if stage > number else size for number, size in enumerate(sizes))


@dataclass(frozen=True)
class Wall:
    """One fact: what it is of, its arithmetic as text, and its value in SI units."""

    name: str
    arithmetic: str
    value: float
    unit: str


def walls() -> tuple[Wall, ...]:
    """Return the walls that a model of 175 B parameters meets on one H100, in the lectures' figures."""
    h100, parameters, copies = device("h100"), 175e9, 128
    weights = 4 * parameters
    sent = 2 * (copies - 1) / copies * weights
    link = 800e9 / 8
    gpt3 = training("GPT-3")
    flops = training_flops(gpt3.parameters, gpt3.tokens)
    embedding = 64_000 * 5_120 * 4
    return (
        Wall("compute: GPT-3", "6 x 174.6 B parameters x 300 B tokens", flops, "FLOP"),
        Wall("  one device, 2 PFLOP/s (with sparsity)", "the same / 2e15", flops / 2e15, "s"),
        Wall("  one H100, dense peak", "the same / 989.4e12", flops / h100.peak_flops["bf16"], "s"),
        Wall("memory: 175 B weights in fp32", "175 B x 4 bytes", weights, "B"),
        Wall("  of an H100", "data sheet", h100.sheet_bytes, "B"),
        Wall("  with Adam in mixed precision", "175 B x 16 bytes", zero_bytes(parameters, 1, 0), "B"),
        Wall("memory: 7.5 B weights in fp16", "7.5 B x 2 bytes", 2 * 7.5e9, "B"),
        Wall("  with Adam in mixed precision", "7.5 B x 16 bytes", zero_bytes(7.5e9, 1, 0), "B"),
        Wall("communication: 128 copies, one iteration", "128 x 700 GB", copies * weights, "B"),
        Wall("  all of it over one link of 800 Gb/s", "the same / 100 GB/s", copies * weights / link, "s"),
        Wall("  a ring all-reduce, per copy", "2 x 127 / 128 x 700 GB", sent, "B"),
        Wall("  over one link of 800 Gb/s", "the same / 100 GB/s", sent / link, "s"),
        Wall("embedding: 64,000 x 5,120 in fp32", "64,000 x 5,120 x 4 bytes", embedding, "B"),
        Wall("  with its gradient", "the same x 2", 2 * embedding, "B"),
        Wall(
            "a trillion parameters, ZeRO-3 on 1,024", "1 T x 16 bytes / 1,024", zero_bytes(1e12, 1024, 3), "B"
        ),
    )
