"""Writes through `parameter.data` move no version counter, and are honoured all the same."""

import pytest
import torch
from parity.models import SmallGPT, build, loss_of
from parity.oracle import Reference, same_bits
from parity.rule_oracle import RULE_CASES, RULE_IDS, RuleReference
from parity.sessions import PLACEMENTS, open_session, use_small_records
from parity.side_by_side import OPTIONS, interrupted_in, require_equal_state, train_both
from torch import nn

import offload
from offload.errors import StoreError
from offload.optim.seen_parameters import SeenParameters
from offload.streaming.edits import Edits
from offload.streaming.unit import StreamedUnit

IN_MEMORY = "offload=False"
PLACES = [*PLACEMENTS, IN_MEMORY]
SLOW = pytest.mark.slow
PLACE_CASES = [
    pytest.param(place, marks=[] if place in (("host", "storage"), IN_MEMORY) else [SLOW])
    for place in PLACES
]
"""Of each parameter that is written to, how."""


def one_element(data):
    data.view(-1)[7] = 0.25


def swap_rows(data):
    data.copy_(data[torch.arange(len(data)).roll(1)])


EDITS = {
    "blocks.1.up.weight": lambda data: data.mul_(0.5),
    "blocks.0.up.weight": swap_rows,
    "blocks.0.down.bias": one_element,
    "head.weight": one_element,
    "tokens.weight": lambda data: data.clamp_(-0.02, 0.02),
    "norm.weight": lambda data: data.copy_(torch.linspace(0.5, 1.5, 32)),
}


@pytest.fixture(autouse=True)
def small_records(monkeypatch):
    use_small_records(monkeypatch)


def session_of(tmp_path, place, **options):
    if place == IN_MEMORY:
        options.pop("overlap", None)
        return open_session(tmp_path, ("host", "host"), offload=False, **options)
    return open_session(tmp_path, place, **options)


def parameter_of(model, name):
    owner, _, attribute = name.rpartition(".")
    return getattr(model.get_submodule(owner), attribute)


def edit_both(model, reference, edits=EDITS):
    for name, change in edits.items():
        before = parameter_of(reference.model, name).detach().clone()
        for each in (model, reference.model):
            change(parameter_of(each, name).data)
        is_changed = not same_bits(parameter_of(reference.model, name), before)
        if is_changed and name in reference.trainable:
            reference.edited(name)


@pytest.mark.parametrize("place", PLACE_CASES, ids=str)
@pytest.mark.parametrize("codec", ["split", pytest.param("fp32", marks=SLOW)])
@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_an_edit_becomes_the_master(tmp_path, place, codec, overlap, device):
    require_edits_to_become_masters(tmp_path, place, codec=codec, overlap=overlap)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["split", "fp32"])
def test_an_edit_becomes_the_master_beside_updates_under_backward(tmp_path, codec, device):
    require_edits_to_become_masters(
        tmp_path, ("storage", "storage"), codec=codec, overlap="backward"
    )


def require_edits_to_become_masters(tmp_path, place, *, codec, overlap):
    reference = Reference(build(SmallGPT), **OPTIONS)
    with session_of(tmp_path, place, codec=codec, overlap=overlap) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        edit_both(model, reference)
        train_both(model, optimizer, reference, steps=2)

        edit_both(model, reference)
        train_both(model, optimizer, reference, steps=2, first=2, micro_steps=2)
        for each in (model, reference.model):
            loss_of(each, 9).backward()
        edit_both(model, reference)  # between backward and the step
        optimizer.step()
        reference.step()
        edit_both(model, reference)  # right after it
        require_equal_state(session, model, reference)


@pytest.mark.parametrize("place", PLACE_CASES, ids=str)
def test_an_edit_between_micro_steps_becomes_the_master(tmp_path, place):
    reference = Reference(build(SmallGPT), **OPTIONS)
    with session_of(tmp_path, place) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        train_both(model, optimizer, reference, steps=1)

        with session.accumulating():
            loss_of(model, 7).backward()
        loss_of(reference.model, 7).backward()
        edit_both(model, reference)
        train_both(model, optimizer, reference, steps=1, first=1)

        require_equal_state(session, model, reference)


