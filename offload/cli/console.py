"""The console that commands print to."""

from rich.console import Console


class ReportingConsole(Console):
    """Raises BrokenPipeError where nobody reads it any more; rich would end the process."""

    def on_broken_pipe(self) -> None:
        raise  # rich calls this where it handles the error
