"""Training on CUDA: the bits are those of the plain model on the same device."""

import pytest
import torch
from parity.models import SmallGPT, build, loss_of
from parity.oracle import same_bits
from parity.sessions import open_session
from parity.side_by_side import OPTIONS
from torch import nn

import offload

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]

UNIT_BYTES = 28672
"""Of the largest unit of `SmallGPT`."""


def _loss(model, index):
    return loss_of(_OnDevice(model), index)


class _OnDevice:
    """Moves a batch to the device before the call."""

    def __init__(self, model):
        self.model = model

    def __call__(self, tokens):
        return self.model(tokens.cuda()).cpu()


def _train(model, optimizer, *, steps=4):
    losses = []
    for index in range(steps):
        loss = _loss(model, index)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("parameters, slots", [
    ("host", 1), ("host", 2), ("host", 6), ("storage", 1), ("storage", 2), ("storage", 6),
    ("device", 5),
])  # fmt: skip
def test_losses_and_digest_equal_those_with_everything_on_the_device(tmp_path, parameters, slots):
    whole = build(SmallGPT)
    with offload.Session(device="cuda", offload=False) as session:
        session.wrap(whole)
        expected = _train(whole, session.AdamW(whole.parameters(), **OPTIONS))
        digest = session.state_digest()
    model = build(SmallGPT)
    budget = slots * UNIT_BYTES

    with open_session(
        tmp_path, (parameters, "storage"), device="cuda", device_memory=budget
    ) as session:
        session.wrap(model)
        losses = _train(model, session.AdamW(model.parameters(), **OPTIONS))

        assert losses == expected
        assert session.state_digest() == digest
        assert session.stats().device_peak_bytes <= budget


@pytest.mark.parametrize("parameters, slots", [("host", 2), ("storage", 2), ("device", 5)])
def test_gradients_equal_those_of_the_plain_model(tmp_path, parameters, slots):
    model, plain = build(SmallGPT), build(SmallGPT).cuda()
    with open_session(
        tmp_path, (parameters, "storage"), device="cuda", device_memory=slots * UNIT_BYTES
    ) as session:
        session.wrap(model)
        session.AdamW(model.parameters(), **OPTIONS)
        for index in range(2):  # the second adds to the first
            for each in (model, plain):
                _loss(each, index).backward()

        for (name, parameter), other in zip(
            model.named_parameters(), plain.parameters(), strict=True
        ):
            assert parameter.grad.device.type == "cuda"
            assert same_bits(parameter.grad.clone().cpu(), other.grad.cpu()), name


def test_gradients_can_be_written_and_read(tmp_path):
    model = build(SmallGPT)
    with open_session(tmp_path, device="cuda") as session:
        session.wrap(model)
        session.AdamW(model.parameters(), **OPTIONS)
        _loss(model, 0).backward()
        gradient = model.head.weight.grad

        gradient.add_(torch.ones_like(gradient))
        gradient[0] = 7.0
        doubled = gradient * torch.full_like(gradient, 2.0)

        assert doubled.is_cuda
        assert bool((doubled[0] == 14.0).all())
