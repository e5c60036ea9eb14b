"""The check of a GPU runs without one as far as it can, and says that there is none."""

import importlib.util
import json
import os
import shutil
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


INTERPRETER = """#!/bin/sh
# In the place of Python: says of itself that it has a device, and what is run with it fails or not.
case "$*" in
-) cat >/dev/null ;;
"-m venv"*) mkdir -p build/gpu_check/bin && cp "$0" build/gpu_check/bin/python ;;
"-c import sysconfig"*) echo build/gpu_check ;;
"-m pip"*) ;;
csrc/build_optim.py) exit 3 ;;
*pytest*) echo "1 failed" && exit $TESTS ;;
benchmarks/gpu_check.py*) echo "the table" ;;
esac
"""


@pytest.mark.parametrize("tests", [0, 1])
def test_a_part_of_the_script_that_fails_leaves_the_others_and_is_named_at_the_end(tmp_path, tests):
    for folder in "scripts", "bin":
        (tmp_path / folder).mkdir()
    shutil.copy(ROOT / "scripts" / "gpu_check.sh", tmp_path / "scripts")
    python = tmp_path / "bin" / "python"
    python.write_text(INTERPRETER)
    python.chmod(0o755)

    done = subprocess.run(
        [tmp_path / "scripts" / "gpu_check.sh"],
        env={**os.environ, "PYTHON": str(python), "TESTS": str(tests)},
        capture_output=True,
        text=True,
        check=False,
    )

    failed = ["failed: building the kernels: exit status 3"]
    failed += ["failed: tests/gpu: exit status 1"] * tests
    assert done.returncode == 1
    assert done.stdout.splitlines() == ["1 failed", "the table", *failed], done.stderr


def _load():
    path = ROOT / "benchmarks" / "gpu_check.py"
    spec = importlib.util.spec_from_file_location("gpu_check", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FOUND = {
    "passes_s": 2.0, "step_s": 3.0, "losses": [1.0], "digest": "d", "peak": 4, "budget": 4,
    "rows": [["a figure", "7"]],
}  # fmt: skip


@pytest.mark.parametrize(
    "part, changed, says",
    [
        ("link", None, "link FAILED: exit status -11"),
        ("plain", None, "losses and digest equal True"),
        ("resident", None, "within the device budget True"),
        ("streamed", None, "first loss equal to plain True"),
        ("plain", {"losses": [1.5]}, "first loss equal to plain False"),
        ("resident", {"digest": "other"}, "losses and digest equal False"),
        ("streamed", {"peak": 5}, "within the device budget False"),
        ("streamed", {}, "losses and digest equal True"),
    ],
)
def test_a_part_of_the_table_that_fails_leaves_the_others(monkeypatch, capsys, part, changed, says):
    check = _load()

    def run(command, **_):
        is_changed = command[-1] == part
        if is_changed and changed is None:
            return subprocess.CompletedProcess(command, -11, "", "it crashed")
        found = {**FOUND, **changed} if is_changed else FOUND
        return subprocess.CompletedProcess(command, 0, f"noise\n{json.dumps(found)}\n", "")

    monkeypatch.setattr(check.subprocess, "run", run)
    monkeypatch.setattr(check, "name_of", None)  # what fails on the device fails in a part
    monkeypatch.setattr(sys, "argv", ["gpu_check.py", "--device", "emulated"])

    status = check.main()

    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert status == int(changed != {})
    assert says in rows
    assert rows.count("a figure 7") == len(check.PARTS) - (changed is None)


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
    for row in (
        "host to device", "device to host", "overlap share", "plain PyTorch, step",
        "on the device over plain, step", "4.0 x the device budget, step",
        "losses and digest equal",
    ):  # fmt: skip
        assert row in done.stdout
    assert "False" not in done.stdout


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
