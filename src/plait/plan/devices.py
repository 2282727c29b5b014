"""Devices: peak FLOP/s by precision, memory, bandwidths, power. Figures and their sources: `devices.toml`."""

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from plait.errors import ConfigError, PlanError, shown, unknown_key_hint
from plait.fileio import parse_toml, read_text
from plait.plan.hashed_once import hashed_once

_TABLE = Path(__file__).with_name("devices.toml")
_REMARK = re.compile(r"\(.*?\)")  # "A100-SXM-80GB(inferred)"


@hashed_once
@dataclass(frozen=True)
class Device:
    """One rank's device. Bytes and seconds in SI units, FLOP/s of dense products from the data sheet.

    peak_flops         by precision: fp64, fp32, tf32, bf16, fp16, fp8. What is missing, it cannot compute
    memory_bytes       memory that programs can use: less than the data sheet's figure
    memory_bytes_per_s bandwidth of the device's memory
    num_sms            units that tiles of a product are distributed over
    link_bytes_per_s   to the other devices of the host (NVLink, xGMI or PCIe), per direction
    host_bytes_per_s   between the device and the host's memory, per direction
    watts              at full load
    dollars_per_hour   what an hour of it costs to rent: an assumption that users replace
    matmul_fraction    of the peak, the most that measured products reach
    warp_fraction      of that, the most that matrix instructions of single warps reach
    bridged            devices that NVLink bridges join at most; `bridge_bytes_per_s`: of one of them to the
                       others, per direction. Only clusters that say so have bridges
    sheet_bytes        memory as the data sheet gives it
    link_kind          the kind of `link_bytes_per_s`, for people
    source             of the figures
    kind               of torch.device: cuda or cpu
    product_rates      measured: by precision, FLOP/s of products of so many FLOPs, in ascending order; where
                       given, they replace peaks and fractions
    operator_rates     measured: by precision and operator, as in `DeviceSpeed`
    collectives        measured: kind, ranks, seconds and seconds per byte of the full tensor
    """

    name: str
    peak_flops: Mapping[str, float] = field(hash=False)
    memory_bytes: float
    memory_bytes_per_s: float
    num_sms: int
    link_bytes_per_s: float
    host_bytes_per_s: float
    watts: float
    dollars_per_hour: float
    matmul_fraction: float = 0.8
    warp_fraction: float = 1.0
    sheet_bytes: float = 0.0
    link_kind: str = ""
    bridged: int = 0
    bridge_bytes_per_s: float = 0.0
    source: str = ""
    kind: str = "cuda"
    product_rates: Mapping[str, tuple[tuple[float, float], ...]] = field(default_factory=dict, hash=False)
    operator_rates: Mapping[str, Mapping[str, tuple[tuple[float, float], ...]]] = field(
        default_factory=dict, hash=False
    )
    collectives: tuple[tuple[str, int, float, float], ...] = ()

    def check_precision(self, precision: str) -> None:
        """Raise PlanError if the device cannot compute in the precision of a plan."""
        if precision.partition("-")[0] not in self.peak_flops:  # fp8-rowwise needs what fp8 does
            raise PlanError(
                "the device does not compute in this precision",
                given=f"precision={precision} on {self.name}",
                expected=" or ".join(name for name in self.peak_flops if name != "tf32"),
                hint="precision=bf16" if "bf16" in self.peak_flops else "precision=fp32",
            )


def device(name: str) -> Device:
    """Return the device with this name, as users and published reports write it: `h100`, `A100-SXM-80GB`.

    Raises ConfigError for an unknown one, with the nearest.
    """
    by_name, _ = _table()
    if not isinstance(name, str):
        raise ConfigError(
            "a device is named by text",
            given=shown(name),
            expected="the name of a device, as text",
            hint="h100",
        )
    word = re.sub(r"[\s_-]+", "-", _REMARK.sub("", name).strip().lower()).removeprefix("nvidia-")
    found = by_name.get(word.removeprefix("amd-").removeprefix("instinct-"))
    if found is None:
        own = dict.fromkeys(each.name for each in by_name.values())
        raise ConfigError(
            "unknown device", given=shown(name), expected=", ".join(own), hint=unknown_key_hint(word, by_name)
        )
    return found


def device_of_driver(name: str) -> Device | None:
    """Return the device by the name that its driver reports, as in `NVIDIA A100-SXM4-80GB`; None if it has no
    entry."""
    words = frozenset(name.lower().replace("-", " ").split())
    _, by_words = _table()
    known = [key for key in by_words if key <= words]
    return by_words[max(known, key=lambda key: sum(map(len, key)))] if known else None


def devices() -> tuple[Device, ...]:
    """Return all devices of the table."""
    return tuple(dict.fromkeys(_table()[0].values()))


@functools.cache
def _table() -> tuple[Mapping[str, Device], Mapping[frozenset[str], Device]]:
    """Return the devices by the names that users give, and by the words that drivers report."""
    by_name: dict[str, Device] = {}
    by_words: dict[frozenset[str], Device] = {}
    for name, entry in parse_toml(read_text(_TABLE)).items():
        each = _device(name, entry)
        assert not by_name.keys() & set(entry["names"]), f"two devices have a name of {name}"
        by_name |= dict.fromkeys(entry["names"], each)
        by_words |= {frozenset(words.lower().split()): each for words in entry["driver"]}
    return by_name, by_words


def _device(name: str, entry: Mapping[str, Any]) -> Device:
    return Device(
        name=name,
        peak_flops=MappingProxyType({key: 1e12 * value for key, value in entry["tflops"].items()}),
        memory_bytes=entry["gib"] * 2.0**30,
        memory_bytes_per_s=entry["memory"] * 1e9,
        num_sms=entry["sms"],
        link_bytes_per_s=entry["link"] * 1e9,
        host_bytes_per_s=entry["host"] * 1e9,
        watts=float(entry["watts"]),
        dollars_per_hour=float(entry["dollars"]),
        matmul_fraction=entry.get("fraction", Device.matmul_fraction),
        warp_fraction=entry.get("warps", Device.warp_fraction),
        sheet_bytes=entry["gigabytes"] * 1e9,
        link_kind=entry["link_kind"],
        bridged=entry.get("bridged", 0),
        bridge_bytes_per_s=entry.get("bridge", 0) * 1e9,
        source=entry["source"],
        kind=entry.get("kind", Device.kind),
    )
