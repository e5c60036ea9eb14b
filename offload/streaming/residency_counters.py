"""What residency counts: accesses, fetches ahead of them, evictions and waits."""

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class ResidencyCounters:
    """Counts since the beginning."""

    accesses: int = 0
    """Accesses to units that had to be fetched."""
    prefetch_hits: int = 0
    """Those whose fetch was complete when asked."""
    prefetches: int = 0
    updated_in_place: int = 0
    """Units that were asked for and came from their update into their slot: nothing was fetched."""
    evictions: int = 0
    io_wait_s: float = 0.0
