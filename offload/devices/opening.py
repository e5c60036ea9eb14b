"""Makes the device that a configuration names."""

from offload.devices.base import Device
from offload.devices.cpu import CpuDevice
from offload.devices.emulated import EmulatedDevice


def make_device(
    kind: str,
    *,
    memory_bytes: int | None = None,
    link_bytes_per_s: float | None = None,
    link_latency_s: float = 0.0,
) -> Device:
    """Returns a device, not yet open.

    Args:
        kind: `"cpu"`, `"cuda"` or `"emulated"`.
        memory_bytes: Of the emulated device; None: unbounded.
        link_bytes_per_s: Of the emulated device's link, in each direction; None: no limit.
        link_latency_s: Of each copy over the emulated link.

    Raises:
        ConfigError: There is no such device here.
    """
    if kind == "emulated":
        return EmulatedDevice(
            memory_bytes=memory_bytes,
            link_bytes_per_s=link_bytes_per_s,
            link_latency_s=link_latency_s,
        )
    if kind == "cuda":
        # What is only for CUDA is imported only where it is asked for.
        from offload.devices.cuda import CudaDevice

        return CudaDevice()
    return CpuDevice()


def is_process_memory(kind: str) -> bool:
    """Returns whether the memory of such a device is this process's own."""
    return kind == EmulatedDevice.kind


def require_device(kind: str) -> None:
    """Raises ConfigError if this machine lacks the device; opens and allocates nothing."""
    if kind == "cuda":
        make_device(kind)
