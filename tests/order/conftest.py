import contextlib

import pytest
from order.chain import Harness

from offload.devices import make_device


@pytest.fixture(params=["cpu", "emulated"])
def chain_device(request, monkeypatch):
    """Every list holds on both; what is not yet there, or no longer, is read by nobody."""
    device = make_device(request.param)
    device.open()
    monkeypatch.setattr(Harness, "device", device)
    with device.checking() if request.param == "emulated" else contextlib.nullcontext():
        yield device
    device.close()
