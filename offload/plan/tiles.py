"""Tiles of parameters that no slot holds: how large slots then are, and what a tile has."""

from bisect import bisect_right
from collections.abc import Callable, Sequence

from offload.layout import ModelLayout
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


def choose_wide(
    candidates: Sequence[str], fits: Callable[[frozenset[str]], bool]
) -> frozenset[str]:
    """Returns the parameters to compute in tiles: as few as it takes for the plan to fit.

    None where it fits without, or not even with all.

    Args:
        candidates: Names, the largest first.
        fits: Tells whether the plan fits with these in tiles.
    """
    for count in range(len(candidates) + 1):
        if fits(frozenset(candidates[:count])):
            return frozenset(candidates[:count])
    return frozenset()
