"""What `offload doctor` checks of a directory that is to hold a store."""

import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from offload.errors import ConfigError, StorageError
from offload.plan.machine_profile import read_profile
from offload.runs.checks import Check
from offload.runs.machine_checks import gpu_numa_nodes
from offload.sizes import GIB, format_size
from offload.storage.drain_target import shared_path
from offload.storage.file import StorageFile, open_file
from offload.storage.mounts import (
    NETWORK_FILE_SYSTEMS,
    PARALLEL_FILE_SYSTEMS,
    BlockDevice,
    Mount,
    find_device,
    find_mount,
)

_MIN_FREE_BYTES = 4 * GIB
"""Two versions of the state of a model of 85 M parameters, and room to spare."""
_IN_MEMORY = ("tmpfs", "ramfs")
_COPY_ON_WRITE = ("btrfs", "zfs", "bcachefs")
_OVERLAY = ("overlay", "aufs", "fuse.fuse-overlayfs")


def path_checks(path: Path) -> Iterator[Check]:
    """Yields the checks of one directory; what a directory can't be used for fails."""
    writable = _writable(path)
    yield writable
    if writable.status == "fail":
        return
    mount = find_mount(path)
    yield _file_system(path, mount)
    yield _mount_options(path, mount)
    yield _direct_io(path)
    yield _flush(path)
    yield _free_space(path)
    yield from _device_checks(path)
    yield _measured(path)


def drain_check(drain: Path | None, paths: Sequence[Path]) -> Check:
    """Returns whether checkpoints are copied to where they outlive `paths`."""
    name = "drain target"
    if drain is None:
        return Check(
            name=name,
            status="warn",
            found="none",
            remedy="a path that cannot be read any more ends a run for good: set "
            "`checkpoint.save_every` and `checkpoint.drain` to a directory on another drive or "
            "file system, and name it here with `--drain`",
        )
    path = shared_path(drain.absolute(), paths)
    state = "" if drain.is_dir() else "is no directory" if drain.exists() else "does not exist"
    if path is not None:
        return Check(
            name=name,
            status="warn",
            found=f"`{drain}` {f'{state} and ' if state else ''}lies on the file system of path "
            f"`{path}`",
            remedy="it would be lost with the path: name a directory on another drive or file "
            "system",
        )
    if state:
        return Check(
            name=name,
            status="warn",
            found=f"`{drain}` {state}",
            remedy="make the directory, mount what belongs there, or correct the name",
        )
    return Check(name=name, status="ok", found=f"`{drain}` is apart from the paths")


def _writable(path: Path) -> Check:
    name = f"{path}: writable"
    if not path.is_dir():
        found = "a file" if path.exists() else "nothing there"
        return Check(
            name=name, status="fail", found=found, remedy=f"make the directory: `mkdir -p {path}`"
        )
    try:
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        return Check(
            name=name,
            status="fail",
            found=error.strerror or str(error),
            remedy="give this user the right to write there, free space, or name another path",
        )
    return Check(name=name, status="ok", found="yes")


def _file_system(path: Path, mount: Mount) -> Check:
    name, kind = f"{path}: file system", mount.kind
    remedy = None
    if kind in _IN_MEMORY:
        remedy = "this is memory, not storage: name a directory on a drive"
    elif kind in NETWORK_FILE_SYSTEMS:
        remedy = "a network file system is slow and its locks are weak: prefer a local drive"
    elif kind in _OVERLAY:
        remedy = "the container's own layer is slow and lost with it: mount a volume"
    elif kind in _COPY_ON_WRITE:
        remedy = (
            "each write goes to a new place, which fragments and slows it: use ext4 or xfs, or on "
            f"btrfs `chattr +C {path}` while the directory is empty"
        )
    elif kind in PARALLEL_FILE_SYSTEMS:
        remedy = "shared with others, whose load changes its rate: use it beside a local drive"
    elif kind.startswith("fuse"):
        remedy = "each transfer goes through a process: prefer a local drive"
    found = f"{kind}, {mount.source} on {mount.directory}"
    return Check(name=name, status="warn" if remedy else "ok", found=found, remedy=remedy)


def _mount_options(path: Path, mount: Mount) -> Check:
    options = mount.options.split(",")
    remedy = None
    if "sync" in options or "dirsync" in options:
        remedy = "every write waits for the drive: mount without `sync` and `dirsync`"
    elif {"nobarrier", "barrier=0"} & set(options):
        remedy = "a power cut can lose what a commit made durable: mount with barriers"
    elif "soft" in options and mount.kind in NETWORK_FILE_SYSTEMS:
        remedy = "a slow server turns into I/O errors: mount `hard`"
    return Check(
        name=f"{path}: mount options",
        status="warn" if remedy else "ok",
        found=mount.options,
        remedy=remedy,
    )


