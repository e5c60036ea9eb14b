"""One run of fio: jobs in, fio's own figures out."""

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.sizes import parse_size

ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""fio's memory is malloc's. On small pages a request of 1 MiB has 256 segments, each of which costs
a virtual disk time, and some drives take fewer at once. The engine's arena is on huge pages, so
fio's should be: glibc 2.35 or newer asks for them, and gets them where the kernel gives them to who
asks (`madvise`)."""
HUGE_PAGE = "2m"


@dataclass(frozen=True, slots=True, kw_only=True)
class FioSetting:
    """One setting of fio; the default is near the best of most drives."""

    engine: str = "libaio"
    block: str = "1m"
    depth: int = 16

    def __str__(self) -> str:
        return f"{self.engine}, {self.block} x {self.depth}"

    @property
    def block_bytes(self) -> int:
        return parse_size({"k": "KiB", "m": "MiB"}[self.block[-1]].join([self.block[:-1], ""]))


def run_fio(
    file: Path, rw: str, setting: FioSetting, *, size: int, options: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Returns what fio says of its one job: past the page cache, over `size` bytes of `file`."""
    (job,) = run_fio_jobs([(file, rw)], setting, size=size, options=options)
    return job


def run_fio_jobs(
    jobs: list[tuple[Path, str]],
    setting: FioSetting,
    *,
    size: int,
    options: tuple[str, ...] = (),
) -> list[dict[str, Any]]:
    """Returns what fio says of each of its jobs, which run at the same time: as `run_fio`."""
    command = [
        "fio", f"--size={size}", f"--bs={setting.block}", f"--ioengine={setting.engine}",
        f"--iodepth={setting.depth}", "--direct=1", "--thread",
        f"--mem_align={HUGE_PAGE}", "--output-format=json", *options,
    ]  # fmt: skip
    for file, rw in jobs:
        command += [f"--name={rw}", f"--filename={file}", f"--rw={rw}"]
    text = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | ENVIRONMENT
    ).stdout
    found: list[dict[str, Any]] = json.loads(text[text.index("{") :])["jobs"]
    return found
