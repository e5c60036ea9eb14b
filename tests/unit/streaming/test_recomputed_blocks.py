"""What a block that is computed again finds."""

from unittest import mock

import pytest
import torch
from torch import nn

from offload.errors import StoreError
from offload.streaming.recomputed_blocks import SMALL_BYTES, FoundBlock, StayingBuffers


class Counting(nn.Module):
    """Counts its calls in a buffer, beside one that is `other`."""

    def __init__(self, other: torch.Tensor | None) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("other", other, persistent=False)

    def forward(self) -> float:
        self.calls += 1
        return float(self.calls)


@pytest.mark.parametrize("other", [
    lambda: None,
    lambda: torch.ones(3),
    lambda: torch.eye(3).to_sparse(),
    lambda: torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)]),
    lambda: torch.nested.as_nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    nn.UninitializedBuffer,
], ids=["none", "plain", "sparse", "nested", "jagged", "unmade"])  # fmt: skip
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_call_that_is_computed_again_counts_once_beside_any_buffer(other):
    module = Counting(other())
    module()
    found = FoundBlock(module, StayingBuffers(looks_wait=False))

    values = []
    for _ in range(3):
        with found.around_call():
            values.append(module())

    assert values == [2, 2, 2]
    assert module.calls == 2


class Masked(nn.Module):
    """Computes with a large buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(SMALL_BYTES))

    def forward(self) -> float:
        return float(self.mask[0])


def called_twice(module, staying, *, between=lambda: None):
    """Returns what forward computes, and what backward does after `between`."""
    found, values = FoundBlock(module, staying), []
    for _ in range(2):
        with found.around_call():
            values.append(module())
        between()
    return values


@pytest.mark.parametrize("looks_wait", [False, True])
def test_where_looks_wait_a_buffer_that_stays_is_looked_at_once(monkeypatch, looks_wait):
    module, staying = Masked(), StayingBuffers(looks_wait=looks_wait)
    looks = mock.Mock(side_effect=torch.equal)
    monkeypatch.setattr("offload.streaming.recomputed_blocks.torch.equal", looks)

    for _ in range(4):
        assert called_twice(module, staying) == [1, 1]

    assert looks.call_count == (1 if looks_wait else 4)


def test_no_copy_of_a_buffer_that_is_known_to_stay_is_kept(monkeypatch):
    module, staying = Masked(), StayingBuffers(looks_wait=True)
    called_twice(module, staying)
    found = FoundBlock(module, staying)

    with found.around_call():
        module()

    assert [memory.copies for memory in found._memories] == [None]


def test_a_buffer_that_changes_once_it_is_known_to_stay_is_refused_and_copied_from_then_on():
    module, staying = Masked(), StayingBuffers(looks_wait=True)
    called_twice(module, staying)

    with pytest.raises(StoreError, match=r"`Masked` again.*`mask` as forward found it"):
        called_twice(module, staying, between=lambda: module.mask.add_(1))

    first = float(module.mask[0])
    assert called_twice(module, staying, between=lambda: module.mask.add_(1)) == [first, first]


def test_a_buffer_that_is_replaced_once_it_is_known_to_stay_is_found_as_it_was():
    def replace():
        module.mask = module.mask + 1

    module, staying = Masked(), StayingBuffers(looks_wait=True)
    called_twice(module, staying)

    found = called_twice(module, staying, between=replace)

    assert found == [1, 1]
    assert float(module.mask[0]) == 3


def test_a_buffer_that_its_call_changes_once_it_is_known_to_stay_is_found_as_it_was():
    def add(*_):
        module.mask.add_(1)

    module, staying = Masked(), StayingBuffers(looks_wait=True)
    called_twice(module, staying)
    module.register_forward_pre_hook(add)

    found = called_twice(module, staying)

    assert found == [2, 2]
    assert float(module.mask[0]) == 2
