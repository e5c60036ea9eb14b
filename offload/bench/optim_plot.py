"""The plot of `offload bench optim`: rates of the passes, and how they stand beside a copy."""

from collections.abc import Callable, Sequence

from offload.bench.optim import OptimReport, OptimResult
from offload.report.charts import Chart, Line, render_page
from offload.runs.own_file import OwnFile


def write_plot(file: OwnFile, report: OptimReport) -> None:
    """Writes the charts of all results."""
    facts = report.environment
    caption = (
        f"{facts['measured_at']}, {facts['processor'] or facts['machine']}; {facts['command']}"
    )
    charts = [
        _chart(report.results, "10⁹ parameters/s", lambda r: r.parameters_per_s / 1e9),
        _chart(report.results, "GB/s (10⁹ bytes)", lambda r: r.bytes_per_s / 1e9),
        _chart(report.results, "bytes/s over those of the best copy", lambda r: r.ratio_to_memcpy),
    ]
    file.write(render_page("offload bench optim", caption, charts))


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
