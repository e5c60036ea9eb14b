"""A model of 1.1 B parameters trains in a memory cgroup of 3 GiB, on a few cores and one drive.

Minutes, and about 29 GB below the temporary directory, which are given back at the end.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from budget.confined import confine, memory_cgroup, train, was_killed

EXAMPLE = Path(__file__).parents[2] / "examples" / "one_billion_in_3gib.toml"
SPACE_BYTES = 32 << 30

pytestmark = pytest.mark.stress


@pytest.fixture
def cgroup() -> Iterator[Path]:
    with memory_cgroup("billion") as group:
        confine(group, num_bytes=3 << 30)
        yield group


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    if shutil.disk_usage(tmp_path).free < SPACE_BYTES:
        pytest.skip(f"less than {SPACE_BYTES} bytes are free in {tmp_path}")
    yield tmp_path / "run"
    shutil.rmtree(tmp_path / "run", ignore_errors=True)


def test_one_billion_parameters_train_in_three_gibibytes(run_dir: Path, cgroup: Path) -> None:
    result = train(EXAMPLE, "train.steps=8", run_dir=run_dir, cgroup=cgroup)

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
    assert not was_killed(cgroup)
