"""CPUs that a process may use, from a made-up cgroup tree."""

import os
from pathlib import Path

import pytest

from offload._native.cpus import cgroup_quotas, usable_cpus


def tree(root: Path, process: str, files: dict[str, str]) -> list[int]:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "process").write_text(process)
    return sorted(cgroup_quotas(root, root / "process"))


def test_every_cgroup_around_the_process_counts(tmp_path: Path) -> None:
    found = tree(
        tmp_path,
        "0::/a/b\n",
        {
            "cpu.max": "max 100000\n",
            "a/cpu.max": "350000 100000\n",
            "a/b/cpu.max": "50000 100000\n",
        },
    )

    assert found == [1, 4]


def test_version_1_quotas_count_and_minus_one_is_none(tmp_path: Path) -> None:
    found = tree(
        tmp_path,
        "5:memory:/x\n3:cpu,cpuacct:/x\n",
        {
            "cpu,cpuacct/x/cpu.cfs_quota_us": "200000\n",
            "cpu,cpuacct/x/cpu.cfs_period_us": "100000\n",
            "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
            "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
        },
    )

    assert found == [2]


def test_a_path_that_is_not_visible_leaves_the_container_root(tmp_path: Path) -> None:
    assert tree(tmp_path, "0::/not/here\n", {"cpu.max": "100000 100000\n"}) == [1]
    assert tree(tmp_path / "none", "", {"other": ""}) == []


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_affinity_counts() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        found = usable_cpus()
    finally:
        os.sched_setaffinity(0, before)

    assert found == 1
