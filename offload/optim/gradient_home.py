"""Where the values of one parameter's gradient are."""

from typing import Protocol

import torch


class GradientHome(Protocol):
    """Gives the memory of one gradient, of the parameter's shape, contiguous."""

    @property
    def shape(self) -> torch.Size: ...
    @property
    def dtype(self) -> torch.dtype: ...

    def read(self) -> torch.Tensor:
        """Returns the values, which the caller does not change."""
        ...

    def write(self, *, replaces: bool = False) -> torch.Tensor:
        """Returns the values for changing them.

        Args:
            replaces: All of them are overwritten: what they were is of no interest.
        """
        ...

    def known_sum(self) -> float | None:
        """Returns the float64 sum of squares, where it is known without reading the values."""
        ...


class ResidentGradient:
    """A gradient that stays in memory."""

    def __init__(self, memory: torch.Tensor) -> None:
        self._memory = memory

    @property
    def shape(self) -> torch.Size:
        return self._memory.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._memory.dtype

    def read(self) -> torch.Tensor:
        return self._memory

    def write(self, *, replaces: bool = False) -> torch.Tensor:  # noqa: ARG002 - nothing is read
        return self._memory

    def known_sum(self) -> float | None:
        return None
