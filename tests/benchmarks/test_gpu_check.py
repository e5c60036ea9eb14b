"""The check of a GPU runs without one as far as it can, and says that there is none."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_the_script_says_that_there_is_no_cuda_device_and_exits_77():
    done = subprocess.run(
        [ROOT / "scripts" / "gpu_check.sh"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 77
    assert f"no CUDA device: torch {torch.__version__} of `{sys.executable}`" in done.stderr


@pytest.mark.slow
@pytest.mark.alone
def test_the_table_has_every_row_and_bits_and_budget_are_right_on_the_emulated_device():
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "gpu_check.py", "--device", "emulated", "--small"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    for row in ("host to device", "device to host", "overlap share", "over plain", "losses and"):
        assert row in done.stdout


@pytest.mark.slow
@pytest.mark.alone
def test_the_benchmark_of_prefetch_prints_its_figures():
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "prefetch.py", "--small", "--json"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert 0 <= found["prefetch_hit_rate"] <= 1
    assert found["accesses_per_step"] > 0
    assert found["resident_over_plain"] > 0


@pytest.mark.slow
def test_the_benchmark_of_resident_models_prints_a_ratio_for_each_case():
    script = ROOT / "benchmarks" / "resident.py"

    done = subprocess.run(
        [sys.executable, script, "--small", "--json", "--shapes", "convolutional"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 9
    assert all(row["over_plain"] > 0 for row in found)
