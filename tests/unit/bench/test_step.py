"""`bench step` runs the steps of a config and leaves nothing behind."""

import argparse

import pytest
from rich.console import Console

from offload.bench.step import bench_step
from offload.cli.tables import render_train
from offload.config import load_config
from offload.errors import ModelError, PlanError
from offload.runs.metrics import MetricsFile


@pytest.fixture
def config(tmp_path, monkeypatch):
    """Returns a loader of a small run whose store lies on a path of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("offload.runs.train.probe_run", lambda *_: None)
    path = tmp_path / "path"
    path.mkdir()
    run = tmp_path / "run.toml"
    run.write_text(f"""
        [model]
        layers = 2
        width = 32
        heads = 2
        context = 16
        [data]
        source = "files"
        files = ["{argparse.__file__}"]
        [train]
        steps = 4
        eval_every = 1
        [tiers.host]
        memory = "32MiB"
        [tiers.storage]
        paths = ["{path}"]
        commit_every = 1
        [checkpoint]
        save_every = 1
    """)
    return lambda *overrides: load_config(run, overrides)


def test_what_an_auto_policy_chose_is_said(config, monkeypatch):
    monkeypatch.setattr("offload.runs.probe._MEASURE_S", 0.01)
    monkeypatch.setattr("offload.runs.pass_probe._ENOUGH_S", 0.01)
    notices = []

    bench_step(config("policy=auto"), on_notice=notices.append)

    assert "`policy.parameters` = " in notices[-1]


def test_the_figures_are_of_steps_alone_and_nothing_stays(config, tmp_path):
    seen = []

    result = bench_step(config(), on_step=seen.append)

    assert [metrics.step for metrics in seen] == [1, 2, 3, 4]
    assert all(metrics.validation_loss is None for metrics in seen)
    assert all(metrics.committed is None for metrics in seen)
    assert result.steps == 4
    assert result.validation_loss_before is result.validation_loss_after is None
    assert result.commit_bytes == 0
    assert result.run_dir is result.store is None
    console = Console()
    with console.capture() as printed:
        render_train(console, result)
    assert "run directory" not in printed.get()
    assert result.read_bytes_per_step > 0
    parts = result.forward_s + result.backward_s + result.update_s + result.other_s
    assert parts == pytest.approx(result.step_s, rel=0.5)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["path", "run.toml"]
    assert list((tmp_path / "path").iterdir()) == []


def test_no_line_is_written_to_a_file(config, monkeypatch):
    monkeypatch.setattr(MetricsFile, "append", lambda *_: pytest.fail("a line was written"))

    assert bench_step(config()).steps == 4


def test_a_model_that_raises_refers_to_no_directory_that_is_gone(config, monkeypatch):
    def refuse(*_):
        raise ModelError("it raised ValueError")

    monkeypatch.setattr("offload.runs.loop.TrainingLoop.run_step", refuse)

    with pytest.raises(ModelError, match="correct that, and measure again") as caught:
        bench_step(config())

    assert "--resume" not in str(caught.value)
    assert "--run-dir" not in str(caught.value)


def test_a_run_that_does_not_fit_is_refused_and_leaves_nothing(config, tmp_path):
    with pytest.raises(PlanError):
        bench_step(config("tiers.host.memory=64KiB"))

    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["path", "run.toml"]
