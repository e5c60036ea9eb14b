"""The rates of the link between host memory and a device's: as set, or measured in a second."""

import statistics
import time
from collections.abc import Iterable

import torch

from offload.config.schema import DeviceTierConfig
from offload.devices import Device
from offload.devices.opening import make_device
from offload.memory import Arena
from offload.plan.machine import LinkRates
from offload.sizes import MIB, parse_duration

_PROBE_BYTES = 64 * MIB
_SMALL_BYTES = 4096
"""So little that all of its time is latency."""
_ROUNDS = 5


def link_rates(tier: DeviceTierConfig, *, copy_bytes_per_s: float) -> LinkRates | None:
    """Returns the rates of a link; None where the device computes in host memory.

    Args:
        tier: The device.
        copy_bytes_per_s: Bytes read plus bytes written per second of a copy in host memory, which
            is what a copy to the emulated device is beside its rate.
    """
    if tier.kind == "cpu":
        return None
    if tier.kind == "emulated":
        rate = copy_bytes_per_s / 2
        if tier.link_rate is not None:
            rate = min(rate, tier.link_rate)
        latency_s = parse_duration(tier.link_latency) if tier.link_latency else 0.0
        return LinkRates(in_bytes_per_s=rate, out_bytes_per_s=rate, latency_s=latency_s)
    device = make_device(tier.kind)
    device.open()
    try:
        return probe_link(device)
    finally:
        device.close()


def probe_link(device: Device, *, num_bytes: int = _PROBE_BYTES) -> LinkRates:
    """Returns what copies of an open device take, medians of a few of each.

    Args:
        device: With memory of its own.
        num_bytes: Of a copy whose time is all rate.
    """
    arena = Arena(num_bytes)
    arena.open()
    host = arena.take(num_bytes)
    device.register_host(arena.whole())
    try:
        return _probe(device, host)
    finally:
        device.unregister_host(arena.whole())


def _probe(device: Device, host: memoryview) -> LinkRates:
    small = [_copies_s(device, host[:_SMALL_BYTES])[0] for _ in range(_ROUNDS)]
    large = [_copies_s(device, host) for _ in range(_ROUNDS)]
    latency_s = statistics.median(small)

    def rate(seconds: Iterable[float]) -> float:
        return len(host) / max(statistics.median(seconds) - latency_s, 1e-9)

    return LinkRates(
        in_bytes_per_s=rate(in_s for in_s, _ in large),
        out_bytes_per_s=rate(out_s for _, out_s in large),
        latency_s=latency_s,
    )


def _copies_s(device: Device, host: memoryview) -> tuple[float, float]:
    """Returns how long a copy to the device takes, and one back."""
    into = device.empty(len(host))
    started_s = time.perf_counter()
    copy = device.copy_in(host, into)
    copy.synchronize()
    in_s = time.perf_counter() - started_s
    copy.wait()
    back = torch.frombuffer(host, dtype=torch.uint8)
    started_s = time.perf_counter()
    device.copy_out(into, back).synchronize()
    return in_s, time.perf_counter() - started_s
