"""Parameters that live on the device change no bit, and passes move none of them."""

import itertools
import logging

import pytest
import torch
from model.program_parts import refusing
from parity.models import SmallGPT, batch, build, loss_of
from parity.oracle import Reference, same_bits
from parity.sessions import open_session, use_small_records
from parity.side_by_side import (
    OPTIONS,
    interrupted_in,
    require_equal_gradients,
    require_equal_state,
    train_both,
)

import offload
from offload.errors import StorageError
from offload.streaming.device_parameters import DeviceParameters
from offload.streaming.edits import Edits

PARAMETER_BYTES = 94208 + 8 * (10 * 61 + 2 * 5)
"""Of `SmallGPT`: five units, each in whole pages, and the sums over their bytes: the largest has
3,584 words of 8 bytes, for which 61 columns are enough."""
PLACES = ("device", "host", "storage")
UPDATES = [("resident", "none"), ("alternating", "none"), ("resident", "forward")]
QUICK_RESUMES = [("device", "storage", "cpu"), ("storage", "device", "emulated")]
RESUMES = [
    pytest.param(*each, marks=[] if each in QUICK_RESUMES else [pytest.mark.slow])
    for each in itertools.product(("device", "storage"), PLACES, ("cpu", "emulated"))
]


@pytest.fixture(autouse=True)
def small_records(monkeypatch):
    use_small_records(monkeypatch)


def _session(tmp_path, *, optimizer="storage", **options):
    return open_session(tmp_path, ("device", optimizer), device="emulated", **options)


@pytest.mark.parametrize("optimizer", ["host", "storage"])
@pytest.mark.parametrize("order, overlap", UPDATES)
def test_training_equals_the_reference_and_is_ordered(tmp_path, optimizer, order, overlap):
    model, reference = build(SmallGPT), Reference(build(SmallGPT), **OPTIONS)
    link = {"tiers": {"device": {"link_latency": "0.003s", "link_rate": "50MB"}}}
    how = {"order": order, "overlap": overlap, "optimizer": optimizer, "config": link}
    with _session(tmp_path, **how) as session:
        session.wrap(model)
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        with session._device.checking():
            train_both(model, optimizer, reference, steps=4, micro_steps=2, max_norm=0.05)

        require_equal_state(session, model, reference)


@pytest.mark.parametrize("overlap", [pytest.param("none", marks=pytest.mark.slow), "forward"])
@pytest.mark.parametrize("kind", ["tied", "tied_by_function", "frozen", "fp32", "fp32_codec"])
def test_kinds_of_parameters(tmp_path, overlap, kind):
    def make():
        tie = {"tied": "identity", "tied_by_function": "functional"}.get(kind)
        dtype = torch.float32 if kind == "fp32" else torch.bfloat16
        model = build(SmallGPT, dtype=dtype, tie=tie)
        if kind == "frozen":
            model.blocks[1].requires_grad_(False)
            model.tokens.requires_grad_(False)
        return model

    model, reference = make(), Reference(make(), **OPTIONS)
    codec = "fp32" if kind == "fp32_codec" else "split"
    with _session(tmp_path, overlap=overlap, codec=codec, budget_bytes=2 << 20) as session:
        session.wrap(model)
        optimizer = session.AdamW([p for p in model.parameters() if p.requires_grad], **OPTIONS)

        with session._device.checking():
            train_both(model, optimizer, reference, steps=3)

        require_equal_state(session, model, reference)


def test_passes_move_nothing_and_a_step_moves_what_it_changed_once(tmp_path):
    model = build(SmallGPT)
    model.blocks[0].requires_grad_(False)
    trainable = sum(2 * p.numel() for p in model.parameters() if p.requires_grad)
    with _session(tmp_path, overlap="none") as session:
        session.wrap(model)
        optimizer = session.AdamW([p for p in model.parameters() if p.requires_grad])
        device = session._device
        up, down = device.copied_in_bytes, device.copied_out_bytes

        for index in range(2):
            loss_of(model, index).backward()
        with torch.no_grad():
            model(batch(0)[0])

        assert device.copied_in_bytes == up
        assert device.copied_out_bytes == down + trainable  # the second is added on the host
        optimizer.step()
        gaps = 64 * len(list(model.parameters()))
        assert trainable <= device.copied_in_bytes - up <= trainable + gaps


