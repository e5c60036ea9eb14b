"""The update phase against its bound: two paths of emulated rates, or the drive as it is.

    python benchmarks/update_bound.py [--parameters 1.5e8] [--steps 4] [--scale 1] DIRECTORY
    python benchmarks/update_bound.py --raw DIRECTORY

Without `--raw` the I/O engine's fault backend gives two paths 400 and 200 MB/s each way, half and
full duplex, and a cache holds 0, 0.2 and 0.5 of the records. With it fio measures the drive before
and after each measurement. The rates of memory are measured in the same run in either case.
Prints one JSON object.
"""

import argparse
import contextlib
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from termination import exits_on_sigterm

from offload._native.optim import copy_rate_bytes_per_s
from offload.bench.update import bench_update
from offload.bench.update_options import UpdateOptions, made_up_layout
from offload.optim.kernels import load_kernels
from offload.plan.host import plan_host
from offload.plan.machine import Machine, PathRates
from offload.runs.probe import ProbeSize, probe_update
from offload.storage.faults import FaultPlan

MB = 10**6
MIB = 1 << 20
RATES = (400, 200)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--parameters", type=float, default=1.5e8)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--scale", type=float, default=1.0, help="Of the emulated rates.")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.2, 0.5])
    parser.add_argument("--raw", action="store_true", help="The drive as it is, against fio.")
    parser.add_argument("--overlap", choices=("none", "forward"), default="none")
    parser.add_argument("--compute-s", type=float, default=0.0)
    arguments = parser.parse_args()
    with exits_on_sigterm(), work_directories(arguments.directory) as paths:
        measured = raw(paths[:1], arguments) if arguments.raw else throttled(paths, arguments)
    json.dump({"parameters": int(arguments.parameters), **measured}, sys.stdout, indent=2)
    print()


@contextlib.contextmanager
def work_directories(directory):
    paths = [Path(tempfile.mkdtemp(dir=directory)) for _ in RATES]
    try:
        yield paths
    finally:
        for path in paths:
            shutil.rmtree(path, ignore_errors=True)


def throttled(paths, arguments):
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
            found[f"{duplex} duplex, f = {share}"] = figures(report)
    return found


def raw(paths, arguments):
    found = {}
    for share in arguments.shares:
        before = memory_of([fio_rates(paths[0])])
        report = measure(paths, arguments, share, machine=before)
        machine = before.best_of(memory_of([fio_rates(paths[0])]))
        both = machine.transfer_s(
            read_bytes=report.read_bytes_per_step, write_bytes=report.write_bytes_per_step
        )
        found[f"f = {share}"] = figures(report) | {
            "update_bound_s": both,
            "update_achieved_over_bound": both / report.update_s,
            "fio": rates_of(machine.paths[0]),
        }
    return found


def rates_of(rates):
    return {
        "read_mb_per_s": round(rates.read_bytes_per_s / MB),
        "write_mb_per_s": round(rates.write_bytes_per_s / MB),
        "mixed_mb_per_s": round(rates.mixed_bytes_per_s / MB),
    }


def measure(paths, arguments, share, *, machine, faults=()):
    parameters = int(arguments.parameters)
    order = "resident" if share or arguments.overlap != "none" else "sequential"
    return bench_update(
        UpdateOptions(
            parameters=parameters,
            paths=paths,
            host_memory_bytes=memory_for(parameters, share),
            order=order,
            overlap=arguments.overlap,
            compute_s=arguments.compute_s,
            steps=arguments.steps,
            machine=machine,
            faults=faults,
        )
    )


def memory_for(parameters, share):
    """Returns the least memory whose cache holds `share` of the records."""
    layout = made_up_layout(parameters, codec="split")
    wanted = round(share * len(layout.records))
    if not wanted:
        return 4 * parameters + 150 * MIB
    low, high = 4 * parameters, 40 * parameters + 1000 * MIB
    while high - low > MIB:
        middle = (low + high) // 2
        plan = plan_host(
            layout,
            budget_bytes=middle,
            parameters="host",
            optimizer="storage",
            keeps_records=True,
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


def fio_rates(path):
    rounds = [(fio(path, "read"), fio(path, "write"), fio(path, "rw")) for _ in range(2)]
    read, write, mixed = (max(rates) for rates in zip(*rounds, strict=True))
    return PathRates(
        path=str(path),
        read_bytes_per_s=read,
        write_bytes_per_s=write,
        mixed_bytes_per_s=mixed / 2,
    )


def fio(path, rw):
    """Returns the bytes/s of fio, both directions together."""
    file = path / "fio"
    command = [
        "fio", "--name=x", f"--filename={file}", "--size=512m", f"--rw={rw}", "--bs=1m",
        "--ioengine=libaio", "--iodepth=16", "--direct=1", "--thread", "--output-format=json",
        "--time_based", "--runtime=1500ms",
    ]  # fmt: skip
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    job = json.loads(text[text.index("{") :])["jobs"][0]
    file.unlink()
    return float(job["read"]["bw_bytes"] + job["write"]["bw_bytes"])


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
