"""After an update that failed in its middle nothing computes with parameters of two steps."""

import contextlib
import copy
import itertools

import pytest
import torch
from model.program_parts import refusing
from parity import sessions
from parity.models import SmallGPT, batch, build, loss_of
from parity.oracle import Reference
from parity.side_by_side import OPTIONS, require_equal_state, train_both

import offload
from offload.streaming.buffers import ModelBuffers

PLACES = [
    ("cpu", "storage"),
    ("cpu", "host"),
    ("emulated", "device"),
    ("emulated", "host"),
    ("emulated", "storage"),
]
CASES = [(*place, overlap) for place, overlap in itertools.product(PLACES, ("none", "forward"))]


@pytest.fixture(autouse=True)
def small_records(monkeypatch):
    sessions.use_small_records(monkeypatch)


@pytest.fixture(params=CASES, ids="-".join)
def failed(request, tmp_path):
    """Yields a session whose second update has failed, with checkpoint `one` of before."""
    with opened(tmp_path, *request.param) as (session, model, optimizer, reference):
        yield session, model, optimizer, reference


@contextlib.contextmanager
def opened(tmp_path, device, parameters, overlap):
    order = {"none": "sequential", "forward": "resident"}[overlap]
    how = {"device": device, "overlap": overlap, "order": order}
    with sessions.open_session(tmp_path, (parameters, "storage"), **how) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        reference = Reference(build(SmallGPT), **OPTIONS)
        train_both(model, optimizer, reference, steps=1)
        session.save("one")
        loss_of(model, 1).backward()
        with (
            keeping_no_record(session),
            refusing("write", 2, waits=False, goes_on=True),
            pytest.raises(offload.StorageError, match="what was refused"),
        ):
            step_and_forward(model, optimizer)
        yield session, model, optimizer, reference


def step_and_forward(model, optimizer):
    optimizer.step()
    loss_of(model, 2)  # by then an update that is pending has failed


@contextlib.contextmanager
def keeping_no_record(session):
    """Has updates write every record."""
    session._wrapped._memory.window.drop_cached()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session._wrapped._updates, "kept", lambda _: set())
        yield


def uses(model):
    """Returns what uses parameters."""
    tokens, hidden = batch(0)[0], torch.ones(1, 4, 32)
    return (
        lambda: loss_of(model, 3),
        torch.no_grad()(lambda: loss_of(model, 3)),
        lambda: model.blocks[0](hidden),
        lambda: model.tokens(tokens),
        lambda: model.head.weight,
        model.state_dict,
        lambda: model.load_state_dict(build(SmallGPT).state_dict()),
    )


def test_every_use_of_parameters_is_refused_and_the_message_says_what_to_do(failed):
    session, model, optimizer, _ = failed

    for use in (*uses(model), optimizer.step, session.commit):
        with pytest.raises(offload.StoreError, match=r"two steps.*what was refused.*load.*resume"):
            use()


def test_going_back_to_a_checkpoint_ends_it(failed):
    session, model, optimizer, reference = failed

    session.load("one")
    reference.model.zero_grad()

    require_equal_state(session, model, reference)
    train_both(model, optimizer, reference, steps=2, first=1)
    require_equal_state(session, model, reference)