@pytest.mark.parametrize("place", PLACE_CASES, ids=str)
def test_one_bit_is_an_edit_and_none_is_not(tmp_path, place):
    reference = Reference(build(SmallGPT), **OPTIONS)
    with session_of(tmp_path, place) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        edit_both(model, reference, {"head.weight": lambda data: data[5].zero_()})
        session.state_digest()
        edit_both(model, reference, {"head.weight": lambda data: data[5].neg_()})  # -0.0
        require_equal_state(session, model, reference)
        train_both(model, optimizer, reference, steps=2)

        for name in EDITS:
            parameter_of(model, name).data.mul_(1.0)
        require_equal_state(session, model, reference)
        edit_both(
            model, reference, {"blocks.2.up.weight": lambda data: data[0].fill_(float("nan"))}
        )
        require_equal_state(session, model, reference)


@pytest.mark.parametrize("place", PLACE_CASES, ids=str)
def test_an_edit_that_was_taken_back_is_none(tmp_path, place):
    reference = Reference(build(SmallGPT), **OPTIONS)
    with session_of(tmp_path, place) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        train_both(model, optimizer, reference, steps=2)
        kept = {name: parameter_of(model, name).data.clone() for name in EDITS}

        for each in (model, reference.model):
            for name, change in EDITS.items():
                change(parameter_of(each, name).data)
        with torch.no_grad():  # an average, evaluated in the place of the weights
            losses = [loss_of(each, 5) for each in (model, reference.model)]
        for each in (model, reference.model):
            for name, values in kept.items():
                parameter_of(each, name).data.copy_(values)

        assert same_bits(*losses)
        train_both(model, optimizer, reference, steps=1, first=2)
        require_equal_state(session, model, reference)


@pytest.mark.unified  # on a device it is refused
@pytest.mark.parametrize("place", PLACE_CASES, ids=str)
def test_a_module_may_edit_its_own_parameter(tmp_path, place):
    def bound_weights(module, inputs):
        module.weight.data.clamp_(-0.1, 0.1)

    reference = Reference(build(SmallGPT), **OPTIONS)
    with session_of(tmp_path, place) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        for each in (model, reference.model):
            each.blocks[1].up.register_forward_pre_hook(bound_weights)

        for step in range(3):
            before = reference.model.blocks[1].up.weight.detach().clone()
            losses = [loss_of(each, step) for each in (model, reference.model)]
            if not same_bits(reference.model.blocks[1].up.weight, before):
                reference.edited("blocks.1.up.weight")
            for loss in losses:
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            reference.step()
            reference.model.zero_grad()

            assert same_bits(*losses)
        require_equal_state(session, model, reference)


def in_call_edit(model, change):
    """Has a module change its own weight in its calls; returns what ends that."""

    def edit(module, inputs):
        change(module.weight)

    return model.blocks[1].up.register_forward_pre_hook(edit)


@pytest.mark.unified
@pytest.mark.parametrize("parameters", ["host", pytest.param("storage", marks=SLOW)])
@pytest.mark.parametrize("change", [
    lambda weight: weight.data.clamp_(-0.1, 0.1), lambda weight: one_element(weight.data),
    lambda weight: swap_rows(weight.data), lambda weight: weight.data.neg_(),
    lambda weight: weight.data.view(-1)[3:1008:1004].neg_(),  # top bits of two words
])  # fmt: skip
def test_an_edit_inside_a_call_on_a_device_is_refused_not_lost(tmp_path, parameters, change):
    reference = Reference(build(SmallGPT), **OPTIONS)
    with session_of(tmp_path, (parameters, "storage"), device="emulated") as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        train_both(model, optimizer, reference, steps=1)
        handle = in_call_edit(model, change)
        loss_of(model, 1).backward()
        with pytest.raises(StoreError, match=r"`blocks\.1`.*the edit is lost; edit it as"):
            optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            loss_of(model, 1)
            with pytest.raises(StoreError, match="the edit is lost"):
                loss_of(model, 1)
        handle.remove()

        require_equal_state(session, model, reference)
        train_both(model, optimizer, reference, steps=1, first=1)
        require_equal_state(session, model, reference)