@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_a_parameter_without_a_gradient_is_neither_updated_nor_moved(
    tmp_path, monkeypatch, overlap
):
    monkeypatch.setattr("offload.plan.record_size.SIZES", (1 << 20,))
    model, reference = build(SmallGPT), Reference(build(SmallGPT), **OPTIONS)
    with _session(tmp_path, overlap=overlap) as session:
        session.wrap(model)
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        train_both(model, optimizer, reference, steps=1)
        session.state_digest()
        up = session._device.copied_in_bytes
        neighbours = [
            record
            for record in session._wrapped.layout.records
            if any(s.shard == "tokens" for s in record.subgroups)
        ]
        assert len({s.shard for r in neighbours for s in r.subgroups}) > 1, (
            "others share its record"
        )

        with session._device.checking():
            for each in (model, reference.model):
                (each.tokens.weight.float() ** 2).sum().backward()
            require_equal_gradients(model, reference)
            optimizer.step()
            optimizer.zero_grad()
            reference.step()
            reference.model.zero_grad()
            train_both(model, optimizer, reference, steps=1, first=5)

        require_equal_state(session, model, reference)
        moved = (
            session._device.copied_in_bytes - up - sum(2 * p.numel() for p in model.parameters())
        )
        assert 0 <= moved - 2 * model.tokens.weight.numel() <= 64 * 60


@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_edits_on_the_device_are_honoured_and_committed(tmp_path, overlap):
    model, reference = build(SmallGPT), Reference(build(SmallGPT), **OPTIONS)
    name = "blocks.1.up.weight"
    with _session(tmp_path, overlap=overlap) as session:
        session.wrap(model)
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        with session._device.checking():
            train_both(model, optimizer, reference, steps=1)
            with torch.no_grad():
                for each in (model, reference.model):
                    each.blocks[1].up.weight.mul_(0.5)
                    each.head.weight.data = each.head.weight.data * 2
            reference.edited(name)
            reference.edited("head.weight")
            train_both(model, optimizer, reference, steps=2, first=1)
            require_equal_state(session, model, reference)

            with torch.no_grad():
                for each in (model, reference.model):
                    each.tokens.weight.neg_()
        reference.edited("tokens.weight")
        session.commit()
        require_equal_state(session, model, reference)

    with _session(tmp_path, resume=True) as session:
        resumed = session.wrap(build(SmallGPT, seed=3))

        require_equal_state(session, resumed, reference)


@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_edits_that_move_no_version_counter_are_honoured(tmp_path, overlap):
    model, reference = build(SmallGPT), Reference(build(SmallGPT), **OPTIONS)
    with _session(tmp_path, overlap=overlap) as session:
        session.wrap(model)
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        train_both(model, optimizer, reference, steps=1)
        session.state_digest()  # nothing is pending, so that all can be looked at

        for each in (model, reference.model):
            named = dict(each.named_parameters())
            named["blocks.1.up.weight"].data.copy_(named["blocks.1.up.weight"].data.flip(0))
            named["blocks.0.norm1.bias"].data[3] = 0.25
        reference.edited("blocks.1.up.weight")
        reference.edited("blocks.0.norm1.bias")

        train_both(model, optimizer, reference, steps=2, first=1)
        for each in (model, reference.model):
            each.head.weight.data.mul_(2)
        reference.edited("head.weight")
        require_equal_state(session, model, reference)
        train_both(model, optimizer, reference, steps=1, first=3)
        require_equal_state(session, model, reference)


@pytest.mark.parametrize("owner, method", [(Edits, "_note"), (DeviceParameters, "bring")])
def test_an_interrupt_loses_no_edit(tmp_path, owner, method):
    model, reference = build(SmallGPT), Reference(build(SmallGPT), **OPTIONS)
    with _session(tmp_path) as session:
        session.wrap(model)
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        train_both(model, optimizer, reference, steps=1)
        for each in (model, reference.model):
            each.head.weight.data.mul_(0.3)
        reference.edited("head.weight")
        with interrupted_in(owner, method):
            session.state_digest()

        train_both(model, optimizer, reference, steps=1, first=1)

        require_equal_state(session, model, reference)


