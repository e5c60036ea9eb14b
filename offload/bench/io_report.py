"""What `offload bench io` found."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from offload.bench.stream import Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Bytes/s of one run; None where it was not measured."""

    read: float | None = None
    write: float | None = None
    mixed_read: float | None = None
    mixed_write: float | None = None
    cpu_s_per_gib: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One setting of a sweep and its rates."""

    backend: str
    block_bytes: int
    queue_depth: int
    rates: Rates


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """How a stream went on in time."""

    name: str
    samples: tuple[Sample, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sustained:
    """A long stream of writes."""

    write_bytes_per_s: float | None
    """Of the steady part at the end; None if the rate was not steady within `max_bytes`."""
    is_steady: bool
    written_bytes: int
    max_bytes: int
    seconds: float
    first_bytes_per_s: float
    window_bytes_per_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Together:
    """One run of all paths at the same time, over a shared number of bytes."""

    read: float | None
    write: float | None
    first_done_s: float
    last_done_s: float


@dataclass(slots=True, kw_only=True)
class PathResult:
    """One path alone."""

    path: str
    filesystem: str
    device: str
    mount_options: str
    backend: str
    direct: bool
    cached: bool
    """Whether the file fits into the page cache that it goes through: no rate of a device."""
    block_bytes: int
    queue_depth: int
    size_bytes: int
    runs: list[Rates] = field(default_factory=list)
    series: list[Series] = field(default_factory=list)
    trials: list[Trial] = field(default_factory=list)
    sustained: Sustained | None = None
    path_stats: dict[str, Any] | None = None

    def to_json(self) -> dict[str, Any]:
        read, write = self.median("read"), self.median("write")
        mixed_read, mixed_write = self.median("mixed_read"), self.median("mixed_write")
        return {
            "path": self.path,
            "filesystem": self.filesystem,
            "device": self.device,
            "mount_options": self.mount_options,
            "backend": self.backend,
            "direct": self.direct,
            "cached": self.cached,
            "block_bytes": self.block_bytes,
            "queue_depth": self.queue_depth,
            "size_bytes": self.size_bytes,
            "runs": len(self.runs),
            "read_bytes_per_s": read,
            "write_bytes_per_s": write,
            "mixed_read_bytes_per_s": mixed_read,
            "mixed_write_bytes_per_s": mixed_write,
            "duplex": duplex(read, write, mixed_read, mixed_write),
            "round_trip_bytes_per_s": self.round_trip(),
            "cpu_s_per_gib": self.median("cpu_s_per_gib"),
            "spread": _largest([self.spread(name) for name in _RATES]),
            "spreads": {name: self.spread(name) for name in _RATES},
            "latencies": self.path_stats,
            "sweep": [_flat(trial) for trial in self.trials],
            "sustained": None if self.sustained is None else asdict(self.sustained),
        }

    def median(self, name: str) -> float | None:
        """Returns the median over the runs."""
        return median([getattr(run, name) for run in self.runs])

    def spread(self, name: str) -> float | None:
        """Returns the largest over the smallest; None with less than two runs."""
        values = _known([getattr(run, name) for run in self.runs])
        return max(values) / min(values) if len(values) > 1 else None

    def round_trip(self) -> float | None:
        """Returns the bytes that go in *and* out per second, at the same time."""
        mixed_read, mixed_write = self.median("mixed_read"), self.median("mixed_write")
        if mixed_read is None or mixed_write is None:
            return None
        return (mixed_read + mixed_write) / 2


@dataclass(frozen=True, slots=True, kw_only=True)
class IoReport:
    """Everything that was measured."""

    paths: list[PathResult]
    together: list[Together]
    environment: dict[str, Any]
    machine_file: str | None = None
    """Where the settings that were found best have been written."""

    def to_json(self) -> dict[str, Any]:
        """Returns the object of `offload bench io --json`."""
        return {
            "paths": [path.to_json() for path in self.paths],
            "together": {
                "read_bytes_per_s": median([run.read for run in self.together]),
                "write_bytes_per_s": median([run.write for run in self.together]),
                "first_done_s": median([run.first_done_s for run in self.together]),
                "last_done_s": median([run.last_done_s for run in self.together]),
            },
            "environment": self.environment,
            "machine_file": self.machine_file,
        }


_RATES = ("read", "write", "mixed_read", "mixed_write")


def median(values: Sequence[float | None]) -> float | None:
    """Returns the median of what is known."""
    known = _known(values)
    return statistics.median(known) if known else None


def duplex(
    read: float | None, write: float | None, mixed_read: float | None, mixed_write: float | None
) -> float | None:
    """Returns where the mixed rate lies between half duplex (0) and full duplex (1)."""
    if read is None or write is None or mixed_read is None or mixed_write is None:
        return None
    both = (mixed_read + mixed_write) / 2
    half = 1 / (1 / read + 1 / write)
    full = min(read, write)
    return (both - half) / (full - half)


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _largest(values: Sequence[float | None]) -> float | None:
    return max(_known(values), default=None)


def _flat(trial: Trial) -> dict[str, Any]:
    rates = {f"{name}_bytes_per_s": getattr(trial.rates, name) for name in _RATES}
    return {
        "backend": trial.backend,
        "block_bytes": trial.block_bytes,
        "queue_depth": trial.queue_depth,
        **rates,
    }
