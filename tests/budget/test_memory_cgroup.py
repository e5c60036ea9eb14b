"""A run stays within the RSS rule: measured by itself, and enforced by a memory cgroup.

The rule: peak RSS is at most the RSS before the run, 1.05 times the host budget, and the peak of
activations. 1.05 leaves room for transient gradients of one unit and for the heap's holes.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from budget.confined import confine, memory_cgroup, train, was_killed

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.toml"

pytestmark = [pytest.mark.slow, pytest.mark.alone]


@pytest.fixture
def cgroup() -> Iterator[Path]:
    with memory_cgroup("test") as group:
        yield group


def test_quickstart_keeps_the_rss_rule_within_a_cgroup_of_that_size(
    tmp_path: Path, cgroup: Path
) -> None:
    free = train(EXAMPLE, "train.steps=2", run_dir=tmp_path / "free")
    budget = free["host_budget_bytes"]
    allowed = int(1.05 * budget) + free["rss_baseline_bytes"] + free["activation_peak_bytes"]
    confine(cgroup, num_bytes=allowed)

    confined = train(EXAMPLE, "train.steps=2", run_dir=tmp_path / "confined", cgroup=cgroup)

    assert budget == 400 << 20
    assert free["host_peak_bytes"] <= budget
    assert free["rss_peak_bytes"] <= allowed
    assert confined["rss_peak_bytes"] <= allowed
    assert confined["state_digest"] == free["state_digest"]
    assert not was_killed(cgroup)
