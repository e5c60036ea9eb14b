"""Looks from outside a pass at weights that no slot holds: whole, in their values of now."""

import copy

import cuda_without_gpu
import pytest
import torch
from parity.oracle import same_bits
from parity.wide import (
    KIB,
    build,
    loss_of,
    open_wide,
    require_near,
    require_near_gradients,
    tokens_of,
    train_near,
    units_of,
    use_small_slots,
)

import offload
from offload.streaming.byte_sums import ByteSums


@pytest.fixture(autouse=True)
def small_slots(monkeypatch):
    use_small_slots(monkeypatch)


def test_state_dict_load_copies_and_edits_bring_the_whole_weight(tmp_path):
    model, reference = build(), build()
    with open_wide(tmp_path) as session:
        session.wrap(model)
        twice = {name: 2 * values for name, values in reference.state_dict().items()}

        assert all(same_bits(v, reference.state_dict()[n]) for n, v in model.state_dict().items())
        assert same_bits(copy.deepcopy(model)(tokens_of(0)), reference(tokens_of(0)))
        model.load_state_dict(twice)
        assert all(same_bits(values, twice[n]) for n, values in model.state_dict().items())
        with torch.no_grad():
            model.head.weight.mul_(0.5)
            reference.load_state_dict({**twice, "head.weight": reference.head.weight.clone()})

        train_near(session, model, reference)
        require_near(model, reference)


@pytest.mark.unified
@pytest.mark.parametrize("parameters", ["host", "storage"])
def test_a_look_on_another_device_is_there_and_leaves_the_weight_its_gradient(
    tmp_path, monkeypatch, parameters
):
    cuda = cuda_without_gpu.pretend(monkeypatch, tells=True)
    model, reference = build(), build()
    options = {"device": "cuda", "budget_bytes": 8 << 20, "device_memory": 200 * KIB}
    placement = {"placement": (parameters, "storage")}
    with cuda.watching(), open_wide(tmp_path, **placement, **options) as session:
        session.wrap(model)
        losses = [loss_of(each, 0) for each in (model, reference)]
        for name in "tokens", "head":
            weight = getattr(model, name).weight
            assert cuda.has(weight)  # or backward would compute with memory of two devices
            assert same_bits(weight, getattr(reference, name).weight)
        del weight
        losses += [loss_of(each, 1) for each in (model, reference)]
        for loss in losses:
            loss.backward()
        require_near_gradients(model, reference)
        with torch.no_grad():
            model.head.weight[7].fill_(0.5)
            reference.head.weight[7].fill_(0.5)

        require_near(model, reference)
    assert cuda.races == []


@pytest.mark.unified
@pytest.mark.parametrize("parameters", ["host", "storage"])
def test_a_state_dict_takes_no_more_of_a_device_than_its_slots(tmp_path, monkeypatch, parameters):
    cuda = cuda_without_gpu.pretend(monkeypatch, tells=True)
    options = {"device": "cuda", "budget_bytes": 8 << 20, "device_memory": 200 * KIB}
    placement = {"placement": (parameters, "storage")}
    with cuda.watching(), open_wide(tmp_path, **placement, **options) as session:
        model = session.wrap(build())
        device = session._device
        monkeypatch.setattr(device, "empty", None)

        values, num_bytes = model.state_dict(), device.copied_out_bytes

        expected = build().state_dict()
        assert all(same_bits(values[name], expected[name]) for name in expected)
        assert not any(map(cuda.has, values.values()))
        assert num_bytes == sum(value.nbytes for value in expected.values())
    assert cuda.races == []


def test_loading_values_leaves_no_whole_weight_in_memory(tmp_path):
    values = {name: each + 1.0 for name, each in build().state_dict().items()}
    with open_wide(tmp_path) as session:
        model = session.wrap(build())

        model.load_state_dict(values)

        assert not any(unit.is_wide and unit.base is not None for unit in units_of(session))
        assert all(same_bits(each, values[name]) for name, each in model.state_dict().items())


@pytest.mark.unified
def test_a_look_for_which_a_device_has_no_memory_says_what_to_do(tmp_path, monkeypatch):
    with open_wide(tmp_path, device="emulated") as session:
        model = session.wrap(build())

        def refuse(num_bytes):
            raise torch.OutOfMemoryError(f"tried to allocate {num_bytes} bytes")

        monkeypatch.setattr(session._device, "empty", refuse)
        for _ in range(2):
            with pytest.raises(offload.BudgetError, match=r"at `head\.weight`.*`model\.state_dict"):
                _ = model.head.weight

        assert same_bits(model.state_dict()["head.weight"], build().head.weight)


@pytest.mark.unified
def test_a_whole_weight_on_a_device_is_hashed_and_not_summed(tmp_path, monkeypatch):
    summed = []
    monkeypatch.setattr(ByteSums, "sum_into", lambda _, base, total: summed.append(len(base)))
    with open_wide(tmp_path, device="emulated") as session:
        model = session.wrap(build())
        for module in (model.head, *model.blocks):
            assert module.weight is not None
        slot_bytes = session._wrapped.residency.slot_bytes

    assert 0 < max(summed) <= slot_bytes


def test_a_whole_weight_whose_reading_failed_is_read_again(tmp_path, monkeypatch):
    with open_wide(tmp_path) as session:
        model = session.wrap(build())
        tier = session._wrapped.residency._tier

        def fail(*_, **__):
            raise offload.StorageError("cannot read: no such device")

        with monkeypatch.context() as patched:
            patched.setattr(tier, "start_read", fail)
            for _ in range(2):
                with pytest.raises(offload.StorageError, match="no such device"):
                    model.state_dict()

        assert same_bits(model.state_dict()["head.weight"], build().head.weight)


def test_a_write_to_an_absent_weight_is_found_by_a_state_dict(tmp_path):
    with open_wide(tmp_path) as session:
        model = session.wrap(build())
        weight = dict(model.named_parameters())["head.weight"]

        weight.data.zero_()

        with pytest.raises(offload.StoreError, match=r"cannot fetch parameter `head\.weight`"):
            model.state_dict()
