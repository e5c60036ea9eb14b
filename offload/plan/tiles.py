"""Tiles of parameters that no slot holds: how large slots then are, and what a tile has."""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from offload.layout import ModelLayout, Unit
from offload.sizes import MIB, round_up

EDGE_BYTES = MIB
"""A read begins and ends at a block of storage: at most so much on each side is not the tile's."""
LEAST_SLOT_BYTES = 4 * MIB
"""Of a model with tiles: two blocks of edges, and as much again for rows."""
LARGEST_ROW_BYTES = LEAST_SLOT_BYTES - 2 * EDGE_BYTES


def slot_bytes_of(layout: ModelLayout, tiled: frozenset[str] = frozenset()) -> int:
    """Returns the bytes of a slot for every unit but those named in `tiled`, and for their tiles.

    A slot holds each subgroup, through which a wide parameter is written.
    """
    whole = max((unit.num_bytes for unit in layout.units if unit.name not in tiled), default=0)
    if not tiled:
        return whole
    subgroups = (s.padded_parameter_bytes for each in layout.subgroups.values() for s in each)
    return max(whole, LEAST_SLOT_BYTES, *subgroups)


def tile_rows(slot_bytes: int, row_bytes: int) -> int:
    """Returns the rows of a tile, at least 1, that fit a slot wherever they begin."""
    return max((slot_bytes - 2 * EDGE_BYTES) // row_bytes, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pieces:
    """A weight that no slot holds, and the largest piece of it that is in one.

    Attributes:
        parameter: Its name.
        num_bytes: Of all of it.
        tile_bytes: Of the rows of a tile.
        num_tiles: That a whole pass over it takes.
    """

    parameter: str
    num_bytes: int
    tile_bytes: int
    num_tiles: int

    @staticmethod
    def of(unit: Unit, slot_bytes: int) -> "Pieces":
        """Returns the pieces of a unit of one matrix."""
        facts = next(unit.parameters()).facts
        row_bytes = facts.num_bytes // facts.shape[0]
        rows = min(tile_rows(slot_bytes, row_bytes), facts.shape[0])
        return Pieces(
            parameter=facts.name,
            num_bytes=facts.num_bytes,
            tile_bytes=rows * row_bytes,
            num_tiles=-(-facts.shape[0] // rows),
        )

    def to_json(self) -> dict[str, str | int]:
        """Returns the fields by name."""
        return asdict(self)


def covering(wanted: range, *, starts: Sequence[int], granule_bytes: int, num_bytes: int) -> range:
    """Returns the bytes of a unit to read for some of them: whole granules of its subgroups.

    Args:
        wanted: Bytes, at least one.
        starts: First bytes of the unit's subgroups.
        granule_bytes: The smallest part of a subgroup that can be read.
        num_bytes: Of the whole unit, padded.
    """
    first = starts[bisect_right(starts, wanted.start) - 1]
    last_index = bisect_right(starts, wanted.stop - 1) - 1
    last = starts[last_index]
    end = starts[last_index + 1] if last_index + 1 < len(starts) else num_bytes
    start = first + (wanted.start - first) // granule_bytes * granule_bytes
    return range(start, min(last + round_up(wanted.stop - last, granule_bytes), end))


class Plan(Protocol):
    """How the budget of one tier is cut."""

    @property
    def fits(self) -> bool: ...

    @property
    def smallest_bytes(self) -> int: ...


def choose_wide(
    candidates: Sequence[str], plan: Callable[[frozenset[str]], Sequence[Plan]]
) -> frozenset[str]:
    """Returns the parameters to compute in pieces: as few as it takes for the plans to fit.

    None where they fit without. Where they never fit, those with which the least would do.

    Args:
        candidates: Names, the largest first.
        plan: Returns the plans of all tiers with these in pieces.
    """
    least_bytes, best = None, frozenset[str]()
    for count in range(len(candidates) + 1):
        names = frozenset(candidates[:count])
        plans = plan(names)
        if all(each.fits for each in plans):
            return names
        smallest_bytes = sum(each.smallest_bytes for each in plans)
        if least_bytes is None or smallest_bytes < least_bytes:
            least_bytes, best = smallest_bytes, names
    return best
