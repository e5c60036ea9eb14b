"""The cgroups around this process, of both versions, which limit what it may use."""

from collections.abc import Iterator
from pathlib import Path

CGROUP_ROOT = Path("/sys/fs/cgroup")
PROCESS_CGROUPS = Path("/proc/self/cgroup")


def cgroups(controller: str, *, root: Path, process_cgroups: Path) -> Iterator[Path]:
    """Yields the directories that can limit `controller`, each followed by those around it.

    Source: kernel documentation, admin-guide/cgroup-v2.rst and cgroup-v1/cgroups.rst.
    """
    for line in read_text(process_cgroups).splitlines():
        _, _, controllers_and_path = line.partition(":")
        controllers, _, path = controllers_and_path.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        # Inside a container the path may not be visible: its root then is the container's own.
        mount = root / controllers
        cgroup = mount / path.lstrip("/")
        yield cgroup
        yield from (around for around in cgroup.parents if around.is_relative_to(mount))


def read_text(file: Path) -> str:
    """Returns what the file holds; nothing where it cannot be read."""
    try:
        return file.read_text()
    except OSError:
        return ""
