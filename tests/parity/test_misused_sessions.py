"""What a program may do to sessions by mistake works, or says what is wrong."""

import pytest
import torch
from parity.models import SmallGPT, build, loss_of
from parity.oracle import Reference
from parity.sessions import open_session, use_small_records
from parity.side_by_side import OPTIONS, require_equal_state, train_both
from torch import nn

import offload

PLACES = [("storage", "storage", "forward"), ("host", "storage", "none"), ("host", "host", "none")]


@pytest.fixture(autouse=True)
def small_records(monkeypatch):
    use_small_records(monkeypatch)


def opened(path, place):
    return open_session(path, place[:2], overlap=place[2])


def train(session, model, *, steps=2):
    optimizer = session.AdamW(model.parameters(), **OPTIONS)
    reference = Reference(build(SmallGPT), **OPTIONS)
    train_both(model, optimizer, reference, steps=steps)
    require_equal_state(session, model, reference)


@pytest.mark.parametrize("place", PLACES, ids="-".join)
def test_a_model_that_is_wrapped_in_inference_mode_trains(tmp_path, place):
    with opened(tmp_path, place) as session:
        model = build(SmallGPT)

        with torch.inference_mode():
            session.wrap(model)

        train(session, model)


@pytest.mark.parametrize("place", PLACES, ids="-".join)
def test_a_model_that_was_built_in_inference_mode_is_refused(tmp_path, place):
    with opened(tmp_path, place) as session, torch.inference_mode():
        model = build(SmallGPT)

        with pytest.raises(offload.ConfigError, match="made in inference mode"):
            session.wrap(model)


@pytest.mark.parametrize("place", PLACES, ids="-".join)
def test_a_model_of_an_open_session_is_refused_by_another_until_that_is_closed(tmp_path, place):
    model = build(SmallGPT)
    with opened(tmp_path / "a", place) as session:
        session.wrap(model)

        with opened(tmp_path / "b", place) as other:
            with pytest.raises(offload.StoreError, match=r"session.*(close|build another)"):
                other.wrap(model)
            with pytest.raises(offload.StoreError, match=r"session.*(close|build another)"):
                other.wrap(model.blocks[1])
        train(session, model)

    if place[0] == "host":
        with opened(tmp_path / "c", place) as session:
            session.wrap(model)


def test_a_parameter_has_one_optimizer_alone(tmp_path):
    parameters = list(nn.Linear(4, 4).parameters())
    how = {"host_memory": "16MiB"}
    refused = pytest.raises(offload.StoreError, match="of a session that is open")
    with offload.AdamW(parameters, store=tmp_path / "a", **how), refused:
        offload.SGD(parameters, lr=0.1, store=tmp_path / "b", **how)

    offload.SGD(parameters, lr=0.1, store=tmp_path / "b", **how).close()


def test_a_model_that_could_not_be_wrapped_can_be_wrapped_again(tmp_path):
    model = build(SmallGPT)
    with (
        open_session(tmp_path / "a", budget_bytes=4096) as session,
        pytest.raises(offload.PlanError),
    ):
        session.wrap(model)

    with open_session(tmp_path / "b") as session:
        session.wrap(model)
        train(session, model)


def test_a_model_without_parameters_runs_and_is_committed(tmp_path):
    with open_session(tmp_path) as session:
        model = session.wrap(nn.Sequential(nn.ReLU(), nn.Flatten()))

        found = model(torch.tensor([[-1.0, 2.0]]))
        session.commit()
        with pytest.raises(ValueError, match="empty parameter list"):
            session.AdamW(model.parameters())

    assert found.tolist() == [[0.0, 2.0]]


def test_an_empty_list_of_parameters_is_refused_as_by_torch(tmp_path):
    with open_session(tmp_path) as session:
        model = session.wrap(build(SmallGPT))

        with pytest.raises(ValueError, match="empty parameter list"):
            session.AdamW([])
        train(session, model)


def test_an_error_while_a_model_is_built_leaves_a_session_that_builds_another(tmp_path):
    with open_session(tmp_path) as session:
        with pytest.raises(ZeroDivisionError), session.building():
            unfinished = [build(SmallGPT), 1 / 0]

        assert type(nn.Linear(2, 2)._parameters) is dict
        with session.building():
            model = build(SmallGPT)
        session.wrap(model)
        train(session, model)
        assert "unfinished" not in locals()


def test_two_sessions_of_one_thread_take_turns(tmp_path):
    with open_session(tmp_path / "a") as one, open_session(tmp_path / "b") as other:
        models = [session.wrap(build(SmallGPT)) for session in (one, other)]
        optimizers = [
            session.AdamW(model.parameters(), **OPTIONS)
            for session, model in zip((one, other), models, strict=True)
        ]
        reference = Reference(build(SmallGPT), **OPTIONS)
        for index in range(3):
            losses = [loss_of(model, index) for model in (*models, reference.model)]
            for loss in losses:
                loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            reference.step()
            reference.model.zero_grad()

        for session, model in zip((one, other), models, strict=True):
            require_equal_state(session, model, reference)


def test_a_session_that_was_forgotten_says_why_its_store_is_not_free(tmp_path):
    forgotten = open_session(tmp_path)
    forgotten.open()

    with pytest.raises(offload.StoreError, match=r"another store object of this.*`close\(\)`"):
        open_session(tmp_path).open()

    forgotten.close()
    with open_session(tmp_path) as session:
        assert session.checkpoints() == []


@pytest.mark.parametrize("place", PLACES, ids="-".join)
def test_a_step_after_the_session_was_closed_says_so(tmp_path, place):
    with opened(tmp_path, place) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        loss_of(model, 0).backward()

    with pytest.raises(offload.StoreError, match="expected an open session.*found it closed"):
        optimizer.step()
