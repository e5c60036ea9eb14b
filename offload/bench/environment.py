"""What the machine was when something was measured."""

import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any


def describe_environment() -> dict[str, Any]:
    """Returns versions, processors, memory and load; what is not known is None."""
    return {
        "measured_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["offload", *sys.argv[1:]]),
        "offload": version("offload"),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "processor": _processor(),
        "num_processors": len(os.sched_getaffinity(0)),
        "memory_bytes": memory_bytes(),
        "load_average": os.getloadavg()[0],
    }


def memory_bytes() -> int:
    """Returns the physical memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _processor() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else None
