"""Writes what was found best into `machine.toml`."""

import os
from pathlib import Path

from offload.bench.io_report import IoReport, PathResult
from offload.errors import ConfigError
from offload.plan.machine_profile import (
    MARK,
    MachineProfile,
    PathProfile,
    parse_profile,
)


def write_profile(file: Path, report: IoReport) -> None:
    """Writes the paths of `report` into `file`, beside the others that it has.

    Raises:
        ConfigError: The file is not one that this wrote.
    """
    known = _read_own(file)
    measured_at = str(report.environment["measured_at"])
    profiles = [_profile(path, measured_at) for path in report.paths]
    merged = known.with_paths(profile for profile in profiles if profile is not None)
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_name(f".{file.name}.{os.getpid()}.new")
    try:
        new.write_text(merged.to_toml(), encoding="utf-8")
        new.replace(file)
    finally:
        new.unlink(missing_ok=True)


def require_writable(file: Path) -> None:
    """Raises ConfigError if `write_profile` would refuse; to know before minutes of measuring."""
    _read_own(file)


def _read_own(file: Path) -> MachineProfile:
    if not file.exists():
        return MachineProfile()
    text = file.read_text(encoding="utf-8", errors="replace")
    if not text.startswith(MARK):
        raise ConfigError(
            f"cannot write the machine profile `{file}`: expected no file or one that begins with "
            f"`{MARK}`, found another one; name another file with `--machine`"
        )
    return parse_profile(text, source=str(file))


def _profile(result: PathResult, measured_at: str) -> PathProfile | None:
    read, write, mixed = result.median("read"), result.median("write"), result.round_trip()
    if read is None or write is None or mixed is None:
        return None
    sustained = result.sustained
    return PathProfile(
        path=result.path,
        backend=result.backend,
        block_bytes=result.block_bytes,
        queue_depth=result.queue_depth,
        direct=result.direct,
        read_bytes_per_s=read,
        write_bytes_per_s=write,
        mixed_bytes_per_s=mixed,
        measured_at=measured_at,
        sustained_write_bytes_per_s=None if sustained is None else sustained.write_bytes_per_s,
    )
