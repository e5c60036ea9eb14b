"""Measures one path alone: writes, reads, half of each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from offload.bench.io_report import Rates, Series
from offload.bench.stream import Budget, Moved, Sample, Stream
from offload.sizes import GIB
from offload.storage.engine import Engine, PathSettings
from offload.storage.file import StorageFile
from offload.storage.transfer import Operation

OnSample = Callable[[str, Sample, int], None]
"""Called with the pattern, how far it is, and the bytes that it will move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The rates of one run and how each stream went on."""

    rates: Rates
    series: tuple[Series, ...]


def open_stream(
    engine: Engine, file: StorageFile, settings: PathSettings, *, size_bytes: int
) -> Stream:
    """Returns a stream with the block size and depth of `settings`."""
    return Stream(
        engine,
        file,
        size_bytes=size_bytes,
        block_bytes=settings.block_bytes,
        queue_depth=settings.queue_depth,
    )


def lay_out(stream: Stream, on_sample: OnSample) -> None:
    """Writes the whole file once, so that nothing is measured on blocks not allocated yet."""
    num_bytes = stream.size_bytes
    stream.move(
        (Operation.WRITE,),
        Budget(num_bytes),
        flush=True,
        on_sample=lambda sample: on_sample("layout", sample, num_bytes),
    )


def measure_path(
    stream: Stream, patterns: Sequence[str], *, num_bytes: int, cold: bool, on_sample: OnSample
) -> Measured:
    """Returns the rates of `patterns`, each over `num_bytes`.

    Args:
        stream: Over a file that was laid out.
        patterns: In this order.
        num_bytes: Each moves.
        cold: Whether the page cache is emptied before reads.
        on_sample: Of progress.
    """
    moved = {
        pattern: _measure(stream, pattern, num_bytes=num_bytes, cold=cold, on_sample=on_sample)
        for pattern in patterns
    }
    return Measured(
        rates=_rates(moved),
        series=tuple(Series(name=name, samples=each.samples) for name, each in moved.items()),
    )


def _measure(
    stream: Stream, pattern: str, *, num_bytes: int, cold: bool, on_sample: OnSample
) -> Moved:
    stream.rewind()
    if cold and pattern != "write":
        stream.drop_cache()
    return stream.move(
        _OPERATIONS[pattern],
        Budget(num_bytes),
        flush=pattern == "write",
        on_sample=lambda sample: on_sample(pattern, sample, num_bytes),
    )


def _rates(moved: dict[str, Moved]) -> Rates:
    write, read, mixed = moved.get("write"), moved.get("read"), moved.get("rw")
    num_bytes = sum(each.num_bytes for each in moved.values())
    return Rates(
        read=None if read is None else read.read_bytes / read.seconds,
        write=None if write is None else write.write_bytes / write.seconds,
        mixed_read=None if mixed is None else mixed.read_bytes / mixed.seconds,
        mixed_write=None if mixed is None else mixed.write_bytes / mixed.seconds,
        cpu_s_per_gib=sum(each.cpu_s for each in moved.values()) / num_bytes * GIB,
    )


_OPERATIONS = {
    "write": (Operation.WRITE,),
    "read": (Operation.READ,),
    "rw": (Operation.READ, Operation.WRITE),
}
