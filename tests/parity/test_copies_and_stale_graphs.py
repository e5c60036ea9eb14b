"""Copies of a wrapped model are plain; graphs and views that a step outdates are refused."""

import copy
import pickle
import weakref

import pytest
import torch
from parity.copies import by_pickle, by_torch_save
from parity.models import SmallGPT, build, loss_of
from parity.oracle import same_bits
from parity.sessions import open_session, use_small_records
from torch import nn
from torch.nn import functional

import offload

EXTREMES = [("host", "host"), ("storage", "storage")]


@pytest.fixture(autouse=True)
def small_records(monkeypatch):
    use_small_records(monkeypatch)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle, by_torch_save])
@pytest.mark.parametrize("placement", EXTREMES, ids="-".join)
def test_a_copy_is_a_plain_model_with_the_values_of_now(tmp_path, placement, duplicate):
    with open_session(tmp_path, placement) as session:
        model = session.wrap(build(SmallGPT, tie="identity"))
        optimizer = session.AdamW(model.parameters(), lr=0.01)
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.zero_grad()

        plain = duplicate(model)
        loss = loss_of(model, 1)
        loss.backward()
        digest = session.state_digest()
        with torch.no_grad():
            expected = {n: v.clone() for n, v in model.state_dict().items()}

    assert same_bits(loss_of(plain, 1), loss)
    for name, values in plain.state_dict().items():
        assert same_bits(values, expected[name]), name
    assert plain.head.weight is plain.tokens.weight
    assert [type(m) for m in plain.modules()] == [type(m) for m in build(SmallGPT).modules()]
    assert type(plain.head._parameters) is dict
    assert digest
    # It trains by itself.
    loss_of(plain, 1).backward()
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    assert type(plain.head.weight.grad) is torch.Tensor


@pytest.mark.parametrize("placement", EXTREMES, ids="-".join)
def test_changing_a_copy_leaves_the_wrapped_model(tmp_path, placement):
    with open_session(tmp_path, placement) as session:
        model = session.wrap(build(SmallGPT))
        digest = session.state_digest()
        plain = copy.deepcopy(model)

        with torch.no_grad():
            for parameter in plain.parameters():
                parameter.zero_()

        assert session.state_digest() == digest


@pytest.mark.parametrize("placement", EXTREMES, ids="-".join)
def test_backward_over_a_graph_from_before_a_step_raises_as_in_torch(tmp_path, placement):
    plain = build(SmallGPT)
    loss = loss_of(plain, 0)
    loss.backward(retain_graph=True)
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation") as expected:
        loss.backward()

    with open_session(tmp_path, placement) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters())
        loss = loss_of(model, 0)
        loss.backward(retain_graph=True)
        optimizer.step()

        with pytest.raises(RuntimeError, match="modified by an inplace operation") as found:
            loss.backward()

    assert type(found.value) is type(expected.value)


@pytest.mark.parametrize("placement", EXTREMES, ids="-".join)
def test_backward_over_an_edited_parameter_raises_as_in_torch(tmp_path, placement):
    with open_session(tmp_path, placement) as session:
        model = session.wrap(build(SmallGPT))
        loss = loss_of(model, 0)
        with torch.no_grad():
            model.blocks[0].up.weight.mul_(2)

        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("placement", EXTREMES, ids="-".join)
def test_an_in_place_operation_on_a_saved_activation_raises_as_in_torch(tmp_path, placement):
    class Careless(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            saved = torch.tanh(self.fc(x))
            out = saved.sum()
            saved.mul_(2)
            return out

    with open_session(tmp_path, placement) as session:
        model = session.wrap(Careless())
        loss = model(torch.ones(8))

        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("placement", EXTREMES, ids="-".join)
def test_an_in_place_operation_on_a_weight_in_forward_raises_as_in_torch(tmp_path, placement):
    class Careless(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)

        def forward(self, x):
            out = functional.linear(functional.linear(x, self.fc.weight), self.fc.weight)
            with torch.no_grad():
                self.fc.weight.mul_(2)
            return out.sum()

    with open_session(tmp_path, placement) as session:
        model = session.wrap(Careless())
        loss = model(torch.ones(8))

        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("use", [
    lambda model: list(model.parameters()),
    lambda model: model.state_dict(),
    lambda model: loss_of(model, 0),
    lambda model: model.head.weight,
    copy.deepcopy,
    pickle.dumps,
])  # fmt: skip
def test_a_model_whose_session_is_closed_refuses_to_be_used(tmp_path, use):
    with open_session(tmp_path) as session:
        model = session.wrap(build(SmallGPT))

    with pytest.raises(offload.StoreError, match=r"session is closed.*inside the `with` block"):
        use(model)


def test_modules_of_a_closed_session_are_plain(tmp_path):
    with open_session(tmp_path) as session:
        model = session.wrap(build(SmallGPT))

    assert [type(m) for m in model.modules()] == [type(m) for m in build(SmallGPT).modules()]


def test_assigning_data_of_a_stored_parameter_is_refused(tmp_path):
    with open_session(tmp_path) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters())
        model.head.weight.data = torch.zeros(61, 32, dtype=torch.bfloat16)

        with pytest.raises(RuntimeError, match="`head.weight`.*in place"):
            optimizer.step()


def test_a_graph_that_is_dropped_frees_its_activations(tmp_path):
    class Activations(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(8, 8)
            self.seen = []

        def forward(self, x):
            out = torch.tanh(self.fc(x))  # the graph saves its output
            self.seen.append(weakref.ref(out))
            return out.sum()

    with open_session(tmp_path) as session:
        model = session.wrap(Activations())

        model(torch.ones(8))

        assert model.seen[0]() is None
