"""`offload bench optim`: its options and its tables."""

from typing import TYPE_CHECKING, Annotated

import typer

from offload.cli.options import Json, Machine, Plot
from offload.cli.output import Output

if TYPE_CHECKING:
    from rich.console import Console

    from offload.bench.optim import OptimReport


Parameters = Annotated[str, typer.Option(help="How many; about 50 bytes of memory each.")]
Threads = Annotated[
    list[int] | None, typer.Option(help="Repeat it for several. [default: usable CPUs]")
]
Optimizers = Annotated[
    list[str] | None,
    typer.Option(help="adamw, adam, lion, sgd, momentum, adagrad. [default: adamw]"),
]
Codecs = Annotated[list[str] | None, typer.Option(help="split, fp32. [default: both]")]
ParameterDtype = Annotated[str, typer.Option(help="bfloat16, float16, float32.")]
GradientDtypes = Annotated[
    list[str] | None,
    typer.Option(help="bfloat16, float16, float32. [default: bfloat16]"),
]
Kernels = Annotated[
    list[str] | None,
    typer.Option(help="avx512, avx2, neon, scalar, torch, all. [default: the best here]"),
]
Rounds = Annotated[int, typer.Option(help="Of which the median is taken.")]
Tune = Annotated[bool, typer.Option("--tune", help="Write the rates to --machine, for plans.")]


def bench_optim(
    context: typer.Context,
    parameters: Parameters = "50e6",
    threads: Threads = None,
    optimizer: Optimizers = None,
    codec: Codecs = None,
    parameter_dtype: ParameterDtype = "bfloat16",
    gradient_dtype: GradientDtypes = None,
    isa: Kernels = None,
    rounds: Rounds = 7,
    tune: Tune = False,
    machine: Machine = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Measure the optimizer kernels beside a copy of memory, and beside torch's."""
    from offload.bench.machine_file import profile_to_write, write_kernels
    from offload.bench.optim import run_optim_bench
    from offload.bench.optim_options import parse_options
    from offload.bench.optim_plot import write_plot
    from offload.bench.plot_file import plot_file
    from offload.errors import ConfigError

    output: Output = context.obj
    output.as_json = as_json
    options = parse_options(
        parameters=parameters,
        threads=threads or (),
        optimizer=optimizer or (),
        codec=codec or (),
        parameter_dtype=parameter_dtype,
        gradient_dtype=gradient_dtype or (),
        isa=isa or (),
        rounds=rounds,
    )
    if machine is not None and not tune:
        raise ConfigError(
            f"cannot use `--machine` `{machine}`: expected `--tune` beside it, found none; add it, "
            "or leave `--machine` out"
        )
    chart = None if plot is None else plot_file(plot)
    profile = profile_to_write(machine) if tune else None
    report = run_optim_bench(
        options,
        on_case=lambda case: output.note(
            f"measuring {case.optimizer}, {case.codec}, {case.isa}, {case.threads} threads"
        ),
    )
    if profile is not None:
        write_kernels(profile, report)
    if chart is not None:
        write_plot(chart, report)
    output.show(report, _render)


def _render(console: "Console", report: "OptimReport") -> None:
    from rich.table import Table

    table = Table(
        "optimizer", "codec", "gradient", "kernels", "10⁹ param/s", "GB/s", "x copy", "x bare"
    )
    for r in report.results:
        table.add_row(
            r.optimizer,
            r.codec,
            r.gradient_dtype,
            f"{r.isa} x{r.threads}",
            f"{r.parameters_per_s / 1e9:.2f}",
            f"{r.bytes_per_s / 1e9:.1f}",
            f"{r.ratio_to_memcpy:.2f}",
            "-" if r.ratio_to_bare is None else f"{r.ratio_to_bare:.2f}",
        )
    console.print(table)
    helpers = Table("gradient helper", "dtype", "kernels", "GB/s", "beside")
    for h in report.helpers:
        helpers.add_row(
            h.helper,
            h.gradient_dtype,
            f"{h.isa} x{h.threads}",
            f"{h.bytes_per_s / 1e9:.1f}",
            f"{h.ratio_to_reference:.2f} x {h.reference}",
        )
    console.print(helpers)
    torch = report.torch
    console.print(
        f"torch fused AdamW: {torch.fused_parameters_per_s / 1e9:.2f} 10⁹ param/s; with both casts "
        f"{torch.fused_with_casts_parameters_per_s / 1e9:.2f}, against which codec split reached "
        f"{torch.split_over_fused_with_casts:.2f} x in the same rounds; with a new fp32 gradient "
        f"each step {torch.fused_with_new_gradients_parameters_per_s / 1e9:.2f}, "
        f"{torch.split_over_fused_with_new_gradients:.2f} x"
    )
