"""What `offload bench` prints for a reader: a live line, then tables."""

from typing import Self, TextIO

from rich.console import Console
from rich.table import Table

from offload.bench.io import IoProgress
from offload.bench.io_report import IoReport
from offload.sizes import format_size

_NONE = "-"
_WIDTH = 78


class LiveLine:
    """One line that is written over again; nothing where the stream is no terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_live = stream.isatty()

    def __call__(self, progress: IoProgress) -> None:
        if not self._is_live:
            return
        share = progress.done_bytes / progress.total_bytes if progress.total_bytes else 1.0
        text = (
            f"{progress.path}  {progress.pattern}  {share:4.0%}  "
            f"{progress.bytes_per_s / 1e9:.2f} GB/s"
        )
        self._stream.write(f"\r{text[-_WIDTH:]:<{_WIDTH}}")
        self._stream.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_live:
            self._stream.write("\r" + " " * _WIDTH + "\r")
            self._stream.flush()


def render_io(console: Console, report: IoReport) -> None:
    """Prints the rates of each path, of all together, and where settings were written."""
    table = Table("path", "write", "read", "rw, each way", "duplex", "spread", "CPU s/GiB", "with")
    for path in report.paths:
        values = path.to_json()
        cache = ", cached" if path.cached else ""
        how = "O_DIRECT" if path.direct else f"buffered{cache}"
        table.add_row(
            f"{path.path}\n{path.filesystem} on {path.device}",
            _rate(values["write_bytes_per_s"]),
            _rate(values["read_bytes_per_s"]),
            _rate(values["round_trip_bytes_per_s"]),
            _number(values["duplex"]),
            _number(values["spread"]),
            _number(values["cpu_s_per_gib"], digits=3),
            f"{path.backend}, {how}\n{format_size(path.block_bytes)} x {path.queue_depth}",
        )
    console.print(table)
    together = report.to_json()["together"]
    if report.together:
        console.print(
            f"together: write {_rate(together['write_bytes_per_s'])}, "
            f"read {_rate(together['read_bytes_per_s'])}; the first path was done after "
            f"{together['first_done_s']:.2f} s, the last after {together['last_done_s']:.2f} s"
        )
    _render_sustained(console, report)
    if report.machine_file is not None:
        console.print(f"the best settings are in {report.machine_file}")
    console.print("rates in GB (10⁹ bytes) per second, medians; spread is the largest max/min")


def _render_sustained(console: Console, report: IoReport) -> None:
    for path in report.paths:
        sustained = path.sustained
        if sustained is None:
            continue
        written = f"{format_size(sustained.written_bytes)} in {sustained.seconds:.0f} s"
        if sustained.is_steady:
            text = f"steady at {_rate(sustained.write_bytes_per_s)} GB/s after {written}"
        else:
            text = f"not steady within {written} (--max-bytes)"
        console.print(f"{path.path}: writes {text}, at first {_rate(sustained.first_bytes_per_s)}")


def _rate(value: float | None) -> str:
    return _NONE if value is None else f"{value / 1e9:.2f}"


def _number(value: float | None, *, digits: int = 2) -> str:
    return _NONE if value is None else f"{value:.{digits}f}"
