"""Two runs that start at once in one run directory."""

import argparse
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import offload
from offload.config import load_config
from offload.errors import ConfigError, StoreError
from offload.runs.run_directory import CONFIG_FILE, resolve_run_directory
from offload.runs.run_owner import owning
from offload.runs.train import run_training
from offload.storage.ownership import RUN_OWNER_FILE, Ownership

SMALL = Path(__file__).parents[3] / "examples" / "small.toml"
SOURCE = ("data.source=files", f'data.files=["{argparse.__file__}"]', "train.steps=1")


def config(*overrides):
    return load_config(SMALL, [*SOURCE, *overrides])


@pytest.mark.parametrize("change", ["offload=true", "offload=false"])
def test_a_run_directory_that_another_owns_stays_as_it_is(tmp_path, change):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    owner = Ownership(run_dir, file=RUN_OWNER_FILE)
    owner.acquire()

    for resume in (None, "auto"):
        with pytest.raises(StoreError, match="cannot own run directory .*`: expected") as raised:
            run_training(config(change), run_dir=run_dir, resume=resume)
    owner.release(deletes=True)

    assert raised.value.is_refusal
    assert list(run_dir.iterdir()) == []


@pytest.mark.parametrize(
    ("resume", "error", "message"),
    [
        (None, ConfigError, "expected a new or empty directory"),
        ("auto", StoreError, "found that another run has written there; start again"),
    ],
)
def test_a_run_that_was_done_while_another_was_planned_is_not_replaced(
    tmp_path, monkeypatch, resume, error, message
):
    run_dir = tmp_path / "run"

    def meanwhile(_):
        monkeypatch.undo()
        model = torch.nn.Linear(8, 8)
        with offload.Session(host_memory="1MiB", store=run_dir / "store") as session:
            session.wrap(model)
            session.commit()

    monkeypatch.setattr("offload.runs.train.warm_up", meanwhile)
    with pytest.raises(error, match=message):
        run_training(config(), run_dir=run_dir, resume=resume)

    assert [each.name for each in run_dir.iterdir()] == ["store"]


def test_of_two_runs_without_a_name_each_gets_a_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "now")
    first = resolve_run_directory(config(), run_dir=None, resume=None)
    second = resolve_run_directory(config(), run_dir=None, resume=None)

    with (
        owning(config(), first, is_named=False, resume=None) as one,
        owning(config(), second, is_named=False, resume=None) as other,
    ):
        assert first == second == one
        assert other.path.name == "now-2"
        assert other.store == other.path / "store"


@pytest.mark.slow
def test_of_two_processes_that_start_at_once_one_runs_and_one_is_refused(tmp_path):
    rates = ("0.25", "0.5")
    size = (
        "model.layers=1",
        "model.width=32",
        "model.heads=1",
        "model.context=32",
        "offload=false",
    )
    command = [sys.executable, "-m", "offload", "train", SMALL, *SOURCE, *size]
    started = [
        subprocess.Popen(
            [*command, f"optimizer.lr={rate}", "--run-dir", tmp_path / "run"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rate in rates
    ]
    ended = [process.communicate() for process in started]
    codes = [process.returncode for process in started]

    assert sorted(codes) == [0, 2], ended
    refused = ended[codes.index(2)][1]
    assert "run directory" in refused
    written = tomllib.loads((tmp_path / "run" / CONFIG_FILE).read_text())["optimizer"]["lr"]
    assert written == float(rates[codes.index(0)])
