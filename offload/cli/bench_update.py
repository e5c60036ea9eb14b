"""The command `offload bench update`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from offload.cli.figures import format_figure
from offload.cli.options import Json
from offload.cli.output import Output, Result

_FIGURES = (
    ("update", "update_s"),
    ("    its bound", "update_bound_s"),
    ("    achieved/bound", "update_achieved_over_bound"),
    ("step", "step_s"),
    ("    achieved/bound", "achieved_over_bound"),
    ("read per step", "read_bytes_per_step"),
    ("    by the formula", "formula_read_bytes_per_step"),
    ("written per step", "write_bytes_per_step"),
    ("    by the formula", "formula_write_bytes_per_step"),
    ("cache hit rate", "cache_hit_rate"),
    ("parameters/s", "parameters_per_s"),
    ("commit", "commit_s"),
    ("state digest", "state_digest"),
)


Parameters = Annotated[str, typer.Option(metavar="N", help="Number of parameters, such as 1e8.")]
Directories = Annotated[
    list[Path], typer.Option(metavar="DIR", help="A directory on a drive; once for each.")
]
HostMemory = Annotated[
    str, typer.Option(metavar="SIZE", help="For parameters, gradients, window and cache.")
]
Codec = Annotated[
    str, typer.Option(help="split or fp32; a baseline has fp32, and the memory that this leaves.")
]
Order = Annotated[
    str,
    typer.Option(
        help="Which record is updated next: sequential, alternating or resident. A baseline has "
        "its own."
    ),
]
Overlap = Annotated[
    str,
    typer.Option(
        help="What updates run under: none, or with --order resident forward, backward, both."
    ),
]
Striping = Annotated[
    str,
    typer.Option(help="adaptive, proportional, modulo[:a:b...] or single. A baseline has its own."),
]
Baseline = Annotated[
    str,
    typer.Option(
        help="engine, or ours after others: deepspeed-like (of the first path only), mlp-like."
    ),
]
ComputeS = Annotated[
    float, typer.Option(metavar="S", help="Seconds that stand for forward and backward.")
]
Steps = Annotated[int, typer.Option(help="Measured, after two that are not.")]
CommitEvery = Annotated[int, typer.Option(help="Steps between commits; 0: none.")]


def update(
    context: typer.Context,
    parameters: Parameters,
    path: Directories,
    host_memory: HostMemory,
    codec: Codec = "split",
    order: Order = "sequential",
    overlap: Overlap = "none",
    striping: Striping = "adaptive",
    baseline: Baseline = "engine",
    compute_s: ComputeS = 0.0,
    steps: Steps = 5,
    commit_every: CommitEvery = 0,
    as_json: Json = False,
) -> None:
    """Measure the update phase with the state on storage."""
    output: Output = context.obj
    output.as_json = as_json
    from offload.bench.update import bench_update
    from offload.bench.update_options import UpdateOptions
    from offload.errors import ConfigError
    from offload.sizes import parse_count, parse_size

    try:
        options = UpdateOptions(
            parameters=parse_count(parameters),
            paths=path,
            host_memory_bytes=parse_size(host_memory),
            codec=codec,
            order=order,
            overlap=overlap,
            striping=striping,
            baseline=baseline,
            compute_s=compute_s,
            steps=steps,
            commit_every=commit_every,
        )
    except ValueError as error:
        raise ConfigError(
            f"cannot measure updates with `--parameters` {parameters} and `--host-memory` "
            f"{host_memory}: {error}; correct it"
        ) from error
    report = bench_update(
        options,
        on_step=lambda number, step: output.note(f"step {number}: update {step.update_s:.3f} s"),
    )
    output.show(report, render_update)


def render_update(console: Console, result: Result) -> None:
    """Prints the medians, and what each path moved."""
    from offload.runs.busy import busy_note

    values = result.to_json()
    table = Table("", "", show_header=False)
    for label, key in _FIGURES:
        table.add_row(label, format_figure(key, values[key]))
    note = busy_note(values["others_cpu_share"])
    if note is not None:
        table.add_row("busy machine", note)
    console.print(f"update phase, {values['baseline']}", style="bold")
    console.print(table)
    paths = Table("path", "read", "written")
    for moved in values["paths"]:
        paths.add_row(
            moved["path"],
            format_figure("read_bytes", moved["read_bytes"]),
            format_figure("write_bytes", moved["write_bytes"]),
        )
    console.print("paths, all measured steps", style="bold")
    console.print(paths)
