"""The command line: exit codes, JSON objects, and the frozen set of options."""

import io
import json
import logging
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer.main

import offload.runs.doctor
import offload.runs.inspection
import offload.runs.prediction
import offload.runs.train
from offload.cli.app import app, run
from offload.errors import (
    BudgetError,
    ConfigError,
    CorruptStateError,
    PlanError,
    StorageError,
    StoreError,
)
from offload.runs.checks import Check, DoctorReport
from offload.runs.metrics import StepMetrics

OPTIONS = {
    "offload": {"--version", "--verbose", "-v"},
    "offload train": {"--resume", "--run-dir", "--json"},
    "offload plan": {"--machine", "--write", "--json"},
    "offload simulate": {"--json"},
    "offload inspect": {"--json"},
    "offload verify": {"--json"},
    "offload clean": {"--delete", "--json"},
    "offload doctor": {"--json", "--drain"},
    "offload bench": set(),
    "offload bench optim": {
        "--parameters",
        "--threads",
        "--optimizer",
        "--codec",
        "--parameter-dtype",
        "--gradient-dtype",
        "--isa",
        "--rounds",
        "--tune",
        "--machine",
        "--plot",
        "--json",
    },
    "offload bench io": {
        "--size",
        "--rw",
        "--bs",
        "--iodepth",
        "--ioengine",
        "--buffered",
        "--runs",
        "--tune",
        "--machine",
        "--sustained",
        "--max-bytes",
        "--plot",
        "--json",
    },
    "offload bench step": {"--json"},
    "offload bench update": {
        "--parameters",
        "--path",
        "--host-memory",
        "--codec",
        "--order",
        "--overlap",
        "--striping",
        "--baseline",
        "--compute-s",
        "--steps",
        "--commit-every",
        "--json",
    },
    "offload config": set(),
    "offload config show": {"--json"},
    "offload config schema": {"--json"},
}
METRICS = StepMetrics(
    step=1,
    loss=5.5,
    lr=1e-3,
    grad_norm=2.25,
    tokens=512,
    tokens_per_s=640.0,
    step_s=0.8,
    forward_s=0.2,
    backward_s=0.4,
    update_s=0.1,
    other_s=0.1,
    io_wait_s=0.05,
    read_bytes=1 << 30,
    write_bytes=1 << 29,
    cache_hit_bytes=0,
    host_peak_bytes=400 << 20,
    device_peak_bytes=None,
    rss_bytes=1 << 30,
    bound_s=None,
    achieved_over_bound=None,
    committed=None,
)
TRAIN_FIGURES = (
    "run_dir",
    "store",
    "steps",
    "first_step",
    "loss",
    "losses",
    "validation_loss_before",
    "validation_loss_after",
    "state_digest",
    "parameters",
    "state_bytes",
    "host_budget_bytes",
    "host_peak_bytes",
    "device_budget_bytes",
    "device_peak_bytes",
    "rss_baseline_bytes",
    "rss_peak_bytes",
    "activation_peak_bytes",
    "read_bytes_per_step",
    "write_bytes_per_step",
    "formula_read_bytes_per_step",
    "formula_write_bytes_per_step",
    "step_s",
    "forward_s",
    "backward_s",
    "update_s",
    "other_s",
    "io_wait_s",
    "bound_s",
    "achieved_over_bound",
    "update_bound_s",
    "update_achieved_over_bound",
    "prefetch_hit_rate",
    "tokens_per_s",
)
PLAN = {
    "fits": True,
    "reasons": [],
    "smallest": {"host_memory": 1 << 20, "device_memory": None, "storage": 1 << 30},
    "tiers": {
        name: {"budget_bytes": None, "planned_bytes": 1} for name in ("device", "host", "storage")
    },
    "policy": {"order": "sequential"},
    "predicted": {"step_s": None, "read_bytes_per_step": 5},
    "machine": None,
}


@dataclass
class Result:
    """Stands for what a function of `offload.runs` returns."""

    values: dict

    def to_json(self):
        return self.values

    def __getattr__(self, name):
        return self.values[name]


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[tiers.host]\nmemory = "400MiB"\n', encoding="utf-8")
    return path


@pytest.fixture
def calls(monkeypatch):
    """Replaces what commands call; the arguments of each call are kept by name."""
    kept = {}

    def train(config, *, run_dir, resume, progress, on_notice):
        kept["train"] = {"config": config, "run_dir": run_dir, "resume": resume}
        print("a library prints")
        progress(METRICS)
        told = {key: kept.get(key) for key in ("stopped_by", "others_cpu_share")}
        return Result(_figures() | told)

    monkeypatch.setattr(offload.runs.train, "run_training", train)
    monkeypatch.setattr(
        offload.runs.prediction, "plan_and_predict", lambda _, **options: Result(PLAN)
    )
    return kept


def _figures():
    return dict.fromkeys(TRAIN_FIGURES) | {"steps": 1, "loss": float("nan")}


