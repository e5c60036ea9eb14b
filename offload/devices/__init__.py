"""Devices on which models compute: their arenas, copies to and from them, and memory facts."""

from offload.devices.base import Copy, Device, MemoryFacts
from offload.devices.cpu import CpuDevice
from offload.devices.emulated import EmulatedDevice, OrderError
from offload.devices.opening import make_device

__all__ = [
    "Copy",
    "CpuDevice",
    "Device",
    "EmulatedDevice",
    "MemoryFacts",
    "OrderError",
    "make_device",
]
