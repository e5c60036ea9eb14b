"""What `offload doctor` checks of the software and the limits of this machine."""

import errno
import importlib
import os
import platform
import resource
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from offload._native import aio as native_aio
from offload._native import optim as native_optim
from offload.errors import ConfigError, StorageError
from offload.memory import usable_memory
from offload.optim.kernels import load_kernels
from offload.runs.checks import Check, guarded
from offload.sizes import MIB, format_size
from offload.storage.engine import BACKENDS, Engine

_MIN_FILES = 1024
_MIN_LOCKED_BYTES = 64 * MIB
_MIN_AIO_REQUESTS = 1024
"""Requests in flight that `fs.aio-max-nr` should leave: a few queues of the largest depth."""


def software_checks() -> Iterator[Check]:
    """Yields versions, the extension, the I/O backend and the kernels' instruction set."""
    python = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield Check(name="python", status="ok", found=python)
    for package in ("offload", "torch", "numpy"):
        yield _package(package)
    yield _extension()
    reinstall = "reinstall `offload`"
    yield guarded("I/O backend", _backend, remedy=reinstall)
    yield guarded("kernels", _kernels, remedy=reinstall)


def limit_checks() -> Iterator[Check]:
    """Yields the limits of this process and this machine that runs come up against."""
    yield _files()
    yield _locked_memory()
    yield _aio_requests()
    yield _file_size()
    yield _memory()
    yield _huge_pages()
    yield _container()
    yield _numa_nodes()


def _package(name: str) -> Check:
    try:
        found = version(name)
        importlib.import_module(name)
    except (PackageNotFoundError, ImportError) as error:
        return Check(name=name, status="fail", found=str(error), remedy=f"install `{name}`")
    return Check(name=name, status="ok", found=found)


def _extension() -> Check:
    reasons = {
        reason
        for reason in (native_aio.unavailable_because(), native_optim.unavailable_because())
        if reason is not None
    }
    if not reasons:
        return Check(name="extension", status="ok", found="compiled")
    return Check(
        name="extension",
        status="warn",
        found="; ".join(sorted(reasons)),
        remedy="pure Python is used, which is exact and slower; unset OFFLOAD_PURE, or install a "
        "C compiler and reinstall `offload`",
    )


def _backend() -> Check:
    name = "I/O backend"
    refused: list[str] = []
    for backend in BACKENDS:
        try:
            with Engine(backend):
                break
        except StorageError as error:
            refused.append(f"{backend}: {errno.errorcode.get(error.errno or 0, 'not built')}")
    if not refused:
        return Check(name=name, status="ok", found=backend)
    return Check(
        name=name,
        status="warn",
        found=f"{backend} ({', '.join(refused)})",
        remedy=_backend_remedy(backend),
    )


def _backend_remedy(backend: str) -> str:
    if native_aio.unavailable_because() is not None:
        return "install a C compiler and reinstall `offload`: the pure fallback is slower"
    if backend == "libaio":
        return (
            "`io_uring` takes less CPU time: install `liburing-dev` and reinstall `offload`, set "
            "/proc/sys/kernel/io_uring_disabled to 0, or allow it in the container's profile"
        )
    return (
        "`io_uring` and `libaio` are refused: allow io_uring_setup or io_setup in the container's "
        "seccomp profile, or raise /proc/sys/fs/aio-max-nr"
    )


def _kernels() -> Check:
    try:
        name = load_kernels().name
    except ConfigError as error:
        remedy = "correct or unset the variable of the environment that it names"
        return Check(name="kernels", status="fail", found=str(error), remedy=remedy)
    if name in ("avx512", "avx2"):
        return Check(name="kernels", status="ok", found=name)
    return Check(
        name="kernels",
        status="warn",
        found=name,
        remedy="updates are exact and slower than with the extension on a CPU with AVX2",
    )


def _files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft == resource.RLIM_INFINITY or soft >= _MIN_FILES
    return Check(
        name="open files",
        status="ok" if enough else "warn",
        found=f"{_limit(soft)} (hard limit {_limit(hard)})",
        remedy=None if enough else f"raise it: `ulimit -n {_MIN_FILES}`",
    )


def _locked_memory() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    enough = soft == resource.RLIM_INFINITY or soft >= _MIN_LOCKED_BYTES
    return Check(
        name="locked memory",
        status="ok" if enough else "warn",
        found="unlimited" if soft == resource.RLIM_INFINITY else format_size(soft),
        remedy=None if enough else "raise it: `ulimit -l unlimited`; without it nothing is locked",
    )


