"""The devices that the planner prices: those of `plan/devices.toml`, or measured ones."""

from plait.plan.device_speed import DeviceSpeed
from plait.plan.devices import Device, device, device_of_driver, devices

__all__ = ["Device", "device", "devices", "measured_device"]


def measured_device(speed: DeviceSpeed) -> Device:
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
