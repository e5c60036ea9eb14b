"""Options and schedulers after a resume: those of the commit, as in a program all in memory."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from parity import sessions
from parity.models import SmallGPT, build, loss_of
from parity.sessions import open_session, use_small_records
from torch.optim import lr_scheduler

import offload

TESTS = Path(__file__).parents[1]
COMMITTED, LAST = 3, 6
SCHEDULERS = {
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, [0.01, 0.03], total_steps=9),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 9),
}


@pytest.fixture(autouse=True)
def small_records(monkeypatch):
    use_small_records(monkeypatch)


def groups_of(model):
    """Returns two param_groups, of named parameters."""
    named = list(model.named_parameters())
    return [{"params": named[:4]}, {"params": named[4:], "lr": 3e-3, "weight_decay": 0.1}]


def options_of(optimizer):
    return [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]


def in_session(session):
    model = session.wrap(build(SmallGPT))
    return model, session.AdamW(groups_of(model), lr=1e-3)


def metadata_of(optimizer, scheduler):
    return {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}


def take_back(metadata, optimizer, scheduler):
    optimizer.load_state_dict(metadata["optimizer"])
    scheduler.load_state_dict(metadata["scheduler"])


def edit(optimizer):
    """Changes options that no scheduler sets."""
    optimizer.param_groups[0]["weight_decay"] = 0.25
    optimizer.param_groups[1]["eps"] = 1e-5


def run(model, optimizer, scheduler, steps):
    """Returns the losses of `steps` and the learning rates with which they were made."""
    seen = []
    for index in steps:
        loss = loss_of(model, index)
        loss.backward()
        seen.append((loss.item(), *(group["lr"] for group in optimizer.param_groups)))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return seen


def uninterrupted(store, name):
    """Returns what steps after the commit show, the options then, and the digest at the end."""
    with open_session(store) as session:
        model, optimizer = in_session(session)
        scheduler = SCHEDULERS[name](optimizer)
        run(model, optimizer, scheduler, range(COMMITTED))
        edit(optimizer)
        options = options_of(optimizer)
        seen = run(model, optimizer, scheduler, range(COMMITTED, LAST))
        return seen, options, session.state_digest()


def commit_and_die(store, name):
    with open_session(store) as session:
        model, optimizer = in_session(session)
        scheduler = SCHEDULERS[name](optimizer)
        run(model, optimizer, scheduler, range(COMMITTED))
        edit(optimizer)
        session.commit(metadata_of(optimizer, scheduler))
        run(model, optimizer, scheduler, [COMMITTED])
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_killed_program_goes_on_with_the_options_of_its_commit(tmp_path, name):
    expected = uninterrupted(tmp_path / "whole", name)

    child = subprocess.run(
        [sys.executable, __file__, str(tmp_path / "killed"), name, sessions.DEVICE],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        check=False,
    )
    with open_session(tmp_path / "killed", resume=True) as session:
        model, optimizer = in_session(session)
        scheduler = SCHEDULERS[name](optimizer)
        take_back(session.metadata, optimizer, scheduler)
        options = options_of(optimizer)
        seen = run(model, optimizer, scheduler, range(COMMITTED, LAST))
        digest = session.state_digest()

    assert child.returncode == -signal.SIGKILL
    assert (seen, options, digest) == expected


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_checkpoint_that_is_loaded_gives_options_and_schedule_back(tmp_path, name):
    with open_session(tmp_path) as session:
        model, optimizer = in_session(session)
        scheduler = SCHEDULERS[name](optimizer)
        run(model, optimizer, scheduler, range(COMMITTED))
        edit(optimizer)
        session.save("then", metadata_of(optimizer, scheduler))
        options = options_of(optimizer)
        expected = run(model, optimizer, scheduler, range(COMMITTED, LAST))
        digest = session.state_digest()

        session.load("then")
        take_back(session.metadata, optimizer, scheduler)

        assert options_of(optimizer) == options
        assert run(model, optimizer, scheduler, range(COMMITTED, LAST)) == expected
        assert session.state_digest() == digest


@pytest.mark.parametrize("name", SCHEDULERS)
def test_an_optimizer_alone_goes_on_with_the_options_of_its_commit(tmp_path, name):
    def make(model, store, **options):
        groups = groups_of(model)
        return offload.AdamW(groups, lr=1e-3, host_memory="1MiB", store=tmp_path / store, **options)

    model = build(SmallGPT)
    with make(model, "store") as optimizer:
        scheduler = SCHEDULERS[name](optimizer)
        run(model, optimizer, scheduler, range(COMMITTED))
        edit(optimizer)
        optimizer.commit(metadata_of(optimizer, scheduler))
        options = options_of(optimizer)
        expected = run(model, optimizer, scheduler, range(COMMITTED, LAST))
        digest = optimizer.state_digest()

    model = build(SmallGPT, seed=1)
    with make(model, "store", resume=True) as optimizer:
        scheduler = SCHEDULERS[name](optimizer)
        take_back(optimizer.metadata, optimizer, scheduler)

        assert options_of(optimizer) == options
        assert run(model, optimizer, scheduler, range(COMMITTED, LAST)) == expected
        assert optimizer.state_digest() == digest


@pytest.mark.parametrize("is_made_first", [True, False])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_learning_rates_are_those_of_torch_whenever_the_scheduler_is_made(
    tmp_path, name, is_made_first
):
    def resumed_rates(optimizer, model, metadata):
        scheduler = SCHEDULERS[name](optimizer) if is_made_first else None
        optimizer.load_state_dict(metadata["optimizer"])
        scheduler = scheduler or SCHEDULERS[name](optimizer)
        scheduler.load_state_dict(metadata["scheduler"])
        return [rates for _, *rates in run(model, optimizer, scheduler, range(COMMITTED, LAST))]

    model = build(SmallGPT)
    plain = torch.optim.AdamW(groups_of(model), lr=1e-3)
    scheduler = SCHEDULERS[name](plain)
    run(model, plain, scheduler, range(COMMITTED))
    metadata = metadata_of(plain, scheduler)
    expected = resumed_rates(torch.optim.AdamW(groups_of(model), lr=1e-3), model, metadata)

    with open_session(tmp_path) as session:
        model, optimizer = in_session(session)
        scheduler = SCHEDULERS[name](optimizer)
        run(model, optimizer, scheduler, range(COMMITTED))
        session.commit(metadata_of(optimizer, scheduler))
    with open_session(tmp_path, resume=True) as session:
        model, optimizer = in_session(session)
        assert resumed_rates(optimizer, model, session.metadata) == expected


def test_what_torch_saves_and_loads_is_taken_too(tmp_path):
    with open_session(tmp_path) as session:
        _, optimizer = in_session(session)
        saved = options_of(optimizer)
        torch.save(optimizer.state_dict(), tmp_path / "options.pt")
        edit(optimizer)

        optimizer.load_state_dict(torch.load(tmp_path / "options.pt"))

        assert options_of(optimizer) == saved


@pytest.mark.parametrize("name", ["Adam", "Adagrad", "Lion", "Muon", "SGD"])
def test_options_of_every_optimizer_come_back_from_json(tmp_path, name):
    with open_session(tmp_path, optimizer=name.lower()) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = getattr(session, name)(model.parameters())
        saved = optimizer.state_dict()
        optimizer.param_groups[0]["lr"] = 0.5

        optimizer.load_state_dict(json.loads(json.dumps(saved)))

        assert optimizer.state_dict() == saved
        loss_of(model, 0).backward()
        optimizer.step()


def test_options_of_another_step_or_with_state_are_refused(tmp_path):
    with open_session(tmp_path) as session:
        model, optimizer = in_session(session)
        before = optimizer.state_dict()
        in_memory = {**before, "state": {0: {"exp_avg": torch.zeros(1)}}}
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        now = json.loads(json.dumps(optimizer.state_dict()))
        options = options_of(optimizer)

        with pytest.raises(offload.StoreError, match=r"after 1 steps.*of step 0.*resume=True"):
            optimizer.load_state_dict(before)
        with pytest.raises(offload.StoreError, match="state in memory"):
            optimizer.load_state_dict(in_memory)
        group = {k: v for k, v in now["param_groups"][0].items() if k != "lr"}
        with pytest.raises(offload.ConfigError, match="`lr`"):
            optimizer.load_state_dict({**now, "param_groups": [group, group]})
        with pytest.raises(ValueError, match="parameter groups"):
            optimizer.load_state_dict({**now, "param_groups": now["param_groups"][:1]})

        assert options_of(optimizer) == options


def test_metadata_that_would_come_back_changed_is_refused(tmp_path):
    with open_session(tmp_path) as session:
        _, optimizer = in_session(session)
        scheduler = lr_scheduler.MultiStepLR(optimizer, [2, 4])
        session.commit({"step": 0})

        with pytest.raises(offload.ConfigError, match="key 2 is `int`"):
            session.commit(metadata_of(optimizer, scheduler))
        kept = {k: v for k, v in scheduler.state_dict().items() if k != "milestones"}
        session.commit({"scheduler": kept})

    with open_session(tmp_path, resume=True) as session:
        assert session.metadata == {"scheduler": kept}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as its_patch:
        use_small_records(its_patch)
        its_patch.setattr("parity.sessions.DEVICE", sys.argv[3])
        commit_and_die(Path(sys.argv[1]), sys.argv[2])
