"""A cluster: hosts of devices, and the network between them."""

import functools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from plait.errors import ConfigError, ProfileError, nearest, shown
from plait.fileio import parse_toml, read_text
from plait.plan.devices import Device, device, device_of_driver
from plait.plan.hashed_once import hashed_once
from plait.plan.host_profile import DeviceSpeed, load
from plait.planner.constants import DEFAULT, Constants, of_measured

TOPOLOGIES = ("tree", "ring")
_PRESETS = Path(__file__).parent / "data" / "clusters.toml"
_COUNT = re.compile("([1-9][0-9]{0,6})(gpus|devices)?")
_GBIT = 1e9 / 8  # bytes
_REQUIRED = ("device", "hosts", "devices_per_host", "network_gbit_per_s")
_OPTIONAL = (
    *("name", "base", "source", "domain", "rails", "oversubscription", "leaf_hosts", "topology"),
    *("switch_ports", "unit_hosts", "watts", "dollars_per_hour", "memory_gib", "link_gb_per_s"),
)


@hashed_once
@dataclass(frozen=True)
class Cluster:
    """Hosts of equal devices. Bandwidths are per direction, data-sheet figures; efficiencies are the
    communication model's.

    domain_size         devices that share one switched link, `device.link_bytes_per_s` each (8 in a DGX, 72
                        in an NVL72): a multiple of `host_size`, or equal to it
    network_bytes_per_s of one host to the network: all its network cards together
    rails               network cards per host; card i of every host is on leaf switch i of its pod
    oversubscription    1: full bisection; r: traffic that leaves a leaf gets 1/r of the bandwidth
    leaf_hosts          hosts below one leaf switch, or one rail group of leaves
    topology            tree: leaves below a fat tree; ring: every host has a cable to the next, and no switch
    switch_ports        ports of a switch, of a card's rate
    constants           of the time model
    ranks_per_core      of a host whose CPU ranks share cores: more than 1
    network             measured collectives over hosts: see `DeviceSpeed`
    """

    name: str
    device: Device
    num_hosts: int
    host_size: int
    domain_size: int
    network_bytes_per_s: float
    rails: int
    oversubscription: float
    leaf_hosts: int
    topology: str = "tree"
    switch_ports: int = 64
    constants: Constants = DEFAULT
    ranks_per_core: float = 1.0
    network: tuple[tuple[str, int, int, float, float], ...] = ()

    @property
    def num_devices(self) -> int:
        return self.num_hosts * self.host_size

    @property
    def bisection_bytes_per_s(self) -> float:
        """Bytes per second, in one direction, between two halves of the hosts over the network."""
        if self.topology == "ring":
            cables = min(self.num_hosts - 1, 2)
            return cables * self.network_bytes_per_s / 2  # a host's bandwidth is that of both its cables
        leaves_leaf = self.num_hosts > self.leaf_hosts
        return self.num_hosts / 2 * self.network_bytes_per_s / (self.oversubscription if leaves_leaf else 1.0)

    def tree(self) -> "FatTree":
        """Return the switches and links of the network. Of a ring, there are none."""
        assert self.topology == "tree", "a ring has no switches"
        return fat_tree(self.num_hosts * self.rails, self.switch_ports, self.oversubscription)

    def __str__(self) -> str:
        hosts = f"{self.num_hosts:,} hosts x {self.host_size}"
        return f"{self.name}: {self.num_devices:,} {self.device.name} ({hosts})"


@dataclass(frozen=True)
class FatTree:
    """Switches by level, leaves first; cables; cables that cross the middle. See `fat_tree`."""

    switches: tuple[int, ...]
    links: int
    bisection_links: int

    @property
    def num_switches(self) -> int:
        return sum(self.switches)


