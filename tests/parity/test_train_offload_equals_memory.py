import json

import pytest

from offload.runs.train import run_training

pytestmark = pytest.mark.slow  # seconds in all; `make test` has others of their kind


@pytest.mark.parametrize("max_grad_norm", [1.0, 0.0])
@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("optimizer", ["host", "storage"])
@pytest.mark.parametrize("parameters", ["host", "storage"])
def test_losses_and_digest_equal_those_in_memory(
    tmp_path, small_config, train, parameters, optimizer, micro_steps, max_grad_norm
):
    changes = {
        "train__steps": 20,
        "train__micro_steps": micro_steps,
        "train__max_grad_norm": max_grad_norm,
        "policy__parameters": parameters,
        "policy__optimizer": optimizer,
    }

    offloaded = train(small_config(**changes), run_dir=tmp_path / "offloaded")
    in_memory = train(small_config(**changes, offload=False), run_dir=tmp_path / "memory")

    assert offloaded.losses == in_memory.losses
    assert offloaded.state_digest == in_memory.state_digest
    assert offloaded.validation_loss_after == in_memory.validation_loss_after
    assert offloaded.validation_loss_after < offloaded.validation_loss_before


@pytest.mark.parametrize("overlap", ["backward", "both"])
@pytest.mark.parametrize("micro_steps", [1, 2])
def test_updates_under_backward_equal_those_in_memory_on_a_device_with_memory_of_its_own(
    tmp_path, small_config, train, overlap, micro_steps
):
    changes = {"train__steps": 6, "train__micro_steps": micro_steps, "train__max_grad_norm": 0.0}

    offloaded = train(
        small_config(**changes, tiers__device__kind="emulated", policy__overlap=overlap),
        run_dir=tmp_path / "offloaded",
    )
    in_memory = train(small_config(**changes, offload=False), run_dir=tmp_path / "memory")

    assert offloaded.losses == in_memory.losses
    assert offloaded.state_digest == in_memory.state_digest


@pytest.mark.parametrize(("overlap", "is_rated"), [("none", True), ("forward", False)])
def test_an_update_has_a_bound_to_go_by_where_it_runs_alone(
    tmp_path, small_config, monkeypatch, overlap, is_rated
):
    monkeypatch.setattr("offload.runs.probe._MEASURE_S", 0.01)
    changes = {"train__steps": 6, "policy__overlap": overlap}

    result = run_training(small_config(**changes), run_dir=tmp_path / "run")

    assert (result.update_achieved_over_bound is not None) == is_rated
    assert result.achieved_over_bound is not None


@pytest.mark.parametrize("changes", [
    {"optimizer__codec": "fp32"},
    {"train__gradient_dtype": "float32", "train__micro_steps": 2},
    {"model__dtype": "float32"},
])  # fmt: skip
def test_codecs_and_dtypes_equal_those_in_memory(tmp_path, small_config, train, changes):
    changes = {"train__steps": 6, **changes}

    offloaded = train(small_config(**changes), run_dir=tmp_path / "offloaded")
    in_memory = train(small_config(**changes, offload=False), run_dir=tmp_path / "memory")

    assert offloaded.losses == in_memory.losses
    assert offloaded.state_digest == in_memory.state_digest


def test_codecs_give_the_same_digest(tmp_path, small_config, train):
    # Both are lossless and round the parameter alike.
    digests = {
        codec: train(
            small_config(train__steps=4, optimizer__codec=codec), run_dir=tmp_path / codec
        ).state_digest
        for codec in ("split", "fp32")
    }

    assert digests["split"] == digests["fp32"]


def test_a_step_whose_norm_is_not_finite_leaves_the_state_as_it_was(
    tmp_path, small_config, train, caplog
):
    # An infinite rate in the last step would show if that step were not skipped.
    config = small_config(train__steps=3, optimizer__lr=1e30, optimizer__warmup_steps=0)

    offloaded = train(config, run_dir=tmp_path / "offloaded")
    in_memory = train(config.model_copy(update={"offload": False}), run_dir=tmp_path / "memory")

    assert offloaded.skipped_steps == in_memory.skipped_steps > 0
    assert offloaded.state_digest == in_memory.state_digest
    lines = (tmp_path / "offloaded" / "metrics.jsonl").read_text().splitlines()
    assert sum(json.loads(line)["skipped"] for line in lines) == offloaded.skipped_steps
    assert "skipped" in caplog.text


@pytest.mark.parametrize("parameters", ["host", "storage"])
@pytest.mark.parametrize("optimizer", ["host", "storage"])
def test_bytes_per_step_are_those_of_the_formula(
    tmp_path, small_config, train, parameters, optimizer
):
    # Wide enough that padding to 4096 bytes stays under 1 %.
    config = small_config(
        train__steps=4,
        train__micro_steps=2,
        model__layers=4,
        model__width=256,
        tiers__host__memory="64MiB",
        policy__parameters=parameters,
        policy__optimizer=optimizer,
    )

    result = train(config, run_dir=tmp_path / "run")

    for moved, formula in (
        (result.read_bytes_per_step, result.formula_read_bytes_per_step),
        (result.write_bytes_per_step, result.formula_write_bytes_per_step),
    ):
        assert moved == pytest.approx(formula, rel=0.01)
    assert result.host_peak_bytes <= result.host_budget_bytes
