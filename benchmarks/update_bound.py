"""The update phase against its bound: emulated paths, throttled ones, or the drive as it is.

    python benchmarks/update_bound.py [--parameters 1.5e8] [--steps 4] [--scale 1] DIRECTORY
    python benchmarks/update_bound.py --throttled DIRECTORY
    python benchmarks/update_bound.py --raw DIRECTORY

The I/O engine's fault backend gives two paths 400 and 200 MB/s each way, half and full duplex, and
a cache holds 0, 0.2 and 0.5 of the records; their bound is of the rates that the emulation keeps,
as it paces the engine's own calls and no other program's. With `--throttled` the kernel gives two
loop devices these rates, full duplex (needs root and cgroup v1); with `--raw` the drive is as it
is. Then fio reads one file and writes another between any two steps, for the drive with its best
setting of a sweep, whose block size and depth the engine has there too, and a copy past the caches
measures memory. Prints one JSON object, and each part of it on standard error when it is there.
"""

import argparse
import contextlib
import json
import os
import shutil
import statistics
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from fio import FioSetting
from fio_rates import SWEEP_MS, best_setting, laid_out, one_way, with_both_ways
from termination import exits_on_sigterm
from throttled_paths import throttled

from offload._native.optim import copy_rate_bytes_per_s
from offload.bench.update import bench_update
from offload.bench.update_options import UpdateOptions, made_up_layout
from offload.optim.kernels import load_kernels
from offload.plan.host_cut import plan_host
from offload.plan.machine import Machine, PathRates
from offload.plan.machine_profile import VARIABLE, MachineProfile, PathProfile, read_profile
from offload.plan.window import WINDOW_BYTES, window_bytes_for
from offload.runs.probe import ProbeSize, probe_update
from offload.storage.engine import Engine
from offload.storage.faults import FaultPlan
from offload.storage.measured import measured_settings

MB = 10**6
MIB = 1 << 20
RATES = (400, 200)
THROTTLED_FIO_BYTES = 128 * MIB
THROTTLED_FIO = FioSetting(block="256k")
THROTTLED_FIO_MS = 2000
"""A limit is kept over slices of a tenth of a second, and one more of them after a pause: in 600 ms
and with 16 MiB in flight fio has 220 MB/s of 200, so in 2 s and with 4 MiB 200 to 207."""
RAW_FIO_MS = 1500
"""About as long as a step."""


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--parameters", type=float, default=1.5e8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--scale", type=float, default=1.0, help="Of the emulated rates.")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.2, 0.5])
    parser.add_argument("--fio-ms", type=int, help="Of each of fio's measurements.")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--throttled", action="store_true", help="Loop devices, against fio.")
    kind.add_argument("--raw", action="store_true", help="The drive as it is, against fio.")
    parser.add_argument("--order", choices=("alternating", "resident"), default="alternating")
    parser.add_argument("--striping", default="adaptive")
    parser.add_argument(
        "--overlap", choices=("none", "forward", "backward", "both"), default="none"
    )
    parser.add_argument("--window", type=int, help="MiB of records in flight; else as of runs.")
    parser.add_argument("--compute-s", type=float, default=0.0)
    arguments = parser.parse_args()
    if arguments.overlap != "none":
        arguments.order = "resident"
    os.environ[VARIABLE] = ""  # what is known of the drive is no property of paths made on it
    with exits_on_sigterm():
        measured = measure_kind(arguments)
    json.dump({"parameters": int(arguments.parameters), **measured}, sys.stdout, indent=2)
    print()


def measure_kind(arguments):
    if arguments.throttled:
        rates = [rate * arguments.scale for rate in RATES]
        size_bytes = int(arguments.parameters * 22) + 1000 * MIB
        with throttled(arguments.directory.absolute(), rates, size_bytes=size_bytes) as paths:
            mounts = [path.mount for path in paths]
            with all_laid_out(mounts, size=THROTTLED_FIO_BYTES) as files:
                ms = arguments.fio_ms or THROTTLED_FIO_MS
                return against_fio(files, arguments, setting=THROTTLED_FIO, ms=ms)
    with work_directories(arguments.directory) as paths:
        if not arguments.raw:
            return emulated(paths, arguments)
        # As many bytes as a version of the state has: what caches below keep of it, they keep here.
        state_bytes = max(round(arguments.parameters * 10 / MIB), 64) * MIB
        with all_laid_out(paths[:1], size=state_bytes) as files:
            ms = arguments.fio_ms or RAW_FIO_MS
            setting = best_setting(files[0], ms=min(ms, SWEEP_MS))
            with settings_of_fio(files[0], setting, ms=ms):
                return against_fio(files, arguments, setting=setting, ms=ms)