def _json(capsys):
    captured = capsys.readouterr()
    value, end = json.JSONDecoder().raw_decode(captured.out)
    assert captured.out[end:] == "\n"
    return value, captured.err


def test_the_set_of_options_is_frozen():
    command = typer.main.get_command(app)

    assert dict(_options("offload", command)) == OPTIONS


def _options(name, command):
    found = {option for parameter in command.params for option in parameter.opts}
    yield name, {option for option in found if option.startswith("-")}
    for child_name, child in getattr(command, "commands", {}).items():
        yield from _options(f"{name} {child_name}", child)


def test_train_prints_one_object_and_all_else_to_standard_error(config, calls, capsys):
    code = run(["train", str(config), "train.steps=1", "--json", "--run-dir", "here"])

    values, errors = _json(capsys)
    assert code == 0
    assert set(values) >= set(TRAIN_FIGURES)
    assert values["loss"] is None
    assert "a library prints" in errors
    assert "5.5000" in errors
    assert calls["train"]["config"].train.steps == 1
    assert calls["train"]["run_dir"] == Path("here")
    assert calls["train"]["resume"] is None


def test_train_prints_a_line_per_step_and_a_table(config, calls, capsys):
    code = run(["train", str(config)])

    out = capsys.readouterr().out
    assert code == 0
    assert "5.5000" in out
    assert "400 MiB" in out
    assert "1 steps done" in out
    assert calls["train"]["run_dir"] is None


@pytest.mark.parametrize(("share", "is_said"), [(0.4, True), (0.01, False), (None, False)])
def test_times_of_a_busy_machine_are_said_to_be_such(config, calls, capsys, share, is_said):
    calls["others_cpu_share"] = share

    run(["train", str(config)])

    out = " ".join(capsys.readouterr().out.split())
    assert ("other processes took 40%" in out) == is_said


@pytest.mark.parametrize(("given", "passed"), [("auto", "auto"), ("runs/a", Path("runs/a"))])
def test_train_resumes_automatically_or_from_a_path(config, calls, given, passed):
    run(["train", str(config), "--resume", given, "--run-dir", "here", "--json"])

    assert calls["train"]["resume"] == passed


