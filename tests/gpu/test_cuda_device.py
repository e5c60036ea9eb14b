"""The contract of devices on CUDA, and training on it."""

import pytest
import torch

from offload.devices import make_device
from offload.testing.device_conformance import DeviceConformance

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]


class TestCuda(DeviceConformance):
    def make_device(self):
        return make_device("cuda")

    def test_registered_memory_is_pinned(self, device):
        from offload.memory import Arena

        arena = Arena(1 << 20)
        arena.open()

        device.register_host(arena.whole())

        assert torch.frombuffer(arena.whole(), dtype=torch.uint8).is_pinned()
