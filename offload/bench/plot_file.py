"""The file of a plot."""

from pathlib import Path

from offload.errors import ConfigError
from offload.report.charts import MARK
from offload.runs.own_file import OwnFile


def plot_file(path: Path) -> OwnFile:
    """Returns the file for a plot, to know before minutes of measuring that it can be written.

    Raises:
        ConfigError: It has another format, is another file, or cannot be written.
    """
    if path.suffix != ".svg":
        raise ConfigError(
            f"cannot write the plot `{path}`: expected a name that ends in `.svg`, the one format "
            f"that there is, found `{path.suffix}`; change `--plot`"
        )
    file = OwnFile(path=path, what="the plot", mark=MARK, remedy="name another one with `--plot`")
    file.require_writable()
    return file
