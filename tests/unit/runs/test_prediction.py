"""A plan with predictions: what is measured, what is known already, what is explained."""

import pytest
import torch

from offload.config import build_config
from offload.errors import ConfigError
from offload.plan.machine import PathRates
from offload.plan.machine_profile import (
    MARK,
    MachineProfile,
    RunProfile,
    parse_profile,
    read_profile,
)
from offload.plan.work import ModelPasses, PassTimes
from offload.runs.gpt import GPT, GPTShape
from offload.runs.operation_count import count_passes
from offload.runs.pass_finder import PassFinder
from offload.runs.planning import plan_run
from offload.runs.prediction import plan_and_predict
from offload.runs.profile_file import add_to_profile
from offload.runs.refinement import run_shape

KEYS = {
    "step_s", "forward_s", "backward_s", "update_s", "exposed_io_s", "bound_s",
    "read_bytes_per_step", "write_bytes_per_step", "rss_peak_bytes", "written_bytes_per_day",
    "tokens_to_hide_io",
}  # fmt: skip
MODEL = {
    "layers": 4,
    "width": 64,
    "heads": 2,
    "context": 32,
    "vocabulary": 256,
}


@pytest.fixture
def text(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(bytes(range(256)) * 40)
    return file


def config(text, **overrides):
    values = {
        "model": MODEL,
        "data": {"source": "files", "files": [str(text)]},
        "tiers": {"host": {"memory": "64MiB"}},
    }
    return build_config(values, overrides=overrides)


@pytest.fixture(autouse=True)
def quick(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OFFLOAD_MACHINE", "")
    monkeypatch.setattr("offload.runs.probe._MEASURE_S", 0.01)
    monkeypatch.setattr("offload.runs.pass_probe._ENOUGH_S", 0.01)
    # What others take of this machine is no part of what is tested.
    monkeypatch.setattr("offload.runs.measurement.others_cpu_share", lambda *_: None)


def test_every_figure_is_predicted_and_nothing_is_left(text, tmp_path):
    seen = []

    plan = plan_and_predict(
        config(text, **{"policy.order": "sequential", "policy.overlap": "none"}),
        on_measure=seen.append,
    ).to_json()

    predicted = plan["predicted"]
    assert set(predicted) == KEYS
    assert None not in predicted.values()
    assert predicted["bound_s"] <= predicted["step_s"]
    assert len(plan["machine"]["paths"]) == 1
    assert len(seen) == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["text"]


def test_a_path_is_planned_at_no_more_than_its_rate_limit(text):
    limited = {"tiers.storage.rate_limit": "2MB", "policy.overlap": "none"}

    plan = plan_and_predict(config(text, **limited)).to_json()

    (path,) = plan["machine"]["paths"]
    assert (path["read_bytes_per_s"], path["write_bytes_per_s"]) == (2e6, 2e6)
    assert path["mixed_bytes_per_s"] == 1e6
    predicted = plan["predicted"]
    moved = predicted["read_bytes_per_step"] + predicted["write_bytes_per_step"]
    assert predicted["bound_s"] >= moved / 2e6


def test_what_the_profile_has_is_not_measured_again(text, tmp_path):
    profile = tmp_path / "machine.toml"
    profile.write_text(f"{MARK}\nschema = 1\n")
    first, second = [], []

    plan_and_predict(config(text), machine_file=profile, on_measure=first.append)
    plan_and_predict(config(text), machine_file=profile, on_measure=second.append)
    deeper = config(text, **{"model.layers": 6})
    plan_and_predict(deeper, machine_file=profile, on_measure=second.append)

    kept = parse_profile(profile.read_text(), source="x")
    assert len(first) == 4
    assert second == [f"path {tmp_path}"] * 2  # paths belong to `bench io --tune`
    assert (len(kept.passes), len(kept.kernels), len(kept.memory)) == (1, 1, 1)
    assert kept.passes[0].forward_layer_s >= 0


def test_the_planned_peak_is_what_process_arenas_and_passes_hold(text, tmp_path, monkeypatch):
    monkeypatch.setattr("offload.runs.measurement.current_rss_bytes", lambda: 10**9)
    profile = tmp_path / "machine.toml"
    profile.write_text(f"{MARK}\nschema = 1\n")
    measured = plan_and_predict(config(text), machine_file=profile)
    (passes,) = read_profile(profile).passes
    known = profile.read_text()

    def set_workspace(fixed, layer):
        lines = [line for line in known.splitlines() if not line.startswith("workspace_")]
        at = lines.index("[[passes]]") + 1
        profile.write_text("\n".join([*lines[:at], *fixed, *layer, *lines[at:]]) + "\n")

    set_workspace(["workspace_bytes = 5e6"], ["workspace_layer_bytes = 1e6"])
    plan = plan_and_predict(config(text), machine_file=profile)
    set_workspace([], [])
    without = plan_and_predict(config(text), machine_file=profile)

    held = 10**9 + plan.host.planned_bytes + plan.prediction.activation_bytes
    assert passes.workspace_bytes + 4 * passes.workspace_layer_bytes > 0
    assert measured.prediction.rss_peak_bytes > held
    assert plan.prediction.rss_peak_bytes == held + 9 * 10**6
    assert without.prediction.rss_peak_bytes == held + plan.host.slot_bytes


def test_passes_that_an_older_version_measured_are_measured_anew(text, tmp_path):
    profile = tmp_path / "machine.toml"
    profile.write_text(f"{MARK}\nschema = 1\n")
    plan_and_predict(config(text), machine_file=profile)
    lines = profile.read_text().splitlines()
    is_new = ("record_s", "workspace_bytes", "workspace_layer_bytes")
    profile.write_text("\n".join(line for line in lines if not line.startswith(is_new)) + "\n")
    seen = []

    plan_and_predict(config(text), machine_file=profile, on_measure=seen.append)

    (passes,) = read_profile(profile).passes
    assert any(each.startswith("passes of a model") for each in seen)
    assert None not in (passes.record_s, passes.workspace_bytes)


def test_what_a_run_did_not_tell_of_its_memory_is_taken_from_shorter_models(text, tmp_path):
    profile = tmp_path / "machine.toml"
    profile.write_text(f"{MARK}\nschema = 1\n")
    short = plan_and_predict(config(text), machine_file=profile).prediction
    run = RunProfile(
        shape=run_shape(config(text)), threads=torch.get_num_threads(), forward_s=1e6,
        backward_s=2e6, other_s=0.0, activation_bytes=0, measured_at="now",
    )  # fmt: skip
    add_to_profile(profile, MachineProfile(runs=(run,)))
    (passes,) = read_profile(profile).passes

    plan = plan_and_predict(config(text), machine_file=profile)

    workspace = passes.workspace_bytes + 4 * passes.workspace_layer_bytes
    finder = PassFinder(config(text), plan, read_profile(profile), pytest.fail)
    found = finder.find(copy_bytes_per_s=1e9, update_parameters_per_s=1e9)
    assert plan.prediction.step.forward_s > short.step.forward_s
    assert found.workspace_bytes == round(workspace) > 0


def test_an_update_in_memory_takes_more_than_its_passes_by_what_each_record_costs(text, tmp_path):
    in_memory = config(text, **{"policy.parameters": "host", "policy.optimizer": "host"})
    profile = tmp_path / "machine.toml"
    profile.write_text(f"{MARK}\nschema = 1\n")
    plan_and_predict(in_memory, machine_file=profile)
    known = profile.read_text().splitlines()

    def update_s(record_s):
        lines = [f"record_s = {record_s}" if "record_s" in line else line for line in known]
        profile.write_text("\n".join(lines) + "\n")
        plan = plan_and_predict(in_memory, machine_file=profile)
        return plan.prediction.step.update_s, len(plan.layout.records)

    measured_s = read_profile(profile).passes[0].record_s
    free_s, num_records = update_s(0.0)
    slow_s, _ = update_s(0.25)

    assert measured_s > 0
    assert slow_s == pytest.approx(free_s + 0.25 * num_records)


def test_gradients_that_add_up_are_probed_as_such(text, tmp_path):
    profile = tmp_path / "machine.toml"
    profile.write_text(f"{MARK}\nschema = 1\n")

    plan_and_predict(config(text), machine_file=profile)
    plan_and_predict(config(text, **{"train.micro_steps": 3}), machine_file=profile)
    plan_and_predict(config(text, **{"train.micro_steps": 9}), machine_file=profile)

    plain, accumulating = (passes.shape for passes in read_profile(profile).passes)
    assert accumulating == f"{plain} accumulating"


@pytest.mark.parametrize(("share", "is_busy"), [(0.5, True), (0.01, False), (None, False)])
def test_what_a_busy_machine_gave_is_said_to_be_such_and_not_kept(
    text, tmp_path, monkeypatch, share, is_busy
):
    monkeypatch.setattr("offload.runs.measurement.others_cpu_share", lambda *_: share)
    profile = tmp_path / "machine.toml"
    profile.write_text(f"{MARK}\nschema = 1\n")

    plan = plan_and_predict(config(text), machine_file=profile).to_json()

    notes = [each for each in plan["warnings"] if "other processes took 50%" in each]
    assert len(notes) == is_busy
    assert all("\n" not in each for each in notes)
    assert bool(read_profile(profile).passes) != is_busy
    assert plan["predicted"]["step_s"] > 0


def test_a_model_that_needs_values_has_no_times_but_bytes(text, monkeypatch, tmp_path):
    (tmp_path / "own.py").write_text(
        "import torch\n\n"
        "class Net(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layer = torch.nn.Linear(8, 8).bfloat16()\n\n"
        "    def forward(self, inputs, targets):\n"
        "        return self.layer.weight.sum().item() * self.layer.bias.sum()\n\n"
        "def build():\n"
        "    return Net()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    values = {
        "model": {"factory": "own:build"},
        "data": {"source": "files", "files": [str(text)]},
        "tiers": {"host": {"memory": "64MiB"}},
    }

    plan = plan_and_predict(build_config(values)).to_json()

    assert plan["predicted"]["step_s"] is None
    assert plan["predicted"]["read_bytes_per_step"] > 0
    assert any("`own:build` cannot run without values" in each for each in plan["warnings"])


def test_a_model_of_the_users_is_estimated_by_its_operations(text, monkeypatch, tmp_path):
    values = {
        "model": {"factory": "offload.runs.gpt:GPT"},
        "data": {"source": "files", "files": [str(text)]},
        "tiers": {"host": {"memory": "64MiB"}},
    }
    shape = GPTShape(layers=2, width=64, heads=2, context=32, vocabulary=256, dtype=torch.bfloat16)
    monkeypatch.setattr("offload.runs.model._find_factory", lambda _: lambda: GPT(shape))

    plan = plan_and_predict(build_config(values)).to_json()

    predicted = plan["predicted"]
    assert 0 < predicted["forward_s"] < predicted["step_s"]
    assert predicted["bound_s"] <= predicted["step_s"]
    assert predicted["rss_peak_bytes"] is None
    assert any("estimated from the operations" in each for each in plan["warnings"])


def test_a_model_whose_layers_are_too_large_to_measure_is_estimated_too(text, monkeypatch):
    monkeypatch.setattr("offload.runs.pass_finder.probe_bytes", lambda _: 1 << 40)
    seen = []

    plan = plan_and_predict(config(text), on_measure=seen.append).to_json()

    assert plan["predicted"]["bound_s"] <= plan["predicted"]["step_s"]
    assert any("three of its layers exceed the budget" in each for each in plan["warnings"])
    assert not any(each.startswith("passes of a model") for each in seen)


def test_what_cannot_be_measured_on_a_device_is_said(text, monkeypatch):
    monkeypatch.setattr("offload.runs.pass_finder.probe_bytes", lambda _: 1 << 40)

    plan = plan_and_predict(config(text, **{"tiers.device.kind": "emulated"})).to_json()

    assert plan["predicted"]["step_s"] is None
    assert any("on device `emulated` are measured on" in each for each in plan["warnings"])


def test_an_estimate_counts_the_layers_that_backward_computes_again(text, monkeypatch):
    unit = PassTimes(forward_s=1.0, backward_s=2.0)
    monkeypatch.setattr("offload.runs.pass_finder.probe_bytes", lambda _: 1 << 40)
    monkeypatch.setattr(
        "offload.runs.pass_finder.estimate_passes",
        lambda _, units, **__: ModelPasses(units=(unit,) * len(units), other_s=0.0),
    )

    def backward_s(checkpoint):
        settings = config(text, **{"activations.checkpoint": checkpoint})
        finder = PassFinder(settings, plan_run(settings), MachineProfile(), lambda _: None)
        found = finder.find(copy_bytes_per_s=1e9, update_parameters_per_s=1e9)
        return sum(each.backward_s for each in found.units)

    assert backward_s("unit") == backward_s("none") + 4 * unit.forward_s


def test_operations_of_both_passes_are_those_of_the_products():
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 4))
        inputs = torch.zeros(3, 8, requires_grad=True)

    forward, backward = count_passes(_WithLoss(model), inputs, torch.zeros(3, 4, device="meta"))

    products = 2 * 3 * (8 * 16 + 16 * 4)
    assert forward.flops == products
    assert backward.flops == 2 * products
    assert forward.flops_of["model.0"] == 2 * 3 * 8 * 16
    assert forward.moved_bytes >= 4 * 3 * 4 * 3  # two operands and the result of the difference


