"""The rates of a machine, as measured; what bounds are computed from."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PathRates:
    """What one path delivers, in bytes/s."""

    path: str
    read_bytes_per_s: float
    """R: reads alone."""
    write_bytes_per_s: float
    """W: writes alone."""
    mixed_bytes_per_s: float
    """b: bytes in and as many bytes out at the same time, each per second."""

    def best_of(self, other: "PathRates") -> "PathRates":
        """Returns the higher of each rate of two measurements of the same path."""
        return PathRates(
            path=self.path,
            read_bytes_per_s=max(self.read_bytes_per_s, other.read_bytes_per_s),
            write_bytes_per_s=max(self.write_bytes_per_s, other.write_bytes_per_s),
            mixed_bytes_per_s=max(self.mixed_bytes_per_s, other.mixed_bytes_per_s),
        )

    def held_to(self, limit_bytes_per_s: int | None) -> "PathRates":
        """Returns what it delivers where both directions together may be no more; None: as is."""
        if limit_bytes_per_s is None:
            return self
        return PathRates(
            path=self.path,
            read_bytes_per_s=min(self.read_bytes_per_s, limit_bytes_per_s),
            write_bytes_per_s=min(self.write_bytes_per_s, limit_bytes_per_s),
            mixed_bytes_per_s=min(self.mixed_bytes_per_s, limit_bytes_per_s / 2),
        )

    def transfer_s(self, *, read_bytes: int, write_bytes: int) -> float:
        """Returns the least time for the bytes, as much as possible both ways at once."""
        both = min(read_bytes, write_bytes)
        return (
            both / self.mixed_bytes_per_s
            + (read_bytes - both) / self.read_bytes_per_s
            + (write_bytes - both) / self.write_bytes_per_s
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkRates:
    """What the way between host memory and a device's delivers, each direction by itself."""

    in_bytes_per_s: float
    """To the device."""
    out_bytes_per_s: float
    """From it."""
    latency_s: float = 0.0
    """Of each copy beside that; copies that follow each other wait for it once."""

    def transfer_s(self, *, in_bytes: int, out_bytes: int) -> float:
        """Returns the least time for the bytes, both ways at once, without latency."""
        return max(in_bytes / self.in_bytes_per_s, out_bytes / self.out_bytes_per_s)

    def best_of(self, other: "LinkRates") -> "LinkRates":
        """Returns the better of each figure of two measurements of the same link."""
        return LinkRates(
            in_bytes_per_s=max(self.in_bytes_per_s, other.in_bytes_per_s),
            out_bytes_per_s=max(self.out_bytes_per_s, other.out_bytes_per_s),
            latency_s=min(self.latency_s, other.latency_s),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The rates of one machine."""

    paths: tuple[PathRates, ...]
    copy_bytes_per_s: float
    """M: bytes read plus bytes written per second of a copy in memory."""
    update_parameters_per_s: float
    """The fused pass with all operands in memory."""
    link: LinkRates | None = None
    """To the device; None where it computes in host memory."""

    def transfer_s(self, *, read_bytes: int, write_bytes: int) -> float:
        """Returns the least time over all paths with the best split of the bytes."""
        if read_bytes == 0 and write_bytes == 0:
            return 0.0
        return 1.0 / sum(
            1.0 / path.transfer_s(read_bytes=read_bytes, write_bytes=write_bytes)
            for path in self.paths
        )

    def link_s(self, *, in_bytes: int, out_bytes: int) -> float:
        """Returns the least time for the bytes over the link; 0 where there is none."""
        return self.link.transfer_s(in_bytes=in_bytes, out_bytes=out_bytes) if self.link else 0.0

    def memory_s(self, *, num_parameters: int, read_bytes: int, write_bytes: int) -> float:
        """Returns T_dram: the fused pass and the copies of the bytes moved."""
        return (
            num_parameters / self.update_parameters_per_s
            + (read_bytes + write_bytes) / self.copy_bytes_per_s
        )

    def held_to(self, limits_bytes_per_s: Iterable[int | None]) -> "Machine":
        """Returns a machine each of whose paths is held to its limit, if it has one."""
        held = zip(self.paths, limits_bytes_per_s, strict=True)
        return replace(self, paths=tuple(path.held_to(limit) for path, limit in held))

    def best_of(self, other: "Machine") -> "Machine":
        """Returns the higher of each rate of two measurements of the same machine.

        Rates drift while a run goes on; a bound says what the machine can do.
        """
        return replace(
            self,
            paths=tuple(a.best_of(b) for a, b in zip(self.paths, other.paths, strict=True)),
            copy_bytes_per_s=max(self.copy_bytes_per_s, other.copy_bytes_per_s),
            update_parameters_per_s=max(
                self.update_parameters_per_s, other.update_parameters_per_s
            ),
            link=self.link.best_of(other.link) if self.link and other.link else self.link,
        )

    def with_faster_paths(self, factor: float) -> "Machine":
        """Returns a machine whose paths move `factor` times as much."""
        return replace(
            self,
            paths=tuple(
                replace(
                    path,
                    read_bytes_per_s=path.read_bytes_per_s * factor,
                    write_bytes_per_s=path.write_bytes_per_s * factor,
                    mixed_bytes_per_s=path.mixed_bytes_per_s * factor,
                )
                for path in self.paths
            ),
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
