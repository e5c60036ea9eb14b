"""Striping over paths of unequal rates: loop devices that the kernel throttles. Needs root.

    python benchmarks/throttled_paths.py [--parameters 1.5e8] [--steps 6] [--rounds 3] DIRECTORY

Makes file systems in DIRECTORY, measures, prints one JSON object and takes everything down again,
also after SIGTERM.
Reads and writes are throttled apart, each at the rate of the path; so the sum of the rates is what
an update could reach each way.
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from termination import exits_on_sigterm

from offload.bench.update import bench_update
from offload.bench.update_options import UpdateOptions
from offload.plan.machine import Machine, PathRates
from offload.plan.machine_profile import VARIABLE

MB = 10**6
CGROUP_V1 = Path("/sys/fs/cgroup/blkio")


class ThrottledPath:
    """A file system on a loop device with a rate of its own."""

    def __init__(self, directory, name, *, rate, size_bytes, cgroup):
        self.mount = directory / name
        self._image = directory / f"{name}.img"
        self._size_bytes = size_bytes
        self._cgroup = cgroup
        self.rate = rate
        self._device = None

    def __enter__(self):
        try:
            self._set_up()
        except BaseException:  # SIGTERM too
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        with contextlib.suppress(Exception):
            run("umount", str(self.mount))
        if self._device is not None:
            run("losetup", "-d", self._device)
        self._image.unlink(missing_ok=True)
        with contextlib.suppress(FileNotFoundError):
            self.mount.rmdir()

    def _set_up(self):
        self.mount.mkdir(parents=True)
        run("fallocate", "-l", str(self._size_bytes), str(self._image))
        command = ("losetup", "-f", "--show", "--direct-io=on", str(self._image))
        self._device = run(*command).strip()
        # Without `nodiscard` the image would give its space back to the file system below.
        lazy = "lazy_itable_init=0,lazy_journal_init=0,nodiscard"
        run("mkfs.ext4", "-q", "-E", lazy, "-m0", self._device)
        run("mount", self._device, str(self.mount))
        self.set_rate(self.rate)

    def set_rate(self, rate):
        self.rate = rate
        number = Path(self._device).stat().st_rdev
        line = f"{os.major(number)}:{os.minor(number)} {round(rate * MB)}"
        for kind in ("read", "write"):
            (self._cgroup / f"blkio.throttle.{kind}_bps_device").write_text(line)


def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@contextlib.contextmanager
def throttled(directory, rates, *, size_bytes):
    """Yields paths of these rates in MB/s; this process is throttled while they are there."""
    os.environ[VARIABLE] = ""  # what is known of the drive is no property of paths made on it
    with exits_on_sigterm(), _throttled(directory, rates, size_bytes=size_bytes) as paths:
        yield paths


@contextlib.contextmanager
def _throttled(directory, rates, *, size_bytes):
    cgroup = CGROUP_V1 / f"offload-bench-{os.getpid()}"
    cgroup.mkdir()
    try:
        with contextlib.ExitStack() as stack:
            paths = [
                stack.enter_context(
                    ThrottledPath(
                        directory, f"path-{i}", rate=rate, size_bytes=size_bytes, cgroup=cgroup
                    )
                )
                for i, rate in enumerate(rates)
            ]
            (cgroup / "cgroup.procs").write_text(str(os.getpid()))
            yield paths
            (CGROUP_V1 / "cgroup.procs").write_text(str(os.getpid()))
    finally:
        (CGROUP_V1 / "cgroup.procs").write_text(str(os.getpid()))
        time.sleep(0.2)
        cgroup.rmdir()


def measure(paths, arguments, *, striping, steps, on_step=None):
    options = UpdateOptions(
        parameters=int(arguments.parameters),
        paths=[path.mount for path in paths],
        host_memory_bytes=int(arguments.parameters * 4) + (200 << 20),
        striping=striping,
        steps=steps,
        machine=machine_of(paths),
    )
    return bench_update(options, on_step=on_step)


def machine_of(paths):
    """Equal rates: nothing but what is measured in the run tells `adaptive` the paths apart."""
    rates = {"read_bytes_per_s": 3e8, "write_bytes_per_s": 3e8, "mixed_bytes_per_s": 3e8}
    return Machine(
        paths=tuple(PathRates(path=str(path.mount), **rates) for path in paths),
        copy_bytes_per_s=1e10,
        update_parameters_per_s=1e9,
    )


def rate_of(report, steps=None):
    """MB/s each way: the bytes of a step over the time of its update."""
    chosen = report.steps if steps is None else steps
    return statistics.median(step.read_bytes / step.update_s for step in chosen) / MB


def steady(paths, arguments, *, stripings):
    """Rates with unchanged paths, the stripings one after the other in each round."""
    total = sum(path.rate for path in paths)
    found = {striping: [] for striping in stripings}
    shares = {}
    for _ in range(arguments.rounds):
        for striping in stripings:
            report = measure(paths, arguments, striping=striping, steps=arguments.steps)
            found[striping].append(rate_of(report))
            written = [path.write_bytes for path in report.paths]
            shares[striping] = [round(amount / sum(written), 3) for amount in written]
    return {
        striping: {
            "each_way_mb_per_s": round(statistics.median(rates), 1),
            "of_the_sum": round(statistics.median(rates) / total, 3),
            "spread": round(max(rates) / min(rates), 3),
            "shares": shares[striping],
        }
        for striping, rates in found.items()
    }


def after_a_change(paths, arguments, *, stripings):
    """Rates after the last path has lost half of its rate in mid-run, from the third step on."""
    first = paths[-1].rate
    found = {striping: [] for striping in stripings}
    curve = {}
    for _ in range(arguments.rounds):
        for striping in stripings:
            changes_after = 4

            def on_step(number, _, changes_after=changes_after):
                if number == changes_after:
                    paths[-1].set_rate(first / 2)

            report = measure(
                paths, arguments, striping=striping, steps=arguments.steps + 4, on_step=on_step
            )
            paths[-1].set_rate(first)
            after = report.steps[changes_after - 2 :]  # two warm-up steps are not in it
            found[striping].append(rate_of(report, after[2:]))  # the third step after it and later
            curve[striping] = [round(s.read_bytes / s.update_s / MB) for s in report.steps]
    total = sum(path.rate for path in paths) - first / 2
    rates = {striping: statistics.median(values) for striping, values in found.items()}
    return {
        striping: {
            "each_way_mb_per_s": round(rate, 1),
            "of_the_new_sum": round(rate / total, 3),
            "mb_per_s_by_step": curve[striping],
        }
        for striping, rate in rates.items()
    } | {"ratio_to_modulo": round(rates[stripings[0]] / rates[stripings[-1]], 2)}


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--parameters", type=float, default=1.5e8)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="Of all rates.")
    parser.add_argument("--only", choices=("two", "change", "three"))
    arguments = parser.parse_args()
    directory = arguments.directory.absolute()
    scale = arguments.scale
    result = {"parameters": int(arguments.parameters), "rounds": arguments.rounds, "scale": scale}
    size_bytes = int(arguments.parameters * 11) + (400 << 20)
    if arguments.only != "three":
        with throttled(directory, (400 * scale, 200 * scale), size_bytes=size_bytes) as paths:
            stripings = ("adaptive", "modulo:2:1")
            if arguments.only != "change":
                result["two_paths_400_200"] = steady(paths, arguments, stripings=stripings)
            if arguments.only != "two":
                result["second_path_halved"] = after_a_change(paths, arguments, stripings=stripings)
    if arguments.only in (None, "three"):
        rates = (400 * scale, 300 * scale, 100 * scale)
        with throttled(directory, rates, size_bytes=int(size_bytes * 0.7)) as paths:
            stripings = ("adaptive", "modulo:4:3:1")
            result["three_paths_400_300_100"] = steady(paths, arguments, stripings=stripings)
    json.dump(result, sys.stdout, indent=2)
    print()


if __name__ == "__main__":
    main()
