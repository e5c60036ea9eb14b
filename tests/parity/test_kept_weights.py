"""Who keeps a weight itself, and not what autograd saved, finds its values: no hook helps.

A custom function reads it in backward, a caller after the call that returned it, and the graph of
what was computed outside the model's calls.
"""

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
from parity.test_architectures import smallest_budgets
from torch import nn
from torch.nn import functional

import offload

WIDTH = 16


class KeptWeight(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        ctx.save_for_backward(x)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient @ ctx.weight, gradient.t() @ x


class CustomLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x):
        return KeptWeight.apply(x, self.weight)


class CustomFunctions(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(CustomLinear() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def loss(self, index):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(3, WIDTH, generator=generator).to(self.head.bias.dtype)
        for layer in self.layers:
            x = x + functional.gelu(layer(x))
        return functional.cross_entropy(self.head(x).float(), torch.arange(3))


@pytest.fixture(autouse=True)
def small_records(monkeypatch):
    use_small_records(monkeypatch)


def test_a_function_that_keeps_the_weight_itself_keeps_its_slot(tmp_path):
    model, reference = build(CustomFunctions), Reference(build(CustomFunctions), **OPTIONS)
    with open_session(tmp_path, budget_bytes=1 << 20, prefetch=4) as session:
        session.wrap(model)
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        train_both(model, optimizer, reference, steps=3, loss_of=CustomFunctions.loss)

        require_equal_state(session, model, reference)


def test_weights_that_functions_keep_need_a_slot_each_and_the_refusal_says_so(tmp_path, device):
    few = {"device_memory": 8192} if device == "emulated" else {"budget_bytes": 58 << 10}
    with open_session(tmp_path / "run", prefetch=1, **few) as session:
        model = session.wrap(build(CustomFunctions))

        with pytest.raises(offload.BudgetError, match=r"slots are .*`layers.0.weight`"):
            model.loss(0).backward()


class OutsideCalls(CustomFunctions):
    """As `CustomFunctions`, with functions of the model's own that keep another module's weight."""

    def loss(self, index):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(3, WIDTH, generator=generator).to(self.head.bias.dtype)
        return functional.cross_entropy(self(x).float(), torch.arange(3))

    def forward(self, x):
        x = KeptWeight.apply(x, self.layers[0].weight)
        for layer in self.layers[1:]:
            x = x + functional.gelu(layer(x))
        return self.head(KeptWeight.apply(x, self.layers[0].weight))


def test_a_function_outside_the_call_of_its_weight_keeps_it(tmp_path):
    model, reference = build(OutsideCalls), Reference(build(OutsideCalls), **OPTIONS)
    with open_session(tmp_path, budget_bytes=1 << 20, prefetch=4) as session:
        session.wrap(model)
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        train_both(model, optimizer, reference, steps=3, loss_of=OutsideCalls.loss)

        require_equal_state(session, model, reference)


@pytest.mark.parametrize("first", [0, 1])
def test_two_graphs_that_keep_weights_may_end_in_any_order(tmp_path, first):
    model, plain = build(OutsideCalls), build(OutsideCalls)
    with open_session(tmp_path, budget_bytes=1 << 20, prefetch=4) as session:
        session.wrap(model)
        for each in (model, plain):
            losses = [each.loss(0), each.loss(1)]
            losses.pop(first).backward()
            with torch.no_grad():
                each.loss(2)
            losses.pop().backward()

        require_equal_gradients(model, Reference(plain))


class Table(nn.Module):
    """Gives its parameter to whoever calls it."""

    def __init__(self):
        super().__init__()
        self.values = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self):
        return self.values


class TableModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = Table()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.tables = nn.ModuleList(Table() for _ in range(2))

    def loss(self, index):
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(3, WIDTH, generator=generator)
        return self(x.to(self.table.values.dtype)).float().square().mean()

    def forward(self, x):
        values = self.table()
        for layer in self.layers:
            x = x + functional.gelu(layer(x))
        for table in self.tables:
            x = x + self.layers[0](x) @ table()
        return x @ values


def test_a_parameter_that_a_call_returns_has_its_values_for_the_caller(tmp_path):
    model, reference = build(TableModel), Reference(build(TableModel), **OPTIONS)
    with open_session(tmp_path) as session:
        session.wrap(model)
        optimizer = session.AdamW(model.parameters(), **OPTIONS)
        with torch.no_grad():
            assert same_bits(model.loss(7), reference.model.loss(7))

        train_both(model, optimizer, reference, steps=3, loss_of=TableModel.loss)

        with torch.inference_mode():
            assert same_bits(model.loss(7), reference.model.loss(7))
        require_equal_state(session, model, reference)


def chain():
    return build(SmallGPT, layers=4)


def loss_and_weights(model, index):
    """Returns a loss with terms of weights, made before and after the call of the model."""
    inside = model.blocks[1].attention.out.weight
    before = (inside @ inside).float().mean()
    del inside
    return before + loss_of(model, index) + model.head.weight.float().square().sum()


def with_three_slots(tmp_path, device):
    """Returns the options of a session in which `chain` has three slots."""
    host_bytes, device_bytes = smallest_budgets(tmp_path, chain)
    if device == "cpu":
        return {"budget_bytes": host_bytes + 200_000, "prefetch": 2}
    return {"device_memory": 3 * device_bytes, "prefetch": 2}


def test_terms_of_a_loss_may_use_weights_outside_of_every_call(tmp_path, device):
    model, reference = chain(), Reference(chain(), **OPTIONS)
    with open_session(tmp_path, **with_three_slots(tmp_path, device)) as session:
        session.wrap(model)
        assert session._wrapped.residency.num_slots == 3
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        train_both(model, optimizer, reference, steps=3, loss_of=loss_and_weights)

        require_equal_state(session, model, reference)


def test_terms_of_more_weights_than_slots_are_refused_by_name(tmp_path, device):
    few = {"device_memory": 8192} if device == "emulated" else {"budget_bytes": 58 << 10}
    with open_session(tmp_path / "run", prefetch=1, **few) as session:
        model = session.wrap(build(CustomFunctions))

        with pytest.raises(offload.BudgetError, match=r"slots are .*`layers.0.weight`"):
            sum(layer.weight.square().sum() for layer in model.layers).backward()


def test_a_refusal_that_no_budget_would_end_says_what_does(tmp_path, device):
    plenty = {"device_memory": "16MiB"} if device == "emulated" else {}
    with open_session(tmp_path, budget_bytes=16 << 20, **plenty) as session:
        model = session.wrap(build(CustomFunctions))
        layers = [*model.layers, model.head]
        views = [layer.weight.detach() for layer in layers]

        with pytest.raises(offload.BudgetError, match=r"drop those, or clone what is kept"):
            model.loss(0)

        clones = [view.clone() for view in views]
        del views
        model.loss(0)
        assert all(map(same_bits, clones, (layer.weight for layer in layers)))


def test_a_weight_that_a_digest_finds_kept_stays(tmp_path, device):
    model, plain = chain(), chain()
    with open_session(tmp_path, **with_three_slots(tmp_path, device)) as session:
        session.wrap(model)
        loss, expected = loss_and_weights(model, 0), loss_and_weights(plain, 0)
        session.state_digest()

        loss.backward()
        expected.backward()

        require_equal_gradients(model, Reference(plain))


class DataTwice(nn.Module):
    """Uses each weight once with a gradient and once without, by an alias with its own counter."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(functional.linear(layer(x), layer.weight.data))
        return x.float().square().sum()


def loss_of_data(model, index):
    dtype = next(iter(model.state_dict().values())).dtype
    x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(index))
    return model(x.to(dtype))


def test_a_graph_may_keep_the_data_of_a_weight(tmp_path):
    reference = Reference(build(DataTwice), **OPTIONS)
    with open_session(tmp_path, budget_bytes=100 << 10) as session:
        model = session.wrap(build(DataTwice))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        train_both(model, optimizer, reference, steps=3, loss_of=loss_of_data)

        require_equal_state(session, model, reference)


class ChangedData(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        data = self.layer.weight.data
        loss = functional.linear(x, data).square().sum()
        data.mul_(2.0)
        return loss


@pytest.mark.unified  # on a device an edit inside a call is refused at all
def test_a_change_of_the_data_that_a_graph_keeps_is_refused(tmp_path):
    x = torch.ones(3, WIDTH).requires_grad_()
    with open_session(tmp_path) as session:
        for model in (build(ChangedData, dtype=None), session.wrap(build(ChangedData, dtype=None))):
            loss = model(x)
            with pytest.raises(RuntimeError, match="modified by an inplace"):
                loss.backward()
