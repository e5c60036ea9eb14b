"""The rates of a link: as set for the emulated device, else measured by copies."""

from offload.config.schema import DeviceTierConfig
from offload.devices.emulated import EmulatedDevice
from offload.plan.machine import LinkRates
from offload.runs.link_rates import link_rates, probe_link


def test_the_emulated_link_is_as_set_and_no_faster_than_a_copy_in_memory():
    slow = DeviceTierConfig(kind="emulated", link_rate=10**7, link_latency="0.002s")

    assert link_rates(slow, copy_bytes_per_s=1e9) == LinkRates(
        in_bytes_per_s=1e7, out_bytes_per_s=1e7, latency_s=0.002
    )
    free = link_rates(DeviceTierConfig(kind="emulated"), copy_bytes_per_s=1e9)
    assert free == LinkRates(in_bytes_per_s=5e8, out_bytes_per_s=5e8)
    assert link_rates(DeviceTierConfig(), copy_bytes_per_s=1e9) is None


def test_a_probe_finds_no_more_than_the_link_gives():
    device = EmulatedDevice(link_bytes_per_s=1e8, link_latency_s=2e-3)
    device.open()

    found = probe_link(device, num_bytes=4 << 20)

    device.close()
    assert found.latency_s >= 2e-3
    # What a loaded machine adds to a small copy is taken from a large one: hence the margin.
    assert found.in_bytes_per_s <= 1.5e8
    assert found.out_bytes_per_s <= 1.5e8
