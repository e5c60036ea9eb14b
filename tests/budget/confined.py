"""Runs of `offload train` in a memory cgroup of their own."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

MEMORY = Path("/sys/fs/cgroup/memory")


@contextlib.contextmanager
def memory_cgroup(name: str) -> Iterator[Path]:
    """Yields a memory cgroup without a limit; skips the test where none can be made."""
    group = MEMORY / f"offload-{name}-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made: {error}")
    try:
        yield group
    finally:
        group.rmdir()


def confine(group: Path, *, num_bytes: int) -> None:
    (group / "memory.limit_in_bytes").write_text(str(num_bytes))


def was_killed(group: Path) -> bool:
    return "oom_kill 0" not in (group / "memory.oom_control").read_text()


def train(
    example: Path, *overrides: str, run_dir: Path, cgroup: Path | None = None
) -> dict[str, Any]:
    """Runs an example in a process of its own, from its start in the cgroup; returns its result."""
    join = (lambda: (cgroup / "cgroup.procs").write_text(str(os.getpid()))) if cgroup else None
    command = [sys.executable, "-m", "offload", "train", str(example), *overrides, "--json"]
    done = subprocess.run(
        [*command, "--run-dir", str(run_dir)],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=join,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result
