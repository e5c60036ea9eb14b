"""What a program's classes do of their own: a swapped one, and copies, have their plain effect."""

import copy
import pickle
import threading

import pytest
import torch
from parity.copies import by_pickle, by_torch_save
from parity.models import build
from parity.oracle import Reference, same_bits
from parity.sessions import open_session
from parity.side_by_side import OPTIONS, require_equal_state, train_both
from torch import nn
from torch.nn.utils import parametrizations, parametrize


class Stack(nn.Module):
    """Three modules of one class in a list, so that each is a unit."""

    def __init__(self, make):
        super().__init__()
        self.layers = nn.ModuleList(make() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def loss_of(model, index):
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(index))
    return model(x.to(next(model.parameters()).dtype)).float().square().mean()


def body(make_class):
    """Returns a module class of one linear layer, made by `make_class` of its parts."""

    def begin(self):
        nn.Module.__init__(self)
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x)

    return make_class({"__init__": begin, "forward": forward})


def registered(classes):
    class Base(nn.Module):
        def __init_subclass__(cls, kind):
            assert kind not in classes
            classes[kind] = cls

    return body(lambda parts: type("Layer", (Base,), parts, kind="linear"))


def made_by_a_metaclass(classes):
    class Meta(type):
        def __new__(cls, name, bases, parts, *, kind):
            return super().__new__(cls, name, bases, parts)

        def __init__(cls, name, bases, parts, *, kind):
            super().__init__(name, bases, parts)
            classes[kind] = cls

    return body(lambda parts: Meta("Layer", (nn.Module,), parts, kind="linear"))


@pytest.mark.parametrize("make", [registered, made_by_a_metaclass])
def test_classes_that_the_program_registers_are_its_own_alone(tmp_path, make):
    classes = {}
    layer = make(classes)
    reference = Reference(build(Stack, make=layer), **OPTIONS)

    with open_session(tmp_path) as session:
        model = session.wrap(build(Stack, make=layer))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        train_both(model, optimizer, reference, steps=2, loss_of=loss_of)

        require_equal_state(session, model, reference)
    assert classes == {"linear": layer}


class Locked(nn.Module):
    """Has what no pickle holds."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.lock = threading.Lock()

    def __getstate__(self):
        return {name: value for name, value in self.__dict__.items() if name != "lock"}

    def __setstate__(self, state):
        super().__setstate__(state)
        self.lock = threading.Lock()

    def forward(self, x):
        with self.lock:
            return self.linear(x)


class Recurrent(nn.Module):
    """Lists its parameters beside their dict."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 8, num_layers=2)

    def forward(self, x):
        return self.lstm(x)[0]


@pytest.mark.parametrize("duplicate", [copy.deepcopy, by_pickle, by_torch_save])
@pytest.mark.parametrize("layer", [Locked, Recurrent])
def test_copies_have_what_their_class_says(tmp_path, layer, duplicate):
    with open_session(tmp_path, prefetch=0, budget_bytes=256 << 10) as session:
        model = session.wrap(build(Stack, make=layer))
        plain = duplicate(model)
        expected = loss_of(model, 0)

    assert same_bits(loss_of(plain, 0), expected)
    assert [type(module) for module in plain.layers] == [layer] * 3
    if layer is Recurrent:
        lstm = plain.layers[0].lstm
        assert all(map(lambda a, b: a is b, lstm._flat_weights, lstm.parameters()))


def test_a_pickle_of_a_wrapped_model_needs_no_engine(tmp_path):
    with open_session(tmp_path) as session:
        model = session.wrap(build(Stack, make=Recurrent))

        assert b"offload" not in pickle.dumps(model)


def test_a_copy_of_a_parametrized_model_can_be_wrapped_and_changed(tmp_path):
    def build_normed():
        return build(Stack, make=lambda: parametrizations.weight_norm(nn.Linear(8, 8)))

    with open_session(tmp_path) as session:
        model = session.wrap(build_normed())
        plain = copy.deepcopy(model)
        session.wrap(copy.deepcopy(plain), training=False, name="copy", host_memory="64KiB")
        expected = loss_of(model, 0)

    parametrize.remove_parametrizations(plain.layers[0], "weight")
    assert same_bits(loss_of(plain, 0), expected)


class Kept(nn.Parameter):
    """A parameter of the program's own class."""


class KeptTensor(torch.Tensor):
    """A tensor of it."""


@pytest.mark.parametrize("kind", [Kept, KeptTensor])
def test_parameters_of_derived_classes_keep_no_slot(tmp_path, kind):
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            values = torch.randn(8, 8, dtype=torch.bfloat16)
            self.weight = Kept(values) if kind is Kept else nn.Parameter(values.as_subclass(kind))

        def forward(self, x):
            return torch.tanh(x @ self.weight)

    reference = Reference(build(Stack, make=Layer, dtype=None), **OPTIONS)
    with open_session(tmp_path, budget_bytes=1 << 20) as session:
        session.wrap(build(Stack, make=Layer, dtype=None))
        wrapped = session._wrapped
        smallest = {"budget_bytes": wrapped.plan.smallest_bytes}
        if not wrapped.device.is_unified:
            smallest["device_memory"] = wrapped.device_plan.smallest_bytes

    with open_session(tmp_path / "smallest", **smallest) as session:
        model = session.wrap(build(Stack, make=Layer, dtype=None))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        train_both(model, optimizer, reference, steps=2, loss_of=loss_of)

        require_equal_state(session, model, reference)
        assert all(type(layer.weight) is kind for layer in model.layers)
