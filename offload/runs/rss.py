"""Resident memory of this process, as the kernel counts it."""

from pathlib import Path

import psutil

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
"""proc(5): resets VmHWM to the current RSS."""


class RssMeter:
    """The current and the highest RSS since `start()`.

    Where the kernel's high-water mark can't be reset, the peak is the highest of the samples.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._peak_bytes = 0
        self._has_reset = False

    def start(self) -> None:
        """Forgets the peak so far."""
        self._peak_bytes = 0
        self._has_reset = _try_reset_peak()
        self.sample()

    @property
    def is_exact(self) -> bool:
        """Whether the kernel counts the peak, so that none between samples is missed."""
        return self._has_reset

    def sample(self) -> int:
        """Returns the RSS now and raises the peak to it."""
        rss_bytes: int = self._process.memory_info().rss
        high_bytes = _high_water_bytes() if self._has_reset else 0
        self._peak_bytes = max(self._peak_bytes, rss_bytes, high_bytes)
        return rss_bytes

    @property
    def peak_bytes(self) -> int:
        """The highest RSS since `start()`."""
        self.sample()
        return self._peak_bytes


def current_rss_bytes() -> int:
    """Returns the resident memory of this process now."""
    rss_bytes: int = psutil.Process().memory_info().rss
    return rss_bytes


def _try_reset_peak() -> bool:
    try:
        _CLEAR.write_text(_RESET_PEAK)
    except OSError:
        return False
    return _high_water_bytes() > 0


def _high_water_bytes() -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
