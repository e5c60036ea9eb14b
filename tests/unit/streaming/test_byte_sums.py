"""A sum over bytes shows every change of them that a program is likely to make."""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from offload.plan.device import sum_columns, sum_work_bytes
from offload.streaming.byte_sums import ByteSums

CPU = torch.device("cpu")
TOP = torch.iinfo(torch.int64).min


def sum_of(memory, *, sums=None):
    total = torch.zeros((), dtype=torch.int64)
    sums = ByteSums(sum_columns(len(memory)), CPU) if sums is None else sums
    sums.sum_into(memory, total)
    return total.item()


@pytest.mark.parametrize("most_bytes", [3 * 4096 + 64, 1 << 20])
def test_a_sum_is_that_of_the_words_by_their_places(most_bytes):
    memory = torch.zeros(3 * 4096 + 64, dtype=torch.uint8)
    sums = ByteSums(sum_columns(most_bytes), CPU)
    places = [
        sum_of(memory.index_fill(0, torch.tensor([4 * word]), 1), sums=sums)
        for word in range(0, len(memory) // 4, 7)
    ]

    assert 0 not in places
    assert len(set(places)) == len(places)
    assert sum_of(memory, sums=sums) == 0


@pytest.mark.parametrize("most_words", [64, 1024])
@pytest.mark.parametrize("bit", [0, 31, 32, 63])
def test_two_flips_of_one_bit_show_wherever_they_are(bit, most_words):
    words, sums = torch.randint(TOP, -TOP - 1, (40,)), ByteSums(sum_columns(8 * most_words), CPU)
    before = sum_of(words.view(torch.uint8), sums=sums)

    for pair in itertools.combinations(range(len(words)), 2):
        flipped = words.clone()
        flipped[list(pair)] ^= 1 << bit if bit < 63 else TOP

        assert sum_of(flipped.view(torch.uint8), sums=sums) != before, pair


@pytest.mark.parametrize("bit", range(64))
def test_two_flips_of_every_bit_show(bit):
    words = torch.randint(TOP, -TOP - 1, (1 << 13,))
    columns = sum_columns(words.nbytes)
    before = sum_of(words.view(torch.uint8))

    for distance in (1, columns - 1, columns, 2 * columns, 64 * columns, 251, 4096):
        flipped = words.clone()
        flipped[[5, 5 + distance]] ^= 1 << bit if bit < 63 else TOP

        assert sum_of(flipped.view(torch.uint8)) != before, distance


@pytest.mark.parametrize("stride, count", [(1, 4096), (2, 2048), (64, 64), (64, 128), (1024, 8)])
@pytest.mark.parametrize("width", [1, 2, 16])
def test_a_part_of_a_matrix_whose_sign_changes_shows(stride, count, width):
    words = torch.randint(TOP, -TOP - 1, (1 << 13,))
    before = sum_of(words.view(torch.uint8))

    words.view(-1, stride)[:count, :width] ^= TOP

    assert sum_of(words.view(torch.uint8)) != before


@pytest.mark.parametrize("num_bytes", [0, 8, 64, 4096, 28672, 1 << 20, 100_000_000])
def test_columns_are_few_and_are_no_fewer_than_rows(num_bytes):
    columns = sum_columns(num_bytes)

    assert num_bytes // 8 // columns <= columns < 2 * (num_bytes // 8) ** 0.5 + 3
    assert all(columns % each for each in range(2, columns))


def test_a_sum_takes_few_operations_and_what_was_planned():
    operations = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if not func.is_view:
                operations.append(func)
            return func(*args, **(kwargs or {}))

    memory, total = torch.zeros(1 << 22, dtype=torch.uint8), torch.zeros((), dtype=torch.int64)
    sums = ByteSums(sum_columns(len(memory)), CPU)
    with Watching():
        sums.sum_into(memory, total)

    assert len(operations) == 5
    taken = [value for value in vars(sums).values() if isinstance(value, torch.Tensor)]
    assert sum(value.nbytes for value in taken) == sum_work_bytes(sum_columns(len(memory)))


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
