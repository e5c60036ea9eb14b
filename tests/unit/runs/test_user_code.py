"""What the user's model raises in a run: said where, with nothing lost, and resumed."""

import argparse
import json
import sys

import pytest

from offload.cli.app import run
from offload.config import build_config
from offload.errors import ModelError
from offload.runs.train import run_training

MODEL = """
import torch

FAILS_AT = {fails_at}  # the number of a forward in training, from 1
calls = 0


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(context, value):
        return value * 2

    @staticmethod
    def backward(context, gradient):
        check("backward")
        return gradient * 2


def check(where):
    if calls == FAILS_AT and where == "{where}":
        raise ValueError("no such batch")


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(256, 32)
        self.layers = torch.nn.ModuleList([torch.nn.Linear(32, 32) for _ in range(4)])

    def forward(self, inputs, targets):
        global calls
        if inputs.device.type != "meta" and self.training:
            calls += 1
            check("forward")
        hidden = self.embedding(inputs)
        for layer in self.layers:
            hidden = hidden + Twice.apply(torch.tanh(layer(hidden)))
        return hidden.float().square().mean()


def build(**_):
    if FAILS_AT == 0:
        raise KeyError("no such width")
    net = Net().to(torch.bfloat16)
    if FAILS_AT == -2 and net.embedding.weight.device.type != "meta":
        raise KeyError("no such checkpoint")
    return net
"""


@pytest.fixture
def configure(tmp_path, monkeypatch):
    """Writes a module whose model fails in its n-th forward, or backward, and names it."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("offload.runs.train.probe_run", lambda *_: None)  # takes seconds

    def configured(name, *, fails_at, where="forward", **overrides):
        sys.modules.pop(name, None)  # it was another's, or is mended
        (tmp_path / f"{name}.py").write_text(MODEL.format(fails_at=fails_at, where=where))
        return build_config(
            {
                "model": {"factory": f"{name}:build", "context": 32},
                "data": {"source": "files", "files": [argparse.__file__]},
                "train": {"steps": 5, "batch": 2, "micro_steps": 2, "max_grad_norm": 0.0},
                "tiers": {"host": {"memory": "8MiB"}, "storage": {"capacity": "64MiB"}},
                "policy": {"parameters": "storage"},
            },
            overrides=overrides,
        )

    return configured


# Forward 6 is the second micro-step of step 3.
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("overlap", ["none", "forward", "both"])
def test_steps_before_one_that_fails_are_kept_and_a_resume_gives_the_same_bits(
    tmp_path, configure, where, overlap
):
    key = {"policy.overlap": overlap}
    in_memory = configure("whole", fails_at=-1, offload=False)
    whole = run_training(in_memory, run_dir=tmp_path / "whole")
    run_dir = tmp_path / "run"

    with pytest.raises(ModelError) as raised:
        run_training(configure("wrong", fails_at=6, where=where, **key), run_dir=run_dir)
    message = str(raised.value)
    assert len((run_dir / "metrics.jsonl").read_text().splitlines()) == 2
    mended = configure("wrong", fails_at=-1, **key)
    resumed = run_training(mended, run_dir=run_dir, resume="auto")

    assert isinstance(raised.value.__cause__, ValueError)
    assert "after step 2 of 5" in message
    line = 1 + MODEL[: MODEL.index("raise ValueError")].count("\n")
    assert f"{tmp_path}/wrong.py`, line {line}, in `check`" in message
    assert "ValueError: no such batch" in message
    assert f"--run-dir {run_dir} --resume auto` after step 2, which is committed: no" in message
    assert resumed.first_step == 3
    assert resumed.losses == whole.losses[2:]
    assert resumed.state_digest == whole.state_digest


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ({"offload": False}, "; 2 steps were not committed"),
        ({"tiers.storage.durability": "none"}, "; 2 steps were not committed"),
    ],
)
def test_a_run_that_commits_nothing_says_so(tmp_path, configure, key, message):
    wrong = configure("wrong", fails_at=5, **key)

    with pytest.raises(ModelError, match="start anew with `--run-dir") as raised:
        run_training(wrong, run_dir=tmp_path / "run")

    assert message in str(raised.value)


def test_a_factory_that_raises_is_named_with_its_line_and_nothing_is_written(tmp_path, configure):
    wrong = configure("factory", fails_at=0)

    with pytest.raises(ModelError, match=r"`factory:build` raised KeyError: .*, line 43, in `bu"):
        run_training(wrong, run_dir=tmp_path / "run")

    assert not (tmp_path / "run").exists()


def test_a_factory_that_raises_in_a_run_that_is_gone_on_with_loses_nothing(tmp_path, configure):
    whole = run_training(configure("again", fails_at=-1), run_dir=tmp_path / "run")

    wrong = configure("again", fails_at=-2, **{"train.steps": 6})
    with pytest.raises(ModelError) as raised:
        run_training(wrong, run_dir=tmp_path / "run", resume="auto")
    mended = configure("again", fails_at=-1, **{"train.steps": 6})
    resumed = run_training(mended, run_dir=tmp_path / "run", resume="auto")

    message = str(raised.value)
    assert "the run ended before its first step: " in message
    assert f"go on with `--run-dir {tmp_path}/run --resume auto` after its last commit" in message
    assert "commit of later steps" not in message
    assert whole.steps == 5
    assert resumed.first_step == 6


def test_a_module_that_does_not_compile_is_named_with_its_line(tmp_path, configure):
    wrong = configure("broken", fails_at=1)
    (tmp_path / "broken.py").write_text("def build(:\n")

    with pytest.raises(ModelError, match=r"import of .*SyntaxError: .*broken.py, line 1"):
        run_training(wrong, run_dir=tmp_path / "run")


def test_the_command_shows_the_traceback_where_it_is_asked_for(
    tmp_path, configure, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(configure("shown", fails_at=0).to_toml())

    code = run(["train", "run.toml", "--json"])
    brief = capsys.readouterr()
    verbose_code = run(["--verbose", "train", "run.toml"])
    verbose = capsys.readouterr()

    assert code == verbose_code == 1
    assert json.loads(brief.out)["error"]["type"] == "ModelError"
    assert "Traceback" not in brief.err
    assert "KeyError: 'no such width'" in verbose.err
    assert "Traceback" in verbose.err
    assert "error: `model.factory`" in verbose.err
