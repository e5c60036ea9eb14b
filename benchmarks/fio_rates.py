"""What fio moves on a path: the rates of a bound."""

import contextlib
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from fio import FioSetting, run_fio, run_fio_jobs

from offload.plan.machine import PathRates

BLOCKS = ("512k", "1m", "4m")
DEPTHS = (8, 16, 64)
ENGINES = ("libaio", "io_uring")
MOST_BYTES = 64 << 20
"""In flight each way: more gains nothing, and the engine's window would have twice as much."""
SWEEP_MS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class FioFiles:
    """Two files of a path whose blocks were written.

    An update reads versions that the step before wrote, and writes others: so does fio here, one
    job for each direction, and the other way around at the next call of `swapped`.
    """

    read: Path
    written: Path
    size: int
    """Of each."""

    def swapped(self):
        return FioFiles(read=self.written, written=self.read, size=self.size)


def best_setting(files, *, ms=SWEEP_MS):
    """Returns the setting that moves most both ways at once: the best three again twice."""
    settings = [
        FioSetting(engine=engine, block=block, depth=depth)
        for engine, block, depth in product(ENGINES, BLOCKS, DEPTHS)
    ]
    settings = [each for each in settings if each.block_bytes * each.depth <= MOST_BYTES]
    found = {each: sum(both_ways(files, each, ms=ms)) for each in settings}
    finalists = sorted(settings, key=found.__getitem__, reverse=True)[:3]
    for _, setting in product(range(2), finalists):
        files = files.swapped()
        found[setting] = max(found[setting], sum(both_ways(files, setting, ms=ms)))
    return max(finalists, key=found.__getitem__)


def with_both_ways(files, alone, *, setting, ms):
    """Returns the rates of a path, both directions at once now, and each `alone` as given."""
    mixed = equal_rate(both_ways(files, setting, ms=ms), alone)
    return PathRates(
        path=str(files.read.parent),
        read_bytes_per_s=alone[0],
        write_bytes_per_s=alone[1],
        mixed_bytes_per_s=mixed,
    )


def equal_rate(both, alone):
    """Returns the bytes in and as many out per second of a path.

    Args:
        both: What it moved in and out per second when each direction went as fast as it could.
        alone: What it moves in or out per second. The direction that was behind catches up so.
    """
    behind = 0 if both[0] < both[1] else 1
    more, less = both[1 - behind], both[behind]
    return more / (1 + (more - less) / alone[behind])


def one_way(files, rw, *, setting, ms):
    """Returns bytes/s of one direction alone."""
    file = files.read if rw == "read" else files.written
    job = run_fio(file, rw, setting, size=files.size, options=timed(ms))
    return bandwidth(job, rw)


def both_ways(files, setting, *, ms):
    """Returns bytes/s in and out, at the same time."""
    jobs = [(files.read, "read"), (files.written, "write")]
    found = run_fio_jobs(jobs, setting, size=files.size, options=timed(ms))
    return tuple(bandwidth(job, rw) for job, (_, rw) in zip(found, jobs, strict=True))


def timed(ms):
    return ("--time_based", f"--runtime={ms}ms")


def bandwidth(job, rw):
    """Returns bytes/s; what was in flight at the end counts, and the time in which that ended."""
    return float(job[rw]["bw_bytes"])


@contextlib.contextmanager
def laid_out(directory, *, size):
    """Yields two files whose blocks were written, and removes them."""
    files = FioFiles(read=directory / "fio-0", written=directory / "fio-1", size=size)
    try:
        for file in (files.read, files.written):
            run_fio(file, "write", FioSetting(), size=size)
        yield files
    finally:
        for file in (files.read, files.written):
            file.unlink(missing_ok=True)
