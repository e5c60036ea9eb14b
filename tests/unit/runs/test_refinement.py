"""What runs teach of their machine: the profile follows them, and plans follow the profile."""

import dataclasses
import logging
from pathlib import Path

import pytest

from offload.config import build_config
from offload.errors import ConfigError
from offload.plan.bound import ComputeTimes
from offload.plan.machine import Machine, PathRates
from offload.plan.machine_profile import (
    MARK,
    KernelProfile,
    MachineProfile,
    MemoryProfile,
    PathProfile,
    parse_profile,
)
from offload.runs.prediction import plan_and_predict
from offload.runs.refinement import refined, run_shape
from offload.runs.train import run_training

OWN = """
import torch


class Net(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(width, width) for _ in range(3))
        self.to(torch.bfloat16)

    def forward(self, inputs, targets):
        x = inputs.float().mean().item() + torch.ones(4, self.layers[0].in_features)
        for layer in self.layers:
            x = layer(x.bfloat16())
        return x.float().square().mean()


def build(width):
    return Net(width)
"""
MACHINE = Machine(
    paths=(
        PathRates(path="/a", read_bytes_per_s=4e8, write_bytes_per_s=4e8, mixed_bytes_per_s=2e8),
        PathRates(path="/b", read_bytes_per_s=1e8, write_bytes_per_s=1e8, mixed_bytes_per_s=1e8),
    ),
    copy_bytes_per_s=4e10,
    update_parameters_per_s=4e9,
)
PATH = PathProfile(
    path="/a",
    backend="threads",
    block_bytes=1 << 20,
    queue_depth=4,
    direct=True,
    read_bytes_per_s=1e8,
    write_bytes_per_s=4e8,
    mixed_bytes_per_s=8e8,
    measured_at="2026-01-01T00:00:00",
)
KNOWN = MachineProfile(
    paths=(PATH,),
    kernels=(
        KernelProfile(
            rule="adamw",
            codec="split",
            dtype="bfloat16",
            threads=2,
            parameters_per_s=1e9,
            measured_at="2026-01-01T00:00:00",
        ),
    ),
    memory=(MemoryProfile(threads=2, copy_bytes_per_s=1e10, measured_at="2026-01-01T00:00:00"),),
)


def config(**overrides):
    return build_config({"tiers": {"host": {"memory": "64MiB"}}}, overrides=overrides)


def refine(known, *, machine=MACHINE, forward_s=2.0, threads=2, **overrides):
    return refined(
        known,
        config(**overrides),
        threads=threads,
        machine=machine,
        directories=[Path("/a/run"), Path("/b/run")],
        kernel_dtype="bfloat16",
        micro_step=ComputeTimes(forward_s=forward_s, backward_s=4.0),
        other_s=0.5,
        activation_bytes=1000,
    )


def test_known_rates_move_half_way_and_settings_stay():
    newer = refine(KNOWN)

    (path,) = newer.paths  # nothing is known of the settings of the other
    assert path.read_bytes_per_s == pytest.approx(2e8)
    assert path.write_bytes_per_s == pytest.approx(4e8)
    assert path.mixed_bytes_per_s == pytest.approx(4e8)
    assert (path.backend, path.queue_depth) == (PATH.backend, PATH.queue_depth)
    assert newer.kernels[0].parameters_per_s == pytest.approx(2e9)
    assert newer.memory[0].copy_bytes_per_s == pytest.approx(2e10)


def test_passes_in_pieces_teach_nothing_of_those_without():
    settings = {"threads": 2, "machine": None, "directories": (), "kernel_dtype": "bfloat16"}
    passes = ComputeTimes(forward_s=2.0, backward_s=4.0)

    newer = refined(
        KNOWN,
        config(),
        micro_step=passes,
        other_s=0.5,
        activation_bytes=1,
        tiled={"head"},
        **settings,
    )

    assert newer.find_run(run_shape(config()), threads=2) is None
    assert newer.find_run(run_shape(config(), tiled=["head"]), threads=2).forward_s == 2.0


def test_a_path_that_the_run_held_back_teaches_nothing():
    newer = refine(KNOWN, **{"tiers.storage.rate_limit": "1MB"})

    assert newer.paths == ()
    assert newer.memory[0].copy_bytes_per_s == pytest.approx(2e10)


