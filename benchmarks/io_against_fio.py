#!/usr/bin/env python3
"""Compares `offload bench io` with fio on one path, in interleaved pairs.

    .venv/bin/python benchmarks/io_against_fio.py DIRECTORY [--size 1GiB] [--pairs 9] [--json FILE]

First fio is swept once over block size, queue depth and engine for its best setting of reads and
of writes. Then each pair runs fio with that setting, and the I/O engine with the same block size
and depth and its own best backend, in an order that alternates. Both go through O_DIRECT over the
same file, laid out before, and end writes with fsync. The result is the median of the ratios of
the pairs.

Leaves nothing in DIRECTORY. Exit code 1 if a ratio misses its mark.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fio import FioSetting, run_fio

from offload.bench.bench_file import bench_file
from offload.bench.environment import describe_environment
from offload.bench.stream import Budget, Stream
from offload.sizes import GIB, format_size, parse_size
from offload.storage.engine import Engine, PathSettings
from offload.storage.file import StorageFile
from offload.storage.mounts import find_mount
from offload.storage.paths import BACKENDS
from offload.storage.transfer import Operation

BLOCKS = ("128k", "512k", "1m", "4m", "8m")
DEPTHS = (1, 4, 16, 32, 64)
ENGINES = ("libaio", "io_uring")
COMPILED = BACKENDS[:-1]
CHOICE_ROUNDS = 3
MIN_RATE_RATIO = 0.98
MAX_CPU_RATIO = 1.20


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Rate and CPU time of one run."""

    bytes_per_s: float
    cpu_s_per_gib: float


def main() -> int:
    options = parse_arguments()
    with tempfile.TemporaryDirectory(prefix=".fio-", dir=options.directory) as folder:
        file = Path(folder, "file")
        best = {rw: sweep(file, rw, options) for rw in ("write", "read")}
    result = compare(best, options)
    report(result)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0 if all(each["reached"] for each in result["comparisons"].values()) else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--size", type=parse_size, default=GIB)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument(
        "--sweep-s", type=float, default=0.5, help="seconds of each run of the sweep"
    )
    parser.add_argument("--backend", default="auto", help="of the I/O engine")
    parser.add_argument(
        "--fio-option",
        action="append",
        default=[],
        metavar="--NAME=VALUE",
        help="one more for fio, such as `--fio-option=--registerfiles`",
    )
    parser.add_argument("--quick", action="store_true", help="a small sweep: tries the script")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def measure_fio(file: Path, rw: str, setting: FioSetting, size: int, *options: str) -> Run:
    job = run_fio(file, rw, setting, size=size, options=options)
    moved = job[rw]["io_bytes"]
    cpu_s = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return Run(bytes_per_s=job[rw]["bw_bytes"], cpu_s_per_gib=cpu_s / moved * GIB)


def sweep(file: Path, rw: str, options: argparse.Namespace) -> FioSetting:
    """Returns fio's best setting."""
    measure_fio(file, "write", FioSetting(engine="libaio", block="4m", depth=8), options.size)
    runtime = f"--runtime={round(1000 * options.sweep_s)}ms"
    timed = ("--time_based", runtime, "--end_fsync=1", *options.fio_option)
    found = {}
    for block in ("1m",) if options.quick else BLOCKS:
        for depth in (4,) if options.quick else DEPTHS:
            for engine in ENGINES:
                setting = FioSetting(engine=engine, block=block, depth=depth)
                found[setting] = measure_fio(file, rw, setting, options.size, *timed).bytes_per_s
    finalists = sorted(found, key=found.__getitem__, reverse=True)[:4]
    rounds = [
        [measure_fio(file, rw, each, options.size, *timed).bytes_per_s for each in finalists]
        for _ in range(3)
    ]
    medians = [statistics.median(rates) for rates in zip(*rounds, strict=True)]
    best = finalists[medians.index(max(medians))]
    show(
        f"fio's best {rw}: {best.engine}, {best.block} x {best.depth}, "
        f"{max(medians) / 1e9:.2f} GB/s"
    )
    return best


def compare(best: dict[str, FioSetting], options: argparse.Namespace) -> dict[str, Any]:
    comparisons = {}
    for rw, setting in best.items():
        with bench_file(options.directory, buffered=False) as file, ExitStack() as stack:
            streams = {
                name: open_stream(stack, name, file, setting, options)
                for name in ([options.backend] if options.backend != "auto" else COMPILED)
            }
            first = next(iter(streams.values()))
            first.move((Operation.WRITE,), Budget(first.size_bytes), flush=True)
            backend = choose_backend(streams, rw)
            stream = streams[backend]
            # The very file: two files may lie on places of different speed.
            same = Path(f"/proc/{os.getpid()}/fd/{file.fd}")
            pairs = [run_pair(i, rw, setting, same, stream, options) for i in range(options.pairs)]
            comparisons[rw] = judge(setting, pairs) | {"backend": backend}
    return {
        "comparisons": comparisons,
        "size_bytes": options.size,
        "file_system": find_mount(options.directory).kind,
        "environment": describe_environment()
        | {"command": " ".join(sys.argv), "fio": fio_version()},
    }


