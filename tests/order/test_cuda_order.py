"""What orders copies and computing on CUDA, found by a runtime that looks at every access.

Whole trainings run through `CudaDevice` without a GPU: they are exact, and nothing in them is left
to chance. That a missing order is found is shown by taking each of them out.
"""

import cuda_without_gpu
import pytest
import torch
from parity.models import SmallGPT, build, loss_of
from parity.oracle import Reference, same_bits
from parity.sessions import open_session, use_small_records
from parity.side_by_side import (
    OPTIONS,
    require_equal_gradients,
    require_equal_state,
    train_both,
)

from offload.devices import cuda as cuda_module
from offload.devices import make_device
from offload.devices.cuda import CudaDevice
from offload.errors import BudgetError, StoreError
from offload.memory import Arena
from offload.streaming import resident, unit
from offload.streaming.tier import HostUnits

UNIT_BYTES = 28672
"""Of the largest unit of `SmallGPT`."""
PLACES = [("device", 5), ("host", 1), ("host", 2), ("storage", 1), ("storage", 2), ("storage", 7)]


@pytest.fixture(params=[True, False], ids=["prompt", "late"])
def cuda(request, monkeypatch):
    use_small_records(monkeypatch)
    runtime = cuda_without_gpu.pretend(monkeypatch, tells=request.param)
    with runtime.watching():
        yield runtime


def _session(tmp_path, parameters="host", *, slots=2, **options):
    memory = slots * UNIT_BYTES
    placement = parameters, "storage"
    return open_session(tmp_path, placement, device="cuda", device_memory=memory, **options)


def _train(session, *, steps=3, **options):
    model, reference = build(SmallGPT), Reference(build(SmallGPT), **OPTIONS)
    session.wrap(model)
    optimizer = session.AdamW(model.parameters(), **OPTIONS)
    train_both(model, optimizer, reference, steps=steps, **options)
    require_equal_state(session, model, reference)
    return model, optimizer, reference


@pytest.mark.parametrize("overlap", [pytest.param("none", marks=pytest.mark.slow), "forward"])
@pytest.mark.parametrize("parameters, slots", PLACES)
def test_training_is_exact_and_every_access_is_ordered(tmp_path, cuda, parameters, slots, overlap):
    with _session(tmp_path, parameters, slots=slots, overlap=overlap) as session:
        _train(session, micro_steps=2, max_norm=0.05)

    assert cuda.races == []
    assert cuda.launched > 0


@pytest.mark.parametrize("parameters, slots", [PLACES[0], PLACES[2], PLACES[4]])
def test_gradients_from_before_wrapping_count(tmp_path, cuda, parameters, slots):
    plain, wrapped = build(SmallGPT), build(SmallGPT)
    for model in (plain, wrapped):
        loss_of(model, 0).backward()

    with _session(tmp_path, parameters, slots=slots) as session:
        session.wrap(wrapped)
        for model in (plain, wrapped):
            loss_of(model, 1).backward()

        for (name, p), q in zip(plain.named_parameters(), wrapped.parameters(), strict=True):
            assert same_bits(p.grad, q.grad.clone()), name
    assert cuda.races == []


@pytest.mark.parametrize("parameters, slots", PLACES[1:5])
def test_a_state_dict_comes_down_to_host_memory(tmp_path, cuda, parameters, slots):
    with _session(tmp_path, parameters, slots=slots) as session:
        model, _, reference = _train(session, steps=1)
        before = session._device.copied_out_bytes

        values = model.state_dict()

        expected = reference.model.state_dict()
        assert all(same_bits(values[name], expected[name]) for name in expected)
        num_bytes = sum(value.nbytes for value in expected.values())
        assert session._device.copied_out_bytes - before == num_bytes
    assert cuda.races == []


@pytest.mark.parametrize("offload", ["host", "storage"])
@pytest.mark.parametrize("parameters", ["device", "storage"])
def test_activations_that_move_are_ordered(tmp_path, cuda, parameters, offload):
    config = {"activations": {"offload": offload, "memory": 1 << 18, "threshold": 1}}
    with _session(tmp_path, parameters, slots=5, budget_bytes=4 << 20, config=config) as session:
        _train(session)
        assert session.stats().activation_offload_bytes > 0

    assert cuda.races == []


@pytest.mark.parametrize("parameters, slots", PLACES[1:3])
def test_an_update_waits_for_copies_that_an_evaluation_began(tmp_path, cuda, parameters, slots):
    with _session(tmp_path, parameters, slots=slots, overlap="none") as session:
        model, optimizer, reference = _train(session, steps=1)
        for index in range(2):
            for each in (model, reference.model):
                loss_of(each, index).backward()
            with torch.no_grad():  # the last copies are of units that no gradient is waited for
                loss_of(model, index)
            optimizer.step()
            optimizer.zero_grad()
            reference.step()
            reference.model.zero_grad()
        require_equal_state(session, model, reference)

    assert cuda.races == []