class _WithLoss(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, inputs, targets):
        return (self.model(inputs) - targets).sum()


def test_a_run_that_does_not_fit_measures_nothing_and_says_what_to_give_up(text):
    seen = []

    plan = plan_and_predict(
        config(
            text,
            **{
                "model.width": 256,
                "model.layers": 6,
                "tiers.host.memory": "1MiB",
                "policy.parameters": "host",
                "train.gradient_dtype": "float32",
            },
        ),
        on_measure=seen.append,
    ).to_json()

    changes = {saving["change"]: saving["smallest_bytes"] for saving in plan["give_up"]}
    assert seen == []
    stored, coarse = 'policy.parameters = "storage"', 'train.gradient_dtype = "parameter"'
    assert set(changes) == {stored, coarse, f"{stored}, {coarse}"}
    assert max(changes.values()) < plan["smallest"]["host_memory"]


def test_each_choice_has_one_line_and_what_budgets_leave_out_is_listed(text):
    plan = plan_and_predict(config(text)).to_json()

    assert {each["choice"] for each in plan["choices"]} == {
        "parameters",
        "gradients",
        "optimizer state",
        "subgroups and window",
        "order",
        "striping",
        "slots and prefetch",
        "overlap",
    }
    assert all(each["why"] and "\n" not in each["why"] for each in plan["choices"])
    outside = {each["what"]: each["num_bytes"] for each in plan["not_covered"]}
    assert outside["activations, logits and loss"] > 0
    assert outside["workspaces and generated code of libraries"] == "not bounded"
    assert plan["co_resident"]["units"] == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_plan_counts_what_autocast_may_keep_of_fp32_weights(text, dtype):
    plan = plan_and_predict(config(text, **{"model.dtype": dtype})).to_json()

    kept = [each["num_bytes"] for each in plan["not_covered"] if "autocast" in each["what"]]
    assert len(kept) == (dtype == "float32")
    # Two bytes for each element but those of biases and norms.
    assert all(1.9 * plan["parameters"] < num_bytes < 2 * plan["parameters"] for num_bytes in kept)


