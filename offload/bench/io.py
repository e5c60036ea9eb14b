"""`offload bench io`: what each path delivers, alone and together with the others."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from offload.bench.bench_file import bench_file, require_free_space
from offload.bench.environment import describe_environment, memory_bytes
from offload.bench.io_options import IoOptions
from offload.bench.io_path import OnSample, lay_out, measure_path, open_stream
from offload.bench.io_report import IoReport, PathResult, Together
from offload.bench.io_sweep import sweep
from offload.bench.stream import Sample, Stream
from offload.bench.sustained import measure_sustained
from offload.bench.together import measure_together
from offload.plan.machine_profile import MachineProfile
from offload.storage.engine import Engine, PathSettings, PathStats
from offload.storage.file import StorageFile
from offload.storage.mounts import find_device, find_mount

_LOGGER = logging.getLogger("offload.bench")


@dataclass(frozen=True, slots=True, kw_only=True)
class IoProgress:
    """How far one stream of the benchmark is."""

    path: str
    pattern: str
    done_bytes: int
    total_bytes: int
    bytes_per_s: float


class OnProgress(Protocol):
    """Is told of progress, ten times a second, on the calling thread."""

    def __call__(self, progress: IoProgress, /) -> None: ...


def run_io_bench(
    options: IoOptions, *, profile: MachineProfile, on_progress: OnProgress
) -> IoReport:
    """Measures every path alone, then all together; leaves no file, also when interrupted.

    Args:
        options: What to measure.
        profile: Gives block size, depth and backend where `options` do not.
        on_progress: Called ten times a second.

    Raises:
        ConfigError: A path is too full for the file.
        StorageError: A path can't be read or written.
    """
    for path in options.paths:
        require_free_space(path, options.size_bytes)
    with ExitStack() as stack:
        files = [
            stack.enter_context(bench_file(path, buffered=options.buffered))
            for path in options.paths
        ]
        benches = [
            _PathBench(path, file, options, profile=profile, on_progress=on_progress)
            for path, file in zip(options.paths, files, strict=True)
        ]
        if options.sweeps:
            for bench in benches:
                bench.sweep()
        engine = stack.enter_context(Engine(paths=[bench.settings for bench in benches]))
        together = _run_all(engine, benches, options, on_progress)
    return IoReport(
        paths=[bench.result for bench in benches],
        together=together,
        environment=describe_environment() | {"options": _described(options)},
    )


def _run_all(
    engine: Engine,
    benches: "Sequence[_PathBench]",
    options: IoOptions,
    on_progress: OnProgress,
) -> list[Together]:
    for bench in benches:
        bench.open(engine)
    together = []
    for _ in range(options.runs):
        for bench in benches:
            bench.run()
        if len(benches) > 1:
            together.append(
                measure_together(
                    [bench.stream for bench in benches],
                    options.patterns,
                    num_bytes=sum(bench.stream.size_bytes for bench in benches),
                    on_sample=_samples_of("all paths", on_progress),
                )
            )
    for bench in benches:
        if options.sustained:
            bench.run_sustained()
        bench.close()
    for bench, stats in zip(benches, engine.path_stats(), strict=True):
        bench.result.path_stats = _latencies(stats)
    return together


class _PathBench:
    """The benchmark of one path."""

    def __init__(
        self,
        path: Path,
        file: StorageFile,
        options: IoOptions,
        *,
        profile: MachineProfile,
        on_progress: OnProgress,
    ) -> None:
        self.settings = _settings(path, file, options, profile)
        self.stream: Stream
        self._file = file
        self._options = options
        self._on_sample = _samples_of(str(path), on_progress)
        mount, device = find_mount(path), find_device(path)
        self.result = PathResult(
            path=str(path),
            filesystem=mount.kind,
            device=mount.source if device is None else device.name,
            mount_options=mount.options,
            backend=self.settings.backend,
            direct=file.is_direct,
            cached=not file.is_direct and options.size_bytes < memory_bytes(),
            block_bytes=self.settings.block_bytes,
            queue_depth=self.settings.queue_depth,
            size_bytes=options.size_bytes,
        )

    def sweep(self) -> None:
        self.settings, self.result.trials = sweep(
            self._file, self.settings, self._options, on_sample=self._on_sample
        )
        self.result.block_bytes = self.settings.block_bytes
        self.result.queue_depth = self.settings.queue_depth

    def open(self, engine: Engine) -> None:
        size_bytes = self._options.size_bytes
        self.stream = open_stream(engine, self._file, self.settings, size_bytes=size_bytes)
        self.result.size_bytes = self.stream.size_bytes
        self.result.backend = _backend_in_use(engine, self.settings, self._file)
        lay_out(self.stream, self._on_sample)

    def run(self) -> None:
        measured = measure_path(
            self.stream,
            self._options.patterns,
            num_bytes=self.stream.size_bytes,
            cold=not self._file.is_direct and not self.result.cached,
            on_sample=self._on_sample,
        )
        self.result.runs.append(measured.rates)
        self.result.series.extend(measured.series)

    def run_sustained(self) -> None:
        _LOGGER.info("writing at most %d bytes to %s", self._options.max_bytes, self.result.path)
        self.result.sustained = measure_sustained(
            self.stream, max_bytes=self._options.max_bytes, on_sample=self._on_sample
        )

    def close(self) -> None:
        self.stream.close()


def _settings(
    path: Path, file: StorageFile, options: IoOptions, profile: MachineProfile
) -> PathSettings:
    # Of a directory below a measured path; the roots of the engine are those of the options.
    known = profile.find(path)
    settings = PathSettings(root=path)
    if known is not None and known.direct == file.is_direct and not options.sweeps:
        settings = replace(
            settings,
            backend=known.backend,
            block_bytes=known.block_bytes,
            queue_depth=known.queue_depth,
        )
    if options.backends[0] != "auto":
        settings = replace(settings, backend=options.backends[0])
    if options.block_bytes:
        settings = replace(settings, block_bytes=options.block_bytes[0])
    if options.queue_depths:
        settings = replace(settings, queue_depth=options.queue_depths[0])
    return settings


def _backend_in_use(engine: Engine, settings: PathSettings, file: StorageFile) -> str:
    (name,) = (each.backend for each in engine.path_stats() if each.root == settings.root)
    # The engine gives buffered files to threads where the backend is for direct ones only.
    return "threads" if not file.is_direct and name in ("io_uring", "libaio") else name


def _samples_of(path: str, on_progress: OnProgress) -> OnSample:
    def on_sample(pattern: str, sample: Sample, total_bytes: int) -> None:
        on_progress(
            IoProgress(
                path=path,
                pattern=pattern,
                done_bytes=sample.num_bytes,
                total_bytes=total_bytes,
                bytes_per_s=sample.num_bytes / sample.at_s if sample.at_s else 0.0,
            )
        )

    return on_sample


def _latencies(stats: PathStats) -> dict[str, Any]:
    counters = stats.counters
    return {
        "in_flight_s": counters.in_flight_s,
        "read_requests": counters.read_requests,
        "write_requests": counters.write_requests,
        "read_by_power_of_two_us": list(counters.read_latencies),
        "write_by_power_of_two_us": list(counters.write_latencies),
    }


def _described(options: IoOptions) -> dict[str, Any]:
    values = asdict(options)
    return values | {"paths": [str(path) for path in options.paths]}