@pytest.mark.parametrize("parameters, slots", PLACES)
def test_inference_mode_between_steps(tmp_path, cuda, parameters, slots):
    with _session(tmp_path, parameters, slots=slots) as session:
        model, optimizer, reference = _train(session, steps=1)
        with torch.inference_mode():
            assert same_bits(loss_of(model, 7), loss_of(reference.model, 7))
        train_both(model, optimizer, reference, steps=2, first=1)
        require_equal_state(session, model, reference)

    assert cuda.races == []


def test_a_pass_in_another_stream_is_ordered_with_those_before_and_after(tmp_path, cuda):
    side = cuda.Stream(None)
    with _session(tmp_path, "storage", slots=1) as session:
        model, _, reference = _train(session, steps=1)
        for index in range(2):
            with cuda.computing_in(side), torch.no_grad():
                assert same_bits(loss_of(model, index), loss_of(reference.model, index))
            with torch.no_grad():
                assert same_bits(loss_of(model, index), loss_of(reference.model, index))

    assert cuda.races == []


@pytest.mark.parametrize("parameters, slots", [PLACES[0], PLACES[2], PLACES[5]])
def test_a_pass_that_a_graph_would_repeat_is_refused(tmp_path, cuda, parameters, slots):
    with _session(tmp_path, parameters, slots=slots) as session:
        model, _, reference = _train(session, steps=1)
        with torch.no_grad():
            loss_of(model, 1)  # whatever has room is in its slot
            cuda.captures = True
            for each in (model, model.blocks[0]):
                with pytest.raises(StoreError, match="outside `torch.cuda.graph`"):
                    each(torch.zeros(1, 1, dtype=torch.int64))
            cuda.captures = False

            assert same_bits(loss_of(model, 1), loss_of(reference.model, 1))


@pytest.mark.parametrize("is_followed", [True, False])
def test_sums_over_slots_are_ordered_with_those_of_another_stream(
    tmp_path, monkeypatch, cuda, is_followed
):
    side = cuda.Stream(None)
    with _session(tmp_path, "storage", slots=1) as session:
        model, _, reference = _train(session, steps=1)
        if not is_followed:
            monkeypatch.setattr(CudaDevice, "follow", lambda self, stream: None)
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side), torch.no_grad():
            assert same_bits(loss_of(model, 0), loss_of(reference.model, 0))
        # Nobody waits for that stream; the unit that it left in the slot is of no more use here.
        with torch.no_grad():
            assert same_bits(loss_of(model, 1), loss_of(reference.model, 1))

    assert bool(cuda.races) != is_followed


@pytest.mark.parametrize("parameters, slots", PLACES[1:5])
def test_a_graph_keeps_no_slot_of_parameters_that_came_from_the_cpu(
    tmp_path, cuda, parameters, slots
):
    with _session(tmp_path, parameters, slots=slots) as session:
        model, _, reference = _train(session, steps=1)
        losses = [loss_of(each, 3) for each in (model, reference.model)]
        residency = session._wrapped.residency

        assert not any(unit.kept_names for unit in residency.units)
        for loss in losses:
            loss.backward()
        require_equal_gradients(model, reference)


def _copies(device):
    """Fills memory three times, and computes with it."""
    arena = Arena(4096)
    arena.open()
    source = arena.whole()
    device.register_host(source)
    region = device.allocate(4096)
    for _ in range(3):
        slot = device.tensor_over(region)
        copy = device.copy_in(source, slot)
        copy.wait()
        slot + 1
        del slot
    moved = device.empty(4096)
    device.copy_in(source, moved).wait()
    into = torch.frombuffer(source, dtype=torch.uint8)
    copies = [device.copy_out(moved + 1, into), device.copy_out(moved + 2, into)]
    del moved
    for copy in copies:
        copy.synchronize()


FORGOTTEN = {
    "the wait of what computes": (cuda_module._CudaCopy, "wait"),
    "the last uses of a slot": (CudaDevice, "_note_uses"),
    "the stream that allocates": (cuda_without_gpu.Stream, "synchronize"),
    "the stream that computes a result": (cuda_without_gpu.Stream, "wait_stream"),
    "the streams that memory was recorded for": (cuda_without_gpu.Runtime, "record_stream"),
}