def test_an_interval_in_steps_is_turned_into_time_by_the_predicted_step(text, tmp_path):
    rates = "read_bytes_per_s = 4e8\nwrite_bytes_per_s = 2e8\nmixed_bytes_per_s = 2e8\n"
    profile = tmp_path / "machine.toml"
    profile.write_text(
        f'{MARK}\nschema = 1\n[[paths]]\npath = "{tmp_path}"\nbackend = "threads"\n'
        f"block_bytes = 1048576\nqueue_depth = 4\ndirect = true\n{rates}"
        'measured_at = "2026-01-01T00:00:00+00:00"\n'
    )
    asked = config(text, **{"tiers.storage.commit_every": 1000})

    plan = plan_and_predict(asked, machine_file=profile).to_json()

    commits, step_s = plan["commits"], plan["predicted"]["step_s"]
    assert commits["expected_lost_work_s"] == pytest.approx(
        commits["commit_s"] + 1000 * step_s / 2 + commits["recovery_s"]
    )
    assert commits["best_commit_every"] == max(1, round(commits["best_commit_interval_s"] / step_s))


def test_the_cost_of_commits_follows_the_limit_of_the_path(text, tmp_path):
    profile = tmp_path / "machine.toml"
    profile.write_text(
        f'{MARK}\nschema = 1\n[[paths]]\npath = "{tmp_path}"\nbackend = "threads"\n'
        "block_bytes = 1048576\nqueue_depth = 4\ndirect = true\n"
        "read_bytes_per_s = 4e8\nwrite_bytes_per_s = 2e8\nmixed_bytes_per_s = 2e8\n"
        'measured_at = "2026-01-01T00:00:00+00:00"\n'
    )

    def commit_s(limit):
        asked = config(text, **{"tiers.storage.rate_limit": limit, "policy.parameters": "host"})
        plan = plan_run(asked, profile=read_profile(profile), stores=[tmp_path / "store"])
        return plan.to_json()["commits"]["commit_s"]

    assert commit_s(2 * 10**7) == pytest.approx(10 * commit_s(4 * 10**8))


