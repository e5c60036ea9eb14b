"""Parameters of every kind: without a gradient, frozen, tied, reused, tiny, empty, strided."""

import pytest
import torch
from parity.models import SmallGPT, build, loss_of
from parity.oracle import Reference, same_bits
from parity.sessions import PLACEMENTS, open_session, use_small_records
from parity.side_by_side import OPTIONS, require_equal_state, train_both
from torch import nn
from torch.nn import functional

from offload import StoreError

EXTREMES = [("host", "host"), ("storage", "storage")]


@pytest.fixture(autouse=True)
def small_records(monkeypatch):
    use_small_records(monkeypatch)


class Experts(nn.Module):
    """Each batch takes one of three experts; a fourth is never taken."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(64, 32)
        self.experts = nn.ModuleList(nn.Linear(32, 256) for _ in range(4))
        self.out = nn.ModuleList(nn.Linear(256, 32) for _ in range(4))
        self.head = nn.Linear(32, 64)

    def forward(self, tokens):
        expert = int(tokens[0, 0]) % 3
        x = self.tokens(tokens)
        return self.head(x + self.out[expert](functional.gelu(self.experts[expert](x))))


class Odd(nn.Module):
    """Sizes of 0 and 1, a transposed parameter, a block used twice, a parameter of the root."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.tokens = nn.Embedding(61, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.mixes = nn.ParameterList([nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(0))])
        self.strided = nn.Parameter(torch.randn(61, 16).t())

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in (self.blocks[0], self.blocks[1], self.blocks[0]):
            x = x + functional.gelu(block(x))
        x = x * self.mixes[0] + self.mixes[1].sum()
        return (x * self.scale) @ self.strided


@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_a_parameter_without_a_gradient_is_not_stepped_and_not_decayed(tmp_path, placement):
    reference = Reference(build(Experts), **OPTIONS)

    with open_session(tmp_path, placement, budget_bytes=2 << 20) as session:
        model = session.wrap(build(Experts))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        train_both(model, optimizer, reference, steps=8, max_norm=0.05)

        require_equal_state(session, model, reference)
        assert 0 < reference.steps["experts.0.weight"] < 8
        assert reference.steps["experts.3.weight"] == 0
        untouched = build(Experts).state_dict()["experts.3.weight"]
        assert same_bits(model.state_dict()["experts.3.weight"], untouched)


def test_a_step_without_any_gradient_counts_and_changes_nothing(tmp_path):
    reference = Reference(build(SmallGPT), **OPTIONS)

    with open_session(tmp_path) as session:
        model = session.wrap(build(SmallGPT))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        optimizer.step()
        reference.step()

        assert session.stats().completed_steps == 1
        require_equal_state(session, model, reference)


@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_frozen_parameters_stay_and_have_no_gradient(tmp_path, placement):
    def make():
        model = build(SmallGPT)
        model.tokens.requires_grad_(False)
        model.blocks[1].requires_grad_(False)
        model.blocks[2].up.requires_grad_(False)
        return model

    reference = Reference(make(), **OPTIONS)

    with open_session(tmp_path, placement) as session:
        model = session.wrap(make())
        optimizer = session.AdamW([p for p in model.parameters() if p.requires_grad], **OPTIONS)
        written_by_wrap = session.stats().write_bytes

        train_both(model, optimizer, reference, steps=4, max_norm=0.05)

        assert model.blocks[2].up.weight.grad is None
        require_equal_state(session, model, reference)
        if placement == ("storage", "host"):
            layout = session._wrapped.layout
            trainable = sum(s.padded_parameter_bytes for r in layout.records for s in r.subgroups)
            assert session.stats().write_bytes - written_by_wrap == 4 * trainable


@pytest.mark.parametrize("tie", ["identity", "functional"])
@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_tied_parameters_are_one(tmp_path, placement, tie):
    reference = Reference(build(SmallGPT, tie=tie), **OPTIONS)

    with open_session(tmp_path, placement) as session:
        model = session.wrap(build(SmallGPT, tie=tie))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        train_both(model, optimizer, reference, steps=4, micro_steps=2, max_norm=0.05)

        if tie == "identity":
            assert model.head.weight is model.tokens.weight
        require_equal_state(session, model, reference)


@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_odd_parameters_and_a_block_used_twice(tmp_path, placement):
    reference = Reference(build(Odd), **OPTIONS)

    with open_session(tmp_path, placement) as session:
        model = session.wrap(build(Odd))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        train_both(model, optimizer, reference, steps=4, max_norm=0.05)

        require_equal_state(session, model, reference)


@pytest.mark.parametrize("overlap", ["backward", "both"])
def test_odd_parameters_are_updated_under_backward(tmp_path, overlap):
    reference = Reference(build(Odd), **OPTIONS)

    with open_session(tmp_path, overlap=overlap) as session:
        model = session.wrap(build(Odd))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        train_both(model, optimizer, reference, steps=3)

        require_equal_state(session, model, reference)


