"""The lines that a run prints while it goes on."""

import logging

from rich.console import Console
from rich.text import Text

from offload.cli.streams import discard
from offload.runs.metrics import StepMetrics
from offload.sizes import format_size

_LOG = logging.getLogger("offload.cli")

_COLUMNS = (
    ("step", 5),
    ("loss", 8),
    ("grad norm", 9),
    ("tokens/s", 8),
    ("forward", 8),
    ("backward", 8),
    ("update", 8),
    ("I/O wait", 8),
    ("read", 9),
    ("written", 9),
    ("host peak", 9),
    ("/bound", 6),
    ("written/day", 11),
)


class PrintedSteps:
    """Prints one line for each step as it ends, below the names of the columns.

    A run does not end because nobody reads these: it says so once, and goes on.
    """

    def __init__(self, console: Console, *, has_file: bool = True) -> None:
        """Stores its arguments.

        Args:
            console: Where they are printed.
            has_file: Whether the run writes them to its `metrics.jsonl` too.
        """
        self._console = console
        self._has_file = has_file
        self._has_header = False
        self._is_read = True

    def __call__(self, metrics: StepMetrics) -> None:
        if not self._has_header:
            header = " ".join(f"{name:>{width}}" for name, width in _COLUMNS)
            self._print(Text(header, style="bold"))
            self._has_header = True
        self.note(step_line(metrics))

    def note(self, text: str) -> None:
        """Prints a line between those of steps."""
        self._print(Text(text))

    def _print(self, line: Text) -> None:
        if not self._is_read:
            return
        try:
            self._console.print(line, soft_wrap=True)
        except OSError as error:
            self._is_read = False
            discard(self._console.file)
            _LOG.warning(
                "the lines of steps can't be printed any more (%s): the run goes on, and %s",
                error.strerror or error,
                "its `metrics.jsonl` has them"
                if self._has_file
                else "its result has their medians",
            )


def step_line(metrics: StepMetrics) -> str:
    """Returns the line of one step: seconds per phase, bytes in binary units."""
    cells = (
        str(metrics.step),
        f"{metrics.loss:.4f}",
        f"{metrics.grad_norm:.3f}",
        f"{metrics.tokens_per_s:.0f}",
        *(
            f"{seconds:.3f}s"
            for seconds in (
                metrics.forward_s,
                metrics.backward_s,
                metrics.update_s,
                metrics.io_wait_s,
            )
        ),
        format_size(metrics.read_bytes),
        format_size(metrics.write_bytes),
        format_size(metrics.host_peak_bytes),
        "-" if metrics.achieved_over_bound is None else f"{metrics.achieved_over_bound:.2f}",
        "-"
        if metrics.written_bytes_per_day is None
        else format_size(metrics.written_bytes_per_day),
    )
    line = " ".join(f"{cell:>{width}}" for cell, (_, width) in zip(cells, _COLUMNS, strict=True))
    return f"{line}  skipped: the gradient norm is not finite" if metrics.skipped else line