def test_a_profile_that_cannot_be_written_does_not_end_a_plan(text, tmp_path, monkeypatch):
    def full(file, measured):
        raise ConfigError(f"no room for {file}")

    monkeypatch.setattr("offload.runs.prediction.add_to_profile", full)
    profile = tmp_path / "machine.toml"
    profile.write_text(f"{MARK}\nschema = 1\n")

    plan = plan_and_predict(config(text), machine_file=profile)

    assert plan.prediction.step is not None
    assert "no room for" in plan.warnings[-1]


def test_a_run_that_does_not_fit_reads_nothing_ahead_and_has_no_commits(text):
    plan = plan_and_predict(config(text, **{"tiers.host.memory": "256KiB"})).to_json()

    slots = next(each for each in plan["choices"] if each["choice"] == "slots and prefetch")
    assert not plan["fits"]
    assert plan["commits"] is None
    assert slots["value"].startswith("1 slot of ")
    assert slots["value"].endswith(" 0 ahead")


@pytest.fixture
def fast_machine(monkeypatch):
    """One that is measured to take next to nothing for all but its link."""

    def find(finder, **_):
        unit = PassTimes(forward_s=1e-3, backward_s=2e-3)
        return ModelPasses(units=(unit,) * len(finder._plan.layout.units), other_s=0.0)

    def probe_path(directory, *_, **__):
        return PathRates(
            path=str(directory), read_bytes_per_s=1e9, write_bytes_per_s=1e9, mixed_bytes_per_s=5e8
        )

    monkeypatch.setattr("offload.runs.measurement.PassFinder.find", find)
    monkeypatch.setattr("offload.runs.measurement.probe_path", probe_path)
    monkeypatch.setattr("offload.runs.measurement.probe_update", lambda *_, **__: 1e9)
    monkeypatch.setattr("offload.runs.measurement.copy_rate_bytes_per_s", lambda: 1e10)


@pytest.mark.usefixtures("fast_machine")
@pytest.mark.parametrize("parameters", ["device", "host", "storage"])
def test_a_slow_link_is_in_the_times_and_the_bound(text, parameters):
    device = {"tiers.device.kind": "emulated", "policy.parameters": parameters}

    free = plan_and_predict(config(text, **device)).to_json()
    slow = plan_and_predict(config(text, **device, **{"tiers.device.link_rate": "1MB"})).to_json()

    link, found = slow["link"], slow["predicted"]
    most = max(link["in_bytes_per_step"], link["out_bytes_per_step"])
    assert free["predicted"]["step_s"] < 0.5 * most / 1e6
    # One unit's gradients may be on their way beside the next pass.
    assert 0.5 * most / 1e6 < found["bound_s"] <= found["step_s"]
    assert found["step_s"] >= 0.9 * most / 1e6
    assert found["exposed_io_s"] > free["predicted"]["exposed_io_s"]
    assert slow["machine"]["link"]["in_bytes_per_s"] == 1e6
