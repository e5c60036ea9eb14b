"""A smoke run of the scripts in `benchmarks/`: they run, print their figures, leave nothing."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.alone]


def run_script(name, *arguments):
    command = [sys.executable, ROOT / "benchmarks" / name, *arguments]
    return subprocess.run(
        list(map(str, command)), cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.skipif(shutil.which("fio") is None, reason="there is no fio")
def test_the_comparison_with_fio_gives_ratios(tmp_path):
    (tmp_path / "path").mkdir()
    found = tmp_path / "found.json"

    done = run_script(
        "io_against_fio.py", tmp_path / "path", "--size", "16MiB", "--pairs", "3", "--quick",
        "--sweep-s", "0.1", "--json", found,
    )  # fmt: skip

    assert done.returncode in (0, 1), done.stderr  # 16 MiB say nothing about the ratio
    result = json.loads(found.read_text(encoding="utf-8"))
    for rw in ("write", "read"):
        assert len(result["comparisons"][rw]["pairs"]) == 3
        assert result["comparisons"][rw]["ratio_to_fio"] > 0
    assert list((tmp_path / "path").iterdir()) == []


def test_unequal_paths_are_set_up_measured_and_removed(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("needs root")
    found = tmp_path / "found.json"
    (tmp_path / "path").mkdir()

    done = run_script(
        "io_unequal_paths.py", tmp_path / "path", "--size", "32MiB", "--loop-size", "192MiB",
        "--runs", "1", "--json", found,
    )  # fmt: skip

    if done.returncode == 77 or "'losetup'" in done.stderr:
        pytest.skip(f"loop devices or their limits are not allowed here: {done.stderr}")
    assert done.returncode in (0, 1), done.stderr
    assert json.loads(found.read_text(encoding="utf-8"))["read"]["together"] > 0
    assert list((tmp_path / "path").iterdir()) == []


def test_an_update_on_emulated_paths_is_compared_with_its_bound(tmp_path):
    done = run_script(
        "update_bound.py", tmp_path, "--parameters", "3e6", "--steps", "1", "--shares", "0"
    )

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert all(found[f"{d} duplex, f = 0.0"]["update_s"] > 0 for d in ("half", "full"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(shutil.which("fio") is None, reason="there is no fio")
def test_an_update_on_the_drive_as_it_is_is_compared_with_fio_step_by_step(tmp_path):
    done = run_script(
        "update_bound.py", "--raw", tmp_path, "--parameters", "3e6", "--steps", "2",
        "--shares", "0", "--fio-ms", "300",
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["f = 0.0"]
    assert len(found["by_step"]) == len(found["each_way_mb_per_s_by_step"]) == 2
    assert len(found["fio"]) == 3  # before, between and after them
    assert all(rates["mixed_mb_per_s"] > 0 for (rates,) in found["fio"])
    assert list(tmp_path.iterdir()) == []


def test_overlap_forward_is_compared_with_none(tmp_path):
    done = run_script(
        "overlap_forward.py", tmp_path, "--layers", "2", "--width", "128", "--steps", "3",
        "--batch", "2", "--context", "32", "--rounds", "1",
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["losses_are_equal"]
    assert found["digests_are_equal"]
    assert list(tmp_path.iterdir()) == []


def test_the_costs_of_the_store_are_figures(tmp_path):
    done = run_script(
        "store_costs.py",
        "--layers",
        "1",
        "--width",
        "96",
        "--pairs",
        "2",
        "--commits",
        "2",
        tmp_path,
    )

    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["checksums"]["hashed_bytes_per_step"] > 10**6
    assert [each["order"] for each in result["commits"]] == ["sequential", "resident"]
    assert result["commits"][1]["commit_bytes"] > 100 * result["commits"][0]["commit_bytes"]
    # The kernel counts the same bytes whether steps are committed or not; a step of this model is
    # so short that it ends before or after a prefetch for the next.
    assert result["traffic"]["read_ratio"] == pytest.approx(1, abs=0.1)
    assert result["traffic"]["write_ratio"] == pytest.approx(1, abs=0.01)
    assert list(tmp_path.iterdir()) == []
