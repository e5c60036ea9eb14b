"""A run stays within the RSS rule: measured by itself, and enforced by a memory cgroup.

The rule: peak RSS is at most the RSS before the run, 1.05 times the host budget, and the peak of
activations. 1.05 leaves room for transient gradients of one unit and for the heap's holes.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.toml"
MEMORY = Path("/sys/fs/cgroup/memory")

pytestmark = pytest.mark.slow


def train(run_dir: Path, *, cgroup: Path | None = None) -> dict:
    join = (lambda: (cgroup / "cgroup.procs").write_text(str(os.getpid()))) if cgroup else None
    command = [sys.executable, "-m", "offload", "train", str(EXAMPLE), "train.steps=2", "--json"]
    done = subprocess.run(
        [*command, "--run-dir", str(run_dir)],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=join,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout)


@pytest.fixture
def cgroup() -> Iterator[Path]:
    group = MEMORY / f"offload-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made: {error}")
    yield group
    group.rmdir()


def test_quickstart_keeps_the_rss_rule_within_a_cgroup_of_that_size(
    tmp_path: Path, cgroup: Path
) -> None:
    free = train(tmp_path / "free")
    budget = free["host_budget_bytes"]
    allowed = int(1.05 * budget) + free["rss_baseline_bytes"] + free["activation_peak_bytes"]
    (cgroup / "memory.limit_in_bytes").write_text(str(allowed))

    confined = train(tmp_path / "confined", cgroup=cgroup)

    assert budget == 400 << 20
    assert free["host_peak_bytes"] <= budget
    assert free["rss_peak_bytes"] <= allowed
    assert confined["rss_peak_bytes"] <= allowed
    assert confined["state_digest"] == free["state_digest"]
    assert "oom_kill 0" in (cgroup / "memory.oom_control").read_text()
