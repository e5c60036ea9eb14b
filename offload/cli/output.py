"""What a command prints: one JSON object, or tables and lines for a reader."""

import contextlib
import json
import logging
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TextIO, TypeVar

from offload.cli.streams import discard
from offload.errors import ConfigError, OffloadError, PlanError, StorageError, StoreError

if TYPE_CHECKING:
    from rich.console import Console

EXIT_FAILED = 1
EXIT_WRONG_USE = 2
EXIT_INTERRUPTED = 130


class Result(Protocol):
    """What a function of `offload.runs` returns to a command."""

    def to_json(self) -> dict[str, Any]:
        """Returns the object that `--json` prints."""


ResultT = TypeVar("ResultT", bound=Result)


class Output:
    """Prints a command's result, progress and errors.

    With `as_json`, standard output gets exactly one JSON object and standard error the rest.
    """

    def __init__(self, *, as_json: bool, stdout: TextIO, stderr: TextIO) -> None:
        self.as_json = as_json
        self.has_result = False
        """Whether `show` has printed a result."""
        self.shows_tracebacks = False
        """Whether `report` prints the traceback of every error, not only of those not expected."""
        self._is_taken = True  # by standard output, what is written there
        self._stdout = stdout
        self._stderr = stderr

    def show(self, result: ResultT, render: Callable[["Console", ResultT], None]) -> None:
        """Prints `result`: as JSON, or for a reader by `render`."""
        self.has_result = True
        if self.as_json:
            self.write_json(result.to_json())
            return
        with self._printing():
            render(_console(self._stdout), result)

    def progress_console(self) -> "Console":
        """Returns where progress goes: standard output, or with `as_json` standard error."""
        return _console(self._stderr if self.as_json else self._stdout)

    def note(self, text: str) -> None:
        """Prints a line of progress of a command whose result is all that it is for.

        Raises:
            StorageError: Standard output does not take it, nor would it take the result.
        """
        if not self.as_json:
            with self._printing():
                _console(self._stdout).print(text, soft_wrap=True)
            return
        try:
            _console(self._stderr).print(text, soft_wrap=True)
        except OSError:  # the result goes elsewhere
            discard(self._stderr)

    def write(self, text: str) -> None:
        """Prints `text`, which is the result."""
        with self._printing():
            self._stdout.write(text)
            self._stdout.flush()

    @contextlib.contextmanager
    def _printing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._is_taken = False
            discard(self._stdout)
            raise StorageError(
                "cannot print the result: expected standard output to take it, found "
                f"{error.strerror or error}; what was done stays done",
                errno=error.errno,
            ) from error

    def write_json(self, values: Mapping[str, Any]) -> None:
        """Prints the one JSON object; numbers that JSON does not have become null."""
        text = json.dumps(_finite(values), allow_nan=False, indent=2, default=str)
        self.write(f"{text}\n")

    def report(self, error: Exception) -> int:
        """Prints `error` and returns the exit code that it stands for."""
        if self.shows_tracebacks or not isinstance(error, OffloadError):
            with contextlib.suppress(OSError):
                traceback.print_exception(error, file=self._stderr)
        self.report_message(str(error) or "no message", kind=type(error).__name__)
        return EXIT_WRONG_USE if _is_refusal(error) else EXIT_FAILED

    def report_message(self, message: str, *, kind: str) -> None:
        """Prints the message of an error whose type is called `kind`."""
        if self.as_json and self._is_taken:
            with contextlib.suppress(StorageError):
                self.write_json({"error": {"type": kind, "message": message}})
                return
        with contextlib.suppress(OSError):
            self._stderr.write(f"error: {message}\n")
            self._stderr.flush()


class StandardErrorHandler(logging.Handler):
    """Writes lines of the log to what standard error is then: a caller may replace and close it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Writes the line of `record`."""
        try:
            sys.stderr.write(f"{self.format(record)}\n")
        except Exception:  # noqa: BLE001 - no line of a log ends what it is about
            self.handleError(record)


def standard_output(*, as_json: bool) -> Output:
    """Returns the output to the process's standard streams."""
    return Output(as_json=as_json, stdout=sys.stdout, stderr=sys.stderr)


def _is_refusal(error: Exception) -> bool:
    """Returns whether nothing was begun, and nothing is broken."""
    if isinstance(error, StoreError):
        return error.is_refusal
    return isinstance(error, ConfigError | PlanError)


def _console(stream: TextIO) -> "Console":
    from offload.cli.console import ReportingConsole

    # Where there is no terminal there is no width: lines are not cut.
    width = None if stream.isatty() else 140
    return ReportingConsole(file=stream, width=width, highlight=False, markup=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
