"""Memory that a process may use, from a made-up cgroup tree."""

from pathlib import Path

import pytest

from offload.errors import PlanError
from offload.memory.usable import cgroup_limits, usable_memory
from offload.plan.usable_memory import UsableMemory

GIB = 1 << 30


def limits(root: Path, process: str, files: dict[str, str]) -> list[int]:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (root / "process").write_text(process)
    return sorted(cgroup_limits(root, root / "process"))


def test_every_cgroup_around_the_process_counts(tmp_path: Path) -> None:
    files = {"a/memory.max": f"{2 * GIB}\n", "a/b/memory.max": "max\n", "c/memory.max": "1\n"}

    assert limits(tmp_path, "0::/a/b\n", files) == [2 * GIB]


def test_limits_of_version_1_count_where_the_process_is(tmp_path: Path) -> None:
    files = {
        "memory/memory.limit_in_bytes": f"{1 << 62}\n",
        "memory/x/memory.limit_in_bytes": f"{GIB}\n",
        "memory/y/memory.limit_in_bytes": "1\n",
    }

    assert limits(tmp_path, "5:memory:/x\n3:cpu:/y\n", files) == [GIB, 1 << 62]


def test_what_is_usable_is_at_most_the_machines() -> None:
    found = usable_memory()

    assert 0 < found.num_bytes <= found.machine_bytes


@pytest.mark.parametrize(
    ("smallest", "is_bounded", "remedy"),
    [
        (3 * GIB, True, 'lower `tiers.host.memory` well below that, to "3072MiB" at least'),
        (5 * GIB, True, "a machine with more memory, or a smaller model"),
        (8 * GIB, False, "offload it, with `tiers.host.memory` below that"),
    ],
)
def test_more_than_there_is_is_refused_with_what_would_help(
    smallest: int, is_bounded: bool, remedy: str
) -> None:
    usable = UsableMemory(machine_bytes=16 * GIB, cgroup_bytes=4 * GIB)

    usable.require(4 * GIB, smallest_bytes=smallest, is_bounded=is_bounded)
    with pytest.raises(PlanError, match="4 GiB that the cgroup allows, found 8589934592") as found:
        usable.require(8 * GIB, smallest_bytes=smallest, is_bounded=is_bounded)

    assert remedy in str(found.value)
