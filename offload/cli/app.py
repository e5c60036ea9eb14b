"""The commands of `offload` and their options."""

import contextlib
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from offload.cli.bench_io import io
from offload.cli.bench_optim import bench_optim
from offload.cli.bench_update import update
from offload.cli.options import Json
from offload.cli.output import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_WRONG_USE,
    Output,
    StandardErrorHandler,
    standard_output,
)
from offload.cli.simulate import simulate
from offload.cli.streams import open_closed_streams

if TYPE_CHECKING:
    from offload.config import Config

# Each command imports what it calls: `offload --help` loads neither torch nor pydantic.

# typer exports the most special of its usage errors only; this is what they have in common.
_UsageError: type[Exception] = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)

app = typer.Typer(
    name="offload",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
config_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Show configurations and their schema."
)
app.add_typer(config_app, name="config")
bench_app = typer.Typer(
    no_args_is_help=True, rich_markup_mode=None, help="Measure what this machine delivers."
)
app.add_typer(bench_app, name="bench")
bench_app.command()(update)
app.command()(simulate)
bench_app.command()(io)

Run = Annotated[
    Path, typer.Argument(metavar="RUN.toml", help="The run's configuration.", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[key=value]...", help="Changes to single keys, such as train.steps=4."),
]
Store = Annotated[
    Path,
    typer.Argument(metavar="STORE", help="A run directory or a store directory."),
]


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs the command that `arguments` name and exits with its code."""
    open_closed_streams()
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Runs the command that `arguments` name and returns its exit code.

    0, 1, 2, or 128 and the number of the signal that ended it.
    """
    output = standard_output(as_json="--json" in arguments)
    if (empty := _empty_argument(arguments)) is not None:
        output.report_message(empty, kind="UsageError")
        return EXIT_WRONG_USE
    # What a library prints must not mix with the object on standard output.
    quiet = contextlib.redirect_stdout(sys.stderr) if output.as_json else contextlib.nullcontext()
    try:
        with quiet:
            code = app(list(arguments), prog_name="offload", standalone_mode=False, obj=output)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except _UsageError as error:
        return _report_usage(output, error)
    except Exception as error:  # noqa: BLE001 - the last place that can say what failed
        return output.report(error)
    if code == EXIT_INTERRUPTED and not output.has_result:
        output.report_message("interrupted", kind="KeyboardInterrupt")
    return code if isinstance(code, int) else 0


def _empty_argument(arguments: Sequence[str]) -> str | None:
    """Says which argument is empty, as one from a variable that is not set; None: none is."""
    for before, argument in zip(["offload", *arguments], arguments, strict=False):
        if not argument or (argument.startswith("--") and argument.endswith("=")):
            where = f"after `{before}`" if not argument else f"`{argument}`"
            return (
                f"cannot use the arguments: expected none that is empty, found one {where}; give a "
                "value, or leave it out"
            )
    return None


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        sys.stdout.write(f"offload {version('offload')}\n")
        raise typer.Exit


@app.callback()
def _configure(
    context: typer.Context,
    _version: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version and exit.",
            callback=_print_version,
            is_eager=True,
        ),
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            "-v",
            help="Log what is decided, not only warnings; show the traceback of an error.",
        ),
    ] = False,
) -> None:
    """Train PyTorch models that are larger than memory, exactly."""
    context.obj.shows_tracebacks = verbose
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        handlers=[StandardErrorHandler()],
        format="%(levelname)s %(name)s: %(message)s",
        force=True,
    )


@app.command()
def train(
    context: typer.Context,
    config: Run,
    overrides: Overrides = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="auto|PATH",
            help="Continue a run: PATH's, or with `auto` that of --run-dir where there is one.",
        ),
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Where config, plan, metrics and store go. [default: a new one under runs/]",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train the model that RUN.toml describes."""
    from offload.config import load_config

    output = _output(context, as_json)
    settings = load_config(config, overrides or ())

    from offload.cli.progress import PrintedSteps
    from offload.cli.tables import render_train
    from offload.runs.train import run_training

    _import_beside(context, config, settings)
    progress = PrintedSteps(output.progress_console())
    result = run_training(
        settings,
        run_dir=run_dir,
        resume="auto" if resume == "auto" else Path(resume) if resume else None,
        progress=progress,
        on_notice=progress.note,
    )
    output.show(result, render_train)
    if result.stopped_by is not None:
        # As a shell says it of a command that a signal ended.
        raise typer.Exit(128 + signal.Signals[result.stopped_by])


