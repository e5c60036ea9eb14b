"""A custom function that keeps a weight itself reads that parameter in backward: no hook helps."""

import pytest
import torch
from parity.models import build
from parity.oracle import Reference
from parity.sessions import open_session, use_small_records
from parity.side_by_side import OPTIONS, require_equal_state, train_both
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
