"""Writes what was found best into `machine.toml`."""

from datetime import UTC, datetime
from pathlib import Path

from offload.bench.io_report import IoReport, PathResult
from offload.bench.optim import OptimReport
from offload.errors import ConfigError
from offload.plan.machine_profile import (
    KernelProfile,
    MachineProfile,
    MemoryProfile,
    PathProfile,
    default_file,
)
from offload.runs.profile_file import add_to_profile, require_writable


def write_profile(file: Path, report: IoReport) -> None:
    """Writes the paths of `report` into `file`, beside the others that it has.

    Raises:
        ConfigError: The file is not one that this wrote.
    """
    measured_at = str(report.environment["measured_at"])
    profiles = [_profile(path, measured_at) for path in report.paths]
    add_to_profile(
        file, MachineProfile(paths=tuple(profile for profile in profiles if profile is not None))
    )


def profile_to_write(named: Path | None) -> Path:
    """Returns the file for what is found, to know before minutes of measuring that it can be.

    Raises:
        ConfigError: There is none, one that is not ours, or one that cannot be written.
    """
    file = named or default_file()
    if file is None:
        raise ConfigError(
            "cannot tune: expected a file for what is found, but `OFFLOAD_MACHINE` is empty; name "
            "one with `--machine`"
        )
    require_writable(file)
    return file


def write_kernels(file: Path, report: OptimReport) -> None:
    """Writes the kernels of `report`, the fastest of each kind, and copies into `file`.

    Raises:
        ConfigError: The file is not one that this wrote.
    """
    measured_at = datetime.now(UTC).isoformat(timespec="seconds")
    results = sorted(report.results, key=lambda result: result.parameters_per_s)
    kernels = [
        KernelProfile(
            rule=result.optimizer,
            codec=result.codec,
            dtype=result.parameter_dtype,
            threads=result.threads,
            parameters_per_s=result.parameters_per_s,
            measured_at=measured_at,
        )
        for result in results
        if result.gradient_dtype == result.parameter_dtype
    ]
    memory = [
        MemoryProfile(
            threads=result.threads,
            copy_bytes_per_s=result.memcpy_bytes_per_s,
            measured_at=measured_at,
        )
        for result in results
    ]
    add_to_profile(file, MachineProfile(kernels=tuple(kernels), memory=tuple(memory)))


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