@pytest.mark.parametrize(("signal_name", "expected"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_a_run_that_a_signal_stopped_prints_its_result_and_says_so(
    config, calls, capsys, signal_name, expected
):
    calls["stopped_by"] = signal_name

    code = run(["train", str(config), "--json"])

    assert code == expected
    assert _json(capsys)[0]["stopped_by"] == signal_name
    assert run(["train", str(config)]) == expected
    captured = capsys.readouterr()
    assert f"stopped by {signal_name} after step 1" in captured.out
    assert captured.err == ""


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (ConfigError("wrong"), 2),
        (PlanError("too small"), 2),
        (BudgetError("full"), 1),
        (StorageError("EIO"), 1),
        (StoreError("no commit"), 1),
        (StoreError("owned by another", is_refusal=True), 2),
        (CorruptStateError("bad block"), 1),
        (ZeroDivisionError("a fault of ours"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_have_their_exit_code_and_object(
    config, calls, monkeypatch, capsys, error, expected
):
    def fail(*_, **__):
        raise error

    monkeypatch.setattr(offload.runs.train, "run_training", fail)

    code = run(["train", str(config), "--json"])

    values, _ = _json(capsys)
    assert code == expected
    assert values == {
        "error": {"type": type(error).__name__, "message": str(error) or "interrupted"}
    }


def test_an_error_for_a_reader_is_one_line_without_traceback(config, calls, monkeypatch, capsys):
    def fail(*_, **__):
        raise StorageError("cannot read file `x`")

    monkeypatch.setattr(offload.runs.train, "run_training", fail)

    code = run(["train", str(config)])

    captured = capsys.readouterr()
    assert code == 1
    assert captured.out == ""
    assert captured.err == "error: cannot read file `x`\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["train"],
        ["train", "CONFIG", "--no-such-option"],
        ["train", "CONFIG", "train.steps"],
        ["train", "CONFIG", "train.stepz=3"],
        ["train", "missing.toml"],
        ["inspect", "missing"],
        ["verify", "missing"],
        ["no-such-command"],
        ["config"],
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_wrong_use_exits_with_2(config, calls, capsys, arguments, as_json):
    given = [str(config) if argument == "CONFIG" else argument for argument in arguments]

    code = run([*given, *(["--json"] if as_json else [])])

    assert code == 2
    assert calls == {}
    if as_json:
        assert set(_json(capsys)[0]["error"]) == {"type", "message"}
    else:
        captured = capsys.readouterr()
        assert captured.out == ""
        assert "error: " in captured.err


@pytest.mark.parametrize("fits", [True, False])
def test_plan_exits_with_1_where_it_does_not_fit(config, calls, monkeypatch, capsys, fits):
    plan = PLAN | {"fits": fits, "reasons": [] if fits else ["too small"]}
    monkeypatch.setattr(
        offload.runs.prediction, "plan_and_predict", lambda _, **options: Result(plan)
    )

    code = run(["plan", str(config), "--json"])

    assert code == (0 if fits else 1)
    assert _json(capsys)[0] == plan
    assert run(["plan", str(config)]) == code
    assert ("too small" in capsys.readouterr().out) is not fits


@pytest.mark.parametrize("ok", [True, False])
def test_verify_exits_with_1_where_it_finds_bad_blocks(tmp_path, monkeypatch, capsys, ok):
    bad = {
        "record": "state/1",
        "parameter": "head.weight",
        "path": "/a",
        "file": "data-0",
        "offset": 4096,
        "reason": "checksum",
    }
    values = {"records": 2, "bytes": 4096, "bad": [] if ok else [bad], "ok": ok}
    monkeypatch.setattr(offload.runs.inspection, "verify_store", lambda _, progress: Result(values))

    code = run(["verify", str(tmp_path), "--json"])

    assert code == (0 if ok else 1)
    assert _json(capsys)[0] == values
    assert run(["verify", str(tmp_path)]) == code
    assert ("head.weight" in capsys.readouterr().out) is not ok


def test_inspect_prints_what_a_store_holds(tmp_path, monkeypatch, capsys):
    values = {"store": "s", "step": 3, "bytes_by_path": {"/a": 1 << 20}, "checkpoints": []}
    monkeypatch.setattr(offload.runs.inspection, "inspect_store", lambda _: Result(values))

    assert run(["inspect", str(tmp_path), "--json"]) == 0
    assert _json(capsys)[0] == values
    assert run(["inspect", str(tmp_path)]) == 0
    assert "1 MiB" in capsys.readouterr().out


@pytest.mark.parametrize(("status", "expected"), [("ok", 0), ("warn", 0), ("fail", 1)])
def test_doctor_exits_with_1_where_a_check_fails(monkeypatch, capsys, status, expected):
    report = DoctorReport(checks=[Check(name="x", status=status, found="y", remedy="do z")])
    monkeypatch.setattr(offload.runs.doctor, "run_checks", lambda _, drain: report)

    code = run(["doctor", "--json"])

    assert code == expected
    values, _ = _json(capsys)
    assert values["ok"] is (expected == 0)
    assert values["checks"] == [{"name": "x", "status": status, "found": "y", "remedy": "do z"}]
    assert run(["doctor"]) == code
    assert "do z" in capsys.readouterr().out


def test_config_show_prints_what_loads_as_the_same(config, tmp_path, capsys):
    assert run(["config", "show", str(config), "train.steps=9"]) == 0
    shown = capsys.readouterr().out

    again = tmp_path / "again.toml"
    again.write_text(shown, encoding="utf-8")
    assert run(["config", "show", str(again)]) == 0
    assert capsys.readouterr().out == shown
    assert "steps = 9" in shown


def test_config_show_changes_the_defaults_without_a_file(capsys):
    assert run(["config", "show", "train.steps=9", "policy.order=sequential"]) == 0

    shown = capsys.readouterr().out
    assert "steps = 9" in shown
    assert 'order = "sequential"' in shown


@pytest.mark.parametrize(
    "arguments", [["config", "schema"], ["config", "show"], ["config", "show", "CONFIG"]]
)
def test_config_prints_one_object_as_json(config, capsys, arguments):
    given = [str(config) if argument == "CONFIG" else argument for argument in arguments]

    assert run([*given, "--json"]) == 0

    assert _json(capsys)[0]


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["train", "--help"]])
def test_help_and_version_load_no_torch(arguments):
    code = (
        "import sys\nfrom offload.cli.app import run\n"
        f"code = run({arguments!r})\n"
        "sys.exit(code or 3 * ('torch' in sys.modules))"
    )

    result = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)

    assert result.returncode == 0
    assert result.stdout


def test_the_module_is_the_same_command():
    commands = ([sys.executable, "-m", "offload"], [str(Path(sys.executable).with_name("offload"))])

    shown = [
        subprocess.run([*command, "--version"], capture_output=True, check=True).stdout
        for command in commands
    ]

    assert shown[0] == shown[1]
    assert shown[0].startswith(b"offload ")


@pytest.mark.parametrize(
    "arguments",
    [["train", "run.toml", "--resume", ""], ["train", ""], ["train", "run.toml", "--run-dir="]],
)
def test_an_argument_that_is_empty_is_refused_before_anything_is_done(calls, capsys, arguments):
    code = run([*arguments, "--json"])

    assert code == 2
    assert "expected none that is empty" in _json(capsys)[0]["error"]["message"]
    assert "train" not in calls


def test_a_log_line_goes_to_what_standard_error_is_then(monkeypatch):
    first, then = io.StringIO(), io.StringIO()
    monkeypatch.setattr("sys.stderr", first)
    run(["config", "show"])
    first.close()

    monkeypatch.setattr("sys.stderr", then)
    logging.getLogger("offload.runs").warning("after the command")

    assert then.getvalue() == "WARNING offload.runs: after the command\n"
