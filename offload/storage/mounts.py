"""Which file system a path is on."""

from pathlib import Path

NETWORK_FILE_SYSTEMS = (
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "fuse.sshfs",
    "9p",
    "lustre",
    "ceph",
    "beegfs",
)


def file_system_type(path: Path) -> str:
    """Returns the type of the file system that `path` is on, such as `ext4`."""
    resolved = path.resolve()
    best = ""
    found = "unknown"
    try:
        lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return found
    for line in lines:
        fields, _, after = line.partition(" - ")
        mount = _unescaped(fields.split(" ")[4])
        # Later mounts over the same directory hide earlier ones.
        if resolved.is_relative_to(mount) and len(mount) >= len(best):
            best, found = mount, after.split(" ")[0]
    return found


def is_on_network(path: Path) -> bool:
    """Returns whether `path` is on a file system of another machine."""
    return file_system_type(path) in NETWORK_FILE_SYSTEMS


def _unescaped(field: str) -> str:
    # The kernel writes a space as `\040`, byte by byte.
    return field.encode().decode("unicode_escape").encode("latin-1").decode(errors="replace")
