"""The counters of a session."""

from dataclasses import dataclass, field

from offload.storage.stalls import Stall, summed
from offload.storage.store import BlockStore
from offload.storage.store_stats import PathStats
from offload.streaming.counters import MovedBytes
from offload.streaming.models import Models


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStats:
    """Counters since the session was opened."""

    read_bytes: int = 0
    """Of records, from storage, padding included; without those that digests read."""
    write_bytes: int = 0
    """Of records, to storage, padding included; without those that commits wrote."""
    commit_bytes: int = 0
    """Manifests, and records that were written because of a commit."""
    cache_hit_bytes: int = 0
    io_wait_s: float = 0.0
    update_s: float = 0.0
    """In calls of `step`."""
    update_wait_s: float = 0.0
    """For which passes waited for updates that run under them."""
    update_io_wait_s: float = 0.0
    """The part of it in which those waited for storage."""
    update_read_bytes: int = 0
    """The part of `read_bytes` that updates read."""
    ahead_read_bytes: int = 0
    """The part of `read_bytes` of units that were fetched ahead and are still to be used."""
    moved_by_steps: MovedBytes = field(default_factory=MovedBytes)
    """The counters of when no update was pending last, without what was read ahead and is still to
    be used: differences are of whole steps."""
    stalls: tuple[Stall, ...] = ()
    """What the caller's thread waited for, longest first."""
    accesses: int = 0
    """Of passes to units that had to be fetched."""
    updated_in_place: int = 0
    """Of passes to units that came from their update straight into their slot: none was fetched."""
    prefetch_hits: int = 0
    prefetch_misses: int = 0
    host_peak_bytes: int = 0
    device_peak_bytes: int | None = None
    link_in_bytes: int | None = None
    """That the engine copied to the device; None where it computes in host memory."""
    link_out_bytes: int | None = None
    """The same from the device. Operations on `p.grad` there move its bytes both ways, uncounted:
    adding a later micro-step's gradient is one."""
    activation_offload_bytes: int = 0
    """Of saved activations that were moved to host memory or storage."""
    activation_kept_bytes: int = 0
    """Of those that should have been, and stayed for lack of room."""
    activation_hits: int = 0
    """Times that a moved one was there when backward asked for it."""
    activation_misses: int = 0
    activation_offload_peak_bytes: int = 0
    """Most bytes of activations away at one time."""
    registered_bytes: int = 0
    """Of slots and windows that the kernel was told of beforehand, so that it does not look their
    pages up at each transfer; 0 where no path uses io_uring or RLIMIT_MEMLOCK does not allow it."""
    completed_steps: int = 0
    committed_step: int | None = None
    paths: tuple[PathStats, ...] = ()
    """Of each path of the store."""


def count(
    models: Models,
    store: BlockStore | None,
    *,
    registered_bytes: int,
    committed_step: int | None,
) -> SessionStats:
    """Returns the counters of the models and their store."""
    wrapped = models.main
    if wrapped is None:
        return SessionStats(committed_step=committed_step)
    io = store.stats() if store is not None else None
    counters = [m.residency.counters for m in models.all() if m.residency is not None]
    accesses = sum(each.accesses for each in counters)
    hits = sum(each.prefetch_hits for each in counters)
    moved = wrapped.counters.moved()
    activations = wrapped.counters.activations
    return SessionStats(
        read_bytes=moved.read_bytes,
        write_bytes=moved.write_bytes,
        commit_bytes=io.commit_bytes + sum(m.counters.commit_record_bytes for m in models.all())
        if io
        else 0,
        cache_hit_bytes=moved.cache_hit_bytes,
        moved_by_steps=wrapped.counters.moved_by_steps(),
        io_wait_s=sum(m.counters.io_wait_s for m in models.all()),
        update_s=wrapped.counters.update_s,
        update_wait_s=wrapped.counters.update_wait_s[0],
        update_io_wait_s=wrapped.counters.update_wait_s[1],
        update_read_bytes=wrapped.counters.update_read_bytes,
        ahead_read_bytes=sum(m.counters.ahead_read_bytes for m in models.all()),
        stalls=summed(m.counters.stalls for m in models.all()),
        accesses=accesses,
        updated_in_place=sum(each.updated_in_place for each in counters),
        prefetch_hits=hits,
        prefetch_misses=accesses - hits,
        registered_bytes=registered_bytes,
        host_peak_bytes=models.host_budget.peak_bytes,
        device_peak_bytes=None if wrapped.device.is_unified else models.device_budget.peak_bytes,
        link_in_bytes=None if wrapped.device.is_unified else wrapped.device.copied_in_bytes,
        link_out_bytes=None if wrapped.device.is_unified else wrapped.device.copied_out_bytes,
        activation_offload_bytes=activations.offload_bytes,
        activation_kept_bytes=activations.kept_bytes,
        activation_hits=activations.hits,
        activation_misses=activations.misses,
        activation_offload_peak_bytes=activations.peak_bytes,
        completed_steps=wrapped.completed_steps,
        committed_step=committed_step,
        paths=io.paths if io else (),
    )
