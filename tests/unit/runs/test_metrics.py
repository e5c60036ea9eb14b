import json
from pathlib import Path

import pytest

from offload.errors import StorageError, StoreError
from offload.runs.metrics import MetricsFile, StepMetrics, truncate_metrics
from offload.runs.run_directory import RESULT_FILE, RunDirectory

KEYS = (  # noqa: SIM905
    "step loss lr grad_norm tokens tokens_per_s step_s forward_s backward_s update_s other_s "
    "io_wait_s read_bytes write_bytes cache_hit_bytes host_peak_bytes device_peak_bytes rss_bytes "
    "bound_s achieved_over_bound committed"
).split()


def metrics(step, **changes):
    values = dict.fromkeys(KEYS, 1) | {"device_peak_bytes": None} | changes
    return StepMetrics(**(values | {"step": step}))


def test_lines_have_the_keys_that_scripts_rely_on(tmp_path):
    with MetricsFile(tmp_path / "metrics.jsonl") as file:
        file.append(metrics(1, loss=float("nan")))

    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert set(KEYS) <= set(line)
    assert line["loss"] is None


def test_truncation_drops_later_steps_and_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as file:
        for step in (1, 2, 3):
            file.append(metrics(step))
    path.write_text(path.read_text() + '{"step": 2, "lo')

    truncate_metrics(path, step=2)

    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_truncation_of_a_missing_file_makes_none(tmp_path):
    truncate_metrics(tmp_path / "metrics.jsonl", step=2)

    assert not list(tmp_path.iterdir())


def test_a_closed_file_refuses_lines(tmp_path):
    with pytest.raises(StoreError, match="closed"):
        MetricsFile(tmp_path / "metrics.jsonl").append(metrics(1))


def test_a_line_that_finds_no_room_is_an_error_that_names_its_step():
    with (
        pytest.raises(StorageError, match=r"the line of step 3, found No space left .* go on from"),
        MetricsFile(Path("/dev/full")) as file,
    ):
        file.append(metrics(3))


def test_a_result_that_finds_no_room_is_an_error_and_leaves_no_part_of_it(tmp_path):
    temporary = tmp_path / f"{RESULT_FILE}.tmp"
    temporary.symlink_to("/dev/full")
    directory = RunDirectory(path=tmp_path, stores=(), is_resumed=False)

    with pytest.raises(StorageError, match=r"result of a run that has ended, found No space left"):
        directory.write_result({"steps": 3}, has_steps=True)

    assert not any(tmp_path.iterdir())