@pytest.mark.unified
def test_an_edit_inside_a_call_that_a_counter_shows_is_honoured_on_a_device(tmp_path):
    reference = Reference(build(SmallGPT), **OPTIONS)
    with session_of(tmp_path, ("host", "storage"), device="emulated") as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        both = (model, reference.model)
        handles = [in_call_edit(each, torch.no_grad()(nn.init.ones_)) for each in both]
        losses = [loss_of(each, 0) for each in both]
        assert same_bits(*losses)
        for handle in handles:
            handle.remove()
        reference.edited("blocks.1.up.weight")
        require_equal_state(session, model, reference)

        train_both(model, optimizer, reference, steps=1, first=1)

        require_equal_state(session, model, reference)


@pytest.mark.unified
@pytest.mark.parametrize("ending", ["step", "commit"])
def test_an_edit_of_what_happens_to_be_in_a_slot_on_a_device_is_refused(tmp_path, ending):
    budgets = {"budget_bytes": 8 << 20, "device_memory": 8 << 20}
    with session_of(tmp_path, ("storage", "storage"), device="emulated", **budgets) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        loss_of(model, 7).backward()
        parameter = dict(model.named_parameters())["blocks.0.up.weight"]
        assert not parameter.isnan().any(), "it is in its slot"
        parameter.data.mul_(0.5)

        with pytest.raises(StoreError, match="the edit is lost"):
            getattr(session if ending == "commit" else optimizer, ending)()


@pytest.mark.unified
def test_an_edit_inside_a_call_on_a_device_is_not_left_out_of_a_commit(tmp_path):
    with session_of(tmp_path, ("host", "storage"), device="emulated") as session:
        model = session.wrap(build(SmallGPT))
        handle = in_call_edit(model, lambda weight: one_element(weight.data))
        loss_of(model, 1)
        handle.remove()

        with pytest.raises(StoreError, match=r"`blocks\.1`.*the edit is lost"):
            session.commit()


@pytest.mark.unified  # as above
def test_an_edit_of_what_happens_to_be_in_a_slot_is_honoured(tmp_path):
    reference = Reference(build(SmallGPT), **OPTIONS)
    with session_of(tmp_path, ("storage", "storage"), budget_bytes=8 << 20) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        train_both(model, optimizer, reference, steps=1)

        for each in (model, reference.model):
            loss_of(each, 7).backward()
        expected = dict(reference.model.named_parameters())
        present = {n: p for n, p in model.named_parameters() if p.isnan().logical_not().all()}
        for name, parameter in present.items():  # in slots, and nobody looked
            parameter.data.mul_(0.5)
            expected[name].data.mul_(0.5)
            reference.edited(name)
        assert any(name.startswith("blocks") for name in present)
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
        reference.model.zero_grad()

        require_equal_state(session, model, reference)
        train_both(model, optimizer, reference, steps=1, first=2)


