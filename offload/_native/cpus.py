"""How many CPUs this process may use: affinity and cgroup quotas, not what the machine has."""

import os
from collections.abc import Iterator
from pathlib import Path

from offload._native.cgroups import CGROUP_ROOT, PROCESS_CGROUPS, cgroups, read_text


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
    for directory in cgroups("cpu", root=root, process_cgroups=process_cgroups):
        quota, _, period = read_text(directory / "cpu.max").strip().partition(" ")
        if not quota:
            quota = read_text(directory / "cpu.cfs_quota_us").strip()
            period = read_text(directory / "cpu.cfs_period_us").strip()
        if quota.isdecimal() and period.isdecimal() and int(period) > 0:
            yield max(1, -(-int(quota) // int(period)))