def test_what_a_step_changes_whole_is_not_compared_byte_by_byte(tmp_path, monkeypatch):
    with _session(tmp_path) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        compared = []
        monkeypatch.setattr(
            DeviceParameters, "_differs", lambda *place: compared.append(place[2].facts.name)
        )

        for index in range(2):
            loss_of(model, index).backward()
            optimizer.step()
            optimizer.zero_grad()
        session.state_digest()

        assert compared == []
        model.head.weight.data.mul_(2)
        session.state_digest()
        assert "head.weight" in compared


@pytest.mark.parametrize("through", [lambda parameter: parameter, lambda parameter: parameter.data])
def test_an_edit_while_updates_of_its_neighbours_are_on_their_way_is_kept(tmp_path, through):
    """`up.bias` has no update, and lies in a subgroup with parameters that have one."""
    reference = Reference(build(SmallGPT), **OPTIONS)
    slow = {"tiers": {"device": {"link_latency": "0.02s"}}}
    with _session(tmp_path, overlap="forward", config=slow) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        train_both(model, optimizer, reference, steps=1)

        for step in (1, 2):
            for m in (model, reference.model):
                loss_of(m, step).backward()
                m.blocks[0].up.bias.grad = None
            optimizer.step()
            reference.step()
            with torch.no_grad():  # through `parameters()`, which waits for nothing
                for m in (model, reference.model):
                    through(dict(m.named_parameters())["blocks.0.up.bias"]).fill_(0.25 * step)
            reference.edited("blocks.0.up.bias")
            optimizer.zero_grad()
            reference.model.zero_grad()

        require_equal_state(session, model, reference)
        train_both(model, optimizer, reference, steps=1, first=3)


@pytest.mark.parametrize("first, then, resumed_on", RESUMES)
def test_a_run_resumes_under_another_placement(tmp_path, first, then, resumed_on):
    model, reference = build(SmallGPT), Reference(build(SmallGPT), **OPTIONS)
    store = tmp_path / "store"

    def session_with(parameters, kind, **options):
        policy = {"parameters": parameters, "optimizer": "storage"}
        return offload.Session(
            device=kind, host_memory="1MiB", store=store, policy=policy, **options
        )

    with session_with(first, "emulated") as session:
        session.wrap(model)
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        train_both(model, optimizer, reference, steps=2)
        session.commit()

    resumed = build(SmallGPT, seed=5)
    with session_with(then, resumed_on, resume=True) as session:
        session.wrap(resumed)
        optimizer = session.AdamW(resumed.parameters(), **OPTIONS)
        train_both(resumed, optimizer, reference, steps=2, first=2)

        require_equal_state(session, resumed, reference)


@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_a_session_goes_back_to_a_checkpoint(tmp_path, overlap):
    model = build(SmallGPT)
    with _session(tmp_path, overlap=overlap) as session:
        session.wrap(model)
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        digests = []
        with session._device.checking():
            for index in range(3):
                loss_of(model, index).backward()
                optimizer.step()
                optimizer.zero_grad()
                digests.append(session.state_digest())
                if index == 0:
                    session.save("first")
                    expected = {n: v.clone() for n, v in model.state_dict().items()}

            session.load("first")

            assert session.state_digest() == digests[0]
            for name, values in model.state_dict().items():
                assert same_bits(values, expected[name]), name
            loss_of(model, 1).backward()
            optimizer.step()
            assert session.state_digest() == digests[1]


def test_a_session_goes_back_after_a_step_that_failed_in_its_middle(tmp_path):
    reference = Reference(build(SmallGPT), **OPTIONS)
    with _session(tmp_path, overlap="none", order="sequential") as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        train_both(model, optimizer, reference, steps=1)
        session.save("one")
        loss_of(model, 1).backward()
        with refusing("write", 2, waits=False, goes_on=True), pytest.raises(StorageError):
            optimizer.step()

        session.load("one")
        for each in (model, reference.model):
            each.head.weight.data = each.head.weight.data * 0.5
        reference.edited("head.weight")
        with session._device.checking():
            train_both(model, optimizer, reference, steps=2, first=1)
        require_equal_state(session, model, reference)


