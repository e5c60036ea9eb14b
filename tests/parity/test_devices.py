"""A device with memory of its own changes no bit, and its budget is hard."""

import pytest
import torch
from parity.models import SmallGPT, build, loss_of
from parity.oracle import Reference, same_bits
from parity.sessions import open_session
from parity.side_by_side import OPTIONS, require_equal_state, train_both

import offload
from offload.devices import OrderError

UNIT_BYTES = 28672
"""Of the largest unit of `SmallGPT`, a block: 13,008 elements of bf16, in whole pages."""

NUM_UNITS = 5


def _link(**values):
    return {"tiers": {"device": {f"link_{key}": value for key, value in values.items()}}}


def _session(tmp_path, *, parameters="storage", **options):
    placement = parameters, "storage"
    return open_session(tmp_path, placement, device="emulated", **options)


@pytest.mark.parametrize("parameters", ["host", "storage"])
@pytest.mark.parametrize("slots", [1, 2, 7])
def test_training_on_the_device_equals_the_reference_and_is_ordered(tmp_path, parameters, slots):
    model, reference = build(SmallGPT), Reference(build(SmallGPT), **OPTIONS)
    budget = slots * UNIT_BYTES
    with _session(tmp_path, parameters=parameters, device_memory=budget) as session:
        session.wrap(model)
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        with session._device.checking():
            train_both(model, optimizer, reference, steps=3, micro_steps=2, max_norm=0.05)

        require_equal_state(session, model, reference)
        assert session.stats().device_peak_bytes == min(budget, NUM_UNITS * UNIT_BYTES)


def test_results_do_not_depend_on_how_late_copies_arrive(tmp_path):
    model, reference = build(SmallGPT), Reference(build(SmallGPT), **OPTIONS)
    with _session(tmp_path, config=_link(latency="0.004s", rate="50MB")) as session:
        session.wrap(model)
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        with session._device.checking():
            train_both(model, optimizer, reference, steps=2)

        require_equal_state(session, model, reference)


@pytest.mark.parametrize("parameters", ["host", "storage"])
def test_an_edit_leaves_the_device_in_a_pass_in_inference_mode(tmp_path, parameters):
    model, plain = build(SmallGPT), build(SmallGPT)
    memory = 2 * UNIT_BYTES
    with _session(tmp_path, parameters=parameters, device_memory=memory) as session:
        session.wrap(model)
        for each in (model, plain):
            with torch.no_grad():
                each.blocks[1].up.weight.mul_(0.5)

        with torch.inference_mode():
            found = [loss_of(each, 0) for each in (model, plain)]

        assert same_bits(*found)
        assert same_bits(loss_of(model, 1), loss_of(plain, 1))


def test_gradients_leave_the_device_while_backward_goes_on(tmp_path):
    model = build(SmallGPT)
    with _session(tmp_path, config=_link(latency="0.1s")) as session:
        session.wrap(model)
        session.AdamW(model.parameters(), **OPTIONS)
        arrived = []
        head = model.head.weight
        head.register_post_accumulate_grad_hook(
            lambda p: arrived.append(p.grad.accumulator._arrival.done())
        )

        loss_of(model, 0).backward()

        assert arrived == [False]  # of the head, whose gradient comes first: backward goes on
        assert session._device.copied_out_bytes == sum(2 * p.numel() for p in model.parameters())


def test_less_than_a_co_resident_set_is_refused_before_anything_is_written(tmp_path):
    with _session(tmp_path, device_memory=UNIT_BYTES - 1) as session:
        with pytest.raises(
            offload.PlanError, match=r"does not fit `tiers.device.memory`: expected at least 28672"
        ):
            session.wrap(build(SmallGPT))

        assert session.stats().write_bytes == 0


def test_a_tensor_that_keeps_the_only_slot_is_named_with_the_device_budget(tmp_path):
    model = build(SmallGPT)
    with _session(tmp_path, device_memory=UNIT_BYTES) as session:
        session.wrap(model)
        kept = model.blocks[0].up.weight.detach()

        with pytest.raises(offload.BudgetError, match=r"raise `tiers.device.memory`"):
            loss_of(model, 0)

        assert kept.isfinite().all()


def test_without_offloading_everything_is_on_the_device(tmp_path):
    model, reference = build(SmallGPT), Reference(build(SmallGPT), **OPTIONS)
    with offload.Session(device="emulated", offload=False) as session:
        session.wrap(model)
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        train_both(model, optimizer, reference, steps=2)

        require_equal_state(session, model, reference)
        assert session.stats().read_bytes == session.stats().write_bytes == 0


