"""Sums over the bytes of a device's memory, by which a change of them shows."""

import torch


class ByteSums:
    """Sums bytes where they are, in memory that a plan has counted.

    The words, of 8 bytes, are a matrix, whose rows and columns are summed: two of them are never in
    the same row and the same column, so what cancels in one of its sums does not in the other. The
    number of columns is a prime, which no shape of a model recurs by. Each half of each sum counts
    with an odd number of its own in the total: a top bit, of which two cancel modulo 2^64, is not
    one there. So a change of one word or of two shows but for one in billions, and of more where
    they are not at all corners of rectangles of this matrix. A total is five operations, whatever
    there is to sum, and reads it twice.

    Concurrency: One thread; work follows what this thread has computed so far.
    """

    def __init__(self, num_columns: int, device: torch.device) -> None:
        """Takes `plan.device.sum_work_bytes(num_columns)`.

        Args:
            num_columns: Of the matrix. It has as many rows at most.
            device: Where the bytes are.
        """
        self._num_columns = num_columns
        self._sums = torch.empty(2 * num_columns, dtype=torch.int64, device=device)
        self._factors = _odd_numbers(4 * num_columns).to(device)
        self._products = torch.empty_like(self._factors)

    def sum_into(self, memory: torch.Tensor, total: torch.Tensor) -> None:
        """Puts the sum over `memory` into `total`.

        Shapes: `memory` is 1-D and has whole words of 8 bytes; `total` is int64 of one element.
        """
        words, num_columns = memory.view(torch.int64), self._num_columns
        num_rows = len(words) // num_columns
        assert num_rows <= num_columns, "more than these sums were made for"
        rest = words[num_rows * num_columns :]
        rows = words[: num_rows * num_columns].view(num_rows, num_columns)
        sums = self._sums[: num_columns + num_rows]
        torch.sum(rows, 0, out=sums[:num_columns])
        torch.sum(rows, 1, out=sums[num_columns:])
        sums[: len(rest)].add_(rest)  # a row without a sum of its own
        halves = sums.view(torch.int32)
        products = self._products[: len(halves)]
        torch.mul(halves, self._factors[: len(halves)], out=products)
        torch.sum(products, 0, out=total.view(()))


def _odd_numbers(count: int) -> torch.Tensor:
    numbers, limits = torch.Generator("cpu").manual_seed(0), torch.iinfo(torch.int64)
    drawn = torch.randint(
        limits.min, limits.max, (count,), generator=numbers, dtype=torch.int64, device="cpu"
    )
    return drawn | 1
