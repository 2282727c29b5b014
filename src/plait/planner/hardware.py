"""The devices that the planner prices: those of `plan/devices.toml`, which MFU is relative to."""

from plait.plan.devices import Device, device, devices

__all__ = ["Device", "device", "devices"]
