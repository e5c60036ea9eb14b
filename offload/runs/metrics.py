"""`metrics.jsonl`: one JSON object for each step."""

import contextlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self, TextIO

from offload.errors import StorageError, StoreError


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """What one step did. The names are those of the file."""

    step: int
    """From 1."""
    loss: float
    """In nats per token, summed over micro-steps in float64."""
    lr: float
    grad_norm: float
    """Before clipping."""
    tokens: int
    tokens_per_s: float
    step_s: float
    forward_s: float
    backward_s: float
    update_s: float
    other_s: float
    io_wait_s: float
    """Contained in the phases."""
    read_bytes: int
    write_bytes: int
    cache_hit_bytes: int
    host_peak_bytes: int
    device_peak_bytes: int | None
    rss_bytes: int
    bound_s: float | None
    achieved_over_bound: float | None
    committed: int | None
    """The step of the newest closed commit when the line was written."""
    stalls: list[dict[str, Any]] = field(default_factory=list)
    """Waits of the calling thread, longest first: `waits_for` (`path` and its directory,
    `checksum`, `kernel` or `link`), their `cause`, `duration_s` and `count`."""
    activation_offload_bytes: int = 0
    """Of saved activations that were moved to host memory or storage."""
    skipped: bool = False
    """True where the norm was not finite: the state is untouched."""
    validation_loss: float | None = None
    """After the step, where `train.eval_every` asked for it."""
    written_bytes_per_day: float | None = None
    """To all paths at the pace of this step, without commits; None where nothing is stored."""
    store_bytes: int | None = None
    """In blocks that a version needs, committed, current or of a checkpoint, after the step."""

    def to_json(self) -> dict[str, Any]:
        """Returns the object of one line; floats that JSON can't write become None."""
        return {key: _finite(value) for key, value in asdict(self).items()}


class MetricsFile:
    """Appends lines to `metrics.jsonl`; each is complete on file when `append` returns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def open(self) -> None:
        """Opens the file for appending; it is made if there is none."""
        if self._file is None:
            self._file = self.path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Closes the file; may be called twice."""
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, metrics: StepMetrics) -> None:
        """Writes one line.

        Raises:
            StorageError: There is no room for it, or the file can't be written; it is closed.
        """
        if self._file is None:
            raise StoreError(
                f"cannot append to `{self.path}`: expected it to be open, found it closed; "
                "call `open()` first"
            )
        try:
            self._file.write(json.dumps(metrics.to_json(), allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            with contextlib.suppress(OSError):  # of what it still holds, the same
                self.close()
            raise StorageError(
                f"cannot append to `{self.path}`: expected room for the line of step "
                f"{metrics.step}, found {error.strerror or error}; free some, and go on from the "
                "last commit with `--resume auto`",
                errno=error.errno,
            ) from error


def truncate_metrics(path: Path, *, step: int) -> None:
    """Drops the lines after `step`, and a last line that was cut off, all at once."""
    if not path.exists():
        return
    kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _is_up_to(line, step)]
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text("".join(line + "\n" for line in kept), encoding="utf-8")
    temporary.replace(path)


def _is_up_to(line: str, step: int) -> bool:
    try:
        return int(json.loads(line)["step"]) <= step
    except (ValueError, KeyError, TypeError):
        return False  # what a killed run left of its last line


def _finite(value: Any) -> Any:
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value