@pytest.mark.parametrize("placement", EXTREMES, ids="-".join)
def test_a_model_of_one_parameter(tmp_path, placement):
    reference = Reference(build(nn.Linear, in_features=1, out_features=1, bias=False), **OPTIONS)
    x = torch.ones(3, 1, dtype=torch.bfloat16)

    with open_session(tmp_path, placement) as session:
        model = session.wrap(build(nn.Linear, in_features=1, out_features=1, bias=False))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        train_both(model, optimizer, reference, steps=3, loss_of=lambda m, _: m(x).sum())

        require_equal_state(session, model, reference)


@pytest.mark.parametrize("placement", EXTREMES, ids="-".join)
def test_a_model_without_parameters_runs(tmp_path, placement):
    with open_session(tmp_path, placement) as session:
        model = session.wrap(nn.Sequential(nn.ReLU(), nn.Flatten()))

        out = model(torch.tensor([[-1.0, 2.0]]))

        assert out.tolist() == [[0.0, 2.0]]
        assert session.state_digest() == Reference(nn.ReLU()).digest()


class Complex(nn.Module):
    """Pairs of numbers, used as complex ones: conjugates and negatives share their memory."""

    def __init__(self):
        super().__init__()
        self.pairs = nn.Parameter(torch.randn(6, 5, 2))
        self.layers = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))

    def loss(self, index):
        x = torch.randn(3, 5, generator=torch.Generator().manual_seed(index))
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        values = torch.view_as_complex(self.pairs)
        product = torch.complex(x, 2 * x) @ values.conj().t()
        negative = x @ values.conj().imag.t()
        return (product.real * negative - product.imag).square().mean()

    def forward(self, index):
        return self.loss(index)


def test_conjugates_and_negatives_of_a_parameter_are_saved_as_what_they_are(tmp_path):
    reference = Reference(build(Complex, dtype=torch.float32), **OPTIONS)

    with open_session(tmp_path) as session:
        model = session.wrap(build(Complex, dtype=torch.float32))
        optimizer = session.AdamW(model.parameters(), **OPTIONS)

        train_both(model, optimizer, reference, steps=2, loss_of=lambda m, index: m(index))

        require_equal_state(session, model, reference)


@pytest.mark.parametrize("placement", EXTREMES, ids="-".join)
def test_frozen_integer_parameters_are_streamed(tmp_path, placement):
    class Quantised(nn.Module):
        def __init__(self):
            super().__init__()
            codes = torch.randint(-127, 127, (61, 16), dtype=torch.int8)
            self.codes = nn.Parameter(codes, requires_grad=False)
            self.scale = nn.Parameter(torch.full((16,), 0.01))
            self.head = nn.Linear(16, 61)

        def forward(self, tokens):
            return self.head(functional.embedding(tokens, self.codes) * self.scale)

    def make():
        torch.manual_seed(0)
        return Quantised()

    expected = make()
    loss_of(expected, 0).backward()

    with open_session(tmp_path, placement) as session:
        model = session.wrap(make())

        loss = loss_of(model, 0)
        loss.backward()

        assert same_bits(loss, loss_of(expected, 0))
        assert same_bits(model.scale.grad.clone(), expected.scale.grad)
        assert same_bits(model.state_dict()["codes"], expected.codes)


@pytest.mark.parametrize("write", [
    lambda code: code.fill_(0),
    lambda code: code.copy_(code.detach().clone()),
    lambda code: code.data.fill_(0),
    lambda code: setattr(code, "data", torch.tensor([9])),
])  # fmt: skip
def test_a_write_to_an_absent_integer_parameter_is_refused_not_lost(tmp_path, write):
    model = nn.Linear(16, 16)
    model.code = nn.Parameter(torch.tensor([5]), requires_grad=False)
    with open_session(tmp_path) as session:
        session.wrap(model)
        code = dict(model.named_parameters())["code"]

        write(code)

        with pytest.raises(StoreError, match="cannot fetch parameter `code`"):
            model.state_dict()


@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_param_groups_have_their_own_options_and_follow_a_scheduler(tmp_path, placement):
    reference = Reference(build(SmallGPT), **{**OPTIONS, "weight_decay": 0.1})
    rates = {"head": 1e-2, "rest": 3e-3}

    with open_session(tmp_path, placement) as session:
        model = session.wrap(build(SmallGPT))
        head = [p for n, p in model.named_parameters() if n.startswith(("head", "norm"))]
        rest = [p for n, p in model.named_parameters() if not n.startswith(("head", "norm"))]
        optimizer = session.AdamW(
            [{"params": head, "lr": rates["head"]}, {"params": rest}], **OPTIONS
        )
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

        for step in range(4):
            for name in reference.trainable:
                rate = rates["head" if name.startswith(("head", "norm")) else "rest"]
                reference.lr_of[name] = rate * (1 / (1 + step))
            train_both(model, optimizer, reference, steps=1, first=step)
            scheduler.step()

        require_equal_state(session, model, reference)
