"""A plan written as a run: it is taken, it says every choice, and it spares what is not its own."""

import json
import tomllib
from pathlib import Path

import pytest

from offload.cli.app import run
from offload.config import load_config
from offload.plan.machine_profile import MARK as PROFILE_MARK
from offload.runs.plan_file import MARK, write_plan
from offload.runs.planning import plan_run

RUN = """
[model]
layers = 2
width = 64
heads = 2
context = 32
[data]
source = "files"
files = "text"
[train]
steps = 2
[tiers.host]
memory = "16MiB"
[policy]
order = "alternating"
"""


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OFFLOAD_MACHINE", "")
    monkeypatch.setattr("offload.runs.probe._MEASURE_S", 0.01)
    monkeypatch.setattr("offload.runs.pass_probe._ENOUGH_S", 0.01)
    (tmp_path / "text").write_bytes(bytes(range(256)) * 40)
    (tmp_path / "run.toml").write_text(RUN)
    return tmp_path


def plan(capsys, *arguments):
    code = run(["plan", "run.toml", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def write(*changes):
    """Plans without measuring; returns the plan and what was written."""
    config = load_config("run.toml", changes)
    plan = plan_run(config)
    write_plan(Path("planned.toml"), config, plan)
    return plan, tomllib.loads(Path("planned.toml").read_text())


def test_a_written_plan_says_every_choice_and_size(folder):
    planned, values = write("tiers.device.kind=emulated", "policy.striping=modulo")

    assert values["policy"] == {
        "parameters": "storage", "optimizer": "storage", "order": "alternating",
        "overlap": "none", "striping": "modulo", "prefetch": planned.choices.prefetch,
    }  # fmt: skip
    assert values["tiers"]["host"]["memory"] == 16 << 20
    assert values["tiers"]["device"]["memory"] == planned.device.planned_bytes > 0
    assert values["data"]["files"] == [str(folder / "text")]
    again = plan_run(load_config("planned.toml"))
    assert (again.host, again.traffic, again.choices) == (
        planned.host, planned.traffic, planned.choices
    )  # fmt: skip
    assert again.device.num_slots == planned.device.num_slots


@pytest.mark.slow
def test_a_written_plan_trains_as_the_original(folder, capsys):
    changes = ["tiers.device.kind=emulated", "policy.striping=modulo"]
    assert plan(capsys, *changes, "--write", "planned.toml")[0] == 0

    results = []
    for name, overrides in (("run.toml", changes), ("planned.toml", [])):
        assert run(["train", name, *overrides, "--run-dir", f"of-{name}", "--json"]) == 0
        results.append(json.loads(capsys.readouterr().out))

    first, second = results
    for key in ("state_digest", "read_bytes_per_step", "write_bytes_per_step"):
        assert first[key] == second[key]


def test_a_plan_is_written_over_a_plan_and_over_nothing_else(folder, capsys):
    write()
    assert write("train.steps=7")[1]["train"]["steps"] == 7

    code, error = plan(capsys, "--write", "run.toml")

    assert code == 2
    assert MARK in error["error"]["message"]
    assert (folder / "run.toml").read_text() == RUN


def test_a_run_that_does_not_fit_is_not_written(folder, capsys):
    code, _ = plan(capsys, "tiers.host.memory=1KiB", "--write", "planned.toml")

    assert code == 1
    assert not (folder / "planned.toml").exists()


def test_a_plan_goes_by_the_machine_that_is_named(folder, capsys):
    (folder / "machine.toml").write_text(
        f'{PROFILE_MARK}\nschema = 1\n[[paths]]\npath = "{folder}"\nbackend = "threads"\n'
        "block_bytes = 1048576\nqueue_depth = 4\ndirect = true\nread_bytes_per_s = 4.5e8\n"
        'write_bytes_per_s = 2e8\nmixed_bytes_per_s = 2e8\nmeasured_at = "2026-01-01T00:00:00"\n'
    )

    code, planned = plan(capsys, "--machine", "machine.toml", "--write", "planned.toml")

    assert code == 0
    assert planned["machine"]["paths"][0]["read_bytes_per_s"] == 4.5e8
    suggested = (planned["suggested"] or {"policy": {}})["policy"]
    chosen = [f"policy.{key}={value}" for key, value in suggested.items()]
    assert "order" not in suggested  # which the run sets
    assert load_config("planned.toml") == load_config("run.toml", chosen)
    assert plan(capsys, "--machine", "missing.toml")[0] == 2


def test_what_was_auto_is_chosen_and_written_as_a_value(folder, capsys):
    changes = ("policy=auto", "tiers.storage.rate_limit=20MB", "tiers.host.memory=64MiB")

    code, planned = plan(capsys, *changes, "--write", "planned.toml")

    assert code == 0
    adopted = planned["adopted"]
    assert adopted["policy"]["parameters"] == "host"
    assert planned["policy"].items() >= {k: str(v) for k, v in adopted["policy"].items()}.items()
    assert planned["predicted"]["step_s"] == adopted["step_s"]
    assert planned["suggested"] is None
    lines = [each for each in planned["choices"] if each["choice"] == "policy"]
    assert lines[0]["why"] == adopted["why"]
    written = load_config("planned.toml").policy
    assert not written.auto
    assert {key: getattr(written, key) for key in adopted["policy"]} == adopted["policy"]
