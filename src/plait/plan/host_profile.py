"""Measured times of a host's collectives, and speeds of its devices.

Written by `plait bench` and `make gpu`, read by the planner.

A profile is one JSON file per host: by default $XDG_CACHE_HOME/plait/profiles/HOSTNAME.json (~/.cache if that
is not set).
"""

import math
import os
import socket
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from plait.errors import ProfileError
from plait.fileio import parse_json, read_text, write_json
from plait.plan.cost_model import COLLECTIVES, LatencyFit

FORMAT = "plait host profile 1"
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
    network            of collectives over hosts: kind, ranks per host, hosts, seconds and seconds per byte,
                       with as many groups at once as the hosts' ranks form
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
    network: tuple[tuple[str, int, int, float, float], ...] = ()
    calibration: Mapping[str, float] = field(default_factory=dict, hash=False)

    @property
    def peak_flops(self) -> Mapping[str, float]:
        """The highest measured FLOP/s by precision."""
        return MappingProxyType(
            {precision: max(rate for _, rate in points) for precision, points in self.product_rates.items()}
        )


@dataclass(frozen=True, slots=True, order=True)
class ProfileEntry:
    """The measurements that a line was fitted to. `storage`: "owned" by the transport, or "foreign" to it."""

    transport: str
    verb: str
    num_ranks: int
    storage: str = "owned"
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.verb} of {self.dtype} over {self.transport} on {self.num_ranks} ranks, {self.storage}"


@dataclass(frozen=True)
class HostProfile:
    """The time-over-size lines of one host, and its devices' speeds by the number of ranks."""

    lines: Mapping[ProfileEntry, LatencyFit]
    devices: Mapping[int, DeviceSpeed] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", MappingProxyType(dict(self.devices)))
        object.__setattr__(self, "lines", MappingProxyType(dict(self.lines)))

    def time_s(
        self,
        verb: str,
        num_bytes: int,
        num_ranks: int,
        *,
        transport: str,
        storage: str = "owned",
        dtype: str = "float32",
    ) -> float:
        """Seconds of a collective on a full tensor of `num_bytes`. Raises ProfileError if it was never
        measured."""
        entry = ProfileEntry(transport, verb, num_ranks, storage, dtype)
        if entry not in self.lines:
            raise ProfileError(
                "the profile has no time for this collective",
                given=entry,
                expected="; ".join(map(str, sorted(self.lines)[:3])) or "any entry: this profile is empty",
                hint=f"plait bench collectives --transport {transport} --ranks {num_ranks} "
                f"--collective {verb} "
                f"--storage {storage} --dtype {dtype}",
            )
        return self.lines[entry].time_s(num_bytes)

    def updated(self, newer: "HostProfile") -> "HostProfile":
        """These measurements, replaced by those of `newer` where both have one."""
        devices = {**self.devices, **newer.devices}
        for ranks in self.devices.keys() & newer.devices.keys():
            if not newer.devices[ranks].network:  # measured on one host
                devices[ranks] = replace(newer.devices[ranks], network=self.devices[ranks].network)
        return HostProfile({**self.lines, **newer.lines}, devices)


def profile_path() -> Path:
    """The path of this host's profile, whether it exists or not."""
    return cache_folder() / "profiles" / f"{host_name()}.json"


def cache_folder() -> Path:
    """plait's folder of what was measured, which hosts may share."""
    cache = os.environ.get("XDG_CACHE_HOME", "")
    folder = Path(cache) if Path(cache).is_absolute() else Path.home() / ".cache"  # by the XDG rules
    return folder / "plait"


def host_name() -> str:
    return socket.gethostname() or "localhost"


