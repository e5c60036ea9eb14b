import gc

import torch
from torch.utils.checkpoint import checkpoint

from offload.runs.activations import ActivationMeter


def test_a_storage_saved_twice_counts_once_and_parameters_do_not():
    weight = torch.nn.Parameter(torch.ones(64, 64))
    value = torch.ones(8, 64, requires_grad=True)  # 2048 bytes
    meter = ActivationMeter()

    with meter.counting(without=[weight]):
        hidden = value @ weight  # saves value
        loss = (hidden * hidden).sum()  # saves hidden twice, 2048 bytes

    assert meter.peak_bytes == 2 * 2048
    loss.backward()
    assert meter._current_bytes == 0


def test_bytes_that_backward_frees_do_not_add_up_over_micro_steps():
    value = torch.ones(8, 64, requires_grad=True)
    meter = ActivationMeter()

    with meter.counting():
        for _ in range(3):
            value.exp().sum().backward()

    assert meter.peak_bytes == 2048


def test_an_output_saved_by_its_own_node_is_freed_without_backward():
    value = torch.ones(8, 64, requires_grad=True)
    meter = ActivationMeter()
    gc.disable()

    try:
        with meter.counting():
            out = value.exp()
        del out
        assert meter._current_bytes == 0
    finally:
        gc.enable()


def test_gradients_are_the_same_bits_with_counting():
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(3)], torch.nn.GELU())
    value = torch.randn(4, 32)
    gradients = []

    for is_counting in (False, True):
        layers.zero_grad()
        meter = ActivationMeter()
        if is_counting:
            with meter.counting(without=layers.parameters()):
                loss = checkpoint(layers, value, use_reentrant=False).sum()
                loss.backward()
            assert meter.peak_bytes > 0
        else:
            checkpoint(layers, value, use_reentrant=False).sum().backward()
        gradients.append([p.grad.clone() for p in layers.parameters()])

    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