@pytest.mark.parametrize("place", PLACE_CASES[:-1], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_an_edit_is_committed_and_resumed(tmp_path, place, dtype):
    def frozen():
        model = build(SmallGPT, dtype=dtype)
        model.tokens.requires_grad_(False)
        return model

    options = {"budget_bytes": 3 << 20}
    reference = Reference(frozen(), **OPTIONS)
    with session_of(tmp_path, place, **options) as session:
        model = session.wrap(frozen())
        optimizer = session.AdamW([p for p in model.parameters() if p.requires_grad], **OPTIONS)
        train_both(model, optimizer, reference, steps=1)
        session.commit()
        edit_both(model, reference)
        session.commit()
        session.save("edited")
        before = reference.digest()
        edit_both(model, reference)
        session.load("edited")

        assert session.state_digest() == before
        edit_both(model, reference, {"tokens.weight": lambda data: data.neg_()})
        session.commit()
        after = session.state_digest()

    assert after != before
    with session_of(tmp_path, place, resume=True, **options) as session:
        session.wrap(frozen())

        assert session.state_digest() == after


@pytest.mark.parametrize(("name", "rule", "options"), RULE_CASES, ids=RULE_IDS)
@pytest.mark.parametrize("codec", ["split", "fp32"])
@pytest.mark.slow
def test_every_rule_takes_an_edit_as_its_master(tmp_path, name, rule, options, codec):
    for place in PLACES:
        reference = RuleReference(build(SmallGPT), rule, options)
        with session_of(tmp_path, place, budget_bytes=2 << 20, codec=codec) as session:
            model = session.wrap(build(SmallGPT))
            optimizer = getattr(session, name)(model.parameters(), **options)
            train_both(model, optimizer, reference, steps=1)
            edit_both(model, reference)
            train_both(model, optimizer, reference, steps=1, first=1)

            require_equal_state(session, model, reference)


@pytest.mark.slow
def test_whole_matrices_take_an_edit_in_every_tier(tmp_path):
    digests = set()
    for place in PLACES:
        options = {"budget_bytes": 4 << 20, "optimizer": "muon"}
        with session_of(tmp_path, place, **options) as session:
            model = session.wrap(build(SmallGPT))
            optimizer = session.Muon(model.parameters(), lr=0.01)
            for step in range(3):
                for name, change in EDITS.items():
                    change(parameter_of(model, name).data)
                loss_of(model, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            digests.add(session.state_digest())

    assert len(digests) == 1


@pytest.mark.parametrize("place", PLACE_CASES, ids=str)
def test_an_edit_of_a_parameter_that_is_not_trained_for_now_is_kept(tmp_path, place):
    reference = Reference(build(SmallGPT), **OPTIONS)
    with session_of(tmp_path, place) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        train_both(model, optimizer, reference, steps=1)
        for each in (model, reference.model):
            each.blocks[0].requires_grad_(False)
        with torch.no_grad():
            for each in (model, reference.model):
                each.blocks[0].up.weight.mul_(0.5)
        reference.edited("blocks.0.up.weight")
        edit_both(model, reference)
        train_both(model, optimizer, reference, steps=1, first=1)

        for each in (model, reference.model):
            each.blocks[0].requires_grad_(True)
        train_both(model, optimizer, reference, steps=1, first=2)
        require_equal_state(session, model, reference)


def test_a_resident_parameter_may_be_replaced(tmp_path):
    reference = Reference(build(SmallGPT), **OPTIONS)
    with session_of(tmp_path, ("host", "host"), device="cpu") as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        train_both(model, optimizer, reference, steps=1)

        for each in (model, reference.model):
            parameter = parameter_of(each, "head.weight")
            parameter.data = parameter.data * 0.5
            parameter.data[3] = 0.25
        reference.edited("head.weight")
        train_both(model, optimizer, reference, steps=2, first=1)
        edit_both(model, reference)

        require_equal_state(session, model, reference)


def test_an_optimizer_alone_sees_edits(tmp_path):
    reference = Reference(build(SmallGPT), **OPTIONS)
    model = build(SmallGPT)
    named = model.named_parameters()
    with offload.AdamW(named, host_memory="1MiB", store=tmp_path, **OPTIONS) as optimizer:
        train_both(model, optimizer, reference, steps=2)
        edit_both(model, reference)
        train_both(model, optimizer, reference, steps=2, first=2)

        assert optimizer.state_digest() == reference.digest()
        edit_both(model, reference)
        assert optimizer.state_digest() == reference.digest()


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("owner, method", [
    (Edits, "_note"), (SeenParameters, "see_changed"), (StreamedUnit, "see_edits"),
])  # fmt: skip
def test_an_interrupt_loses_no_edit(tmp_path, place, owner, method, device):
    del device
    reference = Reference(build(SmallGPT), **OPTIONS)
    with session_of(tmp_path, place) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        train_both(model, optimizer, reference, steps=1)
        edit_both(model, reference)
        with interrupted_in(owner, method):
            session.state_digest()

        train_both(model, optimizer, reference, steps=1)

        require_equal_state(session, model, reference)
