"""The command `offload simulate`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from offload.cli.figures import NONE, format_figure
from offload.cli.options import Json
from offload.cli.output import EXIT_FAILED, Output, Result


def simulate(
    context: typer.Context,
    scenario: Annotated[
        Path,
        typer.Argument(
            metavar="SCENARIO.toml", help="Machines and the runs on them.", show_default=False
        ),
    ],
    as_json: Json = False,
) -> None:
    """Simulate runs on machines that are not here."""
    output: Output = context.obj
    output.as_json = as_json
    from offload.config.scenario import load_scenario
    from offload.plan.scenario import simulate_scenario

    report = simulate_scenario(load_scenario(scenario))
    output.show(report, render_scenario)
    if not report.fits:
        raise typer.Exit(EXIT_FAILED)


def render_scenario(console: Console, result: Result) -> None:
    """Prints a row for each run, and why one does not fit."""
    values = result.to_json()
    if values["title"]:
        console.print(f"simulated: {values['title']}", style="bold", soft_wrap=True)
    if values["fit"] is not None:
        fit = values["fit"]
        console.print(f"rates x {fit['scale']:.3f}, fitted on `{fit['run']}` only", soft_wrap=True)
    table = Table("run", "update", "published", "error", "step", "bound", "read", "written", "x")
    for run in values["runs"]:
        predicted = run["predicted"]
        table.add_row(
            run["name"],
            format_figure("update_s", predicted["update_s"]),
            format_figure("update_s", run["published_update_s"]),
            _percent(run["relative_error"]),
            format_figure("step_s", predicted["step_s"]),
            format_figure("bound_s", predicted["bound_s"]),
            format_figure("read_bytes", predicted["read_bytes_per_step"]),
            format_figure("write_bytes", predicted["write_bytes_per_step"]),
            NONE if run["speed_up"] is None else f"{run['speed_up']:.2f}",
        )
    console.print(table)
    for run in values["runs"]:
        for reason in run["reasons"]:
            console.print(f"does not fit: {reason}", soft_wrap=True)
        if run["like"] is not None:
            console.print(
                f"x of `{run['name']}`: against `{run['like']}`", style="dim", soft_wrap=True
            )


def _percent(value: float | None) -> str:
    return NONE if value is None else f"{value:+.1%}"
