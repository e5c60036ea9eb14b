"""The rates of a machine, as measured; what bounds are computed from."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import pairwise
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

    def transfer_s(self, *, read_bytes: float, write_bytes: float) -> float:
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

    def transfer_s(self, *, read_bytes: float, write_bytes: float) -> float:
        """Returns the least time over all paths, each direction with a split of its own.

        See [Note: what paths can do together].
        """
        if len(self.paths) == 1:
            return self.paths[0].transfer_s(read_bytes=read_bytes, write_bytes=write_bytes)
        return max(
            (
                read_s * read_bytes + write_s * write_bytes
                for read_s, write_s in _prices(self.paths)
            ),
            default=0.0,
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


# [Note: what paths can do together] In a second a path reads R bytes, or writes W, or does b of
# each, or divides the second between these: with bytes read to the right and bytes written upwards,
# all points below the lines from (R, 0) over (b, b) to (0, W). What several paths do together are
# all sums of one point from each: what is below a chain of all of their lines, the steepest first.
# One of these, r * read + w * write = 1, says that bytes take at least r seconds for each byte read
# and w for each one written, whatever goes where; the largest of these times is enough. A path that
# does less both ways at once than in turns, b < 1 / (1/R + 1/W), takes turns here, since another
# one may do the other direction meanwhile; alone it is taken at its word.


@lru_cache(maxsize=256)
def _prices(paths: tuple[PathRates, ...]) -> tuple[tuple[float, float], ...]:
    """Returns seconds for each byte read and written together, one pair for each line."""
    lines = [line for path in paths for line in _lines(path)]
    lines.sort(key=lambda line: line[0] / (line[0] + line[1]))
    corners = [(sum(less for less, _ in lines), 0.0)]
    for less, more in lines:
        corners.append((max(corners[-1][0] - less, 0.0), corners[-1][1] + more))
    found = []
    for (read, write), (next_read, next_write) in pairwise(corners):
        area = read * next_write - next_read * write
        if area > 0:
            found.append(((next_write - write) / area, (read - next_read) / area))
    return tuple(found)


def _lines(path: PathRates) -> list[tuple[float, float]]:
    """Returns by how much less is read along each line and how much more written."""
    both = path.mixed_bytes_per_s
    reads, writes = max(path.read_bytes_per_s, both), max(path.write_bytes_per_s, both)
    if both * (reads + writes) <= reads * writes:
        return [(reads, writes)]
    return [(reads - both, both), (both, writes - both)]