def open_stream(
    stack: ExitStack,
    backend: str,
    file: StorageFile,
    setting: FioSetting,
    options: argparse.Namespace,
) -> Stream:
    settings = PathSettings(
        root=options.directory,
        backend=backend,
        block_bytes=setting.block_bytes,
        queue_depth=setting.depth,
    )
    return Stream(
        stack.enter_context(Engine(paths=[settings])),
        file,
        size_bytes=options.size,
        block_bytes=setting.block_bytes,
        queue_depth=setting.depth,
    )


def choose_backend(streams: dict[str, Stream], rw: str) -> str:
    """Returns the backend with the best median of a few runs in turn, as `--tune` does."""
    rounds = [
        {name: run_engine(stream, rw).bytes_per_s for name, stream in streams.items()}
        for _ in range(CHOICE_ROUNDS)
    ]
    medians = {name: statistics.median(each[name] for each in rounds) for name in streams}
    show(f"ours, {rw}: " + ", ".join(f"{n} {rate / 1e9:.2f} GB/s" for n, rate in medians.items()))
    return max(medians, key=medians.__getitem__)


def run_engine(stream: Stream, rw: str) -> Run:
    stream.rewind()
    operation = Operation.READ if rw == "read" else Operation.WRITE
    moved = stream.move((operation,), Budget(stream.size_bytes), flush=rw == "write")
    return Run(
        bytes_per_s=moved.num_bytes / moved.seconds,
        cpu_s_per_gib=moved.cpu_s / moved.num_bytes * GIB,
    )


def run_pair(
    index: int,
    rw: str,
    setting: FioSetting,
    file: Path,
    stream: Stream,
    options: argparse.Namespace,
) -> tuple[Run, Run]:
    """Returns fio's run and ours, in alternating order."""
    flush = ("--end_fsync=1",) if rw == "write" else ()

    def fio() -> Run:
        return measure_fio(file, rw, setting, options.size, *flush, *options.fio_option)

    def ours() -> Run:
        return run_engine(stream, rw)

    if index % 2:
        our_run = ours()
        return fio(), our_run
    return fio(), ours()


def judge(setting: FioSetting, pairs: list[tuple[Run, Run]]) -> dict[str, Any]:
    rate_ratios = [ours.bytes_per_s / fio.bytes_per_s for fio, ours in pairs]
    # Of a run of some milliseconds fio may find no CPU time at all.
    counted = [(fio, ours) for fio, ours in pairs if fio.cpu_s_per_gib]
    cpu_ratios = [ours.cpu_s_per_gib / fio.cpu_s_per_gib for fio, ours in counted]
    rate = statistics.median(rate_ratios)
    cpu = statistics.median(cpu_ratios) if cpu_ratios else None
    return {
        "setting": asdict(setting),
        "pairs": [{"fio": asdict(fio), "ours": asdict(ours)} for fio, ours in pairs],
        "fio_bytes_per_s": statistics.median(fio.bytes_per_s for fio, _ in pairs),
        "bytes_per_s": statistics.median(ours.bytes_per_s for _, ours in pairs),
        "ratio_to_fio": rate,
        "ratio_spread": [min(rate_ratios), max(rate_ratios)],
        "fio_cpu_s_per_gib": statistics.median(fio.cpu_s_per_gib for fio, _ in pairs),
        "cpu_s_per_gib": statistics.median(ours.cpu_s_per_gib for _, ours in pairs),
        "cpu_ratio_to_fio": cpu,
        "reached": rate >= MIN_RATE_RATIO and cpu is not None and cpu <= MAX_CPU_RATIO,
    }


def report(result: dict[str, Any]) -> None:
    size = format_size(result["size_bytes"])
    for rw, found in result["comparisons"].items():
        low, high = found["ratio_spread"]
        ratio = found["cpu_ratio_to_fio"]
        cpu = "not known" if ratio is None else f"{ratio:.2f}"
        show(
            f"{rw} of {size}: fio {found['fio_bytes_per_s'] / 1e9:.2f}, ours "
            f"{found['bytes_per_s'] / 1e9:.2f} GB/s, median ratio {found['ratio_to_fio']:.3f} "
            f"({low:.2f} to {high:.2f}); CPU s/GiB fio {found['fio_cpu_s_per_gib']:.3f}, ours "
            f"{found['cpu_s_per_gib']:.3f}, ratio {cpu}; "
            f"{'reached' if found['reached'] else 'MISSED'}"
        )


def fio_version() -> str:
    return subprocess.run(["fio", "--version"], capture_output=True, text=True).stdout.strip()


def show(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
