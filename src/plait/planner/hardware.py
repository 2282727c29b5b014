"""Devices: peak FLOP/s by precision, memory, bandwidths, power. Figures and their sources: `data/devices.toml`."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One rank's device. Bytes and seconds in SI units, FLOP/s of dense products from the data sheet.

    peak_flops         by precision: fp64, fp32, tf32, bf16, fp16, fp8
    memory_bytes       capacity as the data sheet gives it
    memory_bytes_per_s bandwidth of the device's memory
    num_sms            units that tiles of a product are distributed over
    link_bytes_per_s   to the other devices of the host (NVLink, xGMI or PCIe), per direction
    host_bytes_per_s   between the device and the host's memory, per direction
    watts              at full load
    dollars_per_hour   what an hour of it costs to rent: an assumption that users replace
    """

    name: str
    peak_flops: Mapping[str, float]
    memory_bytes: float
    memory_bytes_per_s: float
    num_sms: int
    link_bytes_per_s: float
    host_bytes_per_s: float
    watts: float
    dollars_per_hour: float