@contextlib.contextmanager
def settings_of_fio(files, setting, *, ms):
    """Has the engine take fio's block size, and as many requests of both directions together."""
    rates = FioInTurns([files], setting=setting, ms=ms).rates_now()[0]
    with Engine() as engine:
        backend = engine.name
    measured = PathProfile(
        path=rates.path,
        backend=backend,
        block_bytes=setting.block_bytes,
        queue_depth=2 * setting.depth,
        direct=True,
        read_bytes_per_s=rates.read_bytes_per_s,
        write_bytes_per_s=rates.write_bytes_per_s,
        mixed_bytes_per_s=rates.mixed_bytes_per_s,
        measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:
        file.write(MachineProfile(paths=(measured,)).to_toml())
        file.flush()
        os.environ[VARIABLE] = file.name
        try:
            yield
        finally:
            os.environ[VARIABLE] = ""


@contextlib.contextmanager
def all_laid_out(paths, *, size):
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(laid_out(path, size=size)) for path in paths]


@contextlib.contextmanager
def work_directories(directory):
    paths = [Path(tempfile.mkdtemp(dir=directory)) for _ in RATES]
    try:
        yield paths
    finally:
        for path in paths:
            shutil.rmtree(path, ignore_errors=True)


def emulated(paths, arguments):
    found = {}
    for duplex in ("half", "full"):
        rates = [round(rate * MB * arguments.scale) for rate in RATES]
        faults = [
            FaultPlan(
                read_bytes_per_s=rate, write_bytes_per_s=rate, is_half_duplex=duplex == "half"
            )
            for rate in rates
        ]
        mixed = [rate // 2 if duplex == "half" else rate for rate in rates]
        for share in arguments.shares:
            machine = memory_of(
                PathRates(
                    path=str(path),
                    read_bytes_per_s=rate,
                    write_bytes_per_s=rate,
                    mixed_bytes_per_s=both,
                )
                for path, rate, both in zip(paths, rates, mixed, strict=True)
            )
            report = measure(paths, arguments, share, machine=machine, faults=faults)
            found[f"{duplex} duplex, f = {share}"] = noted(figures(report))
    return found


def against_fio(files, arguments, *, setting, ms):
    """Each step against what fio and the memory gave right before it and right after it."""
    found = {"fio_setting": str(setting), "engine_settings": engine_settings(files)}
    paths = [each.read.parent for each in files]
    for share in arguments.shares:
        fio = FioInTurns(files, setting=setting, ms=ms)
        machines = [fio.machine_now()]
        report = measure(
            paths,
            arguments,
            share,
            machine=machines[0],
            on_step=lambda *_, fio=fio, machines=machines: machines.append(fio.machine_now()),
        )
        found[f"f = {share}"] = noted(figures(report) | by_step(report, machines))
    return found


def engine_settings(files):
    found = [measured_settings(each.read.parent) for each in files]
    return [
        f"{each.backend}, {each.block_bytes >> 20} MiB x {each.queue_depth}"
        for settings in found
        for each in settings
    ]


class FioInTurns:
    """Measures each direction alone once, then both at once whenever asked."""

    def __init__(self, files, *, setting, ms):
        self._files = list(files)
        self._options = {"setting": setting, "ms": ms}
        self._alone = [
            tuple(one_way(each, rw, **self._options) for rw in ("read", "write")) for each in files
        ]

    def rates_now(self):
        rates = [
            with_both_ways(each, alone, **self._options)
            for each, alone in zip(self._files, self._alone, strict=True)
        ]
        self._files = [each.swapped() for each in self._files]
        return rates

    def machine_now(self):
        return memory_of(self.rates_now())


def noted(figures):
    """Shows at once, on standard error, what minutes have measured."""
    print(json.dumps(figures), file=sys.stderr, flush=True)
    return figures


def by_step(report, machines):
    """Returns medians over the steps; warm-up steps have machines too."""
    steps = report.steps
    machines = machines[-len(steps) - 1 :]
    bounds_s = [
        (step_bound_s(report, before, step) + step_bound_s(report, after, step)) / 2
        for step, before, after in zip(steps, machines, machines[1:], strict=False)
    ]
    ratios = [bound_s / step.update_s for step, bound_s in zip(steps, bounds_s, strict=True)]
    return {
        "update_bound_s": statistics.median(bounds_s),
        "update_achieved_over_bound": statistics.median(ratios),
        "by_step": [round(each, 3) for each in ratios],
        "each_way_mb_per_s_by_step": [
            round((step.read_bytes + step.write_bytes) / 2 / step.update_s / MB) for step in steps
        ],
        "fio": [[rates_of(path) for path in machine.paths] for machine in machines],
    }


def step_bound_s(report, machine, step):
    moved = {"read_bytes": step.read_bytes, "write_bytes": step.write_bytes}
    num_parameters = round(report.parameters_per_s * report.update_s)
    memory_s = machine.memory_s(num_parameters=num_parameters, **moved)
    return max(machine.transfer_s(**moved), memory_s)


def rates_of(rates):
    return {
        "read_mb_per_s": round(rates.read_bytes_per_s / MB),
        "write_mb_per_s": round(rates.write_bytes_per_s / MB),
        "mixed_mb_per_s": round(rates.mixed_bytes_per_s / MB),
    }


def measure(paths, arguments, share, *, machine, faults=(), on_step=None):
    parameters = int(arguments.parameters)
    order = arguments.order if share or arguments.overlap != "none" else "sequential"
    window = None if arguments.window is None else arguments.window * MIB
    window_bytes = window_bytes_for(window, paths, read_profile())
    return bench_update(
        UpdateOptions(
            parameters=parameters,
            paths=paths,
            host_memory_bytes=memory_for(parameters, share, window_bytes=window_bytes),
            order=order,
            striping=arguments.striping,
            overlap=arguments.overlap,
            compute_s=arguments.compute_s,
            window_bytes=window_bytes,
            steps=arguments.steps,
            machine=machine,
            faults=faults,
        ),
        on_step=on_step,
    )


def memory_for(parameters, share, *, window_bytes=WINDOW_BYTES):
    """Returns the least memory whose cache holds `share` of the records."""
    layout = made_up_layout(parameters, codec="split")
    wanted = round(share * len(layout.records))
    if not wanted:
        return 4 * parameters + window_bytes + 90 * MIB
    low, high = 4 * parameters, 40 * parameters + 1000 * MIB
    while high - low > MIB:
        middle = (low + high) // 2
        plan = plan_host(
            layout,
            budget_bytes=middle,
            parameters="host",
            optimizer="storage",
            keeps_records=True,
            window_bytes=window_bytes,
        )
        low, high = (middle, high) if plan.num_cached < wanted else (low, middle)
    return high


def memory_of(paths):
    """Returns the machine of these paths, with the rates of memory measured now."""
    size = ProbeSize(file_bytes=0, memory_bytes=128 * MIB)
    rate = probe_update(load_kernels(), codec="split", dtype="bfloat16", size=size, rule="adamw")
    return Machine(
        paths=tuple(paths),
        copy_bytes_per_s=copy_rate_bytes_per_s(),
        update_parameters_per_s=rate,
    )


def figures(report):
    rates = [step.read_bytes / step.update_s for step in report.steps if step.update_s]
    return {
        "update_s": report.update_s,
        "step_s": report.step_s,
        "update_bound_s": report.update_bound_s,
        "update_achieved_over_bound": report.update_achieved_over_bound,
        "achieved_over_bound": report.achieved_over_bound,
        "cache_hit_rate": report.cache_hit_rate,
        "spread": max(rates) / min(rates),
        "each_way_mb_per_s": statistics.median(rates) / MB,
    }


if __name__ == "__main__":
    main()
