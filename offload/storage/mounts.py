"""Which file system and which device a directory is on, by the kernel's tables."""

import os
from dataclasses import dataclass
from pathlib import Path

_SYS_BLOCK = Path("/sys/dev/block")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mount:
    """One line of /proc/self/mountinfo."""

    directory: Path
    kind: str
    """The type of the file system, such as `ext4`."""
    source: str
    """What is mounted: a device, an address of a server, or a name."""
    options: str
    """Of the mount and of the file system."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDevice:
    """The block device below a file system; of a partition, the whole device."""

    name: str
    is_rotational: bool | None
    discards: bool | None
    """Whether it takes the word that blocks are free."""
    numa_node: int | None
    """None: not known, or the machine has one node."""
    logical_block_bytes: int | None
    scheduler: str | None
    model: str | None


def find_mount(path: Path) -> Mount:
    """Returns the mount that `path` is on."""
    resolved = path.resolve()
    best: Mount | None = None
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        mount = _parse(line)
        # Later mounts over the same directory hide earlier ones.
        if resolved.is_relative_to(mount.directory) and (
            best is None or len(str(mount.directory)) >= len(str(best.directory))
        ):
            best = mount
    return best or Mount(directory=Path("/"), kind="unknown", source="unknown", options="")


def find_device(path: Path) -> BlockDevice | None:
    """Returns the device that `path` is on; None for memory, networks, overlays and pools."""
    number = path.stat().st_dev
    entry = _SYS_BLOCK / f"{os.major(number)}:{os.minor(number)}"
    if not entry.exists():
        return None
    device = entry.resolve()
    if (device / "partition").exists():
        device = device.parent
    queue = device / "queue"
    discard = _number(queue / "discard_max_bytes")
    rotational = _number(queue / "rotational")
    node = _number(device / "device" / "numa_node")
    return BlockDevice(
        name=device.name,
        is_rotational=None if rotational is None else bool(rotational),
        discards=None if discard is None else discard > 0,
        numa_node=None if node is None or node < 0 else node,
        logical_block_bytes=_number(queue / "logical_block_size"),
        scheduler=_chosen(_text(queue / "scheduler")),
        model=_text(device / "device" / "model"),
    )


def _parse(line: str) -> Mount:
    fields, _, after = line.partition(" - ")
    before, behind = fields.split(" "), after.split(" ")
    return Mount(
        directory=Path(_unescaped(before[4])),
        kind=behind[0],
        source=_unescaped(behind[1]) if len(behind) > 1 else "",
        options=",".join(dict.fromkeys([*before[5].split(","), *behind[-1].split(",")])),
    )


def _unescaped(field: str) -> str:
    # The kernel writes a space as `\040`, byte by byte.
    return field.encode().decode("unicode_escape").encode("latin-1").decode(errors="replace")


def _text(file: Path) -> str | None:
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip() or None
    except OSError:
        return None


def _number(file: Path) -> int | None:
    text = _text(file)
    try:
        return None if text is None else int(text)
    except ValueError:
        return None


def _chosen(text: str | None) -> str | None:
    """Of a list in which the kernel puts brackets around the one in use."""
    if text is None or "[" not in text:
        return text
    return text.partition("[")[2].partition("]")[0]
