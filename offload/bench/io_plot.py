"""The plot of `offload bench io`: rates over block size and depth, and over time."""

from collections.abc import Iterator, Sequence

from offload.bench.io_report import IoReport, PathResult, Series, Sustained, Trial
from offload.report.charts import Chart, Line, render_page
from offload.runs.own_file import OwnFile
from offload.sizes import format_size

_GB = 1e9
_Y_LABEL = "GB/s (10⁹ bytes)"


def write_plot(file: OwnFile, report: IoReport) -> None:
    """Writes the charts of all paths."""
    facts = report.environment
    caption = (
        f"{facts['measured_at']}, {facts['processor'] or facts['machine']}, Linux "
        f"{facts['kernel']}; {facts['command']}"
    )
    charts = [chart for path in report.paths for chart in _path_charts(path)]
    file.write(render_page("offload bench io", caption, charts))


def _path_charts(path: PathResult) -> Iterator[Chart]:
    kind = "O_DIRECT" if path.direct else "page cache"
    where = f"{path.path} ({path.filesystem}, {kind})"
    for title, name in (("write", "write"), ("read", "read"), ("rw, each way", "mixed_read")):
        lines = list(_depth_lines(_trials(path), name))
        if lines:
            yield Chart(
                title=f"{title}: {where}",
                x_label=f"block size, backend {_trials(path)[0].backend}",
                y_label=_Y_LABEL,
                x_names=[format_size(block) for block in _blocks(path)],
                lines=lines,
            )
    if path.series:
        yield Chart(
            title=f"over time: {where}",
            x_label="seconds since the start of the stream",
            y_label=_Y_LABEL,
            lines=list(_time_lines(path.series)),
        )
    if path.sustained is not None:
        yield _sustained_chart(where, path.sustained)


def _trials(path: PathResult) -> Sequence[Trial]:
    """Those of the grid; without a sweep the one setting that was measured."""
    if path.trials:
        first = path.trials[0].backend
        unique = {
            (trial.block_bytes, trial.queue_depth): trial
            for trial in reversed(path.trials)
            if trial.backend == first
        }
        return list(unique.values())
    return [
        Trial(
            backend=path.backend,
            block_bytes=path.block_bytes,
            queue_depth=path.queue_depth,
            rates=run,
        )
        for run in path.runs[:1]
    ]


def _blocks(path: PathResult) -> list[int]:
    return sorted({trial.block_bytes for trial in _trials(path)})


def _depth_lines(trials: Sequence[Trial], name: str) -> Iterator[Line]:
    blocks = sorted({trial.block_bytes for trial in trials})
    for depth in sorted({trial.queue_depth for trial in trials}):
        rates = {
            trial.block_bytes: getattr(trial.rates, name)
            for trial in trials
            if trial.queue_depth == depth
        }
        points = [
            (float(i), rates[block] / _GB)
            for i, block in enumerate(blocks)
            if rates.get(block) is not None
        ]
        if points:
            yield Line(name=f"depth {depth}", points=points)


def _time_lines(series: Sequence[Series]) -> Iterator[Line]:
    seen: dict[str, int] = {}
    for each in series:
        seen[each.name] = seen.get(each.name, 0) + 1
        points = []
        at_s, num_bytes = 0.0, 0
        for sample in each.samples:
            if sample.at_s - at_s > 0.02:  # a last sample right after another says nothing
                rate = (sample.num_bytes - num_bytes) / (sample.at_s - at_s)
                points.append((sample.at_s, rate / _GB))
                at_s, num_bytes = sample.at_s, sample.num_bytes
        if points:
            yield Line(name=f"{each.name} {seen[each.name]}", points=points)


def _sustained_chart(where: str, sustained: Sustained) -> Chart:
    at_bytes = 0.0
    rates = sustained.window_bytes_per_s
    points = []
    for rate in rates:
        at_bytes += sustained.written_bytes / len(rates)
        points.append((at_bytes / _GB, rate / _GB))
    return Chart(
        title=f"sustained writes: {where}",
        x_label="GB written, about",
        y_label=_Y_LABEL,
        lines=[Line(name="write", points=points)],
    )