@pytest.mark.parametrize("parameters", ["host", "storage"])
def test_parameters_that_come_into_slots_are_absent_after_a_load(tmp_path, parameters):
    placement, reference = (parameters, "storage"), Reference(build(SmallGPT), **OPTIONS)
    with open_session(tmp_path, placement, device="emulated") as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        session.save("begin")

        session.load("begin")

        train_both(model, optimizer, reference, steps=1)
        require_equal_state(session, model, reference)


@pytest.mark.parametrize("parameters, where", [("device", "emulated"), ("host", "cpu")])
@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_data_that_was_replaced_is_gone_after_a_load(tmp_path, parameters, where, overlap):
    placement, reference = (parameters, "storage"), Reference(build(SmallGPT), **OPTIONS)
    with open_session(tmp_path, placement, device=where, overlap=overlap) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        session.save("begin")
        model.head.weight.data = model.head.weight.data * 0.5

        session.load("begin")

        train_both(model, optimizer, reference, steps=1)
        require_equal_state(session, model, reference)


def test_two_models_share_the_device_s_budget(tmp_path):
    reference = Reference(build(SmallGPT), **OPTIONS)
    frozen, plain = build(SmallGPT, seed=7), build(SmallGPT, seed=7)
    with _session(tmp_path, device_memory=2 * PARAMETER_BYTES) as session:
        session.wrap(frozen, training=False, name="reference", host_memory="256KiB")
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        with session._device.checking():
            for step in range(2):
                with torch.no_grad():
                    assert same_bits(loss_of(frozen, step), loss_of(plain, step))
                train_both(model, optimizer, reference, steps=1, first=step)

        require_equal_state(session, model, reference)
        assert session.stats().device_peak_bytes == 2 * PARAMETER_BYTES
        with pytest.raises(offload.PlanError, match=r"tiers.device.memory"):
            session.wrap(build(SmallGPT), training=False, name="third", host_memory="96KiB")


def test_evaluation_moves_nothing_back(tmp_path):
    model, plain = build(SmallGPT), build(SmallGPT)
    with _session(tmp_path) as session:
        session.wrap(model, training=False)
        up = session._device.copied_in_bytes
        with torch.no_grad():
            for index in range(3):
                assert same_bits(loss_of(model, index), loss_of(plain, index))

        assert session._device.copied_in_bytes == up
        assert session._device.copied_out_bytes == 0


def test_a_budget_that_holds_not_all_is_refused_before_anything_is_written(tmp_path):
    with _session(tmp_path, device_memory=PARAMETER_BYTES - 1) as session:
        with pytest.raises(
            offload.PlanError,
            match=rf"expected at least {PARAMETER_BYTES} bytes .*: all parameters\).*"
            r'or set `policy.parameters = "host"`',
        ):
            session.wrap(build(SmallGPT))

        assert session.stats().write_bytes == 0
    with _session(tmp_path / "fits", device_memory=PARAMETER_BYTES) as session:
        session.wrap(build(SmallGPT))


def test_on_the_cpu_it_is_the_host_tier_and_one_line_says_so(tmp_path, caplog):
    model, reference = build(SmallGPT), Reference(build(SmallGPT), **OPTIONS)
    with open_session(tmp_path, ("device", "storage"), device="cpu") as session:
        with caplog.at_level(logging.WARNING, "offload"):
            session.wrap(model)
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        train_both(model, optimizer, reference, steps=2)

        require_equal_state(session, model, reference)
        assert session.stats().accesses == 0
    assert [r.message for r in caplog.records if "is `host` on device `cpu`" in r.message]


def test_a_model_stays_usable_when_its_session_is_closed(tmp_path):
    model, plain = build(SmallGPT), build(SmallGPT)
    with _session(tmp_path) as session:
        session.wrap(model)

    assert same_bits(loss_of(model, 0), loss_of(plain, 0))


def test_a_graph_from_before_a_step_is_refused_as_in_torch(tmp_path):
    with _session(tmp_path) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters())
        loss = loss_of(model, 0)
        loss.backward(retain_graph=True)
        optimizer.step()

        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