@app.command()
def plan(
    context: typer.Context,
    config: Run,
    overrides: Overrides = None,
    machine: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A profile from `bench io --tune`. [default: ~/.config/offload/machine.toml]",
        ),
    ] = None,
    write: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the run there with every choice of the plan, for `offload train FILE`.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say whether the run fits this machine and what it will move."""
    from offload.config import load_config, open_policy_keys

    output = _output(context, as_json)
    settings = load_config(config, overrides or ())

    from offload.cli.tables import render_plan
    from offload.runs.plan_file import require_writable, write_plan
    from offload.runs.prediction import plan_and_predict

    _import_beside(context, config, settings)
    if write is not None:
        require_writable(write)  # before anything is measured
    result = plan_and_predict(
        settings,
        machine_file=machine,
        open_keys=open_policy_keys(config, overrides or ()),
        on_measure=lambda what: output.note(f"measuring {what}"),
    )
    if write is not None and result.fits:
        write_plan(write, settings, result)
    output.show(result, render_plan)
    if not result.fits:
        raise typer.Exit(EXIT_FAILED)


@app.command()
def inspect(context: typer.Context, store: Store, as_json: Json = False) -> None:
    """Show what a store's newest commit holds."""
    from offload.cli.store_tables import render_inspection
    from offload.runs.inspection import inspect_store

    _output(context, as_json).show(inspect_store(store), render_inspection)


@app.command()
def verify(context: typer.Context, store: Store, as_json: Json = False) -> None:
    """Read every block of a store and compare it with its checksum."""
    from offload.cli.store_tables import VerifyProgress
    from offload.cli.tables import render_verify
    from offload.runs.inspection import verify_store

    output = _output(context, as_json)
    with VerifyProgress(sys.stderr) as progress:
        result = verify_store(store, progress=progress)
    output.show(result, render_verify)
    if not result.ok:
        raise typer.Exit(EXIT_FAILED)


@app.command()
def clean(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A directory with stores in it.")],
    delete: Annotated[
        list[Path] | None,
        typer.Option(metavar="STORE", help="Delete this store, for good; once for each."),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the stores that no process uses, with size and age; delete those named."""
    from offload.cli.store_tables import render_clean
    from offload.runs.cleaning import clean as clean_stores

    _output(context, as_json).show(clean_stores(path, delete=delete or ()), render_clean)


@app.command()
def doctor(
    context: typer.Context,
    paths: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[PATH]...", help="Directories for a store. [default: .]"),
    ] = None,
    drain: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where checkpoints are to be copied (checkpoint.drain)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check this machine and the paths for what a run needs."""
    from offload.cli.tables import render_doctor
    from offload.runs.doctor import run_checks

    report = run_checks(paths or [Path()], drain=drain)
    _output(context, as_json).show(report, render_doctor)
    if not report.ok:
        raise typer.Exit(EXIT_FAILED)


@config_app.command()
def show(
    context: typer.Context,
    config: Annotated[
        Path | None,
        typer.Argument(metavar="[RUN.toml]", help="The run's configuration. [default: none]"),
    ] = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Print the resolved configuration, or all defaults, every key included."""
    from offload.config import default_config, load_config

    output = _output(context, as_json)
    changes = list(overrides or ())
    if config is not None and "=" in config.name and not config.exists():
        config, changes = None, [str(config), *changes]  # of the defaults; no file was named
    settings = load_config(config, changes) if config else default_config(changes)
    if output.as_json:
        output.write_json(settings.to_dict())
    else:
        output.write(settings.to_toml())


@config_app.command()
def schema(context: typer.Context, as_json: Json = False) -> None:
    """Print the JSON schema of a configuration, for editors."""
    from offload.config import Config

    _output(context, as_json).write_json(Config.json_schema())


bench_app.command(name="optim")(bench_optim)


@bench_app.command()
def step(
    context: typer.Context,
    config: Run,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Measure the phases of RUN.toml's steps, without logging, saving or validation."""
    from offload.config import load_config

    output = _output(context, as_json)
    settings = load_config(config, overrides or ())

    from offload.bench.step import bench_step
    from offload.cli.progress import PrintedSteps
    from offload.cli.tables import render_train

    _import_beside(context, config, settings)
    progress = PrintedSteps(output.progress_console(), has_file=False)
    result = bench_step(
        settings,
        on_step=progress,
        on_notice=progress.note,
    )
    output.show(result, render_train)


def _import_beside(context: typer.Context, file: Path, config: "Config") -> None:
    """Lets a model's factory be a module that lies beside the run's file."""
    from offload.runs.model import importing_beside

    if config.model.factory is not None:
        context.with_resource(importing_beside(file))


def _output(context: typer.Context, as_json: bool) -> Output:
    output: Output = context.obj
    output.as_json = as_json
    return output


def _report_usage(output: Output, error: Exception) -> int:
    message = getattr(error, "format_message", error.__str__)()
    if type(error).__name__ == "NoArgsIsHelpError":
        sys.stderr.write(f"{message}\n")
        message = "a command is missing"
    output.report_message(message, kind="UsageError")
    return EXIT_WRONG_USE
