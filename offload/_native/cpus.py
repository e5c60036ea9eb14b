"""How many CPUs this process may use: affinity and cgroup quotas, not what the machine has."""

import os
from collections.abc import Iterator
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
PROCESS_CGROUPS = Path("/proc/self/cgroup")


def usable_cpus() -> int:
    """Returns the CPUs that the process's affinity and cgroup quotas allow, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        allowed = len(os.sched_getaffinity(0))
    else:
        allowed = os.cpu_count() or 1
    return min([allowed, *cgroup_quotas(CGROUP_ROOT, PROCESS_CGROUPS)])


def cgroup_quotas(root: Path, process_cgroups: Path) -> Iterator[int]:
    """Yields the quota of each cgroup around the process that has one, in CPUs rounded up.

    Source: kernel documentation, admin-guide/cgroup-v2.rst (`cpu.max`) and
    scheduler/sched-bwc.rst (`cpu.cfs_quota_us`, version 1).
    """
    for directory in _cgroups(root, process_cgroups):
        quota, _, period = _text(directory / "cpu.max").strip().partition(" ")
        if not quota:
            quota = _text(directory / "cpu.cfs_quota_us").strip()
            period = _text(directory / "cpu.cfs_period_us").strip()
        if quota.isdecimal() and period.isdecimal() and int(period) > 0:
            yield max(1, -(-int(quota) // int(period)))


def _cgroups(root: Path, process_cgroups: Path) -> Iterator[Path]:
    """Yields the process's cgroups that can limit CPUs, each followed by those around it."""
    for line in _text(process_cgroups).splitlines():
        _, _, controllers_and_path = line.partition(":")
        controllers, _, path = controllers_and_path.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        # Inside a container the path may not be visible: its root then is the container's own.
        mount = root / controllers
        cgroup = mount / path.lstrip("/")
        yield cgroup
        yield from (around for around in cgroup.parents if around.is_relative_to(mount))


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