@pytest.mark.parametrize("order", [None, *FORGOTTEN])
def test_the_runtime_finds_what_is_not_ordered(monkeypatch, order):
    cuda = cuda_without_gpu.pretend(monkeypatch, tells=False)
    device = make_device("cuda")
    device.open()
    if order is not None:
        where, name = FORGOTTEN[order]
        monkeypatch.setattr(where, name, lambda *_, **__: None)

    with cuda.watching():
        _copies(device)

    assert bool(cuda.races) == (order is not None)
    device.close()


def test_a_slot_is_filled_after_its_use_in_a_stream_that_nobody_has_waited_for(monkeypatch):
    cuda = cuda_without_gpu.pretend(monkeypatch, tells=False)
    device, side = make_device("cuda"), cuda.Stream(None)
    device.open()
    arena = Arena(4096)
    arena.open()
    region = device.allocate(4096)

    with cuda.watching():
        slot = device.tensor_over(region)
        copy = device.copy_in(arena.whole(), slot)
        with cuda.stream(side):
            copy.wait()
            slot + 1
        del slot  # by a thread that computes in another stream
        device.copy_in(arena.whole(), device.tensor_over(region)).wait()

    assert cuda.races == []
    device.close()


def test_the_runtime_finds_an_update_that_does_not_wait_for_copies(tmp_path, monkeypatch, cuda):
    monkeypatch.setattr(HostUnits, "settle", lambda self: None)

    with _session(tmp_path, "host", overlap="none") as session:
        model, optimizer, _ = _train(session, steps=1)
        loss_of(model, 0).backward()
        with torch.no_grad():
            loss_of(model, 1)
        optimizer.step()

    assert "host memory changed under a copy that reads it" in cuda.races


@pytest.mark.parametrize("ending", ["step", "commit"])
@pytest.mark.parametrize("parameters, slots", [("device", 5), ("host", 2), ("storage", 2)])
def test_a_write_to_an_absent_parameter_is_refused_by_the_next_step_and_commit(
    tmp_path, cuda, monkeypatch, parameters, slots, ending
):
    # A fetch that looked would wait for all that is computed.
    with _session(tmp_path, parameters, slots=slots) as session:
        model, optimizer, _ = _train(session, steps=1)
        loss_of(model, 0).backward()
        optimizer.step()
        dict.get(model.blocks[0].up._parameters, "weight").data.fill_(1.0)
        with monkeypatch.context() as patched:
            for module in (resident, unit):
                patched.setattr(module, "find_written", None)
            loss_of(model, 1).backward()

        for _ in range(2):
            with pytest.raises(StoreError, match=r"`blocks\.0\.up\.weight`: expected nothing"):
                getattr(session if ending == "commit" else optimizer, ending)()
        loss_of(model, 2)  # with the values of the last update


@pytest.mark.parametrize("parameters, slots", [("device", 5), ("host", 2), ("storage", 2)])
def test_pinned_bytes_are_those_of_the_plan_at_every_stage(tmp_path, cuda, parameters, slots):
    def pinned():
        assert sum(cuda.registered.values()) == session._device.registered_bytes
        return session._device.registered_bytes

    with _session(tmp_path, parameters, slots=slots, budget_bytes=2 << 20) as session:
        assert pinned() == 0
        model = session.wrap(build(SmallGPT))
        planned = session._wrapped.plan.planned_bytes
        assert pinned() == planned > 0
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        loss_of(model, 0).backward()
        assert pinned() == planned
        optimizer.step()
        session.commit()
        session.save("one")
        session.load("one")
        assert pinned() == planned

    assert cuda.registered == {}


def test_pinned_bytes_of_several_models_are_those_of_their_plans(tmp_path, cuda):
    with _session(tmp_path, slots=8, budget_bytes=4 << 20) as session:
        first = session.wrap(build(SmallGPT), host_memory=1 << 20, device_memory=4 * UNIT_BYTES)
        frozen = build(SmallGPT, seed=1)
        session.wrap(frozen, training=False, name="frozen")
        planned = [each.plan.planned_bytes for each in session._models.all()]

        assert sum(cuda.registered.values()) == sum(planned)
        assert len(planned) == 2
        loss_of(first, 0).backward()

    assert cuda.registered == {}


@pytest.mark.parametrize("fails", ["registration", "device memory"])
def test_a_model_that_is_refused_leaves_nothing_pinned(tmp_path, monkeypatch, cuda, fails):
    with _session(tmp_path, "storage") as session:
        if fails == "registration":
            cuda.fails_at = 1
        else:
            monkeypatch.setattr(cuda_without_gpu, "MEMORY_BYTES", 1000)
        with pytest.raises(BudgetError):
            session.wrap(build(SmallGPT))

        assert cuda.registered == {}
        cuda.launch()  # nobody else is told of the error

    assert cuda.registered == {}
