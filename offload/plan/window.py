"""The window of updates: how many records are in so many bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from offload.plan.machine_profile import MachineProfile
from offload.sizes import MIB, format_size

WINDOW_BYTES = 64 * MIB
"""Of records that are read, updated and written at one time, unless the queues of the paths hold
more: half of it each way hides the latency of any drive, and more only lengthens the ramps."""
LEAST_BUFFERS = 4
"""Records with which reading, the pass and writing go on at the same time: with three one of them
waits for another now and then (simulated, two paths)."""
HITS_TO_BUFFERS = 3
"""Records in the window for each that has a buffer for its state, where memory keeps some: these
bring their own."""
LEFT_FOR_READS = 3
"""One place in so many is left for records that have to be read, at most: of orders that begin with
what is in memory, simulated on full duplex paths, a third was best or next to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowCut:
    """How a window of some bytes is cut for records of one size."""

    num_buffers: int
    """Records whose state has a buffer."""
    num_places: int
    """Records in the window at one time, each with a buffer for what lies beside its state."""
    num_bytes: int
    """Of all buffers."""


def cut_window(
    window_bytes: int, *, state_bytes: int, beside_bytes: int, num_records: int
) -> WindowCut:
    """Returns how many records a window of `window_bytes` holds, at least one.

    Args:
        window_bytes: Of the window.
        state_bytes: Of the largest record's state, where it lives on storage.
        beside_bytes: Of its parameters and gradients there.
        num_records: Of the model: more are never in the window.
    """
    if not state_bytes + beside_bytes or not num_records:
        return WindowCut(num_buffers=0, num_places=0, num_bytes=0)
    count = max(min(window_bytes // (state_bytes + beside_bytes), num_records), 1)
    num_bytes = (state_bytes + beside_bytes) * count
    return WindowCut(num_buffers=count, num_places=count, num_bytes=num_bytes)


def cut_window_beside_cache(
    window_bytes: int,
    *,
    free_bytes: int,
    state_bytes: int,
    beside_bytes: int,
    num_records: int,
    most_buffers: int | None = None,
) -> WindowCut:
    """Returns as `cut_window` how records are cut where memory keeps some of them.

    Args:
        window_bytes: Of the window, at most.
        free_bytes: Of window and cache: a quarter is enough for the window if that holds
            `LEAST_BUFFERS`, as a record in the cache saves more than one more in flight.
        state_bytes: As of `cut_window`, not 0.
        beside_bytes: As of `cut_window`.
        num_records: As of `cut_window`.
        most_buffers: Fewer than there is room for.
    """
    each = state_bytes + HITS_TO_BUFFERS * beside_bytes
    num_bytes = min(max(free_bytes // 4, LEAST_BUFFERS * each), window_bytes, free_bytes)
    plain = num_bytes // (state_bytes + beside_bytes)
    buffers = max(min(max(num_bytes // each, min(plain, 2)), num_records), 1)
    buffers = min(buffers, most_buffers or buffers)
    places = HITS_TO_BUFFERS * buffers
    if beside_bytes:
        places = min(places, (num_bytes - buffers * state_bytes) // beside_bytes)
    places = max(min(places, num_records), buffers)
    return WindowCut(
        num_buffers=buffers,
        num_places=places,
        num_bytes=state_bytes * buffers + beside_bytes * places,
    )


def num_at_once(num_buffers: int, num_places: int, num_cached: int, num_records: int) -> int:
    """Returns how many records are in a window at one time: those that memory keeps bring buffers.

    Args:
        num_buffers: Of the window.
        num_places: Of the window.
        num_cached: Records whose state memory keeps.
        num_records: Of the model.
    """
    missed = num_records - num_cached
    return min(num_buffers * num_records // missed, num_places) if missed > 0 else num_places


def is_left_for_reads(num_places_free: int, num_places: int, num_buffers_free: int) -> bool:
    """Whether the places that are left are for records that have to be read.

    Those in memory would take all places until they are written, and nothing would be read. No
    more places are left than there are buffers to read into: the others would stay empty.
    """
    return num_places_free <= min(num_places // LEFT_FOR_READS, num_buffers_free)


def window_bytes_for(
    asked: int | None, directories: Sequence[Path], profile: MachineProfile
) -> int:
    """Returns the bytes of the window: what is asked for, or what the paths' queues need.

    Args:
        asked: `tiers.host.window`.
        directories: Of the store, one on each path.
        profile: Of the machine.
    """
    if asked is not None:
        return asked
    measured = [profile.find(directory) for directory in directories]
    queues = sum(2 * path.queue_depth * path.block_bytes for path in measured if path is not None)
    return max(WINDOW_BYTES, queues)


def too_small_window(asked: int | None, record_bytes: int) -> str | None:
    """Returns what a run must know of a window that does not hold one record; None: it does.

    Args:
        asked: `tiers.host.window`.
        record_bytes: What one record takes of the window.
    """
    if asked is None or asked >= record_bytes:
        return None
    return (
        f"`tiers.host.window` of {format_size(asked)} is too small for a record: one takes "
        f"{format_size(record_bytes)}, and the window holds one all the same, so that nothing is "
        "read or written while it is updated; raise it to four records or leave it out"
    )
