"""Buffers of a block that is computed again."""

import pytest
import torch
from torch import nn

from offload.streaming.recomputed_buffers import FoundBuffers


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
    found = FoundBuffers(module)

    values = []
    for _ in range(3):
        with found.around_call():
            values.append(module())

    assert values == [2, 2, 2]
    assert module.calls == 2
