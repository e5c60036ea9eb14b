"""Models of `model.factory`: what a run asks of them, and where they are found."""

import sys

import pytest

from offload.cli.app import run
from offload.config import build_config
from offload.errors import ConfigError
from offload.runs.planning import plan_run
from offload.runs.prediction import plan_and_predict
from offload.runs.rehearsal import RehearsedModel
from offload.runs.train import run_training

MODULE = """
import torch


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(256, 256).bfloat16()

    def {forward}


def build(context):
    return Net()
"""
LOSS = "torch.nn.functional.cross_entropy(self.table(x).float().flatten(0, 1), y.flatten())"
WRONG = {
    "one_argument": ("forward(self, x):\n        return self.table(x)", "missing|too many"),
    "three_arguments": ("forward(self, x, y, mask):\n        return x", "mask"),
    "no_forward": ("score(self, x, y):\n        return x", "without a `forward`"),
    "logits": ("forward(self, x, y):\n        return self.table(x)", r"shape \(4, 32, 256\)"),
    "pair": (f"forward(self, x, y):\n        return x, {LOSS}", "returns tuple"),
    "detached": (f"forward(self, x, y):\n        return {LOSS}.detach()", "no gradient"),
}


@pytest.fixture
def values(tmp_path, monkeypatch):
    """Returns a function that gives the values of a run whose model has this forward."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "text").write_bytes(bytes(range(256)) * 40)

    def make(name, forward):
        (tmp_path / f"{name}.py").write_text(MODULE.format(forward=forward))
        monkeypatch.delitem(sys.modules, name, raising=False)
        return {
            "model": {"factory": f"{name}:build", "context": 32},
            "data": {"source": "files", "files": ["text"]},
            "train": {"steps": 1, "batch": 4},
            "tiers": {"host": {"memory": "32MiB"}},
        }

    return make


@pytest.mark.parametrize("name", WRONG)
def test_a_model_that_gives_no_loss_is_refused_before_anything_is_written(values, tmp_path, name):
    forward, found = WRONG[name]
    config = build_config(values(name, forward))

    with pytest.raises(ConfigError, match=f"expected a module with `forward.*found .*{found}"):
        plan_and_predict(config)
    with pytest.raises(ConfigError, match=f"expected a module with `forward.*found .*{found}"):
        run_training(config, run_dir=tmp_path / "run")

    assert not (tmp_path / "run").exists()


def test_a_model_that_needs_values_is_refused_by_its_first_loss(values, tmp_path):
    forward = "forward(self, x, y):\n        x.max().item()\n        return self.table(x)"
    config = build_config(values("needs_values", forward))

    with pytest.raises(ConfigError, match=r"found one that returns a tensor of shape"):
        run_training(config, run_dir=tmp_path / "run")


def test_a_factory_is_found_beside_the_file_of_the_run(values, tmp_path, monkeypatch, capsys):
    run_toml = tmp_path / "project" / "run.toml"
    run_toml.parent.mkdir()
    settings = build_config(values("beside", f"forward(self, x, y):\n        return {LOSS}"))
    run_toml.write_text(settings.to_toml())
    (tmp_path / "beside.py").rename(run_toml.with_name("beside.py"))
    before = list(sys.path)

    code = run(["train", str(run_toml), "--run-dir", "run"])

    assert code == 0, capsys.readouterr()
    assert sys.path == before


COUNTED = f"""forward(self, x, y):
        globals().setdefault("IS_META", []).append(x.is_meta)
        return {LOSS}"""


def test_a_run_calls_its_model_once_before_it_has_values(values, tmp_path):
    config = build_config(values("counted", COUNTED))

    run_training(config, run_dir=tmp_path / "run")

    assert sys.modules["counted"].IS_META.count(True) == 1


def test_one_rehearsal_does_for_the_plans_of_all_policies(values):
    policies = [
        {"policy.parameters": "storage", "policy.overlap": "none"},
        {"policy.parameters": "storage", "policy.prefetch": 0},
        {"policy.parameters": "host", "tiers.device.kind": "emulated"},
    ]
    written = values("rehearsed", COUNTED)
    written["tiers"]["storage"] = {"capacity": "1GiB"}  # or it is the free space of the moment
    configs = [build_config(written, overrides=policy) for policy in policies]
    model = RehearsedModel.of(configs[0])

    found = [plan_run(config, model=model).to_json() for config in configs]

    assert sys.modules["rehearsed"].IS_META == [True]
    assert found == [plan_run(config).to_json() for config in configs]
