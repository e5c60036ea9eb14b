"""Every device that runs without a GPU keeps the contract; `tests/gpu` has CUDA."""

from offload.devices import CpuDevice, EmulatedDevice
from offload.testing.device_conformance import DeviceConformance


class TestCpu(DeviceConformance):
    def make_device(self):
        return CpuDevice()


class TestEmulated(DeviceConformance):
    def make_device(self):
        return EmulatedDevice(memory_bytes=64 << 20)


class TestEmulatedSlowLink(DeviceConformance):
    def make_device(self):
        return EmulatedDevice(memory_bytes=64 << 20, link_bytes_per_s=1e9, link_latency_s=1e-3)
