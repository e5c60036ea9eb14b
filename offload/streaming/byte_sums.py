"""Sums over the bytes of a device's memory, by which a change of them shows."""

import random

import torch


class ByteSums:
    """Sums bytes where they are, in memory that a plan has counted.

    The words are dealt out to columns in turns. A column is a polynomial of its words, and the
    columns are folded in half, each time with another number, until one is left: so a word counts
    by its place, and what cancels in a plain sum, such as two signs, does not here. Modulo 2^64,
    and all numbers are odd: a change of one word always shows, of several but for one in billions.

    Concurrency: One thread; work follows what this thread has computed so far.
    """

    def __init__(self, num_columns: int, device: torch.device) -> None:
        """Takes the columns.

        Args:
            num_columns: A power of two; 8 bytes each.
            device: Where the bytes are.
        """
        self._columns = torch.empty(num_columns, dtype=torch.int64, device=device)
        self._factors = _odd_numbers(num_columns.bit_length())

    def sum_into(self, memory: torch.Tensor, total: torch.Tensor) -> None:
        """Puts the sum over `memory` into `total`.

        Shapes: `memory` is 1-D and has whole words of 4 bytes; `total` is int64 of one element.
        """
        words, columns = memory.view(torch.int32), self._columns
        columns.zero_()
        for start in range(0, len(words), len(columns)):
            part = words[start : start + len(columns)]
            into = columns[: len(part)]
            torch.add(part, into, alpha=self._factors[0], out=into)
        half = len(columns)
        for factor in self._factors[1:]:
            half //= 2
            into = columns[:half]
            torch.add(columns[half : 2 * half], into, alpha=factor, out=into)
        total.copy_(columns[0])


def _odd_numbers(count: int) -> list[int]:
    numbers = random.Random(0)
    return [numbers.getrandbits(63) | 1 for _ in range(count)]