@pytest.mark.parametrize("parameters", ["host", "storage"])
def test_a_user_s_edit_on_the_device_is_honoured(tmp_path, parameters):
    model, reference = build(SmallGPT), Reference(build(SmallGPT), **OPTIONS)
    with _session(tmp_path, parameters=parameters) as session:
        session.wrap(model)
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        train_both(model, optimizer, reference, steps=1)
        with torch.no_grad():
            for each in (model, reference.model):
                each.blocks[1].up.weight.mul_(0.5)
        reference.edited("blocks.1.up.weight")

        train_both(model, optimizer, reference, steps=2, first=1)

        require_equal_state(session, model, reference)


@pytest.mark.parametrize("parameters", ["host", "storage"])
def test_a_run_on_the_device_resumes_bit_for_bit_on_the_cpu(tmp_path, parameters):
    model, reference = build(SmallGPT), Reference(build(SmallGPT), **OPTIONS)
    with _session(tmp_path, parameters=parameters) as session:
        session.wrap(model)
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        train_both(model, optimizer, reference, steps=2)
        session.commit()

    resumed = build(SmallGPT, seed=5)
    with open_session(tmp_path, (parameters, "storage"), device="cpu", resume=True) as session:
        session.wrap(resumed)
        optimizer = session.AdamW(resumed.parameters(), **OPTIONS)
        train_both(resumed, optimizer, reference, steps=1, first=2)

        require_equal_state(session, resumed, reference)


def test_the_checker_finds_a_fetch_that_forgets_to_wait(tmp_path, monkeypatch):
    # The specification of the checker: with the wait taken out, training raises.
    monkeypatch.setattr(
        "offload.streaming.tier._StagedRead.wait", lambda self: self._copy.result().synchronize()
    )
    model = build(SmallGPT)
    with _session(tmp_path) as session:
        session.wrap(model)

        with session._device.checking(), pytest.raises(OrderError):
            loss_of(model, 0)


def test_evaluation_of_a_frozen_model_moves_nothing_back(tmp_path):
    model, plain = build(SmallGPT), build(SmallGPT)
    with _session(tmp_path) as session:
        session.wrap(model, training=False)
        with torch.no_grad():
            for index in range(3):
                assert same_bits(loss_of(model, index), loss_of(plain, index))

        assert session._device.copied_out_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize("parameters", ["device", "host", "storage"])
def test_a_configured_run_on_the_device_equals_one_in_memory(
    tmp_path, small_config, train, parameters
):
    changes = {"train__steps": 4, "train__max_grad_norm": 1.0, "policy__parameters": parameters}
    budget = (2 << 20) if parameters == "device" else (1 << 20)
    device = {"tiers__device__kind": "emulated", "tiers__device__memory": budget}

    streamed = train(small_config(**changes, **device), run_dir=tmp_path / "streamed")
    in_memory = train(small_config(**changes, offload=False), run_dir=tmp_path / "memory")

    assert streamed.losses == in_memory.losses
    assert streamed.state_digest == in_memory.state_digest
    assert streamed.device_peak_bytes <= streamed.device_budget_bytes == budget


def test_an_interrupt_while_a_staging_slot_is_awaited_loses_none(tmp_path, monkeypatch):
    with _session(tmp_path, device_memory=2 * UNIT_BYTES) as session:
        model = session.wrap(build(SmallGPT))

        def interrupt(_):
            raise KeyboardInterrupt

        for _ in range(session._wrapped.plan.num_slots):
            with monkeypatch.context() as patched:
                patched.setattr("offload.streaming.tier._StagedRead.synchronize", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    loss_of(model, 0)

        assert loss_of(model, 0).item() == loss_of(build(SmallGPT), 0).item()


@pytest.mark.parametrize("parameters", ["device", "host", "storage"])
def test_registered_bytes_are_those_of_the_plan_at_every_stage(tmp_path, parameters):
    with _session(tmp_path, parameters=parameters, budget_bytes=2 << 20) as session:
        device = session._device
        found = [device.registered_bytes]
        model = session.wrap(build(SmallGPT))
        found.append(device.registered_bytes)
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        loss_of(model, 0).backward()
        optimizer.step()
        session.commit()
        found.append(device.registered_bytes)
        planned = session._wrapped.plan.planned_bytes

    assert found == [0, planned, planned]
    assert planned > 0
    assert device.registered_bytes == 0


def test_a_model_whose_device_memory_is_refused_leaves_nothing_registered(tmp_path, monkeypatch):
    with _session(tmp_path) as session:
        monkeypatch.setattr(session._device, "_memory_bytes", 1000)

        with pytest.raises(offload.BudgetError):
            session.wrap(build(SmallGPT))

        assert session._device.registered_bytes == 0


def test_a_device_that_computes_in_host_memory_registers_nothing(tmp_path):
    with open_session(tmp_path, device="cpu") as session:
        session.wrap(build(SmallGPT))

        assert session._device.registered_bytes == 0