def load(path: Path | None = None) -> HostProfile:
    """Read the profile from a file, by default this host's; an empty one if the file does not exist.

    Raises ProfileError, with the file and the reason, for a file that cannot be read or is damaged.
    """
    path = profile_path() if path is None else path
    try:
        text = read_text(path)
    except FileNotFoundError:
        return HostProfile({})
    except OSError as error:
        raise ProfileError(
            "the host's profile cannot be read",
            given=f"{path}: {error.strerror}",
            expected="a file that this user can read",
            hint="--profile FILE for another one",
        ) from error
    except UnicodeDecodeError as error:
        raise _damaged(path, str(error)) from error
    try:
        content = parse_json(text, parse_constant=_reject_constant)
    except ValueError as error:
        raise _damaged(path, f"not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise _damaged(path, f"its format is not {FORMAT!r}")
    entries = content.get("lines")
    if not isinstance(entries, list):
        raise _damaged(path, "`lines` is not a list")
    try:
        speeds = [_device_speed(entry) for entry in content.get("devices", ())]
    except (TypeError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    lines = dict(_entry(path, number, entry) for number, entry in enumerate(entries))
    return HostProfile(lines, {speed.num_ranks: speed for speed in speeds})


def save(profile: HostProfile, path: Path | None = None) -> Path:
    """Merge the measurements into those of the file, atomically. Raises ProfileError."""
    path = profile_path() if path is None else path
    merged = load(path).updated(profile)
    entries = []
    for entry, line in sorted(merged.lines.items()):
        bytes_per_s = None if math.isinf(line.bytes_per_s) else line.bytes_per_s
        entries.append({**asdict(entry), **asdict(line), "bytes_per_s": bytes_per_s})
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        devices = [asdict(speed) for _, speed in sorted(merged.devices.items())]
        write_json(path, {"format": FORMAT, "lines": entries, "devices": devices})
    except OSError as error:
        raise unwritable(path, error) from error
    return path


def check_writable(path: Path | None = None) -> None:
    """Raise ProfileError if `save` would fail; called before an hour is spent on measurements."""
    path = profile_path() if path is None else path
    load(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(path, error) from error
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise unwritable(path, PermissionError(f"no permission to write to {path.parent}"))


def unwritable(path: Path, error: OSError) -> ProfileError:
    return ProfileError(
        "the host's profile cannot be written",
        given=f"{path}: {error.strerror or error}",
        expected="a folder that this user can write to, with free space",
        hint="--profile FILE for another path, or --no-save",
    )


def _damaged(path: Path, problem: str) -> ProfileError:
    return ProfileError(
        "the host's profile is damaged",
        given=f"{path}: {problem}",
        expected="a profile that plait bench has saved",
        hint="remove the file; plait bench makes a new one",
    )


def _reject_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _entry(path: Path, number: int, entry: Any) -> tuple[ProfileEntry, LatencyFit]:
    def wrong(problem: str) -> ProfileError:
        return _damaged(path, f"line {number} {problem}")

    names = {each.name for kind in (ProfileEntry, LatencyFit) for each in fields(kind)}
    if not isinstance(entry, dict) or entry.keys() != names:
        raise wrong(f"does not have the keys {', '.join(sorted(names))}")
    for name in ("transport", "verb", "storage", "dtype"):
        if not isinstance(entry[name], str):
            raise wrong(f"has {name}={entry[name]!r}, not a string")
    if entry["verb"] not in COLLECTIVES:
        raise wrong(f"is of verb={entry['verb']!r}, an unknown collective")
    if type(entry["num_ranks"]) is not int or entry["num_ranks"] < 2:
        raise wrong(f"has num_ranks={entry['num_ranks']!r}, expected 2 or more")
    numbers = {each.name: entry[each.name] for each in fields(LatencyFit)}
    for name, value in numbers.items():
        if name == "bytes_per_s" and value is None:
            numbers[name] = math.inf
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or value < 0 or (name == "bytes_per_s" and value == 0):
            raise wrong(f"has {name}={value!r}, out of range")
    profile_entry = ProfileEntry(**{each.name: entry[each.name] for each in fields(ProfileEntry)})
    return profile_entry, LatencyFit(**{name: float(value) for name, value in numbers.items()})


def _device_speed(values: Any) -> DeviceSpeed:
    """Return the device of a profile's entry. Raises ValueError for anything else."""
    kinds = {each.name: each.type for each in fields(DeviceSpeed)}
    if isinstance(values, dict):  # of a file from before they existed
        values = {"operator_rates": {}, "collectives": [], "network": [], "calibration": {}} | values
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
        "collectives": _collectives(values["collectives"], [2]),
        "network": _collectives(values["network"], [1, 2]),
    }
    return DeviceSpeed(**{**values, **found})


def _points(what: str, points: Any) -> Points:
    is_list = isinstance(points, list) and bool(points)
    if not is_list or not all(
        isinstance(p, list) and len(p) == 2 and all(map(_is_positive, p)) for p in points
    ):
        raise ValueError(f"{what} are not pairs of a size and a rate")
    return tuple(sorted((float(size), float(rate)) for size, rate in points))


def _collectives(rows: Any, least: list[int]) -> tuple[Any, ...]:
    """Return rows of a kind, numbers of ranks and hosts from `least` on, seconds, and seconds per byte."""
    if not isinstance(rows, list) or not all(map(partial(_is_collective, least=least), rows)):
        raise ValueError("collectives are not rows of a kind, ranks, seconds, seconds per byte")
    return tuple((kind, *counts, float(start_s), float(byte_s)) for kind, *counts, start_s, byte_s in rows)


def _is_collective(row: Any, least: list[int]) -> bool:
    if not isinstance(row, list) or len(row) != len(least) + 3:
        return False
    kind, *counts, start_s, byte_s = row
    return (
        kind in KINDS
        and all(
            type(count) is int and count >= at_least for count, at_least in zip(counts, least, strict=True)
        )
        and all(_is_positive(value) or value == 0 for value in (start_s, byte_s))
    )


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > 0