@pytest.mark.parametrize("case", [("cpu", "host", "none"), ("emulated", "storage", "forward")])
def test_going_back_that_fails_does_not_end_it_and_the_next_does(tmp_path, monkeypatch, case):
    with opened(tmp_path, *case) as (session, model, optimizer, reference):
        with monkeypatch.context() as patched:
            patched.setattr(ModelBuffers, "read", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                session.load("one")

        for use in uses(model):
            with pytest.raises(offload.StoreError, match="two steps"):
                use()
        session.load("one")
        train_both(model, optimizer, reference, steps=1, first=1)
        require_equal_state(session, model, reference)


@pytest.mark.parametrize("case", [("cpu", "host", "none"), ("cpu", "storage", "none")])
def test_a_graph_of_before_gives_no_gradients_of_mixed_parameters(tmp_path, case):
    device, parameters, overlap = case
    placement = (parameters, "storage")
    how = {"device": device, "overlap": overlap, "order": "sequential"}
    with sessions.open_session(tmp_path, placement, **how) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        kept = loss_of(model, 0)
        loss_of(model, 1).backward()
        refused = refusing("write", 2, waits=False, goes_on=True)
        with refused, pytest.raises(offload.StorageError):
            optimizer.step()

        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            kept.backward()


def test_a_failed_load_leaves_a_state_that_was_whole_refused_too(tmp_path, monkeypatch):
    with sessions.open_session(tmp_path, ("host", "host"), overlap="none") as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        reference = Reference(build(SmallGPT), **OPTIONS)
        train_both(model, optimizer, reference, steps=1)
        session.save("one")
        with monkeypatch.context() as patched:
            patched.setattr(ModelBuffers, "read", lambda *_: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                session.load("one")

        with pytest.raises(offload.StoreError, match="two steps"):
            loss_of(model, 0)
        with pytest.raises(offload.StoreError, match="two steps"):
            session.commit()
        session.load("one")
        require_equal_state(session, model, reference)


@pytest.mark.parametrize("case", [
    ("cpu", "host", "none"), ("cpu", "host", "forward"), ("emulated", "device", "none"),
    ("emulated", "device", "forward"), ("cpu", "storage", "none"),
], ids="-".join)  # fmt: skip
def test_parameters_of_two_steps_are_refused_after_the_session_too(tmp_path, caplog, case):
    with opened(tmp_path, *case) as (session, model, _, _):
        pass

    uses_of_plain = (
        lambda: loss_of(model, 3),
        lambda: model.head.weight,
        model.state_dict,
        lambda: list(model.parameters()),
        lambda: copy.deepcopy(model),
    )
    for use in uses_of_plain:
        with pytest.raises(offload.StoreError, match="its session is closed and its values are"):
            use()
    if case[1] != "storage":
        assert "values of two steps" in caplog.text
        with pytest.raises(offload.StoreError, match=r"two steps.*what was refused.*resume"):
            model.head.weight  # noqa: B018 - what is refused
    session.close()


def test_an_update_pending_at_close_that_fails_leaves_parameters_refused(tmp_path):
    session = sessions.open_session(tmp_path, ("host", "storage"), device="cpu", overlap="forward")
    session.open()
    model = session.wrap(build(SmallGPT))
    optimizer = session.AdamW(model.parameters(), **OPTIONS)
    loss_of(model, 1).backward()
    with keeping_no_record(session), refusing("write", 2, waits=False, goes_on=True):
        optimizer.step()
        with pytest.raises(offload.StorageError, match="what was refused"):
            session.close()

    with pytest.raises(offload.StoreError, match=r"two steps.*what was refused.*resume"):
        loss_of(model, 3)


def test_parameters_of_one_step_stay_usable_after_the_session(tmp_path):
    how = {"device": "cpu", "overlap": "none"}
    with sessions.open_session(tmp_path, ("host", "storage"), **how) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        reference = Reference(build(SmallGPT), **OPTIONS)
        train_both(model, optimizer, reference, steps=1)

    expected = reference.model.state_dict()
    assert all(torch.equal(values, expected[n]) for n, values in model.state_dict().items())


@pytest.mark.parametrize("overlap", ["backward", "both"])
def test_an_update_under_backward_that_failed_does_not_say_that_values_are_mixed(tmp_path, overlap):
    with sessions.open_session(tmp_path, device="cpu", overlap=overlap) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        reference = Reference(build(SmallGPT), **OPTIONS)
        train_both(model, optimizer, reference, steps=1)
        session.save("one")
        with keeping_no_record(session), refusing("write", 2, waits=False, goes_on=True):
            session._wrapped._updates.early.use(session._wrapped._updates.pipeline, kept=())
            loss_of(model, 1).backward()
            # The latter where it is known before the step begins.
            failures = (offload.StorageError, offload.StoreError)
            with pytest.raises(failures, match="what was refused"):
                optimizer.step()

        for use in (optimizer.step, session.commit):
            with pytest.raises(offload.StoreError, match=r"began under backward.*load") as found:
                use()
            assert "between two steps" not in str(found.value)
        session.load("one")
        model.zero_grad()
        reference.model.zero_grad()
        require_equal_state(session, model, reference)


def test_a_model_whose_session_is_closed_has_its_own_classes_again(tmp_path):
    types = [type(module) for module in build(SmallGPT).modules()]
    with opened(tmp_path, "cpu", "host", "none") as (_, model, _, _):
        assert [type(module) for module in model.modules()] != types

    assert [type(module) for module in model.modules()] == types
