#!/usr/bin/env python3
"""Measures two paths of different rates together: do they reach the sum?

    sudo .venv/bin/python benchmarks/io_unequal_paths.py DIRECTORY [--json FILE]

As root, makes two loop devices over files in DIRECTORY (direct I/O to the file below), puts ext4
on each, and throttles them in a cgroup of this process: 400 and 200 MB/s, reads and writes each, as
`--rates` says. Runs `offload bench io` on both, alone and together, and removes all of it, also
after an error or Ctrl-C. Works with the blkio controller of cgroup v1 and with cgroup v2.

Exit code 1 if the sum is missed, 77 if this is not possible here.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from offload.sizes import GIB, parse_size

MIN_SHARE = 0.95
NOT_POSSIBLE = 77
CGROUPS = Path("/sys/fs/cgroup")


def main() -> int:
    options = parse_arguments()
    if os.geteuid() != 0 or not throttling_is_there():
        print("needs root and the blkio or io controller of a cgroup", file=sys.stderr)
        return NOT_POSSIBLE
    with ExitStack() as stack:
        folder = Path(
            stack.enter_context(tempfile.TemporaryDirectory(prefix=".loop-", dir=options.directory))
        )
        roots, numbers = [], []
        for i in range(len(options.rates)):
            root, number = stack.enter_context(loop_file_system(folder, i, options.loop_size))
            roots.append(root)
            numbers.append(number)
        group = stack.enter_context(throttled_group(dict(zip(numbers, options.rates, strict=True))))
        result = bench(group, roots, options)
    summary = summarize(result, options.rates)
    if options.json is not None:
        options.json.write_text(json.dumps(summary | {"result": result}, indent=2) + "\n")
    for rw in ("write", "read"):
        found = summary[rw]
        print(
            f"{rw}: alone {[round(rate / 1e6) for rate in found['alone']]} MB/s, together "
            f"{found['together'] / 1e6:.0f} MB/s, {found['share_of_sum']:.3f} of the sum"
        )
    return 0 if all(summary[rw]["share_of_sum"] >= MIN_SHARE for rw in ("write", "read")) else 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--rates", type=int, nargs="+", default=[400_000_000, 200_000_000])
    parser.add_argument("--size", default="1GiB", help="of the file on each path")
    parser.add_argument("--loop-size", type=parse_size, default=3 * GIB // 2)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--bs", default="1MiB")
    parser.add_argument("--iodepth", default="8")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def run(*command: str | Path) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True)
    return done.stdout.strip()


@contextmanager
def loop_file_system(folder: Path, index: int, num_bytes: int) -> Iterator[tuple[Path, str]]:
    """Gives the directory of an ext4 on a loop device, and the device's number."""
    image, root = folder / f"{index}.img", folder / str(index)
    root.mkdir()
    with image.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
    device = run("losetup", "--find", "--show", "--direct-io=on", image)
    try:
        run("mkfs.ext4", "-q", "-m0", "-E", "lazy_itable_init=0,lazy_journal_init=0", device)
        run("mount", device, root)
        try:
            number = Path(device).stat().st_rdev
            yield root, f"{os.major(number)}:{os.minor(number)}"
        finally:
            run("umount", root)
    finally:
        run("losetup", "--detach", device)


@contextmanager
def throttled_group(rates: dict[str, int]) -> Iterator[Path]:
    """Gives a cgroup whose processes read and write the devices at no more than `rates`."""
    is_first_version = (CGROUPS / "blkio").is_dir()
    group = CGROUPS / ("blkio" if is_first_version else "") / f"offload-bench-{os.getpid()}"
    group.mkdir()
    try:
        for number, rate in rates.items():
            if is_first_version:
                for way in ("read", "write"):
                    (group / f"blkio.throttle.{way}_bps_device").write_text(f"{number} {rate}")
            else:
                (group / "io.max").write_text(f"{number} rbps={rate} wbps={rate}")
        yield group
    finally:
        group.rmdir()


def throttling_is_there() -> bool:
    if (CGROUPS / "blkio").is_dir():
        return True
    controllers = CGROUPS / "cgroup.subtree_control"
    return controllers.exists() and "io" in controllers.read_text().split()


def bench(group: Path, roots: list[Path], options: argparse.Namespace) -> dict[str, Any]:
    command = [
        sys.executable, "-m", "offload", "bench", "io", *map(str, roots), "--size", options.size,
        "--rw", "write,read", "--bs", options.bs, "--iodepth", options.iodepth,
        "--runs", str(options.runs), "--json",
    ]  # fmt: skip
    # The shell joins the group, so that every thread of the benchmark is in it.
    joined = ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh", *command]
    done = subprocess.run(joined, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def summarize(result: dict[str, Any], rates: list[int]) -> dict[str, Any]:
    summary: dict[str, Any] = {"rates": rates}
    for rw in ("write", "read"):
        alone = [path[f"{rw}_bytes_per_s"] for path in result["paths"]]
        together = result["together"][f"{rw}_bytes_per_s"]
        summary[rw] = {
            "alone": alone,
            "together": together,
            "share_of_sum": together / sum(alone),
            "share_of_limits": together / sum(rates),
        }
    return summary


if __name__ == "__main__":
    sys.exit(main())