def _file_size() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    is_free = soft == resource.RLIM_INFINITY
    return Check(
        name="file size",
        status="ok" if is_free else "warn",
        found="unlimited" if is_free else format_size(soft),
        remedy=None if is_free else "raise it: `ulimit -f unlimited`; a store has large files",
    )


def _aio_requests() -> Check:
    try:
        free = _number("/proc/sys/fs/aio-max-nr") - _number("/proc/sys/fs/aio-nr")
    except (OSError, ValueError) as error:
        return Check(name="aio requests", status="warn", found=f"not known: {error}")
    enough = free >= _MIN_AIO_REQUESTS
    return Check(
        name="aio requests",
        status="ok" if enough else "warn",
        found=f"{free} free",
        remedy=None if enough else "raise it: `sysctl fs.aio-max-nr=1048576`",
    )


def _memory() -> Check:
    physical = psutil.virtual_memory()
    limit = usable_memory().cgroup_bytes
    found = f"{format_size(physical.total)}, {format_size(physical.available)} available"
    if limit is None:
        return Check(name="memory", status="ok", found=f"{found}, no cgroup limit below it")
    return Check(
        name="memory",
        status="warn",
        found=f"{found}, limited to {format_size(limit)} by the cgroup",
        remedy=f"set `tiers.host.memory` well below {format_size(limit)}: past it the kernel kills "
        "the run; the page cache of buffered files counts too",
    )


def _huge_pages() -> Check:
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text(encoding="ascii")
    except OSError as error:
        return Check(name="huge pages", status="warn", found=f"not known: {error.strerror}")
    chosen = text.partition("[")[2].partition("]")[0]
    enough = chosen in ("always", "madvise")
    return Check(
        name="huge pages",
        status="ok" if enough else "warn",
        found=f"transparent huge pages: {chosen}",
        remedy=None
        if enough
        else "allow them: `echo madvise > /sys/kernel/mm/transparent_hugepage/enabled`",
    )


def _container() -> Check:
    found = [name for name, is_sign in _CONTAINER_SIGNS if is_sign()]
    if not found:
        return Check(name="container", status="ok", found="none")
    return Check(
        name="container",
        status="ok",
        found=f"yes ({', '.join(found)})",
        remedy="keep stores on a mounted volume: what is written into the container's own layer "
        "is slow and goes with it",
    )


def _numa_nodes() -> Check:
    nodes = sorted(Path("/sys/devices/system/node").glob("node[0-9]*"))
    gpus = gpu_numa_nodes()
    shown = f"{max(len(nodes), 1)} of memory"
    if gpus:
        shown += "; GPUs on " + ", ".join("?" if node is None else str(node) for node in gpus)
    if len(nodes) < 2:
        return Check(name="NUMA nodes", status="ok", found=shown)
    allowed = _allowed_nodes()
    return Check(
        name="NUMA nodes",
        status="ok",
        found=f"{shown}; memory is taken from {allowed or 'all'}",
        remedy="run on the node of the drives and the GPU: `numactl --cpunodebind=N --membind=N`",
    )


def gpu_numa_nodes() -> list[int | None]:
    """Returns the NUMA node of each NVIDIA GPU; None where the kernel does not know it."""
    found: list[int | None] = []
    for device in sorted(Path("/sys/bus/pci/drivers/nvidia").glob("*:*:*.*")):
        try:
            node = _number(str(device / "numa_node"))
        except (OSError, ValueError):
            node = -1
        found.append(None if node < 0 else node)
    return found


def _allowed_nodes() -> str | None:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("Mems_allowed_list:"):
            return line.partition(":")[2].strip()
    return None


def _cgroup_names_container() -> bool:
    try:
        text = Path("/proc/1/cgroup").read_text(encoding="utf-8")
    except OSError:
        return False
    return any(word in text for word in ("docker", "kubepods", "containerd", "libpod", "lxc"))


_CONTAINER_SIGNS: tuple[tuple[str, Callable[[], bool]], ...] = (
    ("/.dockerenv", lambda: Path("/.dockerenv").exists()),
    ("/run/.containerenv", lambda: Path("/run/.containerenv").exists()),
    ("KUBERNETES_SERVICE_HOST", lambda: "KUBERNETES_SERVICE_HOST" in os.environ),
    ("cgroup", _cgroup_names_container),
)


def _number(file: str) -> int:
    return int(Path(file).read_text(encoding="ascii"))


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)