def test_what_was_measured_with_other_threads_is_left_alone():
    newer = refine(KNOWN, threads=1)

    assert newer.kernels == newer.memory == ()


def test_the_first_run_is_taken_as_it_was_and_later_ones_half_way():
    first = refine(MachineProfile())
    again = refine(first, machine=None, forward_s=8.0)

    assert first.runs[0].forward_s == 2.0
    assert first.runs[0].other_s == 0.5
    assert again.runs[0].forward_s == pytest.approx(4.0)
    assert first.merged(again).runs == again.runs
    assert parse_profile(again.to_toml(), source="x") == again


def test_a_run_that_stored_little_says_nothing_of_paths():
    assert dataclasses.replace(refine(KNOWN, machine=None), runs=()) == MachineProfile()


@pytest.mark.parametrize(
    "override",
    [
        {"model.layers": 3},
        {"train.batch": 7},
        {"train.gradient_dtype": "float32"},
        {"activations.checkpoint": "unit"},
        {"activations.offload": "host"},
        {"train.max_grad_norm": 0.5},
    ],
)
def test_a_shape_names_what_passes_depend_on(override):
    assert run_shape(config(**override)) != run_shape(config())


def test_a_shape_names_nothing_else():
    other = {"optimizer.lr": 0.1, "policy.overlap": "none", "tiers.host.memory": "1GiB"}

    assert run_shape(config(**other)) == run_shape(config())


@pytest.fixture
def factory_run(tmp_path, monkeypatch):
    """Returns the values of a run of a model that cannot run without values."""
    (tmp_path / "model_of_a_run.py").write_text(OWN)
    (tmp_path / "text").write_bytes(bytes(range(256)) * 40)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("offload.runs.probe._MEASURE_S", 0.01)
    monkeypatch.setattr("offload.runs.measurement.others_cpu_share", lambda *_: None)
    return build_config(
        {
            "model": {"factory": "model_of_a_run:build", "width": 32},
            "data": {"source": "files", "files": ["text"]},
            "train": {"steps": 5, "batch": 2},
            "tiers": {"host": {"memory": "32MiB"}},
        }
    )


def test_a_plan_after_a_run_has_the_times_of_that_run(factory_run, tmp_path, monkeypatch):
    file = tmp_path / "machine.toml"
    file.write_text(f"{MARK}\nschema = 1\n")
    before = plan_and_predict(factory_run, machine_file=file)
    monkeypatch.setenv("OFFLOAD_MACHINE", str(file))

    result = run_training(factory_run, run_dir=tmp_path / "run", is_kept=False)
    planned = plan_and_predict(factory_run, machine_file=file)

    (run,) = parse_profile(file.read_text(), source="x").runs
    assert before.prediction is not None
    assert before.prediction.step is None
    assert planned.prediction is not None
    assert planned.prediction.step is not None
    assert planned.prediction.step.backward_s >= run.backward_s * (1 - 1e-9) > 0  # a sum of units
    assert planned.prediction.activation_bytes == result.activation_peak_bytes
    assert planned.prediction.rss_peak_bytes is not None
    assert run.workspace_bytes is not None
    assert not [each for each in planned.warnings if "times" in each]


def test_a_run_makes_no_profile_where_there_is_none(factory_run, tmp_path, monkeypatch):
    file = tmp_path / "machine.toml"
    monkeypatch.setenv("OFFLOAD_MACHINE", str(file))

    run_training(factory_run, run_dir=tmp_path / "run", is_kept=False)

    assert not file.exists()


def test_a_profile_that_cannot_be_written_costs_no_result(
    factory_run, tmp_path, monkeypatch, caplog
):
    file = tmp_path / "machine.toml"
    file.write_text(f"{MARK}\nschema = 1\n")
    monkeypatch.setenv("OFFLOAD_MACHINE", str(file))

    def full(*_):
        raise ConfigError("no room for it")

    monkeypatch.setattr("offload.runs.refinement.add_to_profile", full)
    with caplog.at_level(logging.WARNING):
        result = run_training(factory_run, run_dir=tmp_path / "run", is_kept=False)

    assert result.steps == 5
    assert "was not refined" in caplog.text
