"""Options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object; all else goes to standard error.")
]
Machine = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="The profile. [default: ~/.config/offload/machine.toml]"),
]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="Write charts to this .svg file.")]
