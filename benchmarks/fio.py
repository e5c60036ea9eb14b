"""One run of fio on one file: settings in, fio's own figures out."""

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.sizes import parse_size


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
    command = [
        "fio", "--name=x", f"--filename={file}", f"--size={size}", f"--rw={rw}",
        f"--bs={setting.block}", f"--ioengine={setting.engine}", f"--iodepth={setting.depth}",
        "--direct=1", "--thread", "--output-format=json", *options,
    ]  # fmt: skip
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    job: dict[str, Any] = json.loads(text[text.index("{") :])["jobs"][0]
    return job
