"""How much memory this process may use: the machine's, or what the cgroups around it allow."""

from collections.abc import Iterator
from pathlib import Path

import psutil

from offload._native.cgroups import CGROUP_ROOT, PROCESS_CGROUPS, cgroups, read_text
from offload.plan.usable_memory import UsableMemory


def usable_memory() -> UsableMemory:
    """Returns what the machine has and the least that a cgroup around this process allows."""
    machine_bytes = psutil.virtual_memory().total
    limits = cgroup_limits(CGROUP_ROOT, PROCESS_CGROUPS)
    below = [limit for limit in limits if limit < machine_bytes]
    return UsableMemory(machine_bytes=machine_bytes, cgroup_bytes=min(below, default=None))


def cgroup_limits(root: Path, process_cgroups: Path) -> Iterator[int]:
    """Yields the limit in bytes of each cgroup around the process that has one.

    Source: kernel documentation, admin-guide/cgroup-v2.rst (`memory.max`) and
    cgroup-v1/memory.rst (`memory.limit_in_bytes`).
    """
    for directory in cgroups("memory", root=root, process_cgroups=process_cgroups):
        for name in ("memory.max", "memory.limit_in_bytes"):
            limit = read_text(directory / name).strip()
            if limit.isdecimal():
                yield int(limit)
