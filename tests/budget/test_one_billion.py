"""A model of 1.1 B parameters trains in a memory cgroup of 3 GiB, on a few cores and one drive.

Minutes, and about 29 GB below the temporary directory, which are given back at the end.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "one_billion_in_3gib.toml"
MEMORY = Path("/sys/fs/cgroup/memory")
SPACE_BYTES = 32 << 30

pytestmark = pytest.mark.stress


@pytest.fixture
def cgroup() -> Iterator[Path]:
    group = MEMORY / f"offload-billion-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(3 << 30))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made: {error}")
    yield group
    group.rmdir()


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    if shutil.disk_usage(tmp_path).free < SPACE_BYTES:
        pytest.skip(f"less than {SPACE_BYTES} bytes are free in {tmp_path}")
    yield tmp_path / "run"
    shutil.rmtree(tmp_path / "run", ignore_errors=True)


def test_one_billion_parameters_train_in_three_gibibytes(run_dir: Path, cgroup: Path) -> None:
    command = [sys.executable, "-m", "offload", "train", str(EXAMPLE), "train.steps=8", "--json"]

    done = subprocess.run(
        [*command, "--run-dir", str(run_dir)],
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=lambda: (cgroup / "cgroup.procs").write_text(str(os.getpid())),
    )

    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    print(json.dumps(result, indent=1))
    budget = result["host_budget_bytes"]
    assert result["parameters"] > 1_100_000_000
    # One step's loss is that of 256 bytes of text; validation's is of the same text each time.
    assert result["validation_loss_after"] < result["validation_loss_before"] - 0.5
    assert budget == 2 << 30
    assert result["host_peak_bytes"] <= budget
    allowed = int(1.05 * budget) + result["rss_baseline_bytes"] + result["activation_peak_bytes"]
    assert result["rss_peak_bytes"] <= allowed
    for direction in ("read", "write"):
        moved = result[f"{direction}_bytes_per_step"]
        assert moved == pytest.approx(result[f"formula_{direction}_bytes_per_step"], rel=0.01)
    assert "oom_kill 0" in (cgroup / "memory.oom_control").read_text()
