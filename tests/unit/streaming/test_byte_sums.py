"""A sum over bytes shows every change of them that a program is likely to make."""

import pytest
import torch

from offload.streaming.byte_sums import ByteSums


def sum_of(memory, *, num_columns=4096):
    total = torch.zeros(1, dtype=torch.int64)
    ByteSums(num_columns, memory.device).sum_into(memory, total)
    return total.item()


@pytest.mark.parametrize("num_columns", [64, 4096])
def test_a_sum_is_that_of_the_words_by_their_places(num_columns):
    memory = torch.zeros(3 * 4096 + 64, dtype=torch.uint8)
    places = [
        sum_of(memory.index_fill(0, torch.tensor([4 * word]), 1), num_columns=num_columns)
        for word in range(0, len(memory) // 4, 7)
    ]

    assert all(place % 2 for place in places)  # so that no change of a word is lost
    assert len(set(places)) == len(places)
    assert sum_of(memory, num_columns=num_columns) == 0


@pytest.mark.parametrize("change", [
    lambda values: values.neg_(),
    lambda values: values.copy_(values.flip(0)),
    lambda values: values.view(-1, 64).copy_(values.view(-1, 64).roll(1, 0)),
    lambda values: values[0].add_(1),
    lambda values: values[-1].add_(1),
    lambda values: values.view(256, -1).copy_(values.view(256, -1).roll(4, 1)),
])  # fmt: skip
@pytest.mark.parametrize("num_bytes", [4096, 32768, 1 << 20])
def test_sums_show_what_changed(change, num_bytes):
    base = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
    before = sum_of(base)

    change(base.view(torch.int16))

    assert sum_of(base) != before


@pytest.mark.parametrize("distance", [1, 4093, 2 * 4093, 3 * 4093 * 5, 1 << 16])
@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.int64])
def test_sums_show_changes_that_cancel(distance, dtype):
    values = torch.randint(-100, 100, (1 << 18,)).to(dtype)
    before = sum_of(values.view(torch.uint8))
    first, second = values[5].item(), values[5 + distance].item()

    for one, other in (
        (first + 1, second - 1),
        (second, first + (first == second)),
        (~first, ~second),
        (first ^ torch.iinfo(dtype).min, second ^ torch.iinfo(dtype).min),
    ):
        values[5], values[5 + distance] = one, other
        assert sum_of(values.view(torch.uint8)) != before
