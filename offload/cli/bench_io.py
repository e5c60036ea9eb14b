"""The command `offload bench io`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from offload.cli.options import Json, Machine, Plot
from offload.cli.output import Output

Paths = Annotated[
    list[Path],
    typer.Argument(metavar="PATH...", help="Directories on the drives.", show_default=False),
]
Size = Annotated[
    str, typer.Option(help="Of the file on each path, which has no name and leaves no trace.")
]
Directions = Annotated[str, typer.Option(help="Of write (with fsync), read and rw (half of each).")]
BlockSizes = Annotated[
    str | None, typer.Option(help="Block size; several are swept, as 128KiB,1MiB.")
]
Depths = Annotated[str | None, typer.Option(help="Blocks in flight; several are swept, as 1,16.")]
Engine = Annotated[
    str, typer.Option(help="io_uring, libaio, threads, aiofiles; auto is the first there is.")
]
Buffered = Annotated[
    bool, typer.Option("--buffered", help="Go through the page cache, not O_DIRECT.")
]
Runs = Annotated[int, typer.Option(help="Of which the median is taken.")]
Tune = Annotated[
    bool,
    typer.Option("--tune", help="Find the best settings of each path; write them to --machine."),
]
Sustained = Annotated[
    bool, typer.Option("--sustained", help="Also write on until the rate is steady.")
]
MaxBytes = Annotated[
    str | None,
    typer.Option(help="Written per path at most with --sustained. [default: 32GiB]"),
]


def io(
    context: typer.Context,
    paths: Paths,
    size: Size = "1GiB",
    rw: Directions = "write,read,rw",
    bs: BlockSizes = None,
    iodepth: Depths = None,
    ioengine: Engine = "auto",
    buffered: Buffered = False,
    runs: Runs = 3,
    tune: Tune = False,
    machine: Machine = None,
    sustained: Sustained = False,
    max_bytes: MaxBytes = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Measure how fast paths are written and read, alone and together."""
    from offload.bench.io_command import IoFiles, bench_io
    from offload.bench.io_options import parse_options

    output: Output = context.obj
    output.as_json = as_json
    options = parse_options(
        paths,
        size=size,
        rw=rw,
        bs=bs,
        iodepth=iodepth,
        ioengine=ioengine,
        buffered=buffered,
        runs=runs,
        tune=tune,
        sustained=sustained,
        max_bytes=max_bytes,
    )

    from offload.cli.bench_tables import LiveLine, render_io

    with LiveLine(sys.stderr) as live:
        report = bench_io(options, files=IoFiles(machine=machine, plot=plot), on_progress=live)
    output.show(report, render_io)