def _direct_io(path: Path) -> Check:
    name = f"{path}: O_DIRECT"
    folder = Path(tempfile.mkdtemp(prefix=".offload-doctor-", dir=path))
    try:
        file = open_file(folder / "probe", create=True)
        try:
            return _describe(name, file)
        finally:
            file.close()
    except StorageError as error:
        return Check(
            name=name, status="fail", found=str(error), remedy="name a path on another file system"
        )
    finally:
        shutil.rmtree(folder)


def _describe(name: str, file: StorageFile) -> Check:
    if file.is_direct:
        return Check(name=name, status="ok", found=f"yes, alignment {file.alignment} B")
    return Check(
        name=name,
        status="warn",
        found="refused, transfers go through the page cache",
        remedy="name a path on a file system such as ext4 or xfs",
    )


def _flush(path: Path) -> Check:
    """Whether the path says that bytes are durable: commits wait for that."""
    name = f"{path}: flush"
    try:
        with tempfile.TemporaryFile(dir=path) as file:
            file.write(b"x")
            file.flush()
            started_s = time.perf_counter()
            os.fsync(file.fileno())
            elapsed_s = time.perf_counter() - started_s
    except OSError as error:
        return Check(
            name=name,
            status="fail",
            found=error.strerror or str(error),
            remedy="nothing there can be made durable: name another path, or set "
            '`tiers.storage.durability = "none"`',
        )
    return Check(name=name, status="ok", found=f"{1000 * elapsed_s:.1f} ms")


def _free_space(path: Path) -> Check:
    free_bytes = shutil.disk_usage(path).free
    enough = free_bytes >= _MIN_FREE_BYTES
    return Check(
        name=f"{path}: free space",
        status="ok" if enough else "warn",
        found=format_size(free_bytes),
        remedy=None
        if enough
        else "a store holds about twice its state; `offload plan` says how much",
    )


def _device_checks(path: Path) -> Iterator[Check]:
    device = find_device(path)
    if device is None:
        yield Check(name=f"{path}: device", status="ok", found="none of its own")
        return
    yield _rotational(path, device)
    yield _discard(path, device)
    yield _numa_node(path, device)


def _rotational(path: Path, device: BlockDevice) -> Check:
    model = f" ({device.model})" if device.model else ""
    if device.is_rotational:
        return Check(
            name=f"{path}: device",
            status="warn",
            found=f"{device.name}{model}, rotational",
            remedy="turning disks are slow: name a path on a solid-state drive. Virtual disks "
            "sometimes only say so: `offload bench io` shows the rate",
        )
    kind = "not known whether rotational" if device.is_rotational is None else "not rotational"
    return Check(name=f"{path}: device", status="ok", found=f"{device.name}{model}, {kind}")


def _discard(path: Path, device: BlockDevice) -> Check:
    name = f"{path}: discard"
    if device.discards:
        return Check(
            name=name,
            status="ok",
            found="the device takes it",
            remedy=None
            if _discards_at_once(path)
            else "run `fstrim` regularly, as systemd's "
            "fstrim.timer does: drives that are told what is free stay fast",
        )
    if device.is_rotational:
        return Check(name=name, status="ok", found="not taken, as by disks that turn")
    return Check(
        name=name,
        status="warn",
        found="the device does not take it" if device.discards is False else "not known",
        remedy="a solid-state drive that is never told what is free gets slower as it fills: keep "
        "a part of it unused",
    )


def _discards_at_once(path: Path) -> bool:
    return any(each.startswith("discard") for each in find_mount(path).options.split(","))


def _numa_node(path: Path, device: BlockDevice) -> Check:
    name = f"{path}: NUMA node"
    if device.numa_node is None:
        return Check(name=name, status="ok", found="one node, or not known")
    gpus = {node for node in gpu_numa_nodes() if node is not None}
    if gpus and device.numa_node not in gpus:
        return Check(
            name=name,
            status="warn",
            found=f"{device.numa_node}, GPUs on {', '.join(map(str, sorted(gpus)))}",
            remedy="bytes cross between sockets: use a drive on the GPU's node, or bind the run "
            "to the drive's node with `numactl`",
        )
    return Check(name=name, status="ok", found=str(device.numa_node))


def _measured(path: Path) -> Check:
    name = f"{path}: measured"
    try:
        profile = read_profile().find(path)
    except ConfigError as error:
        return Check(name=name, status="warn", found=str(error), remedy="measure it again")
    if profile is None:
        return Check(
            name=name,
            status="ok",
            found="no",
            remedy=f"`offload bench io {path} --tune` finds the best settings for it",
        )
    return Check(
        name=name,
        status="ok",
        found=f"{profile.measured_at}: {profile.backend}, {format_size(profile.block_bytes)} x "
        f"{profile.queue_depth}, reads {profile.read_bytes_per_s / 1e9:.2f} GB/s, writes "
        f"{profile.write_bytes_per_s / 1e9:.2f} GB/s",
    )
