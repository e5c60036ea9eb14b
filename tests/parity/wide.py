"""Models whose weights no slot holds, in sessions of small slots."""

import contextlib

import torch
from parity import sessions
from parity.sessions import open_session, use_small_records
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

WIDTH = 32
VOCABULARY = 2_050
"""256 KiB of fp32 and a rest: four slots of 64 KiB, which the tests make the least."""
KIB = 1 << 10
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}
"""Sums over tiles round otherwise; updates of AdamW with this `eps` do not magnify that."""
OPTIONS = {"lr": 1e-2, "eps": 1e-3}


def use_small_slots(monkeypatch):
    """Slots of 64 KiB, of which a tile has 32, and subgroups of 16: no row border is theirs."""
    use_small_records(monkeypatch)
    monkeypatch.setattr("offload.plan.tiles.EDGE_BYTES", 16 * KIB)
    for module in "plan.tiles", "streaming.wide":
        monkeypatch.setattr(f"offload.{module}.LEAST_SLOT_BYTES", 64 * KIB)


class Wide(nn.Module):
    def __init__(self, *, bias=True, tie=None, checkpoints=False, dtype=torch.float32, **options):
        super().__init__()
        rows = VOCABULARY * 4 // dtype.itemsize
        self.tokens = nn.Embedding(rows, WIDTH, dtype=dtype, **options)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(2))
        self.head = nn.Linear(WIDTH, rows, bias=bias, dtype=dtype)
        self.checkpoints = checkpoints
        if tie == "identity":
            self.head.weight = self.tokens.weight
        if tie == "functional":
            self.head = None

    def forward(self, tokens):
        x = self.tokens(tokens)
        for block in self.blocks:
            x = torch.tanh(block(x))
        if self.head is None:
            return functional.linear(x, self.tokens.weight)
        return checkpoint(self.head, x, use_reentrant=False) if self.checkpoints else self.head(x)


def build(**options):
    torch.manual_seed(5)
    return Wide(**options)


def open_wide(tmp_path, *, overlap="none", num_weights=2, **options):
    """A session whose slots hold no wide weight, whichever device they are on."""
    budget = {"budget_bytes": 8 << 20, "device_memory": 200 * KIB}
    if sessions.DEVICE == "cpu":  # gradients, slots and records
        budget = {"budget_bytes": (num_weights * 270 + 220) * KIB}
    order = "sequential" if overlap == "none" else "resident"
    return open_session(tmp_path, order=order, overlap=overlap, **{**budget, **options})


def units_of(session):
    return session._wrapped.residency.units


def in_order(session):
    """On a device of its own memory: no tile is read before its copy has come."""
    return contextlib.nullcontext() if sessions.DEVICE == "cpu" else session._device.checking()


def tokens_of(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (2, 5), generator=generator)


def loss_of(model, step):
    return (
        model(tokens_of(step)).float().square().mean() + model(tokens_of(step + 9)).float().mean()
    )


def require_near_gradients(model, reference):
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.clone(), expected[name].grad, **TOLERANCE)


def require_gradients_within_bf16(model, reference):
    """Within four units in the last place of the largest one."""
    expected = dict(reference.named_parameters())
    for name, parameter in model.named_parameters():
        plain = expected[name].grad.float()
        difference = (parameter.grad.clone().float() - plain).abs().max()
        assert difference <= plain.abs().max() / 64, name


def train_near(session, model, reference, *, steps=2):
    optimizer = session.AdamW(model.parameters(), **OPTIONS)
    plain = torch.optim.AdamW(reference.parameters(), **OPTIONS)
    for step in range(steps):
        for _ in range(2):  # the second adds to the first
            for each in model, reference:
                loss_of(each, step).backward()
        if session.config.policy.overlap == "none":
            require_near_gradients(model, reference)
        for each in optimizer, plain:
            each.step()
            each.zero_grad()


def require_near(model, reference):
    expected = reference.state_dict()
    for name, values in model.state_dict().items():
        torch.testing.assert_close(values, expected[name], **TOLERANCE)
