"""What stores hold, as tables, and the bar of a verification."""

from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from offload.cli.figures import NONE, format_figure
from offload.cli.output import Result
from offload.sizes import format_size

_HEAD_KEYS = ("store", "schema", "step", "committed_at", "age_s", "owner", "parameters", "records",
              "checkpoints", "torch_threads", "digest")  # fmt: skip


def render_inspection(console: Console, result: Result) -> None:
    """Prints a store's facts, its paths, and where each unit lies."""
    values = result.to_json()
    facts = Table("", "", show_header=False)
    for key in _HEAD_KEYS:
        facts.add_row(key.replace("_", " "), format_figure(key, values.get(key)))
    console.print("store", style="bold")
    console.print(facts)
    paths = Table("tier", "path", "bytes")
    for path, num_bytes in values["bytes_by_path"].items():
        paths.add_row("storage", path, format_size(num_bytes))
    console.print("paths", style="bold")
    console.print(paths)
    if values.get("units"):
        _print_units(console, values["units"])


def _print_units(console: Console, units: list[dict[str, Any]]) -> None:
    table = Table("unit", "parameters", "state", "records", "bytes by path")
    for unit in units:
        by_path = "\n".join(
            f"{path}: {format_size(size)}" for path, size in unit["bytes_by_path"].items()
        )
        table.add_row(
            unit["unit"],
            format_size(unit["parameter_bytes"]),
            format_size(unit["state_bytes"]),
            str(unit["records"]),
            by_path or NONE,
        )
    console.print("units", style="bold")
    console.print(table)


def render_clean(console: Console, result: Result) -> None:
    """Prints the stores that nobody uses, and what was deleted."""
    values = result.to_json()
    for title, key in (("deleted", "deleted"), ("in use", "in_use"), ("not in use", "dead")):
        if not values[key]:
            continue
        table = Table("store", "bytes", "age", "step", "checkpoints", "note")
        for found in values[key]:
            note = found["owner"] or found["problem"]
            if note is None and not found["has_commit"]:
                note = "ended before its first commit"
            table.add_row(
                found["store"],
                format_size(found["bytes"]),
                _age(found["age_s"]),
                format_figure("step", found["step"]),
                str(len(found["checkpoints"])),
                note or NONE,
            )
        console.print(title, style="bold")
        console.print(table)
    if values["dead"] and not values["deleted"]:
        console.print("delete one for good with `--delete STORE`", soft_wrap=True)


class VerifyProgress:
    """A bar of the bytes that were read and checked; nothing where there is no terminal."""

    def __init__(self, stream: TextIO) -> None:
        columns = (TextColumn("checking"), BarColumn(), DownloadColumn(True), TimeRemainingColumn())
        self._progress = Progress(
            *columns, console=Console(file=stream), disable=not stream.isatty(), transient=True
        )
        self._task: TaskID | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def __call__(self, done_bytes: int, all_bytes: int) -> None:
        """Says that so many bytes of all are checked."""
        if self._task is None:
            self._task = self._progress.add_task("", total=all_bytes)
        self._progress.update(self._task, completed=done_bytes)


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"
