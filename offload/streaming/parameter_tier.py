"""What is asked of the tiers where absent units live; `offload.streaming.tier` has them."""

from collections.abc import Sequence
from typing import Protocol

import torch

from offload.layout import Unit
from offload.streaming.unit import Transfer


class UnitTier(Protocol):
    """Where absent units live, whoever fills memory from it."""

    def bytes_from_update(self, unit: Unit) -> int:
        """Returns how much of memory that is given to the unit now would be filled by its update.

        The rest is read.
        """
        ...

    def wait_readable(self, unit: Unit) -> None:
        """Waits until the unit's bytes are what they should be where they are read from."""
        ...

    def raise_failure(self) -> None:
        """Raises what ended an update of this step in its middle, if one failed."""
        ...

    def wait_updated(self, transfers: Sequence[Transfer]) -> None:
        """Waits until no update holds the transfers back."""
        ...

    def waits_for(self, transfers: Sequence[Transfer]) -> str:
        """Returns what the transfers are in flight on: a path or the link, for stall accounts."""
        ...

    def wait_part(self, transfers: Sequence[Transfer]) -> bool:
        """Waits for what `waits_for` names, and raises nothing of it.

        Returns:
            False if nothing but the transfers' own `wait` is left.
        """
        ...

    def settle(self) -> None:
        """Waits until no read uses memory of the tier that an update changes."""
        ...

    @property
    def granule_bytes(self) -> int:
        """The smallest part of a subgroup that can be read."""
        ...

    def write_from(self, unit: Unit, source: memoryview) -> None:
        """Writes the whole unit from host memory and waits."""
        ...


class ParameterTier(UnitTier, Protocol):
    """A tier as residency uses it: it fills slots."""

    def can_prefetch(self) -> bool:
        """Returns whether a read that is not needed yet can start without waiting for room."""
        ...

    def start_read(
        self, unit: Unit, into: torch.Tensor, *, is_prefetch: bool, part: range | None = None
    ) -> list[Transfer]:
        """Starts filling the slot `into` with the unit's bytes, or with `part` of them."""
        ...

    def write(self, unit: Unit, source: torch.Tensor) -> None:
        """Writes the whole unit back from its slot and waits."""
        ...


class StoredTier(UnitTier, Protocol):
    """Storage as staging uses it: it fills host memory."""

    def start_read_into(
        self, unit: Unit, into: memoryview, *, is_prefetch: bool, part: range | None = None
    ) -> list[Transfer]:
        """Starts filling host memory with the unit, or `part` of its bytes."""
        ...
