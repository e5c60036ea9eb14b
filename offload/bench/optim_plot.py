"""The plot of `offload bench optim`: rates of the passes, and how they stand beside a copy."""

from collections.abc import Callable, Sequence
from pathlib import Path

from offload.bench.optim import OptimReport, OptimResult
from offload.errors import ConfigError
from offload.report.charts import MARK, Chart, Line, render_page

_FIRST_BYTES = 4096


def require_plottable(file: Path) -> None:
    """Raises ConfigError if `write_plot` would refuse `file`."""
    found = None
    if file.suffix != ".svg":
        found = "another ending than `.svg`, the one format that there is"
    elif not file.parent.is_dir():
        found = "no directory of that name"
    elif file.exists() and MARK.encode() not in file.read_bytes()[:_FIRST_BYTES]:
        found = "another file"
    if found is not None:
        raise ConfigError(
            f"cannot plot to `{file}`: expected a new `.svg` file or an older plot, found {found}; "
            "change `--plot`"
        )


def write_plot(file: Path, report: OptimReport) -> None:
    """Writes the charts of all results."""
    require_plottable(file)
    facts = report.environment
    caption = (
        f"{facts['measured_at']}, {facts['processor'] or facts['machine']}; {facts['command']}"
    )
    charts = [
        _chart(report.results, "10⁹ parameters/s", lambda r: r.parameters_per_s / 1e9),
        _chart(report.results, "GB/s (10⁹ bytes)", lambda r: r.bytes_per_s / 1e9),
        _chart(report.results, "bytes/s over those of the best copy", lambda r: r.ratio_to_memcpy),
    ]
    file.write_text(render_page("offload bench optim", caption, charts), encoding="utf-8")


def _chart(
    results: Sequence[OptimResult], label: str, value_of: Callable[[OptimResult], float]
) -> Chart:
    names = list(dict.fromkeys(_pass_of(r) for r in results))
    lines = [
        Line(
            name=f"{isa} x{threads}",
            points=[
                (float(names.index(_pass_of(r))), value_of(r))
                for r in results
                if (r.isa, r.threads) == (isa, threads)
            ],
        )
        for isa, threads in dict.fromkeys((r.isa, r.threads) for r in results)
    ]
    return Chart(
        title=label, x_label="optimizer, codec, gradient", y_label=label, x_names=names, lines=lines
    )


def _pass_of(result: OptimResult) -> str:
    short = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[result.gradient_dtype]
    return f"{result.optimizer} {result.codec} {short}"