def max_endpoints(ports: int, levels: int) -> int:
    """Return the endpoints of a full fat tree: k, k^2/2, k^3/4 at 1, 2 and 3 levels of k-port switches."""
    return int(2 * (ports // 2) ** levels)


def fat_tree(endpoints: int, ports: int, oversubscription: float = 1.0) -> FatTree:
    """Return the smallest tree of k-port switches for these endpoints (network cards).

    A leaf has k r / (1 + r) endpoints below it and k / (1 + r) cables up: `oversubscription` r. All levels
    above have as much bandwidth up as down (Al-Fares et al., SIGCOMM 2008; k^3/4 hosts and 5 k^2/4 switches
    at three levels with r = 1). A tree of one switch has no level above.
    """
    assert min(endpoints, ports / 4, oversubscription) >= 1, "a tree that cannot exist"
    if endpoints <= ports:
        return FatTree((1,), endpoints, endpoints // 2)
    up = max(1, int(ports / (1 + oversubscription)))
    leaves = math.ceil(endpoints / (ports - up))
    levels = 2
    while leaves > ports * (ports // 2) ** (levels - 2):
        levels += 1
    cables = leaves * up  # between any two levels
    middle = [math.ceil(cables / (ports // 2))] * (levels - 2)
    switches = (leaves, *middle, math.ceil(cables / ports))
    return FatTree(switches, endpoints + cables * (levels - 1), cables // 2)


def cluster(text: str) -> Cluster:
    """Return a cluster by its name: a preset and a number of hosts or racks (`dgx-h100:64`, `gb200-nvl72:8`)
    or of devices (`dgx-h100:512gpus`), a device and a number of them (`h100:512`, in the hosts of the first
    preset that has it), the path of a TOML file, or a measured host: `this:2`, or `FILE.json:2`, for two of
    its ranks, and `this:16x2` for two on each of 16 such hosts, if the network of some of them was measured.

    Raises ConfigError for an unknown name, an unreadable or incomplete file, and numbers that do not fit;
    ProfileError for a host that was not measured.
    """
    name, colon, count = text.strip().partition(":")
    if name == "this" or name.endswith(".json"):
        return _measured(name, count)
    if text.endswith(".toml") or "/" in text:
        return _from_file(Path(text))
    match = _COUNT.fullmatch(count or "1")
    if match is None or (colon and not count):
        raise ConfigError(
            "a cluster's count is not a number",
            given=shown(text),
            expected="NAME, NAME:UNITS or NAME:DEVICESgpus",
            hint=f"{name}:8 or {name}:64gpus",
        )
    name = name.lower()
    of_device = None if name in _presets() else _preset_with(name)
    if of_device is not None:
        return _of_devices(name, of_device, int(match[1]), unit="")
    entry = _preset(name)
    unit_hosts = entry.get("unit_hosts", 1)
    if match[2]:
        return _of_devices(name, entry, int(match[1]))
    return _build(f"{name}:{match[1]}", {**entry, "hosts": int(match[1]) * unit_hosts})


def profile_path_of(name: str) -> Path | None:
    """Return the file of a measured host, None for this one's."""
    return None if name.partition(":")[0] == "this" else Path(name.rpartition(".json")[0] + ".json")


def _measured(name: str, count: str) -> Cluster:
    """Return hosts by the profile of one, for a number of ranks at work: of CPUs, one that was measured, as
    ranks share cores; up to all of its GPUs. Raises ProfileError."""
    path = profile_path_of(name)
    speeds = load(path).devices
    match = _MEASURED_COUNT.fullmatch(count)
    hosts, wanted = (int(match[1] or 1), int(match[2])) if match else (1, max(speeds, default=2))
    speed = speeds.get(wanted) or next((each for each in speeds.values() if each.kind == "cuda"), None)
    if speed is None or (count and not match) or wanted > max(speed.num_devices, speed.num_ranks):
        raise ProfileError(
            f"no device of this host was measured with {wanted} ranks at work",
            given=f"{name}:{count}" if count else name,
            expected=" or ".join(f"{name}:{number}" for number in speeds) or "a profile with devices",
            hint=f"plait bench device --ranks {wanted}" + (f" --profile {path}" if path else ""),
        )
    if hosts > 1 and not any(kind == "all-gather" for kind, *_ in speed.network):
        raise ProfileError(
            "the network between hosts was not measured",
            given=f"{name}:{count}",
            expected=f"a profile of {wanted} ranks on each of 2 or more hosts",
            hint=f"on each host, torchrun --nnodes 2 --nproc-per-node {wanted} ... -m plait bench device",
        )
    found = _measured_device(speed)
    unknown = speed.calibration.keys() - set(Constants.names())
    if unknown:
        raise ProfileError(
            f"the host's calibration has unknown constants: {', '.join(sorted(unknown))}",
            given=path or name,
            expected=", ".join(Constants.names()),
            hint=f"plait bench device --ranks {wanted} measures again",
        )
    is_cpu = speed.kind == "cpu"
    idle = max(0.0, min(1.0, speed.num_devices / wanted - 1)) if is_cpu else 1.0
    constants = of_measured(speed.launch_s, idle, speed.calibration)
    one_host = Cluster(
        name=f"{name}:{wanted}",
        device=found,
        num_hosts=1,
        host_size=wanted,
        domain_size=wanted,
        network_bytes_per_s=found.link_bytes_per_s,
        rails=1,
        oversubscription=1.0,
        leaf_hosts=hosts,
        constants=constants,
        ranks_per_core=max(1.0, wanted / speed.num_devices) if is_cpu else 1.0,
    )
    return one_host if hosts == 1 else _over_network(one_host, hosts, speed)


def _over_network(one: Cluster, hosts: int, speed: DeviceSpeed) -> Cluster:
    """Return so many of a measured host. The network's rate and a hop's seconds, for numbers of hosts that
    were not measured, are those of an all-gather's ring over all measured ranks: its every host passes on
    (n - 1) / n of the bytes."""
    ranks, measured, start_s, byte_s = max(row[1:] for row in speed.network if row[0] == "all-gather")
    inside_s = one.constants.collective_s + (ranks - 1) * measured * one.constants.hop_s
    constants = {"network_fraction": 1.0, "network_hop_s": max(0.0, start_s - inside_s) / (measured - 1)}
    return replace(
        one,
        name=f"{one.name.rpartition(':')[0]}:{hosts}x{one.host_size}",
        num_hosts=hosts,
        network_bytes_per_s=(1 - 1 / (ranks * measured)) / byte_s if byte_s else one.network_bytes_per_s,
        constants=replace(one.constants, **{**constants, **speed.calibration}),
        network=speed.network,
    )


_MEASURED_COUNT = re.compile("(?:([1-9][0-9]{0,6})x)?([1-9][0-9]{0,6})")


def _measured_device(speed: DeviceSpeed) -> Device:
    """Return a device with measured speeds; power and rent are the table's, if it has this device.
    A link that was not measured, or whose bytes took no time, is the table's, or a copy through memory."""
    links = [1 / byte_s for kind, _, _, byte_s in speed.collectives if kind == "send-receive" and byte_s]
    known = device_of_driver(speed.name)
    through_memory = speed.memory_bytes_per_s / 2
    return Device(
        name=speed.name,
        peak_flops=speed.peak_flops if known is None else known.peak_flops,
        memory_bytes=speed.memory_bytes,
        memory_bytes_per_s=speed.memory_bytes_per_s,
        num_sms=speed.num_sms,
        link_bytes_per_s=max(links, default=through_memory if known is None else known.link_bytes_per_s),
        host_bytes_per_s=through_memory if known is None else known.host_bytes_per_s,
        watts=0.0 if known is None else known.watts,
        dollars_per_hour=0.0 if known is None else known.dollars_per_hour,
        matmul_fraction=1.0 if known is None else known.matmul_fraction,
        warp_fraction=1.0 if known is None else known.warp_fraction,
        sheet_bytes=speed.memory_bytes if known is None else known.sheet_bytes,
        link_kind="measured",
        source="measured by plait bench",
        product_rates=speed.product_rates,
        operator_rates=speed.operator_rates,
        collectives=speed.collectives,
    )


def preset_names() -> tuple[str, ...]:
    """Return the names of all presets."""
    return tuple(_presets())


@functools.cache
def _presets() -> Mapping[str, Mapping[str, Any]]:
    return parse_toml(read_text(_PRESETS))


def _preset(name: str) -> dict[str, Any]:
    """Return the keys of a preset, with those of its base."""
    presets = _presets()
    if name not in presets:
        raise ConfigError(
            "unknown cluster",
            given=shown(name),
            expected=f"{', '.join(presets)}, a device, or the path of a TOML file",
            hint=nearest(name, presets) or "dgx-h100:8",
        )
    entry = dict(presets[name])
    base = entry.pop("base", None)
    return {**(_preset(base) if base else {}), **entry}


def _preset_with(name: str) -> dict[str, Any] | None:
    """Return the first preset with the device of this name; None if there is none."""
    try:
        wanted = device(name).name
    except ConfigError:
        return None
    return next((entry for entry in map(_preset, _presets()) if entry["device"] == wanted), None)


def _of_devices(name: str, entry: Mapping[str, Any], num_devices: int, unit: str = "gpus") -> Cluster:
    """Return the fewest hosts that have this many devices, each the same number: all of its devices or, with
    their share of its network cards, a part of them."""
    size = entry["devices_per_host"]
    hosts = -(-num_devices // size)
    if num_devices % hosts == 0:
        used = num_devices // hosts
        largest = min(entry.get("domain", size) // size * used, num_devices)
        domain = next(domain for domain in range(largest, 0, -used) if num_devices % domain == 0)
        part = {"hosts": hosts, "devices_per_host": used, "domain": domain}
        if entry.get("rails", 1) == size:  # one card of each device
            part |= {"rails": used, "network_gbit_per_s": entry["network_gbit_per_s"] * used / size}
        return _build(f"{name}:{num_devices}{unit}", {**entry, **part})
    near = [count for count in (num_devices // size * size, -(-num_devices // size) * size) if count]
    raise ConfigError(
        f"{num_devices} devices do not fill hosts of {size}",
        given=f"{name}:{num_devices}{unit}",
        expected="hosts that all have the same number of devices",
        hint=" or ".join(f"{name}:{count}{unit}" for count in near),
    )


def _from_file(path: Path) -> Cluster:
    try:
        entry = parse_toml(read_text(path))
    except OSError as error:
        raise ConfigError(
            "the cluster's file cannot be read",
            given=f"{path}: {error.strerror}",
            expected="a TOML file that describes a cluster",
            hint=f"ls -l {path}",
        ) from error
    except ValueError as error:
        raise ConfigError(
            "the cluster's file is not TOML",
            given=f"{path}: {error}",
            expected="key = value on each line",
            hint="correct the file at that place",
        ) from error
    for key in entry:
        if key not in (*_REQUIRED, *_OPTIONAL):
            known = (*_REQUIRED, *_OPTIONAL)
            raise ConfigError(
                f"unknown key {key!r} in the cluster's file",
                given=path,
                expected=", ".join(known),
                hint=nearest(key, known) or "remove it",
            )
    if "base" in entry:
        entry = {**_preset(str(entry["base"])), **entry}
    missing = [key for key in _REQUIRED if key not in entry]
    if missing:
        raise ConfigError(
            f"the cluster's file has no {' and no '.join(missing)}",
            given=path,
            expected=f"the keys {', '.join(_REQUIRED)}, or a base",
            hint=_EXAMPLE[missing[0]],
        )
    return _build(str(entry.get("name", path.stem)), entry)


_EXAMPLE = {
    "device": 'device = "h100"',
    "hosts": "hosts = 8",
    "devices_per_host": "devices_per_host = 8",
    "network_gbit_per_s": "network_gbit_per_s = 3200, of one host: all its network cards together",
}


def _build(name: str, entry: Mapping[str, Any]) -> Cluster:
    """Return the cluster of a preset's or a file's keys. Raises ConfigError for values that do not fit."""
    hosts, size = _integer(entry, "hosts"), _integer(entry, "devices_per_host")
    domain = _integer(entry, "domain", size)
    num_devices = hosts * size
    if domain % size or num_devices % domain:
        raise ConfigError(
            "the devices that share a switched link are not a number of full hosts",
            given=f"domain={domain} devices_per_host={size} hosts={hosts}",
            expected=f"a multiple of {size} that divides {num_devices}",
            hint=f"domain = {size}",
        )
    topology = entry.get("topology", "tree")
    if topology not in TOPOLOGIES:
        raise ConfigError(
            "unknown topology",
            given=shown(topology),
            expected=" or ".join(TOPOLOGIES),
            hint='topology = "tree"',
        )
    return Cluster(
        name=name,
        device=_device_of(entry),
        num_hosts=hosts,
        host_size=size,
        domain_size=domain,
        network_bytes_per_s=_number(entry, "network_gbit_per_s") * _GBIT,
        rails=_integer(entry, "rails", 1),
        oversubscription=_number(entry, "oversubscription", 1.0, least=1.0),
        leaf_hosts=_integer(entry, "leaf_hosts", hosts),
        topology=topology,
        switch_ports=_integer(entry, "switch_ports", 64),
    )


def _device_of(entry: Mapping[str, Any]) -> Device:
    """Return the device of the table, with the figures that the entry replaces."""
    found = device(entry["device"])
    if "watts" in entry:
        found = replace(found, watts=_number(entry, "watts"))
    if "dollars_per_hour" in entry:
        found = replace(found, dollars_per_hour=_number(entry, "dollars_per_hour"))
    if "memory_gib" in entry:
        found = replace(found, memory_bytes=_number(entry, "memory_gib") * 2**30)
    if "link_gb_per_s" in entry:
        found = replace(found, link_bytes_per_s=_number(entry, "link_gb_per_s") * 1e9)
    return found


def _integer(entry: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = entry.get(key, default)
    if type(value) is not int or not 1 <= value <= 10_000_000:
        raise ConfigError(
            f"{key} of a cluster is not a number",
            given=f"{key}={shown(value)}",
            expected="an integer from 1",
            hint=f"{key} = 8",
        )
    return value


def _number(entry: Mapping[str, Any], key: str, default: float | None = None, *, least: float = 0.0) -> float:
    value = entry.get(key, default)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < least or value == 0:
        raise ConfigError(
            f"{key} of a cluster is out of range",
            given=f"{key}={shown(value)}",
            expected=f"a number from {least:g}" if least else "a number above 0",
            hint=f"{key} = {least or 1:g}",
        )
    return float(value)
