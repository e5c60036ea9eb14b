"""Every device keeps the contract, CUDA over a runtime without a GPU; `tests/gpu` has it on one."""

import cuda_without_gpu
import pytest

from offload.devices import CpuDevice, EmulatedDevice, make_device
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


class TestCudaWithoutGpu(DeviceConformance):
    @pytest.fixture(params=[True, False], autouse=True, ids=["prompt", "late"])
    def cuda(self, request, monkeypatch):
        cuda = cuda_without_gpu.pretend(monkeypatch, tells=request.param)
        with cuda.watching():
            yield cuda
        assert cuda.races == []

    def make_device(self):
        return make_device("cuda")
